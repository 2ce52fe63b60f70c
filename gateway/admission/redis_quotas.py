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
- The Lua scripts are atomic, on Redis' own clock, and follow the rules of `policies.quota`; tests hold both to the
  same.

Redis keys (those of a caller's key share a slot of a cluster; each expires):
    firsttoken:{NAME}:minute    hash: `r<second>`, `t<second>`: requests and tokens admitted in that second
    firsttoken:{NAME}:running   sorted set: unsettled reservations by expiry, ms
    firsttoken:{NAME}:held      hash: maximum cost of each running reservation, billionths of a USD
    firsttoken:{NAME}:spent     hash: by month, billionths of a USD
    firsttoken:members          sorted set: processes that enforce quotas, by expiry
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import count
from os import urandom
from time import monotonic
from urllib.parse import quote

from gateway.admission.local_quotas import LocalQuotas, SteadyWall, month, remaining
from gateway.cluster.redis_client import PREFIX, RedisClient, ScriptPipeline, Unavailable
from policies.quota.key_limits import HEAD_CLAIM, Claim, KeyLimits, QuotaLimit, Reservation, Verdict
from policies.quota.sliding_window import WINDOW_S

LEASE = 60_000  # ms until a reservation without renewal expires
MEMBER = 15_000  # ms
MONTHS = 40 * 86_400_000  # ms to keep the costs of a month after the last cost
NONE = -1  # no limit
MEMBERS_KEY = PREFIX + "members"

CLOCK = "redis.call('TIME')"

_NOW = """
local time = CLOCK
local second = tonumber(time[1])
local now = second * 1000 + math.floor(tonumber(time[2]) / 1000)
"""

# Returns: the limit that refuses (0: none), ms to wait (-1: waiting does not help), requests and tokens that count, ms
# until each resets, the second, the cost of the month.
RESERVE = """
local lease, month = ARGV[1], ARGV[2]
local tokens, cost = tonumber(ARGV[3]), tonumber(ARGV[4])
local most_requests, most_tokens = tonumber(ARGV[5]), tonumber(ARGV[6])
local most_running, most_cost = tonumber(ARGV[7]), tonumber(ARGV[8])

for _, lapsed in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now)) do
  redis.call('ZREM', KEYS[2], lapsed)
  redis.call('HDEL', KEYS[3], lapsed)
end

local by = {r = {}, t = {}}
local sum, last, old = {r = 0, t = 0}, {r = 0, t = 0}, {}
local fields = redis.call('HGETALL', KEYS[1])
for i = 1, #fields, 2 do
  local kind, at, count = string.sub(fields[i], 1, 1), tonumber(string.sub(fields[i], 2)), tonumber(fields[i + 1])
  if at < second - SPAN then
    old[#old + 1] = fields[i]
  else
    by[kind][at] = count
    sum[kind] = sum[kind] + count
    if count > 0 and at > last[kind] then last[kind] = at end
  end
end
if #old > 0 then redis.call('HDEL', KEYS[1], unpack(old)) end

local function wait(kind, excess)
  for at = second - SPAN, second do
    excess = excess - (by[kind][at] or 0)
    if excess <= 0 then return (at + SPAN + 1) * 1000 - now end
  end
  return (SPAN + 1) * 1000
end

local spent = tonumber(redis.call('HGET', KEYS[4], month) or '0')
local refused, longest = 0, -1
local function refuse(limit, ms)
  if ms < 0 then ms = 1e15 end
  if ms > longest then refused, longest = limit, ms end
end
if most_cost >= 0 then
  local held = 0
  for _, one in ipairs(redis.call('HVALS', KEYS[3])) do held = held + tonumber(one) end
  if spent + held + cost > most_cost then refuse(4, -1) end
end
if most_running >= 0 and redis.call('ZCARD', KEYS[2]) >= most_running then refuse(3, 1000) end
if most_requests >= 0 and sum.r >= most_requests then refuse(1, wait('r', sum.r + 1 - most_requests)) end
if most_tokens >= 0 and sum.t + tokens > most_tokens then
  if tokens > most_tokens then refuse(2, -1) else refuse(2, wait('t', sum.t + tokens - most_tokens)) end
end

if refused == 0 then
  redis.call('HINCRBY', KEYS[1], 'r' .. second, 1)
  redis.call('HINCRBY', KEYS[1], 't' .. second, tokens)
  redis.call('PEXPIRE', KEYS[1], (SPAN + 2) * 1000)
  redis.call('ZADD', KEYS[2], now + LEASE, lease)
  redis.call('PEXPIRE', KEYS[2], 2 * LEASE)
  if cost > 0 then
    redis.call('HSET', KEYS[3], lease, string.format('%.0f', cost))
    redis.call('PEXPIRE', KEYS[3], 2 * LEASE)
  end
  sum.r, sum.t, last.r, last.t = sum.r + 1, sum.t + tokens, second, second
end
if longest == 1e15 then longest = -1 end
local function reset(kind) if last[kind] == 0 then return 0 end return (last[kind] + SPAN + 1) * 1000 - now end
return {refused, longest, sum.r, sum.t, reset('r'), reset('t'), second, string.format('%.0f', spent)}
"""

# `let_in` 0: admitted by a process alone, `ago` s before; unless the script did too, and the answer came too late.
# `again`: sent before and possibly received; then the lease is gone.
SETTLE = """
local lease, month, let_in, ago = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local reserved, tokens, cost, again = tonumber(ARGV[5]), tonumber(ARGV[6]), ARGV[7], ARGV[8] == '1'
local counted = redis.call('ZREM', KEYS[2], lease)
local told = redis.call('ZREM', KEYS[2], lease .. '~')
redis.call('HDEL', KEYS[3], lease, lease .. '~')
if again and counted + told == 0 then return 0 end
if let_in == 0 and counted == 1 then let_in = second - ago end
local function count(at, requests, more)
  if requests > 0 then redis.call('HINCRBY', KEYS[1], 'r' .. at, requests) end
  redis.call('HINCRBY', KEYS[1], 't' .. at, more)
  redis.call('PEXPIRE', KEYS[1], (SPAN + 2) * 1000)
end
if let_in == 0 then
  if ago <= SPAN then count(second - ago, 1, tokens) end
elseif tokens > reserved then
  count(second, 0, tokens - reserved)
elseif tokens < reserved and let_in >= second - SPAN and redis.call('HEXISTS', KEYS[1], 't' .. let_in) == 1 then
  count(let_in, 0, tokens - reserved)
end
if cost ~= '0' then
  redis.call('HINCRBY', KEYS[4], month, cost)
  redis.call('PEXPIRE', KEYS[4], MONTHS)
end
return 1
"""

# Takes pairs of a lease and the held cost. An unknown lease is marked by `~`: not counted here before.
RENEW = """
for i = 1, #ARGV, 2 do
  local lease = ARGV[i]
  if not redis.call('ZSCORE', KEYS[2], lease) then lease = lease .. '~' end
  redis.call('ZADD', KEYS[2], now + LEASE, lease)
  if ARGV[i + 1] ~= '0' then redis.call('HSET', KEYS[3], lease, ARGV[i + 1]) end
end
redis.call('PEXPIRE', KEYS[2], 2 * LEASE)
redis.call('PEXPIRE', KEYS[3], 2 * LEASE)
return 1
"""

# Returns the number of members. ARGV[2] 1: the member leaves.
MEMBERS = """
if ARGV[2] == '1' then redis.call('ZREM', KEYS[1], ARGV[1]) else redis.call('ZADD', KEYS[1], now + MEMBER, ARGV[1]) end
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
redis.call('PEXPIRE', KEYS[1], MEMBER)
return redis.call('ZCARD', KEYS[1])
"""


def script(text: str, clock: str = CLOCK) -> str:
    text = _NOW + text
    for name, value in (("SPAN", WINDOW_S), ("LEASE", LEASE), ("MEMBER", MEMBER), ("MONTHS", MONTHS), ("CLOCK", clock)):
        text = text.replace(name, str(value))
    return text


@lru_cache(maxsize=4096)
def keys_of(name: str) -> Sequence[str]:
    """Redis keys of a caller's key, in the order of the scripts' KEYS."""
    tagged = f"{PREFIX}{{{quote(name, safe='')}}}"
    return tuple(f"{tagged}:{kind}" for kind in ("minute", "running", "held", "spent"))


LIMITS = (None, QuotaLimit.REQUESTS, QuotaLimit.TOKENS, QuotaLimit.CONCURRENT, QuotaLimit.COST)  # the script's numbers
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
        self._id, self._sequence = urandom(6).hex(), count(1)
        self._running: dict[str, Reservation] = {}  # by lease
        self._out_of_requests: dict[str, Reservation] = {}  # by key: last refused for requests per minute
        self._pending: deque[Settlement] = deque()
        self._dropped_costs: Counter[tuple[str, int]] = Counter()  # by key and month, of settlements beyond MAX_PENDING
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
            leaving = self.pipeline.call(self._members_script, [MEMBERS_KEY], [self._id, 1])
            leaving.add_done_callback(_ignore_result)
        await self.pipeline.close()

    # -- requests ---------------------------------------------------------------------------

    def check(self, name: str, limits: KeyLimits) -> Verdict:
        now, refused = self._clock(), self._out_of_requests.get(name)
        if refused is not None and refused.limits == limits:
            verdict, ago = refused.verdict, now - refused.at
            if (wait := (verdict.wait or 0.0) - ago) > 0:
                return replace(verdict, wait=wait, requests_reset=max(verdict.requests_reset - ago, 0.0))
        return self.local.judge(name, at_head(limits), HEAD_CLAIM, 1 if self.redis.up else self.members, now)

    def enter(self, name: str, limits: KeyLimits) -> Reservation:
        verdict = self.check(name, limits)
        if verdict.limit is not None:
            return Reservation(name, limits, HEAD_CLAIM, verdict, NOT_COUNTED, self._clock())
        made = self.local.add(name, at_head(limits), HEAD_CLAIM, verdict)
        return Reservation(name, limits, HEAD_CLAIM, verdict, 0, made.at, local=made)

    async def reserve(self, name: str, limits: KeyLimits, claim: Claim, head: Reservation | None = None) -> Reservation:
        if head is not None and head.local is not None:
            self.local.withdraw(head.local)
        lease = f"{self._id}{next(self._sequence):x}"
        most = (limits.requests, limits.tokens, limits.concurrent, limits.cost)
        args: list[str | int] = [lease, month(self._wall()), claim.tokens, claim.cost]
        args += [NONE if limit is None else limit for limit in most]
        if self._pending and self.redis.up:
            self.send_pending()
        call = self.pipeline.call(self._reserve_script, keys_of(name), args)
        try:
            answer = await asyncio.shield(call)
        except Unavailable:
            return self.reserve_locally(name, limits, claim, lease)
        except asyncio.CancelledError:
            call.add_done_callback(lambda done: self._on_unwanted(done, name, limits, claim, lease))
            raise
        return self._reserved(answer, name, limits, claim, lease)

    def settle(self, reservation: Reservation, tokens: int, cost: int) -> None:
        self._running.pop(reservation.lease, None)
        if reservation.local is not None:
            self.local.settle(reservation.local, tokens, cost)
        self._add_pending(Settlement(reservation, tokens, cost))
        if self._timer is None and self.redis.up:
            self._timer = asyncio.get_running_loop().call_later(SETTLE_DELAY, self.send_pending)

    def reserve_locally(self, name: str, limits: KeyLimits, claim: Claim, lease: str) -> Reservation:
        """The unanswered call may still run in Redis, under this lease: settling gives the lease up."""
        share, limited = self.members, limits
        if limits.cost is not None:
            spent, here = self._known_costs.get((name, month(self._wall())), (0, 0))
            limited = replace(limits, cost=(here + max(limits.cost - spent, 0) // share) * share)
        made = self.local.claim(name, limited, claim, share)
        if made.verdict.limit is None:
            reservation = Reservation(name, limits, claim, made.verdict, 0, made.at, lease, local=made)
            self._running[lease] = reservation
        else:
            reservation = Reservation(name, limits, claim, made.verdict, NOT_COUNTED, made.at, lease)
            self._add_pending(Settlement(reservation, claim.tokens, 0))
        return reservation

    def _reserved(self, answer: Sequence[int], name: str, limits: KeyLimits, claim: Claim, lease: str) -> Reservation:
        refused, wait_ms, requests, tokens, requests_reset_ms, tokens_reset_ms, second, spent = answer
        verdict = Verdict(
            limit=LIMITS[refused],
            wait=wait_ms / 1e3 if refused and wait_ms >= 0 else None,
            requests_left=remaining(limits.requests, requests),
            tokens_left=remaining(limits.tokens, tokens),
            requests_reset=requests_reset_ms / 1e3,
            tokens_reset=tokens_reset_ms / 1e3,
        )
        reservation = Reservation(name, limits, claim, verdict, second, self._clock())
        if verdict.limit is None:
            copy = self.local.add(name, limits, claim, verdict)
            reservation = self._running[lease] = replace(reservation, lease=lease, local=copy)
        elif verdict.limit is QuotaLimit.REQUESTS:
            self._out_of_requests[name] = reservation
        if limits.cost is not None:
            self._known_costs[name, month(self._wall())] = int(spent), self.local.spent(name)
        return reservation

    def _on_unwanted(
        self, done: asyncio.Future[Sequence[int]], name: str, limits: KeyLimits, claim: Claim, lease: str
    ) -> None:
        """The caller left before the answer."""
        if not done.cancelled() and done.exception() is None:
            made = self._reserved(done.result(), name, limits, claim, lease)
            if made.verdict.limit is None:
                self.settle(made, 0, 0)

    # -- settlements ------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """True if nothing is pending or under way."""
        return not (self._pending or self._timer or self.pipeline.busy)

    def _add_pending(self, settlement: Settlement) -> None:
        self._pending.append(settlement)
        if len(self._pending) > MAX_PENDING:
            dropped = self._pending.popleft()
            if not dropped.repeated:
                self._dropped_costs[dropped.reservation.name, month(self._wall())] += dropped.cost

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
            call = self.pipeline.call(self._settle_script, keys_of(reservation.name), args)
            call.add_done_callback(partial(self._on_sent, settlement))
        for (name, of), cost in list(self._dropped_costs.items()):
            if not self.redis.up:
                return
            del self._dropped_costs[name, of]
            call = self.pipeline.call(self._settle_script, keys_of(name), ["", of, 1, 0, 0, 0, cost, 0])
            call.add_done_callback(_ignore_result)

    def _on_sent(self, settlement: Settlement, done: asyncio.Future[int]) -> None:
        """A failed call may have run: repeated, the settlement counts only with an existing lease."""
        failed = done.cancelled() or done.exception() is not None
        if failed and settlement.reservation.second:
            self._add_pending(replace(settlement, repeated=True))

    # -- heartbeat --------------------------------------------------------------------------

    async def _heartbeat_forever(self) -> None:
        """Announce this process and renew the leases: at each heartbeat, and at once when Redis comes up."""
        beats = 0
        while True:
            came_up = self._came_up.is_set()
            self._came_up.clear()
            if self.redis.up:
                with suppress(Unavailable):
                    known = await self.pipeline.call(self._members_script, [MEMBERS_KEY], [self._id, 0])
                    self.members = max(int(known), self._min_members)
                    if came_up or beats % RENEW_EVERY == 0:
                        await self._renew_leases()
                    self.send_pending()
            beats += 1
            with suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT):
                    await self._came_up.wait()

    async def _renew_leases(self) -> None:
        by_name: dict[str, list[str | int]] = {}
        for lease, reservation in self._running.items():
            by_name.setdefault(reservation.name, []).extend((lease, reservation.claim.cost))
        for name, pairs in by_name.items():
            for at in range(0, len(pairs), 2 * RENEW_BATCH):
                await self.pipeline.call(self._renew_script, keys_of(name), pairs[at : at + 2 * RENEW_BATCH])


@lru_cache(maxsize=4096)
def at_head(limits: KeyLimits) -> KeyLimits:
    """The limits that a process judges by itself: it does not know all costs of a month."""
    return replace(limits, cost=None)


def _ignore_result(done: asyncio.Future[int]) -> None:
    if not done.cancelled():
        done.exception()  # marks the exception as retrieved


assert RENEW_EVERY * HEARTBEAT * 1e3 * 2 < LEASE
