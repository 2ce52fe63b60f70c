"""The same traffic on fleets of different sizes."""

from __future__ import annotations

from dataclasses import replace

from backends.server_profiles import PROFILES
from lab.capacity.fleet_size import FleetSizeQuestion, cold_engines, replayed, resized
from lab.capacity.smallest_fleet import FleetSearch
from lab.engines.engine_events import EngineFirstToken, EngineRequest
from lab.replay.sim_fleet import ScheduledFault, SimFleet
from lab.traffic.session_sample import with_sessions
from lab.traffic.traces import Agents, agents
from policies.types import Pool
from tests.support import replay_builders as build

SHAPE = Agents(seconds=60.0, sessions=2.4, turns=8.0)


def question(current: int = 2, shape: Agents = SHAPE, **more: object) -> FleetSizeQuestion:
    arrivals = [replace(arrival, route="agent") for arrival in agents(shape, 2)]
    scenario = build.scenario(current, "8b-h100", build.route())
    return FleetSizeQuestion(scenario, with_sessions(arrivals), "main", current, **more)  # type: ignore[arg-type]


def test_more_engines_meet_more_and_the_smallest_that_is_enough_is_found_from_any_start() -> None:
    asked = question()
    curve = {n: replayed(asked, n) for n in range(1, 7)}
    assert curve[1].attainment < curve[2].attainment < curve[6].attainment
    needed = min(n for n, result in curve.items() if result.is_enough)
    assert 1 < needed < 6
    for start in (1, needed, 6):
        found = FleetSearch(curve.__getitem__, 1, 6).around(start)
        assert (found.needed, found.possible) == (needed, True)


def test_where_no_number_is_enough_the_smallest_that_the_largest_hardly_betters_is_named() -> None:
    asked = question(shape=replace(SHAPE, seconds=15.0))
    strict = build.route(ttft={"budget": "1us", "target": 0.99})
    asked = replace(asked, scenario=replace(asked.scenario, routes={"agent": strict}))
    found = FleetSearch(lambda n: replayed(asked, n), 1, 4).around(2)
    assert (found.needed, found.possible) == (1, False)


def test_an_engine_that_is_new_begins_cold_and_so_do_the_conversations_of_one_that_goes() -> None:
    assert [cold_engines(n, 4) for n in (1, 2, 3, 4, 5, 8)] == [1, 1, 1, 0, 1, 4]


def test_a_cold_engine_computes_a_prompt_again_that_it_had_cached() -> None:
    fleet = SimFleet({"main/0": PROFILES["8b-h100"]})
    cached = []
    for number, now in enumerate((0.0, 5.0, 10.0)):
        if number == 2:
            assert fleet.apply_fault(ScheduledFault(now, "main/0", "cold"), now) == ()
        fleet.submit("main/0", EngineRequest(number, 2_048, 2, range(4)), now)
        cached += [event.cached_tokens for event in fleet.run_until(now + 5.0) if isinstance(event, EngineFirstToken)]
    assert cached == [0, 1_536, 0]
    assert fleet.load_of("main/0").started_at == 10.0  # type: ignore[union-attr]


def test_a_cheap_replay_takes_a_part_of_the_engines_before_the_same_part_of_the_sessions() -> None:
    whole = replayed(question(), 4)
    part = replayed(question(cost=6 * len(question().arrivals) // 10), 4)
    assert (whole.simulated, part.simulated) == (4, 2)
    assert 0.35 < part.requests / whole.requests < 0.65
    assert abs(part.attainment - whole.attainment) < 0.1


def test_a_pool_is_resized_by_itself_and_other_engines_keep_their_share_of_the_traffic() -> None:
    other = build.pool("other", engines=4)
    scenario = build.scenario(2, "8b-h100", build.route())
    profiles = {**scenario.profiles, **{each.id: scenario.profiles["main/0"] for each in other.endpoints}}
    both = replace(scenario, pools=(*scenario.pools, other), profiles=profiles)

    def sizes(pools: tuple[Pool, ...]) -> dict[str, int]:
        return {pool.name: len(pool.endpoints) for pool in pools}

    found = resized(both, "main", 3, 0.5)
    assert sizes(found.pools) == {"main": 3, "other": 2}
    assert set(found.profiles) == {each.id for pool in found.pools for each in pool.endpoints}
