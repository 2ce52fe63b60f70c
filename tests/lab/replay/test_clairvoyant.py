"""The clairvoyant reference."""

from __future__ import annotations

from dataclasses import replace

import pytest

from backends.server_profiles import PROFILES, EngineProfile
from lab.engines.engine_events import EngineFirstToken, EngineRequest, Finished
from lab.replay.clairvoyant_engine import ExactAnswer, ExactEngine
from lab.replay.player import play
from lab.replay.results import ReplayOutcome, Results
from lab.replay.sim_fleet import BASELINES, Scenario, SimFleet
from lab.traffic.traces import BLOCK, Arrival
from policies.types import Endpoint
from tests.support.replay_builders import arrivals, pool, route, scenario

QUIET = replace(PROFILES["8b-h100"], sigma=0.0)  # type: ignore[type-var]
assert isinstance(QUIET, EngineProfile)


def quiet(engines: int = 1, **more: object) -> Scenario:
    """A scenario of engines without noise in step times."""
    found = scenario(engines, "8b-h100", route(**more))
    return replace(found, profiles=dict.fromkeys(found.profiles, QUIET)).with_scorer("reference")


def request(at: float, prompt: int, output: int = 2, first: int = 1) -> Arrival:
    return Arrival(at, prompt, output, range(first << 30, (first << 30) + prompt // BLOCK), "agent")


def ttfts(results: Results) -> list[float]:
    return [round(result.ttft or 0.0, 2) for result in results.requests]


@pytest.mark.parametrize("load", [5.0, 7.0, 9.0])
def test_no_policy_exceeds_the_reference_under_overload(load: float) -> None:
    """Neither the policy nor a baseline exceeds the reference."""
    crowd = arrivals(160, rate=load, prompt=14_000, output=300)
    best = play(scenario().with_scorer("reference"), crowd).overall()
    for scorer in ("ours", *BASELINES):
        assert play(scenario().with_scorer(scorer), crowd).overall().good <= best.good


def test_the_long_one_gives_way() -> None:
    """A long request that would make others late is postponed alone (Moore and Hodgson)."""
    first = [request(0.0, 20_000, first=1), request(0.01, 45_000, first=2)]
    then = [request(0.02 + i / 100, 28_000, first=3 + i) for i in range(2)]
    results = play(quiet(), [*first, *then])
    assert [results.met_ttft(result) for result in results.requests] == [True, False, True, True]


def test_the_earliest_deadline_is_first() -> None:
    """Requests are served by deadline, not by arrival."""
    both = Scenario(
        (pool(engines=1),),
        {"agent": route(), "chat": route("chat", workload="chat")},
        {"main/0": QUIET},
    ).with_scorer("reference")
    busy, patient = request(0.0, 20_000, first=1), request(0.1, 20_000, first=2)
    urgent = replace(request(0.2, 4_000, first=3), route="chat")
    results = play(both, [busy, patient, urgent])
    assert results.requests[2].first_at < results.requests[1].first_at  # type: ignore[operator]
    assert all(results.met_ttft(result) for result in results.requests)


def test_caches_are_shared_by_all_engines_of_a_pool() -> None:
    """A repeated prompt is cached on every engine of the pool."""
    results = play(quiet(2), [request(0.0, 20_480, 400), request(2.0, 20_480, 400)])
    assert [(result.endpoint, result.cached) for result in results.requests] == [("main/0", 0), ("main/1", 39 * BLOCK)]


def test_real_caches_are_those_of_each_engine() -> None:
    """`reference_lru` waits for the engine that has the prefix; an evicted prefix is no hit."""
    two = quiet(2).with_scorer("reference_lru")
    again = play(two, [request(0.0, 20_480, 400), request(2.0, 20_480, 400)]).requests
    assert [(result.endpoint, result.cached) for result in again] == [("main/0", 0), ("main/0", 39 * BLOCK)]
    small = replace(QUIET, kv_tokens=40 * BLOCK)
    one = replace(two, profiles=dict.fromkeys(two.profiles, small), pools=(pool(engines=1),))
    evicted = play(one, [request(0.0, 15_000, 9), request(4.0, 15_000, 9, first=2), request(8.0, 15_000, 9)]).requests
    assert [result.cached for result in evicted] == [0, 0, 10 * BLOCK]


def test_nothing_cached_is_no_reason_to_wait() -> None:
    """With real caches a request goes to an idle engine rather than to one that is about to be free."""
    both = [request(0.0, 8_000, 400), request(0.2, 8_000, 400, first=2)]
    found = play(quiet(2).with_scorer("reference_lru"), both)
    assert [result.endpoint for result in found.requests] == ["main/0", "main/1"]
    assert found.requests[1].dispatched_at == pytest.approx(0.2, abs=0.005)


def test_real_caches_are_worth_less_than_perfect_ones() -> None:
    """Under overload, requests that waited for too long are refused, and the replay ends."""
    crowd = arrivals(250, rate=9.0, prompt=14_000, output=300)
    perfect, real = (play(scenario(first_token=10.0).with_scorer(n), crowd) for n in ("reference", "reference_lru"))
    assert real.overall().good < perfect.overall().good
    assert real.overall().sheds > 0
    assert {result.end for result in real.requests} == {ReplayOutcome.COMPLETED, ReplayOutcome.SHED}


def test_no_prefill_takes_the_pace_from_an_answer() -> None:
    """A long prompt waits until the answer in progress tolerates the stall or has ended."""
    short, long = request(0.0, 1_000, 12), request(0.1, 30_000, 2, first=2)
    results = play(quiet(), [short, long])
    assert all(results.is_good(result) for result in results.requests)
    assert results.requests[1].sent_at > results.requests[0].ended_at - 0.05  # type: ignore[operator]


def test_late_requests_are_answered_last() -> None:
    """A late request is answered last, and not lost."""
    results = play(quiet(), [request(0.0, 120_000), *(request(1.0 + i, 8_000, first=2 + i) for i in range(5))])
    assert {result.end for result in results.requests} == {ReplayOutcome.COMPLETED}
    assert [results.met_ttft(result) for result in results.requests] == [False, *[True] * 5]


def test_requests_without_a_deadline_run_last() -> None:
    """Requests without a deadline run after all others, and are completed."""
    mixed = Scenario(
        (pool(engines=1),),
        {"agent": route(), "batch": route("batch", workload="batch")},
        {"main/0": QUIET},
    ).with_scorer("reference")
    batch = [replace(request(i / 100, 10_000, first=10 + i), route="batch") for i in range(4)]
    results = play(
        mixed, sorted([*batch, *(request(i / 5, 9_000, first=50 + i) for i in range(6))], key=lambda a: a.at)
    )
    assert {result.end for result in results.requests} == {ReplayOutcome.COMPLETED}
    assert results.row("agent", [result for result in results.requests if result.route == "agent"]).good == 1.0


def test_later_tiers_take_the_overflow_of_the_first() -> None:
    """Later tiers serve the overflow; an API only within the rate limit."""
    small, api = pool("small", engines=1), pool("api", engines=1, local=False)
    both = Scenario(
        (small, api), {"agent": route(tiers=("small", "api"))}, {"small/0": QUIET, "api/0": PROFILES["api"]}
    ).with_scorer("reference")
    calm = play(both, [request(2.0 * i, 12_000, first=i) for i in range(5)]).overall()
    rush = play(both, [request(0.05 * i, 12_000, first=i) for i in range(60)]).overall()
    assert (calm.tiers, len(rush.tiers)) == ((1.0,), 2)
    assert rush.attainment > 0.85


def test_a_tier_that_can_never_take_a_request_is_ignored() -> None:
    """A request that no tier accepts is refused."""
    found = quiet(tiers=({"pool": "main", "when": {"prompt_tokens": "<= 5000"}},))
    results = play(found, [request(0.0, 4_000), request(0.1, 6_000, first=2)])
    assert [result.end for result in results.requests] == [ReplayOutcome.COMPLETED, ReplayOutcome.SHED]


# ---------------------------------------------------------------- exact times


def exact_engine(profile: EngineProfile) -> tuple[SimFleet, ExactEngine]:
    servers = SimFleet({"main/0": profile})
    return servers, ExactEngine(Endpoint("main/0", "main"), servers.servers["main/0"], set())  # type: ignore[arg-type]


def test_predicted_first_tokens_are_exact() -> None:
    """The predicted first token is exact beside answers in progress, over several prefill chunks."""
    servers, engine = exact_engine(QUIET)
    for number in range(6):
        servers.submit("main/0", EngineRequest(number, 3_000, 400), 0.0)
    for event in servers.run_until(1.0):
        if isinstance(event, EngineFirstToken):
            engine.answers[event.id] = ExactAnswer(400, 3_000, 100.0)
    engine.stale = True
    engine.refresh()
    predicted = engine.first_token(request(1.0, 20_000), 0, 0.05, 1.0)
    servers.submit("main/0", EngineRequest(9, 20_000, 2), 1.0)
    actual = [event.at for event in servers.run_until(9.0) if event.id == 9]
    assert predicted == pytest.approx(actual[0], rel=0.01)


def test_predicted_ends_of_answers_are_exact() -> None:
    """Predicted ends are exact without prefills: contexts grow, and batches shrink."""
    servers, engine = exact_engine(QUIET)
    for number in range(5):
        servers.submit("main/0", EngineRequest(number, 4_000, 100 + 150 * number), 0.0)
    for event in servers.run_until(1.0):
        if isinstance(event, EngineFirstToken):
            number = int(event.id)
            engine.answers[number] = ExactAnswer(100 + 150 * number, 4_000, 100.0)
    engine.refresh()
    predicted = {key: answer.finish for key, answer in engine.answers.items()}
    actual = {event.id: event.at for event in servers.run_until(60.0) if isinstance(event, Finished)}
    assert {key: pytest.approx(at, rel=0.005) for key, at in predicted.items()} == actual
