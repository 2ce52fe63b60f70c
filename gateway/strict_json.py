"""Strict JSON: decoded once, in C, and refused wherever two parsers could differ.

Refused: all that RFC 8259 refuses (NaN, lone surrogates, UTF-16, trailing bytes), numbers out of range, nesting deeper
than MAX_DEPTH, and duplicate keys: parsers disagree about the key to use, so no duplicate is forwarded.

`too_many_elements` bounds the elements of a document before anything is decoded: msgspec decodes in one go, in which
no other thread runs.

`decode` validates a whole document. `members` reads only an object's own members: elements of arrays and members of
objects stay `Raw`, split but not validated, and may be forwarded only once `decode` or `element` has accepted the same
bytes.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Raw

MAX_DEPTH = 200  # levels; encoding meets the interpreter's limit sooner, deeper in the stack
MAX_MEMBERS = 60_000  # objects, arrays and members: 5 ms to decode
MAX_VALUES = 300_000  # values in all; numbers: 8 ms to decode
SHORT = 2 * MAX_MEMBERS  # bytes, too few for more: an array takes two
UNREADABLE = (ValueError, msgspec.DecodeError, RecursionError)  # raised by `members`; `decode` gives the reason

_COUNTLESS = frozenset({int, float, bool, type(None)})
_PART = 1 << 14  # bytes counted in one go, 0.3 ms at most
_HIDDEN_COLON = re.compile(rb"\\u003[aA]")


class BadJson(ValueError):
    """The body is no JSON fit to be forwarded; str() is the reason, for the caller."""


class _Name(str):
    """A key unequal to every other key: a dict keeps duplicates."""

    __slots__ = ()
    __hash__ = object.__hash__
    __eq__ = object.__eq__
    __ne__ = object.__ne__


_Scalar = None | bool | int | float | str
_decoder = msgspec.json.Decoder()
_members = msgspec.json.Decoder(dict[_Name, _Scalar | list[Raw] | dict[_Name, Raw]], dec_hook=operator.call)
_scalars = msgspec.json.Decoder(dict[_Name, _Scalar], dec_hook=operator.call)
encode = msgspec.json.Encoder().encode


def too_many_elements(data: bytes) -> bool:
    """True for a document of more than MAX_MEMBERS objects, arrays and members, or MAX_VALUES values.

    Counts what is outside of strings, in 15 us per KB of the smallest elements and until a bound is exceeded; text that
    holds few such marks is counted at once.
    """
    if len(data) <= SHORT or _has_few_marks(data):
        return False
    members = values = 0
    for part in _without_strings(data):
        members += _members_of(part)
        values += part.count(b",")
        if members > MAX_MEMBERS or values >= MAX_VALUES:
            return True
    return False


def _has_few_marks(data: bytes) -> bool:
    """Too few, counted within strings too: most bodies are text, and this takes a third of the time."""
    return _members_of(data) <= MAX_MEMBERS and (len(data) <= MAX_VALUES or data.count(b",") < MAX_VALUES)


def _members_of(data: bytes) -> int:
    return data.count(b"{") + data.count(b"[") + data.count(b":")


def _without_strings(data: bytes) -> Iterator[bytes]:
    """The bytes outside of strings, in parts."""
    at, within = 0, 0
    while at < len(data):
        part = data[at : at + _PART]
        if (len(part) - len(part.rstrip(b"\\"))) % 2:  # the last backslash escapes the next byte
            part = data[at : at + _PART + 1]
        at += len(part)
        pieces = part.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        yield b"".join(pieces[within::2])
        within ^= len(pieces) % 2 == 0


def decode(data: bytes | Raw, depth: int = MAX_DEPTH) -> Any:
    """The value of a JSON document of at most `depth` levels. Raises BadJson."""
    data = bytes(data)
    try:
        value = _decoder.decode(data)
        _refuse_duplicates(data, value, depth)
    except RecursionError:
        raise BadJson("it is nested too deeply") from None
    except UnicodeDecodeError:
        raise BadJson("it is not valid UTF-8") from None
    except msgspec.DecodeError as error:
        raise BadJson(_reason(data, error)) from None
    return value


def members(data: bytes) -> dict[str, Any]:
    """An object's members: scalars decoded, arrays and objects as lists and dicts of `Raw`. Raises UNREADABLE."""
    return _distinct(_members.decode(data))


def element(data: Raw, depth: int) -> Any:
    """`decode` at half the cost for an object of scalars, as most messages are."""
    try:
        return _distinct(_scalars.decode(data))
    except UNREADABLE:
        return decode(data, depth)


def _distinct(members: dict[_Name, Any]) -> dict[str, Any]:
    found = {str(name): _distinct(value) if type(value) is dict else value for name, value in members.items()}
    if len(found) != len(members):
        raise BadJson("a key appears twice in one object")
    return found


def _reason(data: bytes, error: Exception) -> str:
    if not data:
        return "it is empty"
    # msgspec reports a lone surrogate anywhere as truncated input
    if "truncated" in str(error) and b"\\ud" in data.lower():
        return "a string holds a lone surrogate or a broken escape"
    return str(error).removeprefix("JSON is malformed: ")


def _refuse_duplicates(data: bytes, value: Any, depth: int) -> None:
    """Raises BadJson for an object with two equal keys; msgspec has kept only the last.

    Each member is written with a colon; all other colons are within strings. So a document with a lost member has more
    colons than the value, unless a string escapes a colon: only then the slow parser decides. Counting takes 0.6 us per
    KB.
    """
    colons = data.count(b":")
    members, strings = _count(value, depth)
    if colons == members:
        return
    if colons != members + "".join(strings).count(":") or (b"\\" in data and _HIDDEN_COLON.search(data)):
        json.loads(data, object_pairs_hook=_without_duplicates)


def _count(value: Any, most: int) -> tuple[int, list[str]]:
    """Count the members of all objects, and collect all strings. Level by level, to bound the depth."""
    count, depth, level = 0, 0, [value]
    strings: list[str] = []
    while level:
        depth += 1
        if depth > most:
            raise BadJson("it is nested too deeply")
        below: list[Any] = []
        for item in level:
            kind = type(item)
            if kind is str:
                strings.append(item)
            elif kind is dict:
                count += len(item)
                strings += item
                below += item.values()
            elif kind is list and item:
                alike = type(item[0]) in _COUNTLESS and _COUNTLESS.issuperset(map(type, item))
                below += item[:1] if alike else item  # one of many token ids stands for all
        level = below
    return count, strings


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        seen: set[str] = set()
        name = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise BadJson(f"the key {json.dumps(name)[:80]} appears twice in one object")
    return members
