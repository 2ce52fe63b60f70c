"""Desired replicas of a running gateway: the real process that replays, its failures, and what is answered."""

from __future__ import annotations

import asyncio
import json
import os
from array import array
from collections.abc import Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from time import time

import aiohttp
import pytest

from gateway.app import Gateway
from gateway.config.config_errors import ConfigError
from gateway.config.loading import load
from gateway.config.models import Config
from lab.autoscale import autoscaler, replay_process
from lab.autoscale.autoscale_command import address_of, check_pools, pool_bounds
from lab.autoscale.autoscaler import CPU_SHARE, INTERVAL, Autoscaler, PoolBounds
from lab.autoscale.demand import DemandRow
from lab.autoscale.replay_process import ReplayFailed, ReplayProcess, ReplicasAnswer, ReplicasJob, answered, question_of
from lab.capacity.replicas_needed import ReplicasQuestion, replicas_needed
from lab.capacity.smallest_fleet import SmallestFleet
from lab.traffic.session_sample import sampled
from lab.traffic.traces import Agents, agents
from tests.lab.autoscale.jobs import job
from tests.support import gateways
from tests.support.simulated import engine_pool, engines

BOUNDS = {"only": PoolBounds(1, 8, 100.0)}
ROUTES = {"served": {"tiers": ["only"], "ttft": {"budget": "1s"}, "workload": "agent"}}
ANSWER = ReplicasAnswer(5, "5 engines: chat", {4: 0.8, 5: 0.97}, 6.0, 600)


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


# -- the process --------------------------------------------------------------------------------


@pytest.mark.timeout(1200)  # a busy machine gives the lowest priority little
async def test_the_process_answers_questions_one_after_the_other_at_the_lowest_priority() -> None:
    replays, now = ReplayProcess(), time()
    try:
        busy, idle = rows(1.2, now), rows(0.1, now)
        much = await replays.ask(job(now=now, rows=busy, since=now - 61))
        process = replays._process
        assert process is not None
        assert process.pid is not None
        assert os.getpriority(os.PRIO_PROCESS, process.pid) == 19
        little = await replays.ask(job(now=now, rows=idle, since=now - 61))
        assert (await replays.ask(job(now=now))).needed == 1
        with pytest.raises(ReplayFailed, match="KeyError"):
            await replays.ask(job(now=now, rows=[replace(idle[0], route="another")]))
        assert replays._process is process
    finally:
        replays.close()
    assert not process.is_alive()
    assert much.needed > little.needed
    assert "chat would meet" in much.reason
    assert set(much.curve) >= {much.needed, much.needed - 1}
    assert much.cpu > 0
    assert much.requests > 0


def end_at_once(questions: Connection) -> None:
    questions.close()


async def test_a_process_that_ends_is_a_failure_and_the_next_question_starts_another() -> None:
    replays = ReplayProcess(end_at_once)
    for _ in range(2):
        with pytest.raises(ReplayFailed, match="the process has ended"):
            await replays.ask(job(now=time()))
        assert replays._process is None


def test_a_question_that_takes_too_much_cpu_has_an_answer_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(question: ReplicasQuestion) -> SmallestFleet:
        while True:
            pass

    monkeypatch.setattr(replay_process, "MAX_CPU", 0.05)
    monkeypatch.setattr(replay_process, "replicas_needed", endless)
    answer = answered(job(now=time()))
    assert answer.error == "ReplayTooDear: the replays took more than 0.05 s of CPU"
    assert answer.cpu > 0.02


def test_a_half_seen_demand_needs_what_the_whole_one_does() -> None:
    now = time()
    whole = question_of(job(now=now, rows=rows(2.0, now), cost=100_000, most=4, since=now - 61.0))
    half = replace(whole, arrivals=sampled(whole.arrivals, 0.5), seen=0.5)
    assert abs(replicas_needed(half).needed - replicas_needed(whole).needed) <= 1


# -- of a running gateway --------------------------------------------------------------------------


class ScriptedReplays(ReplayProcess):
    """Keeps the questions, and has one answer."""

    def __init__(self, answer: ReplicasAnswer = ANSWER) -> None:
        super().__init__()
        self.jobs: list[ReplicasJob] = []
        self.answer = answer

    def _ask(self, job: ReplicasJob) -> ReplicasAnswer:
        self.jobs.append(job)
        return self.answer


async def ask(gateway: Gateway) -> None:
    asked = {"model": "served", "stream": True, "max_tokens": 4, "messages": [{"role": "user", "content": "Hello"}]}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{gateway.url}/v1/chat/completions", json=asked) as got,
    ):
        assert got.status == 200
        await got.read()


def scaler_of(
    gateway: Gateway, replays: ReplayProcess, pools: Mapping[str, PoolBounds] = BOUNDS, lines: list[str] | None = None
) -> Autoscaler:
    found = Autoscaler(
        gateway.admin_url, pools, lambda: gateway.config, lambda line: None if lines is None else lines.append(line)
    )
    found._process = replays
    return found


async def test_what_callers_asked_is_replayed_and_the_answer_is_held_and_printed() -> None:
    lines = list[str]()
    async with engines(2) as servers, gateways.running({"only": engine_pool(*servers)}, ROUTES) as gateway:
        for _ in range(10):
            await ask(gateway)
        scaler = scaler_of(gateway, replays := ScriptedReplays(), lines=lines)
        await scaler.read()
        assert scaler.desired() == {"only": 2}
        await scaler.read_fleet()
        before = scaler._cost
        cpu = await scaler.ask_all()
        await scaler.read()  # the same Records again
        await scaler.ask_all()
    [asked, again] = replays.jobs
    assert (asked.pool, asked.current, asked.least, asked.most, asked.start_time) == ("only", 2, 1, 8, 100.0)
    assert [*asked.routes] == ["served"]
    assert len(asked.rows) == len(again.rows) == 10
    assert {row.route for row in asked.rows} == {"served"}
    assert all(row.prompt_tokens > 0 and row.output_tokens > 0 for row in asked.rows)
    assert [len(pool.endpoints) for pool in asked.pools] == [2]
    assert asked.learned["only"][0].engine is not None
    assert scaler.desired() == {"only": 5}
    said = json.loads(lines[0])
    assert (said["pool"], said["desired"], said["current"], said["reason"]) == ("only", 5, 2, "5 engines: chat")
    assert said["curve"] == {"4": 0.8, "5": 0.97}
    assert cpu == 6.0
    assert scaler._cost < before  # 600 requests took twice what a minute may
    assert max(INTERVAL, cpu / CPU_SHARE) == 120.0


async def test_an_answer_that_fails_leaves_the_number_and_the_next_replays_half() -> None:
    async with engines(2) as servers, gateways.running({"only": engine_pool(*servers)}, ROUTES) as gateway:
        scaler = scaler_of(gateway, replays := ScriptedReplays())
        await scaler.read_fleet()
        await scaler.ask_all()
        before, replays.answer = scaler._cost, ReplicasAnswer(error="MemoryError: ", cpu=25.0)
        assert await scaler.ask_all() == 25.0
        assert scaler._cost == max(before // 2, autoscaler.LEAST_COST)
        assert scaler.desired() == {"only": 5}


async def test_until_an_engine_is_found_there_is_no_number_and_nothing_is_asked() -> None:
    """The lower bound at the start would have an orchestrator end the engines that run."""
    async with engines(2) as servers, gateways.running({"only": engine_pool(*servers)}, ROUTES) as gateway:
        scaler = scaler_of(gateway, replays := ScriptedReplays())
        assert scaler.desired() == {"only": None}
        assert (await scaler.ask_all(), replays.jobs) == (0.0, [])
        await scaler.read_fleet()
        assert scaler.desired() == {"only": 2}


async def test_a_gateway_that_is_away_leaves_the_number_and_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    async with engines(2) as servers, gateways.running({"only": engine_pool(*servers)}, ROUTES) as gateway:
        scaler = scaler_of(gateway, ScriptedReplays())
        await scaler.read()
    for _ in range(3):
        await scaler.read()
    assert scaler.desired() == {"only": 2}
    assert caplog.text.count("admin port cannot be read") == 1


async def test_records_that_were_missed_begin_the_window_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lab.autoscale.gateway_reader.RECENT", 4)
    async with engines(2) as servers, gateways.running({"only": engine_pool(*servers)}, ROUTES) as gateway:
        scaler = scaler_of(gateway, ScriptedReplays())
        for _ in range(2):
            for _ in range(9):
                await ask(gateway)
            await scaler.read()
        assert len(scaler._demand.rows({"served"})) == 8
        assert scaler._demand.since == scaler._demand.rows({"served"})[4].at


async def test_several_gateways_each_see_a_part_of_the_sessions() -> None:
    async with engines(2) as servers, gateways.running({"only": engine_pool(*servers)}, ROUTES) as gateway:
        scaler = scaler_of(gateway, replays := ScriptedReplays())
        await scaler.read_fleet()
        scaler._fleet = replace(scaler._fleet, processes=4)
        await scaler.ask_all()
        assert replays.jobs[0].seen == 0.25


async def test_the_process_ends_with_the_command() -> None:
    async with engines(2) as servers, gateways.running({"only": engine_pool(*servers)}, ROUTES) as gateway:
        scaler = scaler_of(gateway, replays := ReplayProcess())
        running = asyncio.create_task(scaler.run())
        await scaler.read_fleet()
        await scaler.ask_all()
        process = replays._process
        assert process is not None
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert not process.is_alive()


# -- arguments ------------------------------------------------------------------------------------


def test_bounds_of_a_pool_are_read() -> None:
    assert pool_bounds("llama=2..12@100s") == ("llama", PoolBounds(2, 12, 100.0))
    assert pool_bounds("a.b=1..4") == ("a.b", PoolBounds(1, 4, 120.0))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("llama", "write NAME=MIN..MAX"),
        ("llama=4..2", "the smaller number first"),
        ("llama=0..2", "from 1 to 256"),
        ("llama=1..2@7", "has no unit"),
    ],
)
def test_wrong_bounds_are_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        pool_bounds(text)


def test_unknown_pools_and_apis_are_refused() -> None:
    pools = {"only": {"backend": "openai", "api_key": "k"}}
    config = Config.model_validate(gateways.document(pools, ROUTES))
    with pytest.raises(ConfigError, match=r"no such pool.*'only'"):
        check_pools({"onl": PoolBounds(1, 2, 1.0)}, config)
    with pytest.raises(ConfigError, match="is an API, whose servers nobody here can add"):
        check_pools(BOUNDS, config)


@pytest.mark.parametrize("text", ["foo", "127.0.0.1:99999", "9003", "[::1]"])
def test_an_address_that_is_none_is_an_error_with_an_example(text: str) -> None:
    """A port alone would be one on every interface, without authentication."""
    with pytest.raises(ConfigError, match=r"is not host:port; write it like 127\.0\.0\.1:8080"):
        address_of(text)
    assert str(address_of("[::1]:9003")) == "[::1]:9003"


def test_the_key_of_the_gateway_says_what_to_run_instead(tmp_path: Path) -> None:
    pools = {"only": {"backend": "vllm", "model": "m", "endpoints": ["http://127.0.0.1:9"], "autoscale": {"max": 3}}}
    (path := tmp_path / "c.yaml").write_text(json.dumps(gateways.document(pools, ROUTES)))
    with pytest.raises(ConfigError, match="run firsttoken autoscale --pool NAME"):
        load([path], {})


async def test_the_path_of_the_gateway_says_what_took_its_place() -> None:
    async with (
        engines(2) as servers,
        gateways.running({"only": engine_pool(*servers)}, ROUTES) as gateway,
        aiohttp.ClientSession() as session,
        session.get(f"{gateway.admin_url}/scale") as reply,
    ):
        assert (reply.status, "firsttoken autoscale" in await reply.text()) == (410, True)
