"""Quotas in Redis: one for all replicas, and in this process while Redis is away.

Rules:
- One round trip per reservation, none that a caller waits for after it. What is settled is told before the next
  reservation, in the same flight, or after SOON.
- All that Redis lets in counts here too. While it is away each process lets in its part: the limit by the number of
  processes last known, one request at least; of a month's cost its part of what was left when Redis was last heard.
- What was let in and settled meanwhile is told when Redis is back: the last SETTLEMENTS of them, and every cost. What
  was on its way when Redis went may be lost: it is not told twice.
- A reservation that is not settled is renewed from here, however long its stream, and lapses a minute after our end.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from os import urandom
from time import monotonic, time
from typing import NamedTuple

from gateway.admission import redis_scripts as scripts
from gateway.admission.local_quotas import LocalQuotas, left
from gateway.admission.redis_scripts import CLOCK, LEASE, MEMBERS_KEY, NONE, Script, keys_of
from gateway.admission.reservations import Reservation, month
from gateway.cluster.redis_client import RedisClient, Unavailable
from gateway.cluster.script_pipeline import ScriptPipeline
from policies.quota.key_limits import Claim, KeyLimits, QuotaLimit, Verdict

LIMITS = (
    None,
    QuotaLimit.REQUESTS,
    QuotaLimit.TOKENS,
    QuotaLimit.CONCURRENT,
    QuotaLimit.COST,
)  # as the script numbers them
SETTLEMENTS = 10_000
TICK = 5.0  # s between two signs of life
RENEW_EVERY = 3  # ticks: four times within a lease
MOST_LEASES = 1_000  # renewed by one call
FORGET = 1  # as the second of a reservation: nothing of it counts
SOON = 0.02  # s that a settlement waits for others to go along with: a call costs 0.1 ms of ours


class Settlement(NamedTuple):
    reservation: Reservation
    tokens: int
    cost: int
    again: bool = False


class RedisQuotas:
    """`members`: how many processes share a limit, as far as is known."""

    def __init__(
        self,
        link: RedisClient,
        members: int = 1,
        clock: Callable[[], float] = monotonic,
        wall: Callable[[], float] = time,
        redis_clock: str = CLOCK,
    ) -> None:
        self.link, self.members, self._clock, self._wall = link, members, clock, wall
        self.local = LocalQuotas(clock=clock, wall=wall)
        self._least = members
        self._reserve, self._settle, self._renew, self._members = (
            Script(text, redis_clock) for text in (scripts.RESERVE, scripts.SETTLE, scripts.RENEW, scripts.MEMBERS)
        )
        self._flights = ScriptPipeline(link)
        self._names: dict[str, list[str]] = {}  # the keys in Redis of a key
        self._id, self._ordinals = urandom(6).hex(), count(1)
        self._running: dict[str, Reservation] = {}  # by lease
        self._untold: deque[Settlement] = deque()
        self._owed: Counter[tuple[str, int]] = Counter()  # by key and month: costs of settlements that were dropped
        self._spent: dict[tuple[str, int], tuple[int, int]] = {}  # by key and month: by all, and by us, as last heard
        self._due: asyncio.TimerHandle | None = None
        self._ticking: asyncio.Task[None] | None = None
        self._back = asyncio.Event()
        link.on_up(self._returned)

    def start(self) -> None:
        self._ticking = asyncio.get_running_loop().create_task(self._tick())

    async def close(self) -> None:
        """What is settled is told, if it can be."""
        if self._ticking is not None:
            self._ticking.cancel()
            await asyncio.wait([self._ticking])
        if self._due is not None:
            self._due.cancel()
        self._tell()
        if self.link.up:
            self._flights.ask(self._members, [MEMBERS_KEY], [self._id, 1]).add_done_callback(_heard)
        await self._flights.close()

    # -- requests -------------------------------------------------------------------------

    async def reserve(self, name: str, limits: KeyLimits, claim: Claim) -> Reservation:
        lease = f"{self._id}{next(self._ordinals):x}"
        most = (limits.requests, limits.tokens, limits.concurrent, limits.cost)
        args: list[str | int] = [lease, month(self._wall()), claim.tokens, claim.cost]
        args += [NONE if limit is None else limit for limit in most]
        if self._untold and self.link.up:
            self._tell()
        asked = self._flights.ask(self._reserve, self._keys(name), args)
        try:
            answer = await asyncio.shield(asked)
        except Unavailable:
            return self._alone(name, limits, claim, lease)
        except asyncio.CancelledError:
            asked.add_done_callback(lambda done: self._unwanted(done, name, limits, claim, lease))
            raise
        return self._let_in(answer, name, limits, claim, lease)

    def settle(self, reservation: Reservation, tokens: int, cost: int) -> None:
        self._running.pop(reservation.lease, None)
        if reservation.beside is not None:
            self.local.settle(reservation.beside, tokens, cost)
        self._keep(Settlement(reservation, tokens, cost))
        if self._due is None and self.link.up:
            self._due = asyncio.get_running_loop().call_later(SOON, self._tell)

    def _let_in(self, answer: Sequence[int], name: str, limits: KeyLimits, claim: Claim, lease: str) -> Reservation:
        refused, wait, requests, tokens, requests_reset, tokens_reset, second, spent = answer
        verdict = Verdict(
            LIMITS[refused],
            wait / 1e3 if refused and wait >= 0 else None,
            *left(limits, requests, tokens),
            requests_reset / 1e3,
            tokens_reset / 1e3,
        )
        reservation = Reservation(name, limits, claim, verdict, second, self._clock())
        if verdict.limit is None:
            reservation.lease = lease
            reservation.beside = self.local.add(reservation)
            self._running[lease] = reservation
        if limits.cost is not None:
            self._spent[name, month(self._wall())] = int(spent), self.local.spent(name)
        return reservation

    def _alone(self, name: str, limits: KeyLimits, claim: Claim, lease: str) -> Reservation:
        """Redis may yet do what it was asked, when it comes to: under this lease, which is given up when it is told."""
        own, limited = self.members, limits
        if limits.cost is not None:
            spent, here = self._spent.get((name, month(self._wall())), (0, 0))
            limited = replace(limits, cost=(here + max(limits.cost - spent, 0) // own) * own)
        made = self.local.claim(name, limited, claim, own)
        reservation = Reservation(name, limits, claim, made.verdict, 0, made.at)
        reservation.lease = lease
        if made.verdict.limit is None:
            reservation.beside = made
            self._running[lease] = reservation
        else:
            reservation.second = FORGET
            self._keep(Settlement(reservation, claim.tokens, 0))
        return reservation

    def _unwanted(
        self, done: asyncio.Future[Sequence[int]], name: str, limits: KeyLimits, claim: Claim, lease: str
    ) -> None:
        """Whoever it was for left while it was made."""
        if not done.cancelled() and done.exception() is None:
            made = self._let_in(done.result(), name, limits, claim, lease)
            if made.verdict.limit is None:
                self.settle(made, 0, 0)

    def _keys(self, name: str) -> list[str]:
        keys = self._names.get(name)
        if keys is None:
            keys = self._names[name] = keys_of(name)
        return keys

    # -- what Redis is told ---------------------------------------------------------------

    def _keep(self, settlement: Settlement) -> None:
        self._untold.append(settlement)
        if len(self._untold) > SETTLEMENTS:
            dropped = self._untold.popleft()
            if not dropped.again:
                self._owed[dropped.reservation.name, month(self._wall())] += dropped.cost

    def _tell(self) -> None:
        """All that is settled; what cannot be told now waits."""
        if self._due is not None:
            self._due.cancel()
            self._due = None
        this_month, now = month(self._wall()), self._clock()
        for _ in range(len(self._untold)):
            if not self.link.up:
                return
            settlement = self._untold.popleft()
            reservation, tokens, cost, again = settlement
            args: list[str | int] = [
                reservation.lease,
                this_month,
                reservation.second,
                int(now - reservation.at),
                reservation.claim.tokens,
                tokens,
                cost,
                int(again),
            ]
            asked = self._flights.ask(self._settle, self._keys(reservation.name), args)
            asked.add_done_callback(partial(self._told, settlement))
        for (name, of), cost in list(self._owed.items()):
            if not self.link.up:
                return
            del self._owed[name, of]
            asked = self._flights.ask(self._settle, self._keys(name), ["", of, 1, 0, 0, 0, cost, 0])
            asked.add_done_callback(_heard)

    def _told(self, settlement: Settlement, done: asyncio.Future[int]) -> None:
        """One that failed may have arrived all the same: told again, it counts if its lease is still there."""
        failed = done.cancelled() or done.exception() is not None
        if failed and settlement.reservation.second:
            self._keep(settlement._replace(again=True))

    def _returned(self) -> None:
        self._back.set()

    async def _tick(self) -> None:
        """Signs of life; and all that is to be told when Redis is back, at once."""
        ticks = 0
        while True:
            returned = self._back.is_set()
            self._back.clear()
            if self.link.up:
                try:
                    known = await self._flights.ask(self._members, [MEMBERS_KEY], [self._id, 0])
                    self.members = max(int(known), self._least)
                    if returned or ticks % RENEW_EVERY == 0:
                        await self._renew_all()
                    self._tell()
                except Unavailable:
                    pass
            ticks += 1
            try:
                async with asyncio.timeout(TICK):
                    await self._back.wait()
            except TimeoutError:
                continue

    async def _renew_all(self) -> None:
        by_name: dict[str, list[str | int]] = {}
        for lease, reservation in self._running.items():
            by_name.setdefault(reservation.name, []).extend((lease, reservation.claim.cost))
        for name, pairs in by_name.items():
            for at in range(0, len(pairs), 2 * MOST_LEASES):
                await self._flights.ask(self._renew, self._keys(name), pairs[at : at + 2 * MOST_LEASES])


def _heard(done: asyncio.Future[int]) -> None:
    """What came of it is nobody's concern."""
    if not done.cancelled():
        done.exception()


assert RENEW_EVERY * TICK * 1e3 * 2 < LEASE
