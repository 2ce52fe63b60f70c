"""A WebSocket of the data port: aiohttp opens it and reads its messages, frames are written without waiting.

Rules:
- Messages are text; no compression, no subprotocol. A message has at most the size of a body, is counted with all
  bodies, and must arrive as fast as a body.
- Pings keep balancers from closing a connection that is silent. No answer is asked for: many clients answer only while
  they wait for a message, and run tools for minutes between two.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from time import monotonic

from aiohttp import WSCloseCode, WSMsgType
from aiohttp.web import BaseRequest, WebSocketResponse

from gateway.api.api_error import ApiError
from gateway.downstream.http_limits import body_deadline
from gateway.downstream.intake import SMALL_BODY
from gateway.downstream.response_writer import ResponseWriter

PING = 30.0  # s between pings
CLOSE_WAIT = 1.0  # s for the peer's close frame
_TEXT = 0x81  # first byte of an unfragmented text frame (RFC 6455, section 5.2)
_PING = b"\x89\x00"

logging.getLogger("aiohttp.websocket").setLevel(logging.ERROR)  # its warnings quote subprotocols, which may hold a key


class WebSocket:
    """A caller's offer to open a WebSocket, and the socket once opened. `hold(size)` counts `size` bytes for this
    connection; it raises ApiError where all callers together hold too many."""

    def __init__(self, raw: BaseRequest, writer: ResponseWriter, max_message: int, hold: Callable[[int], None]) -> None:
        self.writer, self.max_message = writer, max_message
        self._raw = raw
        self._hold = hold
        self._opened = False
        self._kept = 0  # bytes of complete messages that wait or are served
        self._arriving = 0  # bytes since the last complete message
        self._began = self._latest = 0.0  # of an incomplete message that is large: when it became so, and its last byte
        self._socket = WebSocketResponse(
            timeout=CLOSE_WAIT, compress=False, max_msg_size=max_message, decode_text=False
        )
        self._socket.headers["server"] = "firsttoken"
        self._pings: asyncio.TimerHandle | None = None

    @property
    def is_acceptable(self) -> bool:
        """The offer is complete: a proxy in front may have taken away a part."""
        return bool(self._socket.can_prepare(self._raw))

    async def open(self) -> None:
        self.writer.flush()
        self._opened = True
        await self._socket.prepare(self._raw)
        self._pings = asyncio.get_running_loop().call_later(PING, self._ping)

    def _ping(self) -> None:
        if not self.writer.transport.is_closing():
            self.writer.write_through(_PING)
            self._pings = asyncio.get_running_loop().call_later(PING, self._ping)

    def end(self) -> None:
        """The socket is closed, or its caller gone."""
        if self._pings is not None:
            self._pings.cancel()

    # -- messages -------------------------------------------------------------------------------

    async def receive(self) -> bytes | None:
        """The next message; None: the socket is closed. A message that is no text closes the socket."""
        message = await self._socket.receive()
        if message.type is WSMsgType.TEXT:
            self._kept, self._arriving = self._kept + len(message.data), 0
            return bytes(message.data)
        if message.type is WSMsgType.BINARY:
            await self.close(WSCloseCode.UNSUPPORTED_DATA)
        return None

    def on_bytes(self, size: int) -> None:
        """Count bytes of a message. Where all callers together hold too many, the connection is lost."""
        if not self._opened:
            return
        self._latest = monotonic()
        if self._arriving <= SMALL_BODY:
            self._began = self._latest
        self._arriving += size
        try:
            self._hold(self._kept + self._arriving)
        except ApiError:
            self.writer.transport.abort()

    def release(self, waiting: int) -> None:
        """A message has been served; `waiting`: bytes of the next one, if it has come meanwhile."""
        self._kept = waiting
        with suppress(ApiError):  # all others hold too many; these bytes are here already
            self._hold(self._kept + self._arriving)

    def is_overdue(self, now: float, limit: float) -> bool:
        """A large message has stopped or drips."""
        large = self._arriving > SMALL_BODY
        return large and now > body_deadline(limit, self._began, self._latest, self._arriving)

    def send(self, data: bytes) -> None:
        """Write a text message, unless the caller is gone."""
        if not self.writer.transport.is_closing():
            self.writer.write_through(_head(len(data)) + data)

    async def close(self, code: WSCloseCode) -> None:
        self.writer.flush()
        await self._socket.close(code=code)


def _head(size: int) -> bytes:
    """The head of a frame from a server (RFC 6455, section 5.2)."""
    if size < 126:
        return bytes((_TEXT, size))
    if size < 1 << 16:
        return bytes((_TEXT, 126)) + size.to_bytes(2, "big")
    return bytes((_TEXT, 127)) + size.to_bytes(8, "big")
