"""Quotas in Redis, shared by all replicas; in this process while Redis is unavailable.

Rules:
- One round trip per reservation. Settlements are sent with the next reservation, or after SETTLE_DELAY.
- The head of a request is judged without a round trip: by what this process has admitted, which Redis counts too, and
  by the last refusal for requests per minute, which holds until its wait is over. Redis judges the whole claim.
- Admissions by Redis count locally too. While Redis is unavailable each process admits a share: the limit divided by
  the last known number of processes, at least one request; of the monthly cost a share of the last known rest.
- Local admissions and settlements are sent when Redis is back: the last MAX_PENDING settlements, and every cost. Calls
  under way during an outage may be lost, and never count twice.
- An unsettled reservation is renewed, however long the stream, and expires a minute after the end of this process.
- The rules are those of `policies.quota`, in Lua scripts of Redis (`gateway.admission.quota_scripts`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import count
from os import urandom
from time import monotonic

from gateway.admission.auth import account_parts
from gateway.admission.local_quotas import HELD_WAIT, LocalQuotas, SteadyWall, holding, month, remaining
from gateway.admission.quota_scripts import (
    CLOCK,
    LEASE,
    MEMBERS,
    NONE,
    RENEW,
    RESERVE,
    SETTLE,
    keys_of,
    members_key,
    script,
)
from gateway.cluster.redis_client import RedisClient, ScriptPipeline, Unavailable, UnusableKey, ignore_result
from policies.quota.key_limits import HEAD_CLAIM, NANO, Claim, KeyLimits, QuotaLimit, RefusalCause, Reservation, Verdict

log = logging.getLogger("firsttoken")

LIMITS = (None, QuotaLimit.REQUESTS, QuotaLimit.TOKENS, QuotaLimit.CONCURRENT, QuotaLimit.COST)  # the script's numbers
CAUSES = (RefusalCause.REACHED, RefusalCause.HELD, RefusalCause.SPENT, RefusalCause.TOO_LARGE)
MAX_PENDING = 10_000  # settlements
HEARTBEAT = 5.0  # s
RENEW_EVERY = 3  # heartbeats: four times within a lease
RENEW_BATCH = 1_000  # leases renewed by a call
NOT_COUNTED = 1  # `second` of a reservation of which nothing counts
SETTLE_DELAY = 0.02  # s in which settlements are batched: a call costs 0.1 ms of CPU


@dataclass(frozen=True, slots=True)
class Settlement:
    """`repeated`: sent before, and possibly received."""

    reservation: Reservation
    tokens: int
    cost: int
    repeated: bool = False


class RedisQuotas:
    """`members`: last known number of processes with the same limits."""

    def __init__(
        self,
        redis: RedisClient,
        members: int = 1,
        clock: Callable[[], float] = monotonic,
        wall: Callable[[], float] | None = None,
        redis_clock: str = CLOCK,
    ) -> None:
        self.redis, self.members = redis, members
        wall = wall or SteadyWall()
        self.local = LocalQuotas(clock=clock, wall=wall)
        self.pipeline = ScriptPipeline(redis)
        self._clock, self._wall = clock, wall
        self._min_members = members
        self._reserve_script = script(RESERVE, redis_clock)
        self._settle_script = script(SETTLE, redis_clock)
        self._renew_script = script(RENEW, redis_clock)
        self._members_script = script(MEMBERS, redis_clock)
        self._members_key = members_key(redis.namespace)
        self._id, self._sequence = urandom(6).hex(), count(1)
        self._running: dict[str, Reservation] = {}  # by lease
        self._out_of_requests: dict[str, Reservation] = {}  # by key: last refused for requests per minute
        self._pending: deque[Settlement] = deque()
        self._dropped_costs: Counter[tuple[str, int]] = Counter()  # by key and month, of settlements beyond MAX_PENDING
        self._withheld_costs: Counter[tuple[str, int]] = Counter()  # of accounts whose values in Redis are unusable
        self._known_costs: dict[tuple[str, int], tuple[int, int]] = {}  # by key and month: of all, and of this process
        self._timer: asyncio.TimerHandle | None = None
        self._heartbeat: asyncio.Task[None] | None = None
        self._came_up = asyncio.Event()
        redis.on_up(self._came_up.set)

    def start(self) -> None:
        self._heartbeat = asyncio.get_running_loop().create_task(self._heartbeat_forever())

    async def close(self) -> None:
        """Sends all settlements, if Redis is up."""
        if self._heartbeat is not None:
            self._heartbeat.cancel()
            await asyncio.wait([self._heartbeat])
        self.send_pending()
        if self.redis.up:
            leaving = self.pipeline.call(self._members_script, [self._members_key], [self._id, 1])
            leaving.add_done_callback(ignore_result)
        await self.pipeline.close()

    def _keys_of(self, account: str) -> Sequence[str]:
        return keys_of(self.redis.namespace, account)

    # -- requests ---------------------------------------------------------------------------

    def check(self, account: str, limits: KeyLimits) -> Verdict:
        now, refused = self._clock(), self._out_of_requests.get(account)
        if refused is not None and refused.limits == limits:
            verdict, ago = refused.verdict, now - refused.at
            if (wait := (verdict.wait or 0.0) - ago) > 0:
                return replace(verdict, wait=wait, requests_reset=max(verdict.requests_reset - ago, 0.0))
        return self.local.judge(account, at_head(limits), HEAD_CLAIM, 1 if self.redis.up else self.members, now)

    def enter(self, account: str, limits: KeyLimits) -> Reservation:
        verdict = self.check(account, limits)
        if verdict.limit is not None:
            return Reservation(account, limits, HEAD_CLAIM, verdict, NOT_COUNTED, self._clock())
        made = self.local.add(account, at_head(limits), HEAD_CLAIM, verdict)
        return Reservation(account, limits, HEAD_CLAIM, verdict, 0, made.at, local=made)

    async def reserve(
        self, account: str, limits: KeyLimits, claim: Claim, head: Reservation | None = None
    ) -> Reservation:
        if head is not None and head.local is not None:
            self.local.withdraw(head.local)
        lease = f"{self._id}{next(self._sequence):x}"
        most = (limits.requests, limits.tokens, limits.concurrent, limits.cost)
        args: list[str | int] = [lease, month(self._wall()), claim.tokens, claim.cost]
        args += [claim.most_tokens, claim.most_cost]
        args += [NONE if limit is None else limit for limit in most]
        if self._pending and self.redis.up:
            self.send_pending()
        call = self.pipeline.call(self._reserve_script, self._keys_of(account), args)
        try:
            answer = await asyncio.shield(call)
        except Unavailable:
            return self.reserve_locally(account, limits, claim, lease)
        except asyncio.CancelledError:
            call.add_done_callback(lambda done: self._on_unwanted(done, account, limits, claim, lease))
            raise
        return self._reserved(answer, account, limits, claim, lease)

    def settle(self, reservation: Reservation, tokens: int, cost: int) -> None:
        self._running.pop(reservation.lease, None)
        if reservation.local is not None:
            self.local.settle(reservation.local, tokens, cost)
        self._add_pending(Settlement(reservation, tokens, cost))
        if self._timer is None and self.redis.up:
            self._timer = asyncio.get_running_loop().call_later(SETTLE_DELAY, self.send_pending)

    def reserve_locally(self, account: str, limits: KeyLimits, claim: Claim, lease: str) -> Reservation:
        """The unanswered call may still run in Redis, under this lease: settling gives the lease up."""
        share, limited = self.members, limits
        spent, here = self._known_costs.get((account, month(self._wall())), (0, 0))
        if limits.cost is not None:
            limited = replace(limits, cost=(here + max(limits.cost - spent, 0) // share) * share)
        made = self.local.claim(account, limited, claim, share)
        if made.verdict.limit is None:
            reservation = Reservation(account, limits, made.claim, made.verdict, 0, made.at, lease, local=made)
            self._running[lease] = reservation
        else:
            verdict = made.verdict
            if verdict.limit is QuotaLimit.COST and limits.cost is not None:
                verdict = _of_share(verdict, limits.cost, claim.cost, spent)
            reservation = Reservation(account, limits, claim, verdict, NOT_COUNTED, made.at, lease)
            self._add_pending(Settlement(reservation, claim.tokens, 0))
        return reservation

    def _reserved(
        self, answer: Sequence[int], account: str, limits: KeyLimits, claim: Claim, lease: str
    ) -> Reservation:
        refused, cause, wait_ms, requests, tokens, requests_reset_ms, tokens_reset_ms, second, *amounts = answer
        spent, tokens_held, cost_held = map(int, amounts)
        verdict = Verdict(
            limit=LIMITS[refused],
            cause=CAUSES[cause],
            wait=wait_ms / 1e3 if refused and wait_ms >= 0 else None,
            requests_left=remaining(limits.requests, requests),
            tokens_left=remaining(limits.tokens, tokens),
            requests_reset=requests_reset_ms / 1e3,
            tokens_reset=tokens_reset_ms / 1e3,
            tokens_held=tokens_held,
            cost_held=cost_held,
            spent=spent,
        )
        if verdict.limit is None:
            claim = holding(claim, verdict)
        reservation = Reservation(account, limits, claim, verdict, second, self._clock())
        if verdict.limit is None:
            copy = self.local.add(account, limits, claim, verdict)
            reservation = self._running[lease] = replace(reservation, lease=lease, local=copy)
        elif verdict.limit is QuotaLimit.REQUESTS:
            self._out_of_requests[account] = reservation
        if limits.cost is not None:
            self._on_spent(account, spent)
        return reservation

    def _on_spent(self, account: str, spent: int) -> None:
        of = account, month(self._wall())
        before, _ = self._known_costs.get(of, (0, 0))
        if spent < before:
            text = "redis %s: has lost costs of this month: key '%s' had spent %s USD, and now %s USD"
            log.warning(
                text, self.redis.url.redacted, account_parts(account)[0], *(f"{n / NANO:g}" for n in (before, spent))
            )
        self._known_costs[of] = spent, self.local.spent(account)

    def _on_unwanted(
        self, done: asyncio.Future[Sequence[int]], account: str, limits: KeyLimits, claim: Claim, lease: str
    ) -> None:
        """The caller left before the answer."""
        if not done.cancelled() and done.exception() is None:
            made = self._reserved(done.result(), account, limits, claim, lease)
            if made.verdict.limit is None:
                self.settle(made, 0, 0)

    # -- settlements ------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """True if nothing is pending or under way."""
        return not (self._pending or self._timer or self.pipeline.busy)

    @property
    def withholds(self) -> bool:
        """True while a cost waits until values in Redis are usable again."""
        return bool(self._withheld_costs or self._dropped_costs)

    def _add_pending(self, settlement: Settlement) -> None:
        self._pending.append(settlement)
        if len(self._pending) > MAX_PENDING:
            dropped = self._pending.popleft()
            if not dropped.repeated:
                self._dropped_costs[dropped.reservation.account, month(self._wall())] += dropped.cost

    def send_pending(self) -> None:
        """Sends every settlement; the rest waits if Redis goes down."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        this_month, now = month(self._wall()), self._clock()
        for _ in range(len(self._pending)):
            if not self.redis.up:
                return
            settlement = self._pending.popleft()
            reservation = settlement.reservation
            args: list[str | int] = [
                reservation.lease,
                this_month,
                reservation.second,
                int(now - reservation.at),
                reservation.claim.tokens,
                settlement.tokens,
                settlement.cost,
                int(settlement.repeated),
            ]
            call = self.pipeline.call(self._settle_script, self._keys_of(reservation.account), args)
            call.add_done_callback(partial(self._on_sent, settlement))
        for (account, of), cost in list(self._dropped_costs.items()):
            if not self.redis.up:
                return
            del self._dropped_costs[account, of]
            call = self.pipeline.call(self._settle_script, self._keys_of(account), ["", of, 1, 0, 0, 0, cost, 0])
            call.add_done_callback(partial(self._withhold, account, of, cost))

    def _on_sent(self, settlement: Settlement, done: asyncio.Future[int]) -> None:
        """A failed call may have run: repeated, the settlement counts only with an existing lease."""
        made = settlement.reservation
        failed = done.cancelled() or done.exception() is not None
        if self._withhold(made.account, month(self._wall()), settlement.cost, done):
            return
        if failed and made.second:
            self._add_pending(replace(settlement, repeated=True))

    def _withhold(self, account: str, of: int, cost: int, done: asyncio.Future[int]) -> bool:
        """True where Redis cannot count for this account: its cost is sent again at each heartbeat."""
        if done.cancelled() or not isinstance(done.exception(), UnusableKey):
            return False
        self._withheld_costs[account, of] += cost
        return True

    # -- heartbeat --------------------------------------------------------------------------

    async def _heartbeat_forever(self) -> None:
        """Announce this process and renew the leases: at each heartbeat, and at once when Redis comes up."""
        beats = 0
        while True:
            came_up = self._came_up.is_set()
            self._came_up.clear()
            if self.redis.up:
                with suppress(Unavailable):
                    known = await self.pipeline.call(self._members_script, [self._members_key], [self._id, 0])
                    self.members = max(int(known), self._min_members)
                    if came_up or beats % RENEW_EVERY == 0:
                        await self._renew_leases()
                    self._dropped_costs += self._withheld_costs
                    self._withheld_costs.clear()
                    self.send_pending()
            beats += 1
            with suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT):
                    await self._came_up.wait()

    async def _renew_leases(self) -> None:
        by_account: dict[str, list[str | int]] = {}
        for lease, reservation in self._running.items():
            by_account.setdefault(reservation.account, []).extend((lease, held_by(reservation)))
        for account, pairs in by_account.items():
            for at in range(0, len(pairs), 2 * RENEW_BATCH):
                with suppress(UnusableKey):
                    await self.pipeline.call(
                        self._renew_script, self._keys_of(account), pairs[at : at + 2 * RENEW_BATCH]
                    )


def held_by(reservation: Reservation) -> str:
    """As the scripts write it. Tokens admitted by this process alone count in no second of Redis."""
    limits, claim = reservation.limits, reservation.claim
    if limits.cost is None and limits.tokens is None:
        return ""
    return f"{claim.cost}:{claim.tokens if reservation.second else 0}:{reservation.second}"


def _of_share(verdict: Verdict, limit: int, cost: int, spent: int) -> Verdict:
    """A refusal by this process's share of a budget, as one by the whole: final, or over when Redis is back."""
    if spent >= limit or spent + cost > limit:
        cause = RefusalCause.TOO_LARGE if cost > limit > spent else RefusalCause.SPENT
        return replace(verdict, cause=cause, wait=None, spent=spent)
    return replace(verdict, cause=RefusalCause.HELD, wait=HELD_WAIT, spent=spent)


@lru_cache(maxsize=4096)
def at_head(limits: KeyLimits) -> KeyLimits:
    """The limits that a process judges by itself: it does not know all costs of a month."""
    return replace(limits, cost=None)


assert RENEW_EVERY * HEARTBEAT * 1e3 * 2 < LEASE
