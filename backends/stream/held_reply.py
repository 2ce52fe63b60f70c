"""The body of a reply before the commit: kept until it is worth passing on, or judged to be a failure.

Rules:
- The first visible output of a stream is told; so is a preamble too long to be held.
- A whole answer is held to its end, unless it is too long: a 200 may hold an error, a page of HTML or half an answer.
- Of an error reply the beginning is enough.

A reply is decompressed in passing. The gateway asks for no compression; some servers compress all the same.
A reply has to be read to be judged: an error within a status 200, counts of cached tokens, the gateway's own key.
"""

from __future__ import annotations

import zlib

from backends.failures import EMPTY, NOT_COMPRESSED, NOT_EVENTS, TOO_LARGE, TRUNCATED, of_body
from backends.interface import Failure, Tap

IDENTITY = "identity"
_AUTOMATIC, _RAW = 32 + zlib.MAX_WBITS, -zlib.MAX_WBITS  # gzip or zlib by the head; deflate without a head


class NotCompressedError(ValueError):
    """The data is in another coding than the header says."""


class Decompressor:
    """Bounded: `limit` bytes come out in all, and `at_once` of one read. What lies above is never expanded: it is an
    error, or dropped without one where the beginning is enough (`cut`)."""

    def __init__(self, limit: int, at_once: int | None = None, *, cut: bool = False) -> None:
        self._left = limit
        self._at_once = limit if at_once is None else at_once
        self._cut = cut
        self._full = False
        self._inflate = zlib.decompressobj(_AUTOMATIC)
        self._begun = False

    def feed(self, data: bytes) -> bytes:
        """Raises NotCompressedError for malformed data, and ValueError beyond the bounds."""
        if self._full or self._inflate.eof:  # zlib would keep every byte after the end
            return b""
        if not self._begun and data:
            self._begin(data)
        room = min(self._left, self._at_once)
        found = self._expand(data, room + 1)  # one byte more tells full from too much
        self._left -= len(found)
        return found if len(found) <= room else self._overflow(found[:room])

    def _expand(self, data: bytes, most: int) -> bytes:
        """zlib stops at `most` bytes: time and memory are bounded, whatever the read would expand to."""
        try:
            return self._inflate.decompress(data, most)
        except zlib.error as error:
            raise NotCompressedError(str(error)) from None

    def _overflow(self, beginning: bytes) -> bytes:
        if not self._cut:
            raise ValueError("the reply is larger than the gateway accepts")
        self._full = True
        return beginning

    def _begin(self, data: bytes) -> None:
        """`deflate` is zlib by RFC 9110, and without a head at some servers."""
        self._begun = True
        has_head = data[0] == 0x1F or data[0] & 0x0F == 8
        if not has_head:
            self._inflate = zlib.decompressobj(_RAW)


def decompressor(coding: str, limit: int, at_once: int | None = None, *, cut: bool = False) -> Decompressor | None:
    """For the value of a content-encoding header; None: a coding that the gateway does not read."""
    known = coding.strip().lower() in ("gzip", "x-gzip", "deflate")
    return Decompressor(limit, at_once, cut=cut) if known else None


MAX_HELD = 256 * 1024  # bytes before the first token; a longer preamble counts as an answer
ECHOES = 4  # Responses repeats instructions and tools in two events before the first token, in another spelling maybe
MAX_WHOLE = 1 << 20  # bytes held of a whole answer; a longer answer is passed on before its end
MAX_REWRITTEN = 64 << 20  # bytes of a rewritten answer, held whole: may contain images
PAGES = ("text/html", "application/xhtml")  # beginnings of content types of no answer
_LOOKED_AT = 256  # first bytes of a reply, by which a web page is told
MAX_ERROR = 64 * 1024  # bytes of an error reply to read
ENDLESS = 1 << 40  # bytes of a stream, which is not held
MAX_EXPANDED = 4 << 20  # bytes after decompression of one read of a stream, which are passed on in one call


class HeldReply:
    """Body of one reply, which `tap` reads. `content_type`: lower case; `to_the_end`: a whole answer is held whatever
    its length; `sent`: bytes of the request."""

    def __init__(
        self, tap: Tap, content_type: str, is_success: bool, stream: bool, sent: int, *, to_the_end: bool
    ) -> None:
        self.size = 0  # bytes
        self._parts: list[bytes] = []
        self._tap, self._is_success = tap, is_success
        self._stream, self._to_the_end = stream, to_the_end
        self._has_events = "event-stream" in content_type
        self._longest = MAX_HELD + ECHOES * sent

    def feed(self, data: bytes) -> Failure | bool:
        """True: the answer has begun, and its bytes are to be passed on."""
        if self._is_success or self.size < MAX_ERROR:
            self._parts.append(data)
            self.size += len(data)
        if not self._is_success:
            return False
        content, failure = self._tap.feed(data), self._tap.failure
        if not self._stream:
            return TOO_LARGE if self.size > MAX_REWRITTEN else self.size > MAX_WHOLE and not self._to_the_end
        if self._tap.spoiled:
            self._parts.pop()
        if failure is not None and not content:
            return failure
        if self._tap.spoiled:  # an error after a token in the same read: the answer has begun, and ended
            return True
        if self.size <= self._longest:
            return content
        return content or self._has_events or NOT_EVENTS

    @property
    def is_full(self) -> bool:
        """Of an error reply all is held that is read."""
        return self.size >= MAX_ERROR

    @property
    def is_page(self) -> bool:
        """Markup, whatever its content type: no server's answer, and no proxy's error in JSON."""
        return b"".join(self._parts)[:_LOOKED_AT].lstrip()[:1] == b"<"

    def take(self) -> bytes:
        """Return the bytes held, once."""
        data = b"".join(self._parts)
        self._parts = []
        return data

    def judge(self, secret: str) -> Failure | None:
        """Judge a reply that is over. None: a complete answer, be it without visible output."""
        if not self._stream:
            return self._tap.failure
        if self._tap.ended:
            return None
        return self._tap.failure or of_body(b"".join(self._parts), secret) or (TRUNCATED if self._tap.tokens else EMPTY)


def unread(error: ValueError) -> Failure:
    """Of a success that cannot be decompressed, or not within the bounds."""
    return NOT_COMPRESSED if isinstance(error, NotCompressedError) else TOO_LARGE


def reply_decompressor(coding: str, *, is_success: bool, stream: bool) -> Decompressor | None:
    """None: a coding that the gateway does not read."""
    if not is_success:
        return decompressor(coding, MAX_ERROR, cut=True)
    return decompressor(coding, ENDLESS, MAX_EXPANDED) if stream else decompressor(coding, MAX_REWRITTEN)
