"""Decides when a committed stream is left.

Rules:
- A stream without a byte for `idle` is left, and so is a stream past the limit of time for the whole answer.
- Where others may write the rest, it is left as soon as they say (`AttemptFacts.patience`).
- A caller that does not read stops the reading from the server: that is no silence.
- An answer that has ended on an open connection is complete. A caller that leaves after the last event of its answer
  has a complete answer, whoever closes first.
"""

from __future__ import annotations

from policies.attempts.attempt_events import AttemptLimits, Cancel, Leave, Leaving, Progress
from policies.types import AttemptOutcome, Candidate

SOON = 0.05  # s, the least time between two looks


def idle_of(limits: AttemptLimits, own: Candidate) -> float:
    """Seconds without a byte after which a stream of this endpoint is left in any case."""
    return limits.idle if own.endpoint.stream_idle is None else own.endpoint.stream_idle


def look(limits: AttemptLimits, allowed: float, progress: Progress, now: float) -> Leaving | float:
    """Reason to leave the stream now, or the time of the next look. `allowed`: s without a byte."""
    quiet = now - progress.heard_at
    if now >= limits.limit_at and not progress.complete:
        return Leaving.LATE
    if progress.paused or quiet < allowed:
        return min(now + max(allowed - quiet, SOON), limits.limit_at if now < limits.limit_at else now + SOON)
    return Leaving.COMPLETE if progress.complete else Leaving.SILENT


def without_caller(number: int, progress: Progress) -> Leave | Cancel:
    """The end of the stream of an attempt whose caller has left."""
    if progress.relayed and not progress.paused:
        return Leave(number, Leaving.READ)
    return Cancel(number, AttemptOutcome.CANCELLED)
