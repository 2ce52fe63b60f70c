"""The endpoint picker behind the real Envoy, with the configuration of deploy/envoy: `make envoy`."""

from __future__ import annotations

import asyncio
import json
import signal
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from socket import socket
from sys import executable
from time import monotonic
from typing import Any

import aiohttp
import pytest

from gateway.app import Gateway
from lab.servers.simulated_server import SimulatedServer
from scripts.envoy_setup import VERSIONS
from tests.support.envoy import envoy
from tests.support.gateways import running
from tests.support.simulated import engine_pool, engines, eventually

ROUTES = {"served": {"tiers": ["only"]}}
CHAT: dict[str, Any] = {"model": "served", "stream": True, "max_tokens": 5}
BOTH_MODES = pytest.mark.parametrize("duplex", [False, True], ids=["buffered", "duplex"])
EVERY_VERSION = pytest.mark.parametrize("version", VERSIONS)


def chat(text: str) -> dict[str, Any]:
    return {**CHAT, "messages": [{"role": "user", "content": text}]}


async def ask(session: aiohttp.ClientSession, url: str, body: Any) -> tuple[int, bytes]:
    async with session.post(f"{url}/v1/chat/completions", json=body) as reply:
        return reply.status, await reply.read()


@asynccontextmanager
async def picked(
    folder: Path, version: str, *, duplex: bool = False, **pick: Any
) -> AsyncIterator[tuple[str, aiohttp.ClientSession, list[SimulatedServer], Gateway]]:
    """Envoy over three engines, with a picker in this process."""
    settings = {"listen": "127.0.0.1:0", **pick}
    async with (
        engines(3) as servers,
        running({"only": engine_pool(*servers)}, ROUTES, pick=settings) as gateway,
        aiohttp.ClientSession() as session,
    ):
        assert gateway.picker is not None
        urls = [server.url for server in servers]
        async with envoy(folder, version, gateway.picker.url, urls, duplex=duplex) as url:
            yield url, session, servers, gateway


@EVERY_VERSION
@BOTH_MODES
async def test_prompts_go_back_to_the_engine_that_holds_their_prefix(
    tmp_path: Path, version: str, duplex: bool
) -> None:
    """Answers arrive whole, and what was seen of them is learned."""
    async with picked(tmp_path, version, duplex=duplex) as (url, session, servers, gateway):
        for turn in range(4):
            for talk in range(5):
                body = chat(f"{talk} " * 800 + f"turn {turn}")
                status, answer = await ask(session, url, body)
                assert (status, answer.endswith(b"data: [DONE]\n\n")) == (200, True)
        found = [{each.body["messages"][0]["content"][0] for each in server.requests} for server in servers]
        assert sum(map(len, found)) == 5  # each talk on one engine
        await eventually(lambda: len(gateway.recorder.recent) == 20)
        later = [record for record in gateway.recorder.recent if (record.cached_tokens_predicted or 0) > 700]
        assert len(later) >= 15
        assert all(record.ttft is not None for record in gateway.recorder.recent)


@EVERY_VERSION
@BOTH_MODES
async def test_a_body_of_two_megabytes_passes(tmp_path: Path, version: str, duplex: bool) -> None:
    async with picked(tmp_path, version, duplex=duplex) as (url, session, servers, _):
        body = {**chat("hello"), "metadata": {"note": "x" * 2_000_000}}
        assert (await ask(session, url, body))[0] == 200
        (received,) = [each for server in servers for each in server.requests]
        assert received.body == body


@EVERY_VERSION
async def test_a_refusal_of_ours_reaches_the_caller(tmp_path: Path, version: str) -> None:
    async with picked(tmp_path, version) as (url, session, servers, gateway):
        for server in servers:
            await server.stop()
        await eventually(lambda: not gateway.decider.any_usable(monotonic()))
        status, answer = await ask(session, url, chat("hello"))
        assert (status, json.loads(answer)["error"]["code"]) == (503, "unavailable")


@EVERY_VERSION
async def test_a_dead_first_address_costs_no_request(tmp_path: Path, version: str) -> None:
    """Envoy goes on to the next address of the list, or to one of its own."""
    async with picked(tmp_path, version, fallbacks=2) as (url, session, servers, _):
        assert (await ask(session, url, chat("a " * 800)))[0] == 200
        (holder,) = [server for server in servers if server.requests]
        await holder.stop()
        assert (await ask(session, url, chat("a " * 800)))[0] == 200


def free_port() -> int:
    with socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


async def serve_process(folder: Path, servers: list[SimulatedServer], port: int) -> Process:
    """`firsttoken serve` with a picker on `port`, once it serves."""
    config = folder / "pick.yaml"
    config.write_text(
        json.dumps(
            {
                "server": {"listen": "127.0.0.1:0", "admin": "127.0.0.1:0"},
                "pools": {"only": engine_pool(*servers)},
                "routes": ROUTES,
                "telemetry": {"access_log": "off"},
                "pick": {"listen": f"127.0.0.1:{port}"},
            }
        )
    )
    command = [executable, "-m", "gateway.cli", "serve", "--config", str(config)]
    process = await asyncio.create_subprocess_exec(*command, stdout=DEVNULL, stderr=PIPE)
    assert process.stderr is not None
    while b"serving" not in await process.stderr.readline():
        pass
    return process


@EVERY_VERSION
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hung"])
async def test_a_picker_that_is_killed_or_hangs_costs_no_request(
    tmp_path: Path, version: str, fault: signal.Signals
) -> None:
    """At 50 requests a second; it comes back after two seconds, and is asked again."""
    port, answers = free_port(), list[tuple[int, float]]()
    async with engines(3) as servers, aiohttp.ClientSession() as session:
        pickers = [await serve_process(tmp_path, servers, port)]
        urls = [server.url for server in servers]
        async with envoy(tmp_path, version, f"http://127.0.0.1:{port}", urls) as url:

            async def one(number: int) -> None:
                began = monotonic()
                status, _ = await ask(session, url, chat(f"{number} hello"))
                answers.append((status, monotonic() - began))

            async def come_back() -> None:
                if fault is signal.SIGSTOP:
                    pickers[0].send_signal(signal.SIGCONT)
                else:
                    pickers.append(await serve_process(tmp_path, servers, port))

            tasks = []
            for number in range(300):
                if number == 100:
                    pickers[0].send_signal(fault)
                if number == 200:
                    tasks.append(asyncio.create_task(come_back()))
                tasks.append(asyncio.create_task(one(number)))
                await asyncio.sleep(0.02)
            await asyncio.gather(*tasks)
        for process in pickers:
            if process.returncode is None:
                process.kill()
            await process.wait()
    assert [status for status, _ in answers if status != 200] == []
    print(f"{version} {fault.name}: {len(answers)} of 300 answered, slowest {max(took for _, took in answers):.2f} s")
