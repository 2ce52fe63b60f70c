"""Calls over HTTP/2: messages in both directions, and peers that break the rules."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import ref

import pytest
from h2.errors import ErrorCodes
from h2.settings import SettingCodes

from backends.http2.frame_walk import LIMITS, Flood
from gateway.downstream.limits import Intake
from gateway.parts.picker.grpc_port import GrpcServer
from gateway.parts.picker.grpc_server import WINDOW, Call, GrpcError, Handler
from gateway.process import loop_factory
from tests.support.grpc_client import framed, grpc_client
from tests.support.simulated import eventually

pytestmark = pytest.mark.virtual_time


async def echo(call: Call) -> None:
    call.max_message = 4 * WINDOW
    async for message in call:
        call.send(message)


@asynccontextmanager
async def serving(handler: Handler = echo, intake: Intake | None = None) -> AsyncIterator[str]:
    server = GrpcServer(handler, intake or Intake())
    listener = await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    finally:
        listener.close()
        await server.shutdown(0.1)


@pytest.mark.real_time
def test_the_event_loop_of_a_process_serves_calls() -> None:
    """Of production, uvloop: its transports are of other classes than asyncio's."""

    async def one() -> bytes:
        async with asyncio.timeout(60), serving() as url, grpc_client(url) as client:
            call = client.begin()
            await client.send(call, framed(b"x"), end=True)
            return await client.message(call)

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        assert runner.run(one()) == b"x"


@pytest.mark.parametrize("size", [0, 1, 70_000, 3 * WINDOW])
async def test_a_message_comes_back_whole(size: int) -> None:
    """Longer than any window too."""
    async with serving() as url, grpc_client(url) as client:
        call = client.begin()
        sending = asyncio.create_task(client.send(call, framed(b"x" * size), end=True))
        assert await client.message(call) == b"x" * size
        await sending
        assert await client.status(call) == "0"


async def test_messages_are_whole_at_any_split() -> None:
    async with serving() as url, grpc_client(url) as client:
        call = client.begin()
        for byte in framed(b"abc") + framed(b"") + framed(b"de"):
            await client.send(call, bytes([byte]))
        assert [await client.message(call) for _ in range(3)] == [b"abc", b"", b"de"]


async def test_calls_of_a_connection_do_not_wait_for_each_other() -> None:
    async with serving() as url, grpc_client(url) as client:
        calls = [client.begin() for _ in range(100)]
        for call in reversed(calls):
            await client.send(call, framed(str(call).encode()))
        assert [await client.message(call) for call in calls] == [str(call).encode() for call in calls]


async def test_a_call_that_is_given_up_is_cancelled() -> None:
    cancelled = asyncio.Event()

    async def handler(call: Call) -> None:
        try:
            async for _ in call:
                call.send(b"begun")
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async with serving(handler) as url, grpc_client(url) as client:
        call = client.begin()
        await client.send(call, framed(b"x"))
        assert await client.message(call) == b"begun"
        client.h2.reset_stream(call, ErrorCodes.CANCEL)
        client.flush()
        await asyncio.wait_for(cancelled.wait(), 5)


async def test_a_call_that_is_given_up_leaves_no_cycle() -> None:
    """Its messages would be kept until the collector looks at old objects: hundreds of large bodies."""
    held: list[ref[Call]] = []

    async def handler(call: Call) -> None:
        held.append(ref(call))
        async with asyncio.timeout(100) as limit:
            async for _ in call:
                limit.reschedule(None)

    async with serving(handler) as url, grpc_client(url) as client:
        call = client.begin()
        await eventually(lambda: held)
        gc.disable()
        try:
            client.h2.reset_stream(call, ErrorCodes.CANCEL)
            client.flush()
            await eventually(lambda: held[0]() is None)
        finally:
            gc.enable()


@pytest.mark.parametrize(
    ("sent", "status"),
    [(b"\x01\x00\x00\x00\x00", "12"), (b"\x00\xff\xff\xff\xff", "8")],
    ids=["compressed", "endless"],
)
async def test_a_message_that_is_not_taken_ends_the_call_alone(sent: bytes, status: str) -> None:
    async with serving() as url, grpc_client(url) as client:
        refused, other = client.begin(), client.begin()
        await client.send(refused, sent)
        assert await client.status(refused) == status
        await client.send(other, framed(b"x"))
        assert await client.message(other) == b"x"


async def test_an_error_of_the_call_is_its_status(caplog: pytest.LogCaptureFixture) -> None:
    """A bug of ours is logged, and tells nothing of itself."""

    async def handler(call: Call) -> None:
        async for message in call:
            if message == b"known":
                raise GrpcError(3, "as the test wants it")
            raise RuntimeError("secret")

    async with serving(handler) as url, grpc_client(url) as client:
        known, unknown = client.begin(), client.begin()
        await client.send(known, framed(b"known"))
        await client.send(unknown, framed(b"unknown"))
        assert (await client.status(known), await client.status(unknown)) == ("3", "13")
        assert client.trailers[known]["grpc-message"] == "as the test wants it"
        assert "secret" not in str(client.trailers[unknown])
    assert "secret" in caplog.text


async def test_a_status_message_may_be_any_text() -> None:
    """It is percent-encoded, as gRPC wants it: a message may quote the peer."""

    async def handler(call: Call) -> None:
        raise GrpcError(3, "100% of \r\n \u20ac")

    async with serving(handler) as url, grpc_client(url) as client:
        call = client.begin()
        assert await client.status(call) == "3"
        assert client.trailers[call]["grpc-message"] == "100%25 of %0D%0A %E2%82%AC"


async def test_a_peer_that_reads_nothing_fills_no_memory() -> None:
    """Its own messages stay unread once the answers do."""
    held: list[Call] = []

    async def handler(call: Call) -> None:
        held.append(call)
        await echo(call)

    async with serving(handler) as url, grpc_client(url, reads=False) as client:
        call = client.begin()
        sending = asyncio.create_task(client.send(call, framed(b"x" * 50_000) * 400))
        await asyncio.sleep(20.0)
        assert not sending.done()
        connection = held[0]._connection
        assert connection.unsent(call) < 4 * WINDOW
        sending.cancel()


async def test_a_peer_with_an_endless_window_that_reads_nothing_fills_no_memory() -> None:
    """It sends without reading what it may: flow control of HTTP/2 holds nothing back, the connection itself does."""
    held: list[Call] = []

    async def handler(call: Call) -> None:
        held.append(call)
        await echo(call)

    async with serving(handler) as url, grpc_client(url) as client:
        client.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: (1 << 31) - 1})
        client.h2.increment_flow_control_window((1 << 31) - 65_536)
        call = client.begin()
        await eventually(lambda: held)
        client.writer.transport.pause_reading()
        frame = b"\x00\x40\x00\x00\x00" + call.to_bytes(4, "big") + framed(b"x" * (0x4000 - 5))
        for _ in range(2_000):
            client.writer.write(frame)
            await asyncio.sleep(0)
        await asyncio.sleep(1.0)
        transport = held[0]._connection._transport
        assert transport is not None
        assert transport.get_write_buffer_size() < 2 * WINDOW


async def test_messages_that_wait_for_the_call_hold_one_window() -> None:
    """However small they are, and while others of the call are read."""
    intake, most = Intake(), list[int]()

    async def handler(call: Call) -> None:
        async for _ in call:
            most.append(intake.body_bytes)

    async with serving(handler, intake) as url, grpc_client(url) as client:
        call = client.begin()
        await client.send(call, framed(b"") * (4 * WINDOW // 5), end=True)
        assert await client.status(call) == "0"
    assert max(most) <= WINDOW


async def test_messages_that_wait_for_the_call_hold_one_window_while_answers_are_read() -> None:
    """The peer lets out an answer byte by byte."""
    intake, busy = Intake(), asyncio.Event()

    async def handler(call: Call) -> None:
        async for message in call:
            call.send(message)
            await busy.wait()

    async with serving(handler, intake) as url, grpc_client(url, reads=False) as client:
        client.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 0})
        call = client.begin()
        sending = asyncio.create_task(client.send(call, framed(b"x" * 100) * (4 * WINDOW // 105)))
        for _ in range(50):
            await asyncio.sleep(0.1)
            client.h2.increment_flow_control_window(1, call)
            client.flush()
        assert 0 < intake.body_bytes <= WINDOW
        sending.cancel()


async def test_large_messages_of_a_call_let_others_be_served_between_them() -> None:
    """A message may take 5 ms to be read."""
    turns, taken = 0, list[int]()

    def turn() -> None:
        nonlocal turns
        turns += 1
        asyncio.get_running_loop().call_soon(turn)

    async def handler(call: Call) -> None:
        await eventually(lambda: intake.body_bytes == 40 * 20_005)
        turn()
        async for _ in call:
            taken.append(turns)

    intake = Intake()
    async with serving(handler, intake) as url, grpc_client(url) as client:
        call = client.begin()
        await client.send(call, framed(b"x" * 20_000) * 40, end=True)
        await eventually(lambda: len(taken) == 40)
    assert max(taken.count(each) for each in taken) <= 5


async def test_a_flood_of_resets_ends_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rapid reset (CVE-2023-44487): calls are begun and given up for nothing."""
    monkeypatch.setitem(LIMITS, Flood.RESETS, 50)
    async with serving() as url, grpc_client(url) as client:
        for _ in range(60):
            call = client.begin()
            client.h2.reset_stream(call, ErrorCodes.CANCEL)
        client.flush()
        await eventually(lambda: client.gone)
        async with grpc_client(url) as other:
            call = other.begin()
            await other.send(call, framed(b"x"))
            assert await other.message(call) == b"x"


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADERS_OF_NO_CALL = b"\x00\x00\x01\x01\x04\x00\x00\x00\x00\x00"


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 100, PREFACE + HEADERS_OF_NO_CALL])
async def test_what_is_no_http2_ends_the_connection(garbage: bytes) -> None:
    async with serving() as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(garbage)
        async with asyncio.timeout(5):
            while await reader.read(1 << 16):
                pass
        writer.close()


async def test_calls_in_progress_end_before_the_server() -> None:
    begun = asyncio.Event()

    async def slow(call: Call) -> None:
        begun.set()
        await asyncio.sleep(0.05)
        call.send(b"late")

    server = GrpcServer(slow, Intake())
    listener = await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0)
    async with grpc_client(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}") as client:
        call = client.begin()
        await begun.wait()
        listener.close()
        await server.shutdown(1.0)
        assert await client.message(call) == b"late"
        assert await client.status(call) == "0"
