"""A request to be placed, the endpoints that can take it now with forecasts, and their order of preference.

Rules:
- A tier that can never take the request (`when`, context window, capabilities) is unfit, whatever its load.
- An endpoint is rejected while it is down, half-open with its trial request, or limited by its provider.
- An endpoint whose cache is being refilled is a candidate only where its pool has no other.
- Every endpoint of every tier is a candidate or rejected with a reason (those of an unfit pool, as one).
- Unknown facts filter nothing: no declared capabilities, no declared context window.
- The fleet view is asked once per tier, for all remaining endpoints.
- A ranking holds every candidate, because failover never asks again, but is computed on demand: mostly the first one
  answers, and sorting and describing all of them costs as much as the rest of the decision.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, overload

from policies.routes.route import Route, Tier
from policies.scorers.scorers import CandidateInput, tie_break
from policies.types import (
    FOREVER,
    NEVER,
    Candidate,
    Endpoint,
    FleetSnapshot,
    Health,
    Load,
    Pool,
    PoolEstimate,
    PromptEstimate,
    Rejection,
    RequestView,
)


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """A request with its route and estimate, and its state while it waits in the gateway."""

    request_key: Hashable  # unique among requests not yet dispatched
    request: RequestView
    estimate: PromptEstimate
    route: Route
    sequence: int  # number of the request: turns round robin and breaks ties
    cache_group: str = ""  # the tenant, for fairness
    deadline: float = field(init=False)  # of the first token; FOREVER without a TTFT budget

    # while queued; written by policies.queue alone
    assigned: Endpoint | None = None
    prefill_s: float = 0.0  # engine time there
    spill_at: float = FOREVER  # last moment at which another tier still makes the deadline
    checked_at: float = NEVER  # last comparison with other tiers
    rate_limited_s: float = 0.0  # s queued because of a provider's rate limit, without the current period
    limited_since: float = FOREVER  # start of the current period; FOREVER: none

    def __post_init__(self) -> None:
        self.deadline = self.request.arrival + self.route.ttft_budget(self.request.ttft_budget)

    def __lt__(self, other: QueuedRequest) -> bool:
        return (self.deadline, self.sequence) < (other.deadline, other.sequence)

    @property
    def output_cap(self) -> int | None:
        """The caller's max_tokens under the route's limit."""
        return self.route.output_cap(self.request.max_tokens)

    def set_rate_limited(self, now: float, limited: bool = False) -> None:
        """Closes the current rate-limited period at `now` and, if `limited`, begins another."""
        if self.limited_since < now:
            self.rate_limited_s += now - self.limited_since
        self.limited_since = now if limited else FOREVER


TierCandidates = list[CandidateInput]  # the usable endpoints of one tier, never empty

_UNKNOWN = Load()
_DOWN = Health.DOWN  # a member is slow to look up in its enumeration
_FEATURES = ("tools", "images", "json_schema")  # of a RequestView; the capabilities have the same names


class FleetView(Protocol):
    """Learned state, read-only to decisions; `policies.fleet.fleet.Fleet` implements it."""

    def candidates(
        self,
        endpoints: Sequence[Endpoint],
        loads: Sequence[Load],
        prompt: PoolEstimate,
        tier: int,
        price: float,
        now: float,
    ) -> list[CandidateInput]:
        """Cache hits and forecasts of a prompt sent at `now` to these endpoints of one pool, in their order."""
        ...


@dataclass(slots=True, eq=False)
class CandidateSet:
    """A request and all inputs of the decision."""

    queued: QueuedRequest
    fleet: FleetSnapshot
    view: FleetView
    now: float
    target: float  # probability of making the TTFT deadline that a tier must offer
    left: float  # of the TTFT budget, s
    max_output: int  # tokens: the caller's or the route's limit; the expected output without one
    expected_output: int  # tokens
    tiers: list[TierCandidates] = field(default_factory=list)
    rejected: list[Rejection] = field(default_factory=list)
    unfit: int = 0  # tiers that can never take this request

    def add_tier(self, number: int, tier: Tier) -> None:
        pool, prompt = self.fleet.pools.get(tier.pool), self.queued.estimate.pools.get(tier.pool)
        if pool is None or prompt is None:
            self._reject(tier.pool, number, "the prompt was not estimated for it")
        elif reason := self._misfit(tier, pool, prompt.tokens):
            self._reject(tier.pool, number, reason)
            self.unfit += 1
        elif (taken := self._tier_of(pool.name)) is not None:
            self._reject(tier.pool, number, f"its pool is looked at in tier {taken + 1}")
        else:
            endpoints, loads = self._usable(number, pool)
            if endpoints:
                price = pool.price.of(prompt.tokens, self.expected_output)
                self.tiers.append(self.view.candidates(endpoints, loads, prompt, number, price, self.now))

    def _reject(self, pool: str, tier: int, reason: str, endpoint: str = "") -> None:
        self.rejected.append(Rejection(pool, endpoint, tier, reason))

    def _tier_of(self, pool: str) -> int | None:
        """The tier with this pool's endpoints: of two tiers with one pool, the first whose `when` holds counts."""
        for candidates in self.tiers:
            if candidates[0].endpoint.pool == pool:
                return candidates[0].tier
        return None

    def _misfit(self, tier: Tier, pool: Pool, tokens: int) -> str | None:
        """Reason why this tier can never take the request."""
        queued, window = self.queued, pool.context_window
        if tier.when is not None and (reason := tier.when.refuses(queued.request, tokens, queued.output_cap)):
            return reason
        if window is not None and tokens + self.max_output > window:
            return f"{tokens} tokens + {self.max_output} output exceed its context window of {window}"
        if pool.capabilities is not None:
            for feature in _FEATURES:
                if getattr(queued.request, feature) and feature not in pool.capabilities:
                    return f"it lacks {feature}"
        return None

    def _usable(self, number: int, pool: Pool) -> tuple[list[Endpoint], list[Load]]:
        endpoints, loads, warming = [], [], False
        for endpoint in pool.endpoints:
            load = self.fleet.loads.get(endpoint.id, _UNKNOWN)
            if load.health is _DOWN:
                self._reject(pool.name, number, "down", endpoint.id)
            elif load.blocked_until > self.now:
                self._reject(
                    pool.name, number, f"rate limited for {load.blocked_until - self.now:.1f} s more", endpoint.id
                )
            else:
                endpoints.append(endpoint)
                loads.append(load)
                warming = warming or load.warming
        return self._without_warming(number, endpoints, loads) if warming else (endpoints, loads)

    def _without_warming(
        self, number: int, endpoints: list[Endpoint], loads: list[Load]
    ) -> tuple[list[Endpoint], list[Load]]:
        """All but those in cache warm-up; all of them where no other is left."""
        ready = [i for i, load in enumerate(loads) if not load.warming]
        if not ready:
            return endpoints, loads
        for endpoint, load in zip(endpoints, loads, strict=True):
            if load.warming:
                self._reject(endpoint.pool, number, "being warmed up: it is given its cache back", endpoint.id)
        return [endpoints[i] for i in ready], [loads[i] for i in ready]


def find_candidates(queued: QueuedRequest, fleet: FleetSnapshot, view: FleetView, now: float) -> CandidateSet:
    """Candidates of all tiers of the route, in their order."""
    expected = queued.estimate.output_tokens
    max_output = queued.output_cap or expected
    found = CandidateSet(
        queued,
        fleet,
        view,
        now,
        target=queued.route.target,
        left=queued.deadline - now,
        max_output=max_output,
        expected_output=min(expected, max_output),
    )
    for number, tier in enumerate(queued.route.tiers):
        found.add_tier(number, tier)
    return found


EAGER = 2  # ranks found one at a time, the destination and its first fallback; the others are sorted together


@dataclass(slots=True)
class RankedInput:
    """A candidate with its score; `reason` has places for p50 (ms) and probability."""

    input: CandidateInput
    score: float
    reason: str


def p50_of(ranked: Sequence[Candidate], at: int) -> float:
    """Median TTFT of the candidate at this rank, s."""
    return ranked.p50(at) if isinstance(ranked, Ranking) else ranked[at].forecast.p50


class Ranking(Sequence[Candidate]):
    """The chosen tier's candidates by score, ties by sequence number; then all others, in the order of `fallbacks`."""

    def __init__(
        self,
        sequence: int,
        left: float,
        tier: Sequence[CandidateInput] = (),
        scores: Sequence[float] = (),
        reason: str = "",
        fallbacks: Callable[[], list[RankedInput]] = list,
        fallback_count: int = 0,
    ) -> None:
        """`left`: s of the TTFT budget; `fallbacks` is called at most once."""
        self._sequence = sequence
        self._left = left
        self._tier = tier
        self._tier_reason = reason
        self._scores = list(scores)  # FOREVER once ranked
        self._fallbacks = fallbacks
        self._size = len(tier) + fallback_count
        self._rows: list[RankedInput] = []
        self._candidates: dict[int, Candidate] = {}

    @classmethod
    def of(cls, rows: list[RankedInput], left: float) -> Ranking:
        """A ranking in this order."""
        return cls(0, left, fallbacks=lambda: rows, fallback_count=len(rows))

    def explained(self) -> list[RankedInput]:
        """All rows, each with its reason for not being first."""
        rows = self._all_rows()
        explained = [RankedInput(row.input, row.score, self._reason(at)) for at, row in enumerate(rows[1:], 1)]
        return [rows[0], *explained]

    def p50(self, at: int) -> float:
        """Median TTFT, s, of the candidate at this rank, without constructing it."""
        return self._row(at).input.forecast.p50

    def _all_rows(self) -> list[RankedInput]:
        rows = self._rows
        if len(rows) < self._size:
            left = [(score, self._tie_break(i), i) for i, score in enumerate(self._scores) if score < FOREVER]
            rows += [RankedInput(self._tier[i], score, self._tier_reason) for score, _, i in sorted(left)]
            rows += self._fallbacks()
        return rows

    def _row(self, at: int) -> RankedInput:
        rows = self._rows
        while len(rows) <= at and len(rows) < min(EAGER, len(self._tier)):
            rows.append(self._next_of_tier())
        return rows[at] if at < len(rows) else self._all_rows()[at]

    def _next_of_tier(self) -> RankedInput:
        scores = self._scores
        least = min(scores)
        at = scores.index(least)
        if scores.count(least) > 1:
            at = min((i for i, score in enumerate(scores) if score == least), key=self._tie_break)
        scores[at] = FOREVER
        return RankedInput(self._tier[at], least, self._tier_reason)

    def _tie_break(self, at: int) -> int:
        return tie_break(self._sequence, self._tier[at].endpoint.id)

    def _reason(self, at: int) -> str:
        """Reason of a row's rank; behind the first of the same tier, the difference between the two."""
        row = self._row(at)
        if not 0 < at < len(self._tier):
            return row.reason
        first = self._row(0)
        if row.score == first.score:
            return f"{row.reason}; as good as the first of its tier, which luck drew"
        more = first.input.hit - row.input.hit
        if (score := f"{row.score:.4g}") == (best := f"{first.score:.4g}") and more > 0:
            return f"{row.reason}; as good as the first of its tier, which holds {more} more tokens of the prompt"
        return f"{row.reason}; score {score}, the first of its tier has {best}"

    def _candidate(self, at: int) -> Candidate:
        row = self._row(at)
        found, forecast = row.input, row.input.forecast
        probability = forecast.probability(self._left)
        return Candidate(
            endpoint=found.endpoint,
            tier=found.tier,
            prompt_tokens=found.prompt.tokens,
            hit=found.hit,
            forecast=forecast,
            probability=probability,
            price=found.price,
            score=row.score,
            reason=self._reason(at) % (forecast.p50 * 1e3, probability),
            load=found.load,
        )

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, at: int) -> Candidate: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Candidate]: ...

    def __getitem__(self, at: int | slice) -> Candidate | Sequence[Candidate]:
        if isinstance(at, slice):
            return tuple(self[i] for i in range(*at.indices(self._size)))
        at = range(self._size)[at]
        if at not in self._candidates:
            self._candidates[at] = self._candidate(at)
        return self._candidates[at]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]  # candidates are compared, not hashed

    def __repr__(self) -> str:
        return repr(tuple(self))
