"""One HTTP/1.1 request of a caller, whole, and the writing of a whole reply to it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from gateway.api.api_error import REASONS, ApiError

if TYPE_CHECKING:
    from gateway.downstream.downstream_connection import DownstreamConnection


class HttpRequest:
    """`path` is as it was sent, without its query: no decoding that could hide another path. Header names are lower
    case; of repeated ones the last counts. `arrival`: monotonic s of the first byte. `fault`: why it is refused
    whatever it asks; its body is then not all there."""

    __slots__ = ("arrival", "begun", "body", "connection", "fault", "headers", "http11", "keep_alive", "method", "path")

    def __init__(
        self,
        connection: DownstreamConnection,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: bytes,
        arrival: float,
        http11: bool,
        keep_alive: bool,
        fault: ApiError | None = None,
    ) -> None:
        self.connection, self.method, self.path, self.headers, self.body = connection, method, path, headers, body
        self.arrival, self.http11, self.keep_alive, self.fault = arrival, http11, keep_alive, fault
        self.begun = False  # something of the answer is written

    def respond(self, status: int, body: bytes, lines: Iterable[str] = ()) -> None:
        """A JSON reply with these further header lines."""
        self.begun = True
        self.connection.write(rendered(status, body, lines, self.method, self.keep_alive))

    def refuse(self, refusal: ApiError, lines: Iterable[str] = ()) -> None:
        """An error reply; it closes the connection where the refusal says so."""
        if refusal.close:
            self.keep_alive = False
        said = (f"{name}: {value}" for name, value in refusal.headers.items())
        self.respond(refusal.status, refusal.body(), (*said, *lines))


def rendered(status: int, body: bytes, lines: Iterable[str], method: str, keep_alive: bool) -> bytes:
    """A whole reply; to HEAD without its body."""
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
    """What is refused by its framing alone. `size`: bytes of its body, or as many as it says that there will be."""
    if "transfer-encoding" in headers and not http11:  # RFC 9112, 6.1
        return ApiError(400, "Transfer-Encoding is not part of HTTP/1.0.", close=True)
    if headers.get("content-encoding", "identity").lower() != "identity":
        return ApiError(
            415, "Compressed request bodies are not accepted; send it without Content-Encoding.", close=True
        )
    return too_large(max_body) if size > max_body else None
