"""Messages between the workers of one gateway over Unix sockets: load, prompts, and polls of engines.

Rules:
- Messages of load and prompts are those of replicas (`gateway.cluster.gossip`). A poll is a message of its own.
- Every worker listens on a socket of its own and connects to the sockets of all others. A connection carries the
  messages of the worker that has opened the connection; after the end of the connection that worker's load is gone.
- No request waits. The first update after a pause is sent at once, later ones of one interval in one message. Messages
  for a worker that does not read are dropped beyond UNREAD; the next full message makes up for dropped ones.
- One worker polls an endpoint for all: which one follows from the endpoint's id alone. When that worker hangs, each of
  the others polls by itself (`gateway.fleet.monitor`); when the worker dies, the supervisor restarts it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic
from zlib import crc32

import msgspec

from gateway.cluster.gossip import FULL_INTERVAL, SEND_INTERVAL, Peers, PendingUpdates, new_group, sender_of
from gateway.fleet.endpoint_poll import PollResult
from policies.fleet.peers import PeerLoad, PeerReader

JOIN = 0.001  # s in which the first updates after a pause are joined
RECONNECT_PAUSE = 0.1  # s
FULL_PACE = 16  # workers; with more the interval of sending grows, and nobody has more messages to read
UNREAD = 1 << 20  # bytes for one worker
SIZE = 4  # bytes before a message
POLL = b"ftp1"  # first bytes of a poll
_decode_poll = msgspec.msgpack.Decoder(tuple[str, PollResult]).decode


class WorkerPeers:
    """Implements `policies.fleet.peers.PeerLink` and `gateway.fleet.monitor.SharedPolls` for worker `number`.

    `paths`: of the sockets of all workers, by number.
    """

    def __init__(self, number: int, paths: Sequence[Path]) -> None:
        self._number, self._paths = number, paths
        self._knows: Callable[[str], bool] = lambda endpoint: False
        group = new_group()
        self._pending = PendingUpdates(group)
        self._peers = Peers(group, lambda endpoint: self._knows(endpoint))
        self._polls: dict[str, PollResult] = {}
        self._outgoing: set[asyncio.StreamWriter] = set()
        self._incoming: set[asyncio.StreamWriter] = set()
        self._interval = SEND_INTERVAL * max(len(paths) / FULL_PACE, 1.0)
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._server: asyncio.Server | None = None

    async def start(self, knows: Callable[[str], bool]) -> None:
        """`knows`: True for an endpoint of this gateway."""
        self._knows = knows
        self._server = await asyncio.start_unix_server(self._receive, self._paths[self._number])
        others = [path for number, path in enumerate(self._paths) if number != self._number]
        self._tasks = [asyncio.create_task(self._keep_connected(path)) for path in others]
        self._tasks.append(asyncio.create_task(self._send_forever()))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._server is not None:
            self._server.close()
        for connection in self._incoming:
            connection.transport.abort()

    # -- PeerLink ---------------------------------------------------------------------------

    def publish(self, endpoint_id: str, load: PeerLoad) -> None:
        self._pending.publish(endpoint_id, load)
        self._changed.set()

    def publish_prompt(self, endpoint_id: str, hashes: Sequence[int]) -> None:
        self._pending.publish_prompt(endpoint_id, hashes)
        self._changed.set()

    def merge(self, reader: PeerReader, now: float) -> None:
        self._peers.merge(reader, now)

    # -- SharedPolls ------------------------------------------------------------------------

    def in_charge(self, endpoint_id: str) -> bool:
        return crc32(endpoint_id.encode()) % len(self._paths) == self._number

    def put_poll(self, endpoint_id: str, result: PollResult) -> None:
        if self.in_charge(endpoint_id):
            self._write(POLL + msgspec.msgpack.encode((endpoint_id, result)))

    def latest_poll(self, endpoint_id: str) -> PollResult | None:
        return self._polls.get(endpoint_id)

    # -- connections ------------------------------------------------------------------------

    async def _send_forever(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(FULL_INTERVAL):
                    await self._changed.wait()
                await asyncio.sleep(JOIN)
            self._changed.clear()
            if (message := self._pending.message(monotonic())) is not None:
                self._write(message)
            self._polls = {endpoint: poll for endpoint, poll in self._polls.items() if self._knows(endpoint)}
            await asyncio.sleep(self._interval)

    def _write(self, message: bytes) -> None:
        framed = len(message).to_bytes(SIZE, "little") + message
        for connection in self._outgoing:
            if connection.transport.get_write_buffer_size() < UNREAD:
                connection.write(framed)

    async def _keep_connected(self, path: Path) -> None:
        while True:
            with suppress(OSError):
                reader, connection = await asyncio.open_unix_connection(path)
                self._outgoing.add(connection)
                try:
                    await reader.read()  # nothing comes but the end
                finally:
                    self._outgoing.discard(connection)
                    connection.transport.abort()
            await asyncio.sleep(RECONNECT_PAUSE)

    async def _receive(self, reader: asyncio.StreamReader, connection: asyncio.StreamWriter) -> None:
        sender: bytes | None = None
        self._incoming.add(connection)
        try:
            with suppress(OSError, asyncio.IncompleteReadError):
                while True:
                    message = await reader.readexactly(int.from_bytes(await reader.readexactly(SIZE), "little"))
                    if message.startswith(POLL):
                        endpoint, poll = _decode_poll(memoryview(message)[len(POLL) :])
                        self._polls[endpoint] = poll
                    else:
                        sender = sender_of(message)
                        self._peers.on_message(message, monotonic())
        finally:
            self._incoming.discard(connection)
            connection.transport.abort()
            if sender is not None:
                self._peers.remove(sender)
