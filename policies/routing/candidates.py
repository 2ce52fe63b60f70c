"""Endpoints that can take a request now, with forecasts; and the reasons against the others.

Rules:
- A tier that can never take the request (`when`, context window, capabilities) is unfit, whatever its load.
- An endpoint is rejected while it is down, half-open with its trial request, or limited by its provider.
- An endpoint whose cache is being refilled is a candidate only where its pool has no other.
- Every endpoint of every tier is a candidate or rejected with a reason (those of an unfit pool, as one).
- Unknown facts filter nothing: no declared capabilities, no declared context window.
- The fleet view is asked once per tier, for all remaining endpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from policies.routes.route import Tier
from policies.routing.queued_request import QueuedRequest
from policies.scorers.scorer import CandidateInput
from policies.types import Endpoint, FleetSnapshot, Health, Load, Pool, PoolEstimate, Rejection

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
