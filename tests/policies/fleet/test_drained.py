"""Endpoints that an operator has drained."""

from __future__ import annotations

from dataclasses import replace

from policies.fleet.engine_load import EngineLoad
from policies.fleet.fleet import Fleet
from policies.queue.queued_request import QueuedRequest
from policies.routes.route import Route
from policies.routing.decide import decide
from policies.types import (
    AttemptOutcome,
    Decision,
    Health,
    Load,
    Placement,
    Pool,
    PromptEstimate,
    RejectionKind,
    RequestView,
)
from tests.support.decision_fleet import DecisionScenario, order
from tests.support.learned_fleet import ONE, SMALL, TWO, answer, fleet, load, prompt, send

TWO_TIERS = {"own": {"a": 0.1, "b": 0.1}, "next": {"c": 0.5}}
DRAINED = Load(health=Health.DRAINING)


def test_a_drained_endpoint_is_no_candidate_and_its_siblings_are() -> None:
    decision = DecisionScenario(TWO_TIERS, loads={"a": DRAINED}).decide()
    assert "a" not in order(decision)
    [rejected] = decision.rejected
    assert (rejected.endpoint, rejected.kind) == ("a", RejectionKind.DRAINED)
    assert rejected.reason.startswith("drained by an operator")


def test_a_pool_that_is_drained_is_left_for_the_next_tier() -> None:
    assert order(DecisionScenario(TWO_TIERS, loads={"a": DRAINED, "b": DRAINED}).decide()) == ["c"]


def test_without_another_endpoint_the_caller_hears_of_the_operator() -> None:
    """503, and no word of a failure; beside a failure both are named."""
    one = {"own": {"a": 0.1}}
    decision = DecisionScenario(one, loads={"a": DRAINED}).decide()
    assert (decision.outcome, decision.cause) == (Placement.UNAVAILABLE, RejectionKind.DRAINED)
    assert decision.reason == "every endpoint that could take it is drained by an operator"
    both = DecisionScenario({"own": {"a": 0.1, "b": 0.1}}, loads={"a": DRAINED, "b": Load(health=Health.DOWN)})
    assert both.decide().reason.endswith("is down, on trial or rate limited, or drained by an operator")


def test_a_request_with_its_state_there_moves_as_if_the_endpoint_were_down() -> None:
    asked = RequestView(0.0, pinned="a")
    decision = DecisionScenario({"own": {"a": 0.1, "b": 0.1}}, loads={"a": DRAINED}).decide(asked)
    assert decision.outcome is Placement.UNAVAILABLE
    assert decision.reason == "the endpoint with its state is drained by an operator"


def test_a_drained_endpoint_is_no_last_resort() -> None:
    """Whatever single callers have met there before."""
    failing = Load(health=Health.DRAINING, failing=True)
    assert DecisionScenario({"own": {"a": 0.1}}, loads={"a": failing}).decide().outcome is Placement.UNAVAILABLE


def drained(*endpoints: str) -> Fleet:
    of = fleet()
    of.drain(frozenset(endpoints))
    return of


def test_what_was_learned_and_what_is_cached_there_is_kept() -> None:
    of, asked = fleet(), prompt(645, blocks=40)
    answer(of, asked, ONE)
    of.drain(frozenset({ONE.id}))
    known = of.view.statistics(ONE.id, 1.0)
    assert (known.samples, of.view.hit(ONE, asked)) == (1, 640)
    assert (load(of).health, load(of, endpoint=TWO).health) == (Health.DRAINING, Health.UP)
    of.drain(frozenset())
    assert load(of).health is Health.UP


def test_attempts_in_progress_are_counted_to_their_end() -> None:
    of = fleet()
    key = send(of)
    of.drain(frozenset({ONE.id}))
    assert load(of).in_flight == 1
    of.on_first_token(key, 0.1)
    of.on_ended(key, AttemptOutcome.COMPLETED, 0.2)
    assert (load(of, 0.2).in_flight, load(of, 0.2).health) == (0, Health.DRAINING)


def test_a_reload_and_a_return_to_the_configuration_keep_the_drain() -> None:
    """Its pod is not ready while the engine restarts, for longer than any state of it is kept."""
    of = drained(ONE.id)
    of.reload([SMALL])
    assert load(of).health is Health.DRAINING
    of.reload([Pool(SMALL.name, SMALL.model, (TWO,))])
    of.expire(10.0)
    of.expire(1000.0)
    of.reload([SMALL])
    assert load(of).health is Health.DRAINING


def test_a_drained_endpoint_is_on_no_trial_and_woken_for_nobody() -> None:
    """A drain counts before what the engine, its pages and the breaker say."""
    of = Fleet([replace(SMALL, wakes=True)])
    of.on_scrape(ONE.id, EngineLoad(asleep=True), 1.0)
    for second in (1.0, 2.0):
        of.on_probe_unwell(TWO.id, second, "its health page answers 503")
    before = load(of, 3.0), load(of, 3.0, TWO)
    assert (before[0].wake_s > 0, before[1].doubted, before[1].failing) == (True, True, True)
    of.drain(frozenset({ONE.id, TWO.id}))
    for found in (load(of, 60.0), load(of, 60.0, TWO)):
        assert (found.health, found.wake_s, found.failing, found.doubted) == (Health.DRAINING, 0.0, False, False)


def test_a_drain_is_told_as_a_belief_and_no_breaker_opens() -> None:
    of = drained(ONE.id)
    known = of.view.statistics(ONE.id, 1.0)
    assert [each.what for each in known.believed] == ["draining"]
    assert known.breaker == "closed"
    assert known.why == "an operator has drained it: it gets no request until it is ready again"


def test_an_ejected_endpoint_that_is_ready_again_is_tried_at_once() -> None:
    """The operator has mended it."""
    of = drained(ONE.id)
    of.on_wrong_model(ONE.id, 1.0)
    of.drain(frozenset())
    assert load(of, 3.0).health is Health.PROBING


def decision_at(of: Fleet, now: float) -> Decision:
    route = Route.model_validate({"name": "r", "tiers": [SMALL.name]})
    estimate = PromptEstimate({SMALL.name: prompt()}, output_tokens=100)
    queued = QueuedRequest("r", RequestView(now, stream=True), estimate, route, 0)
    return decide(queued, of.snapshot(now), of.view, now)


def test_the_next_decision_after_a_drain_goes_elsewhere_and_the_one_after_its_end_may_return() -> None:
    of = fleet()
    of.snapshot(0.0)
    of.drain(frozenset({TWO.id}))
    assert order(decision_at(of, 0.001)) == [ONE.id]
    of.drain(frozenset())
    assert sorted(order(decision_at(of, 0.002))) == sorted([ONE.id, TWO.id])


def test_requests_that_wait_are_looked_at_again() -> None:
    of, news = fleet(), list[None]()
    of.on_news = lambda: news.append(None)
    of.drain(frozenset({ONE.id}))
    of.drain(frozenset({ONE.id}))
    assert len(news) == 1
