"""Desired replicas of a running gateway: the real child, its failures, and what is published."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from array import array
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from time import time
from typing import Any

import aiohttp
import jsonschema
import pytest

from gateway.app import Gateway
from gateway.autoscale.autoscaler import CPU_SHARE, INTERVAL, Autoscaler
from gateway.autoscale.replay_child import ChildFailed, ReplayChild
from gateway.autoscale.replay_messages import DemandRow, ReplicasJob, decode_answer, decode_job, encode
from gateway.config.models import Config
from lab.capacity import replicas_worker
from lab.capacity.replicas_needed import ReplicasQuestion, replicas_needed
from lab.capacity.replicas_worker import question_of
from lab.capacity.smallest_fleet import SmallestFleet
from lab.traffic.session_sample import sampled
from lab.traffic.traces import Agents, agents
from policies.routes.route import DUMPED, Route
from tests.gateway.autoscale.jobs import job
from tests.support import gateways
from tests.support import replay_builders as build

ROOT = Path(__file__).parents[3]
POOL = {
    "backend": "vllm",
    "model": "m",
    "profile": "8b-h100",
    "endpoints": ["http://127.0.0.1:9", "http://127.0.0.1:10"],
}
ROUTES = {"chat": {"tiers": ["main"], "ttft": {"budget": "1s"}, "workload": "agent"}}


def rows(sessions: float, now: float) -> list[DemandRow]:
    """Conversations of the last minute."""
    turns = agents(Agents(seconds=60.0, sessions=sessions, turns=6.0), 1)
    return [
        DemandRow(
            now - 61.0 + turn.at,
            "chat",
            "t",
            turn.session,
            turn.prompt_tokens,
            turn.output_tokens,
            array("Q", turn.hashes).tobytes(),
            True,
        )
        for turn in turns
    ]


def test_a_route_survives_the_way_to_the_child() -> None:
    route = build.route("chat", ttft={"budget": "800ms"}, hedge={"max_extra": "2%"}, on_miss="shed", total="off")
    assert Route.model_validate(route.model_dump(mode="json"), context=DUMPED) == route
    asked = job(now=time(), rows=0)
    assert decode_job(encode(asked)) == asked
    assert (
        question_of(asked, []).scenario.routes["chat"].ttft
        == Route.model_validate(asked.routes["chat"], context=DUMPED).ttft
    )


def test_a_configuration_still_refuses_a_duration_without_a_unit() -> None:
    with pytest.raises(ValueError, match="has no unit"):
        build.route("chat", ttft={"budget": 0.8})


@pytest.mark.timeout(1200)  # a busy machine gives the lowest priority little
async def test_the_child_answers_questions_one_after_the_other_at_the_lowest_priority() -> None:
    child, now = ReplayChild(), time()
    try:
        busy, idle = rows(2.0, now), rows(0.1, now)
        much = await child.ask(job(now=now, rows=len(busy), since=now - 61), busy)
        process = child._process
        assert process is not None
        assert os.getpriority(os.PRIO_PROCESS, process.pid) == 19
        little = await child.ask(job(now=now, rows=len(idle), since=now - 61), idle)
        assert child._process is process
        assert (await child.ask(job(now=now, rows=0), [])).needed == 1
        with pytest.raises(ChildFailed, match="KeyError"):
            await child.ask(job(now=now, rows=1), [replace_route(idle[0], "another")])
        assert child._process is None
    finally:
        await child.close()
    assert much.needed > little.needed
    assert "chat would meet" in much.reason
    assert set(much.curve) >= {much.needed, much.needed - 1}
    assert much.cpu > 0
    assert much.requests > 0


def replace_route(row: DemandRow, route: str) -> DemandRow:
    return DemandRow(row.at, route, row.tenant, row.session, row.prompt_tokens, 1, row.prefix, True)


async def test_a_child_that_ends_or_babbles_is_a_failure_and_the_next_question_starts_another() -> None:
    for program, said in (("raise SystemExit(2)", "ended"), ("print('no', flush=True); input()", "DecodeError")):
        child = ReplayChild((sys.executable, "-c", program))
        with pytest.raises(ChildFailed, match=said):
            await child.ask(job(now=time(), rows=0), [])
        assert child._process is None


class ScriptedChild(ReplayChild):
    """Answers with a program that knows one reply."""

    def __init__(self, reply: str) -> None:
        program = f"import sys\nfor line in sys.stdin:\n print('{reply}', flush=True)"
        super().__init__((sys.executable, "-c", program))
        self.jobs: list[ReplicasJob] = []

    async def ask(self, job: ReplicasJob, rows: Any) -> Any:
        self.jobs.append(job)
        return await super().ask(job, rows)


async def scaled(gateway: Gateway, child: ReplayChild) -> Autoscaler:
    scaler = gateway.autoscaler
    assert scaler is not None
    scaler._child = child
    return scaler


ANSWER = '{"needed": 5, "reason": "5 engines: chat", "curve": {"4": 0.8, "5": 0.97}, "cpu": 6.0, "requests": 600}'


async def test_the_answer_is_in_the_metrics_and_in_scale_and_a_failure_leaves_it() -> None:
    async with gateways.running({"main": {**POOL, "autoscale": {"max": 8}}}, ROUTES) as gateway:
        scaler = await scaled(gateway, child := ScriptedChild(ANSWER))
        assert scaler.desired() == {"main": 2}
        before = scaler._cost
        cpu = await scaler.ask_all()
        async with aiohttp.ClientSession() as session:
            async with session.get(f"{gateway.admin_url}/scale") as reply:
                told = (await reply.json())["pools"]["main"]
            async with session.get(f"{gateway.admin_url}/metrics") as reply:
                page = await reply.text()
        assert (told["desired"], told["current"], told["reason"]) == (5, 2, "5 engines: chat")
        assert told["curve"] == {"4": 0.8, "5": 0.97}
        assert 'firsttoken_desired_replicas{pool="main"} 5.0' in page
        assert 'firsttoken_replicas_curve{n="4",pool="main"} 0.8' in page
        assert "firsttoken_replica_replay_seconds_total 6.0" in page
        assert cpu == 6.0
        assert scaler._cost < before  # 600 requests took twice what a minute may
        assert max(INTERVAL, cpu / CPU_SHARE) == 120.0
        [asked] = child.jobs
        assert (asked.pool, asked.current, asked.least, asked.most) == ("main", 2, 1, 8)
        assert list(asked.routes) == ["chat"]
        scaler._child = ReplayChild((sys.executable, "-c", ""))
        await child.close()
        await scaler.ask_all()
        assert scaler.desired() == {"main": 5}


async def test_replies_of_scale_are_as_the_openapi_document_says() -> None:
    """Before and after the first answer."""
    document = json.loads((ROOT / "docs" / "openapi-admin.json").read_text("utf-8"))
    schema = {"$ref": "#/components/schemas/Scale", "components": document["components"]}
    async with gateways.running({"main": {**POOL, "autoscale": {"max": 8}}}, ROUTES) as gateway:
        scaler = await scaled(gateway, child := ScriptedChild(ANSWER))
        jsonschema.validate(scaler.view()["pools"]["main"], schema)
        await scaler.ask_all()
        jsonschema.validate(scaler.view()["pools"]["main"], schema)
        scaler._pools["main"].law = None
        jsonschema.validate(scaler._pools["main"].as_json(), schema)
        await child.close()


async def test_without_autoscale_nothing_is_kept_or_asked_and_a_reload_begins_both() -> None:
    async with gateways.running({"main": POOL}, ROUTES) as gateway:
        scaler = await scaled(gateway, child := ScriptedChild(ANSWER))
        assert (await scaler.ask_all(), child.jobs, scaler.view()) == (0.0, [], {"pools": {}})
        assert not scaler._demand.routes
        changed = gateways.document({"main": {**POOL, "autoscale": {"min": 3, "max": 4}}}, ROUTES)
        await gateway.apply_config(Config.model_validate(changed))
        assert scaler._demand.routes == {"chat"}
        assert scaler.desired() == {"main": 3}
        await scaler.ask_all()
        assert scaler.desired() == {"main": 4}
        await child.close()


async def test_until_an_engine_is_found_there_is_no_number_and_the_first_ones_found_hold() -> None:
    """`min` at the start would have an orchestrator end the engines that run."""
    async with gateways.running({"main": {**POOL, "autoscale": {"min": 1, "max": 8}}}, ROUTES) as gateway:
        scaler = await scaled(gateway, child := ScriptedChild(ANSWER.replace('"needed": 5', '"needed": 1')))
        found = gateway.runtime.current.pools["main"]
        gateway.runtime.current.pools["main"] = replace(found, endpoints=())  # type: ignore[index]
        scaler._pools = {}
        scaler.reload()
        assert scaler.desired() == {"main": None}
        assert scaler.view()["pools"]["main"]["desired"] is None
        async with aiohttp.ClientSession() as session, session.get(f"{gateway.admin_url}/metrics") as reply:
            assert "firsttoken_desired_replicas{" not in await reply.text()
        gateway.runtime.current.pools["main"] = found  # type: ignore[index]
        scaler.reload()
        assert scaler.desired() == {"main": 2}
        await scaler.ask_all()
        assert scaler.desired() == {"main": 2}
        await child.close()


async def test_other_bounds_keep_the_number_of_engines_that_start() -> None:
    async with gateways.running({"main": {**POOL, "autoscale": {"max": 8}}}, ROUTES) as gateway:
        scaler = await scaled(gateway, child := ScriptedChild(ANSWER))
        await scaler.ask_all()
        changed = gateways.document({"main": {**POOL, "autoscale": {"max": 9}}}, ROUTES)
        await gateway.apply_config(Config.model_validate(changed))
        assert scaler.desired() == {"main": 5}
        await child.close()


async def test_a_question_that_fails_counts_its_cpu_and_the_next_replays_half() -> None:
    async with gateways.running({"main": {**POOL, "autoscale": {"max": 8}}}, ROUTES) as gateway:
        scaler = await scaled(gateway, child := ScriptedChild('{"error": "MemoryError: ", "cpu": 25.0}'))
        before = scaler._cost
        assert await scaler.ask_all() == 25.0
        assert scaler._cost == before // 2
        await child.close()


def test_a_question_that_takes_too_much_cpu_has_an_answer_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(question: ReplicasQuestion) -> SmallestFleet:
        while True:
            pass

    monkeypatch.setattr(replicas_worker, "MAX_CPU", 0.05)
    monkeypatch.setattr(replicas_worker, "replicas_needed", endless)
    answers = BytesIO()
    replicas_worker.answer_questions(BytesIO(encode(job(now=time(), rows=0)) + b"\n"), answers)
    answer = decode_answer(answers.getvalue())
    assert answer.error == "ReplayTooDear: the replays took more than 0.05 s of CPU"
    assert answer.cpu > 0.02


async def test_several_processes_each_see_a_part_of_the_sessions() -> None:
    async with gateways.running({"main": {**POOL, "autoscale": {"max": 8}}}, ROUTES) as gateway:
        scaler = await scaled(gateway, child := ScriptedChild(ANSWER))
        scaler._processes = lambda: 4
        await scaler.ask_all()
        await child.close()
        assert child.jobs[0].seen == 0.25


def test_a_half_seen_demand_needs_what_the_whole_one_does() -> None:
    now = time()
    whole = question_of(job(now=now, rows=0, cost=100_000, most=4, since=now - 61.0), rows(2.0, now))
    half = replace(whole, arrivals=sampled(whole.arrivals, 0.5), seen=0.5)
    assert abs(replicas_needed(half).needed - replicas_needed(whole).needed) <= 1


def test_bounds_that_cross_and_apis_are_refused() -> None:
    for pool, said in (
        ({**POOL, "autoscale": {"min": 4, "max": 2}}, "min \\(4\\) is above max \\(2\\)"),
        (
            {"backend": "openai", "api_key": "k", "autoscale": {"max": 2}},
            "is an API, whose servers nobody here can add",
        ),
    ):
        with pytest.raises(ValueError, match=said):
            Config.model_validate(gateways.document({"main": pool}, {"chat": {"tiers": ["main"]}}))


async def test_the_child_ends_with_the_gateway() -> None:
    async with gateways.running({"main": {**POOL, "autoscale": {"max": 8}}}, ROUTES) as gateway:
        scaler = await scaled(gateway, child := ScriptedChild(ANSWER))
        await scaler.ask_all()
        process = child._process
        assert process is not None
    await asyncio.wait_for(process.wait(), 60)
    assert process.returncode is not None
