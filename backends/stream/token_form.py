"""The form of token events: all bytes of an event but the text itself.

A server writes all tokens of an answer in the same form, so an event of a known form is compared, not parsed. Rules:
- A form is learned from a decoded event, and stands for events equal to it, byte for byte, but for the text.
- A text of a known form is UTF-8 and the inside of a JSON string. Escaped surrogates are left to a parser.
"""

from __future__ import annotations

import re

import msgspec

_TEXT_KEY = re.compile(rb'"(?:content|text)": ?"')
_IS_STRING = re.compile(
    rb'[^"\\\x00-\x1f]*'
    rb'(?:\\(?:["\\/bfnrt]|u(?:[0-9a-ce-fA-CE-F][0-9a-fA-F]|[dD][0-7])[0-9a-fA-F]{2})[^"\\\x00-\x1f]*)*'
).fullmatch
_encode = msgspec.json.Encoder().encode
_decode_text = msgspec.json.Decoder(str).decode


class TokenForm:
    """The form of the last learned event."""

    def __init__(self) -> None:
        self._prefix = b""  # bytes before the text
        self._suffix = b"\0"  # bytes after the text; no event ends with a NUL

    def text(self, data: bytes) -> bytes:
        """The text, as written, of an event of the known form; empty if `data` is anything else."""
        start, end = len(self._prefix), len(data) - len(self._suffix)
        if (
            data.endswith(self._suffix)
            and data.startswith(self._prefix)
            and start < end
            and _IS_STRING(data, start, end)
            and (data.isascii() or _is_utf8(data))
        ):
            return data[start:end]
        return b""

    def leading(self, data: bytes) -> tuple[list[bytes], int]:
        """The texts of the events of the known form with which `data` begins, and the bytes of these events. Empty
        where two of them follow after an event of another form: a parser reads all."""
        prefix, suffix = self._prefix, self._suffix
        if not data.startswith(prefix) or suffix not in data:
            return [], 0
        texts = data[len(prefix) :].split(suffix + prefix)
        last, ended, rest = texts.pop().partition(suffix)  # a text has no line end, as every suffix
        size = len(data) - (len(rest) if ended else len(prefix) + len(last))
        texts += [last] if ended else []
        # a space completes no escape: the texts are strings each, if they are one string together
        plain = all(texts) and _IS_STRING(b" ".join(texts)) and (data.isascii() or _is_utf8(data[:size]))
        return (texts, size) if plain else ([], 0)

    def texts(self, data: bytes) -> list[bytes]:
        """The texts of several events of the known form; empty if `data` holds anything else."""
        texts, size = self.leading(data) if data.endswith(self._suffix) else ([], 0)
        return texts if size == len(data) else []

    def learn(self, data: bytes, text: str | None = None) -> None:
        """Learn the form of `data`, an event with the effect of adding `text` and no other. None: any text."""
        keys = list(_TEXT_KEY.finditer(data))
        if len(keys) != 1 or b"\\" in data or data.count(b"\n") != 2:
            return
        start = keys[0].end()
        end = data.find(b'"', start)
        added = start < end if text is None else data[start:end] == text.encode()
        if added and data.startswith(b"data: ") and data.endswith(b"\n\n"):
            self._prefix, self._suffix = data[:start], data[end:]


def written(text: str) -> bytes:
    """The inside of a JSON string. Raises ValueError for a lone surrogate."""
    return _encode(text)[1:-1]


def read_text(written: bytes | bytearray) -> str:
    """The text of the inside of a JSON string."""
    return _decode_text(b'"' + written + b'"')


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
