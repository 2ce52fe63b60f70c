"""Counts of a Messages caller who must not learn which part of a prompt was cached."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from backends.interface import Failure, FailureKind
from backends.translation.masked_messages import MASKED_MESSAGES
from tests.backends.translation.test_translated_streams import whole_message
from tests.support.dialect_strategies import Json, answers, message_events, named_sse


@settings(max_examples=100, deadline=None)
@given(answers(), st.integers(1, 40))
def test_the_input_is_the_whole_prompt(answer: Json, step: int) -> None:
    """All else is untouched, streamed and whole."""
    usage = answer["usage"]
    cached = usage.get("cache_read_input_tokens", 0) + usage.get("cache_creation_input_tokens", 0)
    expected = {**answer, "usage": {**usage, "input_tokens": usage["input_tokens"] + cached}}
    assert MASKED_MESSAGES.reply(answer, {}) == expected
    stream, masker = b"".join(named_sse(message_events(answer))), MASKED_MESSAGES.stream({})
    written = b"".join(masker.feed(stream[at : at + step]) for at in range(0, len(stream), step)) + masker.close()
    pings = b'event: ping\ndata: {"type":"ping"}\n\n'
    assert pings in written
    assert whole_message(written.replace(pings, b"")) == expected


def test_other_events_pass_as_they_are() -> None:
    """Strange counts too, and what is no JSON: the tap has judged it."""
    for event in (b'event: x\ndata: {"usage":7}\n\n', b"data: usage\n\n", b'data: {"usage":{"output_tokens":1}}\n\n'):
        assert MASKED_MESSAGES.stream({}).feed(event) == event
    event = b'event: content_block_delta\ndata: {"spaced":  1}\n\n'
    assert MASKED_MESSAGES.stream({}).feed(event) == event


def test_an_error_has_anthropics_shape() -> None:
    event = MASKED_MESSAGES.stream({}).error(Failure(FailureKind.OVERLOADED, "Full.", 503))
    assert event.startswith(b"event: error\ndata: ")
    assert b'"overloaded_error"' in event
