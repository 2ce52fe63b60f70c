"""A request's place in a trace: the caller's where it gives a valid one, otherwise its own."""

from __future__ import annotations

import pytest

from gateway.observe.trace_context import ATTEMPT, SPANS, STAGE, Trace, Tracer, parent, passable

ID, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
GIVEN = f"00-{ID}-{SPAN}-01"

INVALID = {
    "nothing": "",
    "another form": "garbage",
    "capital digits": GIVEN.upper(),
    "version ff": "ff" + GIVEN[2:],
    "no trace": f"00-{'0' * 32}-{SPAN}-01",
    "no span": f"00-{ID}-{'0' * 16}-01",
    "too short": GIVEN[:-1],
    "version 00 with more behind": GIVEN + "-what",
    "more without a dash": GIVEN.replace("00", "cc", 1) + "what",
    "no digits": f"00-{'g' * 32}-{SPAN}-01",
    "digits of another script": f"00-{'٣' * 32}-{SPAN}-01",
}


@pytest.mark.parametrize("header", INVALID.values(), ids=INVALID)
def test_what_is_not_valid_is_as_if_it_were_not_there(header: str) -> None:
    """W3C Trace Context 3.2.2 and 4.3: a new trace begins, and the state is not passed on."""
    assert parent(header) is None
    trace = Tracer(1.0).trace({"traceparent": header, "tracestate": "a=1"})
    assert trace.id not in (ID, "0" * 32)
    assert (trace.parent, trace.state, len(trace.id)) == ("", "", 32)


@pytest.mark.parametrize("header", [GIVEN, GIVEN.replace("00", "cc", 1), GIVEN.replace("00", "cc", 1) + "-what"])
def test_a_valid_one_is_continued(header: str) -> None:
    """Those of versions to come, too: what they begin with is known."""
    trace = Tracer(0.0).trace({"traceparent": header, "tracestate": "vendor=1,other=x"})
    assert (trace.id, trace.parent, trace.sampled, trace.state) == (ID, SPAN, True, "vendor=1,other=x")


def test_the_callers_word_on_sampling_is_kept() -> None:
    """Both ways, whatever the ratio; so is its word that its ids are random, and no other bit."""
    for ratio in (0.0, 1.0):
        for flags, sampled, passed in (
            ("00", False, "00"),
            ("01", True, "01"),
            ("ff", True, "03"),
            ("02", False, "02"),
        ):
            trace = Tracer(ratio).trace({"traceparent": GIVEN[:-2] + flags})
            assert trace.sampled is sampled
            assert trace.sent_by(1).rpartition("-")[2] == passed


def test_an_attempt_is_the_parent_of_what_the_engine_makes() -> None:
    """Each attempt has a span of its own; none has the id of a stage, or of the request."""
    trace = Trace(ID, 2**63, True)
    assert trace.sent_by(1) == f"00-{ID}-8000000000000001-01"
    assert trace.sent_by(2) == f"00-{ID}-8000000000000002-01"
    assert ATTEMPT + 10 < STAGE < STAGE + 32 < SPANS


def test_ids_are_new_each_time_and_never_zero() -> None:
    """Two processes do not draw the same ones."""
    traces = [tracer.trace({}) for tracer in (Tracer(1.0), Tracer(1.0)) for _ in range(500)]
    assert len({trace.id for trace in traces}) == len({trace.span for trace in traces}) == 1000
    assert all(0 < trace.span < 2**64 - SPANS for trace in traces)


def test_a_share_is_decided_by_the_trace_id() -> None:
    """As the SDKs do it: by its lower half, so that whoever sees the id decides alike."""
    tracer = Tracer(0.25)
    traces = [tracer.trace({}) for _ in range(4000)]
    assert all(trace.sampled == (int(trace.id[16:], 16) < 2**62) for trace in traces)
    assert 800 < sum(trace.sampled for trace in traces) < 1200
    assert not any(Tracer(0.0).trace({}).sampled for _ in range(100))
    assert all(Tracer(1.0).trace({}).sampled for _ in range(100))


def test_a_state_that_could_do_harm_is_left_out() -> None:
    """It goes into a header again: visible ASCII, and not without end."""
    assert passable("a=1, b=2") == "a=1, b=2"
    assert [passable(state) for state in ("a=\x01", "a=ü", "a\nb", "a" * 513)] == [""] * 4
