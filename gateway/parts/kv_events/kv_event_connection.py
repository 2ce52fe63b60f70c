"""The connection to an engine's cache events: options of its socket, and log lines about its state.

Rules:
- An engine is not trusted with sizes. A longer message closes the connection; few messages wait here, the others with
  the engine, which drops them at its own mark: a gap, then.
- Coming and going are a line each. A connection that is lost again and again before any event came is told once.
- ZMQ connects again by itself, but not after a message that is too long, nor to a socket of another type: this does.
- An address without a publisher is told once, SETTLE seconds after the start: nothing listens, or something that speaks
  another protocol.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from time import monotonic

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from backends.kv_events import MAX_MESSAGE

log = logging.getLogger("firsttoken")

SETTLE = 10.0  # s for a publisher to answer
BRIEF, BRIEF_IN_A_ROW = 5.0, 3  # s of a connection without an event, and how many of them are told
BOUNDS: Mapping[int, int] = {
    zmq.MAXMSGSIZE: MAX_MESSAGE,
    zmq.RCVHWM: 32,  # messages waiting to be read
    zmq.LINGER: 0,
}
SOCKET_OPTIONS: Mapping[int, int | bytes] = {
    **BOUNDS,
    zmq.RECONNECT_IVL: 100,  # ms
    zmq.RECONNECT_IVL_MAX: 2_000,  # ms
    zmq.HANDSHAKE_IVL: 5_000,  # ms
    zmq.HEARTBEAT_IVL: 2_000,  # ms
    zmq.HEARTBEAT_TIMEOUT: 6_000,  # ms without a heartbeat until the engine counts as gone
    zmq.SUBSCRIBE: b"",
}
RECONNECT_AFTER = 1.0  # s without a try of ZMQ's own
WATCHED = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
)


class ConnectionWatch:
    """Follows the state of a SUB socket until `close`. `url`: of the publisher."""

    def __init__(self, socket: zmq.asyncio.Socket, endpoint: str, url: str) -> None:
        self.connected = False
        self._endpoint, self._url = endpoint, url
        self._socket = socket
        self._states = socket.get_monitor_socket(WATCHED)
        self._tell_at: float | None = monotonic() + SETTLE  # None: told, or connected
        self._reconnect_at: float | None = None
        self._was_connected = False
        self._is_accepted = False  # by something that listens
        self._since = 0.0  # of the connection
        self._brief = 0  # connections in a row

    def close(self) -> None:
        self._socket.disable_monitor()
        self._states.close(linger=0)

    def on_batch(self) -> None:
        """Events came."""
        self._brief = 0

    async def run(self) -> None:
        while True:
            times = [at for at in (self._tell_at, self._reconnect_at) if at is not None]
            if await self._states.poll(max(min(times) - monotonic(), 0.0) * 1e3 if times else None):
                self._on_event(parse_monitor_message(await self._states.recv_multipart())["event"])
                continue
            now = monotonic()
            if self._tell_at is not None and self._tell_at <= now:
                self._tell_absence()
            if self._reconnect_at is not None and self._reconnect_at <= now:
                self._reconnect()

    def _on_event(self, event: int) -> None:
        match event:
            case zmq.EVENT_CONNECTED:
                self._is_accepted, self._reconnect_at = True, None
            case zmq.EVENT_CONNECT_RETRIED:
                self._reconnect_at = None
            case zmq.EVENT_CLOSED:
                self._is_accepted = False
            case zmq.EVENT_HANDSHAKE_SUCCEEDED if not self.connected:
                self._on_connected()
            case zmq.EVENT_DISCONNECTED:
                self._reconnect_at = monotonic() + RECONNECT_AFTER
                if self.connected:
                    self._on_disconnected()

    def _on_connected(self) -> None:
        self.connected = self._was_connected = True
        self._tell_at, self._since = None, monotonic()
        if self._brief < BRIEF_IN_A_ROW:
            log.info("cache events of %s: connected", self._endpoint)

    def _on_disconnected(self) -> None:
        now = monotonic()
        self.connected, self._tell_at = False, now + SETTLE
        self._brief = self._brief + 1 if now - self._since < BRIEF else 0
        if self._brief < BRIEF_IN_A_ROW:
            log.info("cache events of %s: the engine is gone", self._endpoint)
        elif self._brief == BRIEF_IN_A_ROW:
            text = (
                "cache events of %s: the connection to %s is lost again and again before an event; the largest is %d MB"
            )
            log.warning(text, self._endpoint, self._url, MAX_MESSAGE >> 20)

    def _reconnect(self) -> None:
        self._reconnect_at = None
        with suppress(zmq.ZMQError):  # ZMQ has dropped the address itself
            self._socket.disconnect(self._url)
        self._socket.connect(self._url)

    def _tell_absence(self) -> None:
        self._tell_at = None
        if self._is_accepted:
            text = "cache events of %s: %s accepts connections, but is no publisher of ZMQ: another protocol's port?"
            log.warning(text, self._endpoint, self._url)
        elif not self._was_connected:
            log.warning("cache events of %s: nobody accepts connections at %s", self._endpoint, self._url)
