"""Response headers of an answer: by allow-list from the backend, and what the contract promises of ours.

Written for every answer in front of its first token: most of them by one `%`, which costs a third of what a format
string for each does.
"""

from __future__ import annotations

from operator import itemgetter
from time import monotonic
from typing import TYPE_CHECKING

from gateway.admission.quotas import quota_headers
from gateway.observe.loop_lag import STALL
from gateway.observe.record import FAILOVER, RATE_LIMIT, RELAY, STAGE_NAMES, STAGES
from gateway.observe.timeline import RequestTimeline

if TYPE_CHECKING:
    from gateway.upstream.upstream_request import UpstreamRequest

# All that a backend may say to a caller besides the body: no key, cookie, server name or rate limit of ours.
ALLOWED = ("content-type", "content-encoding")
_SSE = ("cache-control: no-cache", "x-accel-buffering: no")
_WHO = (
    "x-request-id: %s\r\nx-firsttoken-route: %s\r\nx-firsttoken-pool: %s\r\nx-firsttoken-model: %s\r\n"
    "x-firsttoken-attempts: %d\r\nx-firsttoken-ttft-ms: %.2f"
)
_DURATIONS = tuple(f"{name};dur=%.2f" for name in STAGE_NAMES)
_USUAL = tuple(stage for stage in STAGES if stage < RELAY and stage not in (RATE_LIMIT, FAILOVER))
_usual_of = itemgetter(*_USUAL)
_USUAL_TIMING = "server-timing: " + ", ".join(_DURATIONS[stage] for stage in (*_USUAL, RELAY))


def response_headers(run: UpstreamRequest, life: RequestTimeline) -> list[str]:
    """Header lines of an answer about to be written; several may be in one string, an end of line between them."""
    headers = run.headers
    lines = [f"{name}: {headers[name]}" for name in ALLOWED if name in headers]
    if run.tap_streams:
        lines += _SSE
    lines += gateway_headers(life, monotonic(), won=1)
    return lines


def gateway_headers(life: RequestTimeline, now: float, won: int = 0) -> list[str]:
    """Who answered and where the time went, up to `now`: the first token's way out.

    `won`: attempts beside those that the Record has as lost.
    """
    record = life.record
    attempts, ttft = len(record.attempts) + won, (now - record.arrival) * 1e3
    lines = [_WHO % (record.request_id, record.route, record.pool, record.model, attempts, ttft)]
    if record.ttft_budget is not None:
        lines.append("x-firsttoken-ttft-budget-ms: %.0f" % (record.ttft_budget * 1e3))
    if record.ttft_predicted_p50 is not None:
        lines.append("x-firsttoken-ttft-predicted-ms: %.1f" % (record.ttft_predicted_p50 * 1e3))
    if record.quota is not None:
        lines += quota_headers(record.quota)
    lines.append(server_timing(life, now))
    return lines


def server_timing(life: RequestTimeline, now: float) -> str:
    """W3C Server-Timing, milliseconds; `relay` is what has passed since the last closed stage. A stall of our loop is
    said where it is one, beside the stages that it was part of."""
    spent, relay, lag = life.record.spent, max(now - life.mark, 0.0), life.stalled(now)
    usual = _usual_of(spent)
    if spent[FAILOVER] is spent[RATE_LIMIT] is None and None not in usual:  # by far the most: one `%`, and no loop
        read, parse, estimate, admit, queue, decide, connect, send, upstream = usual
        line = _USUAL_TIMING % (
            read * 1e3,
            parse * 1e3,
            estimate * 1e3,
            admit * 1e3,
            queue * 1e3,
            decide * 1e3,
            connect * 1e3,
            send * 1e3,
            upstream * 1e3,
            relay * 1e3,
        )
    else:
        closed = [(shown, s) for shown, s in zip(_DURATIONS, spent, strict=True) if s is not None]
        parts = [shown % (s * 1e3) for shown, s in [*closed, (_DURATIONS[RELAY], relay)]]
        line = "server-timing: " + ", ".join(parts)
    return line if lag < STALL else f"{line}, loop_lag;dur={lag * 1e3:.2f}"
