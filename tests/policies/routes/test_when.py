"""`when`: the conditions under which a tier may be used."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from policies.routes.when import EFFORT, EFFORTS, When
from policies.types import RequestView


def when(**conditions: Any) -> When:
    return When.model_validate(conditions)


def ask(**more: Any) -> RequestView:
    return RequestView(0.0, **more)


@pytest.mark.parametrize(
    ("condition", "holds_for", "fails_for"),
    [
        ("<= 8000", [0, 8000], [8001]),
        ("<8000", [7999], [8000]),
        (">= 2", [2, 3], [1]),
        ("> 2", [3], [2]),
        ("== 3", [3], [2, 4]),
        (3, [3], [2, 4]),
        ("3", [3], [4]),
        ("1000..8000", [1000, 4000, 8000], [999, 8001]),
    ],
)
def test_a_count_is_compared(condition: Any, holds_for: list[int], fails_for: list[int]) -> None:
    """A bare number means equals; both ends of a range belong to it."""
    tested = when(turns=condition)
    assert [n for n in holds_for + fails_for if tested.refuses(ask(user_turns=n), 0) is None] == holds_for


@pytest.mark.parametrize("name", ["prompt_tokens", "output_tokens"])
@pytest.mark.parametrize("bare", [8000, "8000", " 8000 ", 8000.0])
def test_tokens_need_a_comparison(name: str, bare: Any) -> None:
    """Nobody means an exact number of them; the message has what is meant, to be copied."""
    with pytest.raises(ValidationError, match=r"8000(\.0)? needs a comparison; write '<= 8000"):
        when(**{name: bare})
    assert when(**{name: "== 8000"}).refuses(ask(), 8000, 8000) is None


@pytest.mark.parametrize(
    ("condition", "holds_for"),
    [
        ("high", ["high", "8193 tokens"]),
        ("== high", ["high", "8193 tokens"]),
        (">= medium", ["medium", "high", "xhigh", "max", "2049 tokens", "8193 tokens"]),
        ("< low", ["none", "minimal"]),
        (["none", "medium"], ["none", "medium", "2049 tokens"]),
    ],
)
def test_an_effort_of_reasoning_is_compared_in_its_order(condition: Any, holds_for: list[str]) -> None:
    """A budget of thinking tokens counts as the effort that it is translated to. Without an effort none holds."""
    tested, budgets = when(reasoning_effort=condition), ["2048 tokens", "2049 tokens", "8193 tokens"]
    holding = [
        effort
        for effort in ["", *EFFORTS, *budgets]
        if not tested.refuses(ask(members={"reasoning_effort": effort}), 1)
    ]
    assert holding == holds_for


@pytest.mark.parametrize(
    ("condition", "error"),
    [
        ("hihg", "'hihg' is no effort of reasoning; did you mean 'high'?"),
        (">= 3", "'3' is no effort of reasoning; there are none, minimal, low, medium, high, xhigh, max"),
        (["low", "7"], "'7' is no effort of reasoning; there are none"),
        ("low..high", "'low..high' is no effort of reasoning"),
        (["low", 7], "write an effort like high"),
        (["8192 tokens"], "write an effort like high"),
        ([], "write an effort like high, a comparison like '>= medium', or a list"),
        (True, "write an effort like high"),
        ("< none", "'< none' holds for no effort: none is the least, max the most"),
    ],
)
def test_a_wrong_effort_is_an_error_with_the_right_form(condition: Any, error: str) -> None:
    """A misspelt effort must not become a condition that never holds."""
    with pytest.raises(ValidationError, match=re.escape(error)):
        when(reasoning_effort=condition)


@pytest.mark.parametrize("text", ["high", ">= medium", ["low", "high"]])
def test_an_effort_is_written_as_it_was_read(text: Any) -> None:
    """A dumped condition reads as the same one."""
    tested = when(reasoning_effort=text)
    assert json.loads(tested.model_dump_json()) == {"reasoning_effort": text}
    assert When.model_validate(tested.model_dump()) == tested


@pytest.mark.parametrize(
    ("conditions", "request_", "reason"),
    [
        ({"prompt_tokens": "<= 8000"}, {}, "prompt_tokens 9120 is not <= 8000"),
        ({"output_tokens": "<=256"}, {"max_tokens": 300}, "output_tokens 300 is not <= 256"),
        ({"output_tokens": "<= 256"}, {}, "output_tokens is not given, and must be <= 256"),
        ({"turns": 1}, {"user_turns": 4}, "turns 4 is not == 1"),
        ({"priority": "0..5"}, {"priority": -1}, "priority -1 is not 0..5"),
        ({"reasoning_effort": ">= high"}, {}, "reasoning_effort is not given, and must be >= high"),
        (
            {"reasoning_effort": ["low", "high"]},
            {"members": {EFFORT: "max"}},
            "reasoning_effort max is not low or high",
        ),
        ({"reasoning_effort": "low"}, {"members": {EFFORT: "9000 tokens"}}, "reasoning_effort 9000 tokens is not low"),
        ({"tools": False}, {"tools": True}, "tools is true"),
        ({"images": True}, {}, "images is false"),
        ({"json_schema": False}, {"json_schema": True}, "json_schema is true"),
        ({"stream": True}, {}, "stream is false"),
    ],
)
def test_a_refusal_names_the_condition_and_the_value(
    conditions: dict[str, Any], request_: dict[str, Any], reason: str
) -> None:
    """An operator reads in /explain why a tier was not considered."""
    asked = ask(**request_)
    assert when(**conditions).refuses(asked, 9120, asked.max_tokens) == reason


def test_all_conditions_must_hold() -> None:
    """A single false condition refuses."""
    both = when(prompt_tokens="<= 8000", tools=False)
    assert both.refuses(ask(), 100) is None
    assert both.refuses(ask(tools=True), 100) == "tools is true"
    assert both.refuses(ask(), 9000) == "prompt_tokens 9000 is not <= 8000"


def test_no_condition_refuses_nothing() -> None:
    """An empty mapping is no condition."""
    assert when().refuses(ask(), 10**9) is None


@pytest.mark.parametrize(
    ("condition", "value", "reason"),
    [
        ("web", "web", None),
        ("web", "mobile", "header.x-a is not 'web'"),
        ("web", None, "header.x-a is absent"),
        (">= 2", "3", None),
        (">= 2", "1.5", "header.x-a is not >= 2"),
        (">= 2", "many", "header.x-a is not >= 2"),
        (">= 2", "nan", "header.x-a is not >= 2"),
        (2, "2.0", None),
        ("1..3", "2", None),
        ("1..3", None, "header.x-a is absent"),
        (True, "True", None),
        (True, "1", None),
        (True, "no", "header.x-a is not true"),
        (True, None, "header.x-a is not true"),
        (False, None, None),
        (False, "yes", "header.x-a is true"),
    ],
)
def test_a_header_is_compared_as_text_number_or_flag(condition: Any, value: str | None, reason: str | None) -> None:
    """The form of the condition decides; the caller's text is never repeated."""
    headers = {} if value is None else {"x-a": value}
    assert when(**{"header.X-A": condition}).refuses(ask(headers=headers), 0) == reason


def test_headers_names_the_headers_in_conditions() -> None:
    """The gateway collects these headers and no others, in lower case."""
    assert when(**{"header.X-Team": "web", "header.x-tier": 2, "tools": True}).headers() == {"x-team", "x-tier"}
    assert when(tools=True).headers() == set()


@pytest.mark.parametrize(
    ("conditions", "where", "correction"),
    [
        (
            {"prompt_tokens": "8k"},
            ("prompt_tokens",),
            "'8k' is not a comparison; write it like '<= 8000', '1000..8000' or 3",
        ),
        ({"prompt_tokens": "=< 8"}, ("prompt_tokens",), "'=< 8' is not a comparison"),
        ({"prompt_tokens": "9..1"}, ("prompt_tokens",), "9..1 holds for no number; write 1..9"),
        ({"prompt_tokens": None}, ("prompt_tokens",), "write a comparison like '<= 8000', '1000..8000' or 3"),
        ({"turns": True}, ("turns",), "write a comparison like"),
        ({"tools": "some"}, ("tools",), "write true or false"),
        ({"header.x-a": "<= few"}, ("header", "x-a"), "'<= few' is not a comparison"),
        ({"header.x-a": ["web"]}, ("header", "x-a"), "write the text it must equal"),
        ({"header.": "web"}, (), "'header.' names no header; write it like header.x-team"),
        ({"header": {"x-a": "web"}}, (), "name the header: write header.x-team: web"),
        ({"promt_tokens": 3}, ("promt_tokens",), "Extra inputs are not permitted"),
    ],
)
def test_an_invalid_condition_is_refused_with_a_correction(
    conditions: dict[str, Any], where: tuple[str, ...], correction: str
) -> None:
    """A misunderstood condition must not become no condition."""
    with pytest.raises(ValidationError) as refused:
        when(**conditions)
    (error,) = refused.value.errors()
    assert error["loc"] == where
    assert correction in error["msg"]


def test_conditions_are_dumped_as_written() -> None:
    """The output of /config is valid input."""
    written = {"prompt_tokens": "<= 8000", "turns": 1, "tools": False, "header.X-Team": "web", "header.x-n": "1..3"}
    dumped = when(**written).model_dump()
    assert dumped == {
        "prompt_tokens": "<= 8000",
        "turns": "== 1",
        "tools": False,
        "header.x-team": "web",
        "header.x-n": "1..3",
    }
    assert when(**dumped) == when(**written)


def test_editors_know_every_condition() -> None:
    """The JSON Schema has headers as a pattern, refuses other keys, and offers no defaults."""
    schema = When.model_json_schema()
    assert set(schema["properties"]) == {
        "prompt_tokens",
        "output_tokens",
        "turns",
        "priority",
        "reasoning_effort",
        "tools",
        "images",
        "json_schema",
        "stream",
    }
    (pattern,) = schema["patternProperties"]
    assert re.search(pattern, "header.x-team")
    assert not re.search(pattern, "headers.x-team")
    assert schema["additionalProperties"] is False
    assert schema["properties"]["tools"]["type"] == "boolean"
    assert not [name for name, field in schema["properties"].items() if "default" in field]


@given(st.text(alphabet="<>=. 0123456789-k", max_size=12))
def test_editors_accept_the_comparisons_that_validation_accepts(text: str) -> None:
    """The JSON Schema's pattern and the validator agree, except on ranges that run backwards."""
    pattern = When.model_json_schema()["properties"]["turns"]["anyOf"][1]["pattern"]
    try:
        when(turns=text)
        accepted = True
    except ValidationError as error:
        accepted = "holds for no number" in str(error)
    assert accepted == bool(re.search(pattern, text))
