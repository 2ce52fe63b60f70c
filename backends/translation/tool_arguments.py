"""Arguments of tool calls as objects, which Anthropic's `input` always is; a chat's arguments are any text.

- Arguments that are a JSON object are that object. None at all are an empty object.
- All other arguments (half JSON, a list, a scalar) are wrapped as they were written: `{"arguments": "<the text>"}`. A
  text can be wrapped piece by piece, so that a stream is wrapped on arrival.

Beside them, parts of content that both chat completions and Anthropic's Messages hold: data URLs, documents, reasoning.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from backends.translation.translation import Json

WRAPPER = "arguments"  # member that holds the text of arguments that are no object
WHITESPACE = " \t\n\r"  # of JSON

_OUTSIDE_STRINGS = re.compile(r'["{}\[\]]')
_INSIDE_STRINGS = re.compile(r'["\\]')
_DEPTH = {"{": 1, "[": 1, "}": -1, "]": -1}
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode


def parsed_object(arguments: Any) -> Json | None:
    """The object that the arguments are; None: they are another value, or no JSON."""
    if isinstance(arguments, str):
        arguments = _parsed(arguments) if arguments.strip(WHITESPACE) else {}
    return {} if arguments is None else arguments if isinstance(arguments, dict) else None


def _parsed(text: str) -> Any:
    try:
        value = _decode(text)
    except (ValueError, RecursionError):
        return text
    return text if value is None else value


def as_object(arguments: Any) -> Json:
    """The object that the arguments are, or an object with their text."""
    found = parsed_object(arguments)
    if found is not None:
        return found
    return {WRAPPER: arguments if isinstance(arguments, str) else _encode(arguments).decode()}


class JsonEnd:
    """Finds the end of a JSON object, array or string in a text that arrives in pieces."""

    __slots__ = ("_begun", "_depth", "_escaped", "_in_string")

    def __init__(self) -> None:
        self._begun = self._in_string = False
        self._escaped = False  # the next character, which begins the next piece
        self._depth = 0

    @property
    def is_complete(self) -> bool:
        return self._begun and not self._in_string and self._depth <= 0

    def feed(self, text: str) -> None:
        place = int(self._escaped and text != "")
        self._escaped = self._escaped and not text
        while sign := (_INSIDE_STRINGS if self._in_string else _OUTSIDE_STRINGS).search(text, place):
            place = self._read(sign[0], sign.end())
        self._escaped = self._escaped or place > len(text)

    def _read(self, sign: str, place: int) -> int:
        """Place of the next character to look at."""
        if sign == "\\":
            return place + 1
        self._begun = True
        self._in_string ^= sign == '"'
        self._depth += _DEPTH.get(sign, 0)
        return place


class StreamedObject:
    """Makes the text of an object of arguments that arrive in pieces."""

    __slots__ = ("_ahead", "_close")

    def __init__(self) -> None:
        self._ahead: list[str] = []  # whitespace ahead of the first character
        self._close: str | None = None  # text that ends the object; None: not begun

    @property
    def is_wrapped(self) -> bool:
        return bool(self._close)

    def feed(self, text: str) -> str:
        """Return the text to write for a piece."""
        if self._close is None:
            self._ahead.append(text)
            first = text.lstrip(WHITESPACE)[:1]
            if not first:
                return ""
            text = "".join(self._ahead)
            self._close = "" if first == "{" else '"}'
            if self.is_wrapped:
                return f'{{"{WRAPPER}":"' + _escaped(text)
        return _escaped(text) if self.is_wrapped else text

    def close(self) -> str:
        """Return the text that ends the object."""
        return self._close or ""


def _escaped(text: str) -> str:
    """Characters of a JSON string."""
    return _encode(text).decode()[1:-1]


PDF_NAME = "document.pdf"  # of a document without a title: OpenAI asks for a name
_DATA_URL = re.compile(r"data:([\w.+-]+/[\w.+-]+)(?:;[\w=.+-]+)*;base64,", re.ASCII)


def split_data_url(url: str) -> tuple[str, str] | None:
    """Media type and base64 data of a data URL; None: another URL."""
    match = _DATA_URL.match(url)
    return None if match is None else (match[1], url[match.end() :])


def data_url(media_type: str, data: str) -> str:
    return f"data:{media_type};base64,{data}"


def reasoning_detail(block: Mapping[str, Any], index: int) -> Json:
    """A block of thinking as OpenRouter's `reasoning_details` (openrouter.ai/docs, reasoning tokens)."""
    detail: Json = {"index": index, "format": "anthropic-claude-v1"}
    if block["type"] == "thinking":
        return {"type": "reasoning.text", "text": block["thinking"], "signature": block.get("signature", ""), **detail}
    return {"type": "reasoning.encrypted", "data": block["data"], **detail}
