"""Tells whether a text can be the beginning of a JSON document (RFC 8259).

Rules:
- The beginning of every JSON document is accepted, wherever the document is cut.
- Words before the value and after it, a fence (```json), a comment and a comma before a closing bracket are refused.
- Half surrogate pairs and repeated names are accepted: what a reader makes of them is not known here.
"""

from __future__ import annotations

import re
from enum import Enum

_SPACE = re.compile(r"[ \t\n\r]*")
_STRING = re.compile(r'"(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*"')
_CUT_STRING = re.compile(r'"(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*(?:\\(?:u[0-9a-fA-F]{0,3})?)?\Z')
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_CUT_NUMBER = re.compile(r"-?(?:(?:0|[1-9][0-9]*)(?:\.(?:[0-9]+(?:[eE][+-]?[0-9]*)?)?|[eE][+-]?[0-9]*)?)?\Z")
_WORDS = ("true", "false", "null")


class _Next(Enum):
    """The grammar's next part. The value: characters with which the part may begin, beside those of a value."""

    VALUE = ""
    VALUE_OR_END = "]"
    NAME = '"'
    NAME_OR_END = '"}'
    COLON = ":"
    COMMA_OR_END = ",]}"
    NOTHING = " "


def may_begin_json(text: str) -> bool:
    """Tell whether the text is the beginning of a JSON document, or the whole of one."""
    at, open_brackets, following = _skip(text, 0), list[str](), _Next.VALUE
    while at < len(text):
        char = text[at]
        if following in (_Next.VALUE, _Next.VALUE_OR_END) and char not in following.value:
            if char in "[{":
                open_brackets.append(char)
                following, end = (_Next.VALUE_OR_END if char == "[" else _Next.NAME_OR_END), at + 1
            else:
                following, end = _after(open_brackets), _end_of_scalar(text, at)
        elif char not in following.value:
            return False
        elif char == '"':
            following, end = _Next.COLON, _end_of_string(text, at)
        elif char in "]}":
            if not open_brackets or open_brackets.pop() + char not in ("[]", "{}"):
                return False
            following, end = _after(open_brackets), at + 1
        elif char == ":":
            following, end = _Next.VALUE, at + 1
        else:
            following, end = (_Next.VALUE if open_brackets[-1] == "[" else _Next.NAME), at + 1
        if end < 0:
            return False
        at = _skip(text, end)
    return True


def _after(open_brackets: list[str]) -> _Next:
    """Return the part that follows a value."""
    return _Next.COMMA_OR_END if open_brackets else _Next.NOTHING


def _skip(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return at if found is None else found.end()


def _end_of_scalar(text: str, at: int) -> int:
    """Return the end of a string, number or word, which the end of the text may cut; -1: there is none."""
    if text[at] == '"':
        return _end_of_string(text, at)
    if found := _CUT_NUMBER.match(text, at) if text[at] in "-0123456789" else None:
        return found.end()
    if found := _NUMBER.match(text, at):
        return found.end()
    rest = text[at : at + 5]
    return next((at + len(word) for word in _WORDS if rest.startswith(word) or word.startswith(text[at:])), -1)


def _end_of_string(text: str, at: int) -> int:
    found = _STRING.match(text, at) or _CUT_STRING.match(text, at)
    return -1 if found is None else found.end()
