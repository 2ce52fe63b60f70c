"""LoRA adapters in a replay: engines that load them, and decisions that know."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from lab.engines.virtual_engine import VirtualEngine
from lab.replay.player import Player
from lab.replay.results import ReplayOutcome
from lab.replay.sim_fleet import REFERENCES, Scenario
from policies.adapters.adapter_slots import AdapterFacts
from tests.support.replay_builders import arrivals, route, scenario

NAMES = "abcdefgh"
FACTS = AdapterFacts(frozenset(NAMES), slots=2, load_s=0.5)


def adapted() -> Scenario:
    """Four engines with two slots each, and a route for each of eight adapters."""
    routes = [route(name, tiers=[{"pool": "main", "adapter": name}]) for name in NAMES]
    plain = scenario(4, "8b-h100", *routes)
    return replace(plain, pools=tuple(replace(pool, variants=FACTS) for pool in plain.pools))


def loads(scorer: str) -> int:
    random = Random(1)
    arrived = arrivals(400, rate=8.0, prompt=1_000, output=60)
    traffic = [replace(arrival, route=random.choice(NAMES)) for arrival in arrived]
    player = Player(adapted().with_scorer(scorer), traffic)
    results = player.play()
    assert {result.end for result in results.requests} == {ReplayOutcome.COMPLETED}
    engines = [server.engine for server in player.servers.servers.values() if isinstance(server, VirtualEngine)]
    return sum(engine.adapters.loads for engine in engines)


def test_requests_go_where_their_adapter_is_loaded() -> None:
    """Eight slots hold all adapters: of 400 requests at most a tenth needs a load."""
    ours, round_robin = loads("ours"), loads("round_robin")
    assert ours <= 40, (ours, round_robin)
    assert round_robin >= 5 * ours, (ours, round_robin)


@pytest.mark.parametrize("reference", REFERENCES)
def test_the_reference_loads_each_adapter_hardly_more_than_once(reference: str) -> None:
    """The reference knows which engine holds an adapter, and that a load delays every answer of an engine."""
    assert len(NAMES) <= loads(reference) <= 2 * len(NAMES)
