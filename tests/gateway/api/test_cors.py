"""Answers that pages of other origins may read; `gateway.api.same_origin` is about requests that they may send."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest

from tests.support.builders import CHAT, STREAMED, WHOLE, Caller, calling, conversing, get, post
from tests.support.gateways import pool, running
from tests.support.upstream import RESET, Upstream, reply

pytestmark = pytest.mark.virtual_time

APP, EVIL = "https://app.example.com", "https://evil.example.com"
KEYS = [{"name": "web", "sha256": hashlib.sha256(b"sk-web").hexdigest()}]
KEY = "authorization: Bearer sk-web"
STREAM = {**CHAT, "stream": True}
ASKS = ("access-control-request-method: POST", "access-control-request-headers: authorization,x-stainless-lang")


def listening(*origins: str, **more: Any) -> dict[str, Any]:
    cors = {"cors": {"origins": [*origins]}} if origins else {}
    return {"listen": "127.0.0.1:0", "admin": "127.0.0.1:0", **cors, **more}


def shared(headers: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.startswith(("access-control-", "timing-allow-"))}


READABLE = {
    "access-control-allow-origin": APP,
    "access-control-expose-headers": "*",
    "timing-allow-origin": APP,
}


async def asked(caller: Caller, body: dict[str, Any], *headers: str) -> tuple[int, dict[str, str]]:
    status, found = await caller.ask(post(body, *headers))
    if "content-length" in found:
        await caller.body(found)
    else:
        await caller.chunks()
    return status, found


async def test_answers_streams_and_errors_are_readable_for_a_listed_origin() -> None:
    """Errors too: a page that cannot read them sees a network failure. Never with credentials."""
    origin = f"origin: {APP}"
    scripts = [reply(WHOLE)], [STREAMED], [RESET]
    async with conversing(*scripts, keys=KEYS, server=listening(APP)) as (_, caller, _):
        for body, headers, expected in (
            (CHAT, (KEY, origin), 200),
            (STREAM, (KEY, origin), 200),
            (STREAM, (KEY, origin), 502),
            ({**CHAT, "model": "nope"}, (KEY, origin), 404),
            (CHAT, (origin,), 401),
        ):
            status, found = await asked(caller, body, *headers)
            assert (status, shared(found), found["vary"]) == (expected, READABLE, "origin")
        status, found, _ = await caller.whole(post(b"{", KEY, origin))
        assert (status, shared(found)) == (400, READABLE)


async def test_a_body_that_is_refused_by_its_head_is_readable() -> None:
    async with conversing([reply(WHOLE)], keys=KEYS, server=listening(APP)) as (_, caller, _):
        status, found, _ = await caller.whole(post(b"x" * 100_000, f"origin: {APP}")[:3_000])
    assert (status, shared(found)) == (401, READABLE)


async def test_other_origins_and_callers_without_one_are_served_unread() -> None:
    """A browser keeps the answer from the page. A cache must not give it to another."""
    async with conversing([reply(WHOLE)], keys=KEYS, server=listening(APP)) as (_, caller, _):
        for headers in ((), (f"origin: {EVIL}",), (f"origin: {APP}.evil.example",), ("origin: null",)):
            status, found = await asked(caller, CHAT, KEY, *headers)
            assert (status, shared(found), found["vary"]) == (200, {}, "origin")


async def test_it_is_off_by_default() -> None:
    async with conversing([reply(WHOLE)], keys=KEYS) as (gateway, caller, _):
        status, found = await asked(caller, CHAT, KEY, f"origin: {APP}")
        assert (status, shared(found), "vary" in found) == (200, {}, False)
        status, found, _ = await get(gateway.url, "/v1/models", f"origin: {APP}", *ASKS, method="OPTIONS")
        assert (status, shared(found)) == (405, {})


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        ("/v1/chat/completions", "POST"),
        ("/v1/models", "GET, HEAD"),
        ("/v1/models/a/b", "GET, HEAD"),
        ("/openai/deployments/chat/chat/completions?api-version=1", "POST"),
    ],
)
async def test_a_preflight_needs_no_key(path: str, methods: str) -> None:
    """Browsers send none. Headers of SDKs are allowed as asked for."""
    async with running({"only": pool("http://127.0.0.1:9")}, keys=KEYS, server=listening(APP)) as gateway:
        status, found, body = await get(gateway.url, path, f"origin: {APP}", *ASKS, method="OPTIONS")
    assert (status, body) == (200, b"")
    assert shared(found) == {
        **READABLE,
        "access-control-allow-methods": methods,
        "access-control-allow-headers": "authorization,x-stainless-lang",
        "access-control-max-age": "7200",
    }


@pytest.mark.parametrize(
    ("path", "headers", "expected"),
    [
        ("/v1/chat/completions", (f"origin: {EVIL}", *ASKS), 403),
        ("/v1/chat/completions", ("origin: null", *ASKS), 403),
        ("/v1/chat/completions", ASKS, 403),
        ("/v1/chat/completions", (f"origin: {APP}",), 405),
        ("/nope", (f"origin: {APP}", *ASKS), 404),
    ],
)
async def test_no_other_preflight_is_granted(path: str, headers: tuple[str, ...], expected: int) -> None:
    async with running({"only": pool("http://127.0.0.1:9")}, keys=KEYS, server=listening(APP)) as gateway:
        status, found, _ = await get(gateway.url, path, *headers, method="OPTIONS")
    assert status == expected
    assert "access-control-allow-methods" not in found


async def test_a_preflight_cannot_write_headers() -> None:
    """What is echoed was one header value, so it is one again."""
    async with running({"only": pool("http://127.0.0.1:9")}, keys=KEYS, server=listening(APP)) as gateway:
        sent = "access-control-request-headers: a\tb; \x7f"
        status, found, _ = await get(gateway.url, "/v1/models", f"origin: {APP}", ASKS[0], sent, method="OPTIONS")
    assert status in (200, 400)
    assert "set-cookie" not in found


async def test_every_origin_may_be_listed_where_keys_are_needed() -> None:
    async with conversing([reply(WHOLE)], keys=KEYS, server=listening("*")) as (_, caller, _):
        status, found = await asked(caller, CHAT, KEY, f"origin: {EVIL}")
    assert (status, found["access-control-allow-origin"], "vary" in found) == (200, "*", False)
    assert "access-control-allow-credentials" not in found


# --------------------------------------------------------------------------- without keys


async def test_without_keys_a_listed_origin_passes_and_others_do_not() -> None:
    """`Host` is checked as before: a listed page behind a name that anyone may register is refused."""
    async with Upstream([reply(WHOLE)]) as upstream, running({"only": pool(upstream.url)}, server=listening(APP)) as gw:
        answers = []
        for headers in ((f"origin: {APP}",), (f"origin: {EVIL}",)):
            async with calling(gw.url) as caller:
                answers.append(await asked(caller, CHAT, *headers))
        async with calling(gw.url) as caller:
            rebound = post(CHAT, f"origin: {APP}").replace(b"host: localhost", b"host: evil.example")
            answers.append((await caller.whole(rebound))[:2])
        status, found, body = await get(gw.admin_url, "/fleet", f"origin: {APP}")
    assert [(status, shared(found)) for status, found in answers] == [(200, READABLE), (403, {}), (403, READABLE)]
    assert (status, shared(found), json.loads(body)["error"]["code"]) == (403, {}, "origin_not_allowed")
