"""Messages between the workers of one gateway over Unix sockets: load, prompts, and polls of engines.

Rules:
- Messages of load and prompts are those of replicas (`gateway.cluster.gossip`). A poll is a message of its own.
- Every worker listens on a socket of its own and connects to the sockets of all others. A connection carries the
  messages of the worker that has opened the connection; after the end of the connection that worker's load is gone.
- The supervisor holds the sockets too: connections to a dead worker wait for its successor.
- A new connection begins with the load and the recent prompts of its worker: a successor knows what is cached where.
- No request waits. The first update is sent at once, later ones of one interval in one message. Messages for a
  worker that does not read are dropped beyond UNREAD; the next full message makes up for dropped ones.
- One worker polls an endpoint, the first one alive in an order that begins with a digest of the endpoint's id. When
  that worker dies the next one is in charge at once. A worker uses polls of workers before it in that order only: of
  several that stand in for a hung worker, one goes on.
"""

from __future__ import annotations

import asyncio
import socket
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from operator import attrgetter
from pathlib import Path
from time import monotonic
from typing import cast
from zlib import crc32

import msgspec

from gateway.cluster.gossip import (
    FULL_INTERVAL,
    MESSAGE_BLOCKS,
    SEND_INTERVAL,
    Peers,
    PendingUpdates,
    new_group,
    sender_of,
)
from gateway.fleet.monitor import PollResult
from gateway.process import BACKLOG
from policies.fleet.peers import PeerLoad, PeerReader
from policies.types import NEVER

JOIN = 0.001  # s in which the first updates after a pause are joined
RECONNECT_PAUSE = 0.1  # s
FULL_PACE = 16  # workers; with more the interval of sending grows, and nobody has more messages to read
UNREAD = 1 << 20  # bytes for one worker
RECENT_PROMPTS, RECENT_BLOCKS = 4096, 1 << 16  # for a new connection: at most 512 KiB
SIZE = 4  # bytes before a message
POLL = b"ftp1"  # first bytes of a poll
_decode_poll = msgspec.msgpack.Decoder(tuple[int, str, PollResult]).decode


class WorkerPeers:
    """Implements `policies.fleet.peers.PeerLink` and `gateway.fleet.monitor.SharedPolls` for worker `number`.

    `paths`: of the workers' sockets; `listening`: this worker's; `alive`: True for the number of a running worker.
    """

    def __init__(
        self, number: int, paths: Sequence[Path], listening: socket.socket, alive: Callable[[int], bool]
    ) -> None:
        self._number, self._alive = number, alive
        self._paths, self._listening = paths, listening
        self._knows: Callable[[str], bool] = lambda endpoint: False
        group = new_group()
        self._pending = PendingUpdates(group)
        self._peers = Peers(group, lambda endpoint: self._knows(endpoint))
        self._recent: deque[tuple[str, array[int]]] = deque()
        self._recent_blocks = 0
        self._polls: dict[str, PollResult] = {}
        self._connections: set[asyncio.WriteTransport] = set()  # to other workers
        self._incoming: set[IncomingMessages] = set()
        self._interval = SEND_INTERVAL * max(len(paths) / FULL_PACE, 1.0)
        self._sent_at = NEVER
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._server: asyncio.Server | None = None

    async def start(self, knows: Callable[[str], bool]) -> None:
        """`knows`: True for an endpoint of this gateway."""
        loop = asyncio.get_running_loop()
        self._knows = knows
        # `create_unix_server` removes the path at the end, from Python 3.13 on: a successor could not be reached.
        self._server = await loop.create_server(
            lambda: IncomingMessages(self._incoming, self._on_message, self._peers.remove),
            sock=self._listening,
            backlog=BACKLOG,
        )
        others = [path for number, path in enumerate(self._paths) if number != self._number]
        self._tasks = [loop.create_task(self._keep_connected(path)) for path in others]
        self._tasks.append(loop.create_task(self._send_in_full_forever()))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._timer is not None:
            self._timer.cancel()
        if self._server is not None:
            self._server.close()
        for connection in [*self._incoming]:
            connection.transport.abort()

    # -- PeerLink ---------------------------------------------------------------------------

    def publish(self, endpoint_id: str, load: PeerLoad) -> None:
        self._pending.publish(endpoint_id, load)
        self._send_soon()

    def publish_prompt(self, endpoint_id: str, hashes: Sequence[int]) -> None:
        self._pending.publish_prompt(endpoint_id, hashes)
        self._remember(endpoint_id, array("Q", hashes[:MESSAGE_BLOCKS]))
        self._send_soon()

    def _remember(self, endpoint_id: str, hashes: array[int]) -> None:
        self._recent.append((endpoint_id, hashes))
        self._recent_blocks += len(hashes)
        while self._recent_blocks > RECENT_BLOCKS or len(self._recent) > RECENT_PROMPTS:
            self._recent_blocks -= len(self._recent.popleft()[1])

    def merge(self, reader: PeerReader, now: float) -> None:
        self._peers.merge(reader, now)

    # -- SharedPolls ------------------------------------------------------------------------

    def in_charge(self, endpoint_id: str) -> bool:
        alive = filter(self._alive, range(len(self._paths)))
        return min(alive, key=partial(self._place, endpoint_id), default=self._number) == self._number

    def _place(self, endpoint_id: str, number: int) -> int:
        """Of a worker in the endpoint's order."""
        return (number - crc32(endpoint_id.encode())) % len(self._paths)

    def put_poll(self, endpoint_id: str, result: PollResult) -> None:
        self._write(POLL + msgspec.msgpack.encode((self._number, endpoint_id, result)))

    def latest_poll(self, endpoint_id: str) -> PollResult | None:
        return self._polls.get(endpoint_id)

    # -- sending ----------------------------------------------------------------------------

    def _send_soon(self) -> None:
        if self._timer is None:
            loop = asyncio.get_running_loop()
            at = max(monotonic() + JOIN, self._sent_at + self._interval)
            self._timer = loop.call_later(at - monotonic(), self._send)

    def _send(self) -> None:
        self._timer = None
        self._sent_at = monotonic()
        if (message := self._pending.message(self._sent_at)) is not None:
            self._write(message)

    def _write(self, message: bytes) -> None:
        framed = frame(message)
        for connection in self._connections:
            if connection.get_write_buffer_size() < UNREAD:
                connection.write(framed)

    async def _send_in_full_forever(self) -> None:
        while True:
            self._send_soon()
            self._polls = {endpoint: poll for endpoint, poll in self._polls.items() if self._knows(endpoint)}
            await asyncio.sleep(FULL_INTERVAL)

    async def _keep_connected(self, path: Path) -> None:
        loop = asyncio.get_running_loop()
        while True:
            with suppress(OSError):
                transport, ended = await loop.create_unix_connection(OutgoingMessages, str(path))
                connection = cast("asyncio.WriteTransport", transport)
                connection.write(frame(self._pending.introduction(self._recent, monotonic())))
                self._connections.add(connection)
                try:
                    await ended.lost
                finally:
                    self._connections.discard(connection)
                    connection.abort()
            await asyncio.sleep(RECONNECT_PAUSE)

    # -- receiving --------------------------------------------------------------------------

    def _on_message(self, message: bytes) -> None:
        if not message.startswith(POLL):
            self._peers.on_message(message, monotonic())
            return
        number, endpoint, poll = _decode_poll(memoryview(message)[len(POLL) :])
        if self._knows(endpoint) and self._place(endpoint, number) < self._place(endpoint, self._number):
            known = self._polls.get(endpoint, poll)
            self._polls[endpoint] = max(known, poll, key=attrgetter("at"))


def frame(message: bytes) -> bytes:
    return len(message).to_bytes(SIZE, "little") + message


class OutgoingMessages(asyncio.Protocol):
    """`lost` is done after the end of the connection."""

    def __init__(self) -> None:
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.lost.done():
            self.lost.set_result(None)


class IncomingMessages(asyncio.Protocol):
    """Passes on whole messages, and at the end of a connection the sender of the last update. `open`: all such."""

    transport: asyncio.Transport

    def __init__(
        self, open: set[IncomingMessages], on_message: Callable[[bytes], None], on_end: Callable[[bytes], None]
    ) -> None:
        self._open = open
        self._on_message, self._on_end = on_message, on_end
        self._received = bytearray()
        self._sender: bytes | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self._open.add(self)

    def data_received(self, data: bytes) -> None:
        received = self._received
        received += data
        while len(received) >= SIZE:
            end = SIZE + int.from_bytes(received[:SIZE], "little")
            if len(received) < end:
                return
            message = bytes(received[SIZE:end])
            del received[:end]
            if not message.startswith(POLL):
                self._sender = sender_of(message)
            self._on_message(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self._open.discard(self)
        if self._sender is not None:
            self._on_end(self._sender)
