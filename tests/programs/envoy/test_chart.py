"""The Envoy of the Helm chart, as it is rendered, before real pickers: `make envoy`."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
import yaml

from benchmarks.processes import free_port
from lab.servers.simulated_server import SimulatedServer
from scripts.envoy_setup import VERSIONS, binary
from tests.support.chart import kept, of_kind
from tests.support.envoy import Envoy, configuration, envoy_of
from tests.support.gateways import document
from tests.support.served import Served, serving
from tests.support.simulated import engine_pool, engines

EVERY_VERSION = pytest.mark.parametrize("version", VERSIONS)
ROUTES = {"served": {"tiers": ["only"]}}
STREAMED = 300  # tokens: some seconds


def files() -> dict[str, str]:
    """Of Envoy's ConfigMap."""
    (found,) = of_kind(kept("pick-envoy"), "ConfigMap", "-envoy")
    return dict(found["data"])


def body(text: str, tokens: int = 3) -> dict[str, Any]:
    return {"model": "served", "stream": True, "max_tokens": tokens, "messages": [{"role": "user", "content": text}]}


async def ask(session: aiohttp.ClientSession, url: str, text: str) -> None:
    async with session.post(f"{url}/v1/chat/completions", json=body(text)) as reply:
        assert (reply.status, (await reply.read()).endswith(b"data: [DONE]\n\n")) == (200, True)


@asynccontextmanager
async def charted(
    folder: Path, version: str, pickers: int
) -> AsyncIterator[tuple[Envoy, list[Served], list[SimulatedServer], aiohttp.ClientSession]]:
    """Pickers in processes of their own, healthy by the checks of Envoy, before three engines."""
    async with AsyncExitStack() as stack:
        servers = await stack.enter_async_context(engines(3))
        served, ports = [], [free_port() for _ in range(pickers)]
        for number, port in enumerate(ports):
            pick, ports_of = {"listen": f"127.0.0.1:{port}"}, {"listen": "127.0.0.1:0", "admin": "127.0.0.1:0"}
            server = {**ports_of, "drain": {"wait": "30s"}}
            path = folder / f"pick{number}.yaml"
            path.write_text(json.dumps(document({"only": engine_pool(*servers)}, ROUTES, pick=pick, server=server)))
            served.append(await stack.enter_async_context(serving(path)))
            assert served[-1].url, served[-1].first_line
        addresses, urls = [f"http://127.0.0.1:{port}" for port in ports], [server.url for server in servers]
        config = configuration(yaml.safe_load(files()["envoy.yaml"]), addresses, urls, duplex=False)
        running = await stack.enter_async_context(envoy_of(folder, version, config))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        await healthy(session, running, pickers)
        yield running, served, servers, session


async def healthy(session: aiohttp.ClientSession, running: Envoy, count: int) -> None:
    """Waits until so many pickers are."""
    async with asyncio.timeout(30):
        while await stat(session, running, "cluster.picker.membership_healthy") != count:  # noqa: ASYNC110 - of Envoy
            await asyncio.sleep(0.05)


async def stat(session: aiohttp.ClientSession, running: Envoy, name: str) -> int:
    async with session.get(f"{running.admin}/stats", params={"filter": f"^{name}$"}) as reply:
        found = (await reply.text()).strip()
    return int(found.partition(": ")[2]) if found else -1


def holders(servers: list[SimulatedServer], talk: str) -> list[int]:
    """Requests of a talk, by engine."""
    return [sum(each.body["messages"][0]["content"].startswith(talk) for each in one.requests) for one in servers]


@EVERY_VERSION
@pytest.mark.parametrize("case", ["pick-envoy", "pick-scaled"])
async def test_envoy_accepts_its_configuration(tmp_path: Path, version: str, case: str) -> None:
    """Unchanged: the tests below replace ports and addresses. A field that goes out of use is an error too."""
    (found,) = of_kind(kept(case), "ConfigMap", "-envoy")
    path = tmp_path / "envoy.yaml"
    path.write_text(found["data"]["envoy.yaml"])
    command = [str(binary(version)), "--mode", "validate", "-c", str(path), "--log-level", "warning"]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    _, err = await process.communicate()
    assert (process.returncode, b"eprecated" in err) == (0, False), err


@EVERY_VERSION
async def test_requests_are_answered_with_the_picker_alive_and_dead(tmp_path: Path, version: str) -> None:
    """Alive, it returns a talk to the engine that holds its prefix; without it, Envoy spreads requests itself."""
    async with charted(tmp_path, version, 1) as (running, (picker,), servers, session):
        for turn in range(6):
            await ask(session, running.urls["callers"], "alive " * 800 + f"turn {turn}")
        assert sorted(holders(servers, "alive")) == [0, 0, 6]
        picker.process.kill()
        await picker.process.wait()
        for turn in range(6):
            await ask(session, running.urls["callers"], "dead " * 800 + f"turn {turn}")
        assert holders(servers, "dead") == [2, 2, 2]


@EVERY_VERSION
async def test_a_picker_that_drains_is_left_at_once(tmp_path: Path, version: str) -> None:
    """A rolling update: one of two is terminated. Requests go on, and the other one picks them. Records come with the
    entries of the access log, 0.1 s behind the answers."""
    async with charted(tmp_path, version, 2) as (running, (first, second), servers, session):
        first.process.send_signal(signal.SIGTERM)
        await healthy(session, running, 1)
        before = await picked(session, second)
        for turn in range(6):
            await ask(session, running.urls["callers"], "drained " * 800 + f"turn {turn}")
        async with asyncio.timeout(30):
            while (found := await picked(session, second)) < before + 6:  # noqa: ASYNC110 - of another process
                await asyncio.sleep(0.05)
        assert found == before + 6
        assert sorted(holders(servers, "drained")) == [0, 0, 6]


async def picked(session: aiohttp.ClientSession, picker: Served) -> int:
    async with session.get(f"{picker.admin}/requests") as reply:
        return len(await reply.json())


@EVERY_VERSION
async def test_envoy_drains_before_it_ends(tmp_path: Path, version: str) -> None:
    """The preStop script returns when the last stream has ended, and not before; then SIGTERM cuts nothing."""
    script = tmp_path / "drain.sh"
    script.write_text(files()["drain.sh"])
    async with charted(tmp_path, version, 1) as (running, _, _, session):
        url = f"{running.urls['callers']}/v1/chat/completions"
        async with session.post(url, json=body("hello", STREAMED)) as reply:
            received = await reply.content.readany()
            environ = {**os.environ, "ADMIN_PORT": str(urlsplit(running.admin).port)}
            draining = await asyncio.create_subprocess_exec("bash", str(script), "0", "60", env=environ)
            await not_ready(session, running)
            assert draining.returncode is None
            async with asyncio.timeout(60):
                assert await draining.wait() == 0
            running.process.terminate()
            received += await reply.content.read()
        assert received.endswith(b"data: [DONE]\n\n")


async def not_ready(session: aiohttp.ClientSession, running: Envoy) -> None:
    async with asyncio.timeout(30):
        while True:
            async with session.get(f"{running.urls['probes']}/ready") as reply:
                if reply.status == 503:
                    return


@EVERY_VERSION
async def test_the_port_of_probes_shows_readiness_and_metrics_alone(tmp_path: Path, version: str) -> None:
    async with charted(tmp_path, version, 1) as (running, _, _, session):
        found = {}
        for path in ("/ready", "/stats/prometheus", "/config_dump", "/quitquitquit", "/ready/../quitquitquit"):
            async with session.get(f"{running.urls['probes']}{path}") as reply:
                found[path] = reply.status
        async with session.post(f"{running.urls['probes']}/ready") as reply:
            assert reply.status == 404
        assert list(found.values()) == [200, 200, 404, 404, 404]
