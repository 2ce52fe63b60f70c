"""JSON as strict as what we forward must be: parsed once, in C, and refused where parsers differ.

Refused: anything that RFC 8259 refuses (NaN, lone surrogates, UTF-16, trailing bytes), numbers
out of range, nesting deeper than MAX_DEPTH, and duplicate keys. The last matter because two
parsers may disagree about which one counts; what was parsed is what is forwarded, so a duplicate
would be dropped without a word.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

MAX_DEPTH = 200  # levels; the interpreter's own limit is met sooner when it is encoded, deeper in the stack

_decoder = msgspec.json.Decoder()
encode = msgspec.json.Encoder().encode


class BadJson(ValueError):
    """The body is not JSON that can be forwarded; str() says why, for the caller."""


def decode(data: bytes) -> Any:
    """The value of a JSON document. Raises BadJson."""
    try:
        value = _decoder.decode(data)
        _refuse_duplicates(data, value)
    except RecursionError:
        raise BadJson("it is nested too deeply") from None
    except UnicodeDecodeError:
        raise BadJson("it is not valid UTF-8") from None
    except msgspec.DecodeError as error:
        raise BadJson(_reason(data, error)) from None
    return value


def _reason(data: bytes, error: Exception) -> str:
    if not data:
        return "it is empty"
    # msgspec reports a lone surrogate as a truncation of the input, wherever it stands
    if "truncated" in str(error) and b"\\ud" in data.lower():
        return "a string holds a lone surrogate or a broken escape"
    return str(error).removeprefix("JSON is malformed: ")


def _refuse_duplicates(data: bytes, value: Any) -> None:
    """Members are counted in the text and in the parsed value; only where they differ is the slow parser asked.

    A member is written `":`, possibly with white space between; text may hold the same bytes,
    which costs a second parse and nothing else.
    """
    spaced = b" :" in data or b"\n:" in data or b"\t:" in data or b"\r:" in data
    if data.count(b'":') != _members(value) or spaced:
        json.loads(data, object_pairs_hook=_without_duplicates)


def _members(value: Any) -> int:
    """Counted level by level, so that their number is known too."""
    count, depth, level = 0, 0, [value]
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise BadJson("it is nested too deeply")
        below: list[Any] = []
        for item in level:
            if type(item) is dict:
                count += len(item)
                below += item.values()
            elif type(item) is list:
                below += item
        level = below
    return count


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        seen: set[str] = set()
        name = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise BadJson(f"the key {json.dumps(name)[:80]} appears twice in one object")
    return members
