"""A revoked key stays revoked: after the loss of a store, a failover, a restore, and behind a key of the file."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from gateway.app import Gateway
from gateway.config.models import Config, Key
from tests.support.builders import CHAT, WHOLE, calling, get, post
from tests.support.gateways import pool, running
from tests.support.redis import redis_server
from tests.support.served import serving, write_config
from tests.support.simulated import eventually
from tests.support.upstream import Upstream, reply

ADMIN = "an admin key for tests"
SEEN = 60.0  # s, on a busy machine
SERVER = {"listen": "127.0.0.1:0", "admin": "127.0.0.1:0", "admin_key": ADMIN}


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.admission.keyring.CHECK_INTERVAL", 0.05)


@dataclass
class Store:
    """`lose`: everything. `saved`, then `restore`: what a backup, or a replica that lags, has."""

    state: Mapping[str, Any]
    lose: Callable[[], Awaitable[object]]
    saved: Callable[[], Awaitable[Any]]
    restore: Callable[[Any], Awaitable[object]]


@asynccontextmanager
async def store_of(kind: str, home: Path) -> AsyncIterator[Store]:
    async with redis_server(start=kind == "redis") as server, server.client() as client:
        if kind == "redis":

            async def saved() -> Any:
                return await client.hgetall("firsttoken:keys")

            async def restore(found: Any) -> None:
                async with client.pipeline(transaction=True) as together:
                    together.delete("firsttoken:keys")
                    together.hset("firsttoken:keys", mapping=found)
                    await together.execute()

            state = {"redis": server.url, "keys": "redis"}
            yield Store(state, client.flushall, saved, restore)
        else:
            file = home / "keys.json"

            async def lose() -> None:
                file.unlink()

            async def read() -> Any:
                return file.read_bytes()

            async def write(raw: bytes) -> None:
                (home / "old").write_bytes(raw)
                (home / "old").rename(file)

            yield Store({"dir": str(home), "keys": "dir"}, lose, read, write)


@pytest.fixture(params=["dir", "redis"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    async with store_of(request.param, tmp_path) as made:
        yield made


@asynccontextmanager
async def gateway_on(store: Store, url: str = "http://127.0.0.1:9", **more: Any) -> AsyncIterator[Gateway]:
    async with running({"only": pool(url)}, state=store.state, server=SERVER, **more) as gateway:
        yield gateway


async def admin(url: str, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    raw = b"" if body is None else json.dumps(body).encode()
    head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {ADMIN}\r\n"
    async with calling(url) as caller:
        status, _, reply = await caller.whole(head.encode() + f"content-length: {len(raw)}\r\n\r\n".encode() + raw)
    return status, json.loads(reply)


async def listed(gateway: Gateway) -> list[tuple[str, str, bool]]:
    _, found = await admin(gateway.admin_url, "GET", "/keys")
    return [(key["name"], key["source"], key["valid"]) for key in found["keys"]]


async def made(gateway: Gateway, name: str, **settings: Any) -> str:
    """The secret, once the gateway knows it."""
    status, found = await admin(gateway.admin_url, "POST", "/keys", {"name": name, **settings})
    assert status == 201
    await becomes(gateway, found["key"], 200)
    return str(found["key"])


async def status_of(gateway: Gateway, secret: str) -> int:
    return (await get(gateway.url, "/v1/models", f"authorization: Bearer {secret}"))[0]


async def becomes(gateway: Gateway, secret: str, status: int) -> None:
    digest = sha256(secret.encode()).digest()

    def is_so() -> bool:
        return (digest in {tenant.digest for tenant in gateway.runtime.current.keys.tenants}) == (status == 200)

    await eventually(is_so, SEEN)
    assert await status_of(gateway, secret) == status


async def reload(gateway: Gateway, *keys: str) -> None:
    """With keys of the file: `name=secret`."""
    pairs = [text.split("=") for text in keys]
    found = tuple(Key(name=name, sha256=sha256(secret.encode()).hexdigest()) for name, secret in pairs)
    await gateway.apply_config(gateway.config.model_copy(update={"keys": found}))


async def test_a_key_made_after_a_loss_is_known_and_a_lost_one_is_not(store: Store) -> None:
    """The count of changes is the same as before the loss; the store has another birth."""
    async with gateway_on(store) as gateway:
        lost = await made(gateway, "dev")
        await store.lose()
        assert await status_of(gateway, lost) == 200
        new = await made(gateway, "new")
        await becomes(gateway, lost, 401)
        assert (await status_of(gateway, new), await listed(gateway)) == (200, [("new", "store", True)])


async def test_a_lost_key_can_be_revoked_and_the_others_go_on(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """At once, before any gateway has noticed the loss, and after. They are listed as lost."""
    async with gateway_on(store) as gateway:
        secrets = {name: await made(gateway, name) for name in ("a", "b", "c")}
        await store.lose()
        assert (await admin(gateway.admin_url, "DELETE", "/keys/a")) == (200, {"revoked": "a"})
        await becomes(gateway, secrets["a"], 401)
        assert (await admin(gateway.admin_url, "DELETE", "/keys/b"))[0] == 200
        await becomes(gateway, secrets["b"], 401)
        assert (await status_of(gateway, secrets["c"]), await listed(gateway)) == (200, [("c", "lost", True)])
        status, body = await admin(gateway.admin_url, "DELETE", "/keys/cc")
        assert (status, body["error"]["message"]) == (404, "There is no key 'cc'; did you mean 'c'?")


async def test_a_store_that_goes_back_revives_no_key_that_was_seen_revoked(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says so; the key is listed as refused, also by a gateway that starts afterwards."""
    async with gateway_on(store) as gateway:
        secret, other = await made(gateway, "b"), await made(gateway, "other")
        before = await store.saved()
        await admin(gateway.admin_url, "DELETE", "/keys/b")
        await becomes(gateway, secret, 401)
        await store.restore(before)
        await eventually(lambda: "older than those known here" in caplog.text, SEEN)
        assert "still refused: b" in caplog.text
        assert [await status_of(gateway, each) for each in (secret, other)] == [401, 200]
        await eventually_listed(gateway, [("b", "store", False), ("other", "store", True)])
        status, body = await admin(gateway.admin_url, "PATCH", "/keys/b", {"weight": 2})
        assert (status, body["error"]["code"]) == (409, "revoked")
    async with gateway_on(store) as gateway:
        await becomes(gateway, other, 200)
        assert await status_of(gateway, secret) == 401
        assert (await admin(gateway.admin_url, "DELETE", "/keys/b"))[0] == 200
        await made(gateway, "b")
        assert await status_of(gateway, secret) == 401


async def eventually_listed(gateway: Gateway, expected: list[tuple[str, str, bool]]) -> None:
    async with asyncio.timeout(SEEN):
        while await listed(gateway) != expected:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_a_stored_key_behind_a_key_of_the_file_never_opens_the_door_again(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    """The file's key of its name replaced it: it is listed, named in the log, and can be revoked."""
    async with gateway_on(store) as gateway:
        leaked, other = await made(gateway, "dev"), await made(gateway, "other")
        await reload(gateway, "dev=sk-of-file")
        await eventually(lambda: "the stored key 'dev' is refused for good" in caplog.text, SEEN)
        assert [await status_of(gateway, each) for each in (leaked, "sk-of-file", other)] == [401, 200, 200]
        hidden = [("dev", "file", True), ("dev", "store", False), ("other", "store", True)]
        await eventually_listed(gateway, hidden)
        await reload(gateway)
        assert [await status_of(gateway, each) for each in (leaked, "sk-of-file", other)] == [401, 401, 200]
    async with gateway_on(store) as gateway:
        await becomes(gateway, other, 200)
        assert await status_of(gateway, leaked) == 401
        await reload(gateway, "dev=sk-of-file")
        assert (await admin(gateway.admin_url, "DELETE", "/keys/dev"))[0] == 200
        assert await listed(gateway) == [("dev", "file", True), ("other", "store", True)]
        assert (await admin(gateway.admin_url, "DELETE", "/keys/dev"))[1]["error"]["code"] == "in_file"


async def test_a_stored_key_that_moves_into_the_file_stays_valid(store: Store) -> None:
    """Its digest is the same: it is the same key."""
    async with gateway_on(store) as gateway:
        secret = await made(gateway, "dev")
        await reload(gateway, f"dev={secret}")
        assert await listed(gateway) == [("dev", "file", True), ("dev", "store", True)]
        await admin(gateway.admin_url, "DELETE", "/keys/dev")
        assert await listed(gateway) == [("dev", "file", True)]
        assert await status_of(gateway, secret) == 200


@pytest.mark.parametrize("place", ["store", "file"])
async def test_a_key_that_is_made_again_has_used_nothing(place: str, store: Store) -> None:
    """Its name is the old one's; the limits of a key that only changes keep what was used."""
    async with Upstream([reply(WHOLE)]) as engine, gateway_on(store, engine.url) as gateway:

        async def asked(secret: str) -> int:
            async with calling(gateway.url) as caller:
                return (await caller.whole(post(CHAT, f"authorization: Bearer {secret}")))[0]

        old = await made(gateway, "b", requests_per_minute=1)
        assert [await asked(old), await asked(old)] == [200, 429]
        await admin(gateway.admin_url, "PATCH", "/keys/b", {"weight": 2})
        await eventually(lambda: gateway.runtime.current.keys.tenants[0].weight == 2, SEEN)
        assert await asked(old) == 429
        if place == "file":
            limited = Config.model_validate(
                {"pools": {}, "routes": {}, "keys": [{"name": "b", "sha256": "0" * 64, "requests_per_minute": 1}]}
            ).keys[0]
            limited = limited.model_copy(update={"sha256": sha256(b"sk-new").hexdigest()})
            await gateway.apply_config(gateway.config.model_copy(update={"keys": (limited,)}))
            new = "sk-new"
        else:
            await admin(gateway.admin_url, "DELETE", "/keys/b")
            await becomes(gateway, old, 401)
            new = await made(gateway, "b", requests_per_minute=1)
        assert [await asked(new), await asked(new)] == [200, 429]


async def test_a_lost_key_is_revoked_at_the_admin_process_of_several_workers(tmp_path: Path) -> None:
    """Real processes: the workers know the key, the process that answers does not."""
    config = write_config(tmp_path / "f.yaml", "http://127.0.0.1:9")
    text = config.read_text().replace("admin: 127.0.0.1:0", f"admin: 127.0.0.1:0, admin_key: {ADMIN}")
    config.write_text(f"{text}state: {{dir: {tmp_path / 'state'}, keys: dir}}\n")
    async with serving(config, "--workers", "2") as served:

        async def statuses(secret: str) -> set[int]:
            """Of connections that reach both workers, but once in 30,000 times."""
            return {(await get(served.url, "/v1/models", f"authorization: Bearer {secret}"))[0] for _ in range(16)}

        async def settles(secret: str, status: int) -> None:
            async with asyncio.timeout(SEEN):
                while await statuses(secret) != {status}:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)

        _, found = await admin(served.admin, "POST", "/keys", {"name": "dev"})
        await settles(found["key"], 200)
        (tmp_path / "state" / "keys.json").unlink()
        assert (await admin(served.admin, "DELETE", "/keys/dev"))[0] == 200
        await settles(found["key"], 401)
