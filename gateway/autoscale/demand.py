"""Requests of the last minutes, as offered: what was shed, lost or abandoned is demand too.

Rules:
- A sink of Records; what is still in progress is added when the rows are read.
- The fault of a caller (4xx) and an answer from the cache of answers are no demand for an engine.
- At most MAX_ROWS are kept. Of more, whole sessions are left out: `share` of all sessions is there, from `since` on. A
  window that were cut short instead would end before the answers do, and tell of too few engines.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Container, Iterable, Iterator
from time import monotonic

from gateway.autoscale.replay_messages import DemandRow
from gateway.autoscale.session_chains import SessionChains
from gateway.observe.record import HIT, Record, RequestOutcome
from gateway.observe.timeline import RequestTimeline
from policies.autoscale.replica_law import KEPT

MAX_ROWS = 10_000
LEAST_SHARE = 1 / 1024  # of the sessions
SPREAD, MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1  # multiplicative hashing (Fibonacci)


class DemandWindow:
    """`lives`: the requests in progress; `routes`: those that are kept, none at first."""

    def __init__(self, lives: Iterable[RequestTimeline]) -> None:
        self.routes: frozenset[str] = frozenset()
        self.since = monotonic()
        self._lives = lives
        self._chains = SessionChains(MAX_ROWS)
        self._rows: deque[tuple[float, DemandRow]] = deque()  # with the place of its session in [0, 1)
        self._shares = deque([(self.since, 1.0)])  # ascending, each from a time on

    @property
    def share(self) -> float:
        """Of the sessions that `rows` has."""
        return self._shares[0][1]

    def __call__(self, record: Record) -> None:
        """A request has ended."""
        if record.route not in self.routes:
            return
        if record.end is RequestOutcome.REFUSED or record.cache == HIT or not record.prompt_tokens_estimated:
            return
        self._forget(record.arrival - KEPT)
        row = _row(record, record.prefix, record.end is RequestOutcome.COMPLETED)
        drawn = _drawn(self._chains.session(row.tenant, row.session, record.prefix, row.prompt_tokens))
        if drawn < self._shares[-1][1]:
            self._rows.append((drawn, row))
        if len(self._rows) > MAX_ROWS:
            self._halve()

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
        found += [row for row in self._in_progress() if row.route in routes]
        return sorted(found, key=lambda row: row.at)

    def _in_progress(self) -> Iterator[DemandRow]:
        for life in self._lives:
            if life.record.prompt_tokens_estimated:
                row = _row(life.record, prefix := life.landmarks(), True)
                known = self._chains.find(row.tenant, row.session, prefix, row.prompt_tokens)
                if _drawn(known or hash(row)) < self.share:
                    yield row


def _drawn(session: int) -> float:
    """The place of a session in [0, 1)."""
    return (session * SPREAD & MASK) / (MASK + 1)


def _row(record: Record, prefix: Iterable[int], is_answered: bool) -> DemandRow:
    prompt = record.prompt_tokens_reported or record.prompt_tokens_estimated or 0
    return DemandRow(
        record.arrival,
        record.route,
        record.tenant,
        record.session & 0xFFFFFFFFFFFF,
        prompt,
        record.output_tokens or 0,
        array("Q", prefix).tobytes(),
        is_answered,
    )
