"""Decompresses a reply in passing. The gateway asks for no compression; some servers compress all the same.

A reply has to be read to be judged: an error within a status 200, counts of cached tokens, the gateway's own key.
"""

from __future__ import annotations

import zlib

IDENTITY = "identity"
_AUTOMATIC, _RAW = 32 + zlib.MAX_WBITS, -zlib.MAX_WBITS  # gzip or zlib by the head; deflate without a head


class Decompressor:
    """Bounded: `limit` is the number of bytes that come out."""

    def __init__(self, limit: int) -> None:
        self._left = limit
        self._inflate = zlib.decompressobj(_AUTOMATIC)
        self._begun = False

    def feed(self, data: bytes) -> bytes:
        """Raises ValueError for malformed data, and beyond the limit."""
        if not self._begun and data:
            self._begin(data)
        try:
            found = self._inflate.decompress(data, self._left + 1)
        except zlib.error as error:
            raise ValueError(str(error)) from None
        self._left -= len(found)
        if self._left < 0:
            raise ValueError("the reply is larger than the gateway accepts")
        return found

    def _begin(self, data: bytes) -> None:
        """`deflate` is zlib by RFC 9110, and without a head at some servers."""
        self._begun = True
        has_head = data[0] == 0x1F or data[0] & 0x0F == 8
        if not has_head:
            self._inflate = zlib.decompressobj(_RAW)


def decompressor(coding: str, limit: int) -> Decompressor | None:
    """For the value of a content-encoding header; None: a coding that the gateway does not read."""
    return Decompressor(limit) if coding.strip().lower() in ("gzip", "x-gzip", "deflate") else None
