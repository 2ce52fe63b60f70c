"""Removes hidden data from an answer: unrequested usage, counts of cached tokens, the API key.

- The gateway asks every backend for usage. A caller who did not ask must not get the usage event.
- A backend without separate caches per tenant would reveal the prompts of other tenants. Every number under a key
  with `cache` in the name becomes 0, padded with blanks. Within text the quotes of such a key are escaped, and do not
  match.
- Some backends quote the gateway's API key in an error with status 200. The key becomes asterisks.
- Masking keeps the length, so content-length and framing stay right.
- Bytes are held back only while an incomplete key, number or event may have to go.
"""

from __future__ import annotations

import re
from typing import Any, Protocol

import msgspec

from backends.stream.taps import BOM, LINE_LIMIT


class Rewriter(Protocol):
    """Rewrites the body of an answer in passing."""

    def feed(self, data: bytes) -> bytes:
        """Return the bytes ready to be sent."""

    def drop(self) -> None:
        """Forget the held bytes."""

    def close(self) -> bytes:
        """End the body; return the held bytes."""


# --------------------------------------------------------------------------- the usage event

# Blank lines end events. Atomic, else the CR and LF of one line end could be read as two; and a CR as the last byte
# may be half of a line end.
BLANK_LINE = re.compile(rb"(?>\r\n|\n|\r(?!\Z)){2}")
_GAP = rb"(?:\s|data:)*"  # JSON may continue in the next data line
_NO_CHOICES = re.compile(rb'"choices"' + _GAP + b":" + _GAP + rb"\[" + _GAP + rb"\]")


class _MaskedChunk(msgspec.Struct, gc=False):
    choices: list[Any] | None = None
    usage: Any = None


_decode_chunk = msgspec.json.Decoder(_MaskedChunk).decode


class WholeEvents:
    """Holds back an incomplete event at the end of a read: no use to any client yet, and perhaps never to be whole."""

    def __init__(self) -> None:
        self._held = b""
        self._overflowed = False  # an event too large to be held has passed: all later bytes pass too

    def feed(self, data: bytes) -> bytes:
        if not self._held and data.endswith(b"\n\n"):
            return data
        return self._complete(data)

    def _complete(self, data: bytes) -> bytes:
        """All complete events."""
        if self._overflowed:
            return data
        search_from = max(len(self._held) - 3, 0)  # a blank line may have begun in the held bytes
        data = self._held + data
        end = max((blank.end() for blank in BLANK_LINE.finditer(data, search_from)), default=0)
        if len(data) - end > LINE_LIMIT:
            self._overflowed = True
            end = len(data)
        self._held = data[end:]
        return data[:end]

    def drop(self) -> None:
        self._held = b""

    def close(self) -> bytes:
        rest, self._held = self._held, b""
        return rest


class UsageStripper(WholeEvents):
    """Removes events with empty `choices` and a `usage`; all other complete events pass verbatim."""

    def feed(self, data: bytes) -> bytes:
        if self._held or not data.endswith(b"\n\n"):
            data = self._complete(data)
        return _without_usage(data) if b'"usage"' in data else data

    def close(self) -> bytes:
        return _without_usage(super().close())


def _without_usage(data: bytes) -> bytes:
    if b'"usage"' not in data or _NO_CHOICES.search(data) is None:
        return data
    ends = [blank.end() for blank in BLANK_LINE.finditer(data)]
    kept, start = [], 0
    for end in (*ends, len(data)):
        event, start = data[start:end], end
        if b'"usage"' in event and _is_usage(event):
            # The blank lines before stay: different reads attach blank lines to different events.
            event = event[: len(event) - len(event.lstrip(b"\r\n"))]
        kept.append(event)
    return b"".join(kept)


def _is_usage(event: bytes) -> bool:
    lines = [line[5:] for line in event.lstrip(b"\r\n").removeprefix(BOM).splitlines() if line.startswith(b"data:")]
    try:
        chunk = _decode_chunk(b"\n".join(lines))
    except (msgspec.DecodeError, RecursionError):
        return False
    return chunk.choices == [] and bool(chunk.usage)


# --------------------------------------------------------------------------- the API key


class SecretMasker:
    """Masks the API key in an answer without a stream."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        data = mask_secret(self._held + data, self._secret)
        end = len(data) if data.endswith(b"}") else self._start_of_partial_secret(data)
        self._held = data[end:]
        return data[:end]

    def drop(self) -> None:
        self._held = b""

    def close(self) -> bytes:
        rest, self._held = self._held, b""
        return rest

    def _start_of_partial_secret(self, data: bytes) -> int:
        least = max(len(data) - len(self._secret) + 1, 0)
        starts = (start for start in range(least, len(data)) if self._secret.startswith(data[start:]))
        return next(starts, len(data))


def mask_secret(data: bytes, secret: bytes) -> bytes:
    return data.replace(secret, b"*" * len(secret)) if secret else data


# --------------------------------------------------------------------------- counts of cached tokens

_COUNT_LIMIT = 256  # bytes from a key's opening quote to the end of the number
_NUMBER = rb"[-+.\dEe]"
_CACHE_COUNT = re.compile(rb'("\w*[Cc]ache\w*"\s*:\s*)(-?\d' + _NUMBER + rb"*)", re.ASCII)
_PARTIAL_COUNT = re.compile(rb'"\w*(?:"\s*(?::\s*' + _NUMBER + rb"*)?)?\Z", re.ASCII)


class CachedCountMasker:
    """Masks the counts of cached tokens in an answer. `inner` rewrites the answer first."""

    def __init__(self, inner: Rewriter | None = None) -> None:
        self._held = b""
        self._inner = inner

    def feed(self, data: bytes) -> bytes:
        if self._inner is not None:
            data = self._inner.feed(data)
        if not self._held and b"ache" not in data and data.endswith(b"\n\n"):
            return data  # whole events without such a key
        data = self._held + data
        partial = _PARTIAL_COUNT.search(data, max(len(data) - _COUNT_LIMIT, 0))
        end = len(data) if partial is None else partial.start()
        self._held = data[end:]
        return _mask_counts(data[:end])

    def drop(self) -> None:
        self._held = b""
        if self._inner is not None:
            self._inner.drop()

    def close(self) -> bytes:
        rest = self._held + (b"" if self._inner is None else self._inner.close())
        self._held = b""
        return _mask_counts(rest)


def _mask_counts(data: bytes) -> bytes:
    return _CACHE_COUNT.sub(lambda found: found[1] + b"0".ljust(len(found[2])), data)
