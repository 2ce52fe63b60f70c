"""Batch work: requests with hours until the whole answer is due, which run at no cost to others meanwhile.

Rules:
- Earliest deadline first. A request begins in a *valley*: an engine with nothing to prefill, whose pace and KV cache
  have room for other answers, and where a request in time would hardly come during the prefill.
- Engines take batch work at a rate that is measured over as long a past as time is left: of the last minute for what is
  due in minutes, of the last hours for what is due in hours. Work that takes more than HURRY_FROM of the time up to a
  deadline, at this rate, hurries: from 0 there to 1 where all of the time is taken. Valleys for hurried work are less
  deep; at 1 the work has the turn of a late request, and the pace of answers holds it no longer. Work that begins
  raises the rate, so the hurry settles.
- Work is engine time: prefill, and a share of the decoding. A request that cannot end in time makes no other hurry.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass
from itertools import accumulate, repeat
from math import exp

from policies.latency.tpot import expected_tpot_misses
from policies.queue.queue_part import BestEffortReach, IdleEngine, QueuePart
from policies.queue.queued_request import HoldRule, QueuedRequest
from policies.tenant_use import TenantUse
from policies.types import FOREVER, NEVER, TINY, Candidate, Load

VALLEY = HoldRule("valley", "an engine with room to spare, or the end of its own time: its answer is due in a while")
HURRY_FROM = 0.7  # of the time left, that work takes at the measured rate
HORIZONS = (60.0, 600.0, 3600.0, 6 * 3600.0)  # s of waiting, over which the rate is averaged
PRIOR_S, PRIOR_RATE = 30.0, 2.0  # s of waiting, and s of work begun per second, believed at first: it is soon known
RECHECK = 1.0  # s between two comparisons of all work with the time left
ANSWERS = 2.0  # expected times of an answer that are left for it: lengths vary
DECODING_SHARE = 1 / 8  # of the time of an answer, as engine time: answers share a step
SHORT = 0.1  # s of prefill that no request in time notices
ARRIVALS_S = 60.0  # time constant of the rate of requests in time
OTHERS = (0.0, 0.0, 0.0)  # precedence of a request that is not batch work
PACED_S = 3600.0  # s after the last request with a TPOT budget, until which it counts: a reload may have taken it away


@dataclass(frozen=True, slots=True)
class Valley:
    """The most that an engine may have in use where batch work begins."""

    pressure: float  # of the TPOT pressure at which an engine takes no prefill
    pace: float  # of the tightest TPOT budget in the pool, that a token takes beside answers in progress
    kv_usage: float  # of the KV cache
    misses: float  # expected TPOT misses because of the prefill
    arrivals: float  # requests in time expected at the engine during a prefill above SHORT

    def towards(self, other: Valley, share: float) -> Valley:
        """Limits between two valleys. `share`: 0 for this one, 1 for the other."""
        ends = ((getattr(self, name), getattr(other, name)) for name in self.__slots__)
        return Valley(*(own + share * (end - own) for own, end in ends))


DEEP, SHALLOW = Valley(0.4, 0.5, 0.5, 0.01, 0.05), Valley(0.8, 1.0, 0.95, 0.3, 1.0)


class BatchWork:
    """Waiting batch requests, the rate at which engines take batch work, and the arrivals of requests in time."""

    def __init__(self) -> None:
        self._waiting: list[QueuedRequest] = []  # earliest deadline first
        self._waited_s = [PRIOR_S] * len(HORIZONS)
        self._begun_s = [PRIOR_S * PRIOR_RATE] * len(HORIZONS)
        self._updated_at = self._weighed_at = NEVER
        self._dues: list[float] = []  # deadlines as of `_weighed_at`, ascending, and the hurry of each
        self._hurries: list[float] = []
        self._arrivals: dict[str, tuple[float, float]] = {}  # in time: rate per s and its time, by pool
        self._paces: dict[str, tuple[float, float]] = {}  # tightest TPOT budget of a route and its time, by pool

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, queued: QueuedRequest, now: float) -> None:
        self._update(now)
        insort(self._waiting, queued, key=_order)

    def begin(self, queued: QueuedRequest, now: float) -> None:
        self._update(now)
        self._begun_s = [begun_s + _work_s(queued) for begun_s in self._begun_s]
        self.leave(queued, now)

    def leave(self, queued: QueuedRequest, now: float) -> None:
        self._update(now)
        del self._waiting[bisect_left(self._waiting, _order(queued), key=_order)]

    def _update(self, now: float) -> None:
        """Averages over the time in which batch work waits."""
        elapsed = now - self._updated_at if self._waiting else 0.0
        for i, horizon in enumerate(HORIZONS if elapsed > 0 else ()):
            decay = exp(-elapsed / horizon)
            self._waited_s[i] = self._waited_s[i] * decay + elapsed
            self._begun_s[i] *= decay
        self._updated_at = now

    def wait(self, work_s: float, left: float) -> float:
        """Seconds in which engines take so much work, at the rate of the last `left` seconds."""
        i = max(bisect_right(HORIZONS, left) - 1, 0)
        return work_s * self._waited_s[i] / max(self._begun_s[i], TINY)

    def hurry(self, queued: QueuedRequest, now: float) -> float:
        """0: the request waits for a valley; 1: it cannot wait any longer. 0 for a request that is not batch work."""
        if queued.due == FOREVER:
            return 0.0
        if now - self._weighed_at >= RECHECK:
            self._weigh(now)
        i = bisect_left(self._dues, queued.due)
        return self._hurries[i] if i < len(self._dues) and now + queued.answer_s <= queued.due else 0.0

    def _weigh(self, now: float) -> None:
        """Note the hurry by deadline. Work up to a deadline is part of the work up to each later one."""
        self._update(now)
        self._weighed_at = now
        able = [queued for queued in self._waiting if now + queued.answer_s <= queued.due]
        hurries = map(self._hurry, able, accumulate(map(_work_s, able)), repeat(now))
        self._dues = [queued.due for queued in able]
        self._hurries = list(accumulate(reversed(list(hurries)), max))[::-1]

    def _hurry(self, queued: QueuedRequest, work_s: float, now: float) -> float:
        """Of the work up to the deadline of this request, `work_s` seconds."""
        left = max(queued.due - ANSWERS * queued.answer_s - now, TINY)
        taken = self.wait(work_s, left) / left
        return min(max((taken - HURRY_FROM) / (1 - HURRY_FROM), 0.0), 1.0)

    # ---------------------------------------------------------------- valleys

    def on_arrival(self, queued: QueuedRequest, chosen: Candidate, now: float) -> None:
        """Note a request in time that is sent to an engine."""
        pool, tpot = chosen.endpoint.pool, queued.route.tpot
        self._arrivals[pool] = self._rate_at(pool, now) + 1 / ARRIVALS_S, now
        if tpot is not None and tpot.budget <= self._pace_at(pool, now):
            self._paces[pool] = tpot.budget, now

    def _rate_at(self, pool: str, now: float) -> float:
        rate, at = self._arrivals.get(pool, (0.0, now))
        return rate * exp((at - now) / ARRIVALS_S)

    def _pace_at(self, pool: str, now: float) -> float:
        budget, at = self._paces.get(pool, (FOREVER, now))
        return budget if now - at < PACED_S else FOREVER

    def is_valley(self, pool: str, engines: int, load: Load, prefill_s: float, hurry: float, now: float) -> bool:
        """An engine has room for batch work in this hurry, with a prefill of so many seconds."""
        most = DEEP.towards(SHALLOW, hurry) if hurry else DEEP
        if load.tpot_pressure > most.pressure or load.kv_usage > most.kv_usage:
            return False
        paces = hurry < 1 and (load.running or load.waiting)  # else a budget below the engine's own pace would end it
        if paces and load.tpot > most.pace * self._pace_at(pool, now):
            return False
        if expected_tpot_misses(load, prefill_s) > most.misses:
            return False
        return prefill_s <= SHORT or prefill_s * self._rate_at(pool, now) / engines <= most.arrivals


def _order(queued: QueuedRequest) -> tuple[float, int]:
    return queued.due, queued.sequence


def _work_s(queued: QueuedRequest) -> float:
    return queued.prefill_s + DECODING_SHARE * queued.answer_s


class Batch(QueuePart):
    """Batch work in the queue: it comes after all other requests, tenants by recent use of valleys, and begins in a
    valley of the preferred tier, or anywhere once its hurry is 1."""

    def __init__(self) -> None:
        self.work = BatchWork()
        self._use = TenantUse()  # of valleys

    def hold(self, queued: QueuedRequest, engine: IdleEngine) -> HoldRule | None:
        """Nowhere before late requests while the work can wait, nor where it may cost others a budget."""
        if queued.due == FOREVER:
            return None
        hurry, pool = self.work.hurry(queued, engine.now), engine.pool
        load, prefill_s = engine.load, engine.prefill_s
        is_valley = self.work.is_valley(pool.name, len(pool.endpoints), load, prefill_s, hurry, engine.now)
        return VALLEY if not is_valley or (engine.late and hurry < 1) else None

    def reach(self, queued: QueuedRequest, now: float) -> BestEffortReach | None:
        return None if queued.due == FOREVER else BestEffortReach(self.work.hurry(queued, now) >= 1, each_endpoint=True)

    def precedence(self, queued: QueuedRequest) -> tuple[float, ...]:
        return OTHERS if queued.due == FOREVER else (1.0, self._use.of(queued.tenant), queued.due)

    def on_dispatched(self, queued: QueuedRequest, chosen: Candidate, now: float) -> None:
        if queued.due < FOREVER:
            self._use.charge(queued, chosen, now)
        elif queued.deadline < FOREVER:
            self.work.on_arrival(queued, chosen, now)

    def on_held(self, queued: QueuedRequest, now: float) -> None:
        if queued.due < FOREVER:
            self.work.add(queued, now)

    def on_begun(self, queued: QueuedRequest, now: float) -> None:
        if queued.due < FOREVER:
            self.work.begin(queued, now)

    def on_left(self, queued: QueuedRequest, now: float) -> None:
        if queued.due < FOREVER:
            self.work.leave(queued, now)
