"""Peers that flood a connection, hold it for nothing, or use it while the picker stops."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from h2.errors import ErrorCodes
from h2.settings import SettingCodes
from hyperframe.frame import SettingsFrame, WindowUpdateFrame

from backends.http2.flood import LIMITS, Flood
from backends.http2.frame_reader import FRAMES
from backends.http2.frames import MAX_FRAME, MAX_STREAM
from backends.http2.outbound import Outbound
from backends.http2.stream import Stream
from gateway.downstream.intake import Intake
from gateway.picker import grpc_port, grpc_server
from gateway.picker.grpc_port import GrpcServer
from gateway.picker.grpc_server import CHECK, DEAD_AFTER, IDLE, MESSAGES, Call, Handler
from tests.gateway.picker.test_grpc_server import echo
from tests.support.grpc_client import GrpcClient, framed, grpc_client
from tests.support.simulated import eventually

pytestmark = pytest.mark.virtual_time


@asynccontextmanager
async def listening(handler: Handler = echo, intake: Intake | None = None) -> AsyncIterator[tuple[GrpcServer, str]]:
    server = GrpcServer(handler, intake or Intake())
    listener = await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0)
    try:
        yield server, f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    finally:
        listener.close()
        await server.shutdown(0.1)


async def is_answered(client: GrpcClient) -> bool:
    call = client.begin()
    await client.send(call, framed(b"x"))
    return await client.message(call) == b"x"


# -- floods -----------------------------------------------------------------------------------


async def test_a_frame_that_promises_megabytes_is_refused_by_its_head() -> None:
    """None of the 16 MB that it may promise are kept."""
    async with listening() as (_, url), grpc_client(url) as client:
        client.writer.write((MAX_FRAME + 1).to_bytes(3, "big") + b"\x00\x00\x00\x00\x00\x01")
        await eventually(lambda: client.gone)


async def test_a_flood_of_settings_ends_the_connection() -> None:
    """Each changes the windows of all calls."""
    async with listening() as (_, url), grpc_client(url) as client:
        for size in range(LIMITS[Flood.SETTINGS] + 20):  # the limit leaks away, by one in 0.1 s
            client.writer.write(SettingsFrame(0, {4: size}).serialize())
        await eventually(lambda: client.gone)


async def test_a_flood_of_window_updates_looks_at_waiting_answers_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once for each frame: with a thousand calls, 64 KB of frames would take minutes."""
    looked = list[int]()
    real = Outbound.pump

    def counted(self: Outbound) -> list[Stream]:
        looked.append(1)
        return real(self)

    monkeypatch.setattr(Outbound, "pump", counted)
    async with listening() as (_, url), grpc_client(url) as client:
        assert await is_answered(client)
        looked.clear()
        client.writer.write(WindowUpdateFrame(0, 1).serialize() * 3_000)
        assert await is_answered(client)
        assert len(looked) < 2 * 3_000 / FRAMES


async def test_calls_begun_before_the_settings_are_read_are_served() -> None:
    """A peer that connects with hundreds of requests at hand."""
    async with listening() as (_, url), grpc_client(url) as client:
        calls = [client.begin() for _ in range(300)]
        for call in calls:
            await client.send(call, framed(b"x"))
        assert [await client.message(call) for call in calls] == [b"x"] * 300


async def test_messages_without_number_let_others_be_served() -> None:
    """A window holds 200,000 empty messages."""
    turn, handled, loop = 0, Counter[int](), asyncio.get_running_loop()

    def count_turn() -> None:
        nonlocal turn
        turn += 1
        loop.call_soon(count_turn)

    async def handler(call: Call) -> None:
        async for _ in call:
            handled[turn] += 1

    async with listening(handler) as (_, url), grpc_client(url) as client:
        call = client.begin()
        loop.call_soon(count_turn)
        await client.send(call, framed(b"") * 10_000, end=True)
        assert await client.status(call) == "0"
    assert (handled.total(), max(handled.values())) == (10_000, MESSAGES)


async def test_an_answer_goes_on_when_settings_widen_the_window() -> None:
    """The peer need not send WINDOW_UPDATE."""
    async with listening() as (_, url), grpc_client(url, reads=False) as client:
        client.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 10})
        call = client.begin()
        await client.send(call, framed(b"x" * 100))
        await asyncio.sleep(1.0)
        assert len(client._received[call]) == 10
        client.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 1_000})
        client.flush()
        assert await client.message(call) == b"x" * 100


async def test_peers_that_end_calls_by_resets_are_no_flood(monkeypatch: pytest.MonkeyPatch) -> None:
    """Envoy does, after the end of an answer."""
    monkeypatch.setitem(LIMITS, Flood.RESETS, 5)

    async def once(call: Call) -> None:
        async for message in call:
            call.send(message)
            return

    async with listening(once) as (_, url), grpc_client(url) as client:
        for _ in range(20):
            call = client.begin()
            await client.send(call, framed(b"x"))
            assert await client.status(call) == "0"
            client.h2.reset_stream(call, ErrorCodes.NO_ERROR)
            client.flush()
        assert await is_answered(client)


# -- bounds of all connections --------------------------------------------------------------------


async def test_connections_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_server, "MAX_CONNECTIONS", 1)
    intake = Intake()
    async with listening(intake=intake) as (_, url), grpc_client(url) as client:
        assert await is_answered(client)
        async with grpc_client(url) as other:
            await eventually(lambda: other.gone)
        assert intake.refused.of[("connections",)].value == 1
        assert await is_answered(client)
        client.close()
        await asyncio.sleep(0.1)
        async with grpc_client(url) as other:
            assert await is_answered(other)


async def test_calls_of_all_connections_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_port, "MAX_ALL_CALLS", 2)
    async with listening() as (_, url), grpc_client(url) as client, grpc_client(url) as other:
        held = [client.begin(), client.begin()]
        await client.send(held[1], framed(b"x"))
        await client.message(held[1])
        assert await other.status(other.begin()) == "14"
        client.h2.end_stream(held[0])
        client.flush()
        assert await client.status(held[0]) == "0"
        assert await is_answered(other)


# -- silence --------------------------------------------------------------------------------------


async def test_a_connection_without_calls_is_closed_in_the_end() -> None:
    """After GOAWAY, which its peer has read: no call is lost."""
    async with listening() as (_, url), grpc_client(url) as client:
        assert await is_answered(client)  # a call in progress keeps it
        await asyncio.sleep(2 * CHECK * IDLE)
        assert not client.going_away
        client.h2.end_stream(1)
        client.flush()
        await asyncio.sleep(CHECK * (IDLE - 2))
        assert not client.gone
        await eventually(lambda: client.gone, within=5 * CHECK)
        assert client.going_away[0] == MAX_STREAM


async def test_a_peer_that_is_not_there_any_more_is_let_go() -> None:
    """It answers no PING: its machine is gone, and its calls with it."""
    over = asyncio.Event()

    async def handler(call: Call) -> None:
        try:
            await echo(call)
        finally:
            over.set()

    async with listening(handler) as (_, url), grpc_client(url) as client:
        assert await is_answered(client)
        await asyncio.sleep(2 * CHECK * DEAD_AFTER)
        assert not over.is_set()  # it answers
        client.writer.transport.pause_reading()
        await asyncio.wait_for(over.wait(), 2 * CHECK * DEAD_AFTER)


async def test_a_peer_that_never_says_what_it_wants_is_let_go() -> None:
    async with listening() as (_, url):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        async with asyncio.timeout(2 * CHECK * DEAD_AFTER):
            while await reader.read(1 << 16):
                pass
        writer.close()


# -- the end --------------------------------------------------------------------------------------


async def test_a_port_that_drains_serves_the_calls_it_has_and_those_on_their_way() -> None:
    """GOAWAY first, the end of the connection behind its last call."""
    async with listening() as (server, url), grpc_client(url) as client:
        held = client.begin()
        await client.send(held, framed(b"1"))
        assert await client.message(held) == b"1"
        server.drain()
        assert await is_answered(client)  # sent before GOAWAY was read
        assert client.going_away == [MAX_STREAM]
        await client.send(held, framed(b"2"), end=True)
        assert (await client.message(held), await client.status(held)) == (b"2", "0")
        assert not client.gone
        client.h2.end_stream(3)
        client.flush()
        await eventually(lambda: client.gone)


async def test_a_connection_without_calls_ends_when_its_peer_knows() -> None:
    async with listening() as (server, url), grpc_client(url) as client:
        await eventually(lambda: client.h2.remote_settings.max_concurrent_streams == grpc_server.MAX_CALLS)
        server.drain()
        await eventually(lambda: client.gone)
        assert client.going_away[0] == MAX_STREAM
