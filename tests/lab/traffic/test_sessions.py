"""Recorded sessions: reading, starting, and playing them in an open and a closed loop."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from lab.replay.player import Player, play
from lab.replay.results import ReplayOutcome, RequestResult
from lab.replay.session_results import idle_seconds, session_row
from lab.traffic.sessions import Sessions, read_sessions
from lab.traffic.traces import Arrival, TraceError
from tests.support.replay_builders import agent_sessions, route, scenario

ROW = {"session_id": 1, "timestamp": 0, "think_time": 0.0, "input_length": 1024, "output_length": 9, "hash_ids": [1, 2]}


def written(tmp_path: Path, *rows: Mapping[str, Any]) -> Path:
    path = tmp_path / "sessions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def sessions(tmp_path: Path) -> Sessions:
    """Three sessions of four turns, 5 s apart, each prompt 2 blocks longer."""
    return read_sessions(agent_sessions(tmp_path / "sessions.jsonl"))


def started(sessions: Sessions, rate: float, seconds: float, seed: int = 1, closed: bool = False) -> list[Arrival]:
    return [replace(arrival, route="agent") for arrival in sessions.started(rate, seconds, seed, closed)]


def by_session(results: list[RequestResult]) -> dict[int, list[RequestResult]]:
    found: dict[int, list[RequestResult]] = {}
    for result in results:
        found.setdefault(result.session, []).append(result)
    return found


# ---------------------------------------------------------------- reading


def test_turns_carry_gaps_thoughts_and_full_blocks(tmp_path: Path) -> None:
    """Times are relative to the session's first turn; an unknown think time is the gap less the answer's time."""
    first = {**ROW, "timestamp": 7000, "api_time": 1.5}
    second = {**ROW, "timestamp": 11_000, "think_time": None, "input_length": 1300, "hash_ids": [1, 2, 3]}
    third = {**second, "timestamp": 12_000, "api_time": None, "think_time": 0.4}
    (found,) = read_sessions(written(tmp_path, first, second, third)).recorded
    assert [(turn.at, turn.think, turn.prompt_tokens, list(turn.hashes)) for turn in found] == [
        (0.0, 0.0, 1024, [1, 2]),
        (4.0, 2.5, 1300, [1, 2]),
        (5.0, 0.4, 1300, [1, 2]),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "sessions.jsonl:2: "),
        ("[1]", "sessions.jsonl:2: a JSON object is expected; fix or remove the line"),
        (json.dumps({**ROW, "hash_ids": None}), "sessions.jsonl:2: hash_ids is missing; fix or remove the line"),
        (json.dumps({**ROW, "hash_ids": ["x"]}), "sessions.jsonl:2: "),
        (json.dumps({**ROW, "input_length": "long"}), "sessions.jsonl:2: "),
        (json.dumps({**ROW, "think_time": -1}), "sessions.jsonl:2: think_time must be at least 0; fix"),
        (json.dumps({**ROW, "timestamp": -1}), "sessions.jsonl:2: turns of a session must be in order of time"),
    ],
)
def test_an_unreadable_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    """With the number of the line, before any replay."""
    path = written(tmp_path, ROW)
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(TraceError, match=message):
        read_sessions(path)


# ---------------------------------------------------------------- starting


def test_sessions_share_only_what_most_sessions_share(sessions: Sessions) -> None:
    """Each drawn session has content of its own, the same in all its turns, also when drawn twice."""
    found: dict[int, set[int]] = {}
    for arrival in started(sessions, 1.0, 60.0):
        assert arrival.hashes[0] == 0
        found.setdefault(arrival.session, set()).update(arrival.hashes[1:])
    assert len(found) > 40
    assert sum(map(len, found.values())) == len(set().union(*found.values()))
    assert max(map(len, found.values())) == 13


def test_sessions_start_at_the_rate_and_equal_seeds_draw_equally(sessions: Sessions) -> None:
    """A Poisson process; in an open loop, turns come at their recorded times, up to the end."""
    arrivals = started(sessions, 0.5, 2000.0)
    firsts = {arrival.session: arrival.at for arrival in reversed(arrivals)}
    assert len(firsts) == pytest.approx(1000, rel=0.1)
    assert arrivals == started(sessions, 0.5, 2000.0)
    assert arrivals != started(sessions, 0.5, 2000.0, seed=2)
    gaps = {round((arrival.at - firsts[arrival.session]) % 5.0, 6) for arrival in arrivals}
    assert gaps <= {0.0, 5.0}
    assert max(arrival.at for arrival in arrivals) < 2000.0


def test_so_many_sessions_at_a_time_are_a_level_rate(sessions: Sessions) -> None:
    """Each session is followed by another, which begins with its first turn; none shares its blocks."""
    turns = sessions.at_a_time(3, 400.0, seed=1, longest_gap=5.0)
    assert turns == sessions.at_a_time(3, 400.0, seed=1, longest_gap=5.0)
    assert turns != sessions.at_a_time(3, 400.0, seed=2, longest_gap=5.0)
    assert [turn.at for turn in turns] == sorted(turn.at for turn in turns)
    by_number: dict[int, list[Arrival]] = {}
    for turn in turns:
        by_number.setdefault(turn.session, []).append(turn)
    assert all(len(found[0].hashes) == 8 for found in by_number.values())
    for at in (20.0, 100.0, 380.0):
        under_way = [found for found in by_number.values() if found[0].at <= at <= found[-1].at]
        assert 1 <= len(under_way) <= 3
    quarters = [sum(start <= turn.at < start + 100.0 for turn in turns) for start in (0.0, 100.0, 200.0, 300.0)]
    assert max(quarters) < 1.5 * min(quarters)


def test_gaps_between_turns_are_cut(tmp_path: Path) -> None:
    """A caller that was away for an hour is away for `longest_gap` seconds."""
    rows = [{**ROW, "timestamp": at} for at in (0, 2_000, 3_602_000, 3_604_000)]
    turns = read_sessions(written(tmp_path, *rows)).at_a_time(1, 60.0, seed=1, longest_gap=20.0)
    first = [turn.at for turn in turns if turn.session == 1]
    assert [later - at for at, later in pairwise(first)] == pytest.approx([2.0, 20.0, 2.0])


# ---------------------------------------------------------------- the closed loop


@pytest.mark.parametrize("scorer", ["ours", "least_request", "reference"])
def test_in_a_closed_loop_a_turn_comes_a_thought_after_the_answer(sessions: Sessions, scorer: str) -> None:
    """Each turn arrives 2 s after the last token before it, whatever the recorded time."""
    arrivals = started(sessions, 0.5, 60.0, closed=True)
    results = play(replace(scenario(2), seconds=60.0).with_scorer(scorer), arrivals, 1)
    for turns in by_session(results.requests).values():
        for before, after in pairwise(turns):
            assert before.ended_at is not None
            assert after.arrived == pytest.approx(before.ended_at + 2.0, abs=0.03)
    assert {result.end for result in results.requests} == {ReplayOutcome.COMPLETED}
    assert len(results.requests) > 80
    assert max(result.arrived for result in results.requests) < 60.0 + 0.03


def test_a_session_goes_on_after_a_refused_turn(sessions: Sessions) -> None:
    """A refused turn is a miss, and the next turn comes a think time after the refusal."""
    crowded = replace(scenario(1, "8b-l4", route(on_miss="shed")), seconds=60.0)
    results = play(crowded, started(sessions, 3.0, 60.0, closed=True))
    gaps = [
        after.arrived - (before.ended_at or 0.0)
        for turns in by_session(results.requests).values()
        for before, after in pairwise(turns)
        if before.end is ReplayOutcome.SHED
    ]
    assert len(gaps) > 10
    assert gaps == pytest.approx([2.0] * len(gaps), abs=0.03)


@pytest.mark.parametrize("returns", [0, 1, 2])
def test_a_refused_caller_comes_back_as_often_as_the_scenario_says(sessions: Sessions, returns: int) -> None:
    """A Retry-After is followed; the last refusal is the end of the request."""
    crowded = replace(scenario(1, "8b-l4", route(on_miss="shed")), seconds=60.0, returns=returns)
    requests = play(crowded, started(sessions, 3.0, 60.0, closed=True)).requests
    refusals = [len(result.refusals) for result in requests if result.end is ReplayOutcome.SHED]
    assert set(refusals) == {returns + 1}
    assert all((result.returned_at is not None) == (returns > 0) for result in requests if result.refusals)


def test_a_closed_loop_gives_way_to_a_slow_fleet(sessions: Sessions) -> None:
    """The slower the answers, the fewer turns are offered; an open loop offers all of them."""
    fast, slow = (replace(scenario(1, name), seconds=60.0) for name in ("8b-h100", "8b-l4"))
    closed, opened = (started(sessions, 0.5, 60.0, closed=closed) for closed in (True, False))
    assert len(play(slow, closed).requests) < 0.8 * len(play(fast, closed).requests)
    assert len(play(slow, opened).requests) == len(play(fast, opened).requests) == len(opened)


def test_one_seed_is_one_outcome_in_a_closed_loop(sessions: Sessions) -> None:
    """With several gateways too: equal seeds give equal results."""
    arrivals = started(sessions, 1.0, 40.0, closed=True)
    two = replace(scenario(2), replicas=2, seconds=40.0)
    assert play(two, arrivals, 3).requests == play(two, arrivals, 3).requests


# ---------------------------------------------------------------- results by session


def test_an_idle_fleet_caches_what_the_session_sent_before(sessions: Sessions) -> None:
    """The time of a session is less than that of its turns each in a session of its own."""
    turns = [arrival for arrival in started(sessions, 0.05, 200.0) if arrival.session == 1]
    assert len(turns) == 4
    assert idle_seconds(turns, scenario()) < 0.9 * sum(idle_seconds([turn], scenario()) for turn in turns)


def test_a_lone_session_takes_as_long_as_on_an_idle_fleet(sessions: Sessions) -> None:
    """All its turns are good; the mean counts offered turns only."""
    arrivals = [arrival for arrival in started(sessions, 0.05, 200.0, closed=True) if arrival.session == 1]
    played = replace(scenario(2), seconds=200.0)
    row = session_row(play(played, arrivals), arrivals, played)
    assert row is not None
    assert (row.sessions, row.turns, row.good, row.answered) == (1, 4, 1.0, 1.0)
    assert row.slowdown == pytest.approx((1.0, 1.0), abs=0.02)


def test_one_late_turn_spoils_a_session(sessions: Sessions) -> None:
    """Fewer sessions than requests are good under overload, and sessions take longer than on an idle fleet."""
    player = Player(replace(scenario(1, "8b-a100"), seconds=60.0), started(sessions, 1.6, 60.0, closed=True))
    results = player.play()
    row = session_row(results, player.arrivals, player.scenario)
    assert row is not None
    assert 0.0 < row.good < results.overall().good < 1.0
    assert row.slowdown[0] > 1.05


def test_requests_without_a_session_have_no_such_row() -> None:
    """Other traces have no sessions."""
    alone = [Arrival(0.0, 1000, 10, (), "agent")]
    assert session_row(play(scenario(), alone), alone, scenario()) is None
