"""Masks what no caller may learn from an answer: counts of cached tokens, the API key.

- A backend without separate caches per tenant would reveal the prompts of other tenants. Within `usage` and `timings`
  every number under a name with `cache` becomes 0, padded with blanks.
- Some backends quote the gateway's API key in an error with status 200. The key becomes asterisks, in error objects
  alone: a good answer passes unchanged, whatever the key. A placeholder is no key (`backends.scrubbing`).
- Masking keeps the length, so content-length and framing stay right.
- Bytes are held back only while an incomplete key may have to go.
"""

from __future__ import annotations

import re
from typing import Protocol

import msgspec

from backends.failures import decode_leniently
from backends.interface import Failure
from backends.scrubbing import is_secret


class RewritingError(Exception):
    """A rewriter cannot go on. `failure`: of the answer."""

    failure: Failure


class Rewriter(Protocol):
    """Rewrites the body of an answer in passing. Its methods may raise RewritingError."""

    def feed(self, data: bytes) -> bytes:
        """Return the bytes ready to be sent."""

    def drop(self) -> bytes:
        """Forget the held bytes. Returns the end of an event that has passed in part."""

    def close(self) -> bytes:
        """End the body; return the held bytes."""


# --------------------------------------------------------------------------- the API key


ERROR_LIMIT = 1 << 20  # bytes of an answer that is decoded to find an error object; a longer one must begin as one
_BEGINS_AS_ERROR = re.compile(rb'\s*+(?:\[\s*+)?+\{\s*+"error"\s*+:\s*+(?:\{\s*+"|"[^"])').match


def mask_error_body(body: bytes, secret: bytes) -> bytes:
    """Mask the API key in a whole answer, if the answer is an error object. A placeholder is not masked."""
    return mask_secret(body, secret) if secret and secret in body and _is_error(body) else body


def mask_secret(error: bytes, secret: bytes) -> bytes:
    """Mask the API key in bytes of an error."""
    return error.replace(secret, b"*" * len(secret)) if is_secret(secret.decode()) else error


def _is_error(body: bytes) -> bool:
    if (begins := _BEGINS_AS_ERROR(body) is not None) or len(body) > ERROR_LIMIT:
        return begins
    try:
        decoded = decode_leniently(body)
    except ValueError:
        return False
    value = decoded[0] if isinstance(decoded, list) and decoded else decoded  # Gemini wraps errors in a list
    return isinstance(value, dict) and bool(value.get("error"))


class SecretMasker:
    """Masks the API key in an answer without a stream, if the answer is an error object.

    The first read is the whole answer, or the beginning of an answer above ERROR_LIMIT.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._is_error: bool | None = None  # None: nothing is read yet
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        if self._is_error is None:
            quoted = bool(self._secret) and self._secret in data
            self._is_error = _BEGINS_AS_ERROR(data) is not None or (quoted and _is_error(data))
        if not self._is_error:
            return data
        data = mask_secret(self._held + data, self._secret)
        end = len(data) if data.endswith(b"}") else self._start_of_partial_secret(data)
        self._held = data[end:]
        return data[:end]

    def drop(self) -> bytes:
        self._held = b""
        return b""

    def close(self) -> bytes:
        rest, self._held = self._held, b""
        return rest

    def _start_of_partial_secret(self, data: bytes) -> int:
        least = max(len(data) - len(self._secret) + 1, 0)
        starts = (start for start in range(least, len(data)) if self._secret.startswith(data[start:]))
        return next(starts, len(data))


# --------------------------------------------------------------------------- counts of cached tokens

_SECTIONS = (b"usage", b"timings")  # members in which servers report tokens; `timings` is llama.cpp's
_NAME_LIMIT = 256  # bytes of a member's name as written; longer strings are no names of counts
_TOKEN = re.compile(rb'["{}\[\]:,]|[-\d][-+.\dEe]*')
# Outside of a section: all up to a string that may be the name of a section, or is torn.
_SKIPPED = re.compile(rb'(?:[^"]++|"(?!usage"|timings")[^"\\\r\n]*+"|"(?:[^"\\\r\n]++|\\[^\r\n])*+"(?=\s*+[,}\]]))*+')
_IN_STRING = re.compile(rb'(?:[^"\\\r\n]++|\\[^\r\n])*+')


class CachedCountMasker:
    """Masks the counts of cached tokens in an answer. `inner` rewrites the answer first.

    Reads JSON token by token, in whatever spelling and however cut into reads: nothing is held back, and the state is
    a few numbers. The lines of an event need no parser: no string of JSON contains a line end, and `data:` is no token.
    """

    def __init__(self, inner: Rewriter | None = None) -> None:
        self._inner = inner
        self._string: bytes | None = None  # the beginning of an open string
        self._escaping = False  # the open string ends in half an escape
        self._name: bytes | None = None  # the last string, if it may be a name
        self._next_section = b""  # expecting a value
        self._section = b""  # which is open
        self._depth = 0  # of objects and arrays in the section
        self._masked_depth = 0  # of the member whose numbers are masked; 0: none is
        self._in_number = False  # the last read has ended in a masked number

    def feed(self, data: bytes) -> bytes:
        if self._inner is not None:
            data = self._inner.feed(data)
        return data if self._is_plain(data) else self._mask(data)

    def close(self) -> bytes:
        return b"" if self._inner is None else self._mask(self._inner.close())

    def drop(self) -> bytes:
        return b"" if self._inner is None else self._inner.drop()

    def _is_plain(self, data: bytes) -> bool:
        """Whole events without a count, as nearly all are."""
        whole = self._string is None and self._is_outside and data.endswith((b"\n\n", b"\r\n\r\n"))
        return whole and b"cache" not in data.lower() and b"timings" not in data and b"\\u00" not in data

    @property
    def _is_outside(self) -> bool:
        return self._name is None and not (self._section or self._next_section)

    def _mask(self, data: bytes) -> bytes:
        masked, at = None, 0
        if self._in_number:
            at = len(data) - len(data.lstrip(b"-+.0123456789eE"))
            masked = bytearray(b" " * at + data[at:])
            self._in_number = at == len(data)
        while at < len(data):
            if self._string is not None:
                at = self._read_string(data, at)
                continue
            if self._is_outside and (skipped := _SKIPPED.match(data, at)) is not None:
                at = skipped.end()
            token = _TOKEN.search(data, at)
            if token is None:
                break
            at = token.end()
            if data[at - 1] in b'"{}[]:,':
                self._read_structure(data[at - 1 : at])
            elif self._masked_depth:
                masked = bytearray(data) if masked is None else masked
                masked[token.start() : at] = b"0".ljust(at - token.start())
                self._in_number = at == len(data)
        return data if masked is None else bytes(masked)

    def _read_string(self, data: bytes, at: int) -> int:
        """The place behind the part of an open string in `data`."""
        assert self._string is not None
        inside = _IN_STRING.match(data, at + self._escaping)
        assert inside is not None  # the pattern matches no bytes too
        end = inside.end()
        self._escaping = data[end : end + 2] == b"\\"
        end += self._escaping
        self._string = (self._string + data[at : min(end, at + _NAME_LIMIT)])[:_NAME_LIMIT]
        if end < len(data):  # at the quote; or at a line end, which no string has
            self._name = self._string if len(self._string) < _NAME_LIMIT else None
            self._string = None
            end += 1
        return end

    def _read_structure(self, token: bytes) -> None:
        name, self._name = self._name, None
        if token == b'"':
            self._string = b""
        elif token == b":":
            if name is not None:
                self._read_name(_unescaped(name))
        elif token in b"{[":
            if self._section or self._next_section:
                self._section, self._next_section = self._section or self._next_section, b""
                self._depth += 1
        else:
            self._next_section = b""
            self._depth -= token != b"," and bool(self._section)
            if self._depth < self._masked_depth or (token == b"," and self._depth == self._masked_depth):
                self._masked_depth = 0
            if not self._depth:
                self._section = b""

    def _read_name(self, name: bytes) -> None:
        """llama.cpp's `timings.prompt_n` counts the tokens that were not cached; the times tell the same."""
        if not self._section:
            self._next_section = name if name in _SECTIONS else b""
        elif not self._masked_depth and (
            b"cache" in name.lower() or (self._section == b"timings" and name.startswith(b"prompt_"))
        ):
            self._masked_depth = self._depth


def _unescaped(name: bytes) -> bytes:
    if b"\\" in name:
        try:
            return msgspec.json.decode(b'"%b"' % name, type=str).encode()
        except ValueError:
            pass
    return name
