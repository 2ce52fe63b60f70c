"""What could take a request now, with what is believed of it; and why the rest cannot.

Rules:
- A tier that can never take the request (`when`, context window, capabilities) is unfit, whatever its load.
- An endpoint is out while it is down, on trial with its one request, or limited by its provider.
- An endpoint that is being given its cache back is taken only where its pool has no other.
- Every endpoint of every tier is in a group or rejected with a reason (those of a pool that is out, as one).
- What is not known filters nothing: no declared capabilities, no declared context window.
- The beliefs are asked once for every tier, about the endpoints that are left.
"""

from __future__ import annotations

from dataclasses import dataclass

from policies.routes.route import Route, Tier
from policies.routing.fleet_view import FleetView
from policies.scorers.scorer import CandidateInput
from policies.types import Endpoint, FleetSnapshot, Health, Load, Pool, PromptEstimate, Rejection, RequestView

TierCandidates = list[CandidateInput]  # the usable endpoints of one tier, never empty

_UNSEEN = Load()
_DOWN = Health.DOWN  # to look a member up in its enumeration takes longer than all else that is asked of an endpoint
_FEATURES = ("tools", "images", "json_schema")  # of an Ask; the capabilities that they need have the same names


@dataclass(slots=True, eq=False)
class CandidateSet:
    """One request and everything that its decision depends on; `survey` fills in what was found."""

    ask: RequestView
    estimate: PromptEstimate
    route: Route
    fleet: FleetSnapshot
    beliefs: FleetView
    now: float
    seed: int
    deadline: float  # of the first token
    target: float  # the chance of making it that a tier must offer
    left: float  # of the budget, s
    output_tokens: int  # the most that the answer may hold; what is expected of it where nobody sets a limit
    expected_tokens: int  # of the answer
    groups: list[TierCandidates]
    rejected: list[Rejection]
    unfit: int = 0  # tiers that can never take this request

    @property
    def budget(self) -> float:
        """All of it, s."""
        return self.deadline - self.ask.arrival

    def add(self, number: int, tier: Tier) -> None:
        pool, prompt = self.fleet.pools.get(tier.pool), self.estimate.pools.get(tier.pool)
        if pool is None or prompt is None:
            self.rejected.append(Rejection(tier.pool, "", number, "the prompt was not estimated for it"))
        elif reason := self._misfit(tier, pool, prompt.tokens):
            self.rejected.append(Rejection(tier.pool, "", number, reason))
            self.unfit += 1
        elif (taken := self._taken(pool.name)) is not None:
            self.rejected.append(Rejection(tier.pool, "", number, f"its pool is looked at in tier {taken + 1}"))
        else:
            endpoints, loads = self._usable(number, pool)
            if endpoints:
                price = pool.price.of(prompt.tokens, self.expected_tokens)
                self.groups.append(self.beliefs.prospects(endpoints, loads, prompt, number, price, self.now))

    def _taken(self, pool: str) -> int | None:
        """The tier that has its endpoints: one pool may have two conditions, and the first that holds counts."""
        for group in self.groups:
            if group[0].endpoint.pool == pool:
                return group[0].tier
        return None

    def _misfit(self, tier: Tier, pool: Pool, tokens: int) -> str | None:
        """Why this tier can never take the request."""
        if tier.when is not None and (reason := tier.when.refuses(self.ask, tokens)):
            return reason
        output, window = self.output_tokens, pool.context_window
        if window is not None and tokens + output > window:
            return f"{tokens} tokens + {output} output exceed its context window of {window}"
        if pool.capabilities is not None:
            for feature in _FEATURES:
                if getattr(self.ask, feature) and feature not in pool.capabilities:
                    return f"it lacks {feature}"
        return None

    def _usable(self, number: int, pool: Pool) -> tuple[list[Endpoint], list[Load]]:
        known, now, endpoints, loads, warming = self.fleet.loads, self.now, [], [], False
        for endpoint in pool.endpoints:
            load = known.get(endpoint.id, _UNSEEN)
            if load.health is _DOWN or load.blocked_until > now:
                self.rejected.append(Rejection(pool.name, endpoint.id, number, _out(load, now)))
                continue
            endpoints.append(endpoint)
            loads.append(load)
            warming = warming or load.warming
        return self._ready(number, endpoints, loads) if warming else (endpoints, loads)

    def _ready(self, number: int, endpoints: list[Endpoint], loads: list[Load]) -> tuple[list[Endpoint], list[Load]]:
        """Those that are not being warmed up; where all are, all."""
        ready = [i for i, load in enumerate(loads) if not load.warming]
        if not ready:
            return endpoints, loads
        self.rejected += [
            Rejection(endpoint.pool, endpoint.id, number, "being warmed up: it is given its cache back")
            for endpoint, load in zip(endpoints, loads, strict=True)
            if load.warming
        ]
        return [endpoints[i] for i in ready], [loads[i] for i in ready]


def survey(
    ask: RequestView,
    estimate: PromptEstimate,
    route: Route,
    fleet: FleetSnapshot,
    beliefs: FleetView,
    now: float,
    seed: int,
) -> CandidateSet:
    """All tiers of the route, in their order."""
    deadline, expected = ask.arrival + route.ttft_budget(ask.ttft_budget), estimate.output_tokens
    most = route.output_cap(ask.max_tokens) or expected
    found = CandidateSet(
        ask,
        estimate,
        route,
        fleet,
        beliefs,
        now,
        seed,
        deadline,
        route.target,
        deadline - now,
        most,
        expected if expected < most else most,
        [],
        [],
    )
    for number, tier in enumerate(route.tiers):
        found.add(number, tier)
    return found


def _out(load: Load, now: float) -> str:
    """Why an endpoint may not be sent to now."""
    return "down" if load.health is _DOWN else f"rate limited for {load.blocked_until - now:.1f} s more"
