"""Holding: a prefill that answers in progress would feel waits while the whole queue has slack."""

from __future__ import annotations

import pytest

from policies.fleet.fleet import AttemptReport
from policies.latency.tpot import expected_tpot_misses
from policies.queue.hold_rules import HARM, TICK
from policies.types import AttemptOutcome
from tests.support.queue_fixture import ONE, START, QueueFixture

LONG = 20_000  # tokens: a prefill of about a second


def with_new_answer(age: float = 0.0) -> QueueFixture:
    """An engine whose one answer began `age` seconds ago, at half of its TPOT budget, and has no credit at first."""
    queue = QueueFixture()
    queue.decode(token=0.025, since=age)
    return queue


def release_until(queue: QueueFixture, until: float) -> float:
    """The time of the first release, with a token of the answer every 0.025 s."""
    began = queue.now
    while queue.now < until:
        queue.fleet.on_progress(
            [(f"{ONE.id} answer 0", 1 + round((queue.now + TICK - began) / 0.025))], queue.now + TICK
        )
        if queue.release(later=TICK):
            return queue.now
    raise AssertionError("held beyond the limit")


def test_a_prefill_is_held_until_a_new_answer_bears_it() -> None:
    """The engine is idle but for the answer, whose credit grows by 25 ms with each token."""
    queue = with_new_answer()
    assert queue.enter("r", LONG, budget=5.0) == []
    assert queue.assigned() == ["r"]
    released = release_until(queue, START + 4.0)
    assert START + 0.2 < released < START + 2.0
    assert expected_tpot_misses(queue.load(), 0.25) <= HARM


def test_a_prefill_that_answers_bear_is_sent_at_once() -> None:
    """An answer ahead of its pace by 5 s."""
    assert with_new_answer(age=10.0).enter("r", LONG, budget=5.0) == ["r"]


def test_an_answer_counts_from_its_first_token() -> None:
    """Not only from the next look at its progress."""
    queue = QueueFixture()
    queue.send("answer", ONE, 100, START - 0.1, 0.05)
    queue.fleet.on_first_token("answer", START)
    assert queue.enter("r", LONG, budget=5.0) == []


def test_a_prefill_is_not_held_without_slack() -> None:
    """The deadline comes first."""
    queue = with_new_answer()
    needed = queue.fleet.view.forecast(ONE, queue.load(), LONG, 0, queue.now).quantile(0.95)
    assert queue.enter("r", LONG, budget=needed + TICK / 2) == ["r"]


def test_a_prefill_is_held_until_its_slack_ends() -> None:
    """An answer that stays behind holds nothing for longer."""
    queue = with_new_answer()
    needed = queue.fleet.view.forecast(ONE, queue.load(), LONG, 0, queue.now).quantile(0.95)
    assert queue.enter("r", LONG, budget=3.0) == []
    while not queue.release(later=TICK):
        assert queue.now < START + 3.0
    assert queue.now == pytest.approx(START + 3.0 - needed, abs=2 * TICK)


def test_a_prefill_is_not_held_at_the_cost_of_those_behind() -> None:
    """Of the requests queued for the endpoint, the one with the least slack decides."""
    queue = with_new_answer()
    needed = queue.fleet.view.forecast(ONE, queue.load(), LONG, 0, queue.now)
    assert queue.enter("first", LONG, budget=5.0) == []
    assert queue.enter("second", LONG, budget=5.001) == []
    tight = 5.0 - needed.quantile(0.95) - needed.prefill  # s until the first has to go for the second's sake
    assert release_behind(queue) == pytest.approx(START + tight, abs=2 * TICK)


def release_behind(queue: QueueFixture) -> float:
    while not queue.release(later=TICK):
        assert queue.now < START + 5.0
    return queue.now


def test_a_request_without_a_deadline_is_not_held() -> None:
    """Nothing says for how long it could wait; it waits for an idle engine that it does not harm anyway."""
    queue = with_new_answer(age=10.0)
    assert queue.enter("r", LONG, budget=None) == ["r"]


def test_nothing_is_held_beside_a_late_request() -> None:
    """Time that the engine does not use is lost to it."""
    queue = with_new_answer()
    assert queue.enter("late", 5 * LONG, budget=0.1) == []
    assert queue.best_effort == ["late"]
    assert queue.enter("r", LONG, budget=5.0) == ["r"]


def test_answers_near_their_pace_hold_nothing() -> None:
    """At 0.9 times their TPOT budget they would gain 0.1 s in a second."""
    queue = with_new_answer()
    for lesson in range(200):
        queue.send(f"slow {lesson}", ONE, 100, queue.now - 9.0, 0.05)
        queue.fleet.on_first_token(f"slow {lesson}", queue.now - 9.0)
        report = AttemptReport(completion_tokens=201, mean_itl=0.045)
        queue.fleet.on_ended(f"slow {lesson}", AttemptOutcome.COMPLETED, queue.now, report)
    queue.fleet.on_progress([(f"{ONE.id} answer 0", 1)], queue.now)
    assert expected_tpot_misses(queue.load(), 1.0) > HARM
    assert queue.enter("r", LONG, budget=5.0, tpot={"budget": "50ms"}) == ["r"]
