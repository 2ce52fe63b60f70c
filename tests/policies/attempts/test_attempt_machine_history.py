"""The attempt machine under any order of events: the rules that always hold."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from policies.attempts.attempt_machine import AttemptState
from policies.attempts.budgets import HedgeBudget, RetryBudget
from policies.attempts.wire import Failed
from policies.types import AttemptKind, Candidate
from tests.support.attempt_script import (
    CANDIDATES,
    FACTS,
    HISTORY,
    LIMITS,
    GivenFacts,
    ScriptedEvent,
    ScriptedRace,
    Step,
    happens,
    machine,
)


class Observer:
    """Follows what the wire is told like a driver, and checks each against what is open."""

    def __init__(self, race: ScriptedRace, max_attempts: int) -> None:
        self.race, self.max_attempts = race, max_attempts
        self.opened: list[int] = []
        self.hedges = 0
        self.pending: set[int] = set()
        self.kept: set[int] = set()
        self.committed: int | None = None
        self.commits = 0

    def follow(self, event: ScriptedEvent, step: Step, before: AttemptState) -> None:
        match event:
            case "failed", (Failed(number), *_):
                self.pending.discard(number)
                gone = self.committed == number and before is AttemptState.COMMITTED
                self.committed = None if gone else self.committed
        for position, (name, number, what) in enumerate(step.actions, 1):
            self.perform(name, number, what)
            if name in ("commit", "give up", "leave"):
                assert position == len(step.actions)
        self.check(step, before)

    def perform(self, name: str, number: int, what: Any) -> None:
        match name:
            case "open":
                self.opened.append(number)
                self.pending.add(number)
                self.hedges += what.kind is AttemptKind.HEDGE
            case "cancel":
                assert number in self.pending | self.kept | {self.committed}
                self.pending.discard(number)
                self.kept.discard(number)
            case "keep":
                assert what
                self.pending.remove(number)
                assert not self.kept
                self.kept.add(number)
            case "commit":
                assert number in self.pending | self.kept
                self.pending.discard(number)
                self.kept.discard(number)
                self.committed, self.commits = number, self.commits + 1
            case "leave":
                assert number == self.committed

    def check(self, step: Step, before: AttemptState) -> None:
        state, ended = self.race.state, self.race.state in (AttemptState.OVER, AttemptState.COMMITTED)
        assert self.opened == list(range(1, len(self.opened) + 1))
        assert len(self.opened) <= self.max_attempts
        assert len(self.pending) <= 2
        assert set(self.race.pending) == self.pending
        assert not (ended and (self.pending or self.kept))
        assert state is not AttemptState.RACING or step.wake_at is not None
        assert state is not AttemptState.OVER or step.wake_at is None
        assert before is not AttemptState.OVER or step == Step()
        assert all(
            name not in ("give up", "not continued") or state is AttemptState.OVER for name, _, _ in step.actions
        )


NEXT = {  # where each state may lead
    AttemptState.IDLE: set(AttemptState) - {AttemptState.COMMITTED},
    AttemptState.RACING: set(AttemptState) - {AttemptState.IDLE},
    AttemptState.COMMITTED: set(AttemptState) - {AttemptState.IDLE},
    AttemptState.OVER: {AttemptState.OVER},
}


@given(CANDIDATES, HISTORY, LIMITS, FACTS, st.integers(0, 3), st.booleans())
def test_every_request_ends_once_without_pending_attempts(
    ranked: list[Candidate],
    history: list[tuple[ScriptedEvent, float, bool]],
    limits: dict[str, Any],
    facts: GivenFacts,
    hedges: int,
    poor: bool,
) -> None:
    """For any order of events, facts and limits: no attempt opened twice or after the end, none pending or kept at the
    end, a timer for as long as something is awaited, and no share of a budget kept."""
    followed(ranked, [(("begin", ()), 0.0, False), *history], limits, facts, hedges, poor)


def followed(
    ranked: list[Candidate],
    history: list[tuple[ScriptedEvent, float, bool]],
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
        event = ("look", ()) if punctual else given_event
        before = race.state
        step = happens(race, event, now)
        assert race.state in NEXT[before]
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
    step, now = race.begin(0.0), 0.0
    for _ in range(50):
        if step.wake_at is None:
            break
        assert step.wake_at >= now
        now = step.wake_at
        step = race.look(now)
    assert race.state is AttemptState.OVER
    assert now <= min(5.0 * min(limits["max_attempts"], len(ranked)), limits["limit_at"])
