"""Limits of a caller's key, and the check of a request against the limits.

Rules:
- A request claims the maximum before running: one request, the tokens, a concurrency slot, the cost. A refused request
  claims nothing.
- A claim has a usual size, which has to fit, and a largest one: an admitted request holds as much of the largest as is
  left. So requests of unknown size go one after another where the rest is small, and side by side where it is not.
- A refusal has a cause: what is used, what requests in progress hold and may give back, or the size of the request.
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


class RefusalCause(StrEnum):
    """Why a limit refuses a claim."""

    REACHED = "reached"  # used in the last minute, or running: over after a known or usual wait
    HELD = "held"  # requests in progress hold what they may use: free as they end
    SPENT = "spent"  # of this month
    TOO_LARGE = "too_large"  # the claim alone is above the whole limit


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
    """Use of a request, which has to fit into the limits. `cost`: billionths of a USD. `doubt`: tokens more, if the
    prompt was estimated and each of its bytes is a token. `most_tokens`, `most_cost`: what the request may use, held as
    far as there is room; 0: no more."""

    tokens: int = 0
    cost: int = 0
    doubt: int = 0
    most_tokens: int = 0
    most_cost: int = 0


HEAD_CLAIM = Claim(tokens=1)  # no request takes less


@dataclass(frozen=True, slots=True)
class LimitUsage:
    """Requests and tokens of the last minute, `held_tokens` of these by running requests; running requests; the cost of
    the month, and beside it the cost that running requests hold."""

    requests: int = 0
    tokens: int = 0
    held_tokens: int = 0
    running: int = 0
    spent: int = 0
    held_cost: int = 0

    @property
    def cost(self) -> int:
        return self.spent + self.held_cost


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of a claim. `limit` None: admitted, and counted in `*_left`.

    `wait`: s until the claim is admitted; None: never. `*_reset`: s until no usage counts any more. `tokens_held`,
    `cost_held`: what an admitted request holds. `spent`: billionths of a USD of this month.
    """

    limit: QuotaLimit | None = None
    wait: float | None = None
    requests_left: int = 0
    tokens_left: int = 0
    requests_reset: float = 0.0
    tokens_reset: float = 0.0
    cause: RefusalCause = RefusalCause.REACHED  # of a refusal
    tokens_held: int = 0
    cost_held: int = 0
    spent: int = 0


@dataclass(frozen=True, slots=True)
class Reservation:
    """An admitted or refused claim of the key with this account; an admitted claim is what the request holds.

    `second`: the counting second, by the clock of the admitting store; 0: not in Redis yet. `at`: monotonic s. `lease`:
    id in Redis. `local`: copy in this process of a reservation in Redis."""

    account: str
    limits: KeyLimits
    claim: Claim
    verdict: Verdict
    second: int
    at: float
    lease: str = ""
    local: Reservation | None = None


def exceeded(limits: KeyLimits, claim: Claim, use: LimitUsage, share: int = 1) -> list[tuple[QuotaLimit, RefusalCause]]:
    """Every limit which refuses the claim, and why."""
    found = []
    if limits.cost is not None and use.cost + claim.cost > share_of(limits.cost, share):
        found.append((QuotaLimit.COST, _cause_of_cost(limits.cost, claim.cost, use.spent)))
    if limits.concurrent is not None and use.running >= share_of(limits.concurrent, share):
        found.append((QuotaLimit.CONCURRENT, RefusalCause.REACHED))
    if limits.requests is not None and use.requests >= share_of(limits.requests, share):
        found.append((QuotaLimit.REQUESTS, RefusalCause.REACHED))
    if limits.tokens is not None and not _fits(limits.tokens, claim.tokens, use.tokens, share):
        found.append((QuotaLimit.TOKENS, _cause_of_tokens(limits.tokens, claim.tokens, use, share)))
    return found


def _cause_of_cost(limit: int, cost: int, spent: int) -> RefusalCause:
    if spent >= limit:
        return RefusalCause.SPENT
    if cost > limit:
        return RefusalCause.TOO_LARGE
    return RefusalCause.SPENT if spent + cost > limit else RefusalCause.HELD


def _cause_of_tokens(limit: int, tokens: int, use: LimitUsage, share: int) -> RefusalCause:
    if tokens > limit:
        return RefusalCause.TOO_LARGE
    unheld = _fits(limit, tokens, use.tokens - use.held_tokens, share)
    return RefusalCause.HELD if unheld else RefusalCause.REACHED


def _fits(limit: int, tokens: int, used: int, share: int) -> bool:
    if share > 1 and used == 0:
        return tokens <= limit
    return used + tokens <= share_of(limit, share)


def held(limits: KeyLimits, claim: Claim, use: LimitUsage, share: int = 1) -> tuple[int, int]:
    """Tokens and cost that the request holds once it is admitted: the most that it may use, as far as there is room."""
    tokens = _as_far_as(limits.tokens, claim.tokens, claim.most_tokens, use.tokens, share)
    return tokens, _as_far_as(limits.cost, claim.cost, claim.most_cost, use.cost, share)


def _as_far_as(limit: int | None, usual: int, most: int, used: int, share: int) -> int:
    return usual if limit is None else max(usual, min(most, share_of(limit, share) - used))


def share_of(limit: int, share: int) -> int:
    return max(limit // share, 1)
