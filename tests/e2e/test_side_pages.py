"""Pages of load and health that fail while the engine serves: nobody is refused, and everybody is told the same."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from backends.ext_proc.messages import BodyMode
from gateway.app import Gateway
from gateway.fleet import endpoint_poll
from gateway.parts.picker.part import PickerPart
from policies.fleet.circuit_breaker import GONE_FOR
from tests.gateway.picker.test_picker import Envoy, destination
from tests.support.builders import get, stream_status
from tests.support.certificates import Certificates, made
from tests.support.gateways import running
from tests.support.grpc_client import grpc_client
from tests.support.scripted_fleet import dead_url
from tests.support.side_pages import FAULTS, HEALTH, METRICS, MODELS, PAGE, TLS_FAULT, SidedEngine, sided
from tests.support.simulated import eventually
from tests.support.upstream import Pause, Received, Script, reply

pytestmark = pytest.mark.virtual_time

CALLERS = 12
POLLS = 8  # requests for pages, of which each poll takes one or two
ROUTES = {"chat": {"tiers": ["only"], "ttft": "off"}, "served": {"tiers": ["only"], "ttft": "off"}}
TOLD = {  # part of the reason that is told
    "hang": "its /metrics fails: no answer within 1 s",
    "garbage": "its /metrics fails: not HTTP",
    TLS_FAULT: "TLS handshake failed",
    "unreadable text": "its /metrics has no series of vllm",
    "redirect": "its /metrics answers 307",
    "huge": "its /metrics fails: ",
    "endless": "its /metrics fails: no answer within",
    "another product": "its /metrics has no series of vllm",
    "cut off": "its /metrics fails: ",
    "reset": "its /metrics fails: connection closed without an answer",
    "closed": "its /metrics fails: connection closed without an answer",
}
DOORS = ("serve", "pick")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return made(tmp_path_factory.mktemp("tls"))


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_poll, "PROBE_TIMEOUT", 1.0)


def pool_of(engines: Collection[SidedEngine], ca: Path, kind: str = "vllm") -> dict[str, Any]:
    secured = any(engine.url.startswith("https:") for engine in engines)
    tls = {"tls": {"ca": str(ca)}} if secured else {}
    return {"backend": kind, "model": "served", "endpoints": [engine.url for engine in engines], **tls}


@asynccontextmanager
async def polled(
    fault: str, count: int, made: Certificates, pages: Collection[str] = (METRICS,), kind: str = "vllm"
) -> AsyncIterator[tuple[Gateway, list[SidedEngine]]]:
    """A gateway that has polled its engines many times. The first has the fault; the second is well."""
    async with AsyncExitStack() as stack:
        faults = [fault, ""][:count]
        engines = [await stack.enter_async_context(sided(each, made, pages)) for each in faults]
        pools = {"only": pool_of(engines, made.ca, kind)}
        pick = {"listen": "127.0.0.1:0"}
        gateway = await stack.enter_async_context(running(pools, ROUTES, defaults={"scrape": "50ms"}, pick=pick))
        await eventually(lambda: engines[0].asked >= POLLS)
        yield gateway, engines


async def views(gateway: Gateway) -> list[dict[str, Any]]:
    """The endpoints in the answer of GET /fleet."""
    _, _, body = await get(gateway.admin_url, "/fleet")
    found: list[dict[str, Any]] = json.loads(body)
    return found


async def callers_answered(gateway: Gateway, door: str, engines: list[SidedEngine]) -> int:
    """Of CALLERS, those with an answer, or with the address of an engine that serves."""
    if door == "serve":
        return sum([await stream_status(gateway) == 200 for _ in range(CALLERS)])
    served = {engine.url.rpartition("/")[2].replace("localhost", "127.0.0.1") for engine in engines}
    async with grpc_client(gateway.part(PickerPart).url) as client:
        named = [destination(await Envoy(client, BodyMode.BUFFERED).pick()) for _ in range(CALLERS)]
    return sum(address.replace("localhost", "127.0.0.1") in served for address in named)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("fault", FAULTS)
async def test_an_engine_whose_load_page_fails_serves_every_caller(
    fault: str, count: int, door: str, certificates: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    """It is up, or the last resort, for all who tell: the callers, /ready, /fleet and the log, with the reason."""
    with caplog.at_level(logging.WARNING, "firsttoken"):
        async with polled(fault, count, certificates) as (gateway, engines):
            reason = TOLD.get(fault, f"its /metrics answers {fault}")
            if fault != TLS_FAULT:  # where the health page fails as well
                await eventually(lambda: any(reason in entry.message for entry in caplog.records))
                [first, *_] = [
                    one for one in await views(gateway) if engines[0].url.rpartition(":")[2] in one["endpoint"]["id"]
                ]
                assert (first["load"]["health"], first["breaker"]) == ("up", "closed")
                assert reason in first["why"]
                assert [(each["what"], reason in each["why"]) for each in first["believed"]] == [("load unknown", True)]
            status, _, _ = await get(gateway.url, "/ready")
            engines[0].refusing = False
            assert status == 200
            assert await callers_answered(gateway, door, engines) == CALLERS
    assert not [entry for entry in caplog.records if "is down" in entry.message and fault != TLS_FAULT]


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("fault", ["500", "503", "hang", "garbage", "reset", "closed"])
async def test_an_engine_whose_pages_all_fail_is_the_last_resort_until_an_answer_disproves_them(
    fault: str, door: str, certificates: Certificates
) -> None:
    """The health page takes it down, and everybody is answered all the same; then it is up, for good."""
    pages = (METRICS, HEALTH, MODELS)
    async with polled(fault, 1, certificates, pages) as (gateway, engines):
        await eventually(lambda: next(iter(gateway.monitor.loads().values())).health.value == "down")
        [view] = await views(gateway)
        assert view["why"].startswith("its /health ")
        assert (await get(gateway.url, "/ready"))[0] == 200
        assert await callers_answered(gateway, door, engines) == CALLERS
        if door == "serve":
            before = engines[0].asked
            await eventually(lambda: engines[0].asked >= before + POLLS)
            assert next(iter(gateway.monitor.loads().values())).health.value == "up"


@pytest.mark.parametrize("kind", ["sglang", "tgi", "llamacpp", "trtllm", "ollama", "simulated"])
async def test_every_kind_of_engine_serves_without_its_pages(kind: str, certificates: Certificates) -> None:
    """Each has a page of its own; each answers 500 to all of them."""
    async with polled("500", 1, certificates, ("/metrics", "/health", "/prometheus/metrics", "/api/version"), kind) as (
        gateway,
        engines,
    ):
        await eventually(lambda: next(iter(gateway.monitor.loads().values())).health.value == "down")
        assert await callers_answered(gateway, "serve", engines) == CALLERS


async def test_pages_that_hang_forget_no_prefix(certificates: Certificates) -> None:
    """Nothing but a failed connection does, unless the engine itself says that it has restarted."""
    async with polled("", 1, certificates) as (gateway, [engine]):
        assert await callers_answered(gateway, "serve", [engine]) == CALLERS
        endpoint, *_ = gateway.monitor.loads()
        cache = gateway.fleet.cache(endpoint)
        assert cache is not None
        cache.index.record((1, 2, 3))
        held = len(cache.index)
        engine.fault, engine.pages = "hang", (METRICS, HEALTH)
        before = engine.asked
        await eventually(lambda: engine.asked >= before + POLLS)
        assert (len(cache.index), gateway.monitor.loads()[endpoint].health.value) == (held, "up")


async def test_a_refused_connection_is_refused_at_once_and_forgets_the_cache(certificates: Certificates) -> None:
    """Nobody listens, by a probe of this very second: 503 with the time to come back, and not ready."""
    async with running({"only": {"backend": "vllm", "model": "served", "endpoints": [dead_url()]}}, ROUTES) as gateway:
        await eventually(lambda: next(iter(gateway.monitor.loads().values())).health.value == "down")
        [view] = await views(gateway)
        assert view["why"] == "connection refused 2 times in a row"
        assert (await get(gateway.url, "/ready"))[0] == 503
        assert await stream_status(gateway) == 503


async def test_an_engine_that_listens_again_is_tried_before_a_poll_has_found_it(certificates: Certificates) -> None:
    """What is believed gone is tried once its last refused connection is a while ago."""
    async with polled("", 1, certificates) as (gateway, _):
        endpoint, *_ = gateway.monitor.loads()
        await gateway.monitor.close()  # no poll tells of its return
        for _ in range(2):
            gateway.fleet.on_probe_failed(endpoint, monotonic())
        assert await stream_status(gateway) == 503
        await asyncio.sleep(GONE_FOR + 0.2)  # loads are computed anew ten times a second
        assert [await stream_status(gateway) for _ in range(3)] == [200] * 3


async def test_what_does_not_tell_its_load_attracts_nobody(certificates: Certificates) -> None:
    """Its sibling is known to be busy with others' requests: both are taken to be."""
    async with polled("500", 2, certificates) as (gateway, [silent, busy]):
        busy.running = 5
        loads = gateway.monitor.loads
        await eventually(lambda: sorted(load.running for load in loads().values()) == [5, 5])
        silent.fault = ""
        await eventually(lambda: sorted(load.running for load in loads().values()) == [0, 5])


class Restless(SidedEngine):
    """Its page says something else at each poll: another error, load, sleep."""

    settled = False

    def script(self, received: Received) -> Script:
        if received.target != METRICS or self.settled:
            return super().script(received)
        failing: Script = [reply(b"", f"{500 + self.asked % 90} x")]
        return (*[failing] * 4, [reply(PAGE % 0 + SLEEPS)], [reply(PAGE % 0)])[self.asked // 2 % 6]


SLEEPS = b'vllm:engine_sleep_state{engine="0",sleep_state="weights_offloaded"} 1.0\n'


async def test_a_page_that_changes_with_each_poll_fills_no_log(caplog: pytest.LogCaptureFixture) -> None:
    """Its last state is told all the same, a minute later."""
    with caplog.at_level(logging.WARNING, "firsttoken"):
        async with (
            Restless() as engine,
            running({"only": pool_of([engine], Path())}, ROUTES, defaults={"scrape": "50ms"}),
        ):
            await eventually(lambda: engine.asked > 200)
            assert len(caplog.records) <= endpoint_poll.MOST_LINES
            engine.settled = True
            await asyncio.sleep(endpoint_poll.LINES_WITHIN + 1)
            told = [entry.message.partition(" is ")[2] or entry.message for entry in caplog.records]
            loads = [each for each in told if "load" in each]
            assert not loads or loads[-1].endswith("tells its load")
            assert [each for each in told if "asleep" in each or "awake" in each][-1].startswith("awake")


class Compiling(SidedEngine):
    """Nothing comes for a while from its start, to nobody and on no page: it compiles in its first requests."""

    began: float | None = None

    def script(self, received: Received) -> Script:
        if received.method == "POST" and self.began is None:
            self.began = monotonic()
        left = COMPILES if self.began is None else self.began + COMPILES - monotonic()
        return (
            [Pause(left), *super().script(received)]
            if self.began is not None and left > 0
            else super().script(received)
        )


COMPILES = 15.0  # s


@pytest.mark.parametrize("pages", [(), (METRICS, HEALTH)], ids=["pages answer", "pages hang"])
async def test_newcomers_are_answered_while_an_engine_compiles(pages: Collection[str]) -> None:
    """Everybody is silent; whoever comes meanwhile is tried, and not refused at once."""
    async with (
        Compiling("hang" if pages else "", pages) as engine,
        running({"only": pool_of([engine], Path())}, ROUTES, defaults={"scrape": "500ms"}) as gateway,
    ):
        asked = []
        for _ in range(14):
            asked.append(asyncio.create_task(stream_status(gateway)))
            await asyncio.sleep(1.0)
        async with asyncio.timeout(120):
            assert await asyncio.gather(*asked) == [200] * 14
