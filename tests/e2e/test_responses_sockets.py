"""Responses over WebSocket: what a turn shares with a request over HTTP, and what a socket costs others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from socket import SHUT_RDWR
from typing import Any

import aiohttp
import pytest

from gateway.app import Gateway
from gateway.config.models import Config
from gateway.observe.record import RequestOutcome
from gateway.parts.responses import responses_sockets
from gateway.process import HANDLER_GRACE
from gateway.upstream.answer import STALL
from tests.support.builders import calling, last
from tests.support.dialogues import Json
from tests.support.gateways import pool, running
from tests.support.responses_server import ResponsesServer
from tests.support.simulated import eventually
from tests.support.sockets import SocketCaller
from tests.support.upstream import Upstream, reply

pytestmark = pytest.mark.virtual_time

LISTEN = {"listen": "127.0.0.1:0", "admin": "127.0.0.1:0"}
OVERLOADED = reply(b'{"error":{"message":"busy","code":"overloaded"}}', "503 No", "content-type: application/json")


def key(name: str, **more: Any) -> Json:
    return {"name": name, "sha256": sha256(name.encode()).hexdigest(), **more}


@asynccontextmanager
async def before(**more: Any) -> AsyncIterator[tuple[Gateway, ResponsesServer]]:
    """A gateway in front of a server that speaks Responses."""
    async with ResponsesServer("s") as server, running({"only": pool(server.url, backend="openai")}, **more) as gateway:
        yield gateway, server


@asynccontextmanager
async def socket(gateway: Gateway, caller: str = "ann", **more: Any) -> AsyncIterator[SocketCaller]:
    headers = {"authorization": f"Bearer {caller}"}
    async with (
        aiohttp.ClientSession(gateway.url, headers=headers) as client,
        client.ws_connect("/v1/responses", **more) as opened,
    ):
        yield SocketCaller(opened)


# ------------------------------------------------------------------- the handshake


async def refused(gateway: Gateway, caller: str = "ann") -> int:
    with pytest.raises(aiohttp.WSServerHandshakeError) as refusal:
        async with socket(gateway, caller):
            pass
    return refusal.value.status


async def test_a_wrong_key_is_refused_before_the_socket_is_open() -> None:
    async with before(keys=[key("ann")]) as (gateway, _):
        assert await refused(gateway, "bob") == 401
        async with socket(gateway) as ws:
            assert (await ws.ask(model="chat", input="hi"))["type"] == "response.completed"


async def test_a_caller_may_hold_a_share_of_all_connections_as_sockets() -> None:
    async with before(keys=[key("ann"), key("bob")], server={**LISTEN, "max_connections": 16}) as (gateway, _):
        async with socket(gateway), socket(gateway):
            assert await refused(gateway) == 429
            async with socket(gateway, "bob") as other:
                assert (await other.ask(model="chat", input="hi"))["type"] == "response.completed"
        async with socket(gateway) as again:
            assert (await again.ask(model="chat", input="hi"))["type"] == "response.completed"


# ------------------------------------------------------------------- turns


async def test_a_turn_has_a_record_and_counts_in_the_keys_quota() -> None:
    async with before(keys=[key("ann", requests_per_minute=2)]) as (gateway, _), socket(gateway) as ws:
        for _ in range(2):
            assert (await ws.ask(model="chat", input="hi"))["type"] == "response.completed"
        record = last(gateway)
        third = await ws.ask(model="chat", input="hi")
        assert (record.operation, record.end, record.tenant) == ("responses", RequestOutcome.COMPLETED, "ann")
        assert (third["status"], last(gateway).end) == (429, RequestOutcome.REFUSED)
        assert int(third["headers"]["retry-after"]) > 0


@pytest.mark.parametrize("kind", ["prepares", "no JSON", "no turn"])
async def test_a_turn_that_no_backend_is_asked_for_counts_like_any_other(kind: str) -> None:
    """One that generates nothing, and one that is no request: the third is refused, unread, and each has a Record."""
    async with before(keys=[key("ann", requests_per_minute=2)]) as (gateway, server), socket(gateway) as ws:

        async def ask() -> Json:
            if kind == "prepares":
                return await ws.ask(model="chat", input="hi", generate=False, store=False)
            return await ws.ask_raw("{" if kind == "no JSON" else '{"type": "other"}')

        answers = [await ask() for _ in range(4)]
        served = "response.completed" if kind == "prepares" else 400
        assert [each.get("status", each["type"]) for each in answers] == [served, served, 429, 429]
        assert int(answers[-1]["headers"]["retry-after"]) > 0
        ends = [record.end for record in gateway.recorder.recent]
        assert (len(ends), ends[2:]) == (4, [RequestOutcome.REFUSED] * 2)
        assert {record.tenant for record in gateway.recorder.recent} == {"ann"}
        assert server.asked == []


async def test_a_revoked_key_ends_with_its_next_turn() -> None:
    async with before(keys=[key("ann")]) as (gateway, server), socket(gateway) as ws:
        assert (await ws.ask(model="chat", input="hi"))["type"] == "response.completed"
        left = Config.model_validate({"pools": {}, "routes": {}, "keys": [key("bob")]}).keys
        await gateway.apply_config(gateway.config.model_copy(update={"keys": left}))
        for more in ({}, {"generate": False, "store": False}):
            assert (await ws.ask(model="chat", input="hi", **more))["status"] == 401
        assert (len(server.asked), gateway.part(responses_sockets.ResponsesSockets).turns.size) == (1, 0)


async def test_a_continuation_sends_all_items_of_the_chain() -> None:
    async with before() as (gateway, server), socket(gateway) as ws:
        first = (await ws.ask(model="chat", store=False, input="one"))["response"]
        more: Json = {"model": "chat", "store": False, "previous_response_id": first["id"]}
        second = (await ws.ask(input=[{"role": "user", "content": "two"}], **more))["response"]
        await ws.ask(input="three", **{**more, "previous_response_id": second["id"]})
    sent = server.asked[-1]
    assert "previous_response_id" not in sent
    assert [item.get("role") or item["type"] for item in sent["input"]] == [
        "user", "reasoning", "assistant", "user", "reasoning", "assistant", "user",
    ]  # fmt: skip
    assert [item["content"] for item in sent["input"] if item.get("role") == "user"] == ["one", "two", "three"]


async def test_a_stored_response_is_continued_by_the_backend() -> None:
    async with before() as (gateway, server), socket(gateway) as ws:
        first = (await ws.ask(model="chat", input="one"))["response"]
        await ws.ask(model="chat", input="two", previous_response_id=first["id"])
    assert server.asked[-1]["previous_response_id"] in server.stored
    assert server.asked[-1]["input"] == "two"


async def test_a_turn_that_generates_nothing_prepares_the_next_one() -> None:
    """Codex sends its instructions and tools ahead."""
    async with before() as (gateway, server), socket(gateway) as ws:
        first = await ws.ask(model="chat", store=False, input="one", generate=False)
        assert (first["type"], first["response"]["output"], server.asked) == ("response.completed", [], [])
        await ws.ask(model="chat", store=False, input="two", previous_response_id=first["response"]["id"])
    assert [item["content"] for item in server.asked[0]["input"]] == ["one", "two"]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("", None),
        ("[]", None),
        ("{", None),
        ('{"a":1,"a":2}', None),
        ("{}", "type"),
        ('{"type":"response.steer"}', "type"),
        ('{"type":"response.create"}', "model"),
        ('{"type":"response.create","model":"chat","background":true}', "background"),
    ],
)
async def test_a_bad_message_is_answered_by_an_error_and_the_socket_stays(message: str, param: str | None) -> None:
    async with before() as (gateway, server), socket(gateway) as ws:
        await ws.socket.send_str(message)
        (error,) = await ws.events()
        assert (error["type"], error["status"], error["error"].get("param")) == ("error", 400, param)
        assert (await ws.ask(model="chat", input="hi"))["type"] == "response.completed"
        assert len(server.asked) == 1


UPGRADE = (
    b"GET /v1/responses HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)
MESSAGE = b"\x81\x82\0\0\0\0{}"  # a text frame of two bytes, masked with zeros


async def test_errors_that_nobody_reads_are_bounded() -> None:
    """Each message has a larger reply: the next one waits until the caller has read. All are answered in the end."""
    async with before() as (gateway, _), calling(gateway.url) as caller:
        assert (await caller.ask(UPGRADE))[0] == 101
        caller.writer.transport.pause_reading()  # type: ignore[attr-defined]
        caller.writer.write(MESSAGE * 20_000)
        [connection] = gateway.data_port.server.connections
        await eventually(lambda: connection.writer.paused)  # type: ignore[attr-defined]
        await asyncio.sleep(1)
        assert connection.writer.unsent() < 64 * 1024  # type: ignore[attr-defined]
        caller.writer.transport.resume_reading()  # type: ignore[attr-defined]
        for _ in range(20_000):
            assert await caller.reader.readexactly(2) == b"\x81\x7e"
            await caller.reader.readexactly(int.from_bytes(await caller.reader.readexactly(2), "big"))


async def test_a_caller_that_never_reads_is_disconnected() -> None:
    async with before() as (gateway, _), calling(gateway.url) as caller:
        assert (await caller.ask(UPGRADE))[0] == 101
        caller.writer.transport.pause_reading()  # type: ignore[attr-defined]
        caller.writer.write(MESSAGE * 20_000)
        await eventually(lambda: gateway.part(responses_sockets.ResponsesSockets).held.total() == 1)
        await eventually(lambda: gateway.part(responses_sockets.ResponsesSockets).held.total() == 0, within=STALL + 30)


async def test_a_message_that_is_no_text_or_too_large_closes_the_socket() -> None:
    async with before(defaults={"max_body": "10kB"}) as (gateway, _):
        async with socket(gateway) as ws:
            await ws.socket.send_bytes(b"{}")
            assert (await ws.socket.receive()).data == 1003
        async with socket(gateway) as ws:
            await ws.socket.send_str("x" * 20_000)
            assert (await ws.socket.receive()).data == 1009


async def test_a_chain_larger_than_a_body_is_refused() -> None:
    async with before(defaults={"max_body": "10kB"}) as (gateway, _), socket(gateway) as ws:
        first = (await ws.ask(model="chat", store=False, input="x" * 6000))["response"]
        more = await ws.ask(model="chat", store=False, input="x" * 6000, previous_response_id=first["id"])
    assert (more["status"], more["error"]["code"]) == (413, "request_too_large")


async def test_a_failure_before_the_first_token_has_the_status_of_http() -> None:
    async with (
        Upstream([OVERLOADED]) as upstream,
        running({"only": pool(upstream.url, backend="openai")}) as gateway,
        socket(gateway) as ws,
    ):
        error = await ws.ask(model="chat", input="hi")
    assert (error["type"], error["status"]) == ("error", 503)
    assert error["headers"]["x-request-id"]


async def test_a_stream_that_fails_is_ended_by_the_backends_own_event() -> None:
    async with before() as (gateway, server), socket(gateway) as ws:
        server.failing = True
        error = await ws.ask(model="chat", store=False, input="hi")
        assert (error["type"], error["response"]["error"]["code"]) == ("response.failed", "server_error")


async def test_a_socket_that_nobody_reads_between_turns_stays_open() -> None:
    """A caller runs a tool for minutes: its pongs wait until it reads again."""
    async with before() as (gateway, _), socket(gateway) as ws:
        assert (await ws.ask(model="chat", input="hi"))["type"] == "response.completed"
        await asyncio.sleep(100)
        assert (await ws.ask(model="chat", input="hi"))["type"] == "response.completed"


async def test_an_idle_socket_is_pinged() -> None:
    async with before() as (gateway, _), socket(gateway, autoping=False) as ws:
        assert [(await ws.socket.receive()).type for _ in range(2)] == [aiohttp.WSMsgType.PING] * 2


# ------------------------------------------------------------------- the end of a socket


@pytest.mark.parametrize("politely", [True, False])
async def test_a_caller_that_leaves_ends_its_turn_at_the_engine(politely: bool) -> None:
    async with before() as (gateway, server), socket(gateway) as ws:
        server.gated = True
        await ws.send(model="chat", input="hi")
        await eventually(lambda: len(server.asked) == 1)
        if politely:
            await ws.socket.close()
            assert ws.socket.close_code == 1000  # answered: aiohttp gives up after 10 s, with 1006
        else:
            ws.socket.get_extra_info("socket").shutdown(SHUT_RDWR)
        await eventually(lambda: gateway.recorder.live == 0)
        assert last(gateway).end is RequestOutcome.CLIENT_GONE


async def test_a_shutdown_closes_idle_sockets() -> None:
    async with before() as (gateway, _), socket(gateway) as ws:
        assert (await ws.ask(model="chat", input="hi"))["type"] == "response.completed"
        loop = asyncio.get_running_loop()
        await asyncio.sleep(1)  # the turn is over
        stopping, began = asyncio.create_task(gateway.stop(grace=5.0)), loop.time()
        assert (await ws.socket.receive()).data == 1001
        assert loop.time() - began < HANDLER_GRACE / 2  # after it, handlers are cancelled
        await stopping


async def test_a_drain_waits_for_the_turn_in_progress_which_is_the_sockets_last() -> None:
    async with before() as (gateway, server), socket(gateway) as ws:
        server.gated = True
        await ws.send(model="chat", input="hi")
        await eventually(lambda: len(server.asked) == 1)
        stopping = asyncio.create_task(gateway.stop(grace=60.0, wait=60.0))
        await asyncio.sleep(1)
        assert await refused(gateway) == 503
        server.proceed()
        assert (await ws.events())[-1]["type"] == "response.completed"
        assert (await ws.socket.receive()).data == 1001
        assert await refused(gateway) == 503  # the port is still open
        await stopping


async def test_a_turn_that_outlasts_the_grace_is_ended_by_an_error() -> None:
    async with before() as (gateway, server), socket(gateway) as ws:
        server.gated = True
        await ws.send(model="chat", input="hi")
        await eventually(lambda: len(server.asked) == 1)
        stopping = asyncio.create_task(gateway.stop())
        assert (await ws.events())[-1]["type"] == "error"
        await stopping


async def test_a_socket_is_closed_after_its_lifetime_by_the_specs_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred seconds here, an hour by default."""
    assert responses_sockets.LIFETIME == 3600
    monkeypatch.setattr(responses_sockets, "LIFETIME", 100.0)
    async with before() as (gateway, _), socket(gateway) as ws:
        (error,) = await ws.events()
        assert error["error"]["code"] == "websocket_connection_limit_reached"
        assert (await ws.socket.receive()).data == 1000


async def test_what_a_socket_keeps_is_gone_with_the_socket() -> None:
    async with before() as (gateway, _):
        sockets = gateway.part(responses_sockets.ResponsesSockets)
        async with socket(gateway) as ws:
            await ws.ask(model="chat", store=False, input="one")
            assert (sockets.turns.size > 0, sockets.held.total()) == (True, 1)
            await eventually(lambda: gateway.core.intake.body_bytes == 0)
        await eventually(lambda: sockets.turns.size == 0 and not sockets.held)
