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

from backends.http2.frame_walk import FRAMES, LIMITS, MAX_FRAME, MAX_STREAM, PREFACE, Flood
from backends.http2.server import Event, Http2Server
from gateway.downstream.limits import Intake
from gateway.parts.picker import grpc_port, grpc_server
from gateway.parts.picker.connection_table import ConnectionTable
from gateway.parts.picker.grpc_port import GrpcServer
from gateway.parts.picker.grpc_server import CHECK, DEAD_AFTER, IDLE, MESSAGES, Call, Handler
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
    real = Http2Server._pump

    def counted(self: Http2Server) -> list[Event]:
        looked.append(1)
        return real(self)

    monkeypatch.setattr(Http2Server, "_pump", counted)
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
    monkeypatch.setattr(grpc_port, "MAX_CONNECTIONS", 2)  # one of an address
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


class Peer(asyncio.Protocol):
    """Sends some bytes, and reads whatever comes."""

    def __init__(self, sent: bytes) -> None:
        self.sent = sent
        self.is_gone = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self.transport = transport
        transport.write(self.sent)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_gone = True


async def peers(url: str, count: int, *sent: bytes, host: str = "127.0.0.1") -> list[Peer]:
    """Connections of one address. `sent`: in turn."""
    loop, port, found = asyncio.get_running_loop(), int(url.rpartition(":")[2]), []
    for number in range(count):
        peer = Peer(sent[number % len(sent)])
        await loop.create_connection(lambda peer=peer: peer, "127.0.0.1", port, local_addr=(host, 0))  # type: ignore[misc]
        found.append(peer)
    return found


async def test_connections_that_say_nothing_keep_no_data_plane_out() -> None:
    """1,000 of one peer, with no byte or with a part of the preface: the next one of the same peer is answered, and so
    is one that was there before; the silent ones are let go within a few seconds."""
    async with listening() as (_, url), grpc_client(url) as before:
        assert await is_answered(before)
        silent = await peers(url, grpc_port.MAX_CONNECTIONS, b"", b"PRI")
        async with grpc_client(url) as client:
            assert await is_answered(client)
            await asyncio.sleep(3 * CHECK)
            assert all(peer.is_gone for peer in silent)
            assert await is_answered(client)
        assert await is_answered(before)


async def test_a_preface_that_comes_byte_by_byte_is_not_waited_for() -> None:
    async with listening() as (_, url):
        (peer,) = await peers(url, 1, b"")
        for byte in PREFACE[:8]:
            peer.transport.write(bytes([byte]))
            await asyncio.sleep(CHECK / 2)
        assert peer.is_gone


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.3"])
async def test_one_address_has_half_of_the_connections(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that have sent the preface stay; beyond the half of their address none is added."""
    monkeypatch.setattr(grpc_port, "MAX_CONNECTIONS", 20)
    async with listening() as (_, url):
        held = await peers(url, 20, PREFACE + SettingsFrame(0).serialize(), host="127.0.0.1")
        await eventually(lambda: sum(not peer.is_gone for peer in held) == 10)
        (new,) = await peers(url, 1, PREFACE + SettingsFrame(0).serialize(), host=host)
        await asyncio.sleep(CHECK)
        assert new.is_gone is (host == "127.0.0.1")
        for peer in (*held, new):
            peer.transport.abort()


@pytest.mark.parametrize(
    ("peer", "same"), [("2001:db8::1", "2001:db8::2:3"), ("::ffff:10.0.0.1", "10.0.0.1"), ("fe80::1%lo", "fe80::2")]
)
def test_addresses_of_one_host_share_its_room(peer: str, same: str) -> None:
    table: ConnectionTable[int] = ConnectionTable(4, close=lambda connection: None)
    for connection, address in enumerate((peer, same)):
        assert table.admit(connection, address)
        table.begin(connection)
    assert not table.admit(3, peer)
    assert table.admit(4, "2001:db8:0:1::1")


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
