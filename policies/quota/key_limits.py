"""What a caller's key may use, and whether a request is still within it.

Rules:
- A request claims all that it may need before it runs: itself, its tokens, a place, its cost. What is refused has
  claimed nothing.
- Of several limits that are exceeded the one is named that takes longest to wait for.
- A claim above the whole limit is never let in by waiting, and is told so.
- `share`: of how many that cannot ask each other this is one. Each lets in its part, and one request at least; a
  request that is larger than the part, but not than the limit, when nothing else counts.

Providers' limits, which are learned, are another thing (`policies.fleet.circuit_breaker`).
"""

from __future__ import annotations

from enum import StrEnum

from policies.value import value

NANO = 1_000_000_000  # costs are whole billionths of a USD: they add up exactly


class QuotaLimit(StrEnum):
    """Values are the `limit` label of firsttoken_quota_refused_total."""

    REQUESTS = "requests"
    TOKENS = "tokens"
    CONCURRENT = "concurrent"
    COST = "cost"


@value
class KeyLimits:
    """Of one key; None: none. `cost`: billionths of a USD in a calendar month (UTC)."""

    requests: int | None = None
    tokens: int | None = None
    concurrent: int | None = None
    cost: int | None = None

    @property
    def any(self) -> bool:
        return not (self.requests is None and self.tokens is None and self.concurrent is None and self.cost is None)


@value
class Claim:
    """What a request may need besides a place. `cost`: billionths of a USD."""

    tokens: int = 0
    cost: int = 0


@value
class LimitUsage:
    """What counts now: of the last minute, running, and of this month with what running requests may still cost."""

    requests: int = 0
    tokens: int = 0
    running: int = 0
    cost: int = 0


@value
class Verdict:
    """`limit` None: let in. `wait`: s after which it would be; None: not by waiting. `*_left` counts this one, if it
    was let in; `*_reset`: s until nothing counts any more."""

    limit: QuotaLimit | None = None
    wait: float | None = None
    requests_left: int = 0
    tokens_left: int = 0
    requests_reset: float = 0.0
    tokens_reset: float = 0.0


def too_large(limits: KeyLimits, claim: Claim) -> bool:
    return limits.tokens is not None and claim.tokens > limits.tokens


def exceeded(limits: KeyLimits, claim: Claim, use: LimitUsage, share: int = 1) -> list[QuotaLimit]:
    """Every limit that stands in the way."""
    found = []
    if limits.cost is not None and use.cost + claim.cost > share_of(limits.cost, share):
        found.append(QuotaLimit.COST)
    if limits.concurrent is not None and use.running >= share_of(limits.concurrent, share):
        found.append(QuotaLimit.CONCURRENT)
    if limits.requests is not None and use.requests >= share_of(limits.requests, share):
        found.append(QuotaLimit.REQUESTS)
    if limits.tokens is not None and use.tokens + claim.tokens > share_of(limits.tokens, share):
        alone = share > 1 and use.tokens == 0 and not too_large(limits, claim)
        if not alone:
            found.append(QuotaLimit.TOKENS)
    return found


def share_of(limit: int, share: int) -> int:
    return max(limit // share, 1)
