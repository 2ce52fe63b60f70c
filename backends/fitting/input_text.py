"""Decodes the raw text in function arguments of the form `{"input": "..."}`, whole or streamed."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec

_decode = msgspec.json.Decoder().decode
_BEGIN = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_MAY_BEGIN = re.compile(r'\s*(?:\{\s*(?:"(?:i(?:n(?:p(?:u(?:t(?:"\s*(?::\s*)?)?)?)?)?)?)?)?)?')
# Characters of a string that can be decoded by themselves: no half escape at the end, no half of a pair.
_WHOLE = re.compile(
    r'(?:[^"\\]|\\["\\/bfnrt]|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}'
    r"|\\u(?![dD][89abAB])[0-9a-fA-F]{4})*+"
)


def input_of(arguments: Any) -> str:
    """The text of whole arguments; arguments of another form are the text."""
    if isinstance(arguments, str):
        try:
            read = _decode(arguments)
        except (ValueError, RecursionError):
            return _begun(arguments)
    else:
        read = arguments
    if isinstance(read, dict) and isinstance(read.get("input"), str):
        return str(read["input"])
    if isinstance(arguments, str):
        return arguments
    return "" if arguments is None else msgspec.json.encode(arguments).decode()


def _begun(arguments: str) -> str:
    """The text of truncated arguments."""
    begin = _BEGIN.match(arguments)
    if begin is None:
        return arguments
    whole = _WHOLE.match(arguments, begin.end())
    return _unescaped(whole[0]) if whole else ""


def _unescaped(text: str) -> str:
    return str(_decode(f'"{_CONTROL.sub(_escape, text)}"'))


_CONTROL = re.compile(r"[\x00-\x1f]")


def _escape(found: re.Match[str]) -> str:
    return f"\\u{ord(found[0]):04x}"


class InputText:
    """Decodes streamed text on arrival. `keep`: receives held text and limits its size."""

    def __init__(self, keep: Callable[[str], None]) -> None:
        self._keep = keep
        self._held = ""  # arguments not yet decoded
        self._in_text = self._ended = self._is_other = False

    def feed(self, text: str) -> str:
        if self._ended or not text:
            return ""
        self._held += text
        if not self._in_text and not self._begin():
            self._keep(text)
            return ""
        whole = _WHOLE.match(self._held)
        assert whole is not None  # also matches the empty string
        self._held = self._held[whole.end() :]
        self._ended = self._held.startswith('"')
        return _unescaped(whole[0])

    def close(self) -> str:
        """The text of arguments of another form, which were held."""
        held, is_text = self._held, self._in_text or self._ended
        self._held, self._ended = "", True
        return "" if is_text else input_of(held) if held else ""

    def _begin(self) -> bool:
        begin = None if self._is_other else _BEGIN.match(self._held)
        if begin is None:
            self._is_other = self._is_other or _MAY_BEGIN.fullmatch(self._held) is None
            return False
        self._held, self._in_text = self._held[begin.end() :], True
        return True
