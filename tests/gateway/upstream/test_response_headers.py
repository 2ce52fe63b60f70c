"""Headers of an answer: from the backend by allow-list, from the gateway by contract."""

from __future__ import annotations

from time import monotonic

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.downstream.answer_headers import gateway_headers, response_headers, server_timing
from gateway.observe.metrics.loop_lag import STALL, LoopLag
from gateway.observe.record import AttemptRecord, Stage
from gateway.observe.timeline import RequestTimeline
from policies.types import AttemptKind, AttemptOutcome
from tests.support.builders import candidate, decided, record

LOST = AttemptRecord(1, AttemptKind.PRIMARY, "small/b", "small", 0.01, 0.02, AttemptOutcome.FAILED)


def as_dict(lines: list[str]) -> dict[str, str]:
    split = "\r\n".join(lines).split("\r\n")
    assert all(split)
    return {name: value for name, _, value in (line.partition(": ") for line in split)}


def life(**known: object) -> RequestTimeline:
    return RequestTimeline(record(ttft=None, total=0.0, **known))


def test_only_allowed_backend_headers_pass() -> None:
    """Server name, cookies, rate limits and ids describe the gateway's key and fleet, and are removed. A coding is
    removed too: a compressed body is decompressed."""
    backend = {
        "content-type": "text/event-stream",
        "content-encoding": "gzip",
        "server": "uvicorn",
        "set-cookie": "a=b",
        "x-ratelimit-remaining-requests": "3",
        "x-request-id": "theirs",
        "x-firsttoken-route": "forged",
        "location": "http://10.0.0.1/",
        "content-length": "3",
    }
    sent = as_dict(response_headers(backend, life(), streams=True))
    ours = {name for name in sent if name.startswith("x-firsttoken-")} | {"x-request-id", "server-timing"}
    assert set(sent) - ours == {"content-type", "cache-control", "x-accel-buffering"}
    assert (sent["x-request-id"], sent["x-firsttoken-route"]) == ("req-1", "chat")


def test_streams_ask_proxies_not_to_buffer() -> None:
    """Complete answers may be buffered."""
    sent = [as_dict(response_headers({}, life(), streams=streams)) for streams in (True, False)]
    asked = {"cache-control": "no-cache", "x-accel-buffering": "no"}
    assert asked.items() <= sent[0].items()
    assert not asked.keys() & sent[1].keys()


def test_headers_name_the_backend_and_the_prediction() -> None:
    """In milliseconds; the prediction counts from arrival, like the budget."""
    request = life()
    request.decided(decided(candidate(p50=0.2), deadline=100.8, at=100.01))
    sent = as_dict(gateway_headers(request, 100.15, won=1))
    sent.pop("server-timing")
    assert sent == {
        "x-request-id": "req-1",
        "x-firsttoken-route": "chat",
        "x-firsttoken-pool": "small",
        "x-firsttoken-model": "served",
        "x-firsttoken-attempts": "1",
        "x-firsttoken-ttft-budget-ms": "800",
        "x-firsttoken-ttft-predicted-ms": "210.0",
        "x-firsttoken-ttft-ms": "150.00",
    }


def test_unknown_values_have_no_header() -> None:
    """Before the decision there is neither budget nor prediction."""
    sent = as_dict(gateway_headers(life(ttft_budget=None, pool="-"), 100.15))
    assert sent["x-firsttoken-pool"] == "-"
    assert not {"x-firsttoken-ttft-budget-ms", "x-firsttoken-ttft-predicted-ms"} & set(sent)


@pytest.mark.parametrize(("lost", "won", "said"), [(0, 0, "0"), (0, 1, "1"), (2, 0, "2"), (2, 1, "3")])
def test_the_attempts_header_counts_lost_and_won_attempts(lost: int, won: int, said: str) -> None:
    """0 for a refusal before any attempt; an answer counts the winning attempt."""
    request = life(attempts=[LOST] * lost)
    assert as_dict(gateway_headers(request, 100.15, won))["x-firsttoken-attempts"] == said


ORDER = [stage for stage in Stage if stage < Stage.RELAY]


@given(st.lists(st.floats(0, 20), min_size=len(ORDER), max_size=len(ORDER)), st.sets(st.sampled_from(ORDER)))
def test_server_timing_sums_to_the_ttft(times: list[float], left_out: set[Stage]) -> None:
    """Closed stages in order; `relay` is the time since the last stage."""
    request, at = life(), 100.0
    for stage, seconds in zip(ORDER, times, strict=False):
        if stage not in left_out:
            at += seconds
            request.close((stage, at))
    now = at + times[-1]
    name, _, value = server_timing(request, now).partition(": ")
    said = dict(part.split(";dur=") for part in value.split(", "))
    assert name == "server-timing"
    assert [*said] == [stage.name.lower() for stage in ORDER if stage not in left_out] + ["relay"]
    assert sum(map(float, said.values())) == pytest.approx((now - 100.0) * 1e3, abs=0.005 * len(said) + 1e-6)


def test_server_timing_shows_event_loop_lag() -> None:
    """Below the stall threshold, no loop lag is reported."""
    lag = LoopLag()
    request = RequestTimeline(record(ttft=None), lag)
    request.close((Stage.READ, 100.2))
    lag.saw(STALL / 2, 100.1)
    assert server_timing(request, 100.25) == "server-timing: read;dur=200.00, relay;dur=50.00"
    lag.saw(STALL * 2, 100.15)
    assert server_timing(request, 100.25) == "server-timing: read;dur=200.00, relay;dur=50.00, loop_lag;dur=10.00"


def test_a_clock_read_too_early_does_not_make_time_negative() -> None:
    """`now` may have been taken before the last stage was closed."""
    request = life()
    request.close((Stage.READ, 100.2))
    assert server_timing(request, 100.1) == "server-timing: read;dur=200.00, relay;dur=0.00"


def test_the_ttft_header_is_the_time_of_writing() -> None:
    """From arrival, on the clock of all other times."""
    before = monotonic()
    request = RequestTimeline(record(arrival=before))
    sent = as_dict(response_headers({}, request, streams=True))
    assert 0 <= float(sent["x-firsttoken-ttft-ms"]) <= (monotonic() - before) * 1e3 + 0.01
