"""Late prefills: when one may begin, how long another will wait, and which refused requests have come back.

An answer that is late anyway is still worth its prefill to an agent's session: the session's next turns find their
prompt cached. But a prefill of seconds makes live sessions late, and those lose their caches in turn. Rules:
- A late prefill above LONG seconds begins only while the pool is calm: its answers use at most CALM of the pace that
  they can bear, in the mean over the engines that are up.
- Engines take late work at a rate that is learned: seconds of prefill begun per second in which late work waited. The
  wait follows (Little's law). A request that would wait above PATIENCE is refused at once, with the wait as
  Retry-After, rather than after a minute.
- A refused request that comes back by then, with the same prompt, is the next to begin, and is not refused again
  before RETURNED_PATIENCE: the forecast stands behind its Retry-After.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp

from policies.fleet.fleet import Fleet
from policies.routing.candidates import QueuedRequest
from policies.types import NEVER, Health

LONG = 1.0  # s of prefill: a shorter one leaves most TTFT budgets time
CALM = 0.6  # of the TPOT pressure at which an engine takes no prefill
PATIENCE, RETURNED_PATIENCE = 10.0, 60.0  # s in the queue, of a new request and of one that came back
MARGIN = 2.0  # times the predicted wait is the Retry-After: half of all waits are longer than predicted
TIME_CONSTANT = 30.0  # s of the averages
PRIOR_S, PRIOR_WORK = 2.0, 4.0  # s that late work waited, and s of prefill begun meanwhile: at first, all is taken
SHORTEST_RETRY, LONGEST_RETRY = 1.0, 60.0  # s
REMEMBERED = 1024  # refused requests
COMES_BACK = 1.5  # times Retry-After, within which a refused request may come back


@dataclass(slots=True)
class LateWorkRate:
    """Seconds of late prefill that engines begin per second, while such work waits."""

    waited_s: float = PRIOR_S
    begun_s: float = PRIOR_WORK
    updated_at: float = NEVER

    def update(self, now: float, waiting: bool) -> None:
        """`waiting`: late work has waited since the last update. While none waits, the averages return to the prior."""
        if now <= self.updated_at:
            return
        elapsed = min(now - self.updated_at, TIME_CONSTANT)
        decay = exp(-elapsed / TIME_CONSTANT)
        self.updated_at = now
        self.waited_s = self.waited_s * decay + (elapsed if waiting else (1 - decay) * PRIOR_S)
        self.begun_s = self.begun_s * decay + (0.0 if waiting else (1 - decay) * PRIOR_WORK)

    def on_begun(self, prefill_s: float) -> None:
        self.begun_s += prefill_s

    def wait(self, prefill_s: float) -> float:
        """Seconds until so much work, the request's own included, has begun."""
        return prefill_s * self.waited_s / max(self.begun_s, 0.05 * self.waited_s)


@dataclass(frozen=True, slots=True)
class Promise:
    """Engine time that a refused request finds when it comes back before `until`."""

    prefill_s: float
    until: float


class RefusedRequests:
    """Requests refused lately, by tenant, route and the last full block of the prompt; bounded."""

    def __init__(self) -> None:
        self._promises: OrderedDict[tuple[str, str, int], Promise] = OrderedDict()

    def add(self, queued: QueuedRequest, retry_after: float, now: float) -> None:
        """A prompt without a full block is not remembered: it costs no engine much."""
        if not (hashes := _hashes(queued)):
            return
        name = queued.tenant, queued.route.name, hashes[-1]
        self._promises[name] = Promise(queued.prefill_s, now + COMES_BACK * retry_after)
        self._promises.move_to_end(name)
        if len(self._promises) > REMEMBERED:
            self._promises.popitem(last=False)

    def take(self, queued: QueuedRequest, now: float) -> bool:
        """The same prompt was refused lately, or an earlier turn of its session."""
        if not self._promises:
            return False
        tenant, route = queued.tenant, queued.route.name
        for block in reversed(_hashes(queued)):
            if (promise := self._promises.pop((tenant, route, block), None)) is not None:
                return promise.until >= now
        return False

    def promised_s(self, now: float) -> float:
        """Seconds of prefill of requests that may still come back."""
        over = [name for name, promise in self._promises.items() if promise.until < now]
        for name in over:
            del self._promises[name]
        return sum(promise.prefill_s for promise in self._promises.values())


def _hashes(queued: QueuedRequest) -> Sequence[int]:
    """Full blocks of the prompt, by the first pool of the route that counts blocks."""
    estimates = (queued.estimate.pools.get(pool) for pool in queued.route.pools)
    return next((prompt.blocks.hashes for prompt in estimates if prompt is not None and prompt.blocks.hashes), ())


def is_calm(fleet: Fleet, pool: str, now: float) -> bool:
    """The answers of the pool can bear a long prefill."""
    pressures = [
        load.tpot_pressure
        for name, load in fleet.snapshot(now).loads.items()
        if load.health is not Health.DOWN and name.partition("/")[0] == pool
    ]
    return sum(pressures) <= CALM * len(pressures)
