"""Decides when a committed stream is abandoned.

Rules:
- A stream is abandoned after `idle` without a byte, and at the time limit of the whole answer.
- If another endpoint can continue the answer, a stream is abandoned after `Wire.patience`.
- A caller that does not read pauses reading from the server: no silence is measured.
- An answer that has ended on an open connection is complete.
"""

from __future__ import annotations

from policies.attempts.wire import AttemptLimits, Progress
from policies.types import Candidate

SOON = 0.05  # s, the least time between two looks


def idle_of(limits: AttemptLimits, own: Candidate) -> float:
    """Seconds without a byte after which a stream of this endpoint is left in any case."""
    return limits.idle if own.endpoint.stream_idle is None else own.endpoint.stream_idle


def is_late(limits: AttemptLimits, progress: Progress, now: float) -> bool:
    return now >= limits.limit_at and not progress.complete


def next_look(limits: AttemptLimits, allowed: float, progress: Progress, now: float) -> float:
    """Time of the next look; `now`: the stream is to be left. `allowed`: s without a byte."""
    quiet = now - progress.heard_at
    if not progress.paused and quiet >= allowed:
        return now
    return min(now + max(allowed - quiet, SOON), limits.limit_at if now < limits.limit_at else now + SOON)
