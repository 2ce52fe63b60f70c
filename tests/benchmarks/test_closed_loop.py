"""The closed loop beside what no policy exceeds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.closed_loop import BOUND, page
from benchmarks.session_bound import bound
from lab.replay.player import play
from lab.traffic.traces import BLOCK, Arrival
from tests.support.replay_builders import route, scenario

BUDGET = route(ttft={"budget": "1s"}, tpot={"budget": "100ms"})
IDLE = replace(scenario(1, "8b-h100", BUDGET), seconds=60.0)


def turn(session: int, tokens: int, at: float = 0.0, think: float = 0.0, follows: bool = False) -> Arrival:
    """The beginning is that of every other prompt of the session."""
    hashes = range(session << 30, (session << 30) + tokens // BLOCK)
    return Arrival(at, tokens, 20, hashes, "agent", session=session, think=think, follows=follows)


def test_a_session_with_a_turn_that_takes_too_long_alone_cannot_be_good() -> None:
    """A turn is impossible by what is new of its prompt: what came before is cached. A replay is not above it."""
    offered = [turn(1, 8_000), turn(1, 20_000, follows=True), turn(2, 8_000, 20.0), turn(2, 90_000, 20.0, 1.0, True)]
    found = bound(offered, IDLE)
    assert (found.sessions, found.turns, found.whole, found.whole_idle) == (2, 0.75, 0.5, 0.5)
    assert play(IDLE, offered).overall().good == found.turns


@pytest.mark.parametrize(("think", "whole", "whole_idle"), [(57.0, 1.0, 0.0), (40.0, 0.0, 0.0), (61.0, 1.0, 1.0)])
def test_the_slowest_good_pace_reaches_fewer_turns(think: float, whole: float, whole_idle: float) -> None:
    """Answers as slow as the budgets allow, 2.9 s here, push an impossible turn beyond the end of the traffic."""
    found = bound([turn(1, 4_000), turn(1, 90_000, 0.0, think + 0.5, True)], IDLE)
    assert (found.whole, found.whole_idle) == (whole, whole_idle)


def test_the_page_has_both_tables() -> None:
    """Means over the seeds with their standard error; a bound is two rows; shares of the callers that were tried."""
    key: dict[str, Any] = {"scenario": "e-closed", "load": 0.7, "rules": "0095"}
    rows = [
        key | {"kind": "sessions", "scorer": "ours", "seed": i, "turns": 0.8 + i / 10, "whole": 0.5} for i in (0, 1)
    ]
    rows += [
        key | {"kind": "sessions", "scorer": "lpwl", "seed": 0, "turns": 0.8, "whole": 0.5, "p50": 91.7, "p90": 800}
    ]
    rows += [key | {"kind": "sessions", "scorer": BOUND, "seed": 0, "turns": 0.9, "whole": 0.6, "whole_idle": 0.55}]
    tried = {"refused": 30, "tried": 10, "own": 4, "best": 7}
    rows += [key | {"kind": "returns", "scorer": "ours", "seed": 0} | tried]
    text = page(rows)
    assert "| (e-closed) 0.7 | ours | 0.850 ±0.050 | - | - | 0.500 ±0.000 | 2 | 0095 |" in text
    assert "| (e-closed) 0.7 | `lpwl` | 0.800 | 92 | 800 | 0.500 | 1 | 0095 |" in text
    assert "| (e-closed) 0.7 | no policy exceeds | | | | 0.600 | 1 | 0095 |" in text
    assert "| (e-closed) 0.7 | idle fleet | 0.900 | | | 0.550 | 1 | 0095 |" in text
    assert "| (e-closed) 0.7 | 30 | 10 | 0.40 | 0.70 | 1 | 0095 |" in text
