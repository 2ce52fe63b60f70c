"""Quotas in memory: of one process, or of all workers of a gateway.

Rules:
- Each worker writes only an own row of a key and reads all rows. Nothing is locked: of requests to several workers in
  the same microsecond, one per worker may be admitted beyond a limit.
- Running requests of a dead worker are wiped when the successor starts. Past usage still counts.
- A key newer than the memory is kept by each worker alone, and each worker admits a share of the limit.
- The costs of the month are lost when the gateway stops; Redis keeps monthly costs.
"""

from __future__ import annotations

import mmap
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from time import monotonic, time

from policies.quota.key_limits import (
    HEAD_CLAIM,
    Claim,
    KeyLimits,
    LimitUsage,
    QuotaLimit,
    Reservation,
    Verdict,
    exceeded,
    share_of,
    too_large,
)
from policies.quota.sliding_window import (
    WINDOW_S,
    WINDOW_WORDS,
    CounterArray,
    SlidingWindow,
    available_at,
    resets_at,
    used,
)
from policies.types import NEVER

JUMP, JUMP_BELIEVED = 60.0, 3600.0  # s that a clock may be adjusted by; s until a larger change counts
CONCURRENT_WAIT = 1.0  # s to wait for a free place: the end of the caller's own requests is unknown


def month(wall: float) -> int:
    """202610: calendar month of a Unix time, in UTC."""
    return _month_of(int(wall // 86_400))


@lru_cache(maxsize=4)
def _month_of(day: int) -> int:
    date = datetime.fromtimestamp(day * 86_400, UTC)
    return date.year * 100 + date.month


RUNNING, MONTH, SPENT, HELD, HEAD = range(5)  # words of a row; the window follows
ROW = HEAD + WINDOW_WORDS


class SteadyWall:
    """Unix time that follows a jump of the machine's clock after JUMP_BELIEVED seconds. A clock that is wrong for a
    while neither forgets the costs of a month nor opens the next month."""

    def __init__(self, wall: Callable[[], float] = time, clock: Callable[[], float] = monotonic) -> None:
        self._wall, self._clock = wall, clock
        self._offset = wall() - clock()
        self._jumped_at = NEVER  # when the clock was first found wrong

    def __call__(self) -> float:
        now = self._clock()
        offset = self._wall() - now
        if abs(offset - self._offset) <= JUMP:
            self._offset, self._jumped_at = offset, NEVER
        elif self._jumped_at == NEVER:
            self._jumped_at = now
        elif now - self._jumped_at > JUMP_BELIEVED:
            self._offset = offset
        return now + self._offset


class KeyUsage:
    """Usage of a key within a worker."""

    def __init__(self, words: CounterArray, base: int = 0) -> None:
        self.words, self.base = words, base
        self.window = SlidingWindow(words, base + HEAD)

    @property
    def running(self) -> int:
        return self.words[self.base + RUNNING]

    def begin(self, cost: int) -> None:
        """`cost`: maximum cost of the request; 0 without a limit on cost."""
        self.words[self.base + RUNNING] += 1
        self.words[self.base + HELD] += cost

    def end(self, held: int = 0, spent: int = 0, this_month: int = 0) -> None:
        """`this_month` 0: the key has no limit on cost."""
        words, base = self.words, self.base
        words[base + RUNNING] -= 1
        if not this_month:
            return
        words[base + HELD] -= held
        if words[base + MONTH] != this_month:
            words[base + MONTH] = this_month
            words[base + SPENT] = 0
        words[base + SPENT] += spent

    def wipe_running(self) -> None:
        self.words[self.base + RUNNING] = 0
        self.words[self.base + HELD] = 0

    def cost(self, this_month: int) -> int:
        """Spent, and held by running requests."""
        words, base = self.words, self.base
        return words[base + HELD] + (words[base + SPENT] if words[base + MONTH] == this_month else 0)


class SharedQuotaMemory:
    """Rows for the keys `names`, to be created before the workers are forked."""

    def __init__(self, names: Iterable[str], workers: int) -> None:
        self.workers = workers
        self._index = {name: at for at, name in enumerate(names)}
        self._words = memoryview(mmap.mmap(-1, max(8 * ROW * len(self._index) * workers, 8))).cast("q")

    def rows(self, name: str) -> list[KeyUsage] | None:
        """By worker; None for a key without rows."""
        at = self._index.get(name)
        return None if at is None else [self._row(at, worker) for worker in range(self.workers)]

    def member(self, number: int) -> LocalQuotas:
        """Quotas of a starting worker."""
        for at in self._index.values():
            self._row(at, number).wipe_running()
        return LocalQuotas(self, number)

    def _row(self, at: int, worker: int) -> KeyUsage:
        return KeyUsage(self._words, ROW * (at * self.workers + worker))


@dataclass(frozen=True, slots=True)
class _KeyRows:
    """`divisor`: number of workers without shared rows for this key."""

    own: KeyUsage
    rows: list[KeyUsage]
    divisor: int


class LocalQuotas:
    """`clock`: monotonic s, the same in all workers. `wall`: Unix time; None: `SteadyWall`."""

    def __init__(
        self,
        shared: SharedQuotaMemory | None = None,
        number: int = 0,
        clock: Callable[[], float] = monotonic,
        wall: Callable[[], float] | None = None,
    ) -> None:
        self._shared = shared
        self._number = number
        self._clock = clock
        self._wall = wall or SteadyWall()
        self._keys: dict[str, _KeyRows] = {}

    def check(self, name: str, limits: KeyLimits) -> Verdict:
        """The verdict on the head of a request, of which nothing is claimed. `name`: of the key."""
        return self.judge(name, limits, HEAD_CLAIM, 1, self._clock())

    def enter(self, name: str, limits: KeyLimits) -> Reservation:
        """A reservation by the head, to be settled, or given to `reserve`."""
        return self.claim(name, limits, HEAD_CLAIM)

    async def reserve(self, name: str, limits: KeyLimits, claim: Claim, head: Reservation | None = None) -> Reservation:
        """A refused reservation has a `verdict.limit`, and has claimed nothing. `head`: is withdrawn."""
        if head is not None:
            self.withdraw(head)
        return self.claim(name, limits, claim)

    def claim(self, name: str, limits: KeyLimits, claim: Claim, share: int = 1) -> Reservation:
        """`reserve`, at once. `share`: number of processes among which the limit is divided."""
        now = self._clock()
        verdict = self.judge(name, limits, claim, share, now)
        if verdict.limit is None:
            self._admit(self._key(name), limits, claim, int(now))
        return Reservation(name, limits, claim, verdict, int(now), now)

    def withdraw(self, reservation: Reservation) -> None:
        """Ends an admitted reservation, once, as if it had never been made."""
        own, claim = self._key(reservation.name).own, reservation.claim
        own.window.refund(reservation.second, int(self._clock()), claim.tokens, 1)
        own.end(claim.cost, 0, 0 if reservation.limits.cost is None else month(self._wall()))

    def judge(self, name: str, limits: KeyLimits, claim: Claim, share: int, now: float) -> Verdict:
        """The verdict on a claim. Changes nothing."""
        second, key = int(now), self._key(name)
        share *= key.divisor
        windows = [row.window for row in key.rows]
        requests, tokens = used(windows, second)
        running = sum(row.running for row in key.rows)
        cost = 0 if limits.cost is None else sum(row.cost(month(self._wall())) for row in key.rows)
        usage = LimitUsage(requests, tokens, running, cost)
        if refused := exceeded(limits, claim, usage, share):
            return self._refusal(limits, claim, usage, refused, windows, now, share)
        reset = second + WINDOW_S + 1 - now
        return Verdict(
            requests_left=remaining(limits.requests, requests + 1),
            tokens_left=remaining(limits.tokens, tokens + claim.tokens),
            requests_reset=reset,
            tokens_reset=reset,
        )

    def settle(self, reservation: Reservation, tokens: int, cost: int) -> None:
        """Ends an admitted reservation, once. `tokens` and `cost` (billionths of a USD): actual amounts."""
        own = self._key(reservation.name).own
        second, more = int(self._clock()), tokens - reservation.claim.tokens
        if more < 0:
            own.window.refund(reservation.second, second, -more)
        elif more > 0:
            own.window.add(second, 0, more)
        if reservation.limits.cost is None:
            own.end()
        else:
            own.end(reservation.claim.cost, cost, month(self._wall()))

    def add(self, name: str, limits: KeyLimits, claim: Claim, verdict: Verdict) -> Reservation:
        """Counts a reservation admitted by Redis."""
        now = self._clock()
        self._admit(self._key(name), limits, claim, int(now))
        return Reservation(name, limits, claim, verdict, int(now), now)

    def spent(self, name: str) -> int:
        """Cost of this month, including the cost held by running requests."""
        return self._key(name).own.cost(month(self._wall()))

    def _admit(self, key: _KeyRows, limits: KeyLimits, claim: Claim, second: int) -> None:
        key.own.window.add(second, 1, claim.tokens)
        key.own.begin(0 if limits.cost is None else claim.cost)

    def _key(self, name: str) -> _KeyRows:
        found = self._keys.get(name)
        if found is None:
            shared = self._shared
            rows = None if shared is None else shared.rows(name)
            divisor = 1 if rows is not None or shared is None else shared.workers
            own = KeyUsage(array("q", bytes(8 * ROW))) if rows is None else rows[self._number]
            rows = rows or [own]
            found = self._keys[name] = _KeyRows(own, rows, divisor)
        return found

    def _refusal(
        self,
        limits: KeyLimits,
        claim: Claim,
        usage: LimitUsage,
        refused: list[QuotaLimit],
        windows: list[SlidingWindow],
        now: float,
        share: int,
    ) -> Verdict:
        """The refusing limit with the longest wait, or without any."""
        second = int(now)
        waits: dict[QuotaLimit, float | None] = {}
        for limit in refused:
            if limit is QuotaLimit.CONCURRENT:
                waits[limit] = CONCURRENT_WAIT
            elif limit is QuotaLimit.REQUESTS:
                excess = usage.requests + 1 - share_of(limits.requests or 0, share)
                waits[limit] = available_at(windows, second, 0, min(excess, usage.requests)) - now
            elif limit is QuotaLimit.TOKENS and not too_large(limits, claim):
                excess = usage.tokens + claim.tokens - share_of(limits.tokens or 0, share)
                waits[limit] = available_at(windows, second, 1, min(excess, usage.tokens)) - now
            else:
                waits = {limit: None}
                break
        limit = max(waits, key=lambda each: waits[each] or 0.0)
        requests_reset, tokens_reset = resets_at(windows, second)
        return Verdict(
            limit=limit,
            wait=waits[limit],
            requests_left=remaining(limits.requests, usage.requests),
            tokens_left=remaining(limits.tokens, usage.tokens),
            requests_reset=max(requests_reset - now, 0.0),
            tokens_reset=max(tokens_reset - now, 0.0),
        )


def remaining(limit: int | None, used: int) -> int:
    return max((limit or 0) - used, 0)
