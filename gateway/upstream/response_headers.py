"""Header lines of an answer: by allow-list from the backend, and those of the gateway's own contract."""

from __future__ import annotations

from collections.abc import Mapping
from time import monotonic

from gateway.admission.quotas import quota_headers
from gateway.observe.metrics.loop_lag import STALL
from gateway.observe.record import STAGE_NAMES
from gateway.observe.timeline import RequestTimeline

# A backend may tell a caller nothing else besides the body: no key, cookie, server name or rate limit.
ALLOWED = ("content-type", "content-encoding")


def response_headers(backend: Mapping[str, str], timeline: RequestTimeline, *, streams: bool) -> list[str]:
    """Header lines of an answer that is about to be written. `backend`: the headers of the backend's reply."""
    lines = [f"{name}: {backend[name]}" for name in ALLOWED if name in backend]
    if streams:
        lines += ["cache-control: no-cache", "x-accel-buffering: no"]
    return lines + gateway_headers(timeline, monotonic(), won=1)


def gateway_headers(timeline: RequestTimeline, now: float, won: int = 0) -> list[str]:
    """Header lines about the request up to `now`. `won`: attempts besides the lost ones of the Record."""
    record = timeline.record
    lines = [
        f"x-request-id: {record.request_id}",
        f"x-firsttoken-route: {record.route}",
        f"x-firsttoken-pool: {record.pool}",
        f"x-firsttoken-model: {record.model}",
        f"x-firsttoken-attempts: {len(record.attempts) + won}",
        f"x-firsttoken-ttft-ms: {(now - record.arrival) * 1e3:.2f}",
    ]
    if record.ttft_budget is not None:
        lines.append(f"x-firsttoken-ttft-budget-ms: {record.ttft_budget * 1e3:.0f}")
    if record.ttft_predicted_p50 is not None:
        lines.append(f"x-firsttoken-ttft-predicted-ms: {record.ttft_predicted_p50 * 1e3:.1f}")
    if record.quota is not None:
        lines += quota_headers(record.quota)
    lines.append(server_timing(timeline, now))
    return lines


def server_timing(timeline: RequestTimeline, now: float) -> str:
    """W3C Server-Timing: milliseconds of each closed stage; `relay` is the time since the last one.

    `loop_lag` is part of other stages, and is given where the event loop has stalled.
    """
    spent = timeline.record.spent
    timing = [f"{name};dur={s * 1e3:.2f}" for name, s in zip(STAGE_NAMES, spent, strict=True) if s is not None]
    timing.append(f"relay;dur={max(now - timeline.mark, 0.0) * 1e3:.2f}")
    lag = timeline.stalled(now)
    if lag >= STALL:
        timing.append(f"loop_lag;dur={lag * 1e3:.2f}")
    return "server-timing: " + ", ".join(timing)
