"""The best Retry-After that could have been named, tried in forks of the replay."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from lab.replay.best_return import RETRIES, answered_at_return, play_returns
from lab.replay.player import play
from lab.traffic.traces import Arrival
from policies.fleet.fleet import Fleet
from policies.queue.queue_scheduler import QueueScheduler, Released
from policies.types import Placement
from tests.support.replay_builders import arrivals, scenario

SOON, LATER = 2.0, 12.0  # s
OFFERED = arrivals(20, rate=2.0, prompt=1_000)


class RefusesUntil(QueueScheduler):
    """Refuses every fourth request before LATER, and names SOON."""

    def release(self, fleet: Fleet, now: float) -> Iterator[Released]:
        for key, decision in super().release(fleet, now):
            refuse = isinstance(key, int) and key % 4 == 0 and now < LATER
            yield key, replace(decision, outcome=Placement.SHED, retry_after=SOON) if refuse else decision


@pytest.fixture(autouse=True)
def refusing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lab.replay.sim_gateway.QueueScheduler", RefusesUntil)


def test_a_caller_has_the_first_time_at_which_it_is_answered() -> None:
    """The policy's own where that does, another where the policy names one too early; the replay is as without it."""
    busy = scenario(2, returns=1)
    results, found = play_returns(busy, OFFERED, 0)
    refused = [result for result in play(busy, OFFERED).requests if result.refusals]
    assert [each.number for each in found] == [result.number for result in refused]
    assert [each.own for each in found] == [answered_at_return(result) for result in refused]
    assert {each.own for each in found} == {True, False}
    assert {each.best for each in found} == {SOON, RETRIES[0]}
    assert results.requests == play(busy, OFFERED).requests


def test_each_second_refused_caller_can_be_tried_alone() -> None:
    """A replay with many refusals takes long."""
    every, (_, some) = (
        play_returns(scenario(2, returns=1), OFFERED, 0)[1],
        play_returns(scenario(2, returns=1), OFFERED, 0, 2),
    )
    assert some == every[1::2]


def test_a_caller_whom_no_time_helps_has_none() -> None:
    """No engine is up until long after the last of these times."""
    never = [Arrival(0.0, 1_000, 10, (), "agent") for _ in range(4)]
    down = replace(scenario(1, returns=1), starts={"main/0": 500.0})
    assert {each.best for each in play_returns(down, never, 0)[1]} == {None}
