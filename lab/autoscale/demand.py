"""Requests of the last minutes, as offered: what was shed, lost or abandoned is demand too.

Rules:
- Rows are of GET /requests, of requests that have ended. So the latest demand is not known yet: it is complete up to
  `delay` before now, the time that most answers take.
- The fault of a caller (4xx) and an answer from the cache of answers are no demand for an engine.
- At most MAX_ROWS are kept. Of more, whole sessions are left out: `share` of all sessions is there, from `since` on. A
  window cut short instead would end before the answers do, and tell of too few engines.
"""

from __future__ import annotations

from array import array
from base64 import b64decode
from collections import deque
from collections.abc import Container, Mapping
from dataclasses import dataclass
from time import time
from typing import Any
from zlib import crc32

from lab.capacity.replica_law import KEPT
from lab.traffic.access_log import MAX_PROMPT
from lab.traffic.session_chains import SessionChains

MAX_ROWS = 10_000
LEAST_SHARE = 1 / 1024  # of the sessions
SPREAD, MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1  # multiplicative hashing (Fibonacci)
MOST, MAX_DELAY = 0.9, 60.0  # share of the answers that have ended within `delay`; s


@dataclass(frozen=True, slots=True)
class DemandRow:
    """A request that came, answered or not. `prefix`: landmarks of the prompt; `kv_tokens`: of the engine's KV cache,
    by its own report."""

    at: float  # arrival, Unix time
    route: str
    tenant: str
    session: int  # 0: the caller names none
    prompt_tokens: int
    output_tokens: int  # 0: not known
    prefix: bytes
    is_answered: bool
    took: float = 0.0  # s
    pool: str = ""
    kv_tokens: int = 0


class DemandWindow:
    """`routes`: those that are kept, none at first."""

    def __init__(self) -> None:
        self.routes: frozenset[str] = frozenset()
        self.since = time()
        self._chains = SessionChains(MAX_ROWS)
        self._rows: deque[tuple[float, DemandRow]] = deque()  # with the place of its session in [0, 1)
        self._shares = deque([(self.since, 1.0)])  # ascending, each from a time on

    @property
    def share(self) -> float:
        """Of the sessions that `rows` has."""
        return self._shares[0][1]

    @property
    def delay(self) -> float:
        """Seconds within which most answers have ended."""
        times = sorted(row.took for _, row in self._rows)
        return min(times[int(MOST * len(times))], MAX_DELAY) if times else 0.0

    def add(self, record: Mapping[str, Any]) -> None:
        """A request has ended. Raises KeyError, TypeError or ValueError for what is no Record."""
        if record["route"] not in self.routes or record["end"] == "refused" or record["cache"] == "hit":
            return
        if not record["prompt_tokens_estimated"]:
            return
        row = _row(record)
        self._forget(row.at - KEPT)
        blocks = array("Q", row.prefix)
        drawn = _drawn(self._chains.session(row.tenant, row.session, blocks, row.prompt_tokens))
        if drawn < self._shares[-1][1]:
            self._rows.append((drawn, row))
        if len(self._rows) > MAX_ROWS:
            self._halve()

    def begin(self, at: float) -> None:
        """Requests before that time were not read."""
        self.since = at

    def _forget(self, before: float) -> None:
        while self._rows and self._rows[0][1].at < before:
            self.since = max(self.since, self._rows.popleft()[1].at)
        while len(self._shares) > 1 and self._shares[1][0] <= before:
            self._shares.popleft()
        latest, share = self._shares[-1]
        if latest <= before and share < 1.0 and len(self._rows) < MAX_ROWS // 4:
            self._shares.append((before + KEPT, 2 * share))

    def _halve(self) -> None:
        """Then without the oldest: those of one session may be most of all."""
        share = max(self.share / 2, LEAST_SHARE)
        self._shares = deque([(self._rows[-1][1].at, share)])
        self._rows = deque(entry for entry in self._rows if entry[0] < share)
        while len(self._rows) > MAX_ROWS:
            self.since = max(self.since, self._rows.popleft()[1].at)

    def rows(self, routes: Container[str]) -> list[DemandRow]:
        """Of these routes, by arrival."""
        found = [row for drawn, row in self._rows if drawn < self.share and row.route in routes]
        return sorted(found, key=lambda row: row.at)

    def kv_tokens(self) -> dict[str, int]:
        """By pool: the smallest KV cache that an engine of it has reported."""
        found: dict[str, int] = {}
        for _, row in self._rows:
            if row.kv_tokens:
                found[row.pool] = min(found.get(row.pool, row.kv_tokens), row.kv_tokens)
        return found


def _drawn(session: int) -> float:
    """The place of a session in [0, 1)."""
    return (session * SPREAD & MASK) / (MASK + 1)


def _row(record: Mapping[str, Any]) -> DemandRow:
    prompt = int(record["prompt_tokens_reported"] or record["prompt_tokens_estimated"])
    if not 0 < prompt <= MAX_PROMPT:
        raise ValueError(f"a prompt of {prompt} tokens")
    attempts = record["attempts"]
    return DemandRow(
        at=float(record["wall"]),
        route=record["route"],
        tenant=record["tenant"],
        session=crc32(record["session"].encode()) if record["session"] else 0,
        prompt_tokens=prompt,
        output_tokens=int(record["output_tokens"] or 0),
        prefix=b64decode(record["prefix"] or ""),
        is_answered=record["end"] == "completed",
        took=float(record["total_ms"] or 0.0) / 1e3,
        pool=record["pool"],
        kv_tokens=int(attempts[-1]["engine_kv_tokens"]) if attempts else 0,
    )
