"""Attempts of one request that are silent, race, or run out."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.attempts.attempt_events import (
    AttemptStep,
    Begin,
    Broken,
    Cancel,
    Commit,
    Event,
    Failed,
    FirstToken,
    GiveUp,
    Open,
    TimerFired,
)
from policies.attempts.attempt_machine import TRANSITIONS, AttemptState
from policies.types import FOREVER, Candidate
from tests.policies.attempts.attempting import (
    CANDIDATES,
    HISTORY,
    PATIENCE,
    A,
    B,
    C,
    hedged,
    machine,
    reason,
    silence,
    told,
)
from tests.policies.deciding import candidate


def test_the_last_candidate_has_until_the_first_token_limit() -> None:
    """No other candidate is left."""
    race = machine(A)
    assert race.on(Begin(), 0.0).wake_at == 30.0
    step = race.on(TimerFired(), 30.0)
    assert told(step) == ["cancel 1 silent", "give up"]
    assert reason(step) == "no first token within 30 s"


@pytest.mark.parametrize("plain", [{"stream": False}, {"deadline": FOREVER}])
def test_silence_is_no_evidence_for_a_whole_answer_or_without_a_deadline(plain: dict[str, Any]) -> None:
    """Only the first-token limit ends the attempt; then the next candidate is tried."""
    race = machine(A, B, **plain)
    assert race.on(Begin(), 0.0).wake_at == 30.0
    assert told(race.on(TimerFired(), 30.0)) == ["cancel 1 silent", "open 2 fallback b"]


def test_after_the_deadline_an_overdue_stream_is_abandoned() -> None:
    """After three times the p99 of its forecast, since no probability is left to compare."""
    race = machine(A, B, C)
    race.on(Begin(), 0.0)
    race.on(Failed(1), 2.0)
    step = race.on(TimerFired(), 2.0 + PATIENCE)
    assert step.actions == ()
    assert step.wake_at is not None
    assert step.wake_at == pytest.approx(2.0 + 3 * A.forecast.quantile(0.99))
    assert told(race.on(TimerFired(), step.wake_at)) == ["cancel 2 silent", "open 3 fallback c"]


def test_the_first_token_limit_precedes_all_other_timers() -> None:
    """The operator's limit is never exceeded."""
    race = machine(candidate("a", 10.0), B, deadline=60.0, limit=5.0)
    assert race.on(Begin(), 0.0).wake_at == 5.0


def test_a_token_of_an_abandoned_attempt_is_ignored() -> None:
    """The attempt's connection is closed; only the fallback can win."""
    race = machine(A, B)
    _, now = silence(race, race.on(Begin(), 0.0))
    assert told(race.on(FirstToken(1), now + 0.1)) == []
    assert told(race.on(FirstToken(2), now + 0.2)) == ["commit 2"]


@pytest.mark.parametrize(("winner", "loser"), [(1, 2), (2, 1)])
def test_the_first_content_wins_and_the_loser_is_cancelled(winner: int, loser: int) -> None:
    """At once."""
    race, now = hedged(A, B)
    assert told(race.on(FirstToken(winner), now + 0.1)) == [f"cancel {loser} cancelled", f"commit {winner}"]


@pytest.mark.parametrize(("failed", "winner"), [(1, 2), (2, 1)])
def test_a_failed_attempt_of_two_leaves_the_other_pending(failed: int, winner: int) -> None:
    """An error never wins, and needs no replacement."""
    race, now = hedged(A, B)
    assert told(race.on(Failed(failed), now + 0.1)) == []
    assert told(race.on(FirstToken(winner), now + 0.2)) == [f"commit {winner}"]


def test_a_refused_hedge_is_replaced_by_the_next_candidate() -> None:
    """The first attempt is still silent, so the timer fires at once."""
    race, now = hedged(A, B, C)
    refused = race.on(Failed(2), now + 0.01)
    assert refused == AttemptStep((), now + 0.01)
    step, again = silence(race, refused)
    assert told(step) == ["open 3 hedge c"]
    assert again < now + 0.1


def test_at_most_two_attempts_race() -> None:
    """A silent hedge is replaced, while the first attempt stays pending."""
    race, now = hedged(A, B, C, deadline=2.0)
    step, later = silence(race, race.on(TimerFired(), now))
    assert told(step) == ["cancel 2 silent", "open 3 fallback c"]
    assert told(race.on(FirstToken(1), later + 0.1)) == ["cancel 3 cancelled", "commit 1"]


def test_without_a_hedge_budget_the_silent_attempt_is_abandoned() -> None:
    """At the same moment, with a fallback in place of the hedge."""
    race = machine(A, B, hedge=True)
    step, _ = silence(race, race.on(Begin(), 0.0), may_retry=False)
    assert told(step) == ["cancel 1 silent", "open 2 fallback b"]


def test_the_first_token_limit_ends_each_attempt_separately() -> None:
    """The request fails with the last of the attempts."""
    race, now = hedged(A, B, limit=5.0)
    assert told(race.on(TimerFired(), 5.0)) == ["cancel 1 silent"]
    assert told(race.on(TimerFired(), now + 5.0)) == ["cancel 2 silent", "give up"]


def test_after_two_failed_attempts_the_next_candidate_is_tried() -> None:
    """The hedge was no last attempt."""
    race, now = hedged(A, B, C)
    race.on(Failed(1), now + 0.1)
    assert told(race.on(Failed(2), now + 0.2)) == ["open 3 fallback c"]


@given(CANDIDATES, HISTORY, st.integers(1, 4), st.booleans(), st.booleans(), st.sampled_from([0.5, 2.0, FOREVER]))
def test_every_request_ends_once_without_pending_attempts(
    ranked: list[Candidate],
    history: list[tuple[Event, float, bool, bool]],
    max_attempts: int,
    stream: bool,
    hedge: bool,
    deadline: float,
) -> None:
    """For any order of events: one end, no attempt opened twice or after the end, none pending at the end."""
    race = machine(*ranked, deadline=deadline, max_attempts=max_attempts, stream=stream, hedge=hedge, limit=5.0)
    now, wake_at = 0.0, None
    opened: list[int] = []
    pending: set[int] = set()
    ends = 0
    for event, wait, on_time, may_retry in [(Begin(), 0.0, False, True), *history]:
        punctual = on_time and wake_at is not None
        now = max(now, wake_at or 0.0) if punctual else now + wait
        before = race.state
        step = race.on(TimerFired() if punctual else event, now, may_retry)
        assert race.state is before or race.state in TRANSITIONS[before][TimerFired if punctual else type(event)]
        resumed = before is AttemptState.COMMITTED and isinstance(event, Broken) and not punctual
        ends -= resumed
        if before not in (AttemptState.RACING, AttemptState.IDLE) and not resumed:
            assert step == AttemptStep()
        if isinstance(event, Failed) and not punctual:
            pending.discard(event.number)
        for action in step.actions:
            match action:
                case Open(attempt):
                    assert not ends
                    opened.append(attempt.number)
                    pending.add(attempt.number)
                case Cancel(number, _):
                    pending.remove(number)
                case Commit(number):
                    pending.remove(number)
                    ends += 1
                case GiveUp():
                    ends += 1
        ends += before in (AttemptState.IDLE, AttemptState.RACING) and race.state is AttemptState.GONE
        assert opened == list(range(1, len(opened) + 1))
        assert len(opened) <= max_attempts
        assert len(pending) <= 2
        assert set(race.pending) == pending
        assert (step.wake_at is None) == bool(ends)
        wake_at = step.wake_at
    assert ends == (race.state in (AttemptState.COMMITTED, AttemptState.GAVE_UP, AttemptState.GONE))
    assert not (ends and pending)


@given(CANDIDATES.filter(bool), st.integers(1, 4), st.booleans(), st.booleans(), st.sampled_from([0.5, 2.0, FOREVER]))
def test_a_request_without_any_event_gives_up(
    ranked: list[Candidate], max_attempts: int, stream: bool, hedge: bool, deadline: float
) -> None:
    """Within the first-token limit of every attempt, after a handful of timers."""
    race = machine(*ranked, deadline=deadline, max_attempts=max_attempts, stream=stream, hedge=hedge, limit=5.0)
    step, now = race.on(Begin(), 0.0), 0.0
    for _ in range(20):
        if step.wake_at is None:
            break
        assert step.wake_at >= now
        now = step.wake_at
        step = race.on(TimerFired(), now)
    assert race.state is AttemptState.GAVE_UP
    assert now <= 5.0 * min(max_attempts, len(ranked))


def test_the_transition_table_is_complete() -> None:
    """Every state has a row; final states accept no event."""
    assert set(TRANSITIONS) == set(AttemptState)
    assert [state for state, heard in TRANSITIONS.items() if not heard] == [
        AttemptState.GAVE_UP,
        AttemptState.GONE,
    ]
