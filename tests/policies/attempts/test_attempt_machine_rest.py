"""Attempts for the rest of a committed answer that broke."""

from __future__ import annotations

import pytest

from policies.attempts.attempt_machine import AttemptState
from policies.blame.blame import BLAME
from policies.types import Candidate
from tests.support.attempt_script import A, B, C, ScriptedRace, Step, begun, fails, silence, told
from tests.support.decision_fleet import candidate

NOBODY = ["not continued"]


def committed(*ranked: Candidate, max_attempts: int = 3) -> ScriptedRace:
    race = begun(*ranked, max_attempts=max_attempts, hedge=True, recovers=True, idle=5.0)
    race.first_token(1, 0.2)
    return race


def breaks(race: ScriptedRace, at: float, *others: Candidate, kind: str = "reset") -> Step:
    """`others`: who may write the rest; by default all that the machine has not found to fail."""
    return race.broken(BLAME[kind], others or race.others(), at)


def test_another_writes_the_rest_and_commits() -> None:
    """Long after the TTFT deadline."""
    race = committed(A, B, C)
    assert told(breaks(race, 60.0)) == ["open 2 rescue b"]
    assert told(race.first_token(2, 60.3)) == ["commit 2"]
    assert race.state is AttemptState.COMMITTED


def test_the_rest_is_asked_for_in_the_given_order() -> None:
    race = committed(A, B, C, candidate("d"), max_attempts=4)
    assert told(breaks(race, 1.0, C, B, candidate("d"))) == ["open 2 rescue c"]
    assert told(race.failed(fails(2), 1.1)) == ["open 3 rescue b"]
    assert told(race.failed(fails(3), 1.2)) == ["open 4 rescue d"]


def test_an_endpoint_that_refuses_to_go_on_may_be_asked_in_another_way() -> None:
    race = committed(A, B, C)
    breaks(race, 1.0)
    assert told(race.failed(fails(2, "client", anew=True), 1.1)) == ["open 3 rescue b"]
    race = committed(A, B, C, max_attempts=2)
    breaks(race, 1.0)
    assert told(race.failed(fails(2, "client", anew=True), 1.1)) == ["give up"]


def test_an_endpoint_that_refuses_in_each_way_is_followed_by_the_next() -> None:
    """Its refusal says nothing about the request, which an endpoint has answered before."""
    race = committed(A, B, C, max_attempts=4)
    breaks(race, 1.0)
    race.failed(fails(2, "client", anew=True), 1.1)
    assert told(race.failed(fails(3, "client", anew=False), 1.2)) == ["open 4 rescue c"]


@pytest.mark.parametrize("kind", ["reset", "content_filter", "client", "request_size"])
def test_an_answer_that_nobody_may_go_on_with_is_given_up_at_once(kind: str) -> None:
    assert told(committed(A, B).broken(BLAME[kind], (), 1.0)) == NOBODY


def test_the_rest_is_asked_for_without_hedges() -> None:
    """The caller reads already: a second copy is for the first token alone."""
    race = committed(A, B, C)
    step, at = silence(race, breaks(race, 1.0))
    assert (told(step), at) == (["cancel 2 silent", "open 3 rescue c"], 6.0)


def test_an_endpoint_that_has_failed_is_none_of_the_others() -> None:
    race = begun(A, B, C, max_attempts=5, recovers=True)
    race.failed(fails(1), 0.1)
    race.first_token(2, 0.2)
    assert race.others() == [C]


def test_a_second_break_goes_to_a_third_endpoint() -> None:
    """A stall is no death."""
    race = committed(A, B, C)
    breaks(race, 1.0)
    race.first_token(2, 1.2)
    assert told(breaks(race, 2.0, kind="server")) == ["open 3 rescue c"]


def test_an_answer_after_two_deaths_is_given_up() -> None:
    race = committed(A, B, C)
    breaks(race, 1.0)
    race.first_token(2, 1.2)
    assert told(breaks(race, 2.0)) == NOBODY


def test_attempts_are_bounded_over_the_whole_answer() -> None:
    race = committed(A, B, max_attempts=1)
    assert race.others() == ()
    assert told(breaks(race, 1.0, B)) == NOBODY


@pytest.mark.parametrize("others", [(B, C), (B,)])
def test_a_silent_attempt_for_the_rest_is_abandoned_after_the_patience(others: tuple[Candidate, ...]) -> None:
    race = committed(A, *others)
    step, at = silence(race, breaks(race, 1.0))
    assert told(step) == ["cancel 2 silent", "open 3 rescue c" if C in others else "give up"]
    assert at == 6.0


def test_a_caller_that_leaves_cancels_the_attempt_for_the_rest() -> None:
    race = committed(A, B)
    breaks(race, 1.0)
    assert told(race.client_gone()) == ["cancel 2 cancelled"]
    assert race.broken(BLAME["reset"], [B], 1.2) == Step()


def test_without_an_idle_limit_the_rest_is_awaited_for_the_limit_of_a_first_token() -> None:
    """Without any limit of time a silent endpoint would be waited for without end."""
    race = begun(A, B, recovers=True, limit=5.0)
    race.first_token(1, 0.2)
    step = breaks(race, 1.0)
    assert (told(step), step.wake_at) == (["open 2 rescue b"], 6.0)
