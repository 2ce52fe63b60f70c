"""A request of the data port and the writing of its reply: values without a connection's rules.

Rules:
- A reply is written without waiting. Every reply has a `date`; none names a library or a version.
- An error reply is in the caller's dialect.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from email.utils import formatdate
from functools import lru_cache
from ipaddress import IPv6Address, IPv6Network
from time import time
from typing import Protocol

from backends.interface import Failure, FailureKind
from gateway.api.api_error import REASONS, ApiError
from gateway.api.dialects import error_event, error_reply
from gateway.api.inference_request import KEY_HEADERS
from gateway.api.same_origin import HOST
from gateway.downstream.response_writer import ResponseWriter
from gateway.downstream.web_socket import WebSocket

UNKNOWN = "?"  # address of a caller


class PendingStream(Protocol):
    """A stream before its first token."""

    def stop(self) -> bool:
        """Write no more comments. True: the head is written."""

    def end(self, event: bytes) -> None:
        """Write the last event of a stream whose head is written."""


@dataclass(slots=True, eq=False)
class HttpRequest:
    """A complete request; with `fault`, an incomplete one to be refused for that reason.

    `path` is percent-encoded as sent, without the query: decoding could hide another path. Header names are lower
    case; of repeated headers the last counts. `arrival` is the time of the first byte (monotonic, s). `model`: named by
    the path, or the id of a stored response. `query` is percent-encoded. `lines`: header lines of every answer.
    `comments`: written until the answer begins. `websocket`: offered by the caller, to be opened in place of an answer.
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
    model: str = ""
    lines: tuple[str, ...] = ()
    comments: PendingStream | None = None
    query: str = ""
    websocket: WebSocket | None = None

    def respond(self, status: int, body: bytes, lines: Iterable[str] = ()) -> None:
        """Write a JSON reply with additional header lines."""
        self.begun = True
        self.writer.write(rendered(status, body, (*self.lines, *lines), self.method, self.keep_alive))

    def refuse(self, refusal: ApiError, lines: Iterable[str] = (), request_id: str = "") -> None:
        """Write an error reply in the caller's dialect. The error may require the connection to close."""
        if refusal.close:
            self.keep_alive = False
        if self.comments is not None and self.comments.stop():
            self.comments.end(error_event(failure_of(refusal), self.path))
            return
        own = [f"{name}: {value}" for name, value in refusal.headers.items()]
        status, body = error_reply(refusal, self.path, self.headers, request_id)
        self.respond(status, body, (*own, *lines))

    @property
    def answering(self) -> bool:
        """Part of the answer itself is written: an error can no longer take its place."""
        return self.begun and self.comments is None


def caller_address(transport: asyncio.BaseTransport | None) -> str:
    """The address of a connection's other side; of IPv6 the network, which one host may fill with addresses of its
    own."""
    peer = None if transport is None else transport.get_extra_info("peername")
    return _network(str(peer[0])) if isinstance(peer, tuple) and peer else UNKNOWN


@lru_cache(maxsize=4096)
def _network(address: str) -> str:
    if ":" not in address:
        return address
    known = IPv6Address(address)
    return str(known.ipv4_mapped or IPv6Network((known.packed, 64), strict=False))


def failure_of(refusal: ApiError) -> Failure:
    return Failure(
        FailureKind.SERVER, refusal.message, refusal.status, refusal.type, code=refusal.code, param=refusal.param
    )


def rendered(status: int, body: bytes, lines: Iterable[str], method: str, keep_alive: bool) -> bytes:
    """A complete reply; without the body in answer to HEAD."""
    head = [
        f"HTTP/1.1 {status} {REASONS.get(status, 'Error')}",
        date_line(),
        "content-type: application/json",
        f"content-length: {len(body)}",
        "server: firsttoken",
        *lines,
        "" if keep_alive else "connection: close\r\n",
    ]
    return ("\r\n".join(head) + "\r\n").encode("latin-1") + (b"" if method == "HEAD" else body)


def date_line() -> str:
    """The header of every reply (RFC 9110, section 6.6.1)."""
    return _date_line(int(time()))


@lru_cache(1)
def _date_line(second: int) -> str:
    return f"date: {formatdate(second, usegmt=True)}"


def framing_error(headers: Mapping[str, str], http11: bool, max_body: int) -> ApiError | None:
    """The reason to refuse a body by the head alone."""
    if (host := headers.get("host")) is not None and HOST.fullmatch(host) is None:
        return ApiError(400, "The request is not valid HTTP: invalid Host header.", close=True)
    coding = headers.get("transfer-encoding")
    if coding is not None and not http11:  # RFC 9112, section 6.1
        return ApiError(400, "Transfer-Encoding is not part of HTTP/1.0.", close=True)
    if coding is not None and coding.lower() != "chunked":
        return ApiError(400, "The only Transfer-Encoding accepted is chunked.", close=True)
    if headers.get("content-encoding", "identity").lower() != "identity":
        message = "Compressed request bodies are not accepted; send it without Content-Encoding."
        return ApiError(415, message, close=True)
    return too_large(max_body) if int(headers.get("content-length", 0)) > max_body else None


def refuse_repeated_keys(names: Iterable[str]) -> None:
    """Raises ApiError for a second header with an API key: a proxy in front may have checked the first."""
    for name, times in Counter(names).items():
        if times > 1 and name in KEY_HEADERS:
            raise ApiError(400, f"The header {name} is there {times} times; send it once.", close=True)


def too_large(max_body: int) -> ApiError:
    return ApiError(413, f"The body is larger than {max_body} bytes.", code="request_too_large", close=True)
