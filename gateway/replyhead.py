"""Response headers of an answer: by allow-list from the backend, and what the contract promises of ours."""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING

from gateway.observe.record import Life, Record, Stage

if TYPE_CHECKING:
    from gateway.run import Run

# All that a backend may say to a caller besides the body: no key, cookie, server name or rate limit of ours.
ALLOWED = ("content-type", "content-encoding")
_SSE = ("cache-control: no-cache", "x-accel-buffering: no")


def response_headers(run: Run, life: Life) -> list[str]:
    """Header lines of an answer about to be written."""
    lines = [f"{name}: {value}" for name in ALLOWED if (value := run.headers.get(name)) is not None]
    if run.tap_streams:
        lines.extend(_SSE)
    lines.extend(gateway_headers(life, monotonic(), won=1))
    return lines


def gateway_headers(life: Life, now: float, won: int = 0) -> list[str]:
    """Who answered and where the time went, up to `now`: the first token's way out.

    `won`: attempts beside those that the Record has as lost.
    """
    record = life.record
    lines = [
        f"x-request-id: {record.request_id}",
        f"x-firsttoken-route: {record.route}",
        f"x-firsttoken-pool: {record.pool}",
        f"x-firsttoken-model: {record.model}",
        f"x-firsttoken-attempts: {len(record.attempts) + won}",
    ]
    if record.ttft_budget is not None:
        lines.append(f"x-firsttoken-ttft-budget-ms: {record.ttft_budget * 1e3:.0f}")
    if record.ttft_predicted_p50 is not None:
        lines.append(f"x-firsttoken-ttft-predicted-ms: {record.ttft_predicted_p50 * 1e3:.1f}")
    lines.append(f"x-firsttoken-ttft-ms: {(now - record.arrival) * 1e3:.2f}")
    lines.append(f"server-timing: {server_timing(record, now)}")
    return lines


def server_timing(record: Record, now: float) -> str:
    """W3C Server-Timing, milliseconds; `relay` is what has passed since the last closed stage."""
    stages = record.stages
    parts = [f"{stage.value};dur={seconds * 1e3:.2f}" for stage, seconds in stages.items()]
    relay = now - record.arrival - sum(stages.values())
    parts.append(f"{Stage.RELAY.value};dur={max(relay, 0.0) * 1e3:.2f}")
    return ", ".join(parts)
