"""The attempt machine under any order of events: the rules that always hold."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from policies.attempts.attempt_events import (
    AttemptStep,
    Begin,
    Cancel,
    Commit,
    Event,
    Failed,
    GiveUp,
    Keep,
    Leave,
    Leaving,
    Open,
    TimerFired,
)
from policies.attempts.attempt_machine import AttemptMachine
from policies.attempts.attempt_states import TRANSITIONS, AttemptState
from policies.attempts.budgets import HedgeBudget, RetryBudget
from policies.types import AttemptKind, Candidate
from tests.support.attempt_script import CANDIDATES, FACTS, HISTORY, LIMITS, GivenFacts, machine

FINAL = (AttemptState.GAVE_UP, AttemptState.GONE)


class Observer:
    """Follows the actions like a driver, and checks each against what is open."""

    def __init__(self, race: AttemptMachine, max_attempts: int) -> None:
        self.race, self.max_attempts = race, max_attempts
        self.opened: list[int] = []
        self.hedges = 0
        self.pending: set[int] = set()
        self.kept: set[int] = set()
        self.committed: int | None = None
        self.commits = 0

    def follow(self, event: Event, step: AttemptStep, before: AttemptState) -> None:
        if isinstance(event, Failed):
            self.pending.discard(event.number)
            gone = self.committed == event.number and before is AttemptState.COMMITTED
            self.committed = None if gone else self.committed
        for position, action in enumerate(step.actions, 1):
            self.perform(action)
            if isinstance(action, Commit | GiveUp):
                assert position == len(step.actions)
        self.check(step, before)

    def perform(self, action: object) -> None:
        match action:
            case Open(attempt, charged):
                self.opened.append(attempt.number)
                self.pending.add(attempt.number)
                self.hedges += attempt.kind is AttemptKind.HEDGE
                assert charged or attempt.kind is not AttemptKind.HEDGE
            case Cancel(number, _):
                assert number in self.pending | self.kept | {self.committed}
                self.pending.discard(number)
                self.kept.discard(number)
            case Keep(number, shortcoming):
                assert shortcoming
                self.pending.remove(number)
                assert not self.kept
                self.kept.add(number)
            case Commit(number):
                assert number in self.pending | self.kept
                self.pending.discard(number)
                self.kept.discard(number)
                self.committed, self.commits = number, self.commits + 1
            case Leave(number, _):
                assert number == self.committed

    def check(self, step: AttemptStep, before: AttemptState) -> None:
        state, ended = self.race.state, self.race.state in (*FINAL, AttemptState.COMMITTED)
        assert self.opened == list(range(1, len(self.opened) + 1))
        assert len(self.opened) <= self.max_attempts
        assert len(self.pending) <= 2
        assert set(self.race.pending) == self.pending
        assert not (ended and (self.pending or self.kept))
        assert state is not AttemptState.RACING or step.wake_at is not None
        assert state not in FINAL or step.wake_at is None
        assert before not in FINAL or step == AttemptStep()
        gave_up = [each for each in step.actions if isinstance(each, GiveUp)]
        late = any(isinstance(each, Leave) and each.why is Leaving.LATE for each in step.actions)
        assert (state is AttemptState.GAVE_UP and before is not state) == bool(gave_up or late)


@given(CANDIDATES, HISTORY, LIMITS, FACTS, st.integers(0, 3), st.booleans())
def test_every_request_ends_once_without_pending_attempts(
    ranked: list[Candidate],
    history: list[tuple[Event, float, bool]],
    limits: dict[str, Any],
    facts: GivenFacts,
    hedges: int,
    poor: bool,
) -> None:
    """For any order of events, facts and limits: no attempt opened twice or after the end, none pending or kept at the
    end, a timer for as long as something is awaited, and no share of a budget kept."""
    followed(ranked, [(Begin(), 0.0, False), *history], limits, facts, hedges, poor)


def followed(
    ranked: list[Candidate],
    history: list[tuple[Event, float, bool]],
    limits: dict[str, Any],
    facts: GivenFacts,
    hedges: int,
    poor: bool,
) -> Observer:
    """Play a history, and check every step of it."""
    retries = RetryBudget(burst=0, share=0) if poor else RetryBudget()
    race = machine(*ranked, facts=facts, retries=retries, hedges=HedgeBudget(float(hedges)), **limits)
    seen = Observer(race, limits["max_attempts"])
    now, wake_at = 0.0, None
    for given_event, wait, on_time in history:
        punctual = on_time and wake_at is not None
        now = max(now, wake_at or 0.0) if punctual else now + wait
        event = TimerFired() if punctual else given_event
        before = race.state
        step = race.on(event, now)
        assert race.state is before or race.state in TRANSITIONS[before][type(event)]
        seen.follow(event, step, before)
        assert retries.active == (race.state is AttemptState.RACING and seen.commits == 0)
        assert 0 <= retries.retrying <= (race.state is AttemptState.RACING) * limits["max_attempts"] * (not poor)
        assert seen.hedges <= hedges
        wake_at = step.wake_at
    return seen


@given(CANDIDATES.filter(bool), LIMITS)
def test_a_request_without_any_event_gives_up(ranked: list[Candidate], limits: dict[str, Any]) -> None:
    """Within the first-token limit of every attempt, after a handful of timers."""
    race = machine(*ranked, **limits)
    step, now = race.on(Begin(), 0.0), 0.0
    for _ in range(50):
        if step.wake_at is None:
            break
        assert step.wake_at >= now
        now = step.wake_at
        step = race.on(TimerFired(), now)
    assert race.state is AttemptState.GAVE_UP
    assert now <= min(5.0 * min(limits["max_attempts"], len(ranked)), limits["limit_at"])


def test_the_transition_table_is_complete() -> None:
    """Every state has a row; final states accept no event."""
    assert set(TRANSITIONS) == set(AttemptState)
    assert [state for state, heard in TRANSITIONS.items() if not heard] == [
        AttemptState.GAVE_UP,
        AttemptState.GONE,
    ]
