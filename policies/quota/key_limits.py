"""Limits of a caller's key, and the check of a request against the limits.

Rules:
- A request claims the maximum before running: one request, the tokens, a concurrency slot, the cost. A refused request
  claims nothing.
- The head of a request claims what is known without the body (`HEAD_CLAIM`). The whole claim replaces the head's.
- Of several exceeded limits, the refusal names the limit with the longest wait.
- No wait admits a claim above a whole limit, and the refusal says so.
- `share`: number of processes which enforce the limit independently. Each admits a part, and at least one request; a
  request larger than the part, but not than the limit, is admitted when nothing else counts.

Limits of providers are learned (`policies.fleet.circuit_breaker`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

NANO = 1_000_000_000  # costs are whole billionths of a USD: sums are exact


class QuotaLimit(StrEnum):
    """Values are the `limit` label of firsttoken_quota_refused_total."""

    REQUESTS = "requests"
    TOKENS = "tokens"
    CONCURRENT = "concurrent"
    COST = "cost"


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """Limits of a key, per minute; None: no limit. `cost`: billionths of a USD per calendar month (UTC)."""

    requests: int | None = None
    tokens: int | None = None
    concurrent: int | None = None
    cost: int | None = None

    @property
    def any(self) -> bool:
        return self != KeyLimits()


@dataclass(frozen=True, slots=True)
class Claim:
    """Maximum which a request may use. `cost`: billionths of a USD. `doubt`: tokens more, if the prompt was estimated
    and each of its bytes is a token."""

    tokens: int = 0
    cost: int = 0
    doubt: int = 0


HEAD_CLAIM = Claim(tokens=1)  # no request takes less


@dataclass(frozen=True, slots=True)
class LimitUsage:
    """Requests and tokens of the last minute, running requests, and the cost of the month and of running requests."""

    requests: int = 0
    tokens: int = 0
    running: int = 0
    cost: int = 0


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of a claim. `limit` None: admitted, and counted in `*_left`.

    `wait`: s until the claim is admitted; None: never. `*_reset`: s until no usage counts any more.
    """

    limit: QuotaLimit | None = None
    wait: float | None = None
    requests_left: int = 0
    tokens_left: int = 0
    requests_reset: float = 0.0
    tokens_reset: float = 0.0


@dataclass(frozen=True, slots=True)
class Reservation:
    """An admitted or refused claim. `second`: the counting second, by the clock of the admitting store; 0: not in
    Redis yet. `at`: monotonic s. `lease`: id in Redis. `local`: copy in this process of a reservation in Redis."""

    name: str
    limits: KeyLimits
    claim: Claim
    verdict: Verdict
    second: int
    at: float
    lease: str = ""
    local: Reservation | None = None


def too_large(limits: KeyLimits, claim: Claim) -> bool:
    return limits.tokens is not None and claim.tokens > limits.tokens


def exceeded(limits: KeyLimits, claim: Claim, use: LimitUsage, share: int = 1) -> list[QuotaLimit]:
    """Every limit which refuses the claim."""
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
