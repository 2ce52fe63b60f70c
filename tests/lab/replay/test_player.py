"""A trace played through the gateway's own decision code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import replace

import pytest

from backends.server_profiles import PROFILES
from lab.replay.player import Player, play
from lab.replay.results import ReplayOutcome
from lab.replay.sim_fleet import BASELINES, POOLABLE, POOLED, Scenario, ScheduledFault
from lab.replay.sim_gateway import ActiveRequest
from lab.scorers.research_scorers import REPLAY_SCORERS
from lab.traffic.traces import Arrival
from policies.queue.queued_request import QueuedRequest
from policies.routing.decide import decide
from policies.types import Decision, Price, RequestView
from tests.support.replay_builders import arrivals, pool, route, scenario

BUSY = arrivals(80, rate=8.0)


def tiered(*tiers: str, prefer: str = "quality") -> Scenario:
    """A pool of two small engines and an API as second tier."""
    small, api = pool("small", price=Price(0.1, 0.2)), pool("api", engines=1, local=False, price=Price(1.0, 2.0))
    profiles = {e.id: PROFILES["8b-h100"] for e in small.endpoints} | {"api/0": PROFILES["api"]}
    return Scenario((small, api), {"agent": route(tiers=tiers, prefer=prefer)}, profiles)


@pytest.mark.parametrize("scorer", ["ours", "lmetric", "reference"])
def test_one_seed_is_one_outcome(scorer: str) -> None:
    """Equal seeds give equal results to the last bit; another seed gives another result."""
    chosen = scenario().with_scorer(scorer)
    first, again, other = (play(chosen, BUSY, seed).requests for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_everybody_is_answered() -> None:
    """Each request has one result, in order of arrival, and the cost follows the prices of the pool."""
    results = play(tiered("small", "api"), BUSY)
    assert [result.number for result in results.requests] == list(range(1, 81))
    assert Counter(result.end for result in results.requests) == {ReplayOutcome.COMPLETED: 80}
    told = results.requests[0]
    assert told.cost == pytest.approx((told.prompt_tokens * 0.1 + told.output_tokens * 0.2) / 1e6)


def test_a_logged_turn_waits_for_the_answer_before_however_late_that_is() -> None:
    """Its caller did. Behind the last arrival it is offered all the same: the log judged it too."""
    first = replace(BUSY[0], session=1, logged=True, output_tokens=2_000)
    turn = replace(first, at=first.at + 1.0, think=0.5, follows=True, output_tokens=9)
    one, other = play(scenario(1), [first, turn]).requests
    assert one.ended_at is not None
    assert one.ended_at > turn.at
    assert other.arrived == pytest.approx(one.ended_at + 0.5)


@pytest.mark.parametrize("scorer", BASELINES)
def test_a_baseline_decides_like_the_gateway(scorer: str) -> None:
    """Every choice in a replay equals the result of `decide` for the same state."""
    player = Player(scenario(3).with_scorer(scorer), BUSY)
    decided, seen = player.gateways[0].on_decision, []

    def compared(live: ActiveRequest, decision: Decision) -> None:
        now, fleet, view = player.clock.now, player.gateways[0].fleet, RequestView(live.result.arrived, stream=True)
        queued = QueuedRequest(live.number, view, live.estimate, live.route, live.number)
        same = decide(queued, fleet.snapshot(now), fleet.view, now, REPLAY_SCORERS)
        seen.append([c.endpoint for c in decision.ranked] == [c.endpoint for c in same.ranked])
        decided(live, decision)

    player.gateways[0].on_decision = compared  # type: ignore[method-assign]
    player.play()
    assert seen == [True] * len(BUSY)


def test_a_yardstick_neither_sheds_nor_hedges() -> None:
    """A baseline does not shed, whatever the route configures: shedding is part of the gateway's policy."""
    shedding = scenario(1, "8b-l4", route(on_miss="shed"))
    ours, theirs = (play(shedding.with_scorer(name), BUSY).overall() for name in ("ours", "least_request"))
    assert ours.sheds > 0
    assert (theirs.sheds, theirs.extra) == (0, 0)


def test_pooled_yardsticks_know_no_tiers() -> None:
    """A pooled baseline takes the best score over all tiers; only scores comparable between pools can be pooled."""
    both = tiered("small", "api")
    apart, pooled = (play(both.with_scorer(name), BUSY).overall() for name in ("least_request", "pooled:least_request"))
    assert (apart.tiers, len(pooled.tiers)) == ((1.0,), 2)
    assert pooled.tiers[1] > 0.2
    with pytest.raises(ValueError, match="no scorer 'pooled:round_robin'"):
        both.with_scorer(POOLED + "round_robin")
    assert all(both.with_scorer(POOLED + name).pooled for name in POOLABLE)


def test_a_dying_engine_loses_no_request_without_a_first_token() -> None:
    """Requests without a first token continue on another engine; begun answers break."""
    kill = replace(
        scenario(3), faults=(ScheduledFault(3.0, "main/0", "kill"), ScheduledFault(6.0, "main/0", "restart"))
    )
    for scorer in ("ours", "least_request", "reference"):
        results = play(kill.with_scorer(scorer), BUSY)
        ends = Counter(result.end for result in results.requests)
        assert (ends[ReplayOutcome.LOST], ends[ReplayOutcome.UNFINISHED], ends[ReplayOutcome.SHED]) == (0, 0, 0)
        assert ends[ReplayOutcome.BROKEN] > 0
        assert any(result.endpoint == "main/0" and result.arrived > 6.5 for result in results.requests)


@pytest.mark.parametrize("scorer", ["ours", "reference", "reference_lru"])
def test_a_peer_continues_the_answers_of_engines_that_died(scorer: str) -> None:
    """On a route with `rescue`. Engines that die at one moment are dead before any answer is continued."""
    died = tuple(ScheduledFault(3.0, engine, "kill") for engine in ("main/0", "main/1"))
    killed = replace(scenario(4, "8b-h100", route(rescue="on")), faults=died)
    results = play(killed.with_scorer(scorer), BUSY).requests
    assert {result.end for result in results} == {ReplayOutcome.COMPLETED}
    before = replace(killed, routes={"agent": route()}).with_scorer(scorer)
    broken = {each.number for each in play(before, BUSY).requests if each.end is ReplayOutcome.BROKEN}
    assert broken
    for each in results:
        assert each.ttft is not None
        assert each.tpot is not None
        assert each.number not in broken or (each.ttft < 3.0 < each.took + each.arrived)


def test_other_rules_continue_no_answer() -> None:
    """The routers that they are taken from cannot."""
    killed = replace(scenario(3, "8b-h100", route(rescue="on")), faults=(ScheduledFault(3.0, "main/0", "kill"),))
    assert any(each.end is ReplayOutcome.BROKEN for each in play(killed.with_scorer("lmetric"), BUSY).requests)


def test_a_silent_attempt_is_abandoned_for_another_endpoint() -> None:
    """The policy abandons a silent attempt within the deadline, a baseline at the first-token limit."""
    hanging = replace(scenario(3), hung=0.1, first_token=20.0)
    ours, theirs = (play(hanging.with_scorer(name), BUSY) for name in ("ours", "least_request"))
    for results in (ours, theirs):
        assert any(result.attempts > 1 for result in results.requests)
    slowest = [
        max(result.ttft or 0.0 for result in results.requests if result.end is ReplayOutcome.COMPLETED)
        for results in (ours, theirs)
    ]
    assert slowest[0] < 10.0 < 20.0 < slowest[1]


def test_a_prompt_beyond_the_model_length_is_refused() -> None:
    """A prompt above the model's length is refused with 400, and no further attempt is made."""
    results = play(scenario(), [Arrival(0.0, 600_000, 10, (), "agent"), *BUSY[:3]])
    assert (results.requests[0].end, results.requests[0].attempts) == (ReplayOutcome.LOST, 1)


def test_a_rate_limit_is_waited_out_or_gone_round() -> None:
    """Above an API's rate limit, refused requests are placed elsewhere and none is lost."""
    many = arrivals(700, rate=40.0, prompt=300, output=4)
    results = play(tiered("api", "small"), many)
    ends = Counter(result.end for result in results.requests)
    assert (ends[ReplayOutcome.COMPLETED], results.overall().tiers[1] > 0.1) == (700, True)


def test_a_request_queued_too_long_is_refused() -> None:
    """A request queued for longer than the first-token limit is refused, as in the gateway."""
    crowded = replace(scenario(1, "8b-l4"), first_token=5.0)
    results = play(crowded, arrivals(80, rate=8.0, prompt=20_000))
    refused = [result for result in results.requests if result.end is ReplayOutcome.SHED]
    assert refused
    assert all(result.first_at is None for result in refused)


def test_an_empty_trace_is_an_empty_tally() -> None:
    """An empty trace has no request and no miss."""
    assert play(scenario(), []).requests == []


# --------------------------------------------------------------------------- several workers


@pytest.mark.parametrize("workers", [2, 4])
def test_workers_decide_together_about_as_well_as_one(workers: int) -> None:
    """Each worker sees a part of the requests; shared state makes up for the rest."""
    one, offered = scenario(3), arrivals(400, rate=13.0)
    together, alone = (play(chosen, offered).overall().good for chosen in (replace(one, workers=workers), one))
    assert together >= alone - 0.02


def test_workers_that_share_nothing_decide_worse() -> None:
    """Without shared state, workers overload the same engines and miss cached prefixes."""
    sharing, apart = (Player(replace(scenario(3), workers=4), arrivals(400, rate=16.0)) for _ in range(2))
    for gateway in apart.gateways:
        gateway.fleet.peers = None
    assert sharing.play().overall().good > apart.play().overall().good + 0.03


def test_the_clairvoyant_reference_does_not_depend_on_workers() -> None:
    """The reference does not depend on the number of workers."""
    reference = scenario().with_scorer("reference")
    assert play(replace(reference, workers=3), BUSY).requests == play(reference, BUSY).requests


@pytest.mark.parametrize("news", [0.002, 0.1])
def test_replicas_decide_together_about_as_well_as_one(news: float) -> None:
    """Updates between replicas are batched and delayed."""
    one, offered = scenario(3), arrivals(400, rate=13.0)
    four = replace(one, replicas=4, peer_delay=news)
    together, alone = (play(chosen, offered).overall().good for chosen in (four, one))
    assert together >= alone - 0.03


def test_replicas_that_hear_nothing_decide_worse() -> None:
    """Replicas that never receive updates decide as without Redis."""
    offered = arrivals(400, rate=16.0)
    hearing, deaf = (
        play(replace(scenario(3), replicas=4, peer_delay=news), offered).overall().good for news in (0.002, None)
    )
    assert hearing > deaf + 0.03


def test_one_seed_is_one_outcome_for_replicas_too() -> None:
    """Messages of replicas contain no random names, so equal seeds give equal results."""
    four = replace(scenario(), replicas=4)
    assert play(four, BUSY, 1).requests == play(four, BUSY, 1).requests


@pytest.mark.parametrize("scorer", ["ours", "lmetric", "reference"])
def test_a_caller_leaves_unless_the_first_token_is_there(scorer: str) -> None:
    """As in the log, from the queue or from an engine, which then computes no more. One who left within the budget is
    not judged; the others' patience makes no difference."""
    hasty = [replace(arrival, leaves=0.05) for arrival in BUSY]
    results = play(scenario(1).with_scorer(scorer), hasty)
    left = [result for result in results.requests if result.end is ReplayOutcome.LEFT]
    assert len(left) > 40
    assert all(result.took == pytest.approx(0.05) and result.first_at is None for result in left)
    assert not any(map(results.is_judged, left))
    patient = [replace(arrival, leaves=1e4) for arrival in BUSY]
    outcomes = Counter(result.end for result in play(scenario(1).with_scorer(scorer), patient).requests)
    assert outcomes[ReplayOutcome.LEFT] == 0


def test_an_answer_without_streaming_is_not_judged_by_its_first_token() -> None:
    """It arrives whole. What is refused is a miss all the same."""
    whole = [replace(arrival, stream=False) for arrival in BUSY]
    results = play(scenario(1), whole)
    answered = [result for result in results.requests if result.first_at is not None]
    assert answered
    assert not any(map(results.is_judged, answered))
    assert all(results.is_judged(result) for result in results.requests if result.first_at is None)


def counts_told(late: bool) -> list[int]:
    """Tokens of the only answer, as the gateway is told again and again."""
    player, told = Player(scenario(1, late_counts=late), arrivals(1, prompt=600, output=400)), list[int]()
    fleet = player.gateways[0].fleet
    on_progress = fleet.on_progress

    def note(tokens: Iterable[tuple[Hashable, int]], now: float) -> None:
        known = list(tokens)
        told.extend(count for _, count in known)
        on_progress(known, now)

    fleet.on_progress = note  # type: ignore[method-assign]
    player.play()
    return told


def test_late_counts_are_those_of_the_count_before() -> None:
    """Of an answer that had none, its first token."""
    exact, late = counts_told(late=False), counts_told(late=True)
    assert late == [1, *exact[:-1]]
    assert exact[0] > 1
