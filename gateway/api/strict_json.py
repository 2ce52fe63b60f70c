"""JSON as strict as what we forward must be: parsed once, in C, and refused where parsers differ.

Refused: anything that RFC 8259 refuses (NaN, lone surrogates, UTF-16, trailing bytes), numbers
out of range, nesting deeper than MAX_DEPTH, and duplicate keys. The last matters because two
parsers may disagree about which one counts: what is forwarded must hold none.

`decode` reads a document to its end. `members` reads an object's own members alone: what lies within
its arrays and objects is left as it is written (`Raw`), split but not judged. Nobody may pass that on
unless `decode` or `element` has accepted the same bytes.
"""

from __future__ import annotations

import json
import operator
import re
from typing import Any

import msgspec
from msgspec import Raw

MAX_DEPTH = 200  # levels; the interpreter's own limit is met sooner when it is encoded, deeper in the stack
UNREADABLE = (ValueError, msgspec.DecodeError, RecursionError)  # what `members` raises: `decode` says why

_COUNTLESS = frozenset({int, float, bool, type(None)})
_HIDDEN_COLON = re.compile(rb"\\u003[aA]")


class BadJson(ValueError):
    """The body is not JSON that can be forwarded; str() says why, for the caller."""


class _Name(str):
    """A key as it was written once: equal to no other, so that a dict keeps all of them."""

    __slots__ = ()
    __hash__ = object.__hash__
    __eq__ = object.__eq__
    __ne__ = object.__ne__


_Scalar = None | bool | int | float | str
_decoder = msgspec.json.Decoder()
_members = msgspec.json.Decoder(dict[_Name, _Scalar | list[Raw] | dict[_Name, Raw]], dec_hook=operator.call)
_scalars = msgspec.json.Decoder(dict[_Name, _Scalar], dec_hook=operator.call)
encode = msgspec.json.Encoder().encode


def decode(data: bytes | Raw, depth: int = MAX_DEPTH) -> Any:
    """The value of a JSON document of at most so many levels. Raises BadJson."""
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
    """An object's members: scalars are read, arrays and objects are lists and dicts of `Raw`. Raises UNREADABLE."""
    return _distinct(_members.decode(data))


def element(data: Raw, depth: int) -> Any:
    """What `decode` gives, at half the price for an object of scalars, which most messages are."""
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
    # msgspec reports a lone surrogate as a truncation of the input, wherever it stands
    if "truncated" in str(error) and b"\\ud" in data.lower():
        return "a string holds a lone surrogate or a broken escape"
    return str(error).removeprefix("JSON is malformed: ")


def _refuse_duplicates(data: bytes, value: Any, depth: int) -> None:
    """Every member is written with one colon, and of the other colons the strings hold as many as were written.

    So the text has more colons than the value where a member was lost, unless an escape stands for one: then the
    slow parser is asked. Counting takes 0.6 us for a KB; a search for `":` in all its spacings took 4.
    """
    colons = data.count(b":")
    members, strings = _count(value, depth)
    if colons == members:
        return
    if colons != members + "".join(strings).count(":") or (b"\\" in data and _HIDDEN_COLON.search(data)):
        json.loads(data, object_pairs_hook=_without_duplicates)


def _count(value: Any, most: int) -> tuple[int, list[str]]:
    """The members of all objects, and all strings. Level by level, so that their number is known too."""
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
            elif kind is list:  # token ids may be many: one stands for all, as for their level
                below += item[:1] if _COUNTLESS.issuperset(map(type, item)) else item
        level = below
    return count, strings


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        seen: set[str] = set()
        name = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise BadJson(f"the key {json.dumps(name)[:80]} appears twice in one object")
    return members
