"""The attempts of one request, up to its first token."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.attempts import (
    TRANSITIONS,
    AttemptMachine,
    Begin,
    Cancel,
    ClientGone,
    Commit,
    Event,
    Failed,
    FirstToken,
    GiveUp,
    Open,
    State,
    Step,
    Wake,
)
from policies.facts import FOREVER, Candidate, Decision, Outcome
from policies.silence import leave_at
from tests.policies.deciding import P90, candidate, decided

A, B, C = candidate("a"), candidate("b"), candidate("c")
PATIENCE = 1.2 * P90 * 0.2  # s of silence before an attempt that takes 200 ms is weighed


def machine(
    *ranked: Candidate,
    deadline: float = 1.0,
    max_attempts: int = 3,
    stream: bool = True,
    hedge: bool = False,
    limit: float = 30.0,
) -> AttemptMachine:
    return AttemptMachine(
        decided(*ranked, deadline=deadline),
        max_attempts=max_attempts, stream=stream, hedge=hedge, first_token_limit=limit, now=0.0,
    )  # fmt: skip


def told(step: Step) -> list[str]:
    """A step in words: `open 1 primary a`, `cancel 1 silent`, `commit 2`, `give up`."""
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


def silence(race: AttemptMachine, step: Step, may_retry: bool = True) -> tuple[Step, float]:
    """Nothing but the Wakes that the machine asks for, until it does something; and when that was."""
    while step.wake_at is not None:
        now = step.wake_at
        step = race.on(Wake(), now, may_retry)
        if step.actions:
            return step, now
    raise AssertionError("the machine waits for nothing")


def reason(step: Step) -> str:
    (given_up,) = [action.reason for action in step.actions if isinstance(action, GiveUp)]
    return given_up


# --------------------------------------------------------------------------- the plain course


def test_the_chosen_candidate_is_opened_and_its_first_token_commits() -> None:
    """Most requests see nothing else."""
    race = machine(A, B)
    assert told(race.on(Begin(), 0.0)) == ["open 1 primary a"]
    assert told(race.on(FirstToken(1), 0.2)) == ["commit 1"]
    assert race.state is State.COMMITTED


@pytest.mark.parametrize("late", [Failed(1, died=True), FirstToken(1), Wake(), ClientGone(), Begin()])
def test_nothing_happens_after_commit(late: Event) -> None:
    """The answer is with the client: the relay speaks for it now."""
    race = machine(A, B)
    race.on(Begin(), 0.0)
    race.on(FirstToken(1), 0.2)
    assert race.on(late, 0.3) == Step()


def test_a_client_that_leaves_cancels_every_attempt() -> None:
    """Nobody would read the answer, so no engine should compute it."""
    race, now = hedged(A, B)
    assert told(race.on(ClientGone(), now + 0.1)) == ["cancel 1 cancelled", "cancel 2 cancelled"]
    assert race.on(FirstToken(1), now + 0.2) == Step()


@pytest.mark.parametrize("outcome", [Outcome.SHED, Outcome.UNAVAILABLE, Outcome.UNFIT])
def test_a_decision_that_places_nothing_opens_nothing(outcome: Outcome) -> None:
    """Candidates that were kept for the explanation are not tried."""
    race = AttemptMachine(
        Decision(outcome, 0.0, 1.0, (A,)), max_attempts=3, stream=True, hedge=False, first_token_limit=30.0, now=0.0
    )
    assert told(race.on(Begin(), 0.0)) == ["give up"]


# --------------------------------------------------------------------------- failures


def test_a_failure_goes_to_the_next_candidate_at_once() -> None:
    """In the order of the decision, each once."""
    race = machine(A, B, C)
    race.on(Begin(), 0.0)
    assert told(race.on(Failed(1, died=True), 0.1)) == ["open 2 fallback b"]
    assert told(race.on(Failed(2), 0.2)) == ["open 3 fallback c"]
    assert told(race.on(FirstToken(3), 0.4)) == ["commit 3"]


def test_a_fault_of_the_request_is_not_tried_elsewhere() -> None:
    """No other endpoint would do better."""
    race = machine(A, B)
    race.on(Begin(), 0.0)
    step = race.on(Failed(1, retryable=False), 0.1)
    assert reason(step) == "attempt 1 failed and no other endpoint would do better"


def test_an_overload_reply_needs_the_retry_budgets_permission() -> None:
    """Or retries would double the load of a fleet that refuses already."""
    race = machine(A, B)
    race.on(Begin(), 0.0)
    assert reason(race.on(Failed(1), 0.1, may_retry=False)) == "attempt 1 failed and the retry budget is spent"


def test_a_death_is_not_charged() -> None:
    """No engine did any work for it."""
    race = machine(A, B)
    race.on(Begin(), 0.0)
    assert told(race.on(Failed(1, died=True), 0.1, may_retry=False)) == ["open 2 fallback b"]


def test_no_more_attempts_than_allowed() -> None:
    """However many candidates there are."""
    race = machine(A, B, C, max_attempts=2)
    race.on(Begin(), 0.0)
    race.on(Failed(1, died=True), 0.1)
    assert reason(race.on(Failed(2, died=True), 0.2)) == "all 2 attempts allowed have failed"


def test_failover_goes_on_after_the_deadline() -> None:
    """A late answer is better than an error."""
    race = machine(A, B)
    race.on(Begin(), 0.0)
    assert told(race.on(Failed(1), 5.0)) == ["open 2 fallback b"]


# --------------------------------------------------------------------------- once more


def test_a_connection_that_died_is_tried_once_more_where_there_is_no_other() -> None:
    """A fresh connection to the same endpoint, once."""
    race = machine(A)
    race.on(Begin(), 0.0)
    assert told(race.on(Failed(1, died=True), 0.1)) == ["open 2 fallback a"]
    assert reason(race.on(Failed(2, died=True), 0.2)) == "all 1 candidates have failed"


def test_the_only_endpoint_of_a_pool_is_asked_again_after_the_wait_that_it_asked_for() -> None:
    """Its Retry-After is honoured, if there is time for it."""
    race = machine(A)
    race.on(Begin(), 0.0)
    assert race.on(Failed(1, retry_after=0.4), 0.1) == Step((), 0.5)
    assert race.on(Wake(), 0.49) == Step((), 0.5)
    assert told(race.on(Wake(), 0.5)) == ["open 2 fallback a"]


def test_an_overload_reply_that_names_no_wait_is_given_a_tenth_of_a_second() -> None:
    """To ask at once would be to ask the same."""
    race = machine(A)
    race.on(Begin(), 0.0)
    assert race.on(Failed(1), 0.1).wake_at == pytest.approx(0.2)


@pytest.mark.parametrize("failure", [Failed(1, retry_after=0.9), Failed(1, retry_after=1e9)])
def test_a_wait_beyond_the_deadline_is_not_waited_for(failure: Failed) -> None:
    """The caller is better told now."""
    race = machine(A)
    race.on(Begin(), 0.0)
    assert told(race.on(failure, 0.2)) == ["give up"]


def test_without_a_deadline_no_wait_is_longer_than_the_limit_of_silence() -> None:
    """An hour of Retry-After is not waited for."""
    race = machine(A, deadline=FOREVER)
    race.on(Begin(), 0.0)
    assert told(race.on(Failed(1, retry_after=3600.0), 0.2)) == ["give up"]


def test_an_overloaded_endpoint_with_peers_is_not_asked_again() -> None:
    """Its peers of the same pool have all refused too."""
    race = machine(A, B)
    race.on(Begin(), 0.0)
    race.on(Failed(1), 0.1)
    assert told(race.on(Failed(2), 0.2)) == ["give up"]


def test_a_client_that_leaves_ends_the_wait() -> None:
    """Nothing is opened for nobody."""
    race = machine(A)
    race.on(Begin(), 0.0)
    race.on(Failed(1), 0.1)
    assert race.on(ClientGone(), 0.15) == Step()
    assert race.on(Wake(), 0.2) == Step()


# --------------------------------------------------------------------------- silence


def test_a_silent_stream_is_left_for_the_next_candidate() -> None:
    """Once nine of ten would have spoken, and at the moment that gives both the best chance together."""
    race = machine(A, B)
    begun = race.on(Begin(), 0.0)
    assert begun.wake_at == pytest.approx(PATIENCE)
    step, now = silence(race, begun)
    assert told(step) == ["cancel 1 silent", "open 2 fallback b"]
    assert now == leave_at(A.forecast, B.forecast, 0.0, PATIENCE, 1.0)
    assert B.forecast.chance(1.0 - now) > 0.95


def test_a_wake_that_comes_early_changes_nothing() -> None:
    """Timers are not exact."""
    race = machine(A, B)
    step = race.on(Begin(), 0.0)
    assert race.on(Wake(), 0.1) == Step((), step.wake_at)


def test_a_silent_stream_is_kept_until_the_moment_that_was_found() -> None:
    """It is weighed once, and left then."""
    race = machine(candidate("a", 0.2), candidate("b", 0.5), deadline=2.0)
    first = race.on(Begin(), 0.0).wake_at
    assert first is not None
    assert first == pytest.approx(PATIENCE)
    later = race.on(Wake(), first)
    assert later.actions == ()
    assert later.wake_at is not None
    assert first < later.wake_at < 2.0
    assert told(race.on(Wake(), later.wake_at)) == ["cancel 1 silent", "open 2 fallback b"]


def test_the_last_candidate_is_waited_for_until_the_limit() -> None:
    """There is nobody to leave it for."""
    race = machine(A)
    assert race.on(Begin(), 0.0).wake_at == 30.0
    step = race.on(Wake(), 30.0)
    assert told(step) == ["cancel 1 silent", "give up"]
    assert reason(step) == "no first token within 30 s"


@pytest.mark.parametrize("plain", [{"stream": False}, {"deadline": FOREVER}])
def test_silence_says_nothing_of_an_answer_that_arrives_whole_or_has_no_deadline(plain: dict[str, Any]) -> None:
    """Only the limit bounds it, and then the next candidate is tried."""
    race = machine(A, B, **plain)
    assert race.on(Begin(), 0.0).wake_at == 30.0
    assert told(race.on(Wake(), 30.0)) == ["cancel 1 silent", "open 2 fallback b"]


def test_past_the_deadline_a_silent_stream_is_left_when_it_is_overdue() -> None:
    """A second at least, for there is no chance left to compare."""
    race = machine(A, B, C)
    race.on(Begin(), 0.0)
    race.on(Failed(1), 2.0)
    step = race.on(Wake(), 2.0 + PATIENCE)
    assert step.actions == ()
    assert step.wake_at is not None
    assert step.wake_at == pytest.approx(2.0 + 3 * A.forecast.quantile(0.99))
    assert told(race.on(Wake(), step.wake_at)) == ["cancel 2 silent", "open 3 fallback c"]


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


# --------------------------------------------------------------------------- hedging


def hedged(*ranked: Candidate, **more: Any) -> tuple[AttemptMachine, float]:
    """A race of two, and since when: the first candidate has been silent, the second is its hedge."""
    race = machine(*ranked, hedge=True, **more)
    step, now = silence(race, race.on(Begin(), 0.0))
    assert told(step) == [f"open 2 hedge {ranked[1].endpoint.id}"]
    return race, now


@pytest.mark.parametrize(("winner", "loser"), [(1, 2), (2, 1)])
def test_the_first_content_wins_and_the_loser_is_cancelled(winner: int, loser: int) -> None:
    """At the engine, at once."""
    race, now = hedged(A, B)
    assert told(race.on(FirstToken(winner), now + 0.1)) == [f"commit {winner}", f"cancel {loser} cancelled"]


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
    assert refused == Step((), now + 0.01)
    step, again = silence(race, refused)
    assert told(step) == ["open 3 hedge c"]
    assert again < now + 0.1


def test_no_more_than_two_race() -> None:
    """A hedge that is silent too is replaced, while the first may still speak."""
    race, now = hedged(A, B, C, deadline=2.0)
    step, later = silence(race, race.on(Wake(), now))
    assert told(step) == ["cancel 2 silent", "open 3 fallback c"]
    assert told(race.on(FirstToken(1), later + 0.1)) == ["commit 1", "cancel 3 cancelled"]


def test_without_a_hedge_budget_the_silent_attempt_is_left() -> None:
    """The moment to go is the same; the two are only not raced."""
    race = machine(A, B, hedge=True)
    step, _ = silence(race, race.on(Begin(), 0.0), may_retry=False)
    assert told(step) == ["cancel 1 silent", "open 2 fallback b"]


def test_the_limit_ends_one_racer_after_the_other() -> None:
    """The request fails with the last of them."""
    race, now = hedged(A, B, limit=5.0)
    assert told(race.on(Wake(), 5.0)) == ["cancel 1 silent"]
    assert told(race.on(Wake(), now + 5.0)) == ["cancel 2 silent", "give up"]


def test_two_failed_racers_are_followed_by_the_next_candidate() -> None:
    """The race is lost, the request is not."""
    race, now = hedged(A, B, C)
    race.on(Failed(1), now + 0.1)
    assert told(race.on(Failed(2), now + 0.2)) == ["open 3 fallback c"]


# --------------------------------------------------------------------------- always

NUMBERS = st.integers(1, 5)
EVENTS: st.SearchStrategy[Event] = st.one_of(
    st.just(Begin()),
    st.builds(FirstToken, NUMBERS),
    st.builds(Failed, NUMBERS, retryable=st.booleans(), died=st.booleans(), retry_after=st.none() | st.floats(0, 100)),
    st.just(Wake()),
    st.just(ClientGone()),
)
CANDIDATES = st.lists(
    st.builds(candidate, st.sampled_from("abcd"), st.floats(0.01, 3), st.sampled_from(["small", "large"])),
    max_size=4,
    unique_by=lambda found: found.endpoint.id,
)
HISTORY = st.lists(st.tuples(EVENTS, st.floats(0, 2), st.booleans(), st.booleans()), max_size=25)


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
        step = race.on(Wake() if punctual else event, now, may_retry)
        assert race.state is before or race.state in TRANSITIONS[before][Wake if punctual else type(event)]
        if before is not State.RACING and before is not State.IDLE:
            assert step == Step()
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
        ends += before in (State.IDLE, State.RACING) and race.state is State.GONE
        assert opened == list(range(1, len(opened) + 1))
        assert len(opened) <= max_attempts
        assert len(pending) <= 2
        assert set(race.pending) == pending
        assert (step.wake_at is None) == bool(ends)
        wake_at = step.wake_at
    assert ends == (race.state in (State.COMMITTED, State.GAVE_UP, State.GONE))
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
        step = race.on(Wake(), now)
    assert race.state is State.GAVE_UP
    assert now <= 5.0 * min(max_attempts, len(ranked))


def test_every_transition_leads_to_a_state() -> None:
    """The table at the top is complete: every state has its row, and ends listen to nothing."""
    assert set(TRANSITIONS) == set(State)
    assert [state for state, heard in TRANSITIONS.items() if not heard] == [
        State.COMMITTED, State.GAVE_UP, State.GONE,
    ]  # fmt: skip
