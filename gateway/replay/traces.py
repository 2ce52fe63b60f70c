"""Traces: recorded traffic, as arrivals that can be played again.

Formats, told apart by their content:
- Mooncake JSONL: `timestamp` (ms), `input_length`, `output_length`, `hash_ids` (one per 512 tokens, chained).
- Azure CSV: `TIMESTAMP,ContextTokens,GeneratedTokens`; it knows nothing of prefixes, so every prompt is its own.
- our own access log: JSON lines with `time`, `route`, `prompt_tokens`, `output_tokens`, and `prefix`.

Rules:
- Times begin at 0 and ascend. Timestamps that were rounded to a tick (several arrivals at one time) are
  spread evenly at random within it: Mooncake's ticks hold ten requests, which no gateway saw at once.
- `hashes` name the full blocks of a prompt, in order: equal hash, equal prefix up to there.
- A line that cannot be read is an error that names its number.
"""

from __future__ import annotations

import json
from array import array
from base64 import b64decode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import groupby
from pathlib import Path
from random import Random
from typing import Any

BLOCK = 512  # tokens that one hash of a trace stands for
_UNIQUE = 1 << 40  # hashes above it belong to prompts whose prefix is unknown


class TraceError(ValueError):
    """A trace that cannot be read, in words that name the line and the mend."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace. `hashes`: one per full block of `BLOCK` tokens of the prompt."""

    at: float  # s since the beginning of the trace
    prompt_tokens: int
    output_tokens: int
    hashes: Sequence[int] = ()
    route: str = ""  # "": whichever the trace is played on


def read_trace(path: Path, seed: int = 0) -> list[Arrival]:
    """All arrivals, in order of time. Raises TraceError."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from None
    if not lines:
        raise TraceError(f"{path}: the trace is empty")
    arrivals = list(_parse(path, lines))
    if not arrivals:
        raise TraceError(f"{path}: no request in it could be played: it needs prompt and output tokens")
    return _spread(_from_zero(arrivals), seed)


def _parse(path: Path, lines: Sequence[str]) -> Iterator[Arrival]:
    csv = not lines[0].lstrip().startswith("{")
    if csv and [name.strip().lower() for name in lines[0].split(",")] != ["timestamp", "contexttokens", "generatedtokens"]:
        raise TraceError(f"{path}: line 1: neither JSON lines nor a header TIMESTAMP,ContextTokens,GeneratedTokens")
    for number, line in enumerate(lines, 1):
        if (csv and number == 1) or not line.strip():
            continue
        try:
            arrival = _azure(line, number) if csv else _json(json.loads(line), number)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise TraceError(f"{path}: line {number}: {_why(error)}") from None
        if arrival is not None:
            yield arrival


def _why(error: Exception) -> str:
    return f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)


def _azure(line: str, number: int) -> Arrival:
    when, prompt, output = line.split(",")[:3]
    head, _, fraction = when.partition(".")
    at = datetime.fromisoformat(head).timestamp() + float(f"0.{fraction or 0}")
    return Arrival(at, *_lengths(prompt, output), _own(number, int(prompt)))


def _json(row: Mapping[str, Any], number: int) -> Arrival | None:
    if "hash_ids" in row or "input_length" in row:
        prompt, output = _lengths(row["input_length"], row["output_length"])
        ids = row.get("hash_ids")
        hashes = array("Q", (int(i) for i in ids[: prompt // BLOCK])) if ids else _own(number, prompt)
        return Arrival(float(row["timestamp"]) / 1e3, prompt, output, hashes, str(row.get("route", "")))
    return _logged(row, number)


def _logged(row: Mapping[str, Any], number: int) -> Arrival | None:
    """A line of our access log; requests that were never answered say nothing of their length."""
    if not row.get("output_tokens") or not (prompt := row.get("prompt_tokens") or row.get("prompt_tokens_estimated")):
        return None
    at = datetime.fromisoformat(row["time"]).timestamp()
    packed = array("Q", b64decode(row["prefix"])) if row.get("prefix") else _own(number, int(prompt))
    return Arrival(at, *_lengths(prompt, row["output_tokens"]), packed, str(row.get("route", "")))


def _lengths(prompt: Any, output: Any) -> tuple[int, int]:
    return max(int(prompt), 1), max(int(output), 1)


def _own(number: int, prompt: int) -> array[int]:
    """Hashes that no other prompt has."""
    return array("Q", range(_UNIQUE * number, _UNIQUE * number + prompt // BLOCK))


def _from_zero(arrivals: Iterable[Arrival]) -> list[Arrival]:
    ordered = sorted(arrivals, key=lambda arrival: arrival.at)
    return [replace(arrival, at=arrival.at - ordered[0].at) for arrival in ordered]


def _spread(arrivals: list[Arrival], seed: int) -> list[Arrival]:
    """Undo the rounding of timestamps to a tick."""
    ticks = [(at, list(group)) for at, group in groupby(arrivals, key=lambda arrival: arrival.at)]
    if len(arrivals) < 2 * len(ticks) or len(ticks) < 2:
        return arrivals
    random, spread = Random(seed), []
    for (at, group), (later, _) in zip(ticks, [*ticks[1:], (2 * ticks[-1][0] - ticks[-2][0], [])], strict=True):
        spread += [replace(arrival, at=at + random.random() * (later - at)) for arrival in group]
    return sorted(spread, key=lambda arrival: arrival.at)
