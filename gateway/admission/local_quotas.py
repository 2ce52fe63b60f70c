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
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import lru_cache
from time import monotonic, time

from policies.quota.key_limits import (
    HEAD_CLAIM,
    Claim,
    KeyLimits,
    LimitUsage,
    QuotaLimit,
    RefusalCause,
    Reservation,
    Verdict,
    exceeded,
    held,
    share_of,
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
from policies.types import FOREVER, NEVER

JUMP, JUMP_BELIEVED = 60.0, 3600.0  # s that a clock may be adjusted by; s until a larger change counts
HELD_WAIT = 1.0  # s to wait for what requests in progress give back: their end is unknown
BUILT = 1_767_225_600.0  # 2026-01-01: no clock of a machine that runs this shows an earlier time and is right
UNKNOWN_MONTH = 0  # of a clock before BUILT; its costs go to the month that is known first


def month(wall: float) -> int:
    """202610: calendar month of a Unix time, in UTC. Before BUILT: UNKNOWN_MONTH."""
    return _month_of(int(wall // 86_400)) if wall >= BUILT else UNKNOWN_MONTH


@lru_cache(maxsize=4)
def _month_of(day: int) -> int:
    date = datetime.fromtimestamp(day * 86_400, UTC)
    return date.year * 100 + date.month


RUNNING, MONTH, SPENT, HELD, HEAD = range(5)  # words of a row; the windows of use and of held tokens follow
ROW = HEAD + 2 * WINDOW_WORDS


class SteadyWall:
    """Unix time that follows a jump of the machine's clock after JUMP_BELIEVED seconds. A clock that is wrong for a
    while neither forgets the costs of a month nor opens the next month. A time before BUILT is never believed beside
    another: a machine that boots in 1970 has the true time as soon as its clock is set."""

    def __init__(self, wall: Callable[[], float] = time, clock: Callable[[], float] = monotonic) -> None:
        self._wall, self._clock = wall, clock
        self._offset = wall() - clock()
        self._jumped_at = NEVER  # when the clock was first found wrong

    def __call__(self) -> float:
        now = self._clock()
        offset = self._wall() - now
        if abs(offset - self._offset) <= JUMP or now + self._offset < BUILT <= now + offset:
            self._offset, self._jumped_at = offset, NEVER
        elif now + offset < BUILT:
            self._jumped_at = NEVER
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
        self.held = SlidingWindow(words, base + HEAD + WINDOW_WORDS)  # tokens of running requests

    @property
    def running(self) -> int:
        return self.words[self.base + RUNNING]

    def begin(self, cost: int) -> None:
        """`cost`: maximum cost of the request; 0 without a limit on cost."""
        self.words[self.base + RUNNING] += 1
        self.words[self.base + HELD] += cost

    def end(self, held: int = 0, spent: int = 0, this_month: int | None = None) -> None:
        """`this_month` None: the key has no limit on cost."""
        words, base = self.words, self.base
        words[base + RUNNING] -= 1
        if this_month is None:
            return
        words[base + HELD] -= held
        before = words[base + MONTH]
        if UNKNOWN_MONTH != this_month != before:
            words[base + MONTH] = this_month
            if before != UNKNOWN_MONTH:
                words[base + SPENT] = 0
        words[base + SPENT] += spent

    def wipe_running(self) -> None:
        self.words[self.base + RUNNING] = 0
        self.words[self.base + HELD] = 0
        for at in range(self.held.base, self.held.base + WINDOW_WORDS):
            self.words[at] = 0

    @property
    def held_cost(self) -> int:
        return self.words[self.base + HELD]

    def spent(self, this_month: int) -> int:
        of = self.words[self.base + MONTH]
        return self.words[self.base + SPENT] if UNKNOWN_MONTH in (of, this_month) or of == this_month else 0


class SharedQuotaMemory:
    """Rows for the keys with these accounts, to be created before the workers are forked."""

    def __init__(self, accounts: Iterable[str], workers: int) -> None:
        self.workers = workers
        self._index = {account: at for at, account in enumerate(accounts)}
        self._words = memoryview(mmap.mmap(-1, max(8 * ROW * len(self._index) * workers, 8))).cast("q")

    def rows(self, account: str) -> list[KeyUsage] | None:
        """By worker; None for a key without rows."""
        at = self._index.get(account)
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

    def check(self, account: str, limits: KeyLimits) -> Verdict:
        """The verdict on the head of a request, of which nothing is claimed. `account`: of the key."""
        return self.judge(account, limits, HEAD_CLAIM, 1, self._clock())

    def enter(self, account: str, limits: KeyLimits) -> Reservation:
        """A reservation by the head, to be settled, or given to `reserve`."""
        return self.claim(account, limits, HEAD_CLAIM)

    async def reserve(
        self, account: str, limits: KeyLimits, claim: Claim, head: Reservation | None = None
    ) -> Reservation:
        """A refused reservation has a `verdict.limit`, and has claimed nothing. `head`: is withdrawn."""
        if head is not None:
            self.withdraw(head)
        return self.claim(account, limits, claim)

    def claim(self, account: str, limits: KeyLimits, claim: Claim, share: int = 1) -> Reservation:
        """`reserve`, at once. `share`: number of processes among which the limit is divided."""
        now = self._clock()
        verdict = self.judge(account, limits, claim, share, now)
        if verdict.limit is not None:
            return Reservation(account, limits, claim, verdict, int(now), now)
        claim = holding(claim, verdict)
        self._admit(self._key(account), limits, claim, int(now))
        return Reservation(account, limits, claim, verdict, int(now), now)

    def withdraw(self, reservation: Reservation) -> None:
        """Ends an admitted reservation, once, as if it had never been made."""
        own, now = self._key(reservation.account).own, int(self._clock())
        own.window.refund(reservation.second, now, reservation.claim.tokens, 1)
        self._end(own, reservation, now, 0)

    def judge(self, account: str, limits: KeyLimits, claim: Claim, share: int, now: float) -> Verdict:
        """The verdict on a claim. Changes nothing."""
        second, key = int(now), self._key(account)
        share *= key.divisor
        windows, usage = [row.window for row in key.rows], self._usage(key, limits, second)
        if refused := exceeded(limits, claim, usage, share):
            return self._refusal(limits, claim, usage, refused, windows, now, share)
        reset = second + WINDOW_S + 1 - now
        tokens_held, cost_held = held(limits, claim, usage, share)
        return Verdict(
            requests_left=remaining(limits.requests, usage.requests + 1),
            tokens_left=remaining(limits.tokens, usage.tokens + tokens_held),
            requests_reset=reset,
            tokens_reset=reset,
            tokens_held=tokens_held,
            cost_held=cost_held,
            spent=usage.spent,
        )

    def settle(self, reservation: Reservation, tokens: int, cost: int) -> None:
        """Ends an admitted reservation, once. `tokens` and `cost` (billionths of a USD): actual amounts."""
        own = self._key(reservation.account).own
        second, more = int(self._clock()), tokens - reservation.claim.tokens
        if more < 0:
            own.window.refund(reservation.second, second, -more)
        elif more > 0:
            own.window.add(second, 0, more)
        self._end(own, reservation, second, cost)

    def add(self, account: str, limits: KeyLimits, claim: Claim, verdict: Verdict) -> Reservation:
        """Counts a reservation admitted by Redis."""
        now = self._clock()
        self._admit(self._key(account), limits, claim, int(now))
        return Reservation(account, limits, claim, verdict, int(now), now)

    def spent(self, account: str) -> int:
        """Cost of this month, including the cost held by running requests."""
        own = self._key(account).own
        return own.spent(month(self._wall())) + own.held_cost

    def _usage(self, key: _KeyRows, limits: KeyLimits, second: int) -> LimitUsage:
        requests, tokens = used([row.window for row in key.rows], second)
        held_tokens, spent, held_cost, running = 0, 0, 0, 0
        for row in key.rows:
            running += row.running
            if limits.tokens is not None:
                held_tokens += row.held.used(second)[1]
            if limits.cost is not None:
                spent += row.spent(month(self._wall()))
                held_cost += row.held_cost
        return LimitUsage(requests, tokens, held_tokens, running, spent, held_cost)

    def _admit(self, key: _KeyRows, limits: KeyLimits, claim: Claim, second: int) -> None:
        key.own.window.add(second, 1, claim.tokens)
        if limits.tokens is not None:
            key.own.held.add(second, 0, claim.tokens)
        key.own.begin(0 if limits.cost is None else claim.cost)

    def _end(self, own: KeyUsage, reservation: Reservation, second: int, cost: int) -> None:
        """The request holds nothing any more."""
        claim, limits = reservation.claim, reservation.limits
        if limits.tokens is not None:
            own.held.refund(reservation.second, second, claim.tokens)
        if limits.cost is None:
            own.end()
        else:
            own.end(claim.cost, cost, month(self._wall()))

    def _key(self, account: str) -> _KeyRows:
        found = self._keys.get(account)
        if found is None:
            shared = self._shared
            rows = None if shared is None else shared.rows(account)
            divisor = 1 if rows is not None or shared is None else shared.workers
            own = KeyUsage(array("q", bytes(8 * ROW))) if rows is None else rows[self._number]
            rows = rows or [own]
            found = self._keys[account] = _KeyRows(own, rows, divisor)
        return found

    def _refusal(
        self,
        limits: KeyLimits,
        claim: Claim,
        usage: LimitUsage,
        refused: list[tuple[QuotaLimit, RefusalCause]],
        windows: list[SlidingWindow],
        now: float,
        share: int,
    ) -> Verdict:
        """The refusing limit with the longest wait, or without any."""
        second, longest = int(now), -1.0
        limit, cause = refused[0]
        for each, why in refused:
            wait = _wait(each, why, limits, claim, usage, windows, now, share)
            if wait > longest:
                limit, cause, longest = each, why, wait
        requests_reset, tokens_reset = resets_at(windows, second)
        return Verdict(
            limit=limit,
            wait=longest if longest < FOREVER else None,
            cause=cause,
            requests_left=remaining(limits.requests, usage.requests),
            tokens_left=remaining(limits.tokens, usage.tokens),
            requests_reset=max(requests_reset - now, 0.0),
            tokens_reset=max(tokens_reset - now, 0.0),
            spent=usage.spent,
        )


def _wait(
    limit: QuotaLimit,
    cause: RefusalCause,
    limits: KeyLimits,
    claim: Claim,
    usage: LimitUsage,
    windows: list[SlidingWindow],
    now: float,
    share: int,
) -> float:
    """s until this limit admits the claim, if no other request comes; FOREVER: it never does."""
    if cause in (RefusalCause.SPENT, RefusalCause.TOO_LARGE):
        return FOREVER
    if limit in (QuotaLimit.CONCURRENT, QuotaLimit.COST):
        return HELD_WAIT
    if limit is QuotaLimit.REQUESTS:
        excess = usage.requests + 1 - share_of(limits.requests or 0, share)
        return available_at(windows, int(now), 0, min(excess, usage.requests)) - now
    excess = usage.tokens + claim.tokens - share_of(limits.tokens or 0, share)
    wait = available_at(windows, int(now), 1, min(excess, usage.tokens)) - now
    return min(wait, HELD_WAIT) if cause is RefusalCause.HELD else wait


def holding(claim: Claim, verdict: Verdict) -> Claim:
    """The claim as admitted by the verdict: what the request holds."""
    if (verdict.tokens_held, verdict.cost_held) == (claim.tokens, claim.cost):
        return claim
    return replace(claim, tokens=verdict.tokens_held, cost=verdict.cost_held)


def remaining(limit: int | None, used: int) -> int:
    return max((limit or 0) - used, 0)
