"""Human units in policies: durations as `250ms`, `2s`, `5m`; shares as `3%`; sizes as `32MB`.

Each is an annotated float or int that pydantic validates, so models read as the YAML does.

Rules:
- A duration always names its unit: `budget: 800` could be ms or s.
- An error message shows the right form.
- The JSON Schema allows exactly the forms that validation allows, so editors agree with `check`.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, WithJsonSchema

_UNITS = {"us": (1, 1_000_000), "ms": (1, 1_000), "s": (1, 1), "m": (60, 1), "h": (3600, 1)}  # s, as a fraction
_SIZES = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_NUMBER = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z%]*)\s*")


def _split(value: str, example: str) -> tuple[float, str]:
    match = _NUMBER.fullmatch(value)
    if match is None:
        raise ValueError(f"'{value}' is not understood; write it like {example}")
    return float(match[1]), match[2]


def seconds(value: Any) -> Any:
    """`250ms` -> 0.25. A bare number is refused: it has no unit."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        raise ValueError(f"{value} has no unit; write '{value}ms' or '{value}s'")
    if not isinstance(value, str):
        raise ValueError("write a duration like 250ms, 2s or 5m")
    number, unit = _split(value, "250ms, 2s or 5m")
    if unit not in _UNITS:
        raise ValueError(f"'{value}' has no unit of time; write it like 250ms, 2s or 5m")
    times, parts = _UNITS[unit]
    return number * times / parts  # 700 * 0.001 is not 0.7


def share(value: Any) -> Any:
    """`3%` -> 0.03; a number from 0 to 1 is unchanged."""
    if isinstance(value, bool):
        raise ValueError("write a share like 3% or 0.03")
    if not isinstance(value, str):
        return value
    number, unit = _split(value, "3% or 0.03")
    if unit not in ("%", ""):
        raise ValueError(f"'{value}' is not a share; write it like 3% or 0.03")
    return number / 100 if unit else number


def size(value: Any) -> Any:
    """`32MB` -> 32000000; a bare number is bytes."""
    if isinstance(value, bool):
        raise ValueError("write a size like 32MB")
    if not isinstance(value, str):
        return value
    number, unit = _split(value, "32MB")
    if unit.upper() not in _SIZES and unit:
        raise ValueError(f"'{value}' has no unit of size; write it like 32MB")
    return int(number * _SIZES[unit.upper() or "B"])


def _text(description: str, pattern: str) -> dict[str, Any]:
    return {"type": "string", "pattern": pattern, "description": description}


_DURATION = _text("a duration: 250ms, 2s, 5m", r"^\s*\d+(\.\d+)?\s*(us|ms|s|m|h)\s*$")
_SHARE = _text("a share: 3%, or 0.03", r"^\s*\d+(\.\d+)?\s*%?\s*$")
_SIZE = _text("a size: 32MB; a bare number is bytes", r"^\s*\d+(\.\d+)?\s*([KkMmGg]?[Ii]?[Bb])?\s*$")

Duration = Annotated[float, BeforeValidator(seconds), WithJsonSchema(_DURATION)]
Share = Annotated[
    float, BeforeValidator(share), WithJsonSchema({"anyOf": [{"type": "number", "minimum": 0, "maximum": 1}, _SHARE]})
]
Size = Annotated[int, BeforeValidator(size), WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 0}, _SIZE]})]
