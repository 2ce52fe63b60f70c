"""Late prefills: when one may begin, what is refused at once, and what a refused request finds when it comes back."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from policies.queue import hold_rules, late_work, placement_round
from policies.queue.late_work import (
    MARGIN,
    PATIENCE,
    PRIOR_S,
    PRIOR_WORK,
    LateRate,
    RefusedRequests,
)
from policies.queue.queued_request import QueuedRequest
from policies.types import TRAINED_SAMPLES, Placement, PoolEstimate, PrefixBlocks, PromptEstimate, RequestView
from tests.support.queue_fixture import ONE, START, TWO, QueueFixture, route

SHORT_LATE: dict[str, Any] = {"tokens": 4000, "budget": 0.15}  # the prefill takes 0.22 s
LONG_LATE: dict[str, Any] = {"tokens": 60_000, "budget": 0.15}  # of seconds


def answers_near_their_limit(queue: QueueFixture) -> None:
    """The answers of ONE use half of what they can bear."""
    queue.decode(ONE, token=0.022, pace=0.05, since=20.0)


# --------------------------------------------------------------------------- when one begins


def test_a_short_prefill_that_makes_its_deadline_more_likely_than_not_is_not_late() -> None:
    """The target of the route chooses the tier; it is another question than who comes last."""
    queue = QueueFixture()
    queue.fill(ONE)
    assert queue.enter("likely", ttft={"budget": "320ms", "target": 0.999}) == []
    assert 0.5 < queue.chance("likely") < 0.999
    assert (queue.assigned(), queue.best_effort) == (["likely"], [])
    assert queue.enter("hopeless", budget=0.15) == []
    assert queue.best_effort == ["hopeless"]


@pytest.mark.parametrize(("sure", "is_late"), [(0.999, True), (0.95, False)])
def test_a_long_prefill_is_late_without_a_sure_chance(
    sure: float, is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is doubtful must not take seconds from others. Enough is enough, whatever the target of the route."""
    monkeypatch.setattr(placement_round, "SURE", sure)
    queue = QueueFixture()
    queue.fill(ONE)
    assert queue.enter("r", tokens=30_000, ttft={"budget": "2.8s", "target": 0.9999}) == []
    assert 0.95 < queue.chance("r") < 0.999
    assert bool(queue.best_effort) == is_late


def test_a_long_late_prefill_waits_until_the_answers_of_the_engine_are_calm() -> None:
    """An engine without a prefill to do is not enough: its live sessions would become late."""
    queue = QueueFixture()
    answers_near_their_limit(queue)
    assert queue.enter("r", **LONG_LATE) == []
    assert queue.hold("r") == "calm"
    queue.end(f"{ONE.id} answer 0")
    assert queue.release(later=30.0) == ["r"]


def test_what_an_engine_can_begin_without_loss_is_not_kept_by_the_answers_of_another() -> None:
    """Only what the prefill would cost where it would go counts."""
    queue = QueueFixture((ONE, TWO))
    answers_near_their_limit(queue)
    assert queue.enter("r", **LONG_LATE) == ["r"]
    assert queue.destination("r") == TWO.id


def test_a_request_without_a_deadline_needs_no_calm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch fills what is idle: it is measured by throughput."""
    queue = QueueFixture()
    monkeypatch.setattr(hold_rules, "CALM", -1.0)
    assert queue.enter("r", tokens=60_000, budget=None) == ["r"]


# --------------------------------------------------------------------------- refusals


def test_a_late_request_that_would_wait_too_long_is_refused_at_once() -> None:
    """503 at once with the time to come back, instead of 503 after a minute."""
    queue = QueueFixture()
    queue.decode()
    held = [f"r{number}" for number in range(150) if not queue.enter(f"r{number}", **SHORT_LATE, tenant=f"t{number}")]
    refused = [name for name in queue.released if queue.released[name].outcome is Placement.OVERLOADED]
    assert held
    assert refused
    assert all(queue.released[name].retry_after > PATIENCE for name in refused)


def test_a_refused_request_is_told_the_first_token_that_it_would_have_had() -> None:
    """The predicted wait, of which Retry-After is a multiple, and what the engine takes behind it."""
    queue = QueueFixture()
    queue.decode()
    for number in range(150):
        queue.enter(f"r{number}", **SHORT_LATE, tenant=f"t{number}")
    refused = [found for found in queue.released.values() if found.outcome is Placement.OVERLOADED]
    assert refused
    for decision in refused:
        expected = decision.expected
        assert expected is not None
        assert expected.point_estimate > decision.ranked[0].forecast.point_estimate
        assert expected.point_estimate >= decision.retry_after / MARGIN
        assert expected.p50 < expected.p90


def test_nothing_is_refused_for_a_wait_that_is_a_guess() -> None:
    """Of engines with fewer than TRAINED_SAMPLES first tokens, as after a first start: all wait."""
    queue = QueueFixture(lessons=TRAINED_SAMPLES // 2 - 1)
    queue.decode()
    for number in range(150):
        queue.enter(f"r{number}", **LONG_LATE)
    for _ in range(8):
        queue.release(later=PATIENCE / 4)
    assert Placement.OVERLOADED not in {decision.outcome for decision in queue.released.values()}


def test_a_late_request_is_refused_once_its_wait_turns_out_too_long() -> None:
    """An engine that is never idle."""
    queue = QueueFixture()
    queue.decode()
    assert queue.enter("r", **SHORT_LATE) == []
    waited = 0.0
    while not queue.released and waited < 2 * PATIENCE:
        queue.release(later=0.5)
        waited += 0.5
    assert queue.released["r"].outcome is Placement.OVERLOADED
    assert waited <= PATIENCE


def test_a_route_with_best_effort_is_never_refused_for_the_wait() -> None:
    queue = QueueFixture()
    queue.decode()
    for number in range(40):
        queue.enter(f"r{number}", **SHORT_LATE, on_miss="best_effort")
    assert not queue.released


def test_the_wait_is_the_work_over_the_rate_at_which_late_work_begins() -> None:
    """Twice the work is twice the wait."""
    rate = LateRate()
    assert rate.wait(2.0, START) == pytest.approx(2.0 * PRIOR_S / PRIOR_WORK)
    assert rate.wait(4.0, START) == pytest.approx(4.0 * PRIOR_S / PRIOR_WORK)


def test_work_that_does_not_begin_lengthens_the_wait_and_an_empty_queue_forgets() -> None:
    rate = LateRate()
    before, waiting = rate.wait(2.0, START), prompt([1])
    rate.add(waiting, START)
    blocked = rate.wait(2.0, START + 20.0)
    rate.leave(waiting, START + 20.0)
    assert blocked > 5 * before
    assert rate.wait(2.0, START + 200.0) == pytest.approx(before, rel=0.1)


def test_work_that_begins_shortens_the_wait() -> None:
    slow, fast = LateRate(), LateRate()
    for rate, begun in ((slow, 0.5), (fast, 4.0)):
        rate.add(prompt([1]), START)
        for second in range(20):
            waiting = prompt([1], prefill_s=begun)
            rate.add(waiting, START + second)
            rate.begin(waiting, START + second)
    assert fast.wait(2.0, START + 20) < slow.wait(2.0, START + 20) / 4


def test_tenants_take_turns_so_a_flood_is_no_work_ahead_of_others() -> None:
    """Of another tenant's work, no more is ahead of a request than of its own."""
    rate = LateRate()
    for number in range(250):
        rate.add(prompt([number], "flood"), START)
    rate.add(prompt([1], "few"), START)
    assert rate.late_forecast(prompt([1], "new"), START)[0] == 2.0 + 2.0
    assert rate.late_forecast(prompt([1], "few"), START)[0] == 2.0 + 4.0
    assert rate.late_forecast(prompt([1], "flood"), START)[0] == 500.0 + 2.0


def test_long_late_prompts_of_one_tenant_get_no_short_one_of_another_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """They wait for calm answers, and no engine takes them meanwhile; a short one waits for an idle engine alone."""
    queue = QueueFixture()
    monkeypatch.setattr(hold_rules, "CALM", -1.0)
    for number in range(60):
        queue.enter(f"long {number}", **LONG_LATE, tenant="flood", blocks=(1,))
        queue.release(later=1.0)
    filling = queue.fill(ONE)
    assert queue.enter("short", tokens=14_000, budget=0.15, tenant="other") == []
    queue.first_tokens(*filling)
    assert queue.release(later=0.1) == ["short"]
    assert queue.destination("short") == ONE.id


def test_refused_late_work_is_none_that_has_begun() -> None:
    """Engines that go down take nothing: those that wait for them afterwards are told no shorter wait."""
    queue = QueueFixture()
    queue.decode()
    for number in range(10):
        queue.enter(f"r{number}", **SHORT_LATE, on_miss="best_effort")
    waiting = queue.scheduler.queues.best_effort
    rate = waiting.rate(next(iter(waiting)))
    begun_s = rate.begun_s
    for _ in range(2):
        queue.fleet.on_probe_failed(ONE.id, queue.now)
    assert len(queue.release(later=0.01)) == 10
    assert {decision.outcome for decision in queue.released.values()} == {Placement.UNAVAILABLE}
    assert rate.begun_s <= begun_s


def test_a_flood_of_one_tenant_gets_no_other_refused() -> None:
    """Tenants take turns: what one of them has waiting is not ahead of another."""
    queue = QueueFixture()
    queue.decode()
    for number in range(300):
        queue.enter(f"f{number}", **SHORT_LATE, tenant="flood", blocks=(number,))
    assert any(decision.outcome is Placement.OVERLOADED for decision in queue.released.values())
    assert queue.enter("other", **SHORT_LATE, tenant="other") == []
    assert "other" in queue.best_effort


SLOW_LATE: dict[str, Any] = {"tokens": 250_000, "budget": 0.15}


def test_a_request_that_the_engine_is_about_to_take_is_not_refused() -> None:
    """However long its own prefill: the only engine has a second of work left, and no answers to harm."""
    queue = QueueFixture()
    queue.send("other", ONE, 16_000, queue.now, stream=True)
    assert 0.5 < queue.load().backlog_s < PATIENCE
    assert queue.enter("r", **SLOW_LATE) == []
    assert queue.best_effort == ["r"]
    for _ in range(30):
        if released := queue.release(later=0.2):
            break
        if queue.now - START > 1.5:
            queue.end("other")
    assert released == ["r"]
    assert queue.destination("r") == ONE.id


# --------------------------------------------------------------------------- coming back


def prompt(blocks: list[int], tenant: str = "", sequence: int = 0, prefill_s: float = 2.0) -> QueuedRequest:
    estimate = PromptEstimate({"small": PoolEstimate(512 * len(blocks), blocks=PrefixBlocks(tuple(blocks)))})
    queued = QueuedRequest(sequence, RequestView(START), estimate, route(), sequence, tenant)
    queued.prefill_s = prefill_s
    return queued


def test_a_refused_request_is_known_when_it_comes_back_in_time() -> None:
    refused = RefusedRequests()
    refused.add(prompt([1, 2, 3]), 10.0, START)
    assert refused.take(prompt([1, 2, 3]), START + 11.0)
    assert not refused.take(prompt([1, 2, 3]), START + 11.0), "one refusal serves one request"


def test_the_next_turn_of_a_refused_session_comes_back_too() -> None:
    """Its prefill computes the refused prompt as well."""
    refused = RefusedRequests()
    refused.add(prompt([1, 2, 3]), 10.0, START)
    assert refused.take(prompt([1, 2, 3, 4, 5]), START + 5.0)


@pytest.mark.parametrize(
    ("other", "later"),
    [
        (prompt([1, 2, 4]), 1.0),
        (prompt([1, 2]), 1.0),
        (prompt([1, 2, 3], tenant="other"), 1.0),
        (prompt([1, 2, 3]), 60.0),
    ],
    ids=["another prompt", "a shorter prompt", "another tenant", "too late"],
)
def test_nothing_else_is_taken_for_the_refused_request(other: QueuedRequest, later: float) -> None:
    """A tenant cannot jump the queue by the prompt of another."""
    refused = RefusedRequests()
    refused.add(prompt([1, 2, 3]), 10.0, START)
    assert not refused.take(other, START + later)


def test_refused_requests_are_remembered_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late_work, "REMEMBERED", 10)
    refused = RefusedRequests()
    for number in range(100):
        refused.add(prompt([number]), 10.0, START)
    assert refused.take(prompt([99]), START)
    assert not refused.take(prompt([0]), START)


def test_refusals_of_one_tenant_cost_no_other_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late_work, "REMEMBERED", 10)
    refused = RefusedRequests()
    refused.add(prompt([1], tenant="a"), 10.0, START)
    for number in range(100):
        refused.add(prompt([number], tenant="flood"), 60.0, START)
    assert refused.take(prompt([1], tenant="a"), START + 1.0)


def test_a_request_refused_again_has_the_later_time_to_come_back() -> None:
    refused = RefusedRequests()
    for later in (0.0, 5.0):
        refused.add(prompt([1]), 10.0, START + later)
    assert refused.take(prompt([1]), START + 19.0)
    refused.add(prompt([1]), 10.0, START)
    assert not refused.take(prompt([1]), START + 16.0)


def test_a_request_that_came_back_in_time_for_its_budget_is_remembered_no_longer() -> None:
    queue = QueueFixture()
    queue.scheduler._refused.add(prompt([1]), 10.0, queue.now)
    assert queue.enter("r", blocks=(1,)) == ["r"]
    assert not queue.scheduler._refused.take(prompt([1]), queue.now)


def test_a_request_that_came_back_goes_first_and_is_held_for_longer() -> None:
    """The forecast stands behind its Retry-After."""
    queue = QueueFixture()
    keys = queue.fill(ONE)
    queue.enter("small", tokens=3000, budget=0.08)
    queue.arrive("returned", tokens=8000, budget=0.08)
    queue.scheduler.queues.new[-1].returned = True
    queue.release()
    queue.first_tokens(*keys)
    assert queue.release() == ["returned"]


def test_a_flood_of_refusals_leaves_a_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late_work, "REMEMBERED", 10)
    refused = RefusedRequests()
    for number in range(2000):
        refused.add(prompt([number % 500], tenant=f"t{number}"), 1.0, START + number)
    assert len(refused.until) < 50


def test_nothing_is_left_of_requests_that_were_cancelled_refused_or_sent() -> None:
    random, queue = Random(7), QueueFixture()
    queue.decode()
    for number in range(400):
        tenant, blocks = f"t{random.randrange(4)}", (random.randrange(60),)
        queue.enter(f"r{number}", random.choice((4000, 60_000)), 0.15, tenant, blocks=blocks)
        if queue.best_effort and random.random() < 0.4:
            queue.leave(random.choice(queue.best_effort))
        queue.release(later=random.uniform(0.0, 0.3))
    for name in queue.best_effort:
        queue.leave(name)
    waiting = queue.scheduler.queues.best_effort
    assert any(decision.outcome is Placement.OVERLOADED for decision in queue.released.values())
    assert (waiting.late, queue.scheduler.held) == (False, 0)
    rate = waiting.rate(prompt([1]))
    assert rate.late_forecast(prompt([1]), queue.now)[0] == 0.0
    assert rate.wait(1.0, queue.now + 1000.0) == pytest.approx(PRIOR_S / PRIOR_WORK)
