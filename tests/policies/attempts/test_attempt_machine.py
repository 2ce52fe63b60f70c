"""The attempts of one request, up to its first token."""

from __future__ import annotations

import pytest

from policies.attempts.attempt_machine import (
    AttemptMachine,
    AttemptState,
    AttemptStep,
    Begin,
    ClientGone,
    Event,
    Failed,
    FirstToken,
    TimerFired,
)
from policies.attempts.hedging import abandon_at
from policies.types import FOREVER, Decision, Placement
from tests.policies.attempts.attempting import PATIENCE, A, B, C, hedged, machine, reason, silence, told
from tests.policies.deciding import candidate

# --------------------------------------------------------------------------- the plain course


def test_the_chosen_candidate_is_opened_and_its_first_token_commits() -> None:
    """Most requests see nothing else."""
    race = machine(A, B)
    assert told(race.on(Begin(), 0.0)) == ["open 1 primary a"]
    assert told(race.on(FirstToken(1), 0.2)) == ["commit 1"]
    assert race.state is AttemptState.COMMITTED


@pytest.mark.parametrize("late", [Failed(1, connection_lost=True), FirstToken(1), TimerFired(), ClientGone(), Begin()])
def test_nothing_happens_after_commit(late: Event) -> None:
    """The answer is with the client: the relay speaks for it now."""
    race = machine(A, B)
    race.on(Begin(), 0.0)
    race.on(FirstToken(1), 0.2)
    assert race.on(late, 0.3) == AttemptStep()


def test_a_client_that_leaves_cancels_every_attempt() -> None:
    """Nobody would read the answer, so no engine should compute it."""
    race, now = hedged(A, B)
    assert told(race.on(ClientGone(), now + 0.1)) == ["cancel 1 cancelled", "cancel 2 cancelled"]
    assert race.on(FirstToken(1), now + 0.2) == AttemptStep()


@pytest.mark.parametrize("outcome", [Placement.SHED, Placement.UNAVAILABLE, Placement.UNFIT])
def test_a_decision_that_places_nothing_opens_nothing(outcome: Placement) -> None:
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
    assert told(race.on(Failed(1, connection_lost=True), 0.1)) == ["open 2 fallback b"]
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
    assert told(race.on(Failed(1, connection_lost=True), 0.1, may_retry=False)) == ["open 2 fallback b"]


def test_no_more_attempts_than_allowed() -> None:
    """However many candidates there are."""
    race = machine(A, B, C, max_attempts=2)
    race.on(Begin(), 0.0)
    race.on(Failed(1, connection_lost=True), 0.1)
    assert reason(race.on(Failed(2, connection_lost=True), 0.2)) == "all 2 attempts allowed have failed"


def test_failover_goes_on_after_the_deadline() -> None:
    """A late answer is better than an error."""
    race = machine(A, B)
    race.on(Begin(), 0.0)
    assert told(race.on(Failed(1), 5.0)) == ["open 2 fallback b"]


def test_a_request_that_two_endpoints_died_of_is_offered_to_no_third() -> None:
    """It may have killed them; in the hands of a third it would take the rest of the pool."""
    race = machine(A, B, C, max_attempts=5)
    race.on(Begin(), 0.0)
    race.on(Failed(1, connection_lost=True, taken=True), 0.1)
    step = race.on(Failed(2, connection_lost=True, taken=True), 0.2)
    assert (told(step), reason(step)) == (["give up"], "2 endpoints died while they worked on it")


def test_an_endpoint_that_died_without_the_request_is_not_held_against_it() -> None:
    """Nor is one that refused it or was left: those did not die of it."""
    race = machine(A, B, C, candidate("d"), max_attempts=5)
    race.on(Begin(), 0.0)
    race.on(Failed(1, connection_lost=True), 0.1)
    race.on(Failed(2, connection_lost=True, taken=True), 0.2)
    assert told(race.on(Failed(3), 0.3)) == ["open 4 fallback d"]


def test_a_race_that_two_endpoints_died_of_goes_on_with_whom_it_has() -> None:
    """The one that is at it already may answer; nobody follows it."""
    race, now = hedged(A, B, C, candidate("d"), max_attempts=5)
    race.on(Failed(1, connection_lost=True, taken=True), now)
    step, later = silence(race, race.on(TimerFired(), now))
    assert told(step) == ["open 3 hedge c"]
    race.on(Failed(3, connection_lost=True, taken=True), later)
    step, _ = silence(race, race.on(TimerFired(), later))
    assert told(step) == ["cancel 2 silent", "give up"]


# --------------------------------------------------------------------------- once more


def test_a_connection_that_died_is_tried_once_more_where_there_is_no_other() -> None:
    """A fresh connection to the same endpoint, once."""
    race = machine(A)
    race.on(Begin(), 0.0)
    assert told(race.on(Failed(1, connection_lost=True), 0.1)) == ["open 2 fallback a"]
    assert reason(race.on(Failed(2, connection_lost=True), 0.2)) == "all 1 candidates have failed"


def test_the_only_endpoint_of_a_pool_is_asked_again_after_the_wait_that_it_asked_for() -> None:
    """Its Retry-After is honoured, if there is time for it."""
    race = machine(A)
    race.on(Begin(), 0.0)
    assert race.on(Failed(1, retry_after=0.4), 0.1) == AttemptStep((), 0.5)
    assert race.on(TimerFired(), 0.49) == AttemptStep((), 0.5)
    assert told(race.on(TimerFired(), 0.5)) == ["open 2 fallback a"]


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
    assert race.on(ClientGone(), 0.15) == AttemptStep()
    assert race.on(TimerFired(), 0.2) == AttemptStep()


# --------------------------------------------------------------------------- silence


def test_a_silent_stream_is_left_for_the_next_candidate() -> None:
    """Once nine of ten would have spoken, and at the moment that gives both the best chance together."""
    race = machine(A, B)
    begun = race.on(Begin(), 0.0)
    assert begun.wake_at == pytest.approx(PATIENCE)
    step, now = silence(race, begun)
    assert told(step) == ["cancel 1 silent", "open 2 fallback b"]
    assert now == abandon_at(A.forecast, B.forecast, 0.0, PATIENCE, 1.0)
    assert B.forecast.probability(1.0 - now) > 0.95


def test_a_wake_that_comes_early_changes_nothing() -> None:
    """Timers are not exact."""
    race = machine(A, B)
    step = race.on(Begin(), 0.0)
    assert race.on(TimerFired(), 0.1) == AttemptStep((), step.wake_at)


def test_a_silent_stream_is_kept_until_the_moment_that_was_found() -> None:
    """It is weighed once, and left then."""
    race = machine(candidate("a", 0.2), candidate("b", 0.5), deadline=2.0)
    first = race.on(Begin(), 0.0).wake_at
    assert first is not None
    assert first == pytest.approx(PATIENCE)
    later = race.on(TimerFired(), first)
    assert later.actions == ()
    assert later.wake_at is not None
    assert first < later.wake_at < 2.0
    assert told(race.on(TimerFired(), later.wake_at)) == ["cancel 1 silent", "open 2 fallback b"]
