"""Limits of each caller of the data port: sizes, times, and the errors of a request beyond them.

Limits over all callers together are in `gateway.downstream.intake`.
"""

from __future__ import annotations

from dataclasses import dataclass

from aiohttp.http_exceptions import HttpProcessingError, LineTooLong

from gateway.api.api_error import ApiError

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
