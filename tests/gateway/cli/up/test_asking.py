"""Servers are asked over real sockets: sound ones, dead ones, and ones that mean harm."""

from __future__ import annotations

import asyncio
from time import monotonic

import pytest
from aiohttp import web

from gateway.cli.up.asking import LOCAL_TIME, ask, first_tokens
from gateway.cli.up.known_servers import KnownServer, Reach
from tests.support.local_servers import answering, http_server, models, ollama
from tests.support.simulated import engines

pytestmark = pytest.mark.virtual_time


def local(port: int) -> KnownServer:
    return KnownServer("", "", f"http://127.0.0.1:{port}")


async def reach(*routes: web.RouteDef) -> Reach:
    async with http_server(*routes) as port:
        (found,) = await ask([local(port)])
    return found.reach


async def test_a_server_says_who_it_is_and_what_it_has() -> None:
    """And which model is in its memory."""
    async with http_server(*ollama("llama3.2", "qwen3", loaded="qwen3")) as port, engines(model="m") as (engine,):
        first, second = await ask([local(port), local(engine.port)])
        assert (first.kind, first.models, first.loaded, first.reach) == (
            "ollama",
            ["llama3.2", "qwen3"],
            "qwen3",
            Reach.OK,
        )
        assert (second.kind, second.models) == ("vllm", ["m"])
        timed = await first_tokens([(first, ["qwen3"]), (second, ["m"])])
    assert all(ttft is not None for found in timed for ttft in found.ttfts.values())


async def test_a_port_without_a_listener_is_left_out() -> None:
    async with http_server() as port:
        pass
    assert await ask([local(port)]) == []


async def hang(http: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


async def endless(http: web.Request) -> web.StreamResponse:
    """A list of models without an end."""
    response = web.StreamResponse()
    await response.prepare(http)
    await response.write(b'{"data": [')
    while True:
        await response.write(b'{"id": "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"},' * 10_000)


async def garbage(http: web.Request) -> web.StreamResponse:
    return web.Response(body=b"\xff\x00<html>")


async def elsewhere(http: web.Request) -> web.StreamResponse:
    return web.Response(status=302, headers={"location": "/v2/models"})


async def nested(http: web.Request) -> web.StreamResponse:
    return web.Response(body=b"[" * 1_000_000)


async def test_a_path_that_hangs_hides_no_list_of_models() -> None:
    """The other questions are hints."""
    assert await reach(answering("/v1/models", models("m")), web.get("/api/ps", hang)) is Reach.OK


@pytest.mark.parametrize(
    ("route", "expected"),
    [
        (web.get("/v1/models", garbage), Reach.GARBAGE),
        (web.get("/v1/models", endless), Reach.GARBAGE),
        (web.get("/v1/models", nested), Reach.GARBAGE),
        (web.get("/v1/models", elsewhere), Reach.GARBAGE),
        (web.get("/else", garbage), Reach.GARBAGE),
        (web.get("/v1/models", hang), Reach.SILENT),
        (answering("/v1/models", models()), Reach.EMPTY),
        (answering("/v1/models", models("chat", owner="firsttoken")), Reach.GATEWAY),
    ],
)
async def test_a_server_of_no_use_is_shown_as_such(route: web.RouteDef, expected: Reach) -> None:
    """Within its time; another gateway is left out, because two that serve each other send requests in a circle."""
    started = monotonic()
    assert await reach(route, answering("/v2/models", models("m"))) is expected
    assert monotonic() - started < LOCAL_TIME + 1.0


async def test_a_server_that_speaks_no_http_is_shown() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-OpenSSH_9.6\r\n")
        await reader.read(1)
        writer.close()

    async with await asyncio.start_server(talk, "127.0.0.1", 0) as server:
        (found,) = await ask([local(server.sockets[0].getsockname()[1])])
    assert found.reach is Reach.GARBAGE


async def test_a_token_that_never_comes_is_no_time() -> None:
    """An error is none either."""
    async with http_server(*ollama("m")[:3], web.post("/v1/chat/completions", garbage)) as port:
        (found,) = await ask([local(port)])
        (timed,) = await first_tokens([(found, ["m"])])
    assert timed.ttfts == {"m": None}


@pytest.mark.parametrize(
    ("status", "expected"), [(401, Reach.REFUSED), (403, Reach.REFUSED), (404, Reach.UNLISTED), (500, Reach.UNLISTED)]
)
async def test_an_api_that_refuses_is_kept_and_shown(status: int, expected: Reach) -> None:
    """Its text, which may repeat the key, goes nowhere."""

    async def refuse(http: web.Request) -> web.StreamResponse:
        return web.Response(status=status, text=http.headers["authorization"])

    async with http_server(web.get("/v1/models", refuse)) as port:
        api = KnownServer("openai", "openai", f"http://127.0.0.1:{port}/v1", "sk-secret", "KEY")
        (found,) = await ask([api])
    assert (found.reach, found.is_usable, "sk-secret" in repr(found)) == (expected, True, False)
