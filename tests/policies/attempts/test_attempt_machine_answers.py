"""Whole answers with a shortcoming, and failures after the commit of which nothing was written."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from policies.attempts.attempt_machine import AttemptState
from policies.blame.blame import BLAME
from policies.types import FOREVER
from tests.support.attempt_script import API, A, B, C, ScriptedRace, Step, begun, fails, hedged, silence, told
from tests.support.decision_fleet import candidate

Event = Callable[[ScriptedRace], Step]
SHORT = "refusal"
KEPT = ["keep 1 refusal", "open 2 fallback api"]

# --------------------------------------------------------------------------- escalation


def test_a_whole_answer_without_a_shortcoming_commits() -> None:
    assert told(begun(A, API, stream=False).answered(1, 1.0)) == ["commit 1"]


def test_a_shortcoming_asks_another_pool() -> None:
    """Siblings of the same pool serve the same model."""
    assert told(begun(A, B, API, stream=False).answered(1, 1.0, SHORT)) == KEPT


def test_the_answer_of_the_other_pool_is_the_callers() -> None:
    """The kept one is complete, and was paid for."""
    race = begun(A, API, stream=False)
    race.answered(1, 1.0, SHORT)
    assert told(race.answered(2, 2.0)) == ["cancel 1 completed", "commit 2"]
    assert race.state is AttemptState.COMMITTED


def test_a_second_shortcoming_commits() -> None:
    """Another pool is asked once."""
    race = begun(A, API, candidate("third", pool="third"), stream=False)
    race.answered(1, 1.0, SHORT)
    assert told(race.answered(2, 2.0, "length")) == ["cancel 1 completed", "commit 2"]


@pytest.mark.parametrize(
    ("event", "actions"),
    [
        (lambda race: race.failed(fails(2, "auth"), 31.0), ["commit 1"]),
        (lambda race: race.failed(fails(2, "client"), 31.0), ["commit 1"]),
        (lambda race: race.failed(fails(2, "reset", accepted=True), 31.0), ["open 3 fallback api"]),
        (lambda race: race.look(31.0), ["cancel 2 silent", "commit 1"]),
        (lambda race: race.endpoint_down(2, 31.0), []),
        (lambda race: race.client_gone(), ["cancel 1 completed", "cancel 2 cancelled"]),
    ],
)
def test_a_kept_answer_is_the_callers_if_no_other_comes(
    event: Callable[[ScriptedRace], Step], actions: list[str]
) -> None:
    """Whatever becomes of the other pool: a failure, a refusal, silence."""
    race = begun(A, API, stream=False, deadline=FOREVER)
    race.answered(1, 1.0, SHORT)
    assert told(event(race)) == actions


def test_the_other_pool_is_tried_as_often_as_without_a_kept_answer() -> None:
    """Once more after an overload reply."""
    race = begun(A, API, stream=False, deadline=FOREVER)
    race.answered(1, 1.0, SHORT)
    step, now = silence(race, race.failed(fails(2, "overloaded"), 2.0))
    assert told(step) == ["open 3 fallback api"]
    assert told(race.failed(fails(3, "overloaded"), now)) == ["commit 1"]


def test_a_kept_answer_is_the_callers_where_no_further_attempt_is_allowed() -> None:
    race = begun(A, API, stream=False, max_attempts=1)
    assert told(race.answered(1, 1.0, SHORT))[-1] == "commit 1"
    assert race.state is AttemptState.COMMITTED


@pytest.mark.parametrize("ranked", [(A,), (A, B)])
def test_without_another_pool_a_shortcoming_is_accepted(ranked: tuple[object, ...]) -> None:
    assert told(begun(*ranked, stream=False).answered(1, 1.0, SHORT)) == ["commit 1"]  # type: ignore[arg-type]


def test_an_answer_of_an_attempt_that_has_ended_changes_nothing() -> None:
    race = begun(A, API, stream=False, deadline=FOREVER)
    race.look(30.0)
    assert told(race.answered(1, 31.0, SHORT)) == []


# --------------------------------------------------------------------------- after the commit, with nothing written


@pytest.mark.parametrize("kind", ["protocol", "gateway", "reset", "server", "timeout"])
def test_an_unwritten_failure_after_the_commit_races_again(kind: str) -> None:
    """An answer that is put together from a stream is written at its end: until then its failure can be hidden."""
    race = begun(A, B)
    race.first_token(1, 0.2)
    assert told(race.failed(fails(1, kind, accepted=True), 5.0)) == ["open 2 fallback b"]
    assert race.state is AttemptState.RACING
    assert told(race.first_token(2, 5.2)) == ["commit 2"]


def test_an_unwritten_failure_without_another_candidate_is_the_end() -> None:
    race = begun(A)
    race.first_token(1, 0.2)
    assert told(race.failed(fails(1, "gateway"), 5.0)) == ["give up"]
    assert race.failed(fails(1, "gateway"), 5.1) == Step()


def test_the_limits_of_attempts_and_deaths_hold_after_the_commit_too() -> None:
    race = begun(A, B, C, max_attempts=5)
    race.first_token(1, 0.2)
    race.failed(fails(1, "reset", accepted=True), 5.0)
    race.first_token(2, 5.2)
    assert told(race.failed(fails(2, "reset", accepted=True), 6.0)) == ["give up"]


def test_a_caller_that_leaves_after_the_commit_cancels_the_winner() -> None:
    """No engine computes an answer that nobody reads."""
    race, now = hedged(A, B)
    race.first_token(1, now + 0.1)
    assert told(race.client_gone()) == ["cancel 1 cancelled"]
    assert race.failed(fails(1, "reset"), now + 2) == Step()


def test_every_kind_of_failure_after_the_commit_is_followed_like_one_before() -> None:
    """By the same table."""
    for kind in BLAME:
        before, after = begun(A, B, API), begun(A, B, API)
        after.first_token(1, 0.2)
        assert told(after.failed(fails(1, kind), 0.5)) == told(before.failed(fails(1, kind), 0.5))


# --------------------------------------------------------------------------- another form of the request


def test_a_refused_form_is_mended_at_the_same_endpoint_and_comes_off_no_budget() -> None:
    """The fault is none of the caller's: neither of two attempts is spent, however often a form is mended."""
    race = begun(A, API, max_attempts=2)
    assert told(race.failed(fails(1, "unfit", mended=True), 0.2)) == ["open 2 mended a"]
    assert told(race.failed(fails(2, "unfit", mended=True), 0.4)) == ["open 3 mended a"]
    assert told(race.failed(fails(3, "unfit"), 0.6)) == ["open 4 fallback api"]


def test_a_form_that_is_refused_past_the_deadline_is_not_mended() -> None:
    """The next token would be late in any form: another pool is asked, as for a form that nothing mends."""
    race = begun(A, API, deadline=1.0)
    assert told(race.failed(fails(1, "unfit", mended=True), 0.9)) == ["open 2 mended a"]
    assert told(race.failed(fails(2, "unfit", mended=True), 1.1)) == ["open 3 fallback api"]


def test_a_form_that_is_refused_sends_the_request_to_another_pool() -> None:
    """A sibling of the same pool would refuse the form as well."""
    assert told(begun(A, B, API).failed(fails(1, "unfit"), 1.0)) == ["open 2 fallback api"]
