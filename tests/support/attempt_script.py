"""An attempt machine, and steps in words, for tests."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st

from policies.attempts.attempt_machine import AttemptMachine, AttemptState
from policies.attempts.budgets import HedgeBudget, RetryBudget
from policies.attempts.patience import PendingAttempt
from policies.attempts.wire import AttemptLimits, Failed, Progress, Wire
from policies.blame.blame import BLAME, Blame
from policies.rescue.successors import RESCUE_ATTEMPT
from policies.types import FOREVER, Attempt, AttemptOutcome, Candidate, Decision, FirstTokenOutlook, Forecast
from tests.support.decision_fleet import P90, candidate, decided

A, B, C = candidate("a"), candidate("b"), candidate("c")
API = candidate("api", pool="api")


PATIENCE = 1.2 * P90 * 0.2  # s of silence until an attempt with a median TTFT of 200 ms is reconsidered


@dataclass(frozen=True, slots=True)
class Step:
    """What the wire was told in one event, and when it is to wake the machine; None: not at all."""

    actions: tuple[tuple[str, Any, Any], ...] = ()
    wake_at: float | None = None


class ScriptedWire(Wire):
    """A wire that writes down what it is told."""

    def __init__(self) -> None:
        self.actions: list[tuple[str, Any, Any]] = []
        self.wake_at: float | None = None

    def open(self, attempt: Attempt) -> None:
        self.actions.append(("open", attempt.number, attempt))

    def cancel(self, number: int, outcome: AttemptOutcome) -> None:
        self.actions.append(("cancel", number, outcome))

    def keep(self, number: int, objection: str) -> None:
        self.actions.append(("keep", number, objection))

    def commit(self, number: int, *, was_kept: bool = False) -> None:
        self.actions.append(("commit", number, was_kept))

    def leave(self, number: int) -> None:
        self.actions.append(("leave", number, None))

    def give_up(self, reason: str, *, unasked: bool = False) -> None:
        self.actions.append(("give up", reason, unasked))

    def wake(self, at: float) -> None:
        self.wake_at = None if at == FOREVER else at

    def step(self) -> Step:
        """What was told since the last step."""
        actions, self.actions = tuple(self.actions), []
        return Step(actions, self.wake_at)


class GivenFacts(ScriptedWire):
    """Facts that a test sets. `overtaken`: answers of the next looks, then no; `outlooks`: of the attempts, by number;
    `now`: forecasts of endpoints by id, that have changed since the decision; `left_after`: s of silence."""

    def __init__(
        self,
        *,
        closed: Collection[str] = (),
        drained: Collection[str] = (),
        saturated: bool = False,
        overtaken: Collection[bool] = (),
        windows: Collection[str] = ("small",),
        left_after: float = FOREVER,
        **progress: Any,
    ) -> None:
        super().__init__()
        self.closes = True
        self.closed, self.saturated, self.windows = set(closed), saturated, frozenset(windows)
        self.overtaken = list(overtaken)
        self.left_after = left_after
        self.drained: set[str] = set(drained)
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


class ScriptedRace:
    """An attempt machine over a wire that writes down what it is told."""

    def __init__(
        self,
        decision: Decision,
        limits: AttemptLimits,
        retries: RetryBudget | None = None,
        hedges: HedgeBudget | None = None,
        facts: ScriptedWire | None = None,
    ) -> None:
        self.facts = facts or ScriptedWire()
        budgets = retries or RetryBudget(), hedges or HedgeBudget(10.0)
        self.machine = AttemptMachine(decision, limits, *budgets, self.facts, now=0.0)

    @property
    def state(self) -> AttemptState:
        return self.machine.state

    @property
    def pending(self) -> Mapping[int, PendingAttempt]:
        return self.machine.pending

    def others(self) -> Sequence[Candidate]:
        return self.machine.others()

    def begin(self, now: float) -> Step:
        self.machine.begin(now)
        return self.facts.step()

    def first_token(self, number: int, now: float) -> Step:
        self.machine.first_token(number, now)
        return self.facts.step()

    def answered(self, number: int, now: float, objection: str = "") -> Step:
        self.machine.answered(number, objection, now)
        return self.facts.step()

    def failed(self, failure: Failed, now: float) -> Step:
        self.machine.failed(failure, now)
        return self.facts.step()

    def endpoint_down(self, number: int, now: float) -> Step:
        self.machine.endpoint_down(number, now)
        return self.facts.step()

    def look(self, now: float) -> Step:
        self.machine.look(now)
        return self.facts.step()

    def client_gone(self) -> Step:
        self.machine.client_gone()
        return self.facts.step()

    def broken(self, blame: Blame, others: Sequence[Candidate], now: float) -> Step:
        """`not continued`: the machine has asked nobody."""
        was_committed = self.state is AttemptState.COMMITTED
        if not self.machine.broken(blame, others, now, RESCUE_ATTEMPT) and was_committed:
            self.facts.actions.append(("not continued", None, None))
        return self.facts.step()


def machine(
    *ranked: Candidate,
    deadline: float = 1.0,
    max_attempts: int = 3,
    limit: float = 30.0,
    retries: RetryBudget | None = None,
    hedges: HedgeBudget | None = None,
    facts: ScriptedWire | None = None,
    **limits: Any,
) -> ScriptedRace:
    """A machine with permissions for ten retries and ten hedges. `limits`: fields of AttemptLimits."""
    return ScriptedRace(
        decided(*ranked, deadline=deadline),
        AttemptLimits(max_attempts=max_attempts, first_token_limit=limit, **{"limit_is_meant": True, **limits}),
        retries,
        hedges,
        facts,
    )


def begun(*ranked: Candidate, **how: Any) -> ScriptedRace:
    """A machine whose first attempt is pending since 0 s."""
    race = machine(*ranked, **how)
    race.begin(0.0)
    return race


def fails(number: int, kind: str = "server", **more: Any) -> Failed:
    """`kind`: a row of the table of blame."""
    return Failed(number, BLAME[kind], **more)


def of_server(server: str, *ids: str) -> list[Candidate]:
    """Candidates for several API keys of a server."""
    return [replace(each, endpoint=replace(each.endpoint, server=server)) for each in map(candidate, ids)]


def told(step: Step) -> list[str]:
    """The actions of a step in words: `open 1 primary a`, `cancel 1 silent`, `commit 2`, `give up`."""
    words = []
    for name, number, what in step.actions:
        match what:
            case Attempt(kind=kind, candidate=candidate):
                words.append(f"open {number} {kind.value} {candidate.endpoint.id}")
            case AttemptOutcome():
                words.append(f"{name} {number} {what.value}")
            case str():
                words.append(f"{name} {number} {what}")
            case _:
                words.append(f"{name} {number}" if isinstance(number, int) else name)
    return words


def silence(race: ScriptedRace, step: Step) -> tuple[Step, float]:
    """Fires the timers that the machine sets until the first action; returns the step and its time (s)."""
    while step.wake_at is not None:
        now = step.wake_at
        step = race.look(now)
        if step.actions:
            return step, now
    raise AssertionError("the machine waits for nothing")


def reason(step: Step) -> str:
    """The words of the end without an answer."""
    (found,) = [words for name, words, _ in step.actions if name == "give up"]
    return str(found)


# --------------------------------------------------------------------------- hedging


def hedged(*ranked: Candidate, **more: Any) -> tuple[ScriptedRace, float]:
    """A machine whose first candidate has been silent, with the second candidate as the hedge; and the time (s)."""
    race = machine(*ranked, hedge=True, **more)
    step, now = silence(race, race.begin(0.0))
    assert told(step) == [f"open 2 hedge {ranked[1].endpoint.id}"]
    return race, now


# --------------------------------------------------------------------------- always

NUMBERS = st.integers(1, 5)
BLAMES = st.sampled_from(list(BLAME.values()))


FAILURES = st.builds(
    Failed,
    NUMBERS,
    BLAMES,
    st.none() | st.floats(0, 100),
    accepted=st.booleans(),
    translated=st.booleans(),
    doubtful=st.booleans(),
    anew=st.none() | st.booleans(),
)
OTHERS = st.lists(st.builds(candidate, st.sampled_from("abcd")), max_size=3)


ScriptedEvent = tuple[str, tuple[Any, ...]]  # its name, and what it is given besides the time
EVENTS: st.SearchStrategy[ScriptedEvent] = st.one_of(
    st.just(("begin", ())),
    st.tuples(st.just("first_token"), st.tuples(NUMBERS)),
    st.tuples(st.just("answered"), st.tuples(NUMBERS, st.sampled_from(["", "refusal"]))),
    st.tuples(st.just("failed"), st.tuples(FAILURES)),
    st.tuples(st.just("endpoint_down"), st.tuples(NUMBERS)),
    st.just(("look", ())),
    st.just(("client_gone", ())),
    st.tuples(st.just("broken"), st.tuples(BLAMES, OTHERS)),
)


def happens(race: ScriptedRace, event: ScriptedEvent, now: float) -> Step:
    match event:
        case "answered", (number, objection):
            return race.answered(number, now, objection)
        case "client_gone", ():
            return race.client_gone()
        case name, given:
            found: Step = getattr(race, name)(*given, now)
            return found


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
