"""`region: {only: [eu]}` over real sockets: whatever fails in eu, the other region never gets the prompt.

Each case is played without `only` too, where the other region answers: else a test could not fail.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from gateway.app import Gateway
from tests.support.builders import ANSWER, STREAMED, TOKEN
from tests.support.gateways import running
from tests.support.simulated import eventually
from tests.support.upstream import CLOSE, HANG, RESET, STREAM_HEAD, Received, Script, ScriptedEngine, chunk, reply

pytestmark = pytest.mark.virtual_time

ONLY: Mapping[str, Any] = {"region": {"only": ["eu"]}}
ANYWHERE: Mapping[str, Any] = {"region": {"prefer": ["eu"]}}
PATHS = {"openai": "/v1/chat/completions", "anthropic": "/v1/messages"}
ERROR = [reply(b'{"error": {"message": "no"}}', "500 Internal Server Error", "content-type: application/json")]


@dataclass
class Regions:
    """A gateway before an engine in eu, and one in us that answers."""

    gateway: Gateway
    eu: list[Received]
    got_in_us: list[Received]

    @property
    def us(self) -> list[Received]:
        """With the prompt: a port that was another test's is asked by its gateway, too."""
        return [each for each in self.got_in_us if b"a diagnosis" in each.body]

    async def ask(self, dialect: str = "openai", stream: bool = True, **headers: str) -> tuple[int, bytes]:
        body = {
            "model": "chat",
            "stream": stream,
            "max_tokens": 9,
            "messages": [{"role": "user", "content": "a name and a diagnosis"}],
        }
        url = self.gateway.url + PATHS[dialect]
        async with aiohttp.ClientSession() as session, session.post(url, json=body, headers=headers) as answer:
            return answer.status, await answer.read()


@asynccontextmanager
async def regions(script: Script, route: Mapping[str, Any], **of_pool: Any) -> AsyncIterator[Regions]:
    eu, us = list[Received](), list[Received]()
    async with ScriptedEngine(script, answered=eu) as one, ScriptedEngine([STREAMED], answered=us) as two:
        endpoints = [{"url": one.url, "region": "eu"}, {"url": two.url, "region": "us"}]
        pool = {"backend": "vllm", "model": "served", "endpoints": endpoints, **of_pool}
        times = {"ttft": {"budget": "500ms"}, "tpot": "off", "total": {"budget": "1s", "limit": "20s"}}
        chat = {"tiers": ["p"], **times, **route}
        defaults = {"first_token": "2s", "stream_idle": "60s"}
        async with running({"p": pool}, {"chat": chat}, defaults=defaults) as gateway:
            yield Regions(gateway, eu, us)


def error_type(dialect: str, body: bytes) -> str:
    """The type of an error in the caller's dialect."""
    told = json.loads(body)
    assert told.get("type", "") == ("error" if dialect == "anthropic" else "")
    return str(told["error"]["type"])


@pytest.mark.parametrize("dialect", PATHS)
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("script", [ERROR, [RESET], [CLOSE], [HANG]], ids=["500", "reset", "close", "silent"])
async def test_no_failover_leaves_the_region(script: Script, stream: bool, dialect: str) -> None:
    """The caller gets the failure as an error of its dialect, again and again: once eu is believed down too."""
    async with regions(script, ONLY) as fleet:
        for _ in range(4):
            status, body = await fleet.ask(dialect, stream)
            assert status >= 500
            assert error_type(dialect, body)
        assert (bool(fleet.eu), fleet.us) == (True, [])


@pytest.mark.parametrize("script", [ERROR, [RESET], [HANG]], ids=["500", "reset", "silent"])
async def test_without_only_the_other_region_answers(script: Script) -> None:
    """The control of the test above: a preferred region that fails is left."""
    async with regions(script, ANYWHERE) as fleet:
        assert (await fleet.ask())[0] == 200
        assert (bool(fleet.eu), len(fleet.us)) == (True, 1)


@pytest.mark.parametrize(("route", "hedged"), [(ONLY, 0), (ANYWHERE, 1)], ids=["only", "prefer"])
async def test_no_hedge_leaves_the_region(route: Mapping[str, Any], hedged: int) -> None:
    """An overdue first token is raced within the region alone."""
    async with regions([HANG], {**route, "hedge": {"max_extra": "100%"}, "max_attempts": 2}) as fleet:
        status, _ = await fleet.ask()
        assert (status, len(fleet.us)) == (200 if hedged else 504, hedged)


@pytest.mark.parametrize(("route", "rescued"), [(ONLY, 0), (ANYWHERE, 1)], ids=["only", "prefer"])
async def test_no_rescue_leaves_the_region(route: Mapping[str, Any], rescued: int) -> None:
    """A stream that breaks after its first token ends by an error event, and no peer elsewhere gets the prompt."""
    async with regions([STREAM_HEAD + chunk(TOKEN), RESET], {**route, "rescue": "on"}) as fleet:
        status, body = await fleet.ask()
        assert (status, len(fleet.us)) == (200, rescued)
        assert rescued or b'"error"' in body


@pytest.mark.parametrize(("route", "spilled"), [(ONLY, 0), (ANYWHERE, 1)], ids=["only", "prefer"])
async def test_no_queued_request_leaves_the_region(route: Mapping[str, Any], spilled: int) -> None:
    """At the cap of eu a request waits for it, to the end of its patience."""
    async with regions([STREAM_HEAD + chunk(TOKEN), HANG], route, concurrent_requests=1) as fleet:
        first = asyncio.create_task(fleet.ask())
        await eventually(lambda: fleet.eu)
        status, _ = await fleet.ask()
        assert (status, len(fleet.us)) == (200 if spilled else 503, spilled)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)


async def test_no_header_of_a_caller_leaves_the_region() -> None:
    """Not that of a condition, and none that widens a budget."""
    headers = {"x-region": "us", "x-slo-ttft-ms": "60000", "x-priority": "9", "x-session-id": "s"}
    when: Mapping[str, Any] = {"tiers": [{"pool": "p", "when": {"header.x-region": "us"}}]}
    async with regions(ERROR, {**ONLY, **when}) as fleet:
        assert (await fleet.ask(**headers))[0] >= 500
        assert (bool(fleet.eu), fleet.us) == (True, [])


async def test_explain_names_the_endpoints_outside_of_the_region() -> None:
    """And sends nothing to any."""
    async with regions([ANSWER], ONLY) as fleet, aiohttp.ClientSession() as session:
        body = {"model": "chat", "messages": [{"role": "user", "content": "hello"}]}
        async with session.post(f"{fleet.gateway.admin_url}/explain", json=body) as answer:
            told = await answer.json()
        assert "outside of the regions of the route" in json.dumps(told)
        assert fleet.eu == fleet.us == []
