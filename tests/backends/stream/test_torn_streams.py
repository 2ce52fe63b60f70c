"""The tap of a stream against plain JSON parsing: events of any shape, spacing and escapes, torn into random reads."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from backends.stream.taps import StreamTap

USAGE = {"prompt_tokens": 7, "completion_tokens": 3}
EMOJI = "\N{GRINNING FACE}"
TEXTS = st.sampled_from(["a", "there", "", "é", '"', "\\", "\n", EMOJI]) | st.text(max_size=4).filter(str.isprintable)
SPACINGS = [(",", ":"), (", ", ": "), (" , ", " : ")]
LINES = ["data: %s\n\n"] * 4 + ["data:%s\n\n", "data: %s\r\n\r\n", ": ping\n\ndata: %s\n\n"]


def of_delta(delta: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"id": "c", "choices": [{"index": 0, "delta": delta, "finish_reason": None}], **more}


def shapes(text: str) -> list[dict[str, Any]]:
    """Chunks of several servers, and of odd ones."""
    call = {"index": 0, "function": {"arguments": text}}
    ended = {"index": 0, "delta": {"content": text}, "finish_reason": "stop"}
    return [
        of_delta({"content": text}),
        of_delta({"role": "assistant", "content": text}),
        of_delta({"content": text}, usage=USAGE),
        of_delta({"reasoning_content": text}),
        of_delta({"reasoning": text, "content": ""}),
        of_delta({"reasoning_content": "x", "content": text}),
        of_delta({"content": None, "tool_calls": [call]}),
        of_delta({"tool_calls": [{**call, "id": "call-1", "text": text}]}),
        of_delta({"tool_calls": [call], "content": ""}),
        of_delta({"refusal": text}),
        of_delta({"content": text, "text": "label"}),
        of_delta({}),
        {"choices": [{"index": 0, "text": text, "finish_reason": None}]},
        {"choices": [ended]},
        {"choices": [ended, {**ended, "index": 1}]},
        {"choices": [], "usage": USAGE},
    ]


@st.composite
def streams(draw: st.DrawFn) -> list[bytes]:
    """The reads of a stream of few shapes, as servers write them: a whole event each, or torn anywhere."""
    number = st.sampled_from([*([0] * 8), *range(len(shapes("")))])
    form = st.tuples(number, st.sampled_from(SPACINGS), st.booleans(), st.sampled_from(LINES))
    forms = draw(st.lists(form, min_size=1, max_size=2))
    ends = [0]
    stream = b""
    for shape, spacing, ascii, line in draw(st.lists(st.sampled_from(forms), min_size=1, max_size=14)):
        chunk = shapes(draw(TEXTS))[shape]
        stream += (line % json.dumps(chunk, separators=spacing, ensure_ascii=ascii)).encode()
        ends.append(len(stream))
    torn, in_groups = st.lists(st.integers(0, len(stream)), max_size=8), st.lists(st.sampled_from(ends), max_size=4)
    cuts = draw(st.just(ends) | torn | in_groups | st.tuples(st.just(ends[1]), st.integers(0, len(stream))))
    return [stream[start:end] for start, end in pairwise(sorted({0, *cuts, len(stream)}))]


def visible(event: bytes) -> int:
    """Choices with output, by Python's own parser."""
    data = b"".join(line[5:] for line in event.split(b"\n") if line.startswith(b"data:"))
    return sum(map(has_output, json.loads(data)["choices"] if data else []))


def has_output(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta") or {}
    calls = [call["function"]["arguments"] or call.get("text") for call in delta.get("tool_calls", ())]
    plain = [delta.get(name) for name in ("content", "reasoning", "reasoning_content", "refusal")]
    return any([choice.get("text"), *plain, *calls])


@settings(max_examples=400, deadline=None)
@given(streams())
def test_tokens_and_the_first_of_them_are_those_of_a_parser_in_whatever_reads(reads: list[bytes]) -> None:
    """After each read as many tokens are known as a parser finds in its whole events: none is late, lost or counted
    twice."""
    tap, fed = StreamTap(choices=2), b""
    for read in reads:
        before = tap.tokens
        seen = tap.feed(read)
        assert seen == (tap.tokens > before)
        fed += read
        *whole, rest = fed.replace(b"\r\n", b"\n").split(b"\n\n")
        if not rest.endswith(b"\r"):  # the end of an event in two ways, of which the second is still open
            assert tap.tokens == sum(map(visible, whole))
    tap.close()
    assert tap.tokens == sum(map(visible, fed.replace(b"\r\n", b"\n").split(b"\n\n")))
    assert tap.failure is None
