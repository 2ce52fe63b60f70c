"""Token events in the server's usual form are recognised without decoding."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.stream.taps import DONE, StreamTap

FORM = '{"id":"c","choices":[{"index":0,"delta":{"content":%s},"logprobs":null,"finish_reason":%s}]%s}'


def event(content: object = "hi", reason: str = "null", more: str = "") -> bytes:
    return f"data: {FORM % (json.dumps(content, ensure_ascii=False), reason, more)}\n\n".encode()


def tapped(*events: bytes) -> tuple[list[bool], int, bool, bool]:
    tap = StreamTap()
    signals = [tap.feed(one) for one in events]
    return signals, tap.tokens, tap.ended, tap.failure is not None


ODD = {
    "an empty content": event(""),
    "no content": event(None),
    "a finish reason": event("x", '"stop"'),
    "usage": event("x", more=',"usage":{"prompt_tokens":7,"completion_tokens":2}'),
    "an error": b'data: {"error":{"message":"boom","code":500}}\n\n',
    "its end": b"data: [DONE]\n\n",
    "a comment": b": x\n\n",
    "two events": event("x") + event("y"),
    "an event and usage": event("x") + event("y", more=',"usage":{"prompt_tokens":7}'),
    "half an event": event("x")[:30],
    "a quote in it": event('say "x"'),
    "the form's end in it": event('"},"logprobs":null,"finish_reason":null}]}'),
    "a backslash at its end": event("x\\"),
    "what is no JSON": b'data: {"content":"nonsense\n\n',
}


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_an_event_of_another_form_is_decoded(odd: bytes) -> None:
    """Before and after the usual form is learned."""
    signals, tokens, *ends = tapped(event(), event("there"), odd)
    (signal,), alone, *alone_ends = tapped(odd)
    assert (signals[:2], signals[2]) == ([True] * 2, signal)
    assert (tokens, ends) == (2 + alone, alone_ends)


def test_an_event_after_half_an_event_is_the_rest() -> None:
    """Even in the usual form."""
    tap = StreamTap()
    for data in (event(), b"data: {\n"):
        tap.feed(data)
    before = tap.tokens
    tap.feed(event())
    assert tap.tokens == before


@given(st.lists(st.text(max_size=12), max_size=12))
def test_any_text_is_counted_as_if_each_event_were_decoded(contents: list[str]) -> None:
    """Quotes, backslashes, line ends and empty contents included."""
    events = [event(content) for content in contents]
    signals, tokens, *_ = tapped(*events)
    assert signals == [bool(content) for content in contents]
    assert tokens == sum(map(bool, contents))


def test_the_usual_form_follows_the_server() -> None:
    """The last decoded event sets the form."""
    other = event("x").replace(b'"id":"c"', b'"id":"d"')
    assert tapped(event(), other, other, event())[0] == [True] * 4


COMPLETION = b'data: {"choices": [{"index": 0, "text": "%s", "finish_reason": null}]}\n\n'
SPACED = b'data: {"choices": [{"index": 0, "delta": {"content": "%s"}, "finish_reason": null}]}\n\n'


@pytest.mark.parametrize("form", [COMPLETION, SPACED], ids=["a completion", "with spaces"])
def test_other_servers_forms_are_known_too(form: bytes) -> None:
    """An event of a known form is not decoded; one with an end teaches none."""
    tap = StreamTap()
    assert [tap.feed(form % text) for text in (b"a", b"bc", b"def")] == [True] * 3
    assert (tap.tokens, tap.text_bytes, tap.is_token, tap.ended) == (3, 6, True, False)
    tap.feed((form % b"g").replace(b"null", b'"stop"'))
    tap.feed((form % b"h").replace(b"null", b'"stop"'))
    assert (tap.is_token, tap.ended) == (False, True)


ERROR = b'data: {"error":{"message":"boom","code":500}}\n\n'


@pytest.mark.parametrize("torn", [0, 20])
@pytest.mark.parametrize("end", [ERROR, b'data: {"content":"nonsense\n\n'])
def test_tokens_before_an_error_of_their_read_are_sound(end: bytes, torn: int) -> None:
    """Also after the rest of a torn event."""
    tap, read = StreamTap(), event("b") + event("c") + event("d")
    tap.feed(event("a") + read[:torn])
    tap.feed(read[torn:] + end)
    assert (tap.tokens, tap.spoiled, tap.sound) == (4, True, read)


@given(st.lists(st.text(max_size=3), min_size=1, max_size=8), st.lists(st.integers(0, 1500), max_size=4))
def test_reads_of_any_size_are_counted_alike(contents: list[str], cuts: list[int]) -> None:
    """Tokens, an odd event, tokens, the end: in reads torn anywhere."""
    events = [event(each) for each in contents]
    whole = b"".join([*events, event(None), *events, event("x", '"stop"', ',"usage":{"completion_tokens":9}'), DONE])
    tap, ends = StreamTap(), sorted({*cuts, len(whole)})
    for start, end in zip([0, *ends], ends, strict=False):
        tap.feed(whole[start:end])
    assert tap.tokens == 2 * sum(map(bool, contents)) + 1
    assert (tap.ended, tap.terminated, tap.usage.completion, tap.missing) == (True, True, 9, b"")
