"""Waits of late requests, and refused requests that come back.

A late answer is still worth its prefill to an agent's session: the session's next turns find their prompt cached. But a
prefill of seconds makes live sessions late, and those lose their caches in turn. Rules:
- Engines take late work at a rate that is learned: seconds of prefill begun per second in which late work waited; of
  prefills above LONG and of others apart, as these need no calm (`policies.queue.hold_rules`). The wait follows
  (Little's law). A request that would wait above PATIENCE is refused at once, with MARGIN times the wait as
  Retry-After, rather than after a minute; not where only a prefill in progress, shorter than that, is ahead.
- A refusal is a forecast: once as much work has begun as was ahead, or none waits any more, the time since is compared
  with the wait that was predicted, and corrects the next ones. A request that leaves without beginning is taken out of
  the forecasts that counted it: callers who hang up shorten no wait.
- A refused request that comes back within COMES_BACK times Retry-After is the first among the late requests of its
  tenant and route, and is not refused again before RETURNED_PATIENCE. So is a later turn of the same session.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log

from policies.queue.queued_request import QueuedRequest
from policies.types import NEVER

LONG = 1.0  # s of prefill: a shorter one leaves most TTFT budgets time
PATIENCE, RETURNED_PATIENCE = 10.0, 60.0  # s in the queue, of a new request and of one that came back
MARGIN = 2.0  # Retry-After / predicted wait: a caller that comes back too early waits again
TIME_CONSTANT = 30.0  # s of the averages
PRIOR_S, PRIOR_WORK = 2.0, 4.0  # s that late work waited, and s of prefill begun meanwhile: at first, all is taken
LEAST_RATE = 0.05  # s of prefill per second, believed where none has begun for long
SHORTEST_RETRY, LONGEST_RETRY = 1.0, 60.0  # s
REMEMBERED = 1024  # refused requests of a tenant on a route
COMES_BACK = 1.5  # times Retry-After, within which a refused request may come back
SCORED = 64  # latest refusals whose wait is still open
SCORE_WEIGHT = 1 / 8  # of the latest refusal in the correction
MOST_WRONG = 4.0  # factor by which waits are corrected at most


@dataclass(slots=True)
class OpenForecast:
    """A refusal whose wait is not known yet: `work_s` after `begun_s` seconds of work the request would have begun."""

    at: float
    begun_s: float
    work_s: float
    pace: float  # s of predicted wait per s of work


class LateRate:
    """The rate at which engines take late prefills while any waits, and how right its forecasts were."""

    def __init__(self) -> None:
        self._since: dict[QueuedRequest, float] = {}  # entry of each request that waits
        self._waiting_s: dict[str, float] = {}  # their prefill, by tenant
        self.waited_s = PRIOR_S
        self.begun_s = PRIOR_WORK
        self.updated_at = NEVER
        self.correction = 1.0  # of predicted waits
        self._begun_s = 0.0  # in all
        self._open: deque[OpenForecast] = deque(maxlen=SCORED)

    @property
    def requests(self) -> int:
        """Requests that wait."""
        return len(self._since)

    def add(self, queued: QueuedRequest, now: float) -> None:
        self._update(now)
        self._since[queued] = now
        self._waiting_s[queued.tenant] = self._waiting_s.get(queued.tenant, 0.0) + queued.prefill_s

    def begin(self, queued: QueuedRequest, now: float) -> None:
        """The prefill of a waiting request begins."""
        self._update(now)
        self.begun_s += queued.prefill_s
        self._begun_s += queued.prefill_s
        self._remove(queued, now)

    def leave(self, queued: QueuedRequest, now: float) -> None:
        """A request that waited leaves, and does not begin: no forecast counts it any more."""
        self._update(now)
        since = self._since[queued]
        for forecast in self._open:
            forecast.work_s -= queued.prefill_s if forecast.at >= since else 0.0
        self._open = deque((each for each in self._open if each.work_s > 0), SCORED)
        self._remove(queued, now)

    def _remove(self, queued: QueuedRequest, now: float) -> None:
        del self._since[queued]
        self._waiting_s[queued.tenant] -= queued.prefill_s
        if not self.requests:
            self._waiting_s.clear()
        self._score(now)

    def wait(self, work_s: float, now: float) -> float:
        """Seconds until so much prefill has begun."""
        self._update(now)
        return self.correction * work_s * self.waited_s / max(self.begun_s, LEAST_RATE * self.waited_s)

    def late_forecast(self, queued: QueuedRequest, now: float) -> tuple[float, float, float]:
        """Seconds of prefill that begin before a late request; s until its own does; s for which it may still be held.

        Tenants take turns: until a request begins, no other tenant has begun more than its own.
        """
        own_s = self._waiting_s.get(queued.tenant, 0.0) + (0.0 if queued.is_late else queued.prefill_s)
        others = (other_s for tenant, other_s in self._waiting_s.items() if tenant != queued.tenant)
        work_s = own_s + sum(min(other_s, own_s) for other_s in others)
        return work_s - queued.prefill_s, self.wait(work_s, now), patience_left(queued, now)

    def on_refused(self, work_s: float, wait: float, now: float) -> None:
        """A request was refused behind `work_s` of prefill, for a predicted wait."""
        if self.requests and work_s > 0:  # an API prefills nothing
            self._open.append(OpenForecast(now, self._begun_s, work_s, wait / work_s))

    def _score(self, now: float) -> None:
        while self._open and (not self.requests or self._open[0].begun_s + self._open[0].work_s <= self._begun_s):
            forecast = self._open.popleft()
            ratio = max(now - forecast.at, SHORTEST_RETRY) / max(forecast.pace * forecast.work_s, SHORTEST_RETRY)
            corrected = log(self.correction) + SCORE_WEIGHT * log(ratio)
            self.correction = exp(min(max(corrected, -log(MOST_WRONG)), log(MOST_WRONG)))

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
        self._until: dict[tuple[str, str], dict[int, float]] = {}
        self._sweep_at = REMEMBERED  # tenants and routes

    def add(self, queued: QueuedRequest, retry_after: float, now: float) -> None:
        """A prompt without a full block is not remembered: it costs no engine much."""
        if not (hashes := _hashes(queued)):
            return
        if len(self._until) >= self._sweep_at:
            self._until = {owner: own for owner, own in self._until.items() if max(own.values()) >= now}
            self._sweep_at = 2 * len(self._until) + REMEMBERED
        own = self._until.setdefault((queued.tenant, queued.route.name), {})
        own.pop(hashes[-1], None)
        own[hashes[-1]] = now + COMES_BACK * retry_after
        if len(own) > REMEMBERED:
            del own[next(iter(own))]

    def take(self, queued: QueuedRequest, now: float) -> bool:
        """The same prompt was refused lately, or an earlier turn of its session."""
        owner = queued.tenant, queued.route.name
        if (own := self._until.get(owner)) is None:
            return False
        block = next((block for block in reversed(_hashes(queued)) if own.get(block, NEVER) >= now), None)
        if block is not None:
            del own[block]
            if not own:
                del self._until[owner]
        return block is not None


def _hashes(queued: QueuedRequest) -> Sequence[int]:
    """Full blocks of the prompt, by the first pool of the route that counts blocks."""
    estimates = (queued.estimate.pools.get(pool) for pool in queued.route.pools)
    return next((prompt.blocks.hashes for prompt in estimates if prompt is not None and prompt.blocks.hashes), ())


def retry_after_of(wait: float) -> float:
    """Seconds, by the predicted wait."""
    return min(max(MARGIN * wait, SHORTEST_RETRY), LONGEST_RETRY)


def patience_left(queued: QueuedRequest, now: float) -> float:
    """Seconds for which a late request may still be held."""
    since = queued.late_since if queued.is_late else now
    return since - now + (RETURNED_PATIENCE if queued.returned else PATIENCE)
