"""Bodies of one connection: what refuses them, how they are read, and their bytes in `Intake`.

Rules:
- A body is not read where head and size alone are a reason to refuse the request.
- Bytes are counted while they are held.
- A body ends when it is complete, too large, too slow, or more framing than content.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

from aiohttp.streams import StreamReader

from backends.http.loop_aware_timer import LoopAwareTimer
from gateway.api.api_error import ApiError
from gateway.downstream.http_request import HttpRequest, framing_error, too_large
from gateway.downstream.limits import (
    Intake,
    Timeouts,
    body_deadline,
    body_too_slow,
    is_mostly_framing,
    too_much_framing,
)

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

Precheck = Callable[[HttpRequest], ApiError | None]


@dataclass(slots=True)
class Bounds:
    """Bounds of a server for all of its connections. `precheck` may refuse a request by the head alone. `max_body`, in
    bytes, may be set at any time."""

    max_body: int
    precheck: Precheck
    timeouts: Timeouts
    intake: Intake


class BodyReader:
    """Reads a body at a time. `content`: of the body that is being read."""

    __slots__ = ("_bounds", "_error", "_held", "content")  # idle connections have one each

    def __init__(self, bounds: Bounds) -> None:
        self.content: StreamReader | None = None
        self._held = 0  # bytes of the body in hand, counted in `Intake.body_bytes`
        self._bounds = bounds
        self._error: BaseException | None = None

    def hold(self, size: int) -> None:
        """Count `size` bytes for the request in hand. Raises ApiError where all bodies together are too large."""
        intake = self._bounds.intake
        intake.body_bytes += size - self._held
        self._held = size
        if intake.body_bytes > intake.max_body_bytes and (fault := intake.too_many_bytes(size)) is not None:
            raise fault

    def break_off(self, error: BaseException) -> None:
        """The body being read cannot be completed."""
        assert self.content is not None
        self._error = error
        self.content.feed_eof()

    async def read(self, request: HttpRequest, content: StreamReader, received: int) -> bytes:
        """Raises ApiError for a body to be refused, before reading if possible. `received`: bytes since the first one
        of the request."""
        max_body = self._bounds.max_body
        if request.method == "CONNECT":  # a 200 would promise a tunnel (RFC 9110, section 9.3.6)
            raise ApiError(405, "CONNECT is not supported.", close=True)
        if (fault := framing_error(request.headers, request.http11, max_body)) is not None:
            raise fault
        if not content.is_eof():
            self._admit(request)
            if request.headers.get("expect", "").lower() == "100-continue":  # RFC 9110, section 10.1.1
                request.writer.write(CONTINUE)
            return await self._collect(content)
        if "transfer-encoding" in request.headers and is_mostly_framing(received, content.total_bytes):
            raise too_much_framing()
        body = content.read_nowait()
        if len(body) > max_body:
            raise too_large(max_body)
        self.hold(len(body))
        return body

    def _admit(self, request: HttpRequest) -> None:
        """Raises ApiError where the body need not be read to know that the request will be refused."""
        intake = self._bounds.intake
        if (fault := self._bounds.precheck(request)) is not None:
            intake.count_refused("head")
            raise fault
        if request.method in ("GET", "HEAD"):  # RFC 9110, section 9.3.1
            raise ApiError(413, f"A {request.method} request takes no body.", close=True)
        declared = int(request.headers.get("content-length", 0))
        if (fault := intake.too_many_bytes(declared, declared)) is not None:
            raise fault

    async def _collect(self, content: StreamReader) -> bytes:
        body, timeout = bytearray(), self._bounds.timeouts.body
        max_body = self._bounds.max_body
        self.content = content
        try:
            async with LoopAwareTimer().timeout(timeout) as until:
                began = monotonic()
                while part := await content.readany():
                    body += part
                    if len(body) > max_body:
                        raise too_large(max_body)
                    self.hold(len(body))
                    until(body_deadline(timeout, began, monotonic(), len(body)))
        except TimeoutError:
            raise body_too_slow(timeout) from None
        finally:
            self.content = None
        if self._error is not None:
            raise self._error
        return bytes(body)
