"""Masking of cached-token counts and of the backend key in answers; all other bytes are unchanged."""

from __future__ import annotations

import json
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.stream.redaction import ERROR_LIMIT, CachedCountMasker, Rewriter, SecretMasker, mask_error_body
from backends.stream.sse import UsageStripper, WholeEvents
from tests.support.builders import DONE, FINISH, TOKEN, USAGE

SAYING_ALL = {
    "usage": {
        "prompt_tokens": 2048,
        "completion_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 1920, "audio_tokens": 3},
        "prompt_cache_hit_tokens": 1920,
        "prompt_cache_miss_tokens": 128,
        "cache_read_input_tokens": 11,
        "cache_discount": -1.5e-3,
        "cachedContentTokenCount": 12,
    },
    "choices": [{"message": {"content": 'say "cached_tokens": 5, or {"cache": 6}', "role": "assistant"}}],
}


def read(masker: Rewriter, *reads: bytes) -> bytes:
    return b"".join(map(masker.feed, reads)) + masker.close()


@pytest.mark.parametrize("indent", [None, 2])
def test_cached_counts_are_zeroed_in_place(indent: int | None) -> None:
    """The length is unchanged, for content-length. Text that looks like a count is unchanged."""
    body = json.dumps(SAYING_ALL, indent=indent).encode()
    hidden = read(CachedCountMasker(), body)
    assert len(hidden) == len(body)
    answer, usage = json.loads(hidden), json.loads(hidden)["usage"]
    assert answer["choices"] == SAYING_ALL["choices"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (2048, 7)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0, "audio_tokens": 3}
    assert [usage[name] for name in usage if "cache" in name] == [0] * 5


@given(st.lists(st.integers(0, 400), max_size=6))
def test_masking_is_the_same_at_any_split(cuts: list[int]) -> None:
    """A count may be split over two reads, and a field name over three."""
    body = json.dumps(SAYING_ALL).encode()
    places = sorted({0, len(body), *(cut % len(body) for cut in cuts)})
    reads = [body[start:end] for start, end in pairwise(places)]
    assert read(CachedCountMasker(), *reads) == read(CachedCountMasker(), body)


NAMES = ("usage", "timings", "cached_tokens", "cache_n", "prompt_n", "prompt_cache_hit_tokens", " cache", "tokens", "a")


def members(values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(st.sampled_from(NAMES), values, max_size=4)


NUMBERS = st.integers(-5000, 5000) | st.floats(allow_nan=False, allow_infinity=False)
TEXTS = st.sampled_from(["usage", '"usage":{"cache":1}', "\\", 'a"b', "é", "", "x" * 300])
VALUES = st.recursive(NUMBERS | TEXTS | st.none() | st.booleans(), lambda v: st.lists(v, max_size=3) | members(v))


def hidden(value: Any, section: str = "", masked: bool = False) -> Any:
    """A JSON value with masked counts, by the rule, on decoded values."""
    if isinstance(value, list):
        return [hidden(each, section, masked) for each in value]
    if isinstance(value, dict):
        found = {}
        for name, each in value.items():
            is_count = "cache" in name if section else False
            is_count = is_count or (section == "timings" and name.startswith("prompt_"))
            opens = name if not section and name in ("usage", "timings") and isinstance(each, dict | list) else section
            found[name] = hidden(each, opens, masked or is_count)
        return found
    return 0 if masked and type(value) in (int, float) else value


def spelled(value: Any, draw: Any) -> str:
    """JSON in one of its spellings: blanks, line ends of an event, escapes in names."""

    def gap() -> str:
        return str(draw(st.sampled_from(["", " ", "\t", "\ndata:", "\r\ndata: "])))

    if isinstance(value, dict):
        pairs = (f"{gap()}{name_of(name, draw)}{gap()}:{gap()}{spelled(each, draw)}" for name, each in value.items())
        return f"{{{','.join(pairs)}{gap()}}}"
    if isinstance(value, list):
        return f"[{gap()}{','.join(spelled(each, draw) for each in value)}{gap()}]"
    return json.dumps(value, ensure_ascii=draw(st.booleans()))


def name_of(name: str, draw: Any) -> str:
    return '"' + "".join(f"\\u{ord(c):04x}" if draw(st.booleans()) else c for c in name) + '"'


def decoded(event: bytes) -> Any:
    lines = event.replace(b"\r\n", b"\n").rstrip(b"\n").split(b"\n")
    return json.loads(b"\n".join(line.removeprefix(b"data:") for line in lines))


@settings(max_examples=150)
@given(st.data())
def test_no_spelling_of_a_count_passes_and_nothing_else_is_touched(data: st.DataObject) -> None:
    """With any blanks, escapes, lines and reads: counts are masked, and each byte keeps its place."""
    values = data.draw(st.lists(members(VALUES), min_size=1, max_size=3))
    events = [b"data: " + spelled(value, data.draw).encode() + b"\n\n" for value in values]
    stream = b"".join(events)
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=8))
    masked = read(CachedCountMasker(), *[stream[a:b] for a, b in pairwise(sorted({0, *cuts, len(stream)}))])
    assert len(masked) == len(stream)
    assert all(new == old or new in b"0 " for new, old in zip(masked, stream, strict=True))
    at = 0
    for value, event in zip(values, events, strict=True):
        assert decoded(masked[at : at + len(event)]) == hidden(value)
        at += len(event)


@pytest.mark.parametrize(
    "body",
    [
        {"choices": [{"logprobs": {"top_logprobs": [{" cache": -0.5, "cached": -1.5}]}}]},
        {"choices": [{"message": {"parsed": {"cache": 3}}}], "cached": 7},
        {"usage": {"prompt_tokens": 9, "total_tokens": 12}, "timings": {"predicted_n": 3, "predicted_ms": 4.5}},
        {"usage": None, "choices": [{"logprobs": {" cache": -0.5}}]},
    ],
)
def test_a_number_elsewhere_is_no_count(body: dict[str, Any]) -> None:
    """A token of the answer may be named "cache"; the names of counts mean something in `usage` and `timings` alone."""
    raw = json.dumps(body).encode()
    assert read(CachedCountMasker(), raw) == raw


@pytest.mark.parametrize(
    ("answer", "seen"),
    [
        ({"usage": {"details": {"cached_tokens": 5}}}, {"usage": {"details": {"cached_tokens": 0}}}),
        ({"usage": {"cached_details": {"text": 5, "b": 1}}}, {"usage": {"cached_details": {"text": 0, "b": 0}}}),
        ({"usage": {"cache_read_input_tokens": 5}}, {"usage": {"cache_read_input_tokens": 0}}),
        ({"usage": {"prompt_cache_hit_tokens": 5}}, {"usage": {"prompt_cache_hit_tokens": 0}}),
        ({"usage": {"prompt_cache_miss_tokens": 5}}, {"usage": {"prompt_cache_miss_tokens": 0}}),
        ({"x_groq": {"usage": {"cached_tokens": 5}}}, {"x_groq": {"usage": {"cached_tokens": 0}}}),
        ({"choices": [{"usage": {"cached_tokens": 5}}]}, {"choices": [{"usage": {"cached_tokens": 0}}]}),
        (
            {"timings": {"cache_n": 236, "prompt_n": 1, "prompt_ms": 30.9, "predicted_n": 35}},
            {"timings": {"cache_n": 0, "prompt_n": 0, "prompt_ms": 0, "predicted_n": 35}},
        ),
    ],
)  # fmt: skip
def test_a_count_is_masked_under_the_names_of_each_server(answer: dict[str, Any], seen: dict[str, Any]) -> None:
    """OpenAI, xAI, Anthropic, DeepSeek, Groq, Moonshot; llama.cpp, whose `prompt_n` is what was not cached."""
    assert json.loads(read(CachedCountMasker(), json.dumps(answer).encode())) == seen


def test_whole_events_pass_at_once() -> None:
    """Masking delays no token."""
    masker = CachedCountMasker()
    for event in (TOKEN, FINISH, DONE):
        assert masker.feed(event) == event
    assert masker.close() == b""


def test_masking_works_after_usage_removal() -> None:
    """An unrequested usage event is removed whole, a requested one masked."""
    assert read(CachedCountMasker(UsageStripper()), TOKEN, USAGE + FINISH, DONE) == TOKEN + FINISH + DONE
    torn = USAGE[:100], USAGE[100:] + DONE
    assert read(CachedCountMasker(UsageStripper()), *torn) == DONE
    assert b'"cached_tokens":0}' in read(CachedCountMasker(), *torn)


KEY = b"sk-sk-backend-0123"
QUOTING = b'{"error":{"message":"wrong key sk-sk-sk-backend-0123, or sk-backend"}}'
BEGUN = len(b'{"error":{"')


@given(st.lists(st.integers(BEGUN, len(QUOTING) - 1), max_size=6, unique=True))
def test_the_backend_key_is_masked_at_any_split(cuts: list[int]) -> None:
    """A text that only begins like the key is unchanged."""
    places = [0, *sorted(cuts), len(QUOTING)]
    hidden = read(SecretMasker(KEY), *[QUOTING[start:end] for start, end in pairwise(places)])
    assert hidden == QUOTING.replace(KEY, b"*" * len(KEY))


def test_an_answer_in_one_read_is_not_delayed() -> None:
    """A complete JSON object needs no lookahead."""
    mask = SecretMasker(KEY)
    assert mask.feed(b'{"choices":[]}') == b'{"choices":[]}'
    assert mask.close() == b""


@pytest.mark.parametrize(
    "body",
    [
        QUOTING,
        b' [ {"error": {"message": "wrong key %b"}}]' % KEY,
        b'{"type":"error","error":{"type":"authentication_error","message":"%b"}}' % KEY,
        b'{"error":"%b"}' % KEY,
        b'{"object":"response","output":[],"score":NaN,"error":{"message":"%b"}}' % KEY,
    ],
)
def test_an_error_object_is_masked_in_any_shape(body: bytes) -> None:
    """OpenAI's, Gemini's, Anthropic's, Ollama's, a failed response of Responses."""
    masked = body.replace(KEY, b"*" * len(KEY))
    assert (mask_error_body(body, KEY), read(SecretMasker(KEY), body)) == (masked, masked)


@pytest.mark.parametrize("error", [b"null", b'""', b"{}"])
def test_an_empty_error_member_is_no_error(error: bytes) -> None:
    """Every response of Responses has the member."""
    body = b'{"error":%b,"output":"the key is %b"}' % (error, KEY)
    assert (mask_error_body(body, KEY), read(SecretMasker(KEY), body)) == (body, body)


def test_an_answer_above_the_limit_is_masked_if_it_begins_as_an_error() -> None:
    """A longer answer is never decoded."""
    text = b"x" * ERROR_LIMIT + KEY
    error, good = b'{"error":{"message":"%b"}}' % text, b'{"text":"%b","error":{"message":"m"}}' % text
    assert mask_error_body(error, KEY) == error.replace(KEY, b"*" * len(KEY))
    assert mask_error_body(good, KEY) == good
    assert read(SecretMasker(KEY), good[:-10], good[-10:]) == good


PLACEHOLDERS = ("none", "EMPTY", "test", "token", "x", "ollama", "dummy", "sk-", "sk-none", "choices", '"', "error")
KEYS = (*PLACEHOLDERS, KEY.decode(), "gsk_0123456789abcdef", "completion_tokens", "01234567-89ab-cdef-0123-456789")
WORDS = ("nonetheless", "the latest index", "error", "täglich 猫", '{"error": {"message": "m"}}', "\n", *KEYS)
LINE_ENDS = ("data: %s\n\n", "data:%s\r\n\r\n", "event: message\ndata: %s\n\n")


def good_answer(rng: Random) -> dict[str, Any]:
    """An answer with words, some of them keys, as text, names and values."""
    answer: dict[str, Any] = {"choices": [{"message": {"content": " ".join(rng.choices(WORDS, k=rng.randint(0, 6)))}}]}
    for _ in range(rng.randint(0, 3)):
        answer[rng.choice([word for word in WORDS if word != "error"])] = rng.choice([*WORDS, 7, None, {"error": "e"}])
    if rng.random() < 0.3:
        answer["error"] = rng.choice([None, "", {}])
    return answer


def test_ten_thousand_good_answers_pass_byte_for_byte() -> None:
    """Whole and streamed, with placeholders and keys of any kind in any place."""
    rng = Random(0)
    for _ in range(10_000):
        key, answer = rng.choice(KEYS).encode(), good_answer(rng)
        body = json.dumps(answer, ensure_ascii=rng.random() < 0.5, indent=rng.choice([None, 1])).encode()
        assert mask_error_body(body, key) == body
        assert read(SecretMasker(key), body) == body
        event = (rng.choice(LINE_ENDS) % json.dumps(answer)).encode()
        cut = rng.randint(0, len(event))
        assert read(WholeEvents(), event[:cut], event[cut:]) == event


@pytest.mark.parametrize("word", PLACEHOLDERS[:8])
def test_a_placeholder_is_masked_nowhere(word: str) -> None:
    """Also in an error object."""
    body = json.dumps({"error": {"message": " ".join(WORDS)}}).encode()
    assert (mask_error_body(body, word.encode()), read(SecretMasker(word.encode()), body)) == (body, body)
