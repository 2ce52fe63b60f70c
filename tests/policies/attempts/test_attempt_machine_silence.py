"""The attempts of one request when they stay silent, race and run out."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.attempts.attempt_machine import (
    TRANSITIONS,
    AttemptState,
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


def test_the_last_candidate_is_waited_for_until_the_limit() -> None:
    """There is nobody to leave it for."""
    race = machine(A)
    assert race.on(Begin(), 0.0).wake_at == 30.0
    step = race.on(TimerFired(), 30.0)
    assert told(step) == ["cancel 1 silent", "give up"]
    assert reason(step) == "no first token within 30 s"


@pytest.mark.parametrize("plain", [{"stream": False}, {"deadline": FOREVER}])
def test_silence_says_nothing_of_an_answer_that_arrives_whole_or_has_no_deadline(plain: dict[str, Any]) -> None:
    """Only the limit bounds it, and then the next candidate is tried."""
    race = machine(A, B, **plain)
    assert race.on(Begin(), 0.0).wake_at == 30.0
    assert told(race.on(TimerFired(), 30.0)) == ["cancel 1 silent", "open 2 fallback b"]


def test_past_the_deadline_a_silent_stream_is_left_when_it_is_overdue() -> None:
    """A second at least, for there is no chance left to compare."""
    race = machine(A, B, C)
    race.on(Begin(), 0.0)
    race.on(Failed(1), 2.0)
    step = race.on(TimerFired(), 2.0 + PATIENCE)
    assert step.actions == ()
    assert step.wake_at is not None
    assert step.wake_at == pytest.approx(2.0 + 3 * A.forecast.quantile(0.99))
    assert told(race.on(TimerFired(), step.wake_at)) == ["cancel 2 silent", "open 3 fallback c"]


def test_the_limit_holds_before_any_other_moment() -> None:
    """An operator's limit of silence is never exceeded."""
    race = machine(candidate("a", 10.0), B, deadline=60.0, limit=5.0)
    assert race.on(Begin(), 0.0).wake_at == 5.0


def test_a_token_of_an_attempt_that_was_left_is_late_news() -> None:
    """Its connection is closed; only the fallback can win."""
    race = machine(A, B)
    _, now = silence(race, race.on(Begin(), 0.0))
    assert told(race.on(FirstToken(1), now + 0.1)) == []
    assert told(race.on(FirstToken(2), now + 0.2)) == ["commit 2"]


@pytest.mark.parametrize(("winner", "loser"), [(1, 2), (2, 1)])
def test_the_first_content_wins_and_the_loser_is_cancelled(winner: int, loser: int) -> None:
    """At the engine, at once."""
    race, now = hedged(A, B)
    assert told(race.on(FirstToken(winner), now + 0.1)) == [f"cancel {loser} cancelled", f"commit {winner}"]


@pytest.mark.parametrize(("failed", "winner"), [(1, 2), (2, 1)])
def test_a_racer_that_fails_leaves_the_race_to_the_other(failed: int, winner: int) -> None:
    """An error never wins, and needs no replacement."""
    race, now = hedged(A, B)
    assert told(race.on(Failed(failed), now + 0.1)) == []
    assert told(race.on(FirstToken(winner), now + 0.2)) == [f"commit {winner}"]


def test_a_survivors_silence_is_weighed_again() -> None:
    """Its hedge was refused at once; it is as silent as before, and there is a third."""
    race, now = hedged(A, B, C)
    refused = race.on(Failed(2), now + 0.01)
    assert refused == AttemptStep((), now + 0.01)
    step, again = silence(race, refused)
    assert told(step) == ["open 3 hedge c"]
    assert again < now + 0.1


def test_no_more_than_two_race() -> None:
    """A hedge that is silent too is replaced, while the first may still speak."""
    race, now = hedged(A, B, C, deadline=2.0)
    step, later = silence(race, race.on(TimerFired(), now))
    assert told(step) == ["cancel 2 silent", "open 3 fallback c"]
    assert told(race.on(FirstToken(1), later + 0.1)) == ["cancel 3 cancelled", "commit 1"]


def test_without_a_hedge_budget_the_silent_attempt_is_left() -> None:
    """The moment to go is the same; the two are only not raced."""
    race = machine(A, B, hedge=True)
    step, _ = silence(race, race.on(Begin(), 0.0), may_retry=False)
    assert told(step) == ["cancel 1 silent", "open 2 fallback b"]


def test_the_limit_ends_one_racer_after_the_other() -> None:
    """The request fails with the last of them."""
    race, now = hedged(A, B, limit=5.0)
    assert told(race.on(TimerFired(), 5.0)) == ["cancel 1 silent"]
    assert told(race.on(TimerFired(), now + 5.0)) == ["cancel 2 silent", "give up"]


def test_two_failed_racers_are_followed_by_the_next_candidate() -> None:
    """The race is lost, the request is not."""
    race, now = hedged(A, B, C)
    race.on(Failed(1), now + 0.1)
    assert told(race.on(Failed(2), now + 0.2)) == ["open 3 fallback c"]


@given(CANDIDATES, HISTORY, st.integers(1, 4), st.booleans(), st.booleans(), st.sampled_from([0.5, 2.0, FOREVER]))
def test_every_request_comes_to_one_end_and_leaves_nothing_behind(
    ranked: list[Candidate],
    history: list[tuple[Event, float, bool, bool]],
    max_attempts: int,
    stream: bool,
    hedge: bool,
    deadline: float,
) -> None:
    """Any events in any order: one end at most, no attempt opened twice or after it, none left pending, none leaked."""
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
def test_silence_alone_comes_to_an_end(
    ranked: list[Candidate], max_attempts: int, stream: bool, hedge: bool, deadline: float
) -> None:
    """If nothing ever answers, the request gives up within the limit of every attempt, in a handful of wakes."""
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


def test_every_transition_leads_to_a_state() -> None:
    """The table at the top is complete: every state has its row, and ends listen to nothing."""
    assert set(TRANSITIONS) == set(AttemptState)
    assert [state for state, heard in TRANSITIONS.items() if not heard] == [
        AttemptState.GAVE_UP,
        AttemptState.GONE,
    ]
