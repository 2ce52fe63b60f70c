"""Attempts of one request, up to the first token."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from policies.attempts.attempt_machine import OVERDUE, AttemptState
from policies.attempts.patience import abandon_at
from policies.attempts.wire import AttemptLimits, Failed
from policies.types import FOREVER, Decision, Placement
from tests.support.attempt_script import (
    API,
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
from tests.support.decision_fleet import candidate

# --------------------------------------------------------------------------- without failures


def test_the_chosen_candidate_is_opened_and_its_first_token_commits() -> None:
    """The course of most requests."""
    race = machine(A, B)
    assert told(race.begin(0.0)) == ["open 1 primary a"]
    assert told(race.first_token(1, 0.2)) == ["commit 1"]
    assert race.state is AttemptState.COMMITTED


@pytest.mark.parametrize(
    "late",
    [
        lambda race: race.failed(fails(2, "connect"), 0.3),
        lambda race: race.first_token(1, 0.3),
        lambda race: race.endpoint_down(1, 0.3),
        lambda race: race.look(0.3),
        lambda race: race.begin(0.3),
    ],
)
def test_events_about_other_attempts_change_nothing_after_the_commit(late: Callable[[ScriptedRace], Step]) -> None:
    """The answer is being relayed."""
    race = begun(A, B)
    race.first_token(1, 0.2)
    assert late(race) == Step()
    assert race.state is AttemptState.COMMITTED


def test_a_client_that_leaves_cancels_every_attempt() -> None:
    """No caller reads the answer, so no engine should compute the answer."""
    race, now = hedged(A, B)
    assert told(race.client_gone()) == ["cancel 1 cancelled", "cancel 2 cancelled"]
    assert race.first_token(1, now + 0.2) == Step()


@pytest.mark.parametrize(
    ("progress", "expected"),
    [
        ({"complete": True, "relayed": True}, "cancel 1 completed"),
        ({"complete": True, "relayed": True, "paused": True}, "cancel 1 cancelled"),
        ({"complete": True}, "cancel 1 cancelled"),
    ],
)
def test_a_client_that_leaves_after_the_last_event_has_its_answer(progress: dict[str, bool], expected: str) -> None:
    """Not where it has stopped reading, or where the last event is still to come."""
    race = begun(A, B, facts=GivenFacts(**progress))
    race.first_token(1, 0.2)
    assert told(race.client_gone()) == [expected]
    assert race.state is AttemptState.OVER


@pytest.mark.parametrize("outcome", [Placement.SHED, Placement.UNAVAILABLE, Placement.UNFIT])
def test_a_refusal_opens_no_attempt(outcome: Placement) -> None:
    """Candidates kept for the explanation are not tried."""
    race = ScriptedRace(Decision(outcome, 0.0, 1.0, (A,)), AttemptLimits(max_attempts=3))
    assert reason(race.begin(0.0)) == "there is no candidate"


# --------------------------------------------------------------------------- failures


def test_a_failure_goes_to_the_next_candidate_at_once() -> None:
    """In the order of the decision, each once."""
    race = begun(A, B, C)
    assert told(race.failed(fails(1, "connect"), 0.1)) == ["open 2 fallback b"]
    assert told(race.failed(fails(2), 0.2)) == ["open 3 fallback c"]
    assert told(race.first_token(3, 0.4)) == ["commit 3"]


def test_a_request_error_is_not_retried() -> None:
    """No other endpoint would do better."""
    race = begun(A, B)
    step = race.failed(fails(1, "client"), 0.1)
    assert reason(step) == "attempt 1 failed and no other endpoint would do better"


def test_the_last_of_three_attempts_goes_to_another_pool() -> None:
    """A tier with many endpoints that all fail must not use up every attempt."""
    race = begun(A, B, C, API)
    assert told(race.failed(fails(1), 0.1)) == ["open 2 fallback b"]
    assert told(race.failed(fails(2), 0.2)) == ["open 3 fallback api"]


def test_pools_with_the_same_fault_are_avoided() -> None:
    """Of the same account, for example: a request too large for its limits."""
    assert told(begun(A, B, API).failed(fails(1, "request_size"), 0.1)) == ["open 2 fallback api"]
    assert told(begun(A, B).failed(fails(1, "request_size"), 0.1)) == ["give up"]


@pytest.mark.parametrize("kind", ["auth", "rate_limited", "request_size", "context"])
def test_an_attempt_that_cannot_come_out_otherwise_is_not_made(kind: str) -> None:
    """A wrong key stays wrong, and a 429 without a time tells nothing to wait for."""
    assert told(begun(A).failed(fails(1, kind), 0.1)) == ["give up"]


def test_an_attempt_at_a_dead_endpoint_is_abandoned_for_the_next_candidate() -> None:
    """At once, streamed or not; such an attempt does not count as a death caused by the request."""
    race = begun(A, B, stream=False)
    assert told(race.endpoint_down(1, 0.1)) == ["cancel 1 silent", "open 2 fallback b"]
    assert told(race.endpoint_down(2, 0.2)) == []
    assert told(race.first_token(2, 0.3)) == ["commit 2"]


def test_of_two_attempts_the_one_at_a_dead_endpoint_is_cancelled() -> None:
    """The other attempt continues, without a replacement."""
    race, now = hedged(A, B, C)
    assert told(race.endpoint_down(1, now)) == ["cancel 1 silent"]
    assert told(race.first_token(2, now + 0.1)) == ["commit 2"]


def test_max_attempts_bounds_the_attempts() -> None:
    """At any number of candidates."""
    race = begun(A, B, C, max_attempts=2)
    race.failed(fails(1, "connect"), 0.1)
    assert reason(race.failed(fails(2, "connect"), 0.2)) == "all 2 attempts allowed have failed"


def test_failover_continues_after_the_deadline() -> None:
    """A late answer is better than an error."""
    race = begun(A, B)
    assert told(race.failed(fails(1), 5.0)) == ["open 2 fallback b"]


def test_a_request_accepted_by_two_dead_endpoints_is_given_up() -> None:
    """The request may have killed both, and could kill the rest of the pool."""
    race = begun(A, B, C, max_attempts=5)
    race.failed(fails(1, "reset", accepted=True), 0.1)
    step = race.failed(fails(2, "reset", accepted=True), 0.2)
    assert (told(step), reason(step)) == (["give up"], "2 endpoints died while they worked on it")


def test_only_endpoints_that_died_after_acceptance_are_counted() -> None:
    """A refusal or an abandonment is no death."""
    race = begun(A, B, C, candidate("d"), max_attempts=5)
    race.failed(fails(1, "connect"), 0.1)
    race.failed(fails(2, "reset", accepted=True), 0.2)
    assert told(race.failed(fails(3), 0.3)) == ["open 4 fallback d"]


def test_after_two_deaths_a_pending_attempt_continues_without_successor() -> None:
    """The pending attempt may still answer."""
    race, now = hedged(A, B, C, candidate("d"), max_attempts=5)
    race.failed(fails(1, "reset", accepted=True), now)
    step, later = silence(race, race.look(now))
    assert told(step) == ["open 3 hedge c"]
    race.failed(fails(3, "reset", accepted=True), later)
    step, _ = silence(race, race.look(later))
    assert told(step) == ["cancel 2 silent", "give up"]


# --------------------------------------------------------------------------- the same endpoint again


def test_a_lost_connection_to_the_only_endpoint_is_retried_once() -> None:
    """Over a fresh connection."""
    race = begun(A)
    assert told(race.failed(fails(1, "connect"), 0.1)) == ["open 2 fallback a"]
    assert reason(race.failed(fails(2, "connect"), 0.2)) == "all 1 candidates have failed"


def test_the_only_endpoint_of_a_pool_is_retried_after_its_retry_after() -> None:
    """If the deadline allows the wait."""
    race = begun(A)
    assert race.failed(fails(1, retry_after=0.4), 0.1) == Step((), 0.5)
    assert race.look(0.49) == Step((), 0.5)
    assert told(race.look(0.5)) == ["open 2 fallback a"]


def test_an_overload_reply_without_retry_after_is_retried_after_100_ms() -> None:
    """An immediate retry would find the same overload."""
    race = begun(A)
    assert race.failed(fails(1), 0.1).wake_at == pytest.approx(0.2)


@pytest.mark.parametrize("failure", [fails(1, retry_after=0.9), fails(1, retry_after=1e9)])
def test_a_retry_after_beyond_the_deadline_is_not_waited_for(failure: Failed) -> None:
    """An immediate error serves the caller better."""
    race = begun(A)
    assert told(race.failed(failure, 0.2)) == ["give up"]


def test_without_a_deadline_a_retry_waits_at_most_the_first_token_limit() -> None:
    """A Retry-After of an hour is not waited for."""
    race = begun(A, deadline=FOREVER)
    assert told(race.failed(fails(1, retry_after=3600.0), 0.2)) == ["give up"]


def test_an_overloaded_endpoint_with_peers_is_not_retried() -> None:
    """All peers of the pool have refused too."""
    race = begun(A, B)
    race.failed(fails(1), 0.1)
    assert told(race.failed(fails(2), 0.2)) == ["give up"]


def test_a_client_that_leaves_during_backoff_ends_the_request() -> None:
    """No attempt is opened without a caller."""
    race = begun(A)
    race.failed(fails(1), 0.1)
    assert race.client_gone() == Step()
    assert race.look(0.2) == Step()


# --------------------------------------------------------------------------- the limit of the whole answer


def test_a_silent_whole_answer_is_abandoned_at_half_of_its_time() -> None:
    """If another candidate exists; the last candidate has the rest of the time."""
    race = machine(A, B, stream=False, limit_at=8.0)
    assert race.begin(0.0).wake_at == 4.0
    step = race.look(4.0)
    assert (told(step), step.wake_at) == (["cancel 1 silent", "open 2 fallback b"], 8.0)
    step = race.look(8.0)
    assert (told(step), reason(step)) == (["cancel 2 silent", "give up"], OVERDUE)


def test_no_attempt_is_opened_after_the_total_limit() -> None:
    """After the queue, a Retry-After or a silent stream."""
    late = machine(A, B, limit_at=1.0)
    assert reason(late.begin(1.0)) == OVERDUE
    waiting = begun(A, deadline=FOREVER, limit_at=1.0)
    assert told(waiting.failed(fails(1, retry_after=1.0), 0.5)) == ["give up"]
    silent = machine(A, B, deadline=FOREVER, limit_at=1.0)
    assert silent.begin(0.0).wake_at == 1.0
    assert told(silent.look(1.0)) == ["cancel 1 silent", "give up"]


# --------------------------------------------------------------------------- silence


def test_a_silent_stream_is_abandoned_for_the_next_candidate() -> None:
    """After 1.2 times its p90, at the moment with the best joint probability of meeting the deadline."""
    race = machine(A, B)
    begun = race.begin(0.0)
    assert begun.wake_at == pytest.approx(PATIENCE)
    step, now = silence(race, begun)
    assert told(step) == ["cancel 1 silent", "open 2 fallback b"]
    assert now == abandon_at(A.forecast, B.forecast, 0.0, PATIENCE, 1.0)
    assert B.forecast.probability(1.0 - now) > 0.95


def test_an_early_timer_changes_nothing() -> None:
    """Timers are not exact."""
    race = machine(A, B)
    step = race.begin(0.0)
    assert race.look(0.1) == Step((), step.wake_at)


def test_a_silent_stream_is_abandoned_at_the_computed_moment() -> None:
    """Computed once."""
    race = machine(candidate("a", 0.2), candidate("b", 0.5), deadline=2.0)
    first = race.begin(0.0).wake_at
    assert first is not None
    assert first == pytest.approx(PATIENCE)
    later = race.look(first)
    assert later.actions == ()
    assert later.wake_at is not None
    assert first < later.wake_at < 2.0
    assert told(race.look(later.wake_at)) == ["cancel 1 silent", "open 2 fallback b"]
