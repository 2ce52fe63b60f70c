"""W3C trace context of a request: continued from the caller if valid, otherwise new."""

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
def test_an_invalid_traceparent_is_ignored(header: str) -> None:
    """W3C Trace Context 3.2.2 and 4.3: a new trace begins, and tracestate is not passed on."""
    assert parent(header) is None
    trace = Tracer(1.0).trace({"traceparent": header, "tracestate": "a=1"})
    assert trace.id not in (ID, "0" * 32)
    assert (trace.parent, trace.state, len(trace.id)) == ("", "", 32)


@pytest.mark.parametrize("header", [GIVEN, GIVEN.replace("00", "cc", 1), GIVEN.replace("00", "cc", 1) + "-what"])
def test_a_valid_traceparent_is_continued(header: str) -> None:
    """Of later versions too, by the known prefix."""
    trace = Tracer(0.0).trace({"traceparent": header, "tracestate": "vendor=1,other=x"})
    assert (trace.id, trace.parent, trace.sampled, trace.state) == (ID, SPAN, True, "vendor=1,other=x")


def test_the_callers_sampled_and_random_flags_are_kept() -> None:
    """At any sampling ratio; other flags are dropped."""
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


def test_an_attempt_span_is_the_parent_of_engine_spans() -> None:
    """Each attempt has its own span id, different from ids of stages and of the request."""
    trace = Trace(ID, 2**63, True)
    assert trace.sent_by(1) == f"00-{ID}-8000000000000001-01"
    assert trace.sent_by(2) == f"00-{ID}-8000000000000002-01"
    assert ATTEMPT + 10 < STAGE < STAGE + 32 < SPANS


def test_trace_ids_are_unique_and_never_zero() -> None:
    """In two processes too."""
    traces = [tracer.trace({}) for tracer in (Tracer(1.0), Tracer(1.0)) for _ in range(500)]
    assert len({trace.id for trace in traces}) == len({trace.span for trace in traces}) == 1000
    assert all(0 < trace.span < 2**64 - SPANS for trace in traces)


def test_sampling_is_decided_by_the_trace_id() -> None:
    """By its lower half, like the OpenTelemetry SDKs, so that all parties decide alike."""
    tracer = Tracer(0.25)
    traces = [tracer.trace({}) for _ in range(4000)]
    assert all(trace.sampled == (int(trace.id[16:], 16) < 2**62) for trace in traces)
    assert 800 < sum(trace.sampled for trace in traces) < 1200
    assert not any(Tracer(0.0).trace({}).sampled for _ in range(100))
    assert all(Tracer(1.0).trace({}).sampled for _ in range(100))


def test_an_unsafe_tracestate_is_dropped() -> None:
    """tracestate is sent in a header again: visible ASCII, of bounded length."""
    assert passable("a=1, b=2") == "a=1, b=2"
    assert [passable(state) for state in ("a=\x01", "a=ü", "a\nb", "a" * 513)] == [""] * 4
