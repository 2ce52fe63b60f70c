"""Tenants that share engines, in virtual time: a flood hurts nobody else, and weights divide what there is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from lab.replay.player import play
from lab.replay.results import RequestResult
from lab.traffic.traces import Arrival
from tests.support.replay_builders import arrivals, route, scenario

SECONDS = 50.0
FULL = 7.0  # requests/s that two engines answer in time: 100%; from 9 on they do not
AGENT = route()


def traffic(rates: Mapping[str, float]) -> list[Arrival]:
    """Requests by tenant, at so many a second; no two tenants share a prefix."""
    made: list[Arrival] = []
    for number, (tenant, rate) in enumerate(rates.items(), 1):
        made += [
            replace(arrival, tenant=tenant, hashes=[block + (number << 56) for block in arrival.hashes])
            for arrival in arrivals(int(rate * SECONDS), rate, seed=number)
        ]
    return sorted(made, key=lambda arrival: arrival.at)


def played(rates: Mapping[str, float], weights: Mapping[str, float] | None = None) -> dict[str, list[RequestResult]]:
    results = play(scenario(2, first_token=60.0, weights=weights or {}), traffic(rates), 1)
    return {tenant: [result for result in results.requests if result.tenant == tenant] for tenant in rates}


def good(results: list[RequestResult]) -> int:
    assert AGENT.ttft is not None
    assert AGENT.tpot is not None
    ttft, tpot = AGENT.ttft.budget, AGENT.tpot.budget
    return sum(r.ttft is not None and r.ttft <= ttft and (r.tpot or 0.0) <= tpot for r in results)


def test_a_tenant_at_ten_times_its_load_does_not_hurt_the_others() -> None:
    """Three at a quarter each: 98% of the goodput without the flood, which gets what is left."""
    usual = dict.fromkeys(("a", "b", "c", "flood"), FULL / 4)
    calm, flooded = played(usual), played({**usual, "flood": 10 * FULL / 4})
    others = ("a", "b", "c")
    assert sum(good(flooded[name]) for name in others) >= 0.98 * sum(good(calm[name]) for name in others)
    assert good(flooded["flood"]) >= good(calm["flood"])
    served = sum(result.first_at is not None for result in flooded["flood"])
    assert served > 1.5 * len(calm["flood"])  # work conserving


@pytest.mark.parametrize(("weights", "ratio"), [({}, 1.0), ({"a": 2.0}, 2.0), ({"a": 1.0, "b": 0.25}, 4.0)])
def test_under_saturation_engine_time_is_by_weight(weights: dict[str, float], ratio: float) -> None:
    """Two tenants with three times what the engines can do, each."""
    tokens = {
        tenant: sum(r.prompt_tokens - r.cached for r in results if r.first_at is not None and r.first_at < SECONDS)
        for tenant, results in played({"a": 30.0, "b": 30.0}, weights).items()
    }
    assert tokens["a"] / tokens["b"] == pytest.approx(ratio, rel=0.15)


def test_a_tenant_with_most_of_the_traffic_loses_nothing_while_engines_keep_up() -> None:
    """Above its share, and nobody has to wait for it."""
    rates = {"large": 5.0, "b": 0.7, "c": 0.7}
    for results in played(rates).values():
        assert good(results) >= 0.99 * len(results)
