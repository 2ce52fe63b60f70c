"""Two fleets side by side on one Redis, with every feature that keeps anything there: nothing is shared."""

from __future__ import annotations

import asyncio
import json
import shlex
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from hashlib import sha256
from typing import Any

import pytest

from gateway.admission.local_quotas import SteadyWall, month
from gateway.app import Gateway
from gateway.cluster.redis_names import redis_name
from gateway.parts.replicas.part import ReplicasPart
from tests.support.builders import CHAT, WHOLE, calling, get, post
from tests.support.gateways import pool, running
from tests.support.redis import RedisMonitor, RedisServer, redis_server
from tests.support.simulated import eventually
from tests.support.upstream import Upstream, reply

ADMIN = "an admin key for tests"
SEEN = 60.0  # s, on a busy machine
PRICE = {"input": 1e6, "output": 1e6}  # a USD per token
KEYLESS = {"TIME", "INFO", "HELLO", "CLIENT", "SCRIPT", "PING", "ECHO", "SELECT", "MONITOR", "COMMAND", "UNSUBSCRIBE"}
ENDED = WHOLE.replace(b'"content":"hi"}', b'"content":"hi"},"finish_reason":"stop"')  # to be kept
COLD = {**CHAT, "temperature": 0, "max_tokens": 1}


@asynccontextmanager
async def fleet(url: str, namespace: str, engine: str) -> AsyncIterator[Gateway]:
    """With a key `team` of the file, whose secret is the fleet's own, and a cache of answers on the route `kept`."""
    limits = {"requests_per_minute": 99, "tokens_per_minute": 10**6, "concurrent_requests": 9, "monthly_cost_usd": 40}
    team = {"name": "team", "sha256": sha256(f"sk-{namespace}".encode()).hexdigest(), **limits}
    async with running(
        {"only": pool(engine, price=PRICE)},
        {"chat": {"tiers": ["only"]}, "kept": {"tiers": ["only"], "cache": {"ttl": "10m"}}},
        server={"listen": "127.0.0.1:0", "admin": "127.0.0.1:0", "admin_key": ADMIN},
        state={"redis": url, "namespace": namespace, "keys": "redis", "answers": "redis"},
        keys=[team],
    ) as gateway:
        await eventually(lambda: gateway.part(ReplicasPart).client.up, SEEN)  # type: ignore[union-attr]
        gateway.part(ReplicasPart).client.timeout = SEEN
        yield gateway


async def asked(gateway: Gateway, key: str, body: Any = COLD) -> tuple[int, dict[str, str], Any]:
    async with calling(gateway.url) as caller:
        status, headers, raw = await caller.whole(post(body, f"authorization: Bearer {key}"))
    return status, headers, json.loads(raw)


async def admin(gateway: Gateway, method: str, path: str, body: Any = None) -> Any:
    raw = b"" if body is None else json.dumps(body).encode()
    head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {ADMIN}\r\n"
    async with calling(gateway.admin_url) as caller:
        _, _, reply = await caller.whole(head.encode() + f"content-length: {len(raw)}\r\n\r\n".encode() + raw)
    return json.loads(reply)


async def answer_kept(gateway: Gateway, server: RedisServer, namespace: str, key: str) -> None:
    """Asks until Redis has an answer of this fleet: keys and connections come within a second or two."""
    async with server.client() as client, asyncio.timeout(SEEN):
        while not await client.keys(f"{namespace}:{{answers}}*"):
            await asked(gateway, key, {**COLD, "model": "kept"})
            await asyncio.sleep(0.05)


def names_used(commands: str) -> dict[str, set[str]]:
    """Every key and channel, by the address of the connection; those within scripts by `lua`."""
    found = defaultdict[str, set[str]](set)
    for line in commands.splitlines():
        head, _, rest = line.partition("] ")
        words = shlex.split(rest.replace("\\x", "x"))
        if not words or words[0].upper() in KEYLESS:
            continue
        name = words[0].upper()
        keys = words[3 : 3 + int(words[2])] if name in ("EVAL", "EVALSHA") else words[1:2]
        found[head.rpartition(" ")[2]] |= {*keys}
    return found


@pytest.mark.parametrize("namespaces", [("production", "staging"), ("firsttoken", "firsttoken-staging")])
async def test_two_fleets_on_one_redis_share_no_key_no_budget_and_no_count(namespaces: tuple[str, str]) -> None:
    """By every name that any command of the whole run has used, to the stop: each begins with a namespace, and no
    connection uses two."""
    async with redis_server() as server, RedisMonitor(server.url) as monitor, Upstream([reply(ENDED)]) as engine:
        async with AsyncExitStack() as stack:
            fleets = [await stack.enter_async_context(fleet(server.url, name, engine.url)) for name in namespaces]
            production, staging = fleets
            made = await admin(staging, "POST", "/keys", {"name": "dev", "monthly_cost_usd": 40})
            await eventually(lambda: any(t.name == "dev" for t in staging.runtime.current.keys.tenants), SEEN)
            await admin(staging, "PATCH", "/keys/dev", {"weight": 2})

            spent = [await asked(staging, key) for key in (f"sk-{namespaces[1]}", made["key"]) for _ in range(12)]
            assert {status for status, _, _ in spent} == {200, 429}
            assert (await asked(production, made["key"]))[0] == 401
            status, headers, _ = await asked(production, f"sk-{namespaces[0]}")
            assert (status, headers["x-ratelimit-remaining-requests"]) == (200, "98")
            same = [await admin(each, "POST", "/keys", {"name": "both"}) for each in fleets]
            assert [each["name"] for each in same] == ["both", "both"]
            for each, name, key in zip(fleets, namespaces, same, strict=True):
                await answer_kept(each, server, name, key["key"])
                assert (each.part(ReplicasPart).quotas.members, each.part(ReplicasPart).replicas.count()) == (1, 1), (
                    name
                )
            await admin(staging, "DELETE", "/keys/both")
            listed = [[key["name"] for key in (await admin(each, "GET", "/keys"))["keys"]] for each in fleets]
            assert listed == [["team", "both"], ["team", "dev"]]

            page = (await get(production.admin_url, "/metrics"))[2].decode()
            assert "firsttoken_replicas 1.0" in page
        found = names_used(await monitor.commands())
        async with server.client() as client:
            left = await client.keys("*")
    used = set[str]().union(*found.values()) | {*left}
    belongs = {name: [space for space in namespaces if name.startswith(f"{space}:")] for name in used}
    assert {name for name, spaces in belongs.items() if len(spaces) != 1} == set()
    shared = [names for place, names in found.items() if place != "lua" and len({belongs[n][0] for n in names}) > 1]
    assert shared == []
    kinds = {name.removeprefix(f"{belongs[name][0]}:") for name in used}
    expected = ("keys", "members", "probe", "learned", "replicas:1", "{team}:", "{dev}:", "{answers}:")
    assert [kind for kind in expected if not any(name.startswith(kind) for name in kinds)] == []


async def test_the_costs_before_0_2_0_go_to_the_key_that_asks_first_of_the_default_fleet_alone() -> None:
    """Once: a key that is made again under the name has used nothing. Another fleet leaves them alone."""
    before = redis_name("firsttoken", "spent", slot="team")
    async with redis_server() as server, Upstream([reply(WHOLE)]) as engine, server.client() as client:
        async with fleet(server.url, "staging", engine.url) as staging:
            await client.hset(before, str(month(SteadyWall()())), 39 * 10**9)
            assert (await asked(staging, "sk-staging"))[0] == 200
            assert await client.exists(before) == 1
        async with fleet(server.url, "firsttoken", engine.url) as default:
            status, _, body = await asked(default, "sk-firsttoken")
            assert (status, body["error"]["code"]) == (429, "insufficient_quota")
            assert await client.exists(before) == 0
            keys = default.config.model_copy(
                update={"keys": (default.config.keys[0].model_copy(update={"sha256": sha256(b"anew").hexdigest()}),)}
            )
            await default.apply_config(keys)
            assert [(await asked(default, key))[0] for key in ("anew", "sk-firsttoken")] == [200, 401]
