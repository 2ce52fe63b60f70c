"""Refusals tried again: the same replay, in which the refused request is dispatched."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from lab.replay.counterfactual import Fork, RefusalRow, TriesRefused, dispatched, play_refused
from lab.replay.player import Player, play
from lab.replay.sim_fleet import Scenario
from lab.replay.sim_gateway import ActiveRequest, DecisionOverride, SimGateway
from lab.traffic.traces import Arrival
from policies.fleet.fleet import Fleet
from policies.queue.queue_scheduler import QueueScheduler, Released
from policies.types import Decision, Placement
from tests.support.replay_builders import arrivals, route, scenario

CROWD = arrivals(60, rate=8.0)
SHEDS = scenario(1, "8b-l4", route(on_miss="shed"))


class DispatchesOne(DecisionOverride):
    """Dispatches the request of one number in place of its refusal."""

    def __init__(self, gateway: SimGateway, number: int) -> None:
        self.gateway, self.number = gateway, number

    def on_refusal(self, request: ActiveRequest, refusal: Decision) -> Decision:
        return dispatched(self.gateway, request) if request.number == self.number else refusal


def test_the_replay_itself_stays_as_it_is() -> None:
    """What a fork tries leaves no trace in the parent."""
    results, row = play_refused(SHEDS, CROWD, 0)
    assert results.requests == play(SHEDS, CROWD).requests
    assert row.refused == results.overall().sheds > 0


class Refuses(QueueScheduler):
    """Refuses every fourth request, whatever the load."""

    def release(self, fleet: Fleet, now: float) -> Iterator[Released]:
        for key, decision in super().release(fleet, now):
            refuse = isinstance(key, int) and key % 4 == 0
            yield key, replace(decision, outcome=Placement.SHED) if refuse else decision


class HoldsFourths(QueueScheduler):
    """Holds every fourth request for ever."""

    def release(self, fleet: Fleet, now: float) -> Iterator[Released]:
        held = [queued for queued in self.queues.new if queued.sequence % 4 == 0]
        self.queues.new = [queued for queued in self.queues.new if queued not in held]
        yield from super().release(fleet, now)
        self.queues.new += held


def test_a_fork_is_the_whole_replay_without_one_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer of a fork is that of a replay from the beginning, in which nothing but this refusal is different."""
    monkeypatch.setattr("lab.replay.sim_gateway.QueueScheduler", Refuses)
    busy, offered = scenario(2, "8b-a100"), arrivals(60, rate=6.0)
    fork = Fork(Player(busy, offered))
    fork.player.gateways[0].override = TriesRefused(fork.player.gateways[0], fork)
    fork.play()
    assert set(fork.in_time.values()) == {True, False}
    for number, in_time in fork.in_time.items():
        player = Player(busy, offered)
        player.gateways[0].override = DispatchesOne(player.gateways[0], number)
        results = player.play()
        assert results.met_ttft(results.requests[number - 1]) is in_time


def with_queue(
    monkeypatch: pytest.MonkeyPatch, queue: type[QueueScheduler], chosen: Scenario, prompt: int = 6_000
) -> RefusalRow:
    """Of forty requests, one per second."""
    monkeypatch.setattr("lab.replay.sim_gateway.QueueScheduler", queue)
    return play_refused(chosen, arrivals(40, rate=1.0, prompt=prompt), 0)[1]


FOURTHS = tuple(range(4, 41, 4))


def test_refusals_beside_idle_engines_are_all_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    assert with_queue(monkeypatch, Refuses, scenario(4)) == RefusalRow(40, 10, FOURTHS, FOURTHS)


def test_a_request_refused_once_it_is_lost_was_wrong_from_its_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the time of the refusal nobody could answer in time any more."""
    patient = replace(scenario(4), first_token=8.0)
    assert with_queue(monkeypatch, HoldsFourths, patient) == RefusalRow(40, 10, (), FOURTHS)


def test_a_refusal_that_no_engine_could_mend_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts that take longer than the budget on an idle engine."""
    assert with_queue(monkeypatch, Refuses, scenario(4, "8b-l4"), prompt=60_000) == RefusalRow(40, 10)


def test_engines_that_are_down_are_no_remedy() -> None:
    """A request that comes before any engine is up is refused rightly."""
    down = replace(scenario(2), starts={"main/0": 30.0, "main/1": 30.0})
    _, row = play_refused(down, [Arrival(5.0, 1_000, 10, (), "agent")], 0)
    assert row == RefusalRow(1, 1)


def test_a_child_that_fails_is_an_error_of_the_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """And never counts as a refusal that was right."""

    def fail(*_: object) -> float:
        raise ValueError("no deadline")

    fork = Fork(Player(SHEDS, CROWD))
    gateway = fork.player.gateways[0]
    monkeypatch.setattr(Fork, "_report", fail)
    gateway.override = TriesRefused(gateway, fork)
    with pytest.raises(RuntimeError, match="has failed"):
        fork.play()
