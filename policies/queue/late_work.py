"""Late prefills: when one may begin, how long another will wait, and which refused requests have come back.

An answer that is late anyway is still worth its prefill to an agent's session: the session's next turns find their
prompt cached. But a prefill of seconds makes live sessions late, and those lose their caches in turn. Rules:
- A late prefill above LONG seconds begins only while the pool is calm: its answers use at most CALM of the pace that
  they can bear, in the mean over the engines that are up.
- Engines take late work at a rate that is learned: seconds of prefill begun per second in which late work waited; of
  prefills above LONG and of others apart, as these need no calm. The wait follows (Little's law). A request that
  would wait above PATIENCE is refused at once, with MARGIN times the wait as Retry-After, rather than after a minute;
  not where only a prefill in progress, shorter than that, is ahead.
- Tenants take turns: of another tenant's work, no more is ahead of a request than of its own.
- A refused request that comes back within COMES_BACK times Retry-After is the first among the late requests of its
  tenant and route, and is not refused again before RETURNED_PATIENCE. So is a later turn of the same session.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from math import exp

from policies.fleet.fleet import Fleet
from policies.routing.candidates import QueuedRequest
from policies.types import FOREVER, NEVER, Decision, Health, Placement

LONG = 1.0  # s of prefill: a shorter one leaves most TTFT budgets time
CALM = 0.5  # of the TPOT pressure at which an engine takes no prefill
PATIENCE, RETURNED_PATIENCE = 10.0, 60.0  # s in the queue, of a new request and of one that came back
MARGIN = 2.0  # Retry-After / predicted wait: a caller that comes back too early waits again
TIME_CONSTANT = 30.0  # s of the averages
PRIOR_S, PRIOR_WORK = 2.0, 4.0  # s that late work waited, and s of prefill begun meanwhile: at first, all is taken
LEAST_RATE = 0.05  # s of prefill per second, believed where none has begun for long
SHORTEST_RETRY, LONGEST_RETRY = 1.0, 60.0  # s
REMEMBERED = 1024  # refused requests of a tenant on a route
COMES_BACK = 1.5  # times Retry-After, within which a refused request may come back


class WorkByTenant:
    """Requests of a route, and seconds of their prefill, by tenant."""

    def __init__(self) -> None:
        self.prefill_s: dict[str, float] = {}
        self._requests = Counter[str]()

    def add(self, tenant: str, prefill_s: float, times: int = 1) -> None:
        """`times` -1: a request leaves."""
        self._requests[tenant] += times
        self.prefill_s[tenant] = self.prefill_s.get(tenant, 0.0) + times * prefill_s
        if not self._requests[tenant]:
            del self._requests[tenant], self.prefill_s[tenant]


class LateWork:
    """Late requests of a route in the queue, all long or all short ones, and the rate at which engines take their
    prefills while any waits."""

    def __init__(self, updated_at: float = NEVER) -> None:
        self.requests = 0
        self.waiting = WorkByTenant()
        self.waited_s = PRIOR_S
        self.begun_s = PRIOR_WORK
        self.updated_at = updated_at

    def add(self, tenant: str, prefill_s: float, now: float, times: int = 1) -> None:
        """`times` -1: a request leaves."""
        self._update(now)
        self.requests += times
        self.waiting.add(tenant, prefill_s, times)

    def on_begun(self, prefill_s: float) -> None:
        self.begun_s += prefill_s

    def wait(self, work_s: float, now: float) -> float:
        """Seconds until so much prefill has begun."""
        self._update(now)
        return work_s * self.waited_s / max(self.begun_s, LEAST_RATE * self.waited_s)

    def _update(self, now: float) -> None:
        """While no request waits, the averages return to the prior."""
        if now <= self.updated_at:
            return
        elapsed = now - self.updated_at if self.updated_at > NEVER else 0.0
        decay = exp(-elapsed / TIME_CONSTANT)
        self.updated_at = now
        self.waited_s = self.waited_s * decay + (elapsed if self.requests else (1 - decay) * PRIOR_S)
        self.begun_s = self.begun_s * decay + (0.0 if self.requests else (1 - decay) * PRIOR_WORK)


def work_ahead(tenant: str, own_s: float, *works: Mapping[str, float]) -> float:
    """Seconds of prefill that begin before a request of `own_s`. `works`: what waits, by tenant.

    Tenants take turns: until a request begins, no other tenant has begun more than its own.
    """
    waiting_s = defaultdict[str, float](float)
    for work in works:
        for each, prefill_s in work.items():
            waiting_s[each] += prefill_s
    ahead_s = waiting_s.pop(tenant, 0.0)
    return ahead_s + sum(min(other_s, ahead_s + own_s) for other_s in waiting_s.values())


@dataclass(frozen=True, slots=True)
class Promise:
    """Engine time kept for a refused request until `until`."""

    prefill_s: float
    until: float


PromiseOwner = tuple[str, str]  # tenant, route


class RefusedRequests:
    """Requests refused lately; of each tenant and route the latest REMEMBERED, by the last full block of the prompt."""

    def __init__(self) -> None:
        self._promises: dict[PromiseOwner, dict[int, Promise]] = {}
        self._expiries: list[tuple[float, PromiseOwner, int]] = []  # a heap; some are of promises that were kept
        self._compact_at = REMEMBERED  # entries of the heap
        self._promised = defaultdict[str, WorkByTenant](WorkByTenant)  # by route

    def work_ahead(self, queued: QueuedRequest, late: LateWork, now: float) -> float:
        """Seconds of prefill that begin before a late request: of `late`, and of refused requests that come back."""
        promised = self.promised_s(queued.route.name, now)
        return work_ahead(queued.tenant, queued.prefill_s, late.waiting.prefill_s, promised)

    def refuse_new(
        self, queued: QueuedRequest, decision: Decision, late: LateWork, ahead_s: float, now: float
    ) -> Decision | None:
        """A refusal of a late request whose wait, behind `ahead_s` of prefill, would be too long. None: may queue."""
        if not may_be_refused(queued) or queued.returned:
            return None
        wait = late.wait(ahead_s + queued.prefill_s, now)
        return self.refuse(queued, decision, wait, now) if wait > PATIENCE else None

    def refuse(self, queued: QueuedRequest, decision: Decision, wait: float, now: float) -> Decision:
        """503, with Retry-After from the predicted wait."""
        retry_after = min(max(MARGIN * wait, SHORTEST_RETRY), LONGEST_RETRY)
        self.add(queued, retry_after, now)
        reason = f"it is late, and engines would have time for it in about {wait:.0f} s"
        return replace(decision, outcome=Placement.OVERLOADED, retry_after=retry_after, reason=reason)

    def add(self, queued: QueuedRequest, retry_after: float, now: float) -> None:
        """A prompt without a full block is not remembered: it costs no engine much."""
        if not (hashes := _hashes(queued)):
            return
        self._expire(now)
        owner, block = _owner(queued), hashes[-1]
        self._forget(owner, block)
        if len(own := self._promises.get(owner, {})) >= REMEMBERED:
            self._forget(owner, next(iter(own)))
        promise = Promise(queued.prefill_s, now + COMES_BACK * retry_after)
        self._promises.setdefault(owner, {})[block] = promise
        self._promised[queued.route.name].add(queued.tenant, promise.prefill_s)
        heappush(self._expiries, (promise.until, owner, block))
        if len(self._expiries) > self._compact_at:
            self._compact()

    def take(self, queued: QueuedRequest, now: float) -> bool:
        """The same prompt was refused lately, or an earlier turn of its session."""
        self._expire(now)
        owner = _owner(queued)
        if (own := self._promises.get(owner)) is None:
            return False
        block = next((block for block in reversed(_hashes(queued)) if block in own), None)
        return block is not None and self._forget(owner, block)

    def promised_s(self, route: str, now: float) -> Mapping[str, float]:
        """Seconds of prefill of requests that may still come back, by tenant."""
        self._expire(now)
        return self._promised[route].prefill_s

    def _compact(self) -> None:
        """Drops the entries of promises that were kept or replaced."""
        kept = ((owner, block, one) for owner, own in self._promises.items() for block, one in own.items())
        self._expiries = [(one.until, owner, block) for owner, block, one in kept]
        heapify(self._expiries)
        self._compact_at = 2 * len(self._expiries) + REMEMBERED

    def _expire(self, now: float) -> None:
        while self._expiries and self._expiries[0][0] < now:
            until, owner, block = heappop(self._expiries)
            promise = self._promises.get(owner, {}).get(block)
            if promise is not None and promise.until == until:
                self._forget(owner, block)

    def _forget(self, owner: PromiseOwner, block: int) -> bool:
        """False: there was no such promise."""
        own = self._promises.get(owner, {})
        if (promise := own.pop(block, None)) is None:
            return False
        if not own:
            del self._promises[owner]
        tenant, route = owner
        self._promised[route].add(tenant, promise.prefill_s, times=-1)
        return True


def _owner(queued: QueuedRequest) -> PromiseOwner:
    return queued.tenant, queued.route.name


def _hashes(queued: QueuedRequest) -> Sequence[int]:
    """Full blocks of the prompt, by the first pool of the route that counts blocks."""
    estimates = (queued.estimate.pools.get(pool) for pool in queued.route.pools)
    return next((prompt.blocks.hashes for prompt in estimates if prompt is not None and prompt.blocks.hashes), ())


def may_be_refused(queued: QueuedRequest) -> bool:
    """A late request is refused rather than held for long. A route with `best_effort` sends it at last."""
    return queued.route.on_miss == "queue" and queued.deadline < FOREVER


def is_overdue(queued: QueuedRequest, late: LateWork, now: float) -> bool:
    """The wait of a late request in the queue has become too long, even if it were the next to begin."""
    if not may_be_refused(queued):
        return False
    return late.wait(queued.prefill_s, now) > patience_left(queued, now)


def patience_left(queued: QueuedRequest, now: float) -> float:
    """Seconds for which a late request may still be held."""
    return queued.late_since - now + (RETURNED_PATIENCE if queued.returned else PATIENCE)


def is_calm(fleet: Fleet, pool: str, now: float) -> bool:
    """The answers of the pool can bear a long prefill."""
    pressures = [
        load.tpot_pressure
        for name, load in fleet.snapshot(now).loads.items()
        if load.health is not Health.DOWN and name.partition("/")[0] == pool
    ]
    return sum(pressures) <= CALM * len(pressures)
