"""Arrivals of a replay: recorded traces, or synthetic agent sessions.

Trace formats, detected by content:
- Mooncake JSON lines: `timestamp` (ms), `input_length`, `output_length`, `hash_ids` (one per 512 tokens, chained).
- Azure CSV: `TIMESTAMP,ContextTokens,GeneratedTokens`, without prefix information: every prompt is unique.
- firsttoken access log (gateway.observe.record): `wall`, `route`, `prompt_tokens_reported` or `_estimated`,
  `output_tokens`, and `prefix` (base64 of chained 64-bit hashes, one per 512 tokens).

Rules:
- Times start at 0 and ascend. Timestamps rounded to a tick (several arrivals share one) are spread at random within
  the tick (`spread`): a Mooncake tick holds ten requests, which no gateway received simultaneously.
- `hashes` name the full blocks of a prompt in order: equal hash means equal prefix up to that block.
- A request that was shed, lost or left is offered load too: its answer gets the mean length of its route's.
- An unreadable line is an error with its line number.
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
from statistics import mean
from typing import Any

BLOCK = 512  # tokens per hash of a trace
AZURE = ["timestamp", "contexttokens", "generatedtokens"]
AGENTS = "synthetic:agents"
UNANSWERED = 0  # output tokens of a request whose answer is not known
USUAL_LENGTH = 256  # output tokens, where nobody was answered
_UNIQUE = 1 << 40  # hashes from here on belong to prompts with an unknown prefix


class TraceError(ValueError):
    """The trace cannot be read; the message names the line and the remedy."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request of a trace. `hashes`: a hash per full block of `BLOCK` prompt tokens.

    `session`: number of the session, from 1; 0: none. `think`: s that the caller takes between the end of the
    session's turn before and this turn. A turn that `follows` arrives then, whatever `at` says (closed loop).
    """

    at: float  # s since the start of the trace
    prompt_tokens: int
    output_tokens: int
    hashes: Sequence[int] = ()
    route: str = ""  # "": the trace names no route
    tenant: str = ""
    session: int = 0
    think: float = 0.0
    follows: bool = False


class SeenBlocks:
    """Blocks of all prompts so far."""

    def __init__(self) -> None:
        self._blocks: set[int] = set()

    def new_tokens(self, arrival: Arrival) -> int:
        """Tokens of an arriving prompt that no earlier prompt began with."""
        known = next((i for i, block in enumerate(arrival.hashes) if block not in self._blocks), len(arrival.hashes))
        self._blocks.update(arrival.hashes)
        return arrival.prompt_tokens - min(known * BLOCK, (arrival.prompt_tokens - 1) // BLOCK * BLOCK)


# ---------------------------------------------------------------- recorded


def read_trace(path: Path, limit: int | None = None) -> list[Arrival]:
    """Arrivals in time order, of the first `limit` requests of the file (None: all). Raises TraceError."""
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            arrivals = sorted(_answered(islice(_parse(path, lines), limit)), key=lambda arrival: arrival.at)
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror}") from None
    if not arrivals:
        raise TraceError(f"{path}: no usable request; each line needs its prompt and output tokens")
    return [replace(arrival, at=arrival.at - arrivals[0].at) for arrival in arrivals]


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
                raise TraceError(f"{path}:{number}: {_reason(error)}; fix or remove the line") from None
            if arrival is not None:
                yield arrival


def _reason(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"{error.args[0]} is missing"
    return "not valid JSON" if isinstance(error, json.JSONDecodeError) else str(error)


def _azure(line: str, number: int) -> Arrival:
    if line.count(",") != 2:
        raise ValueError("expected three fields")
    when, prompt, output = line.split(",")
    head, _, fraction = when.partition(".")
    at = datetime.fromisoformat(head).timestamp() + float(f"0.{fraction or 0}")
    return Arrival(at, *_lengths(prompt, output), _unique(number, int(prompt)))


def _json(row: Mapping[str, Any], number: int) -> Arrival | None:
    if "hash_ids" in row or "input_length" in row:
        prompt, output = _lengths(row["input_length"], row["output_length"])
        ids = row.get("hash_ids")
        hashes = array("Q", (int(i) for i in ids[: prompt // BLOCK])) if ids else _unique(number, prompt)
        return Arrival(float(row["timestamp"]) / 1e3, prompt, output, hashes, str(row.get("route", "")))
    return _logged(row, number)


def _logged(row: Mapping[str, Any], number: int) -> Arrival | None:
    """A line of the access log. `output_tokens` 0: the request was not answered to the end. What the caller did wrong
    is skipped, and so is what has no prompt."""
    if "access_log_lines_lost" in row or row.get("end") == "refused":
        return None
    prompt = row["prompt_tokens_reported"] or row["prompt_tokens_estimated"]
    answered = row.get("end", "completed") == "completed"
    if not prompt or (answered and not row["output_tokens"]):
        return None
    output = row["output_tokens"] if answered else UNANSWERED
    hashes = array("Q", b64decode(row["prefix"])) if row.get("prefix") else _unique(number, int(prompt))
    return Arrival(float(row["wall"]), max(int(prompt), 1), int(output), hashes, str(row["route"]))


def _answered(arrivals: Iterable[Arrival]) -> list[Arrival]:
    """Gives requests without an answer the mean length of the answers of their route, else of all."""
    found = list(arrivals)
    lengths: dict[str, list[int]] = {"": []}
    for arrival in found:
        if arrival.output_tokens != UNANSWERED:
            lengths[""].append(arrival.output_tokens)
            lengths.setdefault(arrival.route, []).append(arrival.output_tokens)
    means = {route: round(mean(known)) for route, known in lengths.items() if known}
    for i, arrival in enumerate(found):
        if arrival.output_tokens == UNANSWERED:
            length = means.get(arrival.route) or means.get("", USUAL_LENGTH)
            found[i] = replace(arrival, output_tokens=length)
    return found


def _lengths(prompt: Any, output: Any) -> tuple[int, int]:
    return max(int(prompt), 1), max(int(output), 1)


def _unique(number: int, prompt: int) -> array[int]:
    """Hashes of no other prompt."""
    return array("Q", range(_UNIQUE * number, _UNIQUE * number + prompt // BLOCK))


def spread(arrivals: list[Arrival], seed: int) -> list[Arrival]:
    """Undoes the rounding of timestamps to a tick, where there is one."""
    ticks = [(at, list(group)) for at, group in groupby(arrivals, key=lambda arrival: arrival.at)]
    if len(arrivals) < 2 * len(ticks) or len(ticks) < 2:
        return arrivals
    random, found = Random(seed), list[Arrival]()
    for (at, group), (later, _) in zip(ticks, [*ticks[1:], (2 * ticks[-1][0] - ticks[-2][0], [])], strict=True):
        found += [replace(arrival, at=at + random.random() * (later - at)) for arrival in group]
    return sorted(found, key=lambda arrival: arrival.at)


def at_load(arrivals: Iterable[Arrival], factor: float) -> list[Arrival]:
    """The same requests, `factor` times as fast."""
    return [replace(arrival, at=arrival.at / factor) for arrival in arrivals]


# ---------------------------------------------------------------- synthetic


@dataclass(frozen=True, slots=True)
class Agents:
    """Agent sessions: many turns over one growing prompt, absent from public traces.

    A session belongs to one of a few applications and shares that application's system prompt and tools. Every turn
    sends the whole conversation again, extended by the answer and a tool's output, once the tool has finished. The
    ideal hit rate is above 0.9, and scattering a session over engines recomputes the whole prompt.
    `sessions` per second start for `seconds`; lengths are tokens, log-normal around the values given as medians.
    """

    seconds: float = 900.0
    sessions: float = 0.6
    applications: int = 6
    system: int = 6_000
    task: int = 1_500
    turns: float = 16.0  # mean, geometric
    tool: int = 700
    answer: int = 220
    pause: float = 6.0  # s between an answer and the next request of the session, mean: tool, thought
    longest: int = 38_000  # tokens of prompt at which a session ends


def agents(shape: Agents = Agents(), seed: int = 0) -> list[Arrival]:
    """Arrivals in time order."""
    random, arrivals, at, number = Random(seed), list[Arrival](), 0.0, 0
    systems = [int(shape.system * random.lognormvariate(0.0, 0.4)) for _ in range(shape.applications)]
    while (at := at + random.expovariate(shape.sessions)) < shape.seconds:
        number += 1
        application = min(int(random.paretovariate(1.0)) - 1, shape.applications - 1)  # a few dominate the traffic
        arrivals += _session(shape, random, at, number, application, systems[application])
    return sorted(arrivals, key=lambda arrival: arrival.at)


def _session(shape: Agents, random: Random, at: float, number: int, application: int, system: int) -> list[Arrival]:
    shared = [(application + 1) << 32 | block for block in range(system // BLOCK)]
    prompt, turns, pause = system + int(shape.task * random.lognormvariate(0.0, 0.6)), list[Arrival](), 0.0
    while prompt < shape.longest and at < shape.seconds:
        own = range(len(shared), prompt // BLOCK)
        hashes = array("Q", [*shared, *((number << 40) | block for block in own)])
        answer = max(int(shape.answer * random.lognormvariate(0.0, 0.7)), 2)
        turns.append(Arrival(at, prompt, answer, hashes, session=number, think=pause))
        prompt += answer + int(shape.tool * random.lognormvariate(0.0, 0.9))
        pause = random.expovariate(1 / shape.pause)
        at += 1.0 + answer * 0.02 + pause
        if random.random() < 1 / shape.turns:
            break
    return turns
