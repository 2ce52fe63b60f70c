"""Waits for nothing, and a cold start beside the time after it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from backends.server_profiles import PROFILES, EngineProfile
from lab.engines.engine import Engine
from lab.engines.engine_events import EngineFirstToken, EngineRequest
from lab.engines.virtual_engine import VirtualEngine
from lab.replay import queue_results
from lab.replay.player import Player, play
from lab.replay.queue_results import (
    QueueRow,
    cold_start_row,
    merged,
    overlap,
    possible_requests,
    prefill_seconds,
    queue_row,
    wait_quantile,
)
from lab.replay.results import RequestResult, Results
from lab.traffic.traces import Arrival
from policies.fleet.fleet import Fleet
from policies.queue.queue_scheduler import QueueScheduler, Released
from policies.types import FOREVER
from tests.support.replay_builders import arrivals, route, scenario

pytestmark = pytest.mark.virtual_time

HERE = "main/0"
ENGINE = PROFILES["8b-h100"]


def waited(prompt: int = 1_000, **known: float) -> RequestResult:
    """A request that waited from 10 s to 14 s, and was answered by HERE."""
    result = RequestResult(1, "agent", 10.0, prompt, 10)
    result.endpoint, result.dispatched_at = HERE, 14.0
    for name, value in known.items():
        setattr(result, name, value)
    return result


def row(*requests: RequestResult, prefills: list[tuple[float, float]] | None = None) -> QueueRow:
    results = Results({"agent": route()}, 60.0, requests=list(requests), prefills={HERE: prefills or []})
    offered = [Arrival(each.arrived, each.prompt_tokens, 10, range(each.prompt_tokens // 512)) for each in requests]
    return queue_row(results, offered, scenario())


# --------------------------------------------------------------------------- idle waits


def test_a_wait_beside_an_idle_engine_is_idle() -> None:
    assert row(waited()) == QueueRow(1, (4.0,), (4.0,))


def test_time_in_which_the_engine_prefills_is_no_idle_wait() -> None:
    """Prefills that overlap count once, those at other times do not; the wait itself is as long as ever."""
    found = row(waited(), prefills=[(9.0, 11.0), (10.5, 12.0), (13.5, 20.0), (2.0, 3.0)])
    assert found == QueueRow(1, (4.0,), (1.5,))


def test_a_long_prefill_may_wait() -> None:
    """Only requests that an engine answers at once count; a cached prompt is such, however long it is."""
    assert row(waited(prompt=60_000)).short == 0
    assert row(waited(prompt=60_000, cached=59_392, first_at=14.1)).short == 1


def test_an_idle_wait_begins_once_the_prompt_is_cached_there() -> None:
    """Before the session's turn before is computed, this one would have been a long prefill."""
    before = waited(prompt=59_500, first_at=12.5)
    before.number, before.dispatched_at = 2, 10.0
    after = waited(prompt=60_000, cached=59_392, first_at=14.1)
    assert row(after, before).idle_waits == (1.5,)


def test_no_engine_is_idle_before_its_start() -> None:
    late = replace(scenario(), starts={HERE: 13.0})
    results = Results({"agent": route()}, 60.0, requests=[waited()], prefills={HERE: []})
    assert queue_row(results, [Arrival(10.0, 1_000, 10)], late).idle_waits == (1.0,)


def test_a_request_that_went_nowhere_has_no_engine_to_wait_for() -> None:
    """A refusal is judged as such (`lab.replay.counterfactual`)."""
    refused = waited()
    refused.dispatched_at, refused.endpoint = None, ""
    assert row(refused) == QueueRow(0)


def test_a_returned_request_waits_from_its_return() -> None:
    assert row(waited(returned_at=13.0)).waits == (1.0,)


def test_the_quantile_is_of_all_short_requests() -> None:
    """Of several replays together, those without a wait included."""
    rows = [QueueRow(90, (2.0,), (1.0,)), QueueRow(10)]
    assert wait_quantile(rows, 0.98) == 0.0
    assert (wait_quantile(rows, 0.99), wait_quantile(rows, 0.99, idle=False)) == (1.0, 2.0)


class Slow(QueueScheduler):
    """Holds each request for half a second."""

    def release(self, fleet: Fleet, now: float) -> Iterator[Released]:
        new = self.queues.new
        fresh = [queued for queued in new if now < queued.request.arrival + 0.5]
        self.queues.new = [queued for queued in new if queued not in fresh]
        yield from super().release(fleet, now)
        self.queues.new += fresh
        self.wake_at = now + 0.05 if self.held else FOREVER


def test_a_queue_that_holds_for_nothing_is_found_out() -> None:
    """In a whole replay; a baseline, which holds nothing, shows no wait."""
    offered, idle = arrivals(40, rate=1.0, prompt=1_000), scenario(4)
    slow = Player(idle, offered)
    slow.gateways[0].queue = Slow()
    assert wait_quantile([queue_row(slow.play(), offered, idle)], 0.5) == pytest.approx(0.5, abs=0.06)
    plain = idle.with_scorer("lpwl")
    assert queue_row(play(plain, offered), offered, plain) == QueueRow(40)


def test_every_attempt_is_a_prefill_from_sending_to_first_token() -> None:
    results = play(scenario(1), arrivals(20))
    sent = sorted((result.sent_at, result.first_at) for result in results.requests)
    assert sorted(results.prefills["main/0"]) == sent


@pytest.mark.parametrize(
    ("given", "disjoint"),
    [
        ([], []),
        ([(3, 4), (1, 2)], [(1, 2), (3, 4)]),
        ([(1, 5), (2, 3), (4, 6)], [(1, 6)]),
        ([(1, 2), (2, 3)], [(1, 3)]),
    ],
)
def test_intervals_are_merged(given: list[tuple[float, float]], disjoint: list[tuple[float, float]]) -> None:
    assert merged(given) == disjoint


def test_overlap_is_time_within_any_interval() -> None:
    assert overlap([(0, 1), (2, 4), (9, 10)], (0.5, 3.0)) == 1.5


@pytest.mark.parametrize(("prompt", "cached"), [(700, 0), (30_000, 0), (30_000, 29_696)])
def test_the_duration_of_a_prefill_is_the_engines(prompt: int, cached: int) -> None:
    """As a simulated engine without noise takes from the scheduler to the first token."""
    assert isinstance(ENGINE, EngineProfile)
    exact = replace(ENGINE, sigma=0.0)
    engine, blocks = VirtualEngine(Engine(exact)), range(prompt // exact.block_size)
    engine.submit(EngineRequest(1, max(cached, 1), 1, blocks[: cached // exact.block_size]), 0.0)
    engine.run_until(100.0)
    engine.submit(EngineRequest(2, prompt, 1, blocks), 100.0)
    (first,) = [event for event in engine.run_until(200.0) if isinstance(event, EngineFirstToken)]
    assert first.cached_tokens == cached
    assert first.at - 100.0 - exact.overhead == pytest.approx(prefill_seconds(exact, prompt, cached))


# --------------------------------------------------------------------------- cold starts


def test_a_cold_start_is_told_from_the_time_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted from the first arrival; time between the two windows belongs to neither."""
    monkeypatch.setattr(queue_results, "FIRST", 5.0)
    monkeypatch.setattr(queue_results, "SETTLED", 10.0)
    chosen = replace(scenario(1), starts={"main/0": 3.0})
    offered = [Arrival(1.0 + at, 1_000, 4, (), "agent") for at in (0, 1, 4, 5, 9.5, 10, 14, 30)]
    results = play(chosen, offered)
    found = cold_start_row(results, offered, chosen)
    assert found is not None
    assert found.offered == (3, 3)
    assert found.good == (pytest.approx(1 / 3), 1.0)
    assert cold_start_row(play(chosen, offered[:4]), offered, chosen) is None


def test_a_prompt_that_no_engine_prefills_in_time_is_not_possible() -> None:
    """With an empty cache; once an earlier prompt began with the same blocks, it is."""
    long, blocks = 120_000, range(120_000 // 512)
    offered = [Arrival(0.0, long, 4, blocks, "agent"), Arrival(60.0, long, 4, blocks, "agent")]
    offered.append(Arrival(90.0, 1_000, 4, (), "agent"))
    assert possible_requests(play(scenario(), offered), offered, scenario()) == {2, 3}
