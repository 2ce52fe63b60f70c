"""Engines that come, go, restart and change their model at one URL."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import monotonic
from typing import Any

import pytest
from aiohttp import web
from openai import AsyncOpenAI

from backends.server_profiles import PROFILES
from gateway.app import Gateway
from gateway.observe.record import RequestOutcome
from gateway.tokenize.tokenizers import encoder
from lab.servers.simulated_server import SimulatedServer
from policies.types import Health
from tests.support.gateways import running
from tests.support.simulated import engine_pool, engines, eventually

pytestmark = pytest.mark.virtual_time

PROMPT = [{"role": "user", "content": "word " * 400}]
OFTEN = {"scrape": "20ms"}


async def ask(gateway: Gateway, count: int = 1) -> list[str]:
    """Content of answers to `count` requests at once."""
    async with AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        asked = (client.chat.completions.create(model="chat", messages=PROMPT, max_tokens=2) for _ in range(count))  # type: ignore[arg-type]
        return [answer.choices[0].message.content or "" for answer in await asyncio.gather(*asked)]


def health(gateway: Gateway, server: SimulatedServer) -> Health:
    return gateway.monitor.loads()[endpoint(server)].health


def endpoint(server: SimulatedServer) -> str:
    return f"only/127.0.0.1:{server.port}"


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [entry.message for entry in caplog.records if entry.name == "firsttoken"]


@asynccontextmanager
async def successor(server: SimulatedServer, model: str) -> AsyncIterator[SimulatedServer]:
    """Another engine behind the same URL."""
    await server.kill()
    options: Any = {"model": model, "encode": encoder("o200k_base").encode, "port": server.port}
    other = SimulatedServer(PROFILES["8b-h100"], **options)
    await other.start()
    yield other
    await other.kill()


async def test_an_engine_that_returns_with_another_model_gets_no_request(caplog: pytest.LogCaptureFixture) -> None:
    """The other engine serves all requests, cached prefixes are forgotten, two log lines report; with the right
    model the engine is used again."""
    in_turn = {"chat": {"tiers": ["only"], "scorer": "round_robin"}}
    async with engines(2) as (one, two), running({"only": engine_pool(one, two)}, in_turn, defaults=OFTEN) as gateway:
        await ask(gateway, 20)
        assert gateway.fleet.view.statistics(endpoint(one), monotonic()).prefix_blocks
        async with successor(one, "other") as other:
            await eventually(
                lambda: health(gateway, one) is Health.DOWN and any("other" in line for line in lines(caplog))
            )
            assert gateway.fleet.view.statistics(endpoint(one), monotonic()).prefix_blocks == 0
            assert len(await ask(gateway, 100)) == 100
            assert (len(other.requests), gateway.recorder.recent[-1].end) == (0, RequestOutcome.COMPLETED)
        assert f"endpoint {endpoint(one)} serves other now, and served served before" in lines(caplog)
        wrong = f"endpoint {endpoint(one)} serves other, and not served as configured: no request goes there"
        assert lines(caplog).count(wrong) == 1
        await one.start()
        await eventually(lambda: health(gateway, one) is not Health.DOWN)  # a warm-up may be the trial
        await used(gateway, one)
        assert one.requests


async def used(gateway: Gateway, server: SimulatedServer) -> None:
    """Ask until the endpoint is up."""
    async with asyncio.timeout(10):
        while health(gateway, server) is not Health.UP:
            await ask(gateway, 10)


async def test_an_engine_that_serves_another_model_from_the_start_gets_no_request() -> None:
    """A pool of two, one with another --served-model-name: the other engine answers every request."""
    async with (
        engines(1) as (right,),
        engines(1, model="other") as (wrong,),
        running({"only": engine_pool(wrong, right)}, defaults=OFTEN) as gateway,
    ):
        await eventually(lambda: health(gateway, wrong) is Health.DOWN)
        assert len(await ask(gateway, 200)) == 200
        assert (len(wrong.requests), len(right.requests)) == (0, 200)


async def test_engines_that_come_and_go_at_random_lose_no_request() -> None:
    """Three engines are killed and started again in turn during 300 requests."""
    async with engines(3) as servers, running({"only": engine_pool(*servers)}, defaults=OFTEN) as gateway:

        async def kill_in_turn() -> None:
            for server in servers:
                await server.kill()
                await asyncio.sleep(0.15)
                await server.start()
                await asyncio.sleep(0.15)

        killing = asyncio.create_task(kill_in_turn())
        answered = 0
        while not killing.done() or answered < 300:
            answered += len(await ask(gateway, 20))
        await killing
        assert {record.end for record in gateway.recorder.recent} == {RequestOutcome.COMPLETED}
        for server in servers:
            await used(gateway, server)


# --------------------------------------------------------------------------- second names


class NamedEngine:
    """An engine whose page names one model, and which lists several; `label` and `models` are the test's."""

    def __init__(self, label: str, *models: str) -> None:
        self.label, self.models = label, models
        self.listed = 0

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        app = web.Application()
        app.add_routes([web.get("/metrics", self._metrics), web.get("/v1/models", self._models)])
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        await runner.cleanup()

    async def _metrics(self, http: web.Request) -> web.Response:
        kind = "sglang:num_running_reqs" if self.label.startswith("sg") else "vllm:num_requests_running"
        return web.Response(text=f'{kind}{{engine="0",model_name="{self.label}"}} 1.0\n')

    async def _models(self, http: web.Request) -> web.Response:
        self.listed += 1
        if not self.models:
            return web.Response(text="<html>", content_type="text/html")
        assert http.headers["authorization"] == "Bearer sk-engine"
        return web.json_response({"object": "list", "data": [{"id": name} for name in self.models]})


@asynccontextmanager
async def gateway_at(engine: NamedEngine, model: str, **more: Any) -> AsyncIterator[Gateway]:
    pool = {"backend": "vllm", "model": model, "api_key": "sk-engine", **more}
    async with engine.serving() as url, running({"only": {**pool, "endpoints": [url]}}, defaults=OFTEN) as gateway:
        await eventually(
            lambda: [load for load in gateway.monitor.loads().values() if load.scraped_at > 0] or engine.listed
        )
        yield gateway


async def only(gateway: Gateway) -> Health:
    await asyncio.sleep(0.15)  # some polls
    [load] = gateway.monitor.loads().values()
    return load.health


@pytest.mark.parametrize(
    ("label", "models", "listed", "expected"),
    [
        ("wanted", ("wanted",), 0, Health.UP),  # one name: no list is asked for
        ("base", ("base", "wanted"), 1, Health.UP),  # an adapter, or a second --served-model-name
        ("base", ("base",), 1, Health.DOWN),
        ("base", (), 1, Health.UP),  # no list to be had: requests will tell
    ],
)
async def test_an_engine_may_serve_the_configured_model_under_a_second_name(
    label: str, models: tuple[str, ...], listed: int, expected: Health
) -> None:
    """The model list is read at most every ten seconds, with the engine's key."""
    engine = NamedEngine(label, *models)
    async with gateway_at(engine, "wanted") as gateway:
        assert (await only(gateway), engine.listed) == (expected, listed)


async def test_an_sglang_engine_is_down_only_after_its_model_has_changed() -> None:
    """SGLang: the configured name may be the operator's own, until the engine has reported that name."""
    engine = NamedEngine("sg-other", "sg-other")
    async with gateway_at(engine, "sg-wanted", backend="sglang") as gateway:
        assert await only(gateway) is Health.UP
        engine.label, engine.models = "sg-wanted", ("sg-wanted",)
        assert await only(gateway) is Health.UP
        engine.label, engine.models = "sg-other", ("sg-other",)
        assert await only(gateway) is Health.DOWN


async def test_two_engines_behind_one_url_fill_no_log(caplog: pytest.LogCaptureFixture) -> None:
    """A balancer in between: each poll names the other model."""
    engine = NamedEngine("one", "one", "two")
    async with gateway_at(engine, "one"):
        for label in ("two", "one") * 5:
            engine.label = label
            await asyncio.sleep(0.05)
    said = [line.partition(" serves ")[2] for line in lines(caplog) if " serves " in line]
    assert said == ["two now, and served one before"]


@pytest.mark.parametrize("label", ["\\u001b[31m", "x" * 5000, 'a\\"b', ""])
async def test_a_hostile_model_name_cannot_forge_log_lines(label: str, caplog: pytest.LogCaptureFixture) -> None:
    """Control characters and quotes are removed; long names are cut."""
    engine = NamedEngine(label.encode().decode("unicode_escape") if label.startswith("\\u") else label, "x")
    async with gateway_at(engine, "wanted") as gateway:
        await only(gateway)
    assert all(line.isprintable() and len(line) < 300 for line in lines(caplog))
