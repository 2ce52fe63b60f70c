"""A small fleet to decide on, and beliefs about it that are simply given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from policies.routes import workloads
from policies.routes.route import Route
from policies.routing.tiers import decide
from policies.scorers.scorer import CandidateInput
from policies.types import (
    Candidate,
    Decision,
    Endpoint,
    FleetSnapshot,
    Forecast,
    Load,
    Placement,
    Pool,
    PoolEstimate,
    Price,
    PromptEstimate,
    RequestView,
)

RATE = 20_000.0  # prefill, tokens per second
# One in ten takes more than 1.4 times the median, one in a hundred about 2.7 times.
RATIOS = (0.7, 0.75, 0.8, 0.87, 0.92, 0.96, 1.0, 1.05, 1.1, 1.2, 1.4, 1.6, 2.0, 3.0)
P90 = 1.4


@dataclass
class GivenPredictions:
    """Beliefs: TTFT is what is given for the endpoint, and the tokens ahead at RATE; hits are given."""

    ttft: Mapping[str, float]
    hits: Mapping[str, int] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    def prospects(
        self,
        endpoints: Sequence[Endpoint],
        loads: Sequence[Load],
        prompt: PoolEstimate,
        tier: int,
        price: float,
        now: float,
    ) -> list[CandidateInput]:
        self.asked += [endpoint.id for endpoint in endpoints]
        return [self._prospect(*about, prompt, tier, price) for about in zip(endpoints, loads, strict=True)]

    def _prospect(
        self, endpoint: Endpoint, load: Load, prompt: PoolEstimate, tier: int, price: float
    ) -> CandidateInput:
        hit, ttft = self.hits.get(endpoint.id, 0), self.ttft[endpoint.id] + load.queued_tokens / RATE
        return CandidateInput(endpoint, tier, load, prompt, price, hit, ttft, RATIOS, (prompt.tokens - hit) / RATE, 100)


@dataclass
class DecisionScenario:
    """Pools by name, each endpoint with its median TTFT (s); the loads that are not idle; and a route over them."""

    ttft: Mapping[str, Mapping[str, float]]
    loads: Mapping[str, Load] = field(default_factory=dict)
    hits: Mapping[str, int] = field(default_factory=dict)
    pools: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    tokens: int = 1000
    route: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.beliefs = GivenPredictions({id: s for pool in self.ttft.values() for id, s in pool.items()}, self.hits)

    def decide(self, ask: RequestView | None = None, now: float = 0.0, seed: int = 0) -> Decision:
        return decide(
            ask or RequestView("r", 0.0, stream=True), self.estimate, self._route(), self.fleet, self.beliefs, now, seed
        )

    @property
    def estimate(self) -> PromptEstimate:
        return PromptEstimate({name: PoolEstimate(self.tokens) for name in self.ttft}, output_tokens=200)

    @property
    def fleet(self) -> FleetSnapshot:
        pools = {name: self._pool(name) for name in self.ttft}
        return FleetSnapshot(0.0, pools, self.loads)

    def _pool(self, name: str) -> Pool:
        endpoints = tuple(Endpoint(id, name) for id in self.ttft[name])
        return Pool(name, f"model-{name}", endpoints, **self.pools.get(name, {}))

    def _route(self) -> Route:
        return Route.model_validate({"name": "r", "tiers": list(self.ttft), **self.route})


def budget(seconds: float, target: float = 0.9) -> dict[str, Any]:
    return {"ttft": {"budget": f"{seconds * 1e3:g}ms", "target": target}}


def preset(workload: Any, raw: Mapping[str, Any]) -> Route:
    return Route.model_validate(workloads.apply(workload, raw))


def order(decision: Decision) -> list[str]:
    return [candidate.endpoint.id for candidate in decision.ranked]


def candidate(id: str, p50: float = 0.2, pool: str = "small") -> Candidate:
    return Candidate(Endpoint(id, pool), 0, 1000, 0, Forecast(p50, RATIOS), 0.95, 0.0)


def decided(*ranked: Candidate, deadline: float = 1.0) -> Decision:
    return Decision(Placement.PLACE, 0.0, deadline, ranked)


PRICES: Mapping[str, Price] = {"dear": Price(10.0, 30.0), "cheap": Price(0.1, 0.3)}
