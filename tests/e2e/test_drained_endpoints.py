"""An operator takes an endpoint out and has it ready again, by the admin port and by `firsttoken drain`."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from asyncio.subprocess import PIPE
from pathlib import Path
from typing import Any

import pytest

from gateway.app import Gateway
from gateway.cli.main import main
from gateway.config.models import Config
from gateway.parts.witness.part import WitnessPart
from lab.servers.simulated_server import SimulatedServer
from policies.types import Health
from tests.support.builders import CHAT, DONE, FINISH, STREAMED, TOKEN, USAGE, calling, get, last, post, stream_status
from tests.support.forked import ROOT
from tests.support.gateways import document, pool, running
from tests.support.served import Served, serving
from tests.support.simulated import engine_pool, engines, eventually
from tests.support.upstream import GATE, LAST_CHUNK, STREAM_HEAD, Script, Upstream, chunk

STREAM = {**CHAT, "stream": True}
SLOW: Script = [STREAM_HEAD + chunk(TOKEN), GATE, chunk(USAGE + FINISH + DONE) + LAST_CHUNK]
SOON = {"scrape": "50ms"}


async def set_state(admin: str, endpoint: str, state: str = "drain", *headers: str) -> tuple[int, dict[str, Any]]:
    async with calling(admin) as operator:
        body = {"endpoint": endpoint, "state": state}
        status, _, said = await operator.whole(post(body, *headers, path="/endpoints/drain"))
    return status, json.loads(said)


def id_of(server: Upstream | SimulatedServer) -> str:
    return f"own/{server.url.removeprefix('http://')}"


def health(gateway: Gateway) -> dict[str, Health]:
    return {name: load.health for name, load in gateway.monitor.loads().items()}


# --------------------------------------------------------------------------- the gateway


@pytest.mark.virtual_time
async def test_a_drained_endpoint_ends_what_it_has_and_gets_nothing_new_until_it_is_ready(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The answer in progress arrives whole. One line of the log for each change."""
    caplog.set_level(logging.WARNING, "firsttoken")
    async with Upstream(SLOW, [STREAMED]) as old, Upstream([STREAMED]) as other:
        pools = {"own": pool(old.url), "next": pool(other.url)}
        async with running(pools, {"chat": {"tiers": ["own", "next"], "ttft": "off"}}) as gateway:
            async with calling(gateway.url) as caller:
                assert (await caller.ask(post(STREAM)))[0] == 200
                status, said = await set_state(gateway.admin_url, id_of(old))
                assert (status, said["result"], said["state"], said["in_flight"]) == (200, "applied", "draining", 1)
                assert [await stream_status(gateway) for _ in range(10)] == [200] * 10
                assert (len(old.requests), len(other.requests)) == (1, 10)
                old.proceed()
                assert b"".join(await caller.chunks()).endswith(DONE)
            assert (await set_state(gateway.admin_url, id_of(old)))[1]["result"] == "unchanged"
            status, said = await set_state(gateway.admin_url, id_of(old), "ready")
            assert (status, said["state"], said["in_flight"]) == (200, "up", 0)
            assert await stream_status(gateway) == 200
            assert len(old.requests) == 2
    name = id_of(old)
    assert [entry.message for entry in caplog.records] == [
        f"endpoint {name} is drained from 127.0.0.1: it gets no new request, and has 1 in flight",
        f"endpoint {name} is ready again, from 127.0.0.1",
    ]


@pytest.mark.virtual_time
async def test_a_caller_without_another_endpoint_hears_of_the_operator_and_no_engine_is_blamed() -> None:
    """A 503 that names the drain, in the cause of the Record too; no ejection."""
    async with engines(1) as [server], running({"own": engine_pool(server)}, defaults=SOON) as gateway:
        await set_state(gateway.admin_url, id_of(server))
        async with calling(gateway.url) as caller:
            status, headers, said = await caller.whole(post(STREAM))
        message = "No endpoint is usable now: every endpoint that could take it is drained by an operator."
        assert (status, json.loads(said)["error"]["message"]) == (503, message)
        assert "retry-after" in headers
        why = json.loads((await get(gateway.admin_url, "/requests?last=1"))[2])[0]["why"]
        assert (why["cause"], why["culprit"]) == ("drained", id_of(server))
        assert last(gateway).end.value == "unavailable"
        [view] = json.loads((await get(gateway.admin_url, "/fleet"))[2])
        assert (view["breaker"], view["load"]["health"]) == ("closed", "draining")
        page = (await get(gateway.admin_url, "/metrics"))[2].decode()
        assert f'firsttoken_endpoint_state{{endpoint="{id_of(server)}",pool="own"}} 3.0' in page
        assert (await get(gateway.url, "/ready"))[0] == 503


@pytest.mark.virtual_time
async def test_an_engine_that_restarts_while_it_is_drained_gets_nothing_until_it_is_ready() -> None:
    """Neither a trial by a caller nor a warm-up of its lost cache, however well it answers its probes."""
    async with engines(2) as [old, other], running({"own": engine_pool(old, other)}, defaults=SOON) as gateway:
        assert [await stream_status(gateway) for _ in range(4)] == [200] * 4
        await set_state(gateway.admin_url, id_of(old))
        before = len(old.requests)
        await old.stop()
        await asyncio.sleep(20.0)
        await old.start()
        await asyncio.sleep(20.0)
        assert [await stream_status(gateway) for _ in range(10)] == [200] * 10
        assert len(old.requests) == before
        await set_state(gateway.admin_url, id_of(old), "ready")
        assert [await stream_status(gateway) for _ in range(20)] == [200] * 20
        assert len(old.requests) > before
        assert health(gateway)[id_of(old)] is Health.UP


@pytest.mark.virtual_time
async def test_the_gateway_itself_asks_a_drained_endpoint_for_nothing() -> None:
    """Where one caller alone has met failures it would ask for one token."""
    async with Upstream([STREAMED]) as upstream, running({"own": pool(upstream.url)}) as gateway:
        [endpoint] = gateway.runtime.current.pools["own"].endpoints
        await set_state(gateway.admin_url, id_of(upstream))
        gateway.fleet.on_unconfirmed(endpoint)
        assert gateway.part(WitnessPart).running == 0
        await set_state(gateway.admin_url, id_of(upstream), "ready")
        gateway.fleet.on_unconfirmed(endpoint)
        assert gateway.part(WitnessPart).running == 1


@pytest.mark.virtual_time
async def test_a_reload_keeps_an_endpoint_drained() -> None:
    async with engines(2) as [old, other], running({"own": engine_pool(old, other)}, defaults=SOON) as gateway:
        await set_state(gateway.admin_url, id_of(old))
        changed = document({"own": engine_pool(old, other), "more": engine_pool(other)}, defaults=SOON)
        await gateway.apply_config(Config.model_validate(changed))
        assert health(gateway)[id_of(old)] is Health.DRAINING


async def test_only_an_operator_drains_and_only_what_exists() -> None:
    async with running({"own": pool("http://127.0.0.1:9")}) as gateway:
        status, said = await set_state(gateway.admin_url, "own/127.0.0.1:99")
        assert (status, said["error"]["code"]) == (404, "unknown_endpoint")
        assert "did you mean 'own/127.0.0.1:9'?" in said["error"]["message"]
        assert (await set_state(gateway.admin_url, "own/127.0.0.1:9", "gone"))[0] == 400
        page = "origin: https://elsewhere.example"
        assert (await set_state(gateway.admin_url, "own/127.0.0.1:9", "drain", page))[0] == 403
        for body in (b"[]", b"{", b'{"endpoint": 1, "state": "drain"}'):
            async with calling(gateway.admin_url) as caller:
                assert (await caller.whole(post(body, path="/endpoints/drain")))[0] == 400
        assert not gateway.fleet.drained
        assert (await get(gateway.url, "/endpoints/drain", method="POST"))[0] == 404


# --------------------------------------------------------------------------- the command


async def drain(gateway: Gateway, *arguments: str) -> int:
    return await asyncio.to_thread(main, ["drain", *arguments, "--admin", gateway.admin_url], [])


async def test_the_command_waits_until_the_endpoint_is_empty(capsys: pytest.CaptureFixture[str]) -> None:
    async with Upstream(SLOW) as upstream, running({"own": pool(upstream.url)}) as gateway:
        async with calling(gateway.url) as caller:
            assert (await caller.ask(post(STREAM)))[0] == 200
            waiting = asyncio.create_task(drain(gateway, id_of(upstream)))
            await eventually(lambda: gateway.fleet.drained)
            await asyncio.sleep(0.7)
            assert not waiting.done()
            upstream.proceed()
            await caller.chunks()
            assert await waiting == 0
        assert capsys.readouterr().out.splitlines() == [
            f"{id_of(upstream)} gets no new request",
            "1 request in progress",
            f"{id_of(upstream)} is empty",
        ]
        assert await drain(gateway, "--ready", id_of(upstream)) == 0
        assert capsys.readouterr().out == f"{id_of(upstream)} is ready again (up)\n"
        assert await drain(gateway, "own/127.0.0.1:1") == 2
        assert "There is no endpoint 'own/127.0.0.1:1'" in capsys.readouterr().err


async def test_an_endpoint_that_is_ready_again_meanwhile_ends_the_wait_with_an_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Whoever waits to stop the engine must not stop it."""
    async with (
        Upstream(SLOW) as upstream,
        running({"own": pool(upstream.url)}) as gateway,
        calling(gateway.url) as caller,
    ):
        await caller.ask(post(STREAM))
        waiting = asyncio.create_task(drain(gateway, id_of(upstream)))
        await eventually(lambda: gateway.fleet.drained)
        await set_state(gateway.admin_url, id_of(upstream), "ready")
        assert await waiting == 2
    assert "is up, and drained no longer" in capsys.readouterr().err


async def test_ctrl_c_ends_the_wait_and_the_endpoint_stays_drained() -> None:
    async with (
        Upstream(SLOW) as upstream,
        running({"own": pool(upstream.url)}) as gateway,
        calling(gateway.url) as caller,
    ):
        await caller.ask(post(STREAM))
        command = (sys.executable, "-m", "gateway.cli", "drain", id_of(upstream), "--admin", gateway.admin_url)
        process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=PIPE, stderr=PIPE)
        assert process.stdout is not None
        async with asyncio.timeout(60):
            while b"in progress" not in await process.stdout.readline():
                pass
            process.send_signal(signal.SIGINT)
            out, err = await process.communicate()
        assert (process.returncode, err) == (130, b"")
        assert f"{id_of(upstream)} stays drained" in out.decode()
        assert health(gateway)[id_of(upstream)] is Health.DRAINING


# --------------------------------------------------------------------------- several workers


def first_worker(served: Served) -> int:
    """Its process id."""
    pid = served.process.pid
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


async def admin_json(served: Served, path: str) -> Any:
    return json.loads((await get(served.admin, path))[2])


async def ask(served: Served) -> int:
    async with calling(served.url) as caller:
        return (await caller.ask(post(STREAM)))[0]


async def test_all_workers_drain_and_so_does_a_worker_that_starts_later(tmp_path: Path) -> None:
    """Until the endpoint is ready again, which all of them follow too."""
    async with Upstream([STREAMED]) as old, Upstream([STREAMED]) as other:
        path = tmp_path / "firsttoken.yaml"
        path.write_text(
            "server: {listen: 127.0.0.1:0, admin: 127.0.0.1:0}\n"
            f"pools: {{own: {{backend: compatible, model: served, endpoints: [{old.url}, {other.url}]}}}}\n"
            "routes: {chat: {tiers: [own]}}\n"
        )
        async with serving(path, "--workers", "2") as served:
            status, said = await set_state(served.admin, id_of(old))
            assert (status, said["result"], said["state"], said.get("not_applied_by")) == (
                200,
                "applied",
                "draining",
                None,
            )
            assert [await ask(served) for _ in range(16)] == [200] * 16
            assert len(old.requests) == 0
            assert "is drained from" in await served.line()
            os.kill(first_worker(served), signal.SIGKILL)
            assert "restarting it" in await served.line()
            while "is serving again" not in await served.line():
                pass
            assert [await ask(served) for _ in range(16)] == [200] * 16
            assert len(old.requests) == 0
            [view] = [each for each in await admin_json(served, "/fleet") if each["endpoint"]["id"] == id_of(old)]
            assert set(view["health_by_worker"].values()) == {"draining"}
            assert (await set_state(served.admin, id_of(old), "ready"))[1]["state"] == "up"
            assert [await ask(served) for _ in range(32)] == [200] * 32
            assert len(old.requests) > 0
