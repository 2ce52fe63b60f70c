"""A caller's HTTP request as a value, and replies to the request."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from backends.http.write_coalescer import WriteCoalescer
from gateway.api.api_error import REASONS, ApiError


class WriteFlowControl(Protocol):
    """An answer in progress, with callbacks of its connection."""

    def on_write_paused(self) -> None: ...

    def on_write_resumed(self) -> None: ...

    def on_shutdown(self) -> None:
        """The server stops: end the answer now."""


class ResponseWriter:
    """Writes to one connection without waiting; a full socket buffer is reported to `flow_control`."""

    def __init__(self, transport: asyncio.Transport, coalescer: WriteCoalescer) -> None:
        self.transport = transport
        self.flow_control: WriteFlowControl | None = None
        self.paused = False
        self._coalescer = coalescer

    def write(self, data: bytes) -> None:
        """Write now, or with the data of other sockets at the end of this loop iteration."""
        self._coalescer.write(self.transport, data)

    def write_on(self, data: bytes) -> None:
        """Write now, after all earlier data."""
        self._coalescer.write_on(self.transport, data)

    def flush(self) -> None:
        self._coalescer.flush_to(self.transport)

    def on_write_paused(self) -> None:
        self.paused = True
        if self.flow_control is not None:
            self.flow_control.on_write_paused()

    def on_write_resumed(self) -> None:
        self.paused = False
        if self.flow_control is not None:
            self.flow_control.on_write_resumed()


@dataclass(slots=True, eq=False)
class HttpRequest:
    """A complete request; with `fault`, an incomplete one to be refused for that reason.

    `path` is percent-encoded as sent, without the query: decoding could hide another path. Header names are lower
    case; of repeated headers the last counts. `arrival` is the time of the first byte (monotonic, s).
    """

    method: str
    path: str
    headers: Mapping[str, str]
    arrival: float
    http11: bool
    keep_alive: bool
    writer: ResponseWriter
    body: bytes = b""
    fault: ApiError | None = None
    begun: bool = False  # part of the answer is written

    def respond(self, status: int, body: bytes, lines: Iterable[str] = ()) -> None:
        """Write a JSON reply with additional header lines."""
        self.begun = True
        self.writer.write(rendered(status, body, lines, self.method, self.keep_alive))

    def refuse(self, refusal: ApiError, lines: Iterable[str] = ()) -> None:
        """Write an error reply. The error may require the connection to close."""
        if refusal.close:
            self.keep_alive = False
        own = (f"{name}: {value}" for name, value in refusal.headers.items())
        self.respond(refusal.status, refusal.body(), (*own, *lines))


def rendered(status: int, body: bytes, lines: Iterable[str], method: str, keep_alive: bool) -> bytes:
    """A complete reply; without the body in answer to HEAD."""
    head = [
        f"HTTP/1.1 {status} {REASONS.get(status, 'Error')}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        "server: firsttoken",
        *lines,
        "" if keep_alive else "connection: close\r\n",
    ]
    return ("\r\n".join(head) + "\r\n").encode("latin-1") + (b"" if method == "HEAD" else body)


def too_large(max_body: int) -> ApiError:
    return ApiError(413, f"The body is larger than {max_body} bytes.", code="request_too_large", close=True)


def framing_error(headers: Mapping[str, str], http11: bool, size: int, max_body: int) -> ApiError | None:
    """The reason to refuse a body by headers and size. `size`: declared or actual bytes."""
    if "transfer-encoding" in headers and not http11:  # RFC 9112, section 6.1
        return ApiError(400, "Transfer-Encoding is not part of HTTP/1.0.", close=True)
    if headers.get("content-encoding", "identity").lower() != "identity":
        return ApiError(
            415, "Compressed request bodies are not accepted; send it without Content-Encoding.", close=True
        )
    return too_large(max_body) if size > max_body else None
