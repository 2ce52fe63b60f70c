"""Quotas in memory: of this process, or of all workers of one gateway.

Rules:
- Each worker writes its own row per key alone and reads the others'. Nobody waits for anybody, nothing is locked: of
  requests that come to several workers in the same microsecond one per worker may be let in beyond a limit.
- What a worker had running when it died is wiped as its successor begins. What was used still counts.
- A key that was not known when the memory was made is kept by each worker for itself, and each lets in its part.
- What was spent this month is forgotten when the gateway ends; Redis keeps it.
"""

from __future__ import annotations

import mmap
from array import array
from collections.abc import Callable, Iterable
from time import monotonic, time

from gateway.admission.reservations import CONCURRENT_WAIT, Reservation, month
from policies.quota.key_limits import Claim, KeyLimits, LimitUsage, QuotaLimit, Verdict, exceeded, too_large
from policies.quota.sliding_window import (
    WINDOW_S,
    WINDOW_WORDS,
    CounterArray,
    SlidingWindow,
    available_at,
    resets_at,
    used,
)

RUNNING, MONTH, SPENT, HELD, HEAD = range(5)  # words of a row; then its window
ROW = HEAD + WINDOW_WORDS


class KeyUsage:
    """One worker's, of one key."""

    __slots__ = ("base", "window", "words")

    def __init__(self, words: CounterArray, base: int = 0) -> None:
        self.words, self.base = words, base
        self.window = SlidingWindow(words, base + HEAD)

    def run(self, held: int) -> None:
        self.words[self.base + RUNNING] += 1
        self.words[self.base + HELD] += held

    def end(self, held: int = 0, spent: int = 0, this_month: int = 0) -> None:
        words, base = self.words, self.base
        words[base + RUNNING] -= 1
        if not this_month:
            return
        words[base + HELD] -= held
        if words[base + MONTH] != this_month:
            words[base + SPENT], words[base + MONTH] = 0, this_month
        words[base + SPENT] += spent

    def wipe(self) -> None:
        self.words[self.base + RUNNING] = self.words[self.base + HELD] = 0

    def running(self) -> int:
        return self.words[self.base + RUNNING]

    def cost(self, this_month: int) -> int:
        words, base = self.words, self.base
        return words[base + HELD] + (words[base + SPENT] if words[base + MONTH] == this_month else 0)


class Shared:
    """Rows of these keys for so many workers; to be made before they are forked."""

    def __init__(self, names: Iterable[str], workers: int) -> None:
        self.workers = workers
        self._at = {name: at for at, name in enumerate(names)}
        self._words = memoryview(mmap.mmap(-1, max(8 * ROW * len(self._at) * workers, 8))).cast("q")

    def rows(self, name: str) -> list[KeyUsage] | None:
        at = self._at.get(name)
        if at is None:
            return None
        return [KeyUsage(self._words, ROW * (at * self.workers + worker)) for worker in range(self.workers)]

    def member(self, number: int) -> LocalQuotas:
        """Of one worker, which begins."""
        for name in self._at:
            self.rows(name)[number].wipe()  # type: ignore[index]
        return LocalQuotas(self, number)


class LocalQuotas:
    """`clock`: monotonic seconds, the same to all workers. `wall`: Unix time."""

    def __init__(
        self,
        shared: Shared | None = None,
        number: int = 0,
        clock: Callable[[], float] = monotonic,
        wall: Callable[[], float] = time,
    ) -> None:
        self._shared, self._number, self._clock, self._wall = shared, number, clock, wall
        self._rows: dict[str, tuple[KeyUsage, list[KeyUsage], list[SlidingWindow], int]] = {}

    async def reserve(self, name: str, limits: KeyLimits, claim: Claim) -> Reservation:
        return self.claim(name, limits, claim)

    def claim(self, name: str, limits: KeyLimits, claim: Claim, share: int = 1) -> Reservation:
        """The same, at once. `share`: of how many others of which nothing is known we are one."""
        now = self._clock()
        second = int(now)
        own, rows, windows, apart = self._rows.get(name) or self._new(name)
        requests, tokens = windows[0].used(second) if len(windows) == 1 else used(windows, second)
        running = cost = 0
        if limits.concurrent is not None:
            running = sum(map(KeyUsage.running, rows))
        if limits.cost is not None:
            this_month = month(self._wall())
            cost = sum(row.cost(this_month) for row in rows)
        refused = exceeded(limits, claim, LimitUsage(requests, tokens, running, cost), share * apart)
        if refused:
            verdict = self._refusal(limits, claim, (requests, tokens), refused, windows, now, share * apart)
        else:
            own.window.add(second, 1, claim.tokens)
            own.run(0 if limits.cost is None else claim.cost)
            reset = second + WINDOW_S + 1 - now
            verdict = Verdict(None, None, *left(limits, requests + 1, tokens + claim.tokens), reset, reset)
        return Reservation(name, limits, claim, verdict, second, now)

    def settle(self, reservation: Reservation, tokens: int, cost: int) -> None:
        own, _, _, _ = self._rows.get(reservation.name) or self._new(reservation.name)
        second, more = int(self._clock()), tokens - reservation.claim.tokens
        if more < 0:
            own.window.refund(reservation.second, second, -more)
        elif more > 0:
            own.window.add(second, 0, more)
        if reservation.limits.cost is None:
            own.end()
        else:
            own.end(reservation.claim.cost, cost, month(self._wall()))

    def add(self, reservation: Reservation) -> Reservation:
        """Another let it in; it counts here too."""
        own, _, _, _ = self._rows.get(reservation.name) or self._new(reservation.name)
        now = self._clock()
        own.window.add(int(now), 1, reservation.claim.tokens)
        own.run(0 if reservation.limits.cost is None else reservation.claim.cost)
        return Reservation(reservation.name, reservation.limits, reservation.claim, reservation.verdict, int(now), now)

    def spent(self, name: str) -> int:
        """This month, and what running requests hold."""
        own, _, _, _ = self._rows.get(name) or self._new(name)
        return own.cost(month(self._wall()))

    def _new(self, name: str) -> tuple[KeyUsage, list[KeyUsage], list[SlidingWindow], int]:
        rows = None if self._shared is None else self._shared.rows(name)
        apart = 1 if rows is not None or self._shared is None else self._shared.workers
        rows, number = (rows, self._number) if rows is not None else ([KeyUsage(array("q", bytes(8 * ROW)))], 0)
        self._rows[name] = found = rows[number], rows, [row.window for row in rows], apart
        return found

    def _refusal(
        self,
        limits: KeyLimits,
        claim: Claim,
        use: tuple[int, int],
        refused: list[QuotaLimit],
        windows: list[SlidingWindow],
        now: float,
        share: int,
    ) -> Verdict:
        second = int(now)
        part = [None if limit is None else max(limit // share, 1) for limit in (limits.requests, limits.tokens)]
        waits: dict[QuotaLimit, float] = {}
        for limit in refused:
            if limit is QuotaLimit.COST or (limit is QuotaLimit.TOKENS and too_large(limits, claim)):
                return Verdict(limit, None, *left(limits, *use), *self._resets(windows, now))
            if limit is QuotaLimit.CONCURRENT:
                waits[limit] = CONCURRENT_WAIT
            else:
                field = limit is QuotaLimit.TOKENS
                wanted, most = (claim.tokens, 1)[not field], part[field] or 0
                excess = min(use[field] + wanted - most, use[field])
                waits[limit] = available_at(windows, second, field, excess) - now
        limit = max(waits, key=waits.__getitem__)
        return Verdict(limit, waits[limit], *left(limits, *use), *self._resets(windows, now))

    @staticmethod
    def _resets(windows: list[SlidingWindow], now: float) -> tuple[float, float]:
        requests, tokens = resets_at(windows, int(now))
        return max(requests - now, 0.0), max(tokens - now, 0.0)


def left(limits: KeyLimits, requests: int, tokens: int) -> tuple[int, int]:
    return max((limits.requests or 0) - requests, 0), max((limits.tokens or 0) - tokens, 0)
