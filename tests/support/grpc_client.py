"""A gRPC client for tests: one connection on `h2`, which can break every rule."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, ResponseReceived, StreamEnded, StreamReset, TrailersReceived
from h2.exceptions import StreamClosedError

from gateway.parts.picker.picker_service import PROCESS


def framed(message: bytes) -> bytes:
    return b"\x00" + len(message).to_bytes(4, "big") + message


class GrpcClient:
    """`messages` and `trailers` by stream. `reads`: what is received is acknowledged."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, reads: bool = True) -> None:
        self.h2 = H2Connection(H2Configuration(header_encoding="utf-8"))
        self.reads = reads
        self.writer = writer
        self.trailers: dict[int, dict[str, str]] = {}
        self.reset: set[int] = set()
        self.gone = False
        self.going_away: list[int] = []  # last streams, of GOAWAY
        self._unread = b""
        self._received: dict[int, bytearray] = defaultdict(bytearray)
        self._reader = reader
        self._news = asyncio.Event()
        self.h2.initiate_connection()
        self.flush()
        self._task = asyncio.create_task(self._read())

    def flush(self) -> None:
        self.writer.write(self.h2.data_to_send())

    def begin(self, path: str = PROCESS) -> int:
        """The number of a new call."""
        stream = self.h2.get_next_available_stream_id()
        head = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "picker", "te": "trailers"}
        self.h2.send_headers(stream, [*head.items(), ("content-type", "application/grpc")])
        self.flush()
        return stream

    async def send(self, stream: int, raw: bytes, end: bool = False) -> None:
        """Bytes, within the window of the server."""
        while raw:
            room = min(self.h2.local_flow_control_window(stream), self.h2.max_outbound_frame_size)
            if room <= 0:
                await self._until_news()
                continue
            self.h2.send_data(stream, raw[:room])
            raw = raw[room:]
            self.flush()
        if end:
            self.h2.end_stream(stream)
            self.flush()

    async def message(self, stream: int) -> bytes:
        """The next message of a call."""
        received = self._received[stream]
        while len(received) < 5 or len(received) < 5 + int.from_bytes(received[1:5], "big"):
            await self._until_news()
        size = int.from_bytes(received[1:5], "big")
        found = bytes(received[5 : 5 + size])
        del received[: 5 + size]
        return found

    def unread(self, stream: int) -> bytes:
        """Messages of a call that nobody has asked for."""
        return bytes(self._received[stream])

    async def status(self, stream: int) -> str:
        """grpc-status, at the end of a call."""
        while stream not in self.trailers:
            await self._until_news()
        return self.trailers[stream]["grpc-status"]

    async def _until_news(self) -> None:
        assert not self.gone
        self._news.clear()
        async with asyncio.timeout(30):
            await self._news.wait()

    async def _read(self) -> None:
        with suppress(ConnectionError):
            while data := await self._reader.read(1 << 16):
                for event in self.h2.receive_data(self._without_goaway(data)):
                    self._on_event(event)
                self.flush()
                self._news.set()
        self.gone = True
        self._news.set()

    def _without_goaway(self, data: bytes) -> bytes:
        """Whole frames. h2 would take a GOAWAY for the end of all calls."""
        data, frames = self._unread + data, b""
        while len(data) >= 9 and len(data) >= (end := 9 + int.from_bytes(data[:3], "big")):
            if data[3] == 7:
                self.going_away.append(int.from_bytes(data[9:13], "big"))
            else:
                frames += data[:end]
            data = data[end:]
        self._unread = data
        return frames

    def _on_event(self, event: Any) -> None:
        match event:
            case DataReceived():
                self._received[event.stream_id] += event.data
                if self.reads:
                    try:
                        self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                    except StreamClosedError:
                        return
            case TrailersReceived() | ResponseReceived():
                found = dict(event.headers)
                if "grpc-status" in found:
                    self.trailers[event.stream_id] = found
            case StreamReset():
                self.reset.add(event.stream_id)
            case StreamEnded():
                pass

    def close(self) -> None:
        self._task.cancel()
        self.writer.transport.abort()


@asynccontextmanager
async def grpc_client(url: str, **more: Any) -> AsyncIterator[GrpcClient]:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    client = GrpcClient(reader, writer, **more)
    try:
        yield client
    finally:
        client.close()
