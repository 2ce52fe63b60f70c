"""Header lines of an answer: what a backend may tell a caller, and what the gateway tells about the request."""

from __future__ import annotations

from collections.abc import Mapping
from time import monotonic

from gateway.api.api_error import REASONS
from gateway.downstream.http_request import HttpRequest, date_line
from gateway.observe.metrics.loop_lag import STALL as LOOP_STALL
from gateway.observe.part_notes import LEFT_OUT
from gateway.observe.record import RELAY, STAGE_NAMES, Record
from gateway.observe.timeline import RequestTimeline

STAGE_TIMINGS = tuple(f"{name};dur=%.2f" for name in STAGE_NAMES)  # ms
KNOWN_BEFORE = ("x-request-id", "request-id", "x-firsttoken-route", "x-firsttoken-ttft-budget-ms")
ANTHROPIC = ("messages", "count_tokens")  # operations whose clients read `request-id`


def answer_head(
    http: HttpRequest,
    status: int,
    backend: Mapping[str, str],
    timeline: RequestTimeline,
    length: int | None,
    streams: bool,
    cost_usd: float = 0.0,
    won: int = 1,
) -> bytes:
    """The head of an answer about to be written. `length`: of the body; None: it has chunks, or ends with the
    connection. `cost_usd`: of the answer; 0: not known, or not to be told. `won`: as in `gateway_headers`."""
    headers = response_headers(backend, timeline, streams=streams, won=won)
    if cost_usd:
        headers.append(f"x-firsttoken-cost-usd: {cost_usd:.8f}")
    lines = [f"HTTP/1.1 {status} {REASONS.get(status, 'OK')}", date_line(), *http.lines, *headers]
    if length is not None:
        lines.append(f"content-length: {length}")
    elif http.http11:
        lines.append("transfer-encoding: chunked")
    if not http.keep_alive:
        lines.append("connection: close")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def response_headers(
    backend: Mapping[str, str], timeline: RequestTimeline, *, streams: bool, won: int = 1
) -> list[str]:
    """Header lines of an answer about to be written. `backend`: the headers of the backend's reply, of which a caller
    gets the content type alone: no key, cookie, server name or rate limit."""
    content_type = backend.get("content-type")
    lines = [] if content_type is None else [f"content-type: {content_type}"]
    if streams:
        lines += ["cache-control: no-cache", "x-accel-buffering: no"]
    return lines + gateway_headers(timeline, monotonic(), won)


def gateway_headers(timeline: RequestTimeline, now: float, won: int = 0) -> list[str]:
    """Header lines about the request up to `now`. `won`: attempts besides the lost attempts of the Record."""
    record = timeline.record
    pool = record.attempts[-1].pool if record.attempts and not won else record.endpoint.pool  # or of the error
    lines = [
        f"x-request-id: {record.request_id}",
        f"x-firsttoken-route: {record.route.name}",
        f"x-firsttoken-pool: {timeline.kept_of[0] or pool}",
        f"x-firsttoken-model: {timeline.kept_of[1] or record.answer.model}",
        f"x-firsttoken-attempts: {len(record.attempts) + won}",
        f"x-firsttoken-ttft-ms: {(now - record.arrival) * 1e3:.2f}",
    ]
    if record.budgets.ttft is not None:
        lines.append(f"x-firsttoken-ttft-budget-ms: {record.budgets.ttft * 1e3:.0f}")
    if record.placed.ttft_p50 is not None:
        lines.append(f"x-firsttoken-ttft-predicted-ms: {record.placed.ttft_p50 * 1e3:.1f}")
    if record.placed.max_tokens is not None or record.notes or record.asked.prompt_changes:
        lines += changes_told(record)
    if record.operation in ANTHROPIC:
        lines.append(f"request-id: {record.request_id}")
    lines.append(server_timing(timeline, now))
    return lines


def changes_told(record: Record) -> list[str]:
    """Header lines about what an endpoint was asked for in place of the caller's own words."""
    lines = []
    if record.placed.max_tokens is not None:
        lines.append(f"x-firsttoken-max-tokens: {record.placed.max_tokens}")
    if left_out := LEFT_OUT.of(record):
        lines.append(f"x-firsttoken-left-out: {', '.join(left_out)}")
    if record.asked.prompt_changes:
        lines.append(f"x-firsttoken-repaired: {', '.join(record.asked.prompt_changes)}")
    return lines


def waiting_headers(timeline: RequestTimeline) -> list[str]:
    """The header lines that are known before an endpoint has answered."""
    return [line for line in gateway_headers(timeline, monotonic()) if line.startswith(KNOWN_BEFORE)]


def server_timing(timeline: RequestTimeline, now: float) -> str:
    """W3C Server-Timing: milliseconds of each closed stage; `relay` is the time since the last stage.

    `loop_lag` is part of other stages, and is given where the event loop has stalled.
    """
    mark, spent = timeline.add_up(), timeline.record.spent
    timing = [form % (s * 1e3) for form, s in zip(STAGE_TIMINGS, spent, strict=True) if s is not None]
    timing.append(STAGE_TIMINGS[RELAY] % (max(now - mark, 0.0) * 1e3))
    lag = timeline.stalled(now)
    if lag >= LOOP_STALL:
        timing.append(f"loop_lag;dur={lag * 1e3:.2f}")
    return "server-timing: " + ", ".join(timing)
