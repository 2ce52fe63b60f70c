"""What could take a request now, with what is believed of it; and why the rest cannot.

Rules:
- A tier that can never take the request (`when`, context window, capabilities) is unfit, whatever its load.
- An endpoint is out while it is down, on trial with its one request, or limited by its provider.
- An endpoint that is being given its cache back is taken only where its pool has no other.
- What is not known filters nothing: no declared capabilities, no declared context window.
- The beliefs are asked once for every endpoint that is left.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from policies.beliefs import Beliefs
from policies.facts import FOREVER, Ask, FleetSnapshot, Health, Load, Pool, PoolEstimate, PromptEstimate, Rejection
from policies.route import Route, Tier
from policies.scorers.interface import Prospect

Group = list[Prospect]  # the usable endpoints of one tier, never empty

_UNSEEN = Load()
_new = tuple.__new__  # half of what a named tuple's own constructor takes
_FEATURES = ("tools", "images", "json_schema")  # of an Ask; the capabilities that they need have the same names


@dataclass(slots=True, eq=False)
class Survey:
    """One request and everything that its decision depends on; `survey` fills in what was found."""

    ask: Ask
    estimate: PromptEstimate
    route: Route
    fleet: FleetSnapshot
    beliefs: Beliefs
    now: float
    seed: int
    deadline: float  # of the first token
    target: float  # the chance of making it that a tier must offer
    output_tokens: int  # the most that the answer may hold; what is expected of it where nobody sets a limit
    groups: list[Group] = field(default_factory=list)
    rejected: list[Rejection] = field(default_factory=list)
    unfit: int = 0  # tiers that can never take this request

    @property
    def budget(self) -> float:
        """All of it, s."""
        return self.deadline - self.ask.arrival

    @property
    def left(self) -> float:
        """What remains of the budget, s."""
        return self.deadline - self.now

    def add(self, number: int, tier: Tier) -> None:
        pool, prompt = self.fleet.pools.get(tier.pool), self.estimate.pools.get(tier.pool)
        if pool is None or prompt is None:
            self.rejected.append(Rejection(tier.pool, "", number, "the prompt was not estimated for it"))
        elif reason := self._misfit(tier, pool, prompt.tokens):
            self.rejected.append(Rejection(tier.pool, "", number, reason))
            self.unfit += 1
        elif not any(group[0].endpoint.pool == pool.name for group in self.groups):  # one pool, two conditions
            self._add_endpoints(number, pool, prompt)

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

    def _add_endpoints(self, number: int, pool: Pool, prompt: PoolEstimate) -> None:
        loads, beliefs, now, left = self.fleet.loads, self.beliefs, self.now, self.left
        price = pool.price.of(prompt.tokens, min(self.estimate.output_tokens, self.output_tokens))
        group: Group = []
        warming: Group = []
        for endpoint in pool.endpoints:
            load = loads.get(endpoint.id, _UNSEEN)
            if reason := _out(load, now):
                self.rejected.append(Rejection(pool.name, endpoint.id, number, reason))
                continue
            hit = beliefs.hit(endpoint, prompt)
            forecast = beliefs.forecast(endpoint, load, prompt.tokens, hit, now)
            chance = 1.0 if left == FOREVER else forecast.chance(left)
            prospect = _new(Prospect, (endpoint, number, load, prompt, hit, forecast, chance, price))
            (warming if load.warming else group).append(prospect)
        group = group or warming
        if group:
            self.groups.append(group)


def survey(
    ask: Ask, estimate: PromptEstimate, route: Route, fleet: FleetSnapshot, beliefs: Beliefs, now: float, seed: int
) -> Survey:
    """All tiers of the route, in their order."""
    deadline = ask.arrival + route.ttft_budget(ask.ttft_budget)
    output_tokens = route.output_cap(ask.max_tokens) or estimate.output_tokens
    found = Survey(ask, estimate, route, fleet, beliefs, now, seed, deadline, route.target, output_tokens)
    for number, tier in enumerate(route.tiers):
        found.add(number, tier)
    return found


def _out(load: Load, now: float) -> str | None:
    """Why an endpoint may not be sent to now."""
    if load.health is Health.DOWN:
        return "down"
    if load.blocked_until > now:
        return f"rate limited for {load.blocked_until - now:.1f} s more"
    return None
