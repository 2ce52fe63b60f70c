"""Rate limits of an endpoint as values that survive a restart.

Rules:
- A value is checked when it is made, by decoding too: ValueError for one that no provider reports. A broken or hostile
  file shuts an endpoint for no longer than a provider can.
- Times are seconds from the save: the clock of a process ends with the process.
- A refusal that one caller alone has met with is saved with its caller's name, and is that caller's after a restart.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf, isfinite

from policies.rate_limit.bucket import BELIEVED, RateLimit
from policies.rate_limit.learned_limit import LearnedLimit

LONGEST = 30 * 86_400.0  # s until a limit is full
MOST = 1e15  # of a limit
MAX_TEXT = 1024  # characters
MAX_BUCKETS, MAX_CALLERS = 16, 64


def _check(name: str, value: float, least: float, most: float) -> None:
    if not (isfinite(value) and least <= value <= most):
        raise ValueError(f"{name} outside of {least:g} to {most:g}")


@dataclass(frozen=True, slots=True)
class SavedRefusal:
    """A provider refuses requests for `left` s more."""

    left: float
    why: str = ""

    def __post_init__(self) -> None:
        _check("time of a refusal", self.left, 0.0, BELIEVED)
        if len(self.why) > MAX_TEXT:
            raise ValueError("reason of a refusal that is too long")


@dataclass(frozen=True, slots=True)
class SavedBucket:
    """`limit` None: unknown; `believed` None: for ever, as a limit of the configuration is, or one that was learned."""

    counts_tokens: bool
    remaining: float
    limit: float | None
    rate: float
    full_in: float
    believed: float | None

    def __post_init__(self) -> None:
        _check("limit", MOST if self.limit is None else self.limit, 0.0, MOST)
        _check("rest of a limit", self.remaining, -MOST, MOST)
        _check("rate of a limit", self.rate, 0.0, MOST)
        _check("time until a limit is full", self.full_in, 0.0, LONGEST)
        _check("time of a report", BELIEVED if self.believed is None else self.believed, 0.0, BELIEVED)

    @classmethod
    def of_learned(cls, found: LearnedLimit, now: float) -> SavedBucket:
        """With the time until the API has room in place of the time until it is full."""
        ready_in = max(found.ready_at - now, 0.0)
        return cls(found.counts_tokens, found.size - found.meter, found.size, found.rate, ready_in, None)

    def learned(self, age: float, now: float) -> LearnedLimit | None:
        """As of a save `age` seconds ago; None for one that was none."""
        if not self.limit or not self.rate:
            return None
        at, meter = now - age, min(max(self.limit - self.remaining, 0.0), 2 * self.limit)
        return LearnedLimit(self.counts_tokens, self.rate, self.limit, meter, at, 1.0, at, at + self.full_in)

    @classmethod
    def of(cls, bucket: RateLimit, now: float) -> SavedBucket:
        refilled = bucket.rate * (now - bucket.at) if isfinite(bucket.at) else inf
        remaining = min(bucket.remaining + refilled, bucket.limit) if bucket.rate else bucket.remaining
        return cls(
            bucket.counts_tokens,
            remaining,
            bucket.limit if isfinite(bucket.limit) else None,
            bucket.rate,
            min(max(bucket.full_at - now, 0.0), LONGEST),
            max(bucket.until - now, 0.0) if isfinite(bucket.until) else None,
        )

    def bucket(self, age: float, now: float) -> RateLimit:
        """As of a save `age` seconds ago."""
        at = now - age
        return RateLimit(
            self.counts_tokens,
            self.remaining,
            inf if self.limit is None else self.limit,
            self.rate,
            at + self.full_in,
            at,
            inf if self.believed is None else at + self.believed,
        )


@dataclass(frozen=True, slots=True)
class SavedLimits:
    """`callers`: refusals that one caller alone has met with, by the caller."""

    refusal: SavedRefusal | None = None
    callers: dict[str, SavedRefusal] = field(default_factory=dict)
    reported: list[SavedBucket] = field(default_factory=list)
    configured: list[SavedBucket] = field(default_factory=list)
    learned: list[SavedBucket] = field(default_factory=list)

    def __post_init__(self) -> None:
        if len(self.callers) > MAX_CALLERS or any(count > MAX_BUCKETS for count in self._counts):
            raise ValueError("more limits than an endpoint has")
        if any(len(caller) > MAX_TEXT for caller in self.callers):
            raise ValueError("name of a caller that is too long")
        if any(bucket.believed is None for bucket in self.reported):
            raise ValueError("report that is believed for ever")

    @property
    def _counts(self) -> tuple[int, ...]:
        return len(self.reported), len(self.configured), len(self.learned)
