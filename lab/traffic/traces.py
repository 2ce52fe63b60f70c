"""Arrivals of a replay: recorded traces, or synthetic agent sessions.

Trace formats, detected by content:
- Mooncake JSON lines: `timestamp` (ms), `input_length`, `output_length`, `hash_ids` (one per 512 tokens, chained).
- Azure CSV: `TIMESTAMP,ContextTokens,GeneratedTokens`, without prefix information: every prompt is unique.
- firsttoken access log (gateway.observe.record): `wall`, `route`, `prompt_tokens_reported` or `_estimated`,
  `output_tokens`, and `prefix` (base64 of chained 64-bit hashes): `lab.traffic.access_log`. A directory of the
  gateway's `records` holds the same.

Rules:
- Times start at 0 and ascend. Timestamps rounded to a tick (several arrivals share one) are spread at random within
  the tick (`spread`): a Mooncake tick holds ten requests, which no gateway received simultaneously.
- `hashes` name the full blocks of a prompt in order: equal hash means equal prefix up to that block.
- A turn of a logged conversation that came after the answer before is a closed loop: it comes as long after that answer
  in a replay too.
- A request that was shed, lost or left is offered load too: its answer gets the mean length of its route's.
- An unreadable line is an error with its line number.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import groupby, islice
from pathlib import Path
from random import Random
from statistics import mean
from typing import Any

from gateway.records.log_entries import ChosenBreaks, LogMender
from gateway.records.record_file import UnreadableRecords, stored_records
from lab.traffic.access_log import UNANSWERED, LoggedRequest, PromptChains, block_of, logged_request, turns

BLOCK = 512  # tokens per hash of a trace
AZURE = ["timestamp", "contexttokens", "generatedtokens"]
AGENTS = "synthetic:agents"
USUAL_LENGTH = 256  # output tokens, where nobody was answered
Mend = Callable[[Mapping[str, Any]], Mapping[str, Any]]  # of a line of an access log
_UNIQUE = 1 << 40  # hashes from here on belong to prompts with an unknown prefix


class TraceError(ValueError):
    """The trace cannot be read; the message names the line and the remedy."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request of a trace. `hashes`: a hash per full block of `block` prompt tokens.

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
    stream: bool = True
    leaves: float | None = None  # s after arrival at which the caller leaves unless the first token is there
    max_tokens: int | None = None  # as the caller asked
    answer_hashes: Sequence[int] = ()  # of the blocks behind those of the prompt that a later prompt begins with
    block: int = BLOCK  # tokens per hash
    logged: bool = False  # a turn of an access log, which comes however late the one before ends


class SeenBlocks:
    """Blocks of all prompts so far."""

    def __init__(self) -> None:
        self._blocks: set[int] = set()

    def new_tokens(self, arrival: Arrival) -> int:
        """Tokens of an arriving prompt that no earlier prompt began with."""
        known = next((i for i, block in enumerate(arrival.hashes) if block not in self._blocks), len(arrival.hashes))
        self._blocks.update(arrival.hashes)
        block = arrival.block
        return arrival.prompt_tokens - min(known * block, (arrival.prompt_tokens - 1) // block * block)


# ---------------------------------------------------------------- recorded


def read_trace(path: Path, limit: int | None = None, repaired: ChosenBreaks | None = None) -> list[Arrival]:
    """Arrivals in time order, of the first `limit` requests of the file (None: all). `repaired`: breaks of prefixes
    that an access log is read without. Raises TraceError."""
    parsed = _read(path, limit, repaired)
    logged = sorted((each for each in parsed if isinstance(each, LoggedRequest)), key=lambda request: request.at)
    arrivals = [*(each for each in parsed if isinstance(each, Arrival)), *logged_arrivals(logged)]
    if not arrivals:
        raise TraceError(f"{path}: no usable request; each line needs its prompt and output tokens")
    arrivals.sort(key=lambda arrival: arrival.at)
    return [replace(arrival, at=arrival.at - arrivals[0].at) for arrival in arrivals]


def read_log(path: Path, limit: int | None = None) -> list[LoggedRequest]:
    """Requests of an access log; none of another trace. Raises TraceError."""
    return [each for each in _read(path, limit) if isinstance(each, LoggedRequest)]


def _read(path: Path, limit: int | None, repaired: ChosenBreaks | None = None) -> list[Arrival | LoggedRequest]:
    mend: Mend = _as_logged if repaired is None else LogMender(repaired).mend
    try:
        if path.is_dir():
            return list(islice(_stored(path, mend), limit))
        with path.open(encoding="utf-8", errors="replace") as lines:
            return list(islice(_parse(path, lines, mend), limit))
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror}") from None


def _as_logged(row: Mapping[str, Any]) -> Mapping[str, Any]:
    return row


def _stored(folder: Path, mend: Mend) -> Iterator[LoggedRequest]:
    """Requests of a directory of records."""
    try:
        for number, view in enumerate(stored_records(folder), 1):
            if (found := logged_request(mend(view), number)) is not None:
                yield found
    except UnreadableRecords as error:
        raise TraceError(str(error)) from None
    except (ValueError, KeyError, TypeError) as error:
        raise TraceError(f"{folder}: request {view['request_id']}: {_reason(error)}") from None


def _parse(path: Path, lines: Iterable[str], mend: Mend) -> Iterator[Arrival | LoggedRequest]:
    csv = False
    for number, line in enumerate(lines, 1):
        if number == 1 and (csv := not line.lstrip().startswith("{")):
            if [name.strip().lower() for name in line.split(",")] != AZURE:
                raise TraceError(f"{path}:1: neither JSON lines nor a header TIMESTAMP,ContextTokens,GeneratedTokens")
        elif line.strip():
            try:
                found = _azure(line, number) if csv else _json(mend(json.loads(line)), number)
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
                raise TraceError(f"{path}:{number}: {_reason(error)}; fix or remove the line") from None
            if found is not None:
                yield found


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


def _json(row: Mapping[str, Any], number: int) -> Arrival | LoggedRequest | None:
    if "hash_ids" in row or "input_length" in row:
        prompt, output = _lengths(row["input_length"], row["output_length"])
        ids = row.get("hash_ids")
        hashes = array("Q", (int(i) for i in ids[: prompt // BLOCK])) if ids else _unique(number, prompt)
        return Arrival(float(row["timestamp"]) / 1e3, prompt, output, hashes, str(row.get("route", "")))
    return logged_request(row, number)


def logged_arrivals(requests: Sequence[LoggedRequest]) -> list[Arrival]:
    """Offered load of an access log, `requests` in order of time. One without an answer gets the mean length of the
    answers of its route, else of all."""
    block, lengths = block_of(requests), _answer_lengths(requests)
    chains, found = PromptChains(requests, block), list[Arrival]()
    for request, turn in zip(requests, turns(requests), strict=True):
        output = request.output_tokens or lengths.get(request.route) or lengths.get("", USUAL_LENGTH)
        hashes, answer = chains.chain(request)
        found.append(
            Arrival(
                request.at,
                request.prompt_tokens,
                output,
                hashes,
                request.route,
                request.tenant,
                turn.session,
                turn.think or 0.0,
                turn.think is not None,
                stream=request.stream,
                leaves=request.left_after,
                max_tokens=request.max_tokens,
                answer_hashes=answer,
                block=block,
                logged=True,
            )
        )
    return found


def _answer_lengths(requests: Iterable[LoggedRequest]) -> Mapping[str, int]:
    """Mean, by route; "": of all."""
    known: dict[str, list[int]] = {}
    for request in requests:
        if request.output_tokens != UNANSWERED:
            for name in ("", request.route):
                known.setdefault(name, []).append(request.output_tokens)
    return {route: max(round(mean(tokens)), 1) for route, tokens in known.items()}


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


def coarser(arrival: Arrival, block: int) -> Arrival:
    """With a hash per `block` tokens, a multiple of what it has."""
    step = block // arrival.block
    return replace(arrival, hashes=arrival.hashes[step - 1 :: step], answer_hashes=(), block=block)


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
