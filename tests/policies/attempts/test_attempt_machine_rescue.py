"""Rescue of a committed stream: attempts for the rest of a broken answer."""

from __future__ import annotations

import pytest

from policies.attempts.attempt_events import (
    NO_FACTS,
    AttemptFacts,
    AttemptStep,
    Broken,
    ClientGone,
    Ending,
    FirstToken,
)
from policies.attempts.attempt_machine import AttemptMachine
from policies.attempts.attempt_states import AttemptState
from policies.blame.blame import BLAME
from policies.types import Candidate
from tests.support.attempt_script import API, A, B, C, GivenFacts, begun, fails, given_up, reason, silence, told
from tests.support.decision_fleet import candidate

BROKEN, STALLED = Broken(BLAME["reset"]), Broken(BLAME["server"])


def committed(*ranked: Candidate, max_attempts: int = 3, facts: AttemptFacts = NO_FACTS) -> AttemptMachine:
    race = begun(*ranked, max_attempts=max_attempts, facts=facts, hedge=True, rescue=True, idle=5.0)
    race.on(FirstToken(1), 0.2)
    return race


def test_a_peer_continues_and_commits() -> None:
    """Long after the TTFT deadline."""
    race = committed(A, B, C)
    assert told(race.on(BROKEN, 60.0)) == ["open 2 rescue b"]
    assert told(race.on(FirstToken(2), 60.3)) == ["commit 2"]
    assert race.state is AttemptState.COMMITTED


def test_the_same_pool_continues_before_the_next_tiers() -> None:
    """Another pool serves another model."""
    other = candidate("x", pool="other")
    race = committed(A, other, C)
    assert told(race.on(BROKEN, 1.0)) == ["open 2 rescue c"]
    race = committed(A, other)
    assert told(race.on(BROKEN, 1.0)) == ["open 2 rescue x"]
    assert told(committed(A, other).on(Broken(BLAME["reset"], unable={"x": "no peer is up"}), 1.0)) == ["give up"]


def test_the_peer_that_is_soonest_as_of_now_continues() -> None:
    """Not as of the decision: a dead engine leaves many answers at once. A peer of unknown forecast is last."""
    now = {"b": 2.0, "c": 0.2}
    race = committed(A, candidate("d"), B, C, facts=GivenFacts(peers=now), max_attempts=4)
    assert told(race.on(BROKEN, 1.0)) == ["open 2 rescue c"]
    assert told(race.on(fails(2), 1.1)) == ["open 3 rescue b"]
    assert told(race.on(fails(3), 1.2)) == ["open 4 rescue d"]


def test_a_sooner_pool_continues_no_earlier_than_it_is_ranked() -> None:
    """A later tier may cost more, whatever its forecast."""
    now = {"x": 0.5, "api": 0.1}
    race = committed(A, candidate("x", pool="next"), API, facts=GivenFacts(peers=now))
    assert told(race.on(BROKEN, 1.0)) == ["open 2 rescue x"]


def test_a_peer_that_does_not_continue_is_asked_for_the_whole_answer() -> None:
    race = committed(A, B, C)
    race.on(BROKEN, 1.0)
    assert told(race.on(fails(2, "client", restart=True), 1.1)) == ["open 3 rescue b"]
    race = committed(A, B, C, max_attempts=2)
    race.on(BROKEN, 1.0)
    assert told(race.on(fails(2, "client", restart=True), 1.1)) == ["give up"]


def test_a_peer_that_refuses_the_whole_answer_too_is_followed_by_the_next() -> None:
    """Its refusal says nothing about the request, which an endpoint has answered before."""
    race = committed(A, B, C, max_attempts=4)
    race.on(BROKEN, 1.0)
    race.on(fails(2, "client", restart=True), 1.1)
    assert told(race.on(fails(3, "client", restart=False), 1.2)) == ["open 4 rescue c"]


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        (Broken(BLAME["reset"], "the answer has a tool call"), "the answer has a tool call"),
        (Broken(BLAME["content_filter"]), "an error of the request"),
        (Broken(BLAME["client"]), "an error of the request"),
        (Broken(BLAME["request_size"]), "an error of the request"),
        (Broken(BLAME["reset"], unable={"b": "it would be too long"}), "it would be too long"),
    ],
)
def test_an_answer_that_nobody_can_continue_is_given_up_at_once(broken: Broken, why: str) -> None:
    step = committed(A, B).on(broken, 1.0)
    assert (given_up(step).ending, reason(step)) == (Ending.NOT_CONTINUED, why)


def test_without_rescue_a_broken_stream_is_not_continued() -> None:
    race = begun(A, B)
    race.on(FirstToken(1), 0.2)
    assert given_up(race.on(BROKEN, 1.0)).ending is Ending.NOT_CONTINUED


def test_a_peer_is_asked_without_hedges() -> None:
    """The caller reads already: a second copy is for the first token alone."""
    race = committed(A, B, C)
    step, at = silence(race, race.on(BROKEN, 1.0))
    assert (told(step), at) == (["cancel 2 silent", "open 3 rescue c"], 6.0)


def test_an_endpoint_that_is_down_or_has_failed_does_not_continue() -> None:
    race = begun(A, B, C, max_attempts=5, rescue=True)
    race.on(fails(1), 0.1)
    race.on(FirstToken(2), 0.2)
    assert told(race.on(Broken(BLAME["server"], unable={"c": "no peer is up"}), 1.0)) == ["give up"]


def test_a_second_break_goes_to_a_third_endpoint() -> None:
    """A stall is no death."""
    race = committed(A, B, C)
    race.on(BROKEN, 1.0)
    race.on(FirstToken(2), 1.2)
    assert told(race.on(STALLED, 2.0)) == ["open 3 rescue c"]


def test_an_answer_after_two_deaths_is_given_up() -> None:
    race = committed(A, B, C)
    race.on(BROKEN, 1.0)
    race.on(FirstToken(2), 1.2)
    assert given_up(race.on(BROKEN, 2.0)).ending is Ending.NOT_CONTINUED


def test_attempts_are_bounded_over_the_whole_answer() -> None:
    race = committed(A, B, max_attempts=1)
    assert given_up(race.on(BROKEN, 1.0)).ending is Ending.NOT_CONTINUED


@pytest.mark.parametrize("peers", [(B, C), (B,)])
def test_a_silent_peer_is_abandoned_after_the_patience(peers: tuple[Candidate, ...]) -> None:
    race = committed(A, *peers)
    step, at = silence(race, race.on(BROKEN, 1.0))
    assert told(step) == ["cancel 2 silent", "open 3 rescue c" if C in peers else "give up"]
    assert at == 6.0


def test_a_caller_that_leaves_during_a_rescue_cancels_it() -> None:
    race = committed(A, B)
    race.on(BROKEN, 1.0)
    assert told(race.on(ClientGone(), 1.1)) == ["cancel 2 cancelled"]
    assert race.on(BROKEN, 1.2) == AttemptStep()


def test_a_rescue_without_an_idle_limit_is_left_after_the_limit_of_a_first_token() -> None:
    """Without any limit of time a silent peer would be waited for without end."""
    race = begun(A, B, rescue=True, limit=5.0)
    race.on(FirstToken(1), 0.2)
    step = race.on(BROKEN, 1.0)
    assert (told(step), step.wake_at) == (["open 2 rescue b"], 6.0)
