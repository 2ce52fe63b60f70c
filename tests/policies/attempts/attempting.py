"""An attempt machine, and steps in words, for tests."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from policies.attempts.attempt_events import (
    AttemptStep,
    Begin,
    Broken,
    Cancel,
    ClientGone,
    Commit,
    EndpointDown,
    Event,
    Failed,
    FirstToken,
    GiveUp,
    Open,
    TimerFired,
)
from policies.attempts.attempt_machine import AttemptMachine
from policies.types import FOREVER, Candidate
from tests.policies.deciding import P90, candidate, decided

A, B, C = candidate("a"), candidate("b"), candidate("c")


PATIENCE = 1.2 * P90 * 0.2  # s of silence until an attempt with a median TTFT of 200 ms is reconsidered


def machine(
    *ranked: Candidate,
    deadline: float = 1.0,
    max_attempts: int = 3,
    stream: bool = True,
    hedge: bool = False,
    limit: float = 30.0,
    limit_at: float = FOREVER,
) -> AttemptMachine:
    return AttemptMachine(
        decided(*ranked, deadline=deadline),
        max_attempts=max_attempts,
        stream=stream,
        hedge=hedge,
        first_token_limit=limit,
        now=0.0,
        limit_at=limit_at,
    )


def told(step: AttemptStep) -> list[str]:
    """The actions of a step in words: `open 1 primary a`, `cancel 1 silent`, `commit 2`, `give up`."""
    words = []
    for action in step.actions:
        match action:
            case Open(attempt):
                words.append(f"open {attempt.number} {attempt.kind.value} {attempt.candidate.endpoint.id}")
            case Cancel(number, ending):
                words.append(f"cancel {number} {ending.value}")
            case Commit(number):
                words.append(f"commit {number}")
            case GiveUp():
                words.append("give up")
    return words


def silence(race: AttemptMachine, step: AttemptStep, may_retry: bool = True) -> tuple[AttemptStep, float]:
    """Fires the timers that the machine sets until the first action; returns the step and its time (s)."""
    while step.wake_at is not None:
        now = step.wake_at
        step = race.on(TimerFired(), now, may_retry)
        if step.actions:
            return step, now
    raise AssertionError("the machine waits for nothing")


def reason(step: AttemptStep) -> str:
    (given_up,) = [action.reason for action in step.actions if isinstance(action, GiveUp)]
    return given_up


# --------------------------------------------------------------------------- hedging


def hedged(*ranked: Candidate, **more: Any) -> tuple[AttemptMachine, float]:
    """A machine whose first candidate has been silent, with the second candidate as the hedge; and the time (s)."""
    race = machine(*ranked, hedge=True, **more)
    step, now = silence(race, race.on(Begin(), 0.0))
    assert told(step) == [f"open 2 hedge {ranked[1].endpoint.id}"]
    return race, now


# --------------------------------------------------------------------------- always

NUMBERS = st.integers(1, 5)


EVENTS: st.SearchStrategy[Event] = st.one_of(
    st.just(Begin()),
    st.builds(FirstToken, NUMBERS),
    st.builds(
        Failed,
        NUMBERS,
        retryable=st.booleans(),
        connection_lost=st.booleans(),
        retry_after=st.none() | st.floats(0, 100),
        again=st.booleans(),
        avoid=st.frozensets(st.sampled_from(["small", "large"])),
    ),
    st.builds(EndpointDown, NUMBERS),
    st.just(TimerFired()),
    st.just(ClientGone()),
    st.builds(Broken, st.booleans(), st.floats(0.1, 5), st.sets(st.sampled_from("abcd"))),
)


CANDIDATES = st.lists(
    st.builds(candidate, st.sampled_from("abcd"), st.floats(0.01, 3), st.sampled_from(["small", "large"])),
    max_size=4,
    unique_by=lambda found: found.endpoint.id,
)


HISTORY = st.lists(st.tuples(EVENTS, st.floats(0, 2), st.booleans(), st.booleans()), max_size=25)
