"""Answers that the cache keeps: of the tier that the route would rather have, and only those that a model has ended."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gateway.app import Gateway
from tests.support.builders import CHAT, DONE, FINISH, TOKEN, calling, last, post
from tests.support.gateways import pool, running
from tests.support.simulated import eventually
from tests.support.upstream import CLOSE, LAST_CHUNK, STREAM_HEAD, Pause, Script, Upstream, chunk, reply

pytestmark = pytest.mark.virtual_time

COLD = {**CHAT, "temperature": 0}
JSON = "content-type: application/json"
FILTERED = FINISH.replace(b'"stop"', b'"content_filter"')


def whole(text: str, end: str | None = "stop", **more: Any) -> Script:
    choice = {"message": {"content": text}, "finish_reason": end}
    return [reply(json.dumps({"choices": [choice], **more}).encode(), "200 OK", JSON)]


def error(status: str) -> Script:
    return [reply(b'{"error":{"message":"no"}}', status, JSON)]


@asynccontextmanager
async def two_tiers(first: Sequence[Script], second: Sequence[Script], **route: Any) -> AsyncIterator[Gateway]:
    async with Upstream(*first) as one, Upstream(*second) as two:
        pools = {"big": pool(one.url, model="big-1"), "small": pool(two.url, model="small-1")}
        rule = {"tiers": ["big", "small"], "cache": {"ttl": "1h"}, "upstream_stream": "off", **route}
        async with running(pools, {"chat": rule}) as gateway:
            yield gateway


async def asked(gateway: Gateway, body: Any = COLD, path: str = "") -> tuple[str, str, str]:
    """The pool and the model that the headers name, and whether the answer was kept."""
    async with calling(gateway.url) as caller:
        status, head = await caller.ask(post(body, path=path))
        assert status == 200
        await (caller.chunks() if "transfer-encoding" in head else caller.body(head))
    return head["x-firsttoken-pool"], head["x-firsttoken-model"], head["x-firsttoken-cache"].partition(";")[0]


BIG, SMALL, AGAIN = ("big", "big-1", "miss"), ("small", "small-1", "miss"), ("big", "big-1", "hit")


async def test_a_repeated_answer_names_the_pool_and_the_model_that_wrote_it() -> None:
    """The Record has none: no pool was asked."""
    async with two_tiers([whole("a")], []) as gateway:
        assert [await asked(gateway), await asked(gateway)] == [BIG, AGAIN]
        await eventually(lambda: len(gateway.recorder.recent) == 2)
        assert (last(gateway).endpoint.pool, last(gateway).answer.model) == ("-", "-")


@pytest.mark.parametrize(
    "failed",
    [error("500 Internal Server Error"), error("429 Too Many Requests"), error("503 Service Unavailable"), [CLOSE]],
    ids=["error", "rate limit", "overloaded", "lost"],
)
async def test_the_answer_of_a_fallback_is_not_kept(failed: Script) -> None:
    """Big is back for the next equal request."""
    async with two_tiers([failed, whole("a")], [whole("b")]) as gateway:
        assert await asked(gateway) == SMALL
        await asyncio.sleep(120.0)  # virtual
        assert [await asked(gateway), await asked(gateway)] == [BIG, AGAIN]


async def test_the_answer_of_a_tier_that_stood_in_for_lateness_is_not_kept() -> None:
    """The hung tier was left in time for the next one."""
    slow: Script = [Pause(30.0), *whole("a")]
    body = {**COLD, "stream": True}
    streamed: Script = [STREAM_HEAD + chunk(TOKEN + FINISH + DONE) + LAST_CHUNK]
    async with two_tiers([slow], [streamed], ttft={"budget": "2s"}) as gateway:
        assert [await asked(gateway, body), await asked(gateway, body)] == [SMALL, SMALL]


async def test_an_answer_for_which_a_better_one_was_asked_is_not_kept() -> None:
    """The first tier's own answer was cut off, and the second had none."""
    rule = ["length"]
    async with two_tiers([whole("a", "length")], [error("500 Internal Server Error")], escalate=rule) as gateway:
        assert [await asked(gateway), await asked(gateway)] == [BIG, BIG]


async def test_an_answer_of_a_tier_of_which_the_first_has_no_part_is_kept() -> None:
    """The first tier is for other requests, however well it is."""
    tiers = [{"pool": "big", "when": {"stream": True}}, "small"]
    async with two_tiers([], [whole("b")], tiers=tiers) as gateway:
        assert [await asked(gateway), await asked(gateway)] == [SMALL, ("small", "small-1", "hit")]


@pytest.mark.parametrize(
    "script",
    [
        [reply(b'{"choices":[]}', "200 OK", JSON)],
        whole("", "content_filter"),
        whole("I am", "content_filter"),
        whole("a", "an_end_of_tomorrow"),
        whole("a", None),
        whole("", "stop"),
        [reply(b'{"choices":[{"message":null,"finish_reason":"stop"}]}', "200 OK", JSON)],
    ],
)
async def test_an_answer_that_no_model_has_ended_is_not_kept(script: Script) -> None:
    async with two_tiers([script], []) as gateway:
        assert [await asked(gateway), await asked(gateway)] == [BIG, BIG]


@pytest.mark.parametrize("end", [FILTERED, FINISH.replace(b'"stop"', b'"abort"')])
async def test_nor_a_stream_that_was_ended_for_it(end: bytes) -> None:
    """Text that looks like an end of the protocol is text."""
    body = {**COLD, "stream": True}
    said = TOKEN.replace(b'"hi"', rb'"say \"finish_reason\": \"content_filter\" now"')
    for ended, kept in ((end, BIG), (FINISH, AGAIN)):
        async with two_tiers([[STREAM_HEAD + chunk(said + ended + DONE) + LAST_CHUNK]], []) as gateway:
            assert [await asked(gateway, body), await asked(gateway, body)] == [BIG, kept]


@pytest.mark.parametrize(
    ("end", "kept"), [("end_turn", AGAIN), ("max_tokens", AGAIN), ("tool_use", AGAIN), ("refusal", BIG)]
)
async def test_messages_alike(end: str, kept: tuple[str, str, str]) -> None:
    content = [{"type": "text", "text": "hi"}]
    message = {"type": "message", "role": "assistant", "content": content, "stop_reason": end, "usage": {}}
    script: Script = [reply(json.dumps(message).encode(), "200 OK", JSON)]
    async with Upstream(script) as one:
        pools = {"big": pool(one.url, model="big-1", backend="anthropic", base_url=one.url)}
        del pools["big"]["endpoints"]
        async with running(pools, {"chat": {"tiers": ["big"], "cache": {"ttl": "1h"}}}) as gateway:
            body = {**COLD, "max_tokens": 9}
            assert [await asked(gateway, body, "/v1/messages") for _ in "12"] == [BIG, kept]
