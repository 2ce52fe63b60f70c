"""Prompts that take an engine longer than the limit of its first token: answered, or refused at once and by name."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from time import monotonic
from typing import Any

import aiohttp
import pytest

from gateway.app import Gateway
from tests.support.gateways import pool, running
from tests.support.simulated import eventually
from tests.support.upstream import HANG, Pause, Received, Script, Upstream, chunked

pytestmark = pytest.mark.virtual_time

RATE = 1000.0  # characters per second of prefill
ANSWERED = (Path(__file__).parents[1] / "backends/transcripts/vllm_chat_stream.sse").read_bytes()


class SlowEngine(Upstream):
    """An engine that takes its time for each prompt, one at a time or not, and hangs if told so."""

    hangs = False

    def script(self, received: Received) -> Script:
        if received.method == "GET" or received.target == "/tokenize":
            return [b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"]
        if self.hangs:
            return [HANG]
        told = re.sub(rb'"prompt_tokens":\s*\d+', b'"prompt_tokens":%d' % (len(received.body) // 5), ANSWERED)
        return [Pause(len(received.body) / RATE), chunked(told)]


def prompt(seconds: float, seed: int = 0, **more: Any) -> dict[str, Any]:
    """A prompt of about as long a prefill, that shares no prefix with another one."""
    text = f"{seed} {'prose of words ' * int(seconds * RATE / 15)}"
    return {"model": "chat", "stream": True, "messages": [{"role": "user", "content": text}], **more}


async def ask(gateway: Gateway, body: dict[str, Any]) -> tuple[int, Mapping[str, str], bytes, float]:
    started, patience = monotonic(), aiohttp.ClientTimeout(total=None)
    async with (
        aiohttp.ClientSession(timeout=patience) as client,
        client.post(f"{gateway.url}/v1/chat/completions", json=body) as reply,
    ):
        return reply.status, reply.headers, await reply.read(), monotonic() - started


async def learn(gateway: Gateway, count: int = 48) -> None:  # until each engine is known
    for i in range(count):
        status, *_ = await ask(gateway, prompt(1 + i % 4, i + 1))
        assert status == 200


def asked(*engines: SlowEngine) -> list[int]:
    return [sum(each.method == "POST" and each.target != "/tokenize" for each in one.requests) for one in engines]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_prompt_that_takes_longer_than_the_usual_limit_is_answered(stream: bool) -> None:
    """Nobody has set a limit: 60 s are for engines that hang."""
    async with SlowEngine() as one, SlowEngine() as two:
        pools = {"only": pool(one.url, two.url, backend="vllm")}
        async with running(pools) as gateway:
            await learn(gateway)
            before = sum(asked(one, two))
            status, head, _, took = await ask(gateway, prompt(90, 99, stream=stream))
            assert (status, head["x-firsttoken-attempts"]) == (200, "1")
            assert (sum(asked(one, two)) - before, 60 < took < 200) == (1, True)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("where", ["defaults", "pool"])
async def test_a_limit_that_is_meant_refuses_at_once_and_by_name(where: str, stream: bool) -> None:
    """No engine is asked, and SDKs need not repeat."""
    async with SlowEngine() as one, SlowEngine() as two:
        own = {"first_token": "5s"}
        pools = {"only": pool(one.url, two.url, backend="vllm", **(own if where == "pool" else {}))}
        more = {"defaults": own} if where == "defaults" else {}
        async with running(pools, {"chat": {"tiers": ["only"], "ttft": {"budget": "20s"}}}, **more) as gateway:
            await learn(gateway)
            before = asked(one, two)
            status, head, raw, took = await ask(gateway, prompt(12, 99, stream=stream))
            said = json.loads(raw)["error"]["message"]
            assert (status, head.get("x-should-retry"), asked(one, two)) == (504, "false", before), said
            assert "first_token is 5 s" in said
            assert "the first token of only is expected in 1" in said
            assert int(head["x-firsttoken-ttft-p50-ms"]) > 9_000
            assert took < 1.0
            await eventually(lambda: len(gateway.recorder.recent) == 49)
            assert gateway.recorder.recent[-1].attempts == []


async def test_a_slower_tier_within_its_own_limit_is_asked_in_its_place() -> None:
    """The limit is of the first pool alone."""
    async with SlowEngine() as one, SlowEngine() as two:
        pools = {
            "short": pool(one.url, backend="vllm", first_token="5s"),
            "long": pool(two.url, backend="vllm", first_token="10m"),
        }
        async with running(pools) as gateway:
            await learn(gateway)
            before = asked(one, two)
            status, head, *_ = await ask(gateway, prompt(12, 99))
            assert (status, head["x-firsttoken-pool"], head["x-firsttoken-attempts"]) == (200, "long", "1")
            assert asked(one, two) == [before[0], before[1] + 1]


async def test_the_end_of_the_whole_answer_bounds_the_limit() -> None:
    """A prompt that takes longer than `total.limit` is refused at once too."""
    async with SlowEngine() as one:
        routes = {"chat": {"tiers": ["only"], "total": {"budget": "10s", "limit": "20s"}}}
        async with running({"only": pool(one.url, backend="vllm")}, routes) as gateway:
            await learn(gateway)
            before = asked(one)
            status, _, raw, took = await ask(gateway, prompt(40, 99))
            assert (status, asked(one), took < 1.0) == (504, before, True)
            assert "left of total.limit" in json.loads(raw)["error"]["message"]


async def test_a_hung_engine_is_left_at_the_usual_limit() -> None:
    """A short prompt: its forecast explains no longer silence."""
    async with SlowEngine() as one, SlowEngine() as two:
        pools = {"only": pool(one.url, two.url, backend="vllm")}
        async with running(pools) as gateway:
            await learn(gateway)
            one.hangs = two.hangs = True
            status, _, _, took = await ask(gateway, prompt(1, 99))
            assert status == 504
            assert 60 <= took <= 200


async def test_a_guess_refuses_nobody() -> None:
    """The first request of a fresh gateway, before any engine was timed."""
    async with SlowEngine() as one:
        more = {"defaults": {"first_token": "100ms"}}
        async with running({"only": pool(one.url, backend="vllm")}, **more) as gateway:
            await ask(gateway, prompt(30, 1))
            assert asked(one) == [1]
