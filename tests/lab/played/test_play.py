"""A whole gateway in virtual time: the callers' figures, what the gateway did, and equal runs."""

from __future__ import annotations

from dataclasses import replace
from math import isnan
from typing import Any

import pytest
import yaml

from gateway.config.models import Config
from lab.played.play import COLD_START, Played, PlayedRow, played
from lab.replay.sim_fleet import Scenario, ScheduledFault, scenario_from
from lab.traffic.traces import Arrival
from tests.support.replay_builders import arrivals

ENGINES = """\
pools:
  main:
    backend: simulated
    model: m
    profile: 8b-h100
    endpoints: ["http://h0:80", {url: "http://h1:80", region: far}]
routes:
  agent: {workload: agent, ttft: {budget: 1s}, tpot: {budget: 50ms}, tiers: [main]}
"""
TIERS = """\
pools:
  api: {backend: openai, api_key: simulated, model: m, profile: api-burst}
  main: {backend: simulated, model: m, profile: 8b-h100, endpoints: ["http://h0:80"]}
routes:
  agent: {workload: agent, ttft: {budget: 10s}, tiers: [api, main]}
  batch: {workload: batch, tiers: [main]}
"""


def configured(text: str) -> tuple[Scenario, dict[str, Any]]:
    document = yaml.safe_load(text)
    return scenario_from(Config.model_validate(document)), document


def play(text: str, offered: list[Arrival], **more: Any) -> Played:
    scenario, document = configured(text)
    return played(replace(scenario, **more), document, offered)


def by_name(found: Played) -> dict[str, PlayedRow]:
    return {each.row.name: each for each in found.rows}


def test_every_request_is_counted_from_its_time() -> None:
    """Eight requests of 6,000 tokens at once, on two engines: the fourth one on an engine waits for three before it.
    Nothing is late, and each has a Record."""
    found = play(ENGINES, arrivals(8, rate=1e6, output=20))
    row = by_name(found)["agent"]
    assert found.late < 0.001
    assert found.lost_records == 0
    assert (row.row.offered, row.row.completed, row.row.good, row.tpot_met) == (8, 8, 1.0, 1.0)
    p50, p90, _ = row.row.ttft
    assert 0.15 < p50 < p90 < 1.0
    assert row.attempts["completed"] == 8
    assert 0.004 < row.row.tpot[0] < 0.03


def test_the_answers_have_the_lengths_of_the_trace() -> None:
    """And the prompts too, so that the engines do the work of the trace; the first half of some is cached."""
    offered = arrivals(12, rate=2.0)
    found = by_name(play(ENGINES, offered))["all"]
    assert found.row.output_rate * offered[-1].at == pytest.approx(sum(each.output_tokens for each in offered), rel=0.4)
    assert 0.05 < found.row.hit < 0.5
    assert sum(found.held.values()) < 1.0


def test_what_a_rate_limit_refuses_is_counted() -> None:
    """Sixteen at once where six fit; all are answered in the end. Batch work has no budget, and no share of `all`."""
    offered = [*arrivals(16, rate=1e6, prompt=200, output=5), replace(arrivals(1, output=5)[0], route="batch")]
    found = by_name(play(TIERS, sorted(offered, key=lambda each: each.at)))
    assert found["agent"].limited > 0
    assert found["agent"].attempts["rate_limited"] == found["agent"].limited
    assert (found["agent"].row.completed, found["batch"].row.completed, found["all"].row.offered) == (16, 1, 16)
    assert found["agent"].row.external > 0
    assert isnan(found["batch"].tpot_met)


def test_faults_come_at_the_times_of_the_scenario() -> None:
    """An engine dies in the middle of the answers on it: these break. It is back for the second half. The scenario's
    clock begins with the cold start. Without the fault nothing breaks; on engines half as fast TPOT doubles."""
    scenario, document = configured(ENGINES)
    dead, _ = scenario.profiles
    faults = ScheduledFault(1.0, dead, "kill"), ScheduledFault(2.0, dead, "restart")
    slow = tuple(ScheduledFault(0.0, endpoint, "slow", 2.0) for endpoint in scenario.profiles)
    offered = arrivals(8, rate=4.0, prompt=600, output=150)
    killed, slowed, calm = (
        by_name(played(replace(scenario, faults=each), document, offered))["agent"] for each in (faults, slow, ())
    )
    assert calm.attempts == {"completed": 8}
    assert killed.attempts["broken"] > 0
    assert killed.row.broken + killed.row.completed == 8
    assert slowed.row.tpot[0] == pytest.approx(2 * calm.row.tpot[0], rel=0.2)


def test_equal_runs_are_nearly_equal() -> None:
    """Ports and the order of bytes between sockets break ties: some requests go to the other engine. All but the
    slowest take alike, on a machine of any speed."""
    offered = arrivals(16, rate=12.0, output=40)
    first, again = (by_name(play(ENGINES, offered))["agent"] for _ in range(2))
    assert first.row.ttft[:2] == pytest.approx(again.row.ttft[:2], rel=0.25)
    assert first.row.good == pytest.approx(again.row.good, abs=0.1)
    assert (first.attempts["completed"], again.attempts["completed"]) == (16, 16)


def test_a_cold_scenario_has_its_own_times() -> None:
    """Engines that come up late are down until then: a request before finds none, and is answered once one is up."""
    scenario, _ = configured(ENGINES)
    starts = dict.fromkeys(scenario.profiles, 3.0)
    early = [replace(each, at=1.0) for each in arrivals(1, output=5)]
    found = by_name(play(ENGINES, early, starts=starts))["agent"]
    assert found.row.good == 0.0
    later = [replace(each, at=COLD_START) for each in early]
    assert by_name(play(ENGINES, later, starts=starts))["agent"].row.good == 1.0
