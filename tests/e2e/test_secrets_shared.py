"""Gateways that share a Redis: no prompt, key or password in commands, messages or logs."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from gateway.app import Gateway
from gateway.parts.replicas.part import ReplicasPart
from tests.support.builders import calling, last
from tests.support.canaries import (
    ANSWER,
    CACHE,
    CALLER,
    CANARIES,
    HEADERS,
    PRICE,
    PROMPT,
    REDIS,
    await_redis_keys,
    canary_config,
    canary_request,
    key,
    leaks_in,
    monitored_redis,
)
from tests.support.forked import forked
from tests.support.gateways import document, pool, running
from tests.support.simulated import engine_pool, engines, eventually
from tests.support.upstream import Upstream, reply

WHOLE = json.dumps({"choices": [{"message": {"content": ANSWER}, "finish_reason": "stop"}]}).encode()
LONG = [{"role": "user", "content": f"{PROMPT} " * 2_000}]  # replicas exchange its block hashes


async def status(gateway: Gateway, **more: Any) -> int:
    async with calling(gateway.url) as caller:
        return (await caller.whole(canary_request(HEADERS, **more)))[0]


def indexed_blocks(gateway: Gateway, endpoint: str) -> int:
    """Blocks in the gateway's prefix index of the endpoint."""
    gateway.monitor.loads()
    return gateway.monitor.fleet.view.statistics(endpoint, monotonic()).prefix_blocks


def assert_nothing(places: dict[str, str]) -> None:
    assert [each for place, text in places.items() for each in leaks_in(place, text, CANARIES)] == []


async def test_messages_between_replicas_contain_no_prompt(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Long prompts known to both replicas; streams, unstreamed answers, and a request beyond its quota."""
    caplog.set_level("DEBUG")
    async with engines() as fleet, monitored_redis(requests_per_minute=2) as (_, redis):
        pools = {"only": engine_pool(*fleet, price=PRICE)}
        config = canary_config(tmp_path, redis=redis.url)
        async with running(pools, **config) as one, running(pools, **config) as other:
            for gateway in (one, other):
                await await_redis_keys(gateway)
                await eventually(lambda gateway=gateway: gateway.part(ReplicasPart).replicas.count() == 2)
            async with calling(one.url) as caller:
                assert (await caller.ask(canary_request(HEADERS, messages=LONG, stream=True, max_tokens=2)))[0] == 200
                await caller.chunks()
            place = last(one).endpoint.id
            await eventually(lambda: 0 < indexed_blocks(one, place) <= indexed_blocks(other, place))
            assert await status(other, messages=LONG, max_tokens=2) == 200
            assert await status(one, messages=LONG, max_tokens=2) == 429
        commands, contents = await redis.commands(), await redis.contents()
    assert '"PUBLISH"' in commands
    assert re.search(r"\{caller\}:\w{8}:minute", contents)
    assert_nothing(
        {"commands to Redis": commands, "Redis": contents, "log": caplog.text, "output": "".join(capfd.readouterr())}
    )


async def test_redis_errors_are_logged_without_the_password(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An outage during requests with quotas, and a wrong password."""
    caplog.set_level("DEBUG")
    async with Upstream([reply(WHOLE)]) as upstream, monitored_redis() as (server, redis):
        pools = {"only": pool(upstream.url, price=PRICE)}
        async with running(pools, **canary_config(tmp_path, redis=redis.url)) as gateway:
            await await_redis_keys(gateway)
            server.freeze()
            assert [await status(gateway) for _ in range(5)] == [200] * 5
            server.thaw()
            await eventually(lambda: gateway.part(ReplicasPart).client.up)
            assert "unavailable" in caplog.text
        wrong = redis.url.replace(REDIS, f"{REDIS}{CACHE}")
        async with running(pools, **canary_config(tmp_path, redis=wrong, keys=[key("caller", CALLER)])) as gateway:
            await eventually(lambda: "WRONGPASS" in caplog.text or "invalid username-password" in caplog.text)
            assert await status(gateway) == 200
        assert_nothing(
            {"log": caplog.text, "commands to Redis": await redis.commands(), "Redis": await redis.contents()}
        )


async def test_a_key_made_by_firsttoken_keys_is_printed_once_and_stored_nowhere(tmp_path: Path) -> None:
    """Redis holds only the digest; `firsttoken keys` prints no password of Redis."""
    async with monitored_redis() as (_, redis):

        async def keys(*arguments: str, url: str = redis.url) -> tuple[int, str, str]:
            config = document({"only": pool("http://127.0.0.1:9")}, **canary_config(tmp_path, redis=url))
            process = await forked("keys", *arguments, "--config", written(tmp_path, config))
            async with asyncio.timeout(60):
                out, err = await process.communicate()
            return await process.wait(), out.decode(), err.decode()

        code, made, output = await keys("add", "web", "--cache-group", "front")
        assert (code, made[:3]) == (0, "ft-")
        for arguments in (("add", "web"), ("list",), ("revoke", "web"), ("revoke", "web")):
            output += "".join((await keys(*arguments))[1:])
        code, _, refused = await keys("list", url=redis.url.replace(REDIS, f"{REDIS}{CACHE}"))
        assert (code, "redis" in refused) == (2, True)
        places = {
            "Redis": await redis.contents(),
            "commands to Redis": await redis.commands(),
            "output": output + refused,
        }
        assert "HSET" in places["commands to Redis"]
    assert_nothing(places)
    assert [place for place, text in places.items() if made.strip() in text] == []


def written(folder: Path, config: dict[str, Any]) -> str:
    path = folder / "f.yaml"
    path.write_text(json.dumps(config))
    return str(path)
