"""Words of refusals that name no member, or another than they seem to: of callers, of hints, of ordinary English."""

from __future__ import annotations

import json
from time import perf_counter
from typing import Any

import msgspec
import pytest
from msgspec import Raw

from backends.body_changes import changed
from backends.lessons.refusal import Reading, RefusalVerdict, read_refusal
from backends.lessons.refused_members import MOST_WORDS_OF

BODY: dict[str, Any] = {
    "model": "m",
    "messages": [{"role": "user", "name": "n", "content": "hi"}],
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "max_tokens": 9,
    "temperature": 0.5,
    "top_p": 0.5,
    "seed": 1,
    "user": "u",
    "stop": "x",
    "thinking": {"type": "enabled"},
    "reasoning_effort": "high",
}


def reading(message: str, param: str | None = None, body: Any = BODY, raw: bytes = b"") -> Reading:
    return read_refusal(json.dumps({"error": {"message": message, "param": param}}).encode(), body, raw)


def lesson(message: str, param: str | None = None, body: Any = BODY) -> str:
    """In words; empty: none."""
    found = reading(message, param, body).lesson
    return "" if found is None else str(found)


# --------------------------------------------------------------------------- ordinary words


@pytest.mark.parametrize(
    "message",
    [
        "'temperature' must be 1, because 'thinking' is on",
        "'temperature' may not be sent when you use 'thinking'",
        "'seed' is of no use 'top_p' is",
        "'seed' is bad and 'stop' too. Do not use 'top_p'",
    ],
)
def test_a_word_that_ends_in_use_is_no_new_name(message: str) -> None:
    assert "sent as" not in lesson(message)


@pytest.mark.parametrize(
    "message",
    [
        "The role of the user is not supported",
        "This model does not support user messages in a row",
        "This name is not allowed",
        "Unexpected argument type in the message",
        "A full stop is not supported",
        "The temperature-x is not supported",
        "x-temperature is not supported",
        "Unknown parameter: 'temperature scale'",
        "Unknown parameter: temperature-scale",
        "Unknown parameter: 'temperature",
        "Unknown parameter: " + "temperature" * 7,
        'Unknown name "top_p temperature": Cannot find field.',
        "Unrecognized request argument supplied: temperature_scale, temperature",
        "You may not use /v1/responses here",
        "because /v1/responses is off",
    ],
)
def test_a_part_of_a_sentence_or_of_a_longer_name_is_no_member(message: str) -> None:
    assert lesson(message) == ""


@pytest.mark.parametrize("param", ["x temperature", "temperature, seed", "temperature is bad", "x'temperature"])
def test_a_place_with_more_than_names_is_no_member(param: str) -> None:
    assert lesson("Unsupported parameter", param) == ""


def test_a_member_that_no_path_leads_to_is_not_taken_for_another() -> None:
    """The caller wrote a dot into the name."""
    body = {**BODY, "x.temperature": 1}
    assert lesson("Unknown parameter: 'x.temperature'", "x.temperature", body) == ""


@pytest.mark.parametrize("name", ["user", "stop"])
def test_a_member_with_an_ordinary_words_name_counts_in_quotes(name: str) -> None:
    assert lesson(f"This model does not support '{name}'") == f"{name} is left out"
    assert lesson(f"Unknown parameter: {name}") == f"{name} is left out"


def test_a_list_ends_with_its_names() -> None:
    words = "Unrecognized request arguments supplied: seed, top_p and stop. temperature is as before"
    assert lesson(words) == "seed is left out, top_p is left out, stop is left out"
    assert lesson("Unrecognized request argument supplied: seed for this user") == "seed is left out"


@pytest.mark.parametrize("rest", [", got 'max'", " but received 'max'", ". 'max' was given", ", and 'max' was found"])
def test_the_value_that_was_sent_is_not_among_those_accepted(rest: str) -> None:
    words = f"reasoning_effort must be one of 'low', 'medium'{rest}"
    if "was found" not in rest:
        assert lesson(words) == "reasoning_effort is one of low, medium"


def test_what_is_not_allowed_is_no_list_of_what_is() -> None:
    found = reading("Parameter temperature is not allowed for this model", "temperature")
    assert (str(found.lesson), found.in_doubt) == ("temperature is left out", False)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e999", "infinity", "9" * 40, "1_0"])
def test_a_word_that_json_has_no_number_for_is_sent_as_no_number(value: str) -> None:
    """It would be null, or no JSON at all."""
    found = reading(f"temperature must be one of {value}")
    assert found.lesson is not None
    assert json.loads(msgspec.json.encode(changed(BODY, found.lesson.changes))).get("temperature", 0) is not None
    assert found.lesson.changes[0].values == ()


# --------------------------------------------------------------------------- another name


@pytest.mark.parametrize(
    ("name", "to"),
    [
        ("seed", "max_tokens"),  # a limit
        ("user", "tools"),
        ("seed", "top_p"),  # which the body has
        ("seed", "top_k"),  # another known member
        ("temperature", "reasoning.effort"),
        ("messages.name", "content"),
        ("seed", "tools.x"),
        ("seed", "a.b.c"),
    ],
)
def test_a_value_is_never_sent_under_the_name_of_something_else(name: str, to: str) -> None:
    found = reading(f"'{name}' is no longer there. Use '{to}' instead.")
    assert (found.verdict, found.member) == (RefusalVerdict.LACKS, name)


@pytest.mark.parametrize(
    ("name", "to"), [("seed", "random_seed"), ("stop", "stop_sequences"), ("user", "user_digest"), ("seed", "other")]
)
def test_a_value_is_sent_under_another_name_of_the_same_and_under_a_new_one(name: str, to: str) -> None:
    assert lesson(f"'{name}' is no longer there. Use '{to}' instead.") == f"{name} is sent as {to}"


# --------------------------------------------------------------------------- words of callers


def test_an_operation_that_the_caller_wrote_teaches_nothing_that_lasts() -> None:
    """JSON has two ways to write a slash."""
    for raw in (b'{"x": "use /v1/responses"}', rb'{"x": "use \/v1\/Responses"}'):
        found = reading("Unknown value 'use /v1/responses'", raw=raw).lesson
        assert found is not None
        assert (found.operation, found.once) == ("/v1/responses", True)


@pytest.mark.parametrize("escaped", [False, True])
def test_words_that_stand_in_the_body_teach_nothing_that_lasts(escaped: bool) -> None:
    """The request is mended all the same: the caller can harm only that."""
    said = "`temperature` is deprecated for this model."
    body = {**BODY, "messages": [{"role": "user", "content": f"Why do I read: {said}"}]}
    raw = json.dumps(body).replace("deprecated", r"d\u0065pr\u0065cated" if escaped else "deprecated").encode()
    quoted, own = reading(said, body=body, raw=raw).lesson, reading(said, raw=json.dumps(BODY).encode()).lesson
    assert quoted is not None
    assert own is not None
    assert (quoted.once, own.once) == (True, False)


def test_a_body_that_is_too_large_to_compare_teaches_nothing_that_lasts() -> None:
    found = reading("`temperature` is deprecated.", raw=b" " * (MOST_WORDS_OF + 1)).lesson
    assert found is not None
    assert found.once


@pytest.mark.parametrize("before", ["x" * 960, ""])
def test_a_list_without_its_end_teaches_nothing_that_lasts(before: str) -> None:
    """A value that a server quotes pushes the rest out of what is read."""
    after = "" if before else "'x', " * 100
    found = reading(f"{before} must be one of {after}'low', 'medium', 'high'" + "." * 80, "reasoning_effort").lesson
    assert found is not None
    assert found.once


# --------------------------------------------------------------------------- the time of a reading

NAMES = [f"c{number}" for number in range(2000)]
LARGE: dict[str, tuple[int, int]] = {"long messages": (4_000, 2_000), "many messages": (200_000, 1)}


@pytest.mark.parametrize("form", LARGE)
@pytest.mark.parametrize(
    "message",
    [
        "Unrecognized request arguments supplied: " + ", ".join(NAMES),
        "Unrecognized request arguments supplied: a, " + ", ".join(NAMES),
        "; ".join(f"messages.{name}: extra inputs are not permitted" for name in NAMES),
        "; ".join(f"unknown field '{name}'" for name in NAMES),
        "; ".join(f"'tools.{name}.b.c' is not supported" for name in NAMES),
    ],
)
def test_a_large_body_and_many_names_are_read_in_bounded_time(form: str, message: str) -> None:
    """Of 8 MB: the messages are opened once, whatever number of names the refusal has."""
    count, size = LARGE[form]
    body = {**BODY, "messages": [{"role": "user", "content": "x" * size, "a": 1}] * count}
    raw = json.dumps(body).encode()
    sent = msgspec.json.decode(raw, type=dict[str, Raw])
    place = {"type": "extra_forbidden", "msg": message[:2000]}
    entries = [{**place, "loc": ["body", "messages", 0, name]} for name in NAMES[:100]]
    refusal = json.dumps({"error": {"message": message}, "detail": entries}).encode()
    began = perf_counter()
    read_refusal(refusal, sent, raw)
    assert perf_counter() - began < 0.5  # 1.9 s and 5.8 s with a walk for each name
