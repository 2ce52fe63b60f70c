"""Recorded agent sessions, started as a Poisson process.

Format: JSON lines, one per turn, in the order of the turns of a session (public source: kv-cache-tester):
`session_id`, `turn`, `timestamp` (ms since the session began), `think_time` (s between the answer before and this
turn; null: unknown), `input_length`, `output_length` (tokens), `hash_ids` (chained, one per 512 tokens of the prompt;
the last may be partial). Optional: `api_time` (s of the recorded answer) and `route`.

Rules:
- Sessions are drawn with replacement. Each drawn session has content of its own, so that only its own turns share
  prefixes; blocks that occur in most sessions of the file (a system prompt) remain common to all.
- Open loop: turns arrive at the recorded times. Closed loop: a turn arrives `think_time` after the end of the turn
  before it, whatever that end was.
- An unknown think time is the recorded gap less the time of the answer, if the trace tells it.
"""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf
from pathlib import Path
from random import Random
from typing import Any

from lab.traffic.traces import BLOCK, Arrival, TraceError

REQUIRED = ("session_id", "timestamp", "input_length", "output_length", "hash_ids")
_COMMON = 0.5  # share of a file's sessions that makes a block common to all


@dataclass(frozen=True, slots=True)
class SessionTurn:
    """`at`: s since the session began; `think`: s since the end of the answer before."""

    at: float
    think: float
    prompt_tokens: int
    output_tokens: int
    hashes: Sequence[int] = ()
    route: str = ""


Session = tuple[SessionTurn, ...]


@dataclass(frozen=True, slots=True)
class Sessions:
    """All sessions of a file. `common`: blocks shared by sessions that have nothing else in common."""

    recorded: Sequence[Session]
    common: frozenset[int]

    def started(self, rate: float, seconds: float, seed: int, closed: bool = False, before: int = 0) -> list[Arrival]:
        """Turns of sessions started at `rate` per second for `seconds`, in order of their recorded times.

        Open loop: without turns recorded after `seconds`. Closed loop: without turns that come after `seconds` even
        if all answers take no time. Sessions are numbered from `before` + 1.
        """
        random, at, number, arrivals = Random(seed), 0.0, before, list[Arrival]()
        while (at := at + random.expovariate(rate)) < seconds:
            number += 1
            turns = self._own(random.choice(self.recorded), at, number)
            arrivals += _at_rest(turns, at, seconds) if closed else (turn for turn in turns if turn.at < seconds)
        arrivals.sort(key=lambda arrival: arrival.at)
        return closed_loop(arrivals, seconds) if closed else arrivals

    def at_a_time(self, count: int, seconds: float, seed: int, longest_gap: float) -> list[Arrival]:
        """Turns of `count` sessions at a time, for `seconds`: each is followed by another. Open loop.

        Sessions begin with their first turn, gaps between turns are cut to `longest_gap` seconds: a level rate of
        requests, where sessions started as a Poisson process become more and more for half an hour.
        """
        random, number, arrivals = Random(seed), 0, list[Arrival]()
        for _ in range(count):
            at = random.uniform(0.0, longest_gap)
            while at < seconds:
                number += 1
                turns = list(_with_gaps(self._own(random.choice(self.recorded), at, number), longest_gap))
                arrivals += (turn for turn in turns if turn.at < seconds)
                at = turns[-1].at + random.uniform(0.0, longest_gap)
        return sorted(arrivals, key=lambda arrival: arrival.at)

    def _own(self, session: Session, start: float, number: int) -> Iterator[Arrival]:
        """The turns of a session, with blocks that no other session has."""
        for turn in session:
            blocks = (block if block in self.common else _own_block(number, block) for block in turn.hashes)
            lengths = turn.prompt_tokens, turn.output_tokens
            yield Arrival(start + turn.at, *lengths, array("Q", blocks), turn.route, session=number, think=turn.think)


def _own_block(session: int, block: int) -> int:
    """Equal in every process: Python's hash of integers has no seed."""
    return hash((session, block)) & 0xFFFF_FFFF_FFFF_FFFF


def _with_gaps(turns: Iterator[Arrival], longest: float) -> Iterator[Arrival]:
    """Turns of a session, at most `longest` seconds apart."""
    yield (turn := next(turns))
    at, recorded = turn.at, turn.at
    for turn in turns:
        at, recorded = at + min(turn.at - recorded, longest), turn.at
        yield replace(turn, at=at)


def _at_rest(turns: Iterable[Arrival], start: float, seconds: float) -> Iterator[Arrival]:
    """Turns that would come before `seconds` if all answers took no time."""
    for turn in turns:
        start += turn.think
        if start >= seconds:
            return
        yield turn


def closed_loop(arrivals: Iterable[Arrival], seconds: float) -> list[Arrival]:
    """Each turn but the first of a session waits for the turn before it; without sessions that begin after `seconds`.

    `arrivals` in order of time.
    """
    begun, found = set[int](), list[Arrival]()
    for arrival in arrivals:
        if arrival.at < seconds or arrival.session in begun:
            found.append(replace(arrival, follows=arrival.session in begun))
            begun.add(arrival.session)
    return found


# ---------------------------------------------------------------- files


def is_sessions(path: Path) -> bool:
    """True if the first line has a `session_id`; false for a file that cannot be read."""
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            return isinstance(row := json.loads(lines.readline()), dict) and "session_id" in row
    except (OSError, ValueError):
        return False


@lru_cache(maxsize=8)
def read_sessions(path: Path) -> Sessions:
    """Raises TraceError."""
    rows: dict[str, list[Mapping[str, Any]]] = {}
    turns: dict[str, list[SessionTurn]] = {}
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    row = _row(line, f"{path}:{number}")
                    earlier = rows.setdefault(str(row["session_id"]), [])
                    earlier.append(row)
                    turns.setdefault(str(row["session_id"]), []).append(_turn(earlier, f"{path}:{number}"))
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror}") from None
    if not turns:
        raise TraceError(f"{path}: no session")
    recorded = [tuple(session) for session in turns.values()]
    return Sessions(recorded, _common(recorded))


def _row(line: str, where: str) -> Mapping[str, Any]:
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    if not isinstance(row, dict):
        raise _unreadable(where, "a JSON object is expected")
    for field in REQUIRED:
        if row.get(field) is None:
            raise _unreadable(where, f"{field} is missing")
    return row


def _turn(rows: Sequence[Mapping[str, Any]], where: str) -> SessionTurn:
    """The last of the session's rows so far."""
    row = rows[-1]
    try:
        prompt = max(int(row["input_length"]), 1)
        return SessionTurn(
            at=_gap(rows[0], row),
            think=_think(rows[-2], row) if len(rows) > 1 else 0.0,
            prompt_tokens=prompt,
            output_tokens=max(int(row["output_length"]), 1),
            hashes=array("Q", row["hash_ids"][: prompt // BLOCK]),
            route=str(row.get("route", "")),
        )
    except (ValueError, TypeError, OverflowError) as error:
        raise _unreadable(where, str(error)) from None


def _unreadable(where: str, reason: str) -> TraceError:
    return TraceError(f"{where}: {reason}; fix or remove the line")


def _gap(before: Mapping[str, Any], row: Mapping[str, Any]) -> float:
    gap = (float(row["timestamp"]) - float(before["timestamp"])) / 1e3
    if not gap >= 0:
        raise ValueError("turns of a session must be in order of time")
    return gap


def _think(before: Mapping[str, Any], row: Mapping[str, Any]) -> float:
    if (think := row.get("think_time")) is None:
        return max(_gap(before, row) - float(before.get("api_time") or 0.0), 0.0)
    if not 0 <= float(think) < inf:
        raise ValueError("think_time must be at least 0")
    return float(think)


def _common(recorded: Sequence[Session]) -> frozenset[int]:
    """Blocks of most sessions; of a single session, none."""
    held = Counter(block for session in recorded for block in {block for turn in session for block in turn.hashes})
    return frozenset(block for block, count in held.items() if count > max(len(recorded) * _COMMON, 1))
