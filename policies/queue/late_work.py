"""Waits of late requests, and refused requests that come back.

A late answer is still worth its prefill to an agent's session: the session's next turns find their prompt cached. But a
prefill of seconds makes live sessions late, and those lose their caches in turn. Rules:
- Engines take late work at a rate that is learned: seconds of prefill begun per second in which late work waited; of
  prefills above LONG and of others apart, as these need no calm (`policies.queue.hold_rules`). The wait follows
  (Little's law). A request that would wait above PATIENCE is refused at once, with MARGIN times the wait as
  Retry-After, rather than after a minute; not where only a prefill in progress, shorter than that, is ahead.
- A refused request that comes back within COMES_BACK times Retry-After is the first among the late requests of its
  tenant and route, and is not refused again before RETURNED_PATIENCE. So is a later turn of the same session.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp
from statistics import NormalDist

from policies.queue.queued_request import QueuedRequest
from policies.types import NEVER, QUANTILES, Forecast, Quantiles

LONG = 1.0  # s of prefill: a shorter one leaves most TTFT budgets time
PATIENCE, RETURNED_PATIENCE = 10.0, 60.0  # s in the queue: new request, returned request
MARGIN = 2.0  # Retry-After / predicted wait: a caller that comes back too early waits again
TIME_CONSTANT = 30.0  # s of the averages
PRIOR_S, PRIOR_WORK = 2.0, 4.0  # s that late work waited, and s of prefill begun meanwhile: at first, all is taken
LEAST_RATE = 0.05  # s of prefill per second, believed where none has begun for long
SHORTEST_RETRY, LONGEST_RETRY = 1.0, 60.0  # s
REMEMBERED = 1024  # refused requests of a tenant on a route
COMES_BACK = 1.5  # times Retry-After, within which a refused request may come back
# TTFT / forecast of a request that waits: in replays 1.1 to 1.6 in the median of a rule of the queue, nine in ten less
# than 1.3 to 3.9.
RATIOS: Quantiles = tuple(exp(NormalDist(0.3, 0.9).inv_cdf(q)) for q in QUANTILES)


class LateRate:
    """The rate at which engines take late prefills while any waits."""

    def __init__(self) -> None:
        self.requests = 0  # waiting
        self._waiting_s: dict[str, float] = {}  # s of waiting prefill, by tenant
        self.waited_s = PRIOR_S
        self.begun_s = PRIOR_WORK
        self.updated_at = NEVER

    def add(self, queued: QueuedRequest, now: float) -> None:
        self._update(now)
        self.requests += 1
        self._waiting_s[queued.tenant] = self._waiting_s.get(queued.tenant, 0.0) + queued.prefill_s

    def begin(self, queued: QueuedRequest, now: float) -> None:
        """The prefill of a waiting request begins."""
        self._update(now)
        self.begun_s += queued.prefill_s
        self._remove(queued)

    def leave(self, queued: QueuedRequest, now: float) -> None:
        """A request that waited leaves, and does not begin."""
        self._update(now)
        self._remove(queued)

    def _remove(self, queued: QueuedRequest) -> None:
        self.requests -= 1
        self._waiting_s[queued.tenant] -= queued.prefill_s
        if not self.requests:
            self._waiting_s.clear()

    def wait(self, work_s: float, now: float) -> float:
        """Seconds until so much prefill has begun."""
        self._update(now)
        return work_s * self.waited_s / max(self.begun_s, LEAST_RATE * self.waited_s)

    def late_forecast(self, queued: QueuedRequest, now: float) -> tuple[float, float, float]:
        """Seconds of prefill ahead of a late request; seconds until its start; seconds for which the request may be
        held.

        Tenants take turns: until a request begins, no other tenant has begun more than its own.
        """
        own_s = self._waiting_s.get(queued.tenant, 0.0) + (0.0 if queued.is_late else queued.prefill_s)
        others = (other_s for tenant, other_s in self._waiting_s.items() if tenant != queued.tenant)
        work_s = own_s + sum(min(other_s, own_s) for other_s in others)
        return work_s - queued.prefill_s, self.wait(work_s, now), patience_left(queued, now)

    def _update(self, now: float) -> None:
        """While no request waits, the averages return to the prior."""
        if now <= self.updated_at:
            return
        elapsed = now - self.updated_at if self.updated_at > NEVER else 0.0
        decay = exp(-elapsed / TIME_CONSTANT)
        self.updated_at = now
        self.waited_s = self.waited_s * decay + (elapsed if self.requests else (1 - decay) * PRIOR_S)
        self.begun_s = self.begun_s * decay + (0.0 if self.requests else (1 - decay) * PRIOR_WORK)


class RefusedRequests:
    """Requests refused lately, until when they may come back; by tenant and route, and the last full block of the
    prompt, of each the latest REMEMBERED."""

    def __init__(self) -> None:
        self.until: dict[tuple[str, str], dict[int, float]] = {}
        self._sweep_at = REMEMBERED  # tenants and routes

    def add(self, queued: QueuedRequest, retry_after: float, now: float) -> None:
        """A prompt without a full block is not remembered: it costs no engine much."""
        if not (hashes := _hashes(queued)):
            return
        if len(self.until) >= self._sweep_at:
            self.until = {owner: own for owner, own in self.until.items() if max(own.values()) >= now}
            self._sweep_at = 2 * len(self.until) + REMEMBERED
        own = self.until.setdefault((queued.tenant, queued.route.name), {})
        own.pop(hashes[-1], None)
        own[hashes[-1]] = now + COMES_BACK * retry_after
        if len(own) > REMEMBERED:
            del own[next(iter(own))]

    def take(self, queued: QueuedRequest, now: float) -> bool:
        """The same prompt was refused lately, or an earlier turn of its session."""
        owner = queued.tenant, queued.route.name
        if (own := self.until.get(owner)) is None:
            return False
        block = next((block for block in reversed(_hashes(queued)) if own.get(block, NEVER) >= now), None)
        if block is not None:
            del own[block]
            if not own:
                del self.until[owner]
        return block is not None


def _hashes(queued: QueuedRequest) -> Sequence[int]:
    """Full blocks of the prompt, by the first pool of the route that counts blocks."""
    estimates = (queued.estimate.pools.get(pool) for pool in queued.route.pools)
    return next((prompt.blocks.hashes for prompt in estimates if prompt is not None and prompt.blocks.hashes), ())


def retry_after_of(wait: float) -> float:
    """Seconds, by the predicted wait."""
    return min(max(MARGIN * wait, SHORTEST_RETRY), LONGEST_RETRY)


def late_ttft(forecast: Forecast, wait: float) -> Forecast:
    """TTFT that a late request would have, by the forecast of its endpoint and the predicted wait. Told to callers."""
    return Forecast(wait + forecast.point_estimate, RATIOS, samples=forecast.samples)


def patience_left(queued: QueuedRequest, now: float) -> float:
    """Seconds for which a late request may still be held."""
    since = queued.late_since if queued.is_late else now
    return since - now + (RETURNED_PATIENCE if queued.returned else PATIENCE)
