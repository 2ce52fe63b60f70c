"""Samples of a trace by session."""

from __future__ import annotations

from array import array

from lab.replay.player import followers
from lab.traffic.session_sample import sampled, with_sessions
from lab.traffic.traces import Agents, Arrival, agents

SESSIONS = agents(Agents(seconds=600.0, sessions=1.0), seed=3)


def sessions(arrivals: list[Arrival]) -> set[int]:
    return {arrival.session for arrival in arrivals}


def test_a_sample_has_its_share_of_the_sessions_and_all_turns_of_each() -> None:
    found = sampled(SESSIONS, 0.3)
    assert 0.2 < len(sessions(found)) / len(sessions(SESSIONS)) < 0.4
    assert found == [arrival for arrival in SESSIONS if arrival.session in sessions(found)]


def test_any_run_of_sessions_has_about_its_share_in_a_sample() -> None:
    arrivals = [Arrival(i, 900, 10, array("Q"), session=(1 << 48) + i) for i in range(1, 1_201)]
    runs = [len(sampled(arrivals[start : start + 120], 0.3)) for start in range(0, 1_200, 120)]
    assert 18 < min(runs) <= max(runs) < 54  # 36, and three standard deviations and a half


def test_the_sessions_of_a_smaller_share_are_among_those_of_a_larger_one() -> None:
    assert sessions(sampled(SESSIONS, 0.2)) < sessions(sampled(SESSIONS, 0.6))


def test_a_share_above_1_adds_sessions_whose_own_blocks_are_new_and_common_blocks_the_same() -> None:
    found = sampled(SESSIONS, 1.5)
    added = [arrival for arrival in found if arrival.session not in sessions(SESSIONS)]
    assert [arrival for arrival in found if arrival.session in sessions(SESSIONS)] == SESSIONS
    assert 0.4 < len(sessions(added)) / len(sessions(SESSIONS)) < 0.6
    assert [arrival.at for arrival in found] == sorted(arrival.at for arrival in found)
    blocks = {block for arrival in SESSIONS for block in arrival.hashes}
    for arrival in added:
        known = [block in blocks for block in arrival.hashes]
        assert known[0]  # the system prompt of the application
        assert known == sorted(known, reverse=True)
    assert sum(arrival.hashes[-1] not in blocks for arrival in added) > 0.9 * len(added)


def test_a_prompt_that_begins_with_another_whole_prompt_continues_its_session() -> None:
    first = Arrival(0.0, 1_100, 10, array("Q", [1, 2]))
    other = Arrival(1.0, 1_100, 10, array("Q", [1, 9]))
    second = Arrival(2.0, 1_700, 10, array("Q", [1, 2, 3]))
    third = Arrival(3.0, 2_100, 10, array("Q", [1, 2, 3, 4]))
    foreign = Arrival(4.0, 2_700, 10, array("Q", [1, 2, 3, 4, 5]), tenant="another")
    one, two, three, four, five = with_sessions([first, other, second, third, foreign])
    assert one.session == three.session == four.session
    assert len({one.session, two.session, five.session}) == 3


def test_a_turn_that_follows_another_one_stays_in_its_session() -> None:
    """Also where its prompt is no longer, as that of a caller who asks again: a replay waits for the turn before."""
    turns = [Arrival(at, 900, 10, array("Q", [1]), session=7, follows=at > 1.0) for at in (0.0, 1.0, 2.0, 3.0)]
    first, again, *others = with_sessions(turns)
    assert first.session != again.session
    assert {each.session for each in others} == {again.session}
    assert followers([first, again, *others]) == {2: 3, 3: 4}


def test_a_sample_of_prompts_that_share_a_beginning_has_its_share_of_them() -> None:
    """As one session, by a system prompt or by one name for all requests, they were in a sample all or not at all."""
    lengths = [700 + 37 * i % 300 for i in range(1_000)]
    for session, hashes in ((0, [7]), (5, [7, 8]), (5, [])):
        arrivals = [Arrival(i, tokens, 10, array("Q", hashes), session=session) for i, tokens in enumerate(lengths)]
        assert 200 < len(sampled(with_sessions(arrivals), 0.3)) < 400
    one_system_prompt = [Arrival(i, 1_500 + i, 10, array("Q", [7, 8, i << 9])) for i in range(1_000)]
    short = Arrival(0.0, 1_100, 10, array("Q", [7, 8]))
    assert 200 < len(sampled(with_sessions([short, *one_system_prompt]), 0.3)) < 400


def test_a_session_that_the_caller_named_stays() -> None:
    named = [
        Arrival(at, tokens, 10, array("Q", [session]), session=session)
        for at, tokens, session in ((0.0, 900, 7), (1.0, 900, 8), (2.0, 1_000, 7), (3.0, 1_100, 7))
    ]
    assert with_sessions(named) == named
