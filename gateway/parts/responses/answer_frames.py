"""The answer to a turn on a WebSocket: an HTTP answer goes in, a text message for each event comes out.

The answer is written as to a caller of HTTP/1.0, so its body has no framing. An event is passed on as it is, except
errors, which Open Responses wants in an envelope with a status (section "WebSocket Errors").
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Raw

from backends.stream.sse import ServerSentEvent, SseDecoder, StreamError
from gateway.api.api_error import ApiError
from gateway.downstream.http_request import WebSocket
from gateway.strict_json import encode

_LAST = tuple(b'"response.%b"' % status for status in (b"completed", b"incomplete", b"failed"))
_FRAMING = frozenset({"connection", "content-length", "content-type", "date", "server"})
_FAILED = 502  # status of an error within a stream, which has none of its own


class LastResponse(msgspec.Struct):
    """The members of a response that a next turn needs."""

    id: str = ""
    status: str = ""
    store: bool | None = None
    output: list[Raw] = []


class _Event(msgspec.Struct):
    type: str = ""
    response: LastResponse | None = None


_event = msgspec.json.Decoder(_Event)


class AnswerFrames(asyncio.Transport):
    """Transport of one answer. `last`: the response of its last event, once that is sent."""

    def __init__(self, socket: WebSocket) -> None:
        super().__init__()
        self.last: LastResponse | None = None
        self._socket = socket
        self._status = 0
        self._headers: dict[str, str] = {}
        self._body = bytearray()  # of a reply that is no stream
        self._decoder = SseDecoder()

    @property
    def _streams(self) -> bool:
        return self._headers.get("content-type", "").startswith("text/event-stream")

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        """The head comes in one piece, alone or before a part of the body."""
        given = bytes(data)
        if not self._status:
            head, _, given = given.partition(b"\r\n\r\n")
            self._read_head(head.decode("latin-1").split("\r\n"))
        if not self._streams:
            self._body += given
            return
        try:
            for event in self._decoder.feed(given):
                self._send(event)
        except StreamError:
            self.abort()

    def _read_head(self, lines: list[str]) -> None:
        self._status = int(lines[0].split(" ")[1])
        for line in lines[1:]:
            name, _, value = line.partition(": ")
            self._headers[name] = value

    def finish(self) -> None:
        """The answer is complete. Without a stream it is an error reply."""
        if self._streams:
            for event in self._decoder.flush():
                self._send(event)
        elif self._status:
            headers = {name: value for name, value in self._headers.items() if name not in _FRAMING}
            self._socket.send(error_message(self._status, msgspec.json.decode(self._body).get("error"), headers))

    def _send(self, event: ServerSentEvent) -> None:
        data = event.data
        if data.startswith(b"[DONE]"):
            return
        if any(mark in data for mark in _LAST):
            self._note_last(data)
        elif b'"error"' in data and (error := _error_of(data)) is not None:
            data = error_message(_FAILED, error)
        self._socket.send(data)

    def _note_last(self, data: bytes) -> None:
        try:
            self.last = _event.decode(data).response
        except msgspec.DecodeError:
            self.last = None

    # -- the socket -------------------------------------------------------------------------

    def is_closing(self) -> bool:
        return self._socket.writer.transport.is_closing()

    def abort(self) -> None:
        self._socket.writer.transport.abort()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._socket.writer.transport.get_extra_info(name, default)

    def get_write_buffer_size(self) -> int:
        return self._socket.writer.unsent()


def refusal_message(refusal: ApiError) -> bytes:
    return error_message(refusal.status, msgspec.json.decode(refusal.body())["error"], refusal.headers)


def error_message(status: int, error: Any, headers: Mapping[str, str] | None = None) -> bytes:
    """`headers`: those that an HTTP reply would have, for clients that look for `retry-after`."""
    found = error if isinstance(error, dict) else {"message": str(error)}
    found = {**found, "code": str(found.get("code") or found.get("type") or "server_error")}
    return encode({"type": "error", "status": status, "error": found, "headers": dict(headers or {})})


def _error_of(data: bytes) -> Any:
    """The error of an event of the type `error`, whose members may be the event's own; None: another event."""
    try:
        event = msgspec.json.decode(data)
    except msgspec.DecodeError:
        return None
    if not isinstance(event, dict) or event.get("type") != "error":
        return None
    return event.get("error") or {name: event.get(name) for name in ("code", "message", "param")}
