"""A Record as one short line for people at a terminal.

The time is ISO 8601, of the arrival, in the time zone of the machine. Names and errors come from callers and servers:
all but printable ASCII is escaped, so that no terminal obeys them.
"""

from __future__ import annotations

from datetime import datetime

from gateway.observe.record import STREAM, Record, RequestOutcome


def terminal_line(record: Record) -> bytes:
    """`2026-11-23T18:40:12.345+01:00 200 chat small/a first token 182 ms of 800 ms, 87 tokens in 1.20 s, req_1`."""
    at = datetime.fromtimestamp(record.wall).astimezone().isoformat(timespec="milliseconds")
    head = f"{at} {record.status} {record.route} {record.endpoint if record.endpoint != '-' else record.pool}"
    parts = [*_first_token(record), _rest(record), *_troubles(record), record.request_id]
    return f"{head} {', '.join(parts)}".encode("unicode_escape") + b"\n"


def _first_token(record: Record) -> list[str]:
    if record.promised is None or not record.stream:
        return []
    budget = f" of {_time(record.ttft_budget)}" if record.ttft_budget is not None else ""
    stages = [(spent, stage.name.lower()) for stage, spent in record.stages.items() if stage is not STREAM]
    spent, longest = max(stages, default=(0.0, ""))
    late = f", late by {longest} {_time(spent)}" if record.ttft_met is False else ""
    return [f"first token {_time(record.promised)}{budget}{late}"]


def _rest(record: Record) -> str:
    tokens = "" if record.output_tokens is None else f"{record.output_tokens} tokens in "
    return f"{tokens}{_time(record.total)}"


def _troubles(record: Record) -> list[str]:
    """End of a request that was not completed, and the failures on the way."""
    ended = [] if record.end is RequestOutcome.COMPLETED else [f"{record.end.value}: {record.error}".rstrip(": ")]
    return ended + [f"attempt {one.number} at {one.endpoint}: {one.cause}" for one in record.attempts if one.cause]


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"
