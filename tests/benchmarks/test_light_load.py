"""The benchmark of light loads and cold starts, on small traces."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import routing, scenarios
from benchmarks.light_load import WARM, LightLoad, replay_one, report, warm_replay
from benchmarks.routing_page import page, sections, table
from benchmarks.scenarios import COLD_START, SCENARIOS, arrivals, setting
from lab.replay import queue_results
from lab.replay.counterfactual import RefusalRow
from lab.replay.player import Player
from lab.replay.queue_results import ColdStartRow, QueueRow
from lab.replay.sim_fleet import OURS
from lab.traffic.traces import Arrival
from policies.fleet.circuit_breaker import BreakerState
from policies.fleet.fleet import Fleet
from policies.queue.queue_scheduler import QueueScheduler, Released
from policies.types import FOREVER, Placement
from tests.support.replay_builders import agent_sessions

COLD = [name for name, scenario in SCENARIOS.items() if scenario.cold]


@pytest.fixture
def traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sessions of four turns, 40 s of them."""
    agent_sessions(tmp_path / "agent_sessions.jsonl")
    monkeypatch.setattr(scenarios, "AGENTS_SECONDS", 40.0)
    monkeypatch.setattr(queue_results, "FIRST", 10.0)
    monkeypatch.setattr(queue_results, "SETTLED", 20.0)
    return tmp_path


# --------------------------------------------------------------------------- scenarios


@pytest.mark.parametrize("name", COLD)
def test_requests_come_once_every_engine_is_on_trial(name: str) -> None:
    """The gateway has found each engine gone, and then there; none has answered a request yet."""
    later = Arrival(COLD_START + 1.0, 1_000, 10, (), "agent")
    player = Player(setting(name), [later])
    states = list[tuple[float, BreakerState]]()
    player.gateways[0].fleet.on_breaker = lambda _, breaker: states.append((player.clock.now, breaker.state))
    player.end = COLD_START
    player.play()
    engines = len(player.scenario.profiles)
    assert [state for _, state in states].count(BreakerState.OPEN) == engines
    assert [state for _, state in states].count(BreakerState.HALF_OPEN) == engines
    assert max(at for at, _ in states) < COLD_START


def test_agents_are_asked_for_their_own_budgets(traces: Path) -> None:
    """A first token in 4 s, 95 of 100 of them, and 80 ms a token; requests begin when the engines are up."""
    route = setting("agents").routes["agent"]
    assert route.ttft is not None
    assert route.tpot is not None
    assert (route.ttft.budget, route.target, route.tpot.budget) == (4.0, 0.95, 0.08)
    light, heavy = (arrivals("agents", load, traces, 0) for load in (0.2, 0.8))
    assert 3 < len(heavy) / len(light) < 5
    assert min(arrival.at for arrival in heavy) >= COLD_START


# --------------------------------------------------------------------------- replays


def test_a_replay_measures_queue_refusals_and_start(traces: Path) -> None:
    found = replay_one(("agents", 0.3, OURS, 0, traces))
    offered = len(arrivals("agents", 0.3, traces, 0))
    assert (found.refusals.offered, 0 < found.queue.short <= offered) == (offered, True)
    assert found.cold_start is not None
    assert sum(found.cold_start.offered) < offered
    assert found == replace(replay_one(("agents", 0.3, OURS, 0, traces)), took=found.took)


def test_a_warm_gateway_begins_with_what_another_has_learned(traces: Path) -> None:
    """Its forecasts are others than those of a cold gateway. With nothing learned, it is a cold one."""
    played, offered = replace(setting("agents"), starts={}), arrivals("agents", 0.3, traces, 0)
    cold = Player(played, offered).play().requests
    assert warm_replay(played, offered, [], 0).requests == cold
    warm = warm_replay(played, offered, arrivals("agents", 0.3, traces, 1), 0).requests
    assert [request.p50 for request in warm] != [request.p50 for request in cold]


# --------------------------------------------------------------------------- tables


def replayed(scorer: str, seed: int, idle: float, wrong: int, good: float = 0.9) -> LightLoad:
    cold = ColdStartRow((60, 180), (good - 0.1, good), (6.0, 4.0), (1, 0), (50, 150), (good, good), (3.0, 2.0))
    numbers = tuple(range(wrong))
    refusals = RefusalRow(240, 4 if wrong else 0, numbers, numbers)
    queue = QueueRow(100, (2.0,), (idle,))
    return LightLoad("agents", 0.6, scorer, seed, good, 4.5, queue, refusals, cold, (f"#{seed} waits",), 1.0)


def test_the_report_joins_the_seeds() -> None:
    """Shares and p99 are means; waits and refusals are of all seeds together; a warm gateway only starts."""
    found = [replayed(OURS, 0, 1.5, 1), replayed(OURS, 1, 0.05, 2, 0.8), replayed(WARM, 0, 0.0, 0)]
    heading, row, _, start, ours, warm = report(found)
    assert row.split() == (
        "agents ours 0.6 0.850 ± 0.050 4.50 s 8 of 480 3 (38%) 3 (38%) 200 0.050 s 1 2.000 s 2 s".split()
    )
    assert "idle wait p99" in heading
    assert "good if possible" in start
    assert "0.750 / 0.850" in ours
    assert "2 of 120 / 0 of 360" in ours
    assert warm.startswith("agents warm")


def test_each_wait_and_wrong_refusal_is_named(traces: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the request's number in the replay, so that one can look for the reason."""
    monkeypatch.setattr("lab.replay.sim_gateway.QueueScheduler", HoldsAndRefuses)
    found = replay_one(("agents", 0.3, OURS, 0, traces))
    assert found.refusals.wrong == tuple(range(3, found.refusals.offered + 1, 3))
    assert any(line.startswith("#3 ") and "wrong at the refusal" in line for line in found.named)
    assert any("waited 0.3" in line and line.endswith("s idle") for line in found.named)
    assert "agents 0.6 ours seed 1: #1 waits" in report([replayed(OURS, 1, 0.1, 0)], each=True)


class HoldsAndRefuses(QueueScheduler):
    """Holds each request for 0.3 s, then refuses every third."""

    def release(self, fleet: Fleet, now: float) -> Iterator[Released]:
        new = self.queues.new
        fresh = [queued for queued in new if now < queued.request.arrival + 0.3]
        self.queues.new = [queued for queued in new if queued not in fresh]
        for key, decision in super().release(fleet, now):
            refuse = isinstance(key, int) and key % 3 == 0
            yield key, replace(decision, outcome=Placement.SHED) if refuse else decision
        self.queues.new += fresh
        self.wake_at = now + 0.05 if self.held else FOREVER


def test_the_page_keeps_the_sections_that_were_not_measured(traces: Path) -> None:
    """A section of a cold scenario has a column per scorer, and needs no reference."""
    results = [routing.replay_one(("agents", 0.3, scorer, 0, traces)) for scorer in (OURS, "lpwl")]
    before = "# Routing\n\n## (a) old\n\nkept\n\n## (agents) old\n\nreplaced\n"
    found = sections(page(results, before))
    assert list(found) == ["a", "agents"]
    assert found["a"] == "## (a) old\n\nkept"
    assert "replaced" not in found["agents"]
    heading, _, row = ([cell.strip() for cell in line.split("|")] for line in table("agents", results))
    cells = dict(zip(heading, row, strict=True))
    good = {result["scorer"]: f"{result['rows']['all']['good']:.3f}" for result in results}
    assert {name: cells[name] for name in (OURS, "lpwl", "lmetric")} == {**good, "lmetric": "-"}
