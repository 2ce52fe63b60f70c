"""The chain of filters of a streamed answer."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.stream.cost_writer import CostWriter
from backends.stream.partial_answer import PartialAnswer, TextBudget
from backends.stream.redaction import Rewriter
from backends.stream.sse import UsageStripper, WholeEvents
from backends.stream.taps import StreamTap
from gateway.upstream.answer import Answer, Relay
from gateway.upstream.attempt import WireAttempt
from gateway.upstream.attempt_sinks import AnswerSink
from tests.support.builders import RecordingFleet, wire

TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":9}}\n\n'
FILTERS: dict[str, Callable[[], list[Rewriter]]] = {
    "usage is hidden": lambda: [UsageStripper()],
    "usage is wanted": lambda: [WholeEvents()],
    "the cost is wanted": lambda: [CostWriter(lambda: 0.5)],
    "kept for a rescue": lambda: [PartialAnswer(TextBudget()), UsageStripper()],
}


class Written:
    """A relay that records what is written, and with which framing."""

    def __init__(self) -> None:
        self.data = b""
        self.framed: list[bytes] = []

    def write(self, data: bytes, framed: bytes = b"") -> None:
        self.data += data
        self.framed.append(framed)


def lost(wire: WireAttempt, event: object) -> None:
    raise AssertionError(event)


def joined(filters: list[Rewriter]) -> tuple[AnswerSink, Written]:
    """A committed attempt, whose reads go through the filters."""
    committed, written = wire(RecordingFleet()), Written()
    committed.tap = StreamTap()
    answer = Answer(cast("Any", None), cast("Relay", written), {}, cast("Any", None))
    answer.filter_by(filters, None, committed.tap)
    return AnswerSink(committed, lost, lost, answer), written


def answered(filters: list[Rewriter], reads: list[bytes]) -> Written:
    """The reads as the exchange of a committed attempt gives them."""
    sink, written = joined(filters)
    for data in reads:
        sink.on_body(data, b"framed " + data)
    return written


def filtered(filters: list[Rewriter], reads: list[bytes]) -> bytes:
    """The same by the filters alone."""
    passed = b""
    for data in reads:
        for each in filters:
            data = each.feed(data)
        passed += data
    return passed


@pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS)
@given(
    parts=st.lists(
        st.sampled_from([TOKEN, TOKEN, USAGE, b": ping\n", b"\n", b": ping\n\n", b"\r", b"\r\n"]), max_size=8
    ),
    cuts=st.lists(st.integers(0, 400), max_size=4),
)
def test_a_known_token_is_written_as_if_by_all_filters(
    filters: Callable[[], list[Rewriter]], parts: list[bytes], cuts: list[int]
) -> None:
    """Also between torn events, lone line ends and comments that a filter holds back."""
    whole = [TOKEN, TOKEN, *parts, TOKEN, TOKEN]
    stream = b"".join(whole)
    torn = [stream[start:end] for start, end in pairwise([0, *sorted(cuts), None])]
    for reads in (whole, torn):
        assert answered(filters(), reads).data == filtered(filters(), reads)


def test_a_known_token_keeps_its_framing() -> None:
    """And passes no filter that reads no tokens."""
    assert answered([UsageStripper()], [TOKEN, TOKEN, TOKEN]).framed == 3 * [b"framed " + TOKEN]


def test_a_token_behind_a_rest_is_rewritten() -> None:
    """Though its form is known."""
    sink, written = joined([UsageStripper()])
    for _ in range(2):
        sink.on_body(TOKEN)
    assert sink.wire.tap.is_token

    class Peer(UsageStripper):
        def feed(self, data: bytes) -> bytes:
            return data.replace(b'"a"', b'"b"')

    assert cast("Answer", sink.answer).continue_with(Peer(), b"") is None
    sink.on_body(TOKEN)
    assert written.data == 2 * TOKEN + TOKEN.replace(b'"a"', b'"b"')
