"""Tenants whose prompts begin alike learn nothing of each other: not from engines, not from us.

Over simulated engines, which name cached blocks as vLLM does: the salt goes into a prompt's first hash. The same on
real ones is in tests/vllm/test_isolation.py.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from backends.simulated.simulated_server import SimulatedServer
from gateway.app import Gateway
from gateway.observe.record import Record
from policies.types import Health
from tests.gateway.builders import Caller, calling, last, post
from tests.support.gateways import pool, running
from tests.support.simulated import engine_pool, engines, eventually
from tests.support.upstream import LAST_CHUNK, STREAM_HEAD, Upstream, chunk, reply

A, B, MATE, OTHER_MATE = "sk-a", "sk-b", "sk-mate", "sk-other-mate"
KEYS = [
    {"name": name, "sha256": hashlib.sha256(key.encode()).hexdigest(), **more}
    for name, key, more in (
        ("a", A, {}),
        ("b", B, {}),
        ("mates", "sk-mates", {}),
        ("mate", MATE, {"cache_group": "mates"}),
        ("other", OTHER_MATE, {"cache_group": "mates"}),
    )
]
QUICK = {"scrape": "50ms"}


def prompt(name: str, words: int = 600) -> str:
    return " ".join(f"{name}{i}" for i in range(words))


def asking(text: str, key: str = "", *headers: str, **more: Any) -> bytes:
    body = {"model": "chat", "max_tokens": 2, "messages": [{"role": "user", "content": text}], **more}
    return post(body, *headers, *([f"authorization: Bearer {key}"] if key else []))


async def said(gateway: Gateway, *asked: Any, **more: Any) -> tuple[dict[str, Any], Record]:
    """The usage that a caller is told, and the Record."""
    async with calling(gateway.url) as caller:
        status, _, body = await caller.whole(asking(*asked, **more))
        assert status == 200, body
    await eventually(lambda: gateway.recorder.live == 0)
    usage: dict[str, Any] = json.loads(body)["usage"]
    return usage, last(gateway)


async def cached(gateway: Gateway, *asked: Any, **more: Any) -> int:
    """Tokens that the engine found, as the caller is told: what was believed is the same."""
    usage, record = await said(gateway, *asked, **more)
    assert record.cached_tokens_predicted == record.cached_tokens_reported
    found: int = usage["prompt_tokens_details"]["cached_tokens"]
    return found


@asynccontextmanager
async def tenants(count: int = 1, **more: Any) -> AsyncIterator[tuple[Gateway, list[SimulatedServer]]]:
    async with (
        engines(count) as servers,
        running({"only": engine_pool(*servers)}, keys=KEYS, **more) as gateway,
    ):
        yield gateway, servers


async def test_two_tenants_with_the_same_prompt_share_no_hit() -> None:
    """The same tenant finds its own: that is the control."""
    async with tenants() as (gateway, _):
        for name in ("x", "y", "z"):
            assert await cached(gateway, prompt(name), A) == 0
            assert await cached(gateway, prompt(name), B) == 0
            assert await cached(gateway, prompt(name), A) > 500
            assert await cached(gateway, prompt(name), B) > 500


async def test_to_share_is_said_by_every_key_that_does() -> None:
    """Keys of one `cache_group` find each other's; one that is called as the group does not."""
    async with tenants() as (gateway, _):
        assert await cached(gateway, prompt("x"), MATE) == 0
        assert await cached(gateway, prompt("x"), OTHER_MATE) > 500
        assert await cached(gateway, prompt("x"), "sk-mates") == 0


async def test_a_forged_salt_changes_nothing() -> None:
    """In the body, under any spelling of its name that JSON allows, or in a header; not even the victim's own."""
    async with tenants() as (gateway, [engine]):
        await cached(gateway, prompt("x"), A)
        [salt] = {received.body["cache_salt"] for received in engine.requests}
        assert await cached(gateway, prompt("x"), B, f"x-cache-salt: {salt}", cache_salt=salt) == 0
        assert await cached(gateway, prompt("x"), A, cache_salt="another") > 500
        body = asking(prompt("z")).partition(b"\r\n\r\n")[2]
        body = body.replace(b'"model"', b'"cache\\u005fsalt": "' + salt.encode() + b'", "model"')
        async with calling(gateway.url) as caller:
            await caller.whole(post(body, f"authorization: Bearer {B}"))
        sent = [(received.body["cache_salt"], received.headers.get("x-cache-salt")) for received in engine.requests]
        own = sent[1][0]
        assert own != salt
        assert sent == [(salt, None), (own, None), (salt, None), (own, None)]


async def test_an_open_gateway_has_one_cache_for_all() -> None:
    """Without keys nobody is told apart. A caller's own salt divides it: a front end may know its users."""
    async with engines() as [engine], running({"only": engine_pool(engine)}) as gateway:
        assert await cached(gateway, prompt("x"), A) == 0
        assert await cached(gateway, prompt("x"), B) > 500
        usage, record = await said(gateway, prompt("x"), B, cache_salt="mine")
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0 == record.cached_tokens_reported
        assert [received.body.get("cache_salt") for received in engine.requests] == [None, None, "mine"]


async def test_our_own_index_is_no_oracle() -> None:
    """What is believed, predicted, chosen and said of a prompt is the same whether another tenant sent it or nobody."""
    async with tenants(2) as (gateway, _):
        for i in range(4):
            await said(gateway, prompt(f"known{i}"), A)
        known, unknown = [
            [await explained(gateway, prompt(f"{kind}{i}")) for i in range(4)] for kind in ("known", "new")
        ]
        own = [await explained(gateway, prompt(f"known{i}"), A) for i in range(4)]
        assert {one["hit_tokens"] for few in (known, unknown) for ranked in few for one in ranked} == {0}
        assert max(one["hit_tokens"] for one in own[0]) > 500
        for seen, unseen in zip(known, unknown, strict=True):
            assert [(one["endpoint"], one["reason"]) for one in seen] == [(o["endpoint"], o["reason"]) for o in unseen]


async def explained(gateway: Gateway, text: str, key: str = B) -> list[dict[str, Any]]:
    async with calling(gateway.admin_url) as caller:
        asked = asking(text, key).replace(b"/v1/chat/completions", b"/explain", 1)
        _, headers = await caller.ask(asked)
        candidates: list[dict[str, Any]] = json.loads(await caller.body(headers))["candidates"]
        return candidates


async def test_what_warms_up_an_engine_is_in_its_tenants_cache() -> None:
    """A restarted engine is given back the prefixes of each under its own salt: both find theirs, and only theirs."""
    async with tenants(2, defaults=QUICK) as (gateway, [steady, mortal]):
        for key, name in ((A, "x"), (B, "y")):
            for _ in range(2):
                await said(gateway, prompt(name), key)
        salts = {name: salt for received in (*steady.requests, *mortal.requests) for name, salt in [of(received.body)]}
        await mortal.kill()
        health = f"only/{mortal.url.removeprefix('http://')}"
        await eventually(lambda: gateway.monitor.loads()[health].health is Health.DOWN)
        mortal.requests.clear()
        await mortal.start()
        await eventually(lambda: len(mortal.requests) == 2 and not gateway.monitor.loads()[health].warming)
        assert {of(received.body) for received in mortal.requests} == set(salts.items())
        await steady.kill()
        assert [
            (await said(gateway, prompt(name), key))[0]["prompt_tokens_details"]["cached_tokens"] > 500
            for key, name in ((A, "x"), (B, "y"), (A, "y"), (B, "x"))
        ] == [True, True, False, False]


def of(body: dict[str, Any]) -> tuple[str, str]:
    """The first letter of a prompt, and its salt."""
    return body["messages"][0]["content"][0], body["cache_salt"]


# --------------------------------------------------------------------------- where caches cannot be kept apart

USAGE = b'"usage":{"prompt_tokens":2000,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":1920}}'
WHOLE = b'{"choices":[{"message":{"content":"\\"cached_tokens\\": 7"},"finish_reason":"stop"}],' + USAGE + b"}"
CONTENT = b'data: {"choices":[{"index":0,"delta":{"content":"hi"}}]}\n\n'
END = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}],' + USAGE + b"}\n\n"
ASKED = b'data: {"choices":[],' + USAGE + b"}\n\n"
STREAM = [STREAM_HEAD + chunk(CONTENT), chunk(END[:90]), chunk(END[90:]) + chunk(ASKED) + chunk(b"data: [DONE]\n\n")]
TOLD, HIDDEN = b'"cached_tokens":1920}', b'"cached_tokens":0   }'


async def heard(gateway: Gateway, key: str, **more: Any) -> bytes:
    async with calling(gateway.url) as caller:
        return await answer(caller, asking("x", key, **more), bool(more.get("stream")))


async def answer(caller: Caller, raw: bytes, stream: bool) -> bytes:
    _, headers = await caller.ask(raw)
    return b"".join(await caller.chunks()) if stream else await caller.body(headers)


async def test_an_api_tells_no_tenant_what_was_cached() -> None:
    """Its cache is one for all of our callers. What we meter by, we still read; text that looks alike is text."""
    whole = [reply(WHOLE, "200 OK", "content-type: application/json")]
    async with Upstream(whole) as upstream, running({"api": pool(upstream.url)}, keys=KEYS) as gateway:
        assert await heard(gateway, A) == WHOLE.replace(TOLD, HIDDEN)
        await eventually(lambda: gateway.recorder.live == 0)
        assert last(gateway).cached_tokens_reported == 1920
    async with Upstream([*STREAM, LAST_CHUNK]) as upstream, running({"api": pool(upstream.url)}, keys=KEYS) as gateway:
        streamed = await heard(gateway, A, stream=True)
        assert streamed == (CONTENT + END + b"data: [DONE]\n\n").replace(TOLD, HIDDEN)
        asked = await heard(gateway, A, stream=True, stream_options={"include_usage": True})
        assert asked == (CONTENT + END + ASKED + b"data: [DONE]\n\n").replace(TOLD, HIDDEN)
        assert last(gateway).cached_tokens_reported == 1920


async def test_an_open_gateway_passes_on_what_the_api_says() -> None:
    """There is nobody to be told of."""
    async with Upstream([reply(WHOLE)]) as upstream, running({"api": pool(upstream.url)}) as gateway:
        assert await heard(gateway, "") == WHOLE
