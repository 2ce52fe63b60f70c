"""An attempt machine, and steps in words, for tests."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from policies.attempts.attempt_events import (
    NO_FACTS,
    Answered,
    AttemptFacts,
    AttemptLimits,
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
    Keep,
    Leave,
    NoFacts,
    Open,
    Progress,
    TimerFired,
)
from policies.attempts.attempt_machine import AttemptMachine
from policies.attempts.budgets import HedgeBudget, RetryBudget
from policies.blame.blame import BLAME
from policies.types import FOREVER, Attempt, Candidate, FirstTokenOutlook, Forecast
from tests.support.decision_fleet import P90, candidate, decided

A, B, C = candidate("a"), candidate("b"), candidate("c")
API = candidate("api", pool="api")


PATIENCE = 1.2 * P90 * 0.2  # s of silence until an attempt with a median TTFT of 200 ms is reconsidered


class GivenFacts(NoFacts):
    """Facts that a test sets. `overtaken`: answers of the next looks, then no; `outlooks`: of the attempts, by number;
    `now`: forecasts of endpoints by id, that have changed since the decision; `left_after`: s of silence."""

    def __init__(
        self,
        *,
        closed: Collection[str] = (),
        saturated: bool = False,
        overtaken: Collection[bool] = (),
        windows: Collection[str] = ("small",),
        left_after: float = FOREVER,
        **progress: Any,
    ) -> None:
        self.closes = True
        self.closed, self.saturated, self.windows = set(closed), saturated, frozenset(windows)
        self.overtaken = list(overtaken)
        self.left_after = left_after
        self.outlooks: dict[int, FirstTokenOutlook] = {}
        self.now: dict[str, Forecast] = {}
        self.seen = Progress(**progress)

    def is_closed(self, candidate: Candidate, now: float) -> bool:
        return candidate.endpoint.id in self.closed

    def is_saturated(self) -> bool:
        return self.saturated

    def outlook(self, attempt: Attempt, sent_at: float, upcoming: Candidate, now: float) -> FirstTokenOutlook:
        own = self.outlooks.get(attempt.number) or super().outlook(attempt, sent_at, upcoming, now)
        return replace(own, upcoming=self.now.get(upcoming.endpoint.id, upcoming.forecast))

    def is_overtaken(self, number: int) -> bool:
        return bool(self.overtaken) and self.overtaken.pop(0)

    def progress(self, number: int) -> Progress:
        return self.seen

    def patience(self, number: int, others: Sequence[Candidate]) -> float:
        return self.left_after if others else FOREVER

    def without_larger_window(self, pool: str) -> frozenset[str]:
        return self.windows


def machine(
    *ranked: Candidate,
    deadline: float = 1.0,
    max_attempts: int = 3,
    limit: float = 30.0,
    retries: RetryBudget | None = None,
    hedges: HedgeBudget | None = None,
    facts: AttemptFacts = NO_FACTS,
    **limits: Any,
) -> AttemptMachine:
    """A machine with permissions for ten retries and ten hedges. `limits`: fields of AttemptLimits."""
    return AttemptMachine(
        decided(*ranked, deadline=deadline),
        AttemptLimits(max_attempts=max_attempts, first_token_limit=limit, **{"limit_is_meant": True, **limits}),
        retries or RetryBudget(),
        hedges or HedgeBudget(10.0),
        facts,
        now=0.0,
    )


def begun(*ranked: Candidate, **how: Any) -> AttemptMachine:
    """A machine whose first attempt is pending since 0 s."""
    race = machine(*ranked, **how)
    race.on(Begin(), 0.0)
    return race


def fails(number: int, kind: str = "server", **more: Any) -> Failed:
    """`kind`: a row of the table of blame."""
    return Failed(number, BLAME[kind], **more)


def of_server(server: str, *ids: str) -> list[Candidate]:
    """Candidates for several API keys of a server."""
    return [replace(each, endpoint=replace(each.endpoint, server=server)) for each in map(candidate, ids)]


def told(step: AttemptStep) -> list[str]:
    """The actions of a step in words: `open 1 primary a`, `cancel 1 silent`, `commit 2`, `give up`."""
    words = []
    for action in step.actions:
        match action:
            case Open(attempt):
                words.append(f"open {attempt.number} {attempt.kind.value} {attempt.candidate.endpoint.id}")
            case Cancel(number, ending):
                words.append(f"cancel {number} {ending.value}")
            case Keep(number, shortcoming):
                words.append(f"keep {number} {shortcoming}")
            case Commit(number):
                words.append(f"commit {number}")
            case Leave(number, why):
                words.append(f"leave {number} {why.value}")
            case GiveUp():
                words.append("give up")
    return words


def charged(step: AttemptStep) -> list[bool]:
    """For each attempt opened: charged to a budget."""
    return [action.charged for action in step.actions if isinstance(action, Open)]


def silence(race: AttemptMachine, step: AttemptStep) -> tuple[AttemptStep, float]:
    """Fires the timers that the machine sets until the first action; returns the step and its time (s)."""
    while step.wake_at is not None:
        now = step.wake_at
        step = race.on(TimerFired(), now)
        if step.actions:
            return step, now
    raise AssertionError("the machine waits for nothing")


def given_up(step: AttemptStep) -> GiveUp:
    (found,) = [action for action in step.actions if isinstance(action, GiveUp)]
    return found


def reason(step: AttemptStep) -> str:
    return given_up(step).reason


# --------------------------------------------------------------------------- hedging


def hedged(*ranked: Candidate, **more: Any) -> tuple[AttemptMachine, float]:
    """A machine whose first candidate has been silent, with the second candidate as the hedge; and the time (s)."""
    race = machine(*ranked, hedge=True, **more)
    step, now = silence(race, race.on(Begin(), 0.0))
    assert told(step) == [f"open 2 hedge {ranked[1].endpoint.id}"]
    return race, now


# --------------------------------------------------------------------------- always

NUMBERS = st.integers(1, 5)
BLAMES = st.sampled_from(list(BLAME.values()))


EVENTS: st.SearchStrategy[Event] = st.one_of(
    st.just(Begin()),
    st.builds(FirstToken, NUMBERS),
    st.builds(Answered, NUMBERS, st.sampled_from(["", "refusal"])),
    st.builds(
        Failed,
        NUMBERS,
        BLAMES,
        st.none() | st.floats(0, 100),
        accepted=st.booleans(),
        translated=st.booleans(),
        doubtful=st.booleans(),
        anew=st.none() | st.booleans(),
    ),
    st.builds(EndpointDown, NUMBERS),
    st.just(TimerFired()),
    st.just(ClientGone()),
    st.builds(Broken, BLAMES, st.lists(st.builds(candidate, st.sampled_from("abcd")), max_size=3)),
)


CANDIDATES = st.lists(
    st.builds(candidate, st.sampled_from("abcd"), st.floats(0.01, 3), st.sampled_from(["small", "large"])),
    max_size=4,
    unique_by=lambda found: found.endpoint.id,
)


FACTS = st.builds(
    GivenFacts,
    closed=st.sets(st.sampled_from("abcd"), max_size=2),
    saturated=st.booleans(),
    overtaken=st.lists(st.booleans(), max_size=5),
    windows=st.sets(st.sampled_from(["small", "large"]), min_size=1),
    heard_at=st.floats(0, 20),
    tpot=st.none() | st.floats(0.001, 0.5),
    complete=st.booleans(),
    paused=st.booleans(),
    left_after=st.floats(0.0, 5.0) | st.just(FOREVER),
)


LIMITS = st.fixed_dictionaries(
    {
        "max_attempts": st.integers(1, 4),
        "deadline": st.sampled_from([0.5, 2.0, FOREVER]),
        "stream": st.booleans(),
        "hedge": st.booleans(),
        "limit": st.just(5.0),
        "limit_at": st.sampled_from([7.0, FOREVER]),
        "idle": st.sampled_from([3.0, FOREVER]),
        "recovers": st.booleans(),
        "longer_context": st.booleans(),
        "other_filter": st.booleans(),
        "longest_output": st.none() | st.integers(1, 100),
    }
)


HISTORY = st.lists(st.tuples(EVENTS, st.floats(0, 2), st.booleans()), max_size=25)
