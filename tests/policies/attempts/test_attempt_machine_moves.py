"""A committed stream that falls behind, as the attempt machine moves it: held while a peer is asked, then ended or
resumed."""

from __future__ import annotations

from typing import Any

import pytest

from policies.attempts.attempt_events import (
    AttemptStep,
    Broken,
    ClientGone,
    EndpointDown,
    FirstToken,
    PeerForecast,
    TimerFired,
)
from policies.attempts.attempt_machine import AttemptMachine
from policies.attempts.attempt_states import AttemptState
from policies.attempts.budgets import RetryBudget
from policies.blame.blame import BLAME
from policies.types import Candidate
from tests.support.attempt_script import API, A, B, C, GivenFacts, begun, charged, fails, told

NEAR = PeerForecast(0.1, 0.2, 0.02)
PEERS = {"b": NEAR, "c": NEAR}


def watched(*ranked: Candidate, **more: Any) -> tuple[AttemptMachine, GivenFacts]:
    """A stream committed at 1 s on a route with a gap of 1 s; its latest token came at 1 s."""
    facts = more.pop("facts", None) or GivenFacts(peers=PEERS, heard_at=1.0, token_at=1.0, tokens=9.0)
    known = {"idle": 30.0, "rescue": True, "by_pace": True, "max_attempts": 4, "gap": 1.0, **more}
    race = begun(*ranked, facts=facts, **known)
    race.on(FirstToken(1), 1.0)
    return race, facts


def moving(*ranked: Candidate, **more: Any) -> tuple[AttemptMachine, GivenFacts]:
    """The same, silent until a peer is asked at 1.71 s."""
    race, facts = watched(*ranked, **more)
    assert told(race.on(TimerFired(), 1.71)) == ["suspend 1", "open 2 rescue b"]
    return race, facts


def test_a_stream_that_falls_behind_is_held_until_the_peers_first_token() -> None:
    race, _ = moving(A, B)
    assert race.state is AttemptState.MOVING
    assert told(race.on(FirstToken(2), 1.9)) == ["cancel 1 outpaced", "commit 2"]
    assert race.state is AttemptState.COMMITTED


def test_a_move_is_charged_to_the_retry_budget_and_given_back() -> None:
    retries = RetryBudget()
    race, _ = watched(A, B, retries=retries)
    step = race.on(TimerFired(), 1.71)
    assert (charged(step), retries.retrying) == ([True], 1)
    race.on(FirstToken(2), 1.9)
    assert retries.retrying == 0


def test_without_a_permission_the_stream_stays() -> None:
    """So a pool where every stream is slow gets no storm."""
    race, _ = watched(A, B, retries=RetryBudget(burst=0.0))
    assert told(race.on(TimerFired(), 1.71)) == []
    assert race.state is AttemptState.COMMITTED


@pytest.mark.parametrize("end", [fails(2), fails(2, "client", restart=True), fails(2, "reset", accepted=True)])
def test_a_stream_goes_on_where_the_peer_fails(end: Any) -> None:
    """Whatever the failure: it is no failure of the stream."""
    race, facts = moving(A, B)
    step = race.on(end, 1.8)
    assert (told(step), race.state) == (["resume 1"], AttemptState.COMMITTED)
    facts.seen.token_at = facts.seen.heard_at = 1.9
    assert told(race.on(TimerFired(), 1.9)) == []


def test_a_stream_goes_on_where_the_peer_is_silent_for_longer_than_its_forecast() -> None:
    race, _ = moving(A, B)
    assert told(race.on(TimerFired(), 2.7)) == []
    assert told(race.on(TimerFired(), 2.72)) == ["cancel 2 silent", "resume 1"]


def test_another_peer_is_asked_after_one_that_failed() -> None:
    race, _ = moving(A, B, C)
    race.on(fails(2), 1.8)
    assert told(race.on(TimerFired(), 1.9)) == ["suspend 1", "open 3 rescue c"]


def test_the_last_attempt_is_for_a_break() -> None:
    race, _ = watched(A, B, max_attempts=2)
    assert told(race.on(TimerFired(), 1.9)) == []
    assert told(race.on(Broken(BLAME["reset"]), 2.0)) == ["open 2 rescue b"]


def test_a_stream_that_breaks_while_it_is_held_is_continued_by_the_peer_that_was_asked() -> None:
    race, _ = moving(A, B, C)
    assert told(race.on(Broken(BLAME["reset"]), 1.8)) == []
    assert told(race.on(FirstToken(2), 1.9)) == ["commit 2"]


def test_a_break_of_a_held_stream_asks_for_no_forecasts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer was chosen before; forecasts of a thousand held streams would be work for nothing."""
    race, facts = moving(A, B, C)
    monkeypatch.setattr(facts, "peer_forecasts", lambda number, now: pytest.fail("forecasts were asked for"))
    race.on(Broken(BLAME["reset"]), 1.8)
    assert told(race.on(FirstToken(2), 1.9)) == ["commit 2"]


def test_after_a_break_a_peer_that_fails_is_followed_by_the_next() -> None:
    race, _ = moving(A, B, C)
    race.on(Broken(BLAME["reset"]), 1.8)
    assert told(race.on(fails(2), 1.9)) == ["open 3 rescue c"]


def test_a_second_break_of_the_same_stream_changes_nothing() -> None:
    race, _ = moving(A, B, C)
    race.on(Broken(BLAME["reset"]), 1.8)
    assert told(race.on(Broken(BLAME["reset"]), 1.9)) == []


def test_a_caller_that_leaves_cancels_the_stream_and_the_peer() -> None:
    race, _ = moving(A, B)
    assert told(race.on(ClientGone(), 1.8)) == ["cancel 1 cancelled", "cancel 2 cancelled"]
    assert race.on(FirstToken(2), 1.9) == AttemptStep()


def test_the_limit_of_the_whole_answer_ends_a_stream_that_was_held() -> None:
    race, _ = moving(A, B, limit_at=2.0)
    assert told(race.on(TimerFired(), 2.0)) == ["cancel 2 silent", "resume 1"]
    assert told(race.on(TimerFired(), 2.01)) == ["leave 1 late"]


def test_a_peer_found_dead_is_waited_for_no_longer_than_any() -> None:
    race, _ = moving(A, B)
    race.on(EndpointDown(2), 1.8)
    assert told(race.on(TimerFired(), 2.72)) == ["cancel 2 silent", "resume 1"]


@pytest.mark.parametrize(
    "facts",
    [
        {"saturated": True, "peers": PEERS},
        {"closed": {"b"}, "peers": PEERS},
        {"peers": {}},
        {"peers": {"b": PeerForecast(0.1, 0.2, 0.02, silent=0.7)}},
    ],
    ids=["another request waits for the place", "at its cap", "nobody continues", "as silent"],
)
def test_a_stream_stays_without_a_peer_that_is_free_and_sooner(facts: dict[str, Any]) -> None:
    race, _ = watched(A, B, facts=GivenFacts(**facts, heard_at=1.0, token_at=1.0, tokens=9.0))
    assert told(race.on(TimerFired(), 1.71)) == []


def test_where_every_peer_is_as_silent_the_stream_is_left_after_idle_alone() -> None:
    """Not after 2 s, as with a peer that writes: the move would gain nothing."""
    quiet = {"b": PeerForecast(0.1, 0.2, 0.02, silent=25.0)}
    race, facts = watched(A, B, facts=GivenFacts(peers=quiet, heard_at=1.0, token_at=1.0, tokens=9.0))
    assert told(race.on(TimerFired(), 9.0)) == []
    facts.peers = {}
    assert told(race.on(TimerFired(), 10.0)) == ["leave 1 silent"]


def test_an_endpoint_that_was_left_is_not_moved_back_to() -> None:
    race, facts = moving(A, B)
    race.on(FirstToken(2), 1.9)
    facts.peers = {"a": NEAR}
    facts.seen.token_at = facts.seen.heard_at = 1.9
    assert told(race.on(TimerFired(), 3.0)) == []


def test_a_route_without_a_promise_of_gaps_is_looked_at_as_before() -> None:
    """The first look after 2 s, and not one for the pace."""
    facts = GivenFacts(peers=PEERS, heard_at=1.0, token_at=1.0)
    race = begun(A, B, API, facts=facts, idle=30.0, rescue=True, by_pace=True)
    assert race.on(FirstToken(1), 1.0).wake_at == 3.0
    assert told(race.on(TimerFired(), 3.0)) == ["leave 1 silent"]
