"""Attempts of one request that are silent, race, or run out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from policies.attempts.budgets import HedgeBudget
from policies.types import FOREVER, NEVER, Candidate, FirstTokenOutlook
from tests.support.attempt_script import (
    PATIENCE,
    A,
    B,
    C,
    GivenFacts,
    ScriptedRace,
    Step,
    begun,
    fails,
    hedged,
    machine,
    reason,
    silence,
    told,
)
from tests.support.decision_fleet import P90, candidate


def test_the_last_candidate_has_until_the_first_token_limit() -> None:
    """No other candidate is left."""
    race = machine(A)
    assert race.begin(0.0).wake_at == 30.0
    step = race.look(30.0)
    assert told(step) == ["cancel 1 silent", "give up"]
    assert reason(step) == "no first token within 30 s"


@pytest.mark.parametrize("plain", [{"stream": False}, {"deadline": FOREVER}])
def test_silence_is_no_evidence_for_a_whole_answer_or_without_a_deadline(plain: dict[str, Any]) -> None:
    """Only the first-token limit ends the attempt; then the next candidate is tried."""
    race = machine(A, B, **plain)
    assert race.begin(0.0).wake_at == 30.0
    assert told(race.look(30.0)) == ["cancel 1 silent", "open 2 fallback b"]


def test_after_the_deadline_an_overdue_stream_is_abandoned() -> None:
    """After three times the p99 of its forecast, since no probability is left to compare."""
    race = begun(A, B, C)
    race.failed(fails(1), 2.0)
    step = race.look(2.0 + PATIENCE)
    assert step.actions == ()
    assert step.wake_at is not None
    assert step.wake_at == pytest.approx(2.0 + 3 * A.forecast.quantile(0.99))
    assert told(race.look(step.wake_at)) == ["cancel 2 silent", "open 3 fallback c"]


def test_the_first_token_limit_precedes_all_other_timers() -> None:
    """The operator's limit is never exceeded."""
    race = machine(candidate("a", 10.0), B, deadline=60.0, limit=5.0)
    assert race.begin(0.0).wake_at == 5.0


def test_a_token_of_an_abandoned_attempt_is_ignored() -> None:
    """The attempt's connection is closed; only the fallback can win."""
    race = machine(A, B)
    _, now = silence(race, race.begin(0.0))
    assert told(race.first_token(1, now + 0.1)) == []
    assert told(race.first_token(2, now + 0.2)) == ["commit 2"]


@pytest.mark.parametrize(("winner", "loser"), [(1, 2), (2, 1)])
def test_the_first_content_wins_and_the_loser_is_cancelled(winner: int, loser: int) -> None:
    """At once."""
    race, now = hedged(A, B)
    assert told(race.first_token(winner, now + 0.1)) == [f"cancel {loser} cancelled", f"commit {winner}"]


@pytest.mark.parametrize(("failed", "winner"), [(1, 2), (2, 1)])
def test_a_failed_attempt_of_two_leaves_the_other_pending(failed: int, winner: int) -> None:
    """An error never wins, and needs no replacement."""
    race, now = hedged(A, B)
    assert told(race.failed(fails(failed), now + 0.1)) == []
    assert told(race.first_token(winner, now + 0.2)) == [f"commit {winner}"]


def test_a_refused_hedge_is_replaced_by_the_next_candidate() -> None:
    """The first attempt is still silent, so the timer fires at once."""
    race, now = hedged(A, B, C)
    refused = race.failed(fails(2), now + 0.01)
    assert refused == Step((), now + 0.01)
    step, again = silence(race, refused)
    assert told(step) == ["open 3 hedge c"]
    assert again < now + 0.1


def test_at_most_two_attempts_race() -> None:
    """A silent hedge is replaced, while the first attempt stays pending."""
    race, now = hedged(A, B, C, deadline=2.0)
    step, later = silence(race, race.look(now))
    assert told(step) == ["cancel 2 silent", "open 3 fallback c"]
    assert told(race.first_token(1, later + 0.1)) == ["cancel 3 cancelled", "commit 1"]


def test_without_a_hedge_budget_the_silent_attempt_is_abandoned() -> None:
    """At the same moment, with a fallback in place of the hedge."""
    race = machine(A, B, hedge=True, hedges=HedgeBudget(0.0))
    step, _ = silence(race, race.begin(0.0))
    assert told(step) == ["cancel 1 silent", "open 2 fallback b"]


def test_the_first_token_limit_ends_each_attempt_separately() -> None:
    """The request fails with the last of the attempts."""
    race, now = hedged(A, B, limit=5.0)
    assert told(race.look(5.0)) == ["cancel 1 silent"]
    assert told(race.look(now + 5.0)) == ["cancel 2 silent", "give up"]


def test_after_two_failed_attempts_the_next_candidate_is_tried() -> None:
    """The hedge was no last attempt."""
    race, now = hedged(A, B, C)
    race.failed(fails(1), now + 0.1)
    assert told(race.failed(fails(2), now + 0.2)) == ["open 3 fallback c"]


def test_no_hedge_is_sent_while_others_wait_for_the_place() -> None:
    """The silent attempt is abandoned instead."""
    race = machine(A, B, hedge=True, facts=GivenFacts(saturated=True))
    step, _ = silence(race, race.begin(0.0))
    assert told(step) == ["cancel 1 silent", "open 2 fallback b"]


# --------------------------------------------------------------------------- by what is known at the look


def seen(since: float, heard_at: float = NEVER, **forecast: float) -> FirstTokenOutlook:
    """Of an attempt at A."""
    return FirstTokenOutlook(since, replace(A.forecast, **forecast), heard_at, B.forecast)


def told_at_looks(race: ScriptedRace, facts: GivenFacts, outlook: FirstTokenOutlook, until: float) -> list[str]:
    """Actions of the looks up to then, with this outlook of the first attempt."""
    facts.outlooks[1] = outlook
    step, found = race.begin(0.0), list[str]()
    while step.wake_at is not None and step.wake_at <= until:
        step = race.look(step.wake_at)
        found += told(step)
    return found


def test_a_silence_that_a_long_prefill_ahead_explains_is_waited_for() -> None:
    """The engine needs 0.6 s for what is ahead and the prompt, and the deadline is in 1 s."""
    facts = GivenFacts()
    behind = seen(0.0, point_estimate=0.6)
    assert told_at_looks(machine(A, B, facts=facts), facts, behind, until=0.8) == []


def test_a_first_token_of_the_prompt_ahead_restarts_the_clock() -> None:
    """At 0.3 s, when the forecast of the sending is over by far."""
    facts = GivenFacts()
    race = machine(A, B, deadline=1.5, facts=facts)
    assert told_at_looks(race, facts, seen(0.3), until=0.3 + 1.2 * P90 * 0.2 - 0.01) == []
    step, left_at = silence(race, race.look(0.7))
    assert told(step) == ["cancel 1 silent", "open 2 fallback b"]
    assert left_at < 1.2


def test_an_attempt_is_not_left_for_an_endpoint_that_has_become_busy() -> None:
    """The ranking is as old as the decision."""
    facts = GivenFacts()
    facts.now["b"] = replace(B.forecast, point_estimate=5.0)
    race = machine(A, B, facts=facts)
    step = race.begin(0.0)
    while step.wake_at is not None and step.wake_at < 1.0:
        step = race.look(step.wake_at)
        assert told(step) == []


def test_after_the_deadline_an_attempt_is_kept_while_its_engine_writes_other_answers() -> None:
    """To leave costs a prefill, and to stay nothing. Without a token for anybody the engine is judged dead."""
    facts = GivenFacts()
    race = machine(A, B, deadline=0.4, facts=facts)
    facts.now["b"] = replace(B.forecast, point_estimate=5.0)
    assert told_at_looks(race, facts, seen(0.0, heard_at=3.0), until=3.9) == []
    step, left_at = silence(race, race.look(3.9))
    assert told(step) == ["cancel 1 silent", "open 2 fallback b"]
    assert left_at == pytest.approx(3.0 + 3 * A.forecast.quantile(0.99))


def test_after_the_deadline_no_hedge_is_sent_beside_an_engine_that_lives() -> None:
    facts = GivenFacts()
    race = machine(A, B, deadline=0.4, hedge=True, facts=facts)
    facts.now["b"] = replace(B.forecast, point_estimate=5.0)
    assert told_at_looks(race, facts, seen(0.0, heard_at=3.0), until=3.9) == []


# --------------------------------------------------------------------------- a server that shows life


def alive(*ranked: Candidate, heard_at: float, **more: Any) -> Step:
    """The step at the first-token limit of 5 s."""
    race = begun(*ranked, limit=5.0, deadline=FOREVER, facts=GivenFacts(heard_at=heard_at), **more)
    return race.look(5.0)


def test_the_last_candidate_has_longer_while_its_server_shows_life() -> None:
    """A preamble or a comment: the engine is slow, not hung. The limit counts from the latest byte."""
    assert alive(A, heard_at=4.0) == Step((), 9.0)


def test_a_sign_of_life_does_not_extend_the_limit_of_the_whole_answer() -> None:
    assert alive(A, heard_at=4.0, limit_at=6.0) == Step((), 6.0)
    assert told(alive(A, heard_at=4.0, limit_at=5.0)) == ["cancel 1 silent", "give up"]


def test_with_another_candidate_a_sign_of_life_extends_nothing() -> None:
    """The other may be faster."""
    assert told(alive(A, B, heard_at=4.0)) == ["cancel 1 silent", "open 2 fallback b"]
    assert alive(A, B, heard_at=4.0, max_attempts=1) == Step((), 9.0)


def test_a_server_without_a_byte_since_the_sending_is_abandoned() -> None:
    """A byte that came with the sending shows nothing."""
    assert told(alive(A, heard_at=0.0)) == ["cancel 1 silent", "give up"]


def test_of_two_attempts_none_is_extended() -> None:
    """The other one may still answer."""
    race, _ = hedged(A, B, limit=5.0, facts=GivenFacts(heard_at=4.0))
    assert told(race.look(5.0)) == ["cancel 1 silent"]


# --------------------------------------------------------------------------- a whole answer, whose tokens are not seen

SLOW = replace(A, forecast=replace(A.forecast, point_estimate=1.0, tpot=0.1))  # p90 of 1.4 s
OVERTAKEN = 10 * (P90 + 100 * 0.1)  # s in which 100 tokens would have been written ten times


def unseen(*ranked: Candidate, longest: int | None = 100, **more: Any) -> ScriptedRace:
    return begun(*ranked, stream=False, deadline=FOREVER, limit=600.0, longest_output=longest, **more)


def test_an_endpoint_that_has_answered_later_requests_is_left_after_the_time_for_this_one() -> None:
    """The longest answer has a second span of time from the moment at which the endpoint was found overtaken."""
    race = unseen(SLOW, B, facts=GivenFacts(overtaken=[True]))
    step = race.look(OVERTAKEN)
    assert step == Step((), 2 * OVERTAKEN)
    assert race.look(2 * OVERTAKEN - 1) == step
    assert told(race.look(2 * OVERTAKEN)) == ["cancel 1 silent", "open 2 fallback b"]


def test_an_endpoint_that_is_not_overtaken_is_waited_for() -> None:
    """At each look anew."""
    race = unseen(SLOW, B, facts=GivenFacts(overtaken=[False, False, True]))
    assert [told(race.look(n * OVERTAKEN)) for n in (1, 2, 3)] == [[], [], []]
    assert told(race.look(4 * OVERTAKEN)) == ["cancel 1 silent", "open 2 fallback b"]


def test_an_overtaken_endpoint_is_kept_where_no_other_candidate_is_left() -> None:
    race = unseen(SLOW, facts=GivenFacts(overtaken=[True] * 5))
    assert [told(race.look(n * OVERTAKEN)) for n in (1, 2, 3, 4)] == [[], [], [], []]


@pytest.mark.parametrize("unknown", [{"ranked": (A, B)}, {"ranked": (SLOW, B), "longest": None}])
def test_without_a_known_time_for_the_answer_no_endpoint_is_overtaken(unknown: dict[str, Any]) -> None:
    """Neither the length of the answer nor the pace of the endpoint may be missing."""
    race = unseen(*unknown["ranked"], longest=unknown.get("longest", 100), facts=GivenFacts(overtaken=[True] * 99))
    for seconds in range(1, 600):
        assert told(race.look(float(seconds))) == []


def test_a_short_answer_has_fifteen_seconds_at_least() -> None:
    """A forecast of a few milliseconds is no reason to leave an endpoint."""
    quick = replace(A, forecast=replace(A.forecast, tpot=0.001))
    race = unseen(quick, B, longest=10, facts=GivenFacts(overtaken=[True]))
    assert race.look(15.0) == Step((), 30.0)


def test_a_whole_answer_that_stops_in_the_middle_is_left_after_idle() -> None:
    """Nothing of it has reached the caller."""
    race = unseen(A, B, idle=3.0, facts=GivenFacts(heard_at=1.0))
    assert race.look(3.0) == Step((), 6.0)
    assert told(race.look(6.0)) == ["cancel 1 silent", "open 2 fallback b"]
