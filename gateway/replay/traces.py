"""Traces: recorded traffic, as arrivals that can be played again.

Formats, told apart by their content:
- Mooncake JSONL: `timestamp` (ms), `input_length`, `output_length`, `hash_ids` (one per 512 tokens, chained).
- Azure CSV: `TIMESTAMP,ContextTokens,GeneratedTokens`; it knows nothing of prefixes, so every prompt is its own.
- our own access log (gateway.observe.record): `wall`, `route`, `prompt_tokens_reported` or `_estimated`,
  `output_tokens`, and `prefix`, which is base64 of 64-bit hashes, one per 512 tokens, chained.

Rules:
- Times begin at 0 and ascend. Timestamps that were rounded to a tick (several arrivals at one time) are
  spread evenly at random within it (`spread`): Mooncake's ticks hold ten requests, which no gateway saw at once.
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
from itertools import groupby, islice
from pathlib import Path
from random import Random
from typing import Any

BLOCK = 512  # tokens that one hash of a trace stands for
AZURE = ["timestamp", "contexttokens", "generatedtokens"]
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


def read_trace(path: Path, limit: int | None = None) -> list[Arrival]:
    """The arrivals in order of time, all or those of the file's first `limit` requests. Raises TraceError."""
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            arrivals = list(islice(_parse(path, lines), limit))
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror}") from None
    if not arrivals:
        raise TraceError(f"{path}: no request in it can be played; each needs its prompt and output tokens")
    return _from_zero(arrivals)


def _parse(path: Path, lines: Iterable[str]) -> Iterator[Arrival]:
    csv = False
    for number, line in enumerate(lines, 1):
        if number == 1 and (csv := not line.lstrip().startswith("{")):
            if [name.strip().lower() for name in line.split(",")] != AZURE:
                raise TraceError(f"{path}:1: neither JSON lines nor a header TIMESTAMP,ContextTokens,GeneratedTokens")
        elif line.strip():
            try:
                arrival = _azure(line, number) if csv else _json(json.loads(line), number)
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
                raise TraceError(f"{path}:{number}: {_why(error)}; mend or remove the line") from None
            if arrival is not None:
                yield arrival


def _why(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"{error.args[0]} is missing"
    return "it is not JSON" if isinstance(error, json.JSONDecodeError) else str(error)


def _azure(line: str, number: int) -> Arrival:
    if line.count(",") != 2:
        raise ValueError("it has not three fields")
    when, prompt, output = line.split(",")
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
    """A line of our access log. A request that was never answered says nothing of its length, and is left out."""
    if "access_log_lines_lost" in row:
        return None
    prompt, output = row["prompt_tokens_reported"] or row["prompt_tokens_estimated"], row["output_tokens"]
    if not prompt or not output:
        return None
    packed = array("Q", b64decode(row["prefix"])) if row.get("prefix") else _own(number, int(prompt))
    return Arrival(float(row["wall"]), *_lengths(prompt, output), packed, str(row["route"]))


def _lengths(prompt: Any, output: Any) -> tuple[int, int]:
    return max(int(prompt), 1), max(int(output), 1)


def _own(number: int, prompt: int) -> array[int]:
    """Hashes that no other prompt has."""
    return array("Q", range(_UNIQUE * number, _UNIQUE * number + prompt // BLOCK))


def _from_zero(arrivals: Iterable[Arrival]) -> list[Arrival]:
    ordered = sorted(arrivals, key=lambda arrival: arrival.at)
    return [replace(arrival, at=arrival.at - ordered[0].at) for arrival in ordered]


def spread(arrivals: list[Arrival], seed: int) -> list[Arrival]:
    """Undo the rounding of timestamps to a tick, where there is one."""
    ticks = [(at, list(group)) for at, group in groupby(arrivals, key=lambda arrival: arrival.at)]
    if len(arrivals) < 2 * len(ticks) or len(ticks) < 2:
        return arrivals
    random, found = Random(seed), list[Arrival]()
    for (at, group), (later, _) in zip(ticks, [*ticks[1:], (2 * ticks[-1][0] - ticks[-2][0], [])], strict=True):
        found += [replace(arrival, at=at + random.random() * (later - at)) for arrival in group]
    return sorted(found, key=lambda arrival: arrival.at)


def at_load(arrivals: Iterable[Arrival], factor: float) -> list[Arrival]:
    """The same requests in `factor` times less time."""
    return [replace(arrival, at=arrival.at / factor) for arrival in arrivals]
