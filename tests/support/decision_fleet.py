"""A small fleet to decide on, and a fleet view with given forecasts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import exp, log
from statistics import NormalDist
from typing import Any

from gateway.config.yaml_source import with_preset
from policies.queue.queued_request import QueuedRequest
from policies.routes.route import Route
from policies.routing.decide import decide
from policies.types import (
    QUANTILES,
    Candidate,
    Completion,
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
    Quantiles,
    RequestView,
)

RATE = 20_000.0  # prefill, tokens per second
# 10% of TTFTs exceed 1.4 times the median, 1% about 2.7 times.
RATIOS = (0.7, 0.75, 0.8, 0.87, 0.92, 0.96, 1.0, 1.05, 1.1, 1.2, 1.4, 1.6, 2.0, 3.0)
P90 = 1.4
PACES = (1.0,) * len(RATIOS)  # TPOT over the given one


@dataclass(frozen=True)
class TpotChance:
    """Probabilities of an answer to keep its TPOT budget: sent `now`, and `at_rest`, beside no prefill."""

    now: float
    at_rest: float


@dataclass
class GivenPredictions:
    """A FleetView: TTFT is the given value plus the queued tokens at RATE; hits and chances of TPOT are given."""

    ttft: Mapping[str, float]
    pools: Mapping[str, str]  # by endpoint
    hits: Mapping[str, int] = field(default_factory=dict)
    tpot: Mapping[str, TpotChance] = field(default_factory=dict)
    tpots: Mapping[str, float] = field(default_factory=dict)  # s per token; absent: nothing is known
    error: int = 0  # of every count, tokens
    regions: Mapping[str, str] = field(default_factory=dict)  # by endpoint
    rtt: Mapping[str, float] = field(default_factory=dict)  # s, by endpoint
    rates: Mapping[str, float] = field(default_factory=dict)  # of prefill, tokens per second; absent: RATE
    held: Mapping[str, int] = field(default_factory=dict)  # tokens in the provider's cache, by endpoint
    asked: list[str] = field(default_factory=list)

    def candidates(
        self,
        loads: Mapping[str, Load],
        prompt: PoolEstimate,
        tier: int,
        price: float,
        now: float,
        left: float,
    ) -> list[Candidate]:
        self.asked += loads
        return [self._candidate(name, load, prompt, tier, price, left) for name, load in loads.items()]

    def provider_hit(self, endpoint: Endpoint, prompt: PoolEstimate, now: float) -> int:
        return self.held.get(endpoint.id, 0)

    def tpot_chance(self, candidate: Candidate, budget: float, now: float) -> float:
        return self.tpot.get(candidate.endpoint.id, TpotChance(1.0, 1.0)).now

    def tpot_chance_at_rest(self, candidate: Candidate, budget: float) -> float:
        return self.tpot.get(candidate.endpoint.id, TpotChance(1.0, 1.0)).at_rest

    def completion(self, candidate: Candidate, tokens: Quantiles, now: float) -> Completion | None:
        tpot = self.tpots.get(candidate.endpoint.id)
        return None if tpot is None else Completion(candidate.forecast, tokens, PACES, tpot)

    def prompt_error(self, pool: str, prompt: PoolEstimate) -> int:
        return self.error

    def meter(self, route: Route) -> None:
        return None

    def _candidate(
        self, name: str, load: Load, prompt: PoolEstimate, tier: int, price: float, left: float
    ) -> Candidate:
        hit, ttft = self.hits.get(name, 0), self.ttft[name] + load.queued_tokens / RATE
        forecast = Forecast(ttft, RATIOS, load.tpot, 100, (prompt.tokens - hit) / self.rates.get(name, RATE))
        return Candidate(
            endpoint=Endpoint(name, self.pools[name], self.regions.get(name, "")),
            tier=tier,
            prompt_tokens=prompt.tokens,
            hit=hit,
            forecast=forecast,
            probability=forecast.probability(left),
            price=price,
            load=load,
            blocks=prompt.blocks,
            rtt=self.rtt.get(name, 0.0),
        )


@dataclass
class DecisionScenario:
    """Pools by name with the median TTFT (s) of each endpoint, loads of busy endpoints, and a route over the pools."""

    ttft: Mapping[str, Mapping[str, float]]
    loads: Mapping[str, Load] = field(default_factory=dict)
    hits: Mapping[str, int] = field(default_factory=dict)
    tpot: Mapping[str, TpotChance] = field(default_factory=dict)
    pools: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    tokens: int = 1000
    route: Mapping[str, Any] = field(default_factory=dict)
    tpots: Mapping[str, float] = field(default_factory=dict)  # s per token; absent: nothing is known
    answer_tokens: Quantiles = ()
    regions: Mapping[str, str] = field(default_factory=dict)  # by endpoint
    rtt: Mapping[str, float] = field(default_factory=dict)  # s, by endpoint
    adapter: str = ""  # that answers

    def __post_init__(self) -> None:
        pools = {id: pool for pool, endpoints in self.ttft.items() for id in endpoints}
        ttft = {id: s for pool in self.ttft.values() for id, s in pool.items()}
        self.beliefs = GivenPredictions(ttft, pools, self.hits, self.tpot, self.tpots)
        self.beliefs.regions, self.beliefs.rtt = self.regions, self.rtt

    def decide(self, request: RequestView | None = None, now: float = 0.0, sequence: int = 0) -> Decision:
        request = request or RequestView(0.0, stream=True)
        queued = QueuedRequest("r", request, self.estimate, self._route(), sequence, answer_tokens=self.answer_tokens)
        return decide(queued, self.fleet, self.beliefs, now)

    @property
    def estimate(self) -> PromptEstimate:
        prompts = {name: PoolEstimate(self.tokens, variant=self.adapter) for name in self.ttft}
        return PromptEstimate(prompts, output_tokens=200)

    @property
    def fleet(self) -> FleetSnapshot:
        pools = {name: self._pool(name) for name in self.ttft}
        return FleetSnapshot(0.0, pools, self.loads)

    def _pool(self, name: str) -> Pool:
        endpoints = tuple(Endpoint(id, name, self.regions.get(id, "")) for id in self.ttft[name])
        return Pool(name, f"model-{name}", endpoints, **self.pools.get(name, {}))

    def _route(self) -> Route:
        return Route.model_validate({"name": "r", "tiers": list(self.ttft), **self.route})


def budget(seconds: float, target: float = 0.9) -> dict[str, Any]:
    return {"ttft": {"budget": f"{seconds * 1e3:g}ms", "target": target}}


def preset(workload: Any, raw: Mapping[str, Any]) -> Route:
    return Route.model_validate(with_preset(workload, raw))


def answers(median: float, p90: float) -> Quantiles:
    """Log-normal lengths of answers."""
    deviation = log(p90 / median) / NormalDist().inv_cdf(0.9)
    return tuple(median * exp(deviation * NormalDist().inv_cdf(q)) for q in QUANTILES)


def order(decision: Decision) -> list[str]:
    return [candidate.endpoint.id for candidate in decision.ranked]


def candidate(id: str, p50: float = 0.2, pool: str = "small") -> Candidate:
    return Candidate(Endpoint(id, pool), 0, 1000, 0, Forecast(p50, RATIOS, samples=100), 0.95, 0.0)


def decided(*ranked: Candidate, deadline: float = 1.0) -> Decision:
    return Decision(Placement.PLACE, 0.0, deadline, ranked)


PRICES: Mapping[str, Price] = {"dear": Price(10.0, 30.0), "cheap": Price(0.1, 0.3)}
