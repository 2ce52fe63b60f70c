"""API keys in Redis: changes by `firsttoken keys` reach a running gateway, and data lost by Redis revokes no key."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.admission.keyring import Keyring
from gateway.admission.redis_keys import RedisKeys
from gateway.cli.main import main
from gateway.cluster.redis_client import RedisClient
from gateway.cluster.redis_names import redis_name
from gateway.config.field_types import parse_redis_url
from gateway.config.models import Key
from gateway.parts.replicas.part import ReplicasPart
from tests.support.builders import calling
from tests.support.gateways import pool, running
from tests.support.redis import RedisServer, redis_server
from tests.support.simulated import eventually

NAMESPACE = "firsttoken"
HASH = redis_name(NAMESPACE, "keys")
SEEN = 60.0  # s, on a busy machine; the gateway looks each second


def stored_by(link: RedisClient) -> RedisKeys:
    return RedisKeys(link.call, link.url, link.timeout, NAMESPACE)


@asynccontextmanager
async def watching(server: RedisServer) -> AsyncIterator[tuple[RedisClient, list[list[str]]]]:
    """A keyring; the list receives the names of the keys at each change."""
    changes: list[list[str]] = []
    link = RedisClient(server.url, SEEN)

    async def on_change(keys: Sequence[Key]) -> None:
        changes.append([key.name for key in keys])

    ring = Keyring(stored_by(link), on_change)
    link.start()
    ring.start()
    await eventually(lambda: link.up)
    try:
        yield link, changes
    finally:
        await ring.close()
        await link.close()


def models(header: str = "") -> bytes:
    return f"GET /v1/models HTTP/1.1\r\nhost: h\r\n{header}\r\n".encode()


def key(name: str, **more: Any) -> Key:
    return Key(name=name, sha256=hashlib.sha256(name.encode()).hexdigest(), **more)


async def test_added_and_revoked_keys_are_noticed() -> None:
    async with redis_server() as server, watching(server) as (link, changes):
        assert await stored_by(link).add(key("a"))
        assert not await stored_by(link).add(key("a"))
        await eventually(lambda: changes == [["a"]], SEEN)
        await stored_by(link).add(key("b", routes=("chat",)))
        await eventually(lambda: changes[-1] == ["a", "b"], SEEN)
        assert await stored_by(link).revoke("a")
        assert not await stored_by(link).revoke("a")
        await eventually(lambda: changes[-1] == ["b"], SEEN)


async def test_keys_lost_by_redis_are_not_revoked(caplog: pytest.LogCaptureFixture) -> None:
    """Redis came back empty: the last known keys hold, and one log line says so."""
    async with redis_server() as server, watching(server) as (link, changes):
        await stored_by(link).add(key("a"))
        await eventually(lambda: changes, SEEN)
        server.kill()
        await server.start()
        await eventually(lambda: "has lost the keys" in caplog.text, SEEN)
        assert changes == [["a"]]


async def test_an_invalid_key_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """For example a key of another version. Other keys hold; the digest is not logged."""
    async with redis_server() as server, watching(server) as (link, changes):
        await link.call(lambda redis: redis.hset(HASH, "odd", json.dumps({"name": "odd", "sha256": "CANARY"})))
        await stored_by(link).add(key("a"))
        await eventually(lambda: changes == [["a"]], SEEN)
    assert "'odd'" in caplog.text
    assert "CANARY" not in caplog.text


async def test_a_gateway_admits_keys_in_redis_and_in_the_file_only() -> None:
    """With no key in Redis yet, requests are refused. Keys of the file precede keys in Redis of the same name."""
    written = [{"name": "web", "sha256": hashlib.sha256(b"sk-web").hexdigest()}]
    async with redis_server() as server:
        state = {"redis": server.url, "keys": "redis"}
        pools = {"only": pool("http://127.0.0.1:9")}
        async with running(pools, state=state) as gateway, calling(gateway.url) as caller:

            async def status(text: str) -> int:
                return (await caller.whole(models(f"authorization: Bearer {text}\r\n")))[0]

            assert (await caller.whole(models()))[0] == 401
            await eventually(lambda: gateway.part(ReplicasPart).client.up)  # type: ignore[union-attr]
            gateway.part(ReplicasPart).client.timeout = SEEN
            await stored_by(gateway.part(ReplicasPart).client).add(key("lab", requests_per_minute=1))
            await eventually(lambda: gateway.runtime.current.keys.tenants, SEEN)
            assert (await status("lab"), await status("sk-web")) == (200, 401)
            assert gateway.runtime.current.keys.tenants[0].limits is not None
            await gateway.apply_config(gateway.config)  # a reload keeps the keys
            assert (await status("lab"), await status("sk-web")) == (200, 401)
            server.kill()
            await eventually(lambda: not gateway.part(ReplicasPart).client.up)  # type: ignore[union-attr]
            assert await status("lab") == 200
        await server.start()
        async with running(pools, state=state, keys=written) as gateway, calling(gateway.url) as caller:
            assert await status("sk-web") == 200
            await eventually(lambda: gateway.part(ReplicasPart).client.up)  # type: ignore[union-attr]
            gateway.part(ReplicasPart).client.timeout = SEEN
            imposter = Key(name="web", sha256=hashlib.sha256(b"imposter").hexdigest())
            await stored_by(gateway.part(ReplicasPart).client).add(imposter)
            await stored_by(gateway.part(ReplicasPart).client).add(key("lab"))
            await eventually(lambda: len(gateway.runtime.current.keys.tenants) == 2, SEEN)
            assert [await status(text) for text in ("sk-web", "lab", "imposter")] == [200, 200, 401]


async def test_keys_of_a_version_before_0_2_0_are_those_of_the_default_namespace(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its hash has changes and no birth; the first change gives it one, and revokes no other key."""
    async with redis_server() as server, server.client() as client:
        text = {name: key(name).model_dump_json(exclude_defaults=True) for name in ("a", "b")}
        await client.hset("firsttoken:keys", mapping={**text, " changes": "2"})
        async with watching(server) as (link, changes):
            await eventually(lambda: changes == [["a", "b"]], SEEN)
            assert await stored_by(link).revoke("a")
            await eventually(lambda: changes[-1] == ["b"], SEEN)
            other = RedisKeys(link.call, link.url, SEEN, "staging")
            assert (await other.version(), (await other.read()).keys) == (None, [])
        assert {*await client.hkeys("firsttoken:keys")} >= {"b", " birth", " changes"}
    assert "older than those known here" not in caplog.text


async def test_revocations_are_dropped_after_their_time_unless_the_key_is_stored() -> None:
    """By the next revocation; their number is bounded, the oldest go first."""
    async with redis_server() as server, watching(server) as (link, _), server.client() as client:
        store = stored_by(link)
        for name in ("kept", "gone", "made"):
            await store.add(key(name))
        await store.refuse([key("kept")])
        await store.revoke("gone")
        for field, raw in (await client.hgetall(HASH)).items():
            if field.startswith(" revoked "):
                await client.hset(HASH, field, json.dumps({**json.loads(raw), "until": 1.0}))
        await store.revoke("made")
        assert {each.name for each in (await store.read()).revoked} == {"kept", "made"}


# --------------------------------------------------------------------------- the command


@pytest.fixture
async def server() -> AsyncIterator[RedisServer]:
    async with redis_server() as made:
        yield made


def config(path: Path, redis: str, more: str = "") -> str:
    path.write_text(
        "pools: {only: {backend: compatible, model: m, endpoints: ['http://a']}}\nroutes: {chat: {tiers: [only]}}\n"
        f"state: {{redis: '{redis}', keys: redis}}\n{more}"
    )
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["keys", *arguments])
    message = capsys.readouterr()
    return code, message.out, message.err


async def test_a_key_is_printed_once_and_only_its_digest_is_stored(
    server: RedisServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = config(tmp_path / "f.yaml", server.url, f"keys: [{{name: own, sha256: '{'0' * 64}'}}]\n")

    async def run_keys(*arguments: str) -> tuple[int, str, str]:
        return await asyncio.to_thread(run, capsys, *arguments)

    limits = ("--routes", "chat", "--requests-per-minute", "60", "--monthly-cost-usd", "2.5")
    code, out, err = await run_keys("add", "web", *limits, "--config", file)
    text = out.strip()
    assert (code, len(text) > 40, text in err) == (0, True, False)
    async with server.client() as client:
        kept = json.loads((await client.hgetall(HASH))["web"])
        assert kept == {
            "name": "web",
            "sha256": hashlib.sha256(text.encode()).hexdigest(),
            "routes": ["chat"],
            "requests_per_minute": 60,
            "monthly_cost_usd": 2.5,
        }
        everything = " ".join([str(await client.hgetall(name)) for name in await client.keys("*")])
        assert text not in everything
    code, out, _ = await run_keys("list", "--config", file)
    assert code == 0
    assert out.splitlines()[1].split() == ["web", "chat", "60", "-", "-", "2.5", "-", "1.0"]
    assert kept["sha256"] not in out
    code, _, err = await run_keys("add", "web", "--config", file)
    assert (code, err) == (2, "there is a key 'web' already; revoke it first\n")
    code, _, err = await run_keys("revoke", "wbe", "--config", file)
    assert (code, err) == (2, "there is no key 'wbe'; did you mean 'web'?\n")
    code, _, err = await run_keys("revoke", "own", "--config", file)
    assert (code, err) == (2, "the key 'own' is in the configuration file: delete it there\n")
    async with server.client() as client:
        await client.hset(HASH, "own", Key(name="own", sha256="1" * 64).model_dump_json())
    _, out, err = await run_keys("list", "--config", file)
    assert ("own" in out, err.startswith("firsttoken: the stored key 'own' is refused")) == (True, True)
    assert (await run_keys("revoke", "own", "--config", file))[:2] == (0, "revoked own\n")
    assert (await run_keys("revoke", "web", "--config", file))[:2] == (0, "revoked web\n")
    assert len((await run_keys("list", "--config", file))[1].splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["add", "x", "--routes", "caht"], "--routes: no route 'caht'; did you mean 'chat'?"),
        (["add", "two words"], "--name: Value error, a name is sent in a header: visible ASCII without spaces only"),
        (["add", "x", "--requests-per-minute", "0"], "--requests-per-minute: Input should be greater than 0"),
        (["add", "own"], "there is a key 'own' in the configuration file; take another name"),
        (["list"], "redis redis://127.0.0.1:1: "),
    ],
)
def test_an_invalid_command_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = f"keys: [{{name: own, sha256: '{'0' * 64}'}}]\n"
    file = config(tmp_path / "f.yaml", "redis://:CANARY@127.0.0.1:1", own)
    code, out, err = run(capsys, *arguments, "--config", file)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(message)
    assert "CANARY" not in err


async def test_a_change_between_the_look_at_a_key_and_its_replacement_is_kept(server: RedisServer) -> None:
    """The comparison and the write are one step in Redis."""
    async with server.client() as client:

        async def ask(question: Callable[[Any], Any], timeout: float) -> Any:
            if looked_up.is_set():
                await client.hset(HASH, "a", key("a", weight=9).model_dump_json(exclude_defaults=True))
            looked_up.set()
            return await question(client)

        looked_up = asyncio.Event()
        store = RedisKeys(ask, parse_redis_url(server.url), 5.0, NAMESPACE)
        await client.hset(HASH, "a", key("a").model_dump_json(exclude_defaults=True))
        assert not await store.replace(key("a"), key("a", weight=2))
        assert json.loads(str(await client.hget(HASH, "a")))["weight"] == 9
