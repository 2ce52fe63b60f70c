"""Decompresses a reply in passing. The gateway asks for no compression; some servers compress all the same.

A reply has to be read to be judged: an error within a status 200, counts of cached tokens, the gateway's own key.
"""

from __future__ import annotations

import zlib

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
