"""`/keys` of the admin port: what an operator makes there holds at the data port of every gateway, until revoked."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.admin.key_paths import KeyPaths
from gateway.admission.new_keys import SETTINGS
from gateway.app import Gateway
from gateway.config.models import Config, Key
from tests.support.builders import calling, get
from tests.support.gateways import pool, running
from tests.support.redis import redis_server
from tests.support.served import ROOT, serving, write_config
from tests.support.simulated import eventually

ADMIN = "an admin key for tests"
APPLIED = 60.0  # s, on a busy machine; the gateway looks each second
FILE_KEY = {"name": "of-file", "sha256": "0" * 64}


@asynccontextmanager
async def keyed(state: dict[str, Any], **more: Any) -> AsyncIterator[Gateway]:
    server = {"listen": "127.0.0.1:0", "admin": "127.0.0.1:0", "admin_key": ADMIN}
    async with running({"only": pool("http://127.0.0.1:9")}, state=state, **{"server": server, **more}) as gateway:
        yield gateway


async def sent(gateway: Gateway, method: str, path: str, body: Any = None, key: str = ADMIN) -> tuple[int, Any]:
    return await sent_to(gateway.admin_url, method, path, body, key)


async def sent_to(url: str, method: str, path: str, body: Any = None, key: str = ADMIN) -> tuple[int, Any]:
    """Status and document. `key` empty: none is sent."""
    raw = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1", "host: localhost", f"content-length: {len(raw)}"]
    lines += [f"authorization: Bearer {key}"] if key else []
    async with calling(url) as caller:
        status, _, reply = await caller.whole("\r\n".join(lines).encode() + b"\r\n\r\n" + raw)
    return status, json.loads(reply)


async def admitted(gateway: Gateway, key: str) -> bool:
    return (await get(gateway.url, "/v1/models", f"authorization: Bearer {key}"))[0] == 200


def known(gateway: Gateway, *names: str) -> bool:
    return [tenant.name for tenant in gateway.runtime.current.keys.tenants] == [*names]


@pytest.mark.parametrize("kind", ["dir", "redis"])
async def test_a_key_made_at_one_gateway_holds_at_all_until_it_is_revoked(kind: str, tmp_path: Path) -> None:
    """Two replicas with one store. The key itself is in no file and not in Redis; the reply alone has it."""
    async with redis_server(start=kind == "redis") as server:
        state = {"dir": str(tmp_path), "keys": "dir"} if kind == "dir" else {"redis": server.url, "keys": "redis"}
        async with keyed(state) as one, keyed(state) as two:
            status, made = await sent(one, "POST", "/keys", {"name": "web", "requests_per_minute": 9})
            assert (status, made["name"], made["requests_per_minute"], "sha256" in made) == (201, "web", 9, False)
            for gateway in (one, two):
                await eventually(lambda gateway=gateway: known(gateway, "web"), APPLIED)
                assert await admitted(gateway, made["key"])
            listed = await sent(two, "GET", "/keys")
            del made["key"]
            assert listed == (200, {"keys": [made]})
            assert await sent(two, "DELETE", "/keys/web") == (200, {"revoked": "web"})
            for gateway in (one, two):
                await eventually(lambda gateway=gateway: known(gateway), APPLIED)


async def test_the_key_is_kept_nowhere_but_as_a_digest(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each change has a line in the log with the settings and the address, without the key or the digest."""
    caplog.set_level(logging.INFO, "firsttoken")
    async with keyed({"dir": str(tmp_path), "keys": "dir"}) as gateway:
        _, made = await sent(gateway, "POST", "/keys", {"name": "web", "monthly_cost_usd": 2.5})
        stored = json.loads((tmp_path / "keys.json").read_text())["keys"]["web"]
        digest = json.loads(stored)["sha256"]
        text = made.pop("key")
        assert text not in stored
        assert await sent(gateway, "PATCH", "/keys/web", {"monthly_cost_usd": 5, "routes": ["chat"]}) == (
            200,
            {
                **{name: value for name, value in made.items() if name != "key"},
                "monthly_cost_usd": 5,
                "routes": ["chat"],
            },
        )
        await sent(gateway, "DELETE", "/keys/web")
        pages = [(await get(gateway.admin_url, path))[2].decode() for path in ("/config", "/metrics", "/fleet")]
    lines = [record.getMessage() for record in caplog.records if "admin port" in record.getMessage()]
    assert lines == [
        "admin port: key 'web' made from 127.0.0.1: {\"monthly_cost_usd\":2.5}",
        'admin port: key \'web\' changed from 127.0.0.1: {"routes":["chat"],"monthly_cost_usd":5.0}',
        'admin port: key \'web\' revoked from 127.0.0.1: {"routes":["chat"],"monthly_cost_usd":5.0}',
    ]
    for secret in (text, digest, ADMIN):
        assert secret not in caplog.text + "".join(pages)


async def test_a_changed_limit_holds_and_null_removes_one(tmp_path: Path) -> None:
    """The key stays as it is: callers notice the limit alone."""
    async with keyed({"dir": str(tmp_path), "keys": "dir"}) as gateway:
        _, made = await sent(gateway, "POST", "/keys", {"name": "web", "requests_per_minute": 9, "cache_group": "g"})

        def limit() -> Any:
            tenants = gateway.runtime.current.keys.tenants
            return tenants and tenants[0].limits and tenants[0].limits.requests

        await eventually(lambda: limit() == 9, APPLIED)
        await sent(gateway, "PATCH", "/keys/web", {"requests_per_minute": 3})
        await eventually(lambda: limit() == 3, APPLIED)
        assert await admitted(gateway, made["key"])
        _, changed = await sent(gateway, "PATCH", "/keys/web", {"requests_per_minute": None})
        await eventually(lambda: limit() is None, APPLIED)
        assert (changed["requests_per_minute"], changed["cache_group"]) == (None, "g")


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "message"),
    [
        ("POST", "/keys", {}, 400, "name: Field required"),
        ("POST", "/keys", b"{", 400, "The body is no JSON"),
        ("POST", "/keys", [1], 400, "The body must be a JSON object: the settings of a key."),
        ("POST", "/keys", {"name": "two words"}, 400, "name: Value error, a name is sent in a header: visible ASCII"),
        ("POST", "/keys", {"name": "a", "rpm": 5}, 400, "There is no setting 'rpm'; known: name, routes, requests_per"),
        ("POST", "/keys", {"name": "a", "sha256": "0" * 64}, 400, "There is no setting 'sha256'"),
        ("POST", "/keys", {"name": "a", "routes": ["caht"]}, 400, "routes: no route 'caht'; did you mean 'chat'?"),
        ("POST", "/keys", {"name": "a", "concurrent_requests": 0}, 400, "concurrent_requests: Input should be greater"),
        ("POST", "/keys", {"name": "a", "weight": 1e-17}, 400, "weight: Input should be greater than or equal to 0.0"),
        (
            "POST",
            "/keys",
            {"name": "a", "tokens_per_minute": True},
            400,
            "tokens_per_minute: Value error, write a numb",
        ),
        (
            "POST",
            "/keys",
            {"name": "a", "monthly_cost_usd": True},
            400,
            "monthly_cost_usd: Value error, write a numbe",
        ),
        (
            "POST",
            "/keys",
            {"name": "a", "weight": False},
            400,
            "weight: Value error, write a number, not true",
        ),
        ("POST", "/keys", {"name": "a" * 65}, 400, "name: a name has 1 to 64 letters, digits and . _ : @ + -"),
        ("POST", "/keys", {"name": "-"}, 400, "name: a name has 1 to 64 letters"),
        ("POST", "/keys", {"name": "../x"}, 400, "name: a name has 1 to 64 letters"),
        ("POST", "/keys", {"name": "a/b"}, 400, "name: a name has 1 to 64 letters"),
        ("PATCH", "/keys/web", {"requests_per_minute": True}, 400, "requests_per_minute: Value error, write a number"),
        ("POST", "/keys", {"name": "of-file"}, 409, "There is a key 'of-file' already."),
        ("POST", "/keys", {"name": "web"}, 409, "There is a key 'web' already."),
        ("POST", "/keys", b"x" * 70_000, 413, "The body is larger than"),
        ("PATCH", "/keys/web", {"name": "b"}, 400, "There is no setting 'name'"),
        ("PATCH", "/keys/web", {"weight": -1}, 400, "weight: Input should be greater than or equal to 0.001"),
        ("PATCH", "/keys/wbe", {"weight": 1}, 404, "There is no key 'wbe'; did you mean 'web'?"),
        ("PATCH", "/keys/of-file", {"weight": 1}, 409, "The key 'of-file' is in the configuration file: change it"),
        ("DELETE", "/keys/of-file", None, 409, "The key 'of-file' is in the configuration file: change it there."),
        ("DELETE", "/keys/nobody", None, 404, "There is no key 'nobody'."),
    ],
)
async def test_a_mistake_is_named_and_changes_nothing(
    method: str, path: str, body: Any, status: int, message: str, tmp_path: Path
) -> None:
    async with keyed({"dir": str(tmp_path), "keys": "dir"}, keys=[FILE_KEY]) as gateway:
        assert (await sent(gateway, "POST", "/keys", {"name": "web"}))[0] == 201
        before = await sent(gateway, "GET", "/keys")
        found, reply = await sent(gateway, method, path, body)
        assert (found, reply["error"]["message"][: len(message)]) == (status, message)
        assert "?." not in reply["error"]["message"]
        assert await sent(gateway, "GET", "/keys") == before


@pytest.mark.parametrize(("method", "path"), [("GET", "/keys"), ("POST", "/keys"), ("DELETE", "/keys/web")])
async def test_without_the_admin_key_nothing_is_done_or_told(method: str, path: str, tmp_path: Path) -> None:
    """A key of a caller opens nothing here; names that exist and those that do not get one answer."""
    async with keyed({"dir": str(tmp_path), "keys": "dir"}) as gateway:
        _, made = await sent(gateway, "POST", "/keys", {"name": "web"})
        replies = [await sent(gateway, method, path, {"name": "x"}, key) for key in ("", "wrong", made["key"])]
        assert [status for status, _ in replies] == [401] * 3
        assert replies[0] == replies[1] == replies[2]
        assert [each["name"] for each in (await sent(gateway, "GET", "/keys"))[1]["keys"]] == ["web"]


async def test_without_a_configured_admin_key_no_key_is_managed_here(tmp_path: Path) -> None:
    server = {"listen": "127.0.0.1:0", "admin": "127.0.0.1:0"}
    async with keyed({"dir": str(tmp_path), "keys": "dir"}, server=server) as gateway:
        status, reply = await sent(gateway, "POST", "/keys", {"name": "web"})
        assert (status, reply["error"]["code"]) == (404, "not_configured")
        assert not (tmp_path / "keys.json").exists()


async def test_a_store_that_is_gone_is_a_503_without_its_password(caplog: pytest.LogCaptureFixture) -> None:
    """Callers with known keys are served on; the log names the reason."""
    async with keyed({"redis": "redis://:CANARY@127.0.0.1:1/0", "keys": "redis"}) as gateway:
        status, reply = await sent(gateway, "POST", "/keys", {"name": "web"})
    assert (status, reply["error"]["message"]) == (
        503,
        "The store of keys cannot be asked now; the log has the reason.",
    )
    assert "redis://127.0.0.1:1" in caplog.text
    assert "CANARY" not in caplog.text + str(reply)


async def test_workers_share_stored_keys_and_the_admin_process_makes_them(tmp_path: Path) -> None:
    """Real processes: a key made at the admin port holds at both workers, and is refused by both when revoked."""
    config = write_config(tmp_path / "f.yaml", "http://127.0.0.1:9")
    more = f"state: {{dir: {tmp_path / 'state'}, keys: dir}}\n"
    text = config.read_text().replace("admin: 127.0.0.1:0", f"admin: 127.0.0.1:0, admin_key: {ADMIN}")
    config.write_text(text + more)
    async with serving(config, "--workers", "2") as served:

        async def statuses(key: str) -> set[int]:
            """Of connections that reach both workers, but once in 30,000 times."""
            header = f"authorization: Bearer {key}"
            return {(await get(served.url, "/v1/models", header))[0] for _ in range(16)}

        async def becomes(key: str, status: int) -> None:
            async with asyncio.timeout(30):
                while await statuses(key) != {status}:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)

        _, made = await sent_to(served.admin, "POST", "/keys", {"name": "web"})
        await becomes(made["key"], 200)
        assert (await sent_to(served.admin, "DELETE", "/keys/web"))[0] == 200
        await becomes(made["key"], 401)


async def nothing_known() -> Sequence[Key]:
    return ()


def test_the_openapi_document_has_these_paths_and_the_settings_of_a_key() -> None:
    """docs/openapi-admin.json is written by hand."""
    document = json.loads((ROOT / "docs" / "openapi-admin.json").read_text("utf-8"))
    methods = {(path, method) for path, each in document["paths"].items() for method in each if method != "parameters"}
    routes = KeyPaths(lambda: Config(), nothing_known).routes()
    keys = {(route.path.replace(":.+", ""), route.method.lower()) for route in routes}
    assert methods == keys
    schemas = document["components"]["schemas"]
    assert [*schemas["Settings"]["properties"]] == [*SETTINGS]
    assert [*schemas["NewKey"]["properties"]] == ["name", *SETTINGS]
    assert [*schemas["Key"]["properties"]] == ["name", "source", "valid", *SETTINGS]
