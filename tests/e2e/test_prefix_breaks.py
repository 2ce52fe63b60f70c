"""Breaks of prefixes over HTTP: found, priced as a replay prices them, and mended by a rule of the route."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from backends.server_profiles import PROFILES
from gateway.app import Gateway
from gateway.records.log_entries import mended
from lab.replay.player import Player
from lab.replay.queue_results import prefill_seconds
from lab.traffic.traces import read_trace
from policies.prefix_doctor.advice import advice
from tests.support.agent_prompts import PLANTS, AgentTurn, agent_turns, tool_order
from tests.support.builders import calling, get, post
from tests.support.gateways import running
from tests.support.replay_builders import route, scenario
from tests.support.simulated import engine_pool, engines

pytestmark = pytest.mark.virtual_time

PROFILE = "8b-h100"
ROUTES = {"chat": {"workload": "agent", "tiers": ["main"]}}
EPOCH = 1.7e9  # s: wall clock at virtual 0
SELDOM = {"scrape": "2s"}  # in the minutes of a session, most of the time would go into polls of the engines
SHORT = 0.35  # of the recorded lengths


async def play(gateway: Gateway, turns: Sequence[AgentTurn], *headers: str) -> list[dict[str, str]]:
    """Each turn at its time; the headers of the answers, in order of the turns."""
    return await asyncio.gather(*(_ask(gateway, turn, *headers) for turn in turns))


async def _ask(gateway: Gateway, turn: AgentTurn, *headers: str) -> dict[str, str]:
    await asyncio.sleep(turn.at)
    async with calling(gateway.url) as caller:
        status, found = await caller.ask(post({**turn.body, "max_tokens": 8}, *headers))
        assert status == 200
        await caller.chunks()
    return found


async def sums(gateway: Gateway) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((await get(gateway.admin_url, "/advise"))[2])
    return found


@pytest.mark.parametrize("kind", PLANTS)
async def test_the_cost_of_breaks_is_that_of_a_replay_without_them(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill of a replay of the log, less that of the same log with every break mended. Engines are learned in virtual
    time; in which order they answer depends on the machine, and moves the figure (1.03 to 1.12 of the replay's)."""
    clock = asyncio.get_running_loop().time
    monkeypatch.setattr("gateway.observe.recorder.time", lambda: EPOCH + clock())  # of the log, and so of the replay
    log, without = tmp_path / "access.jsonl", tmp_path / "mended.jsonl"
    async with AsyncExitStack() as stack:
        servers = await stack.enter_async_context(engines(2, PROFILE))
        pools = {"main": engine_pool(*servers, profile=PROFILE)}
        logged = {"telemetry": {"access_log": str(log)}}
        gateway = await stack.enter_async_context(running(pools, ROUTES, **logged, defaults=SELDOM))
        await play(gateway, agent_turns(PLANTS[kind], scale=SHORT, sessions=4))
        told = advice(await sums(gateway))
    (place,) = [each for each in told.breaks if each.cls == kind]
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    without.write_text("".join(json.dumps(row) + "\n" for row in mended(rows)))
    replayed = prefill_of(log) - prefill_of(without)
    assert replayed > 1.0
    assert place.seconds * told.observed / 86_400 == pytest.approx(replayed, rel=0.15)


async def test_a_rule_of_the_route_mends_the_break() -> None:
    """The answer names the rule, the Record too, and no place is left where prompts break."""
    mending = {"chat": {**ROUTES["chat"], "repair": ["sort_tools"]}}
    async with AsyncExitStack() as stack:
        servers = await stack.enter_async_context(engines(1, PROFILE))
        gateway = await stack.enter_async_context(running({"main": engine_pool(*servers)}, mending))
        found = await play(gateway, agent_turns(tool_order, scale=0.1, sessions=2))
        told = advice(await sums(gateway))
        records = [*gateway.recorder.recent]
    assert {headers["x-firsttoken-repaired"] for headers in found} == {"sort_tools"}
    assert {tuple(each.asked.prompt_changes) for each in records} == {("sort_tools",)}
    assert told.breaks == []
    assert [each.rule for each in told.repairs] == ["sort_tools"]


def prefill_of(log: Path) -> float:
    """Seconds of engine time for the prompts of a log, with the caches of a replay."""
    arrivals = read_trace(log)
    played = Player(replace(scenario(2, PROFILE, route("chat")), block=arrivals[0].block), arrivals).play()
    return sum(prefill_seconds(PROFILES[PROFILE], each.prompt_tokens, each.cached) for each in played.requests)
