"""Header fields: written, and read as the C parser collects them.

`dict.__setitem__` of a plain dict is what the parser calls for each field: no Python frame of ours a field.
Of repeated fields the last counts; none that either side acts on may be repeated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

REMEMBERED = 1024  # names in lower case; most are the same, and a look-up costs a third of decoding

_names: dict[bytes, str] = {}


def readable(raw: Mapping[bytes, bytes]) -> dict[str, str]:
    """With names in lower case."""
    return {_names.get(name) or _lower(name): value.decode("latin-1") for name, value in raw.items()}


def lines(fields: Iterable[tuple[str, str]]) -> str:
    """As they are sent. Raises ValueError where one would begin another line."""
    each = [f"{name}: {value}\r\n" for name, value in fields]
    text = "".join(each)
    if text.count("\n") != len(each) or text.count("\r") != len(each):
        raise ValueError("a header of this request holds a line break")
    return text


def _lower(name: bytes) -> str:
    lower = name.decode("latin-1").lower()
    if len(_names) < REMEMBERED:
        _names[name] = lower
    return lower
