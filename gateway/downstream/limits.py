"""Limits of each caller of the data port: sizes, times, and the errors of a request beyond them.

Beside them stand bounds of the data port's memory over all callers together, and counts of what was refused before its
body. A bound for one caller times the number of callers is no bound. A connection carries one request at a time, so the
bound of connections is that of requests in progress too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from aiohttp.http_exceptions import HttpProcessingError, LineTooLong
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from gateway.api.api_error import ApiError, retry_later
from gateway.observe.metrics.series import counter, gauge

MAX_BODY = 32 * 1024 * 1024  # bytes, by default
MAX_LINE = 16 * 1024  # bytes of a request line or a header
MAX_HEADERS = 128
MAX_HEAD = 24 * 1024  # bytes of all lines together; a head in memory takes twice as much
BODY_RATE = 8 * 1024  # bytes/s: a byte that has arrived gives a body so much more time to be complete
MAX_FRAMING = 2 * MAX_HEAD  # bytes of head, chunk sizes, extensions and trailers, beyond one for each byte of body


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Limits for a caller, in seconds."""

    head: float = 15.0  # first to last byte of a head
    body: float = 60.0  # without a byte of the body, and in all beyond the time that BODY_RATE gives
    idle: float = 75.0  # between requests; longer than idle timeouts of common load balancers (60 s)
    unread: float = 60.0  # to read the rest of the last answer
    linger: float = 2.0  # to stop sending after a refusal; closing at once resets the connection and loses the reply


DEFAULT_TIMEOUTS = Timeouts()


def body_deadline(limit: float, began: float, now: float, received: int) -> float:
    """The time until which more of a body must arrive: slow links are waited for, but no drip of bytes."""
    return min(now + limit, began + limit + received / BODY_RATE)


def is_mostly_framing(received: int, content: int) -> bool:
    """True where `content` bytes of body came in so many more bytes that only framing can explain these."""
    return received - content > MAX_FRAMING + content


def protocol_error(error: HttpProcessingError) -> ApiError:
    """431 for a head too long, else 400 with the parser's reason."""
    if isinstance(error, LineTooLong) or error.message == "Too many headers received":
        return head_too_long()
    reason = (error.message.strip() or "it could not be parsed").splitlines()[0].rstrip(":.")
    return ApiError(400, f"The request is not valid HTTP: {reason}.")


def body_too_slow(limit: float) -> ApiError:
    message = f"The body stopped for {limit:g} s, came slower than {BODY_RATE // 1024} KiB/s, or has an invalid chunk."
    return ApiError(408, message, close=True)


def head_too_long() -> ApiError:
    """431 (RFC 6585, section 5)."""
    limits = (
        f"{MAX_LINE // 1024} KiB for the request line or a header, {MAX_HEADERS} headers, {MAX_HEAD // 1024} KiB in all"
    )
    return ApiError(431, f"The request head is too long: at most {limits}.", close=True)


def too_much_framing() -> ApiError:
    """413 for a chunked body with more than MAX_FRAMING around the content."""
    return ApiError(413, "The chunks of the body are too small, or their extensions or trailers too long.", close=True)


MAX_CONNECTIONS = 10_000
MAX_BODY_BYTES = 256_000_000
SMALL_BODY = 64 * 1024  # bytes; counted, but never refused: a bound filled by large bodies stops no short prompt
LINGERING = 1000  # refused connections that are given the time to read the refusal
RETRY_AFTER = 1.0  # s


class Intake(Collector):
    """Connections open, and bytes of bodies of requests in progress."""

    def __init__(self, max_connections: int = MAX_CONNECTIONS, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        self.max_connections, self.max_body_bytes = max_connections, max_body_bytes
        self.connections = self.body_bytes = 0
        self.refused = counter("firsttoken_intake_refused_total")
        for reason in ("connections", "bodies", "head"):
            self.refused.of[(reason,)].value = 0.0

    def too_many_connections(self) -> ApiError:
        """The reason to refuse a connection above `max_connections`."""
        return self.busy("connections", f"All {self.max_connections} connections of the gateway are in use")

    def too_many_bytes(self, size: int, more: int = 0) -> ApiError | None:
        """The reason to refuse a body of `size` bytes, of which `more` are not counted yet."""
        if size <= SMALL_BODY or self.body_bytes + more <= self.max_body_bytes:
            return None
        return self.busy("bodies", "The gateway's memory for request bodies is in use")

    def busy(self, reason: str, message: str) -> ApiError:
        self.count_refused(reason)
        headers = retry_later(RETRY_AFTER)
        return ApiError(
            503, f"{message}; try again.", type="server_error", code="overloaded", headers=headers, close=True
        )

    def count_refused(self, reason: str) -> None:
        self.refused.of[(reason,)].value += 1

    def collect(self) -> Iterable[Metric]:
        yield gauge("firsttoken_connections", [((), self.connections)])
        yield gauge("firsttoken_body_bytes", [((), self.body_bytes)])
        yield from self.refused.collect()
