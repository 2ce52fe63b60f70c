"""Tenants with equal prefixes learn nothing of each other, neither from engines nor from the gateway.

Runs over simulated engines, which include the salt in a prompt's first block hash, like vLLM.
tests/programs/vllm/test_isolation.py is the same for real vLLM.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gateway.app import Gateway
from gateway.config.models import Config
from gateway.observe.record import Record
from lab.servers.simulated_server import SimulatedServer
from policies.types import Health
from tests.support.builders import Caller, calling, last, post
from tests.support.gateways import document, pool, running
from tests.support.simulated import engine_pool, engines, eventually
from tests.support.upstream import LAST_CHUNK, STREAM_HEAD, Upstream, chunk, reply

pytestmark = pytest.mark.virtual_time

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


async def usage_and_record(gateway: Gateway, *arguments: Any, **more: Any) -> tuple[dict[str, Any], Record]:
    """Returns the usage in the answer, and the Record."""
    async with calling(gateway.url) as caller:
        status, _, body = await caller.whole(asking(*arguments, **more))
        assert status == 200, body
    await eventually(lambda: gateway.recorder.live == 0)
    usage: dict[str, Any] = json.loads(body)["usage"]
    return usage, last(gateway)


async def cached(gateway: Gateway, *arguments: Any, **more: Any) -> int:
    """Cached tokens by the usage in the answer; the prediction must be equal."""
    usage, record = await usage_and_record(gateway, *arguments, **more)
    assert record.placed.cached_tokens == record.answer.cached_tokens
    found: int = usage["prompt_tokens_details"]["cached_tokens"]
    return found


@asynccontextmanager
async def tenants(count: int = 1, **more: Any) -> AsyncIterator[tuple[Gateway, list[SimulatedServer]]]:
    async with (
        engines(count) as servers,
        running({"only": engine_pool(*servers)}, keys=KEYS, **more) as gateway,
    ):
        yield gateway, servers


async def test_two_tenants_with_the_same_prompt_share_no_cache_hit() -> None:
    """The control: each tenant hits its own cache."""
    async with tenants() as (gateway, _):
        for name in ("x", "y", "z"):
            assert await cached(gateway, prompt(name), A) == 0
            assert await cached(gateway, prompt(name), B) == 0
            assert await cached(gateway, prompt(name), A) > 500
            assert await cached(gateway, prompt(name), B) > 500


async def test_keys_share_a_cache_only_by_cache_group() -> None:
    """Keys of one `cache_group` share hits; a key named like the group does not."""
    async with tenants() as (gateway, _):
        assert await cached(gateway, prompt("x"), MATE) == 0
        assert await cached(gateway, prompt("x"), OTHER_MATE) > 500
        assert await cached(gateway, prompt("x"), "sk-mates") == 0


async def test_a_forged_salt_has_no_effect() -> None:
    """In the body, under any JSON spelling of its name, or in a header; even the victim's own salt."""
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


async def test_open_mode_has_one_cache_for_all_callers() -> None:
    """A caller's own salt is honoured: a front end may separate its users."""
    async with engines() as [engine], running({"only": engine_pool(engine)}) as gateway:
        assert await cached(gateway, prompt("x"), A) == 0
        assert await cached(gateway, prompt("x"), B) > 500
        usage, record = await usage_and_record(gateway, prompt("x"), B, cache_salt="mine")
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0 == record.answer.cached_tokens
        assert [received.body.get("cache_salt") for received in engine.requests] == [None, None, "mine"]


async def test_predictions_reveal_no_prompt_of_another_tenant() -> None:
    """Predictions, placement and reasons for a prompt do not depend on other tenants' prompts."""
    async with tenants(2) as (gateway, _):
        for i in range(4):
            await usage_and_record(gateway, prompt(f"known{i}"), A)
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
        explain_request = asking(text, key).replace(b"/v1/chat/completions", b"/explain", 1)
        _, headers = await caller.ask(explain_request)
        candidates: list[dict[str, Any]] = json.loads(await caller.body(headers))["candidates"]
        return candidates


async def test_cache_warming_keeps_tenants_apart() -> None:
    """A restarted engine receives each tenant's prefixes under the tenant's salt; each tenant hits its own prefixes
    only."""
    async with tenants(2, defaults=QUICK) as (gateway, [steady, mortal]):
        for key, name in ((A, "x"), (B, "y")):
            for _ in range(2):
                await usage_and_record(gateway, prompt(name), key)
        salts = {
            name: salt
            for received in (*steady.requests, *mortal.requests)
            for name, salt in [prompt_and_salt(received.body)]
        }
        await mortal.kill()
        health = f"only/{mortal.url.removeprefix('http://')}"
        await eventually(lambda: gateway.monitor.loads()[health].health is Health.DOWN)
        mortal.requests.clear()
        await mortal.start()
        await eventually(lambda: len(mortal.requests) == 2 and not gateway.monitor.loads()[health].warming)
        assert {prompt_and_salt(received.body) for received in mortal.requests} == set(salts.items())
        await steady.kill()
        assert [
            (await usage_and_record(gateway, prompt(name), key))[0]["prompt_tokens_details"]["cached_tokens"] > 500
            for key, name in ((A, "x"), (B, "y"), (A, "y"), (B, "x"))
        ] == [True, True, False, False]


def prompt_and_salt(body: dict[str, Any]) -> tuple[str, str]:
    """First letter of the prompt, and the salt."""
    return body["messages"][0]["content"][0], body["cache_salt"]


# --------------------------------------------------------------------------- backends without salts

USAGE = b'"usage":{"prompt_tokens":2000,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":1920}}'
WHOLE = b'{"choices":[{"message":{"content":"\\"cached_tokens\\": 7"},"finish_reason":"stop"}],' + USAGE + b"}"
CONTENT = b'data: {"choices":[{"index":0,"delta":{"content":"hi"}}]}\n\n'
END = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}],' + USAGE + b"}\n\n"
ASKED = b'data: {"choices":[],' + USAGE + b"}\n\n"
STREAM = [STREAM_HEAD + chunk(CONTENT), chunk(END[:90]), chunk(END[90:]) + chunk(ASKED) + chunk(b"data: [DONE]\n\n")]
REPORTED, MASKED = b'"cached_tokens":1920}', b'"cached_tokens":0   }'


async def body_of_answer(gateway: Gateway, key: str, **more: Any) -> bytes:
    async with calling(gateway.url) as caller:
        return await answer(caller, asking("x", key, **more), bool(more.get("stream")))


async def answer(caller: Caller, raw: bytes, stream: bool) -> bytes:
    _, headers = await caller.ask(raw)
    return b"".join(await caller.chunks()) if stream else await caller.body(headers)


async def test_cached_counts_of_an_api_are_masked() -> None:
    """All callers of an API share its cache. The gateway still meters the counts; similar content is unchanged."""
    whole = [reply(WHOLE, "200 OK", "content-type: application/json")]
    async with Upstream(whole) as upstream, running({"api": pool(upstream.url)}, keys=KEYS) as gateway:
        assert await body_of_answer(gateway, A) == WHOLE.replace(REPORTED, MASKED)
        await eventually(lambda: gateway.recorder.live == 0)
        assert last(gateway).answer.cached_tokens == 1920
    async with Upstream([*STREAM, LAST_CHUNK]) as upstream, running({"api": pool(upstream.url)}, keys=KEYS) as gateway:
        streamed = await body_of_answer(gateway, A, stream=True)
        assert streamed == (CONTENT + END + b"data: [DONE]\n\n").replace(REPORTED, MASKED)
        usage_requested = await body_of_answer(gateway, A, stream=True, stream_options={"include_usage": True})
        assert usage_requested == (CONTENT + END + ASKED + b"data: [DONE]\n\n").replace(REPORTED, MASKED)
        assert last(gateway).answer.cached_tokens == 1920


def of(*names: str, **routes: list[str]) -> list[dict[str, Any]]:
    """Keys by name, with the routes given by name."""
    return [
        {**key, **({"routes": routes[key["name"]]} if key["name"] in routes else {})}
        for key in KEYS
        if key["name"] in names
    ]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("keys", "shown"),
    [
        (of("a"), True),
        (of("mate", "other"), True),
        (of("a", "b", a=["chat"], b=["lab"]), True),
        (of("a", "b"), False),
        (of("a", "b", b=["chat"]), False),
        (of("mate", "mates"), False),
    ],
)
async def test_cached_counts_are_shown_where_one_cache_group_uses_the_api(
    keys: list[dict[str, Any]], shown: bool, stream: bool
) -> None:
    """A single key, keys of one group, or keys with separate routes: the cache holds no prompt of another group."""
    script = [*STREAM, LAST_CHUNK] if stream else [reply(WHOLE)]
    said = CONTENT + END + ASKED + b"data: [DONE]\n\n" if stream else WHOLE
    options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    routes = {"chat": {"tiers": ["api"]}, "lab": {"tiers": ["lab"]}}
    async with Upstream(script) as upstream:
        pools = {"api": pool(upstream.url), "lab": pool("http://127.0.0.1:9")}
        async with running(pools, routes, keys=keys) as gateway:
            key = {"a": A, "mates": "sk-mates", "mate": MATE}[keys[0]["name"]]
            seen = await body_of_answer(gateway, key, **options)
    assert seen == (said if shown else said.replace(REPORTED, MASKED))


async def test_a_second_cache_group_masks_cached_counts_at_once() -> None:
    """A reload adds a key, and removes the key again."""
    async with Upstream([reply(WHOLE)]) as upstream, running({"api": pool(upstream.url)}, keys=of("a")) as gateway:
        for keys, shown in ((of("a"), True), (of("a", "b"), False), (of("a"), True)):
            await gateway.apply_config(Config.model_validate(document({"api": pool(upstream.url)}, keys=keys)))
            assert (REPORTED in await body_of_answer(gateway, A)) is shown


async def test_open_mode_forwards_cached_counts_of_an_api() -> None:
    """Without tenants nothing is masked."""
    async with Upstream([reply(WHOLE)]) as upstream, running({"api": pool(upstream.url)}) as gateway:
        assert await body_of_answer(gateway, "") == WHOLE
