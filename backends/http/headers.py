"""HTTP/1.1 header fields: decoding of received ones, rendering of ones to be sent.

Of repeated fields the last counts; none that either side acts on may be repeated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def readable(raw: Mapping[bytes, bytes]) -> dict[str, str]:
    """Field values by lower-case name."""
    return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in raw.items()}


def header_lines(fields: Iterable[tuple[str, str]]) -> str:
    """Fields as lines of a request head. Raises ValueError for a line break within a field (header injection)."""
    lines = [f"{name}: {value}\r\n" for name, value in fields]
    text = "".join(lines)
    if text.count("\n") != len(lines) or text.count("\r") != len(lines):
        raise ValueError("a header of this request holds a line break")
    return text
