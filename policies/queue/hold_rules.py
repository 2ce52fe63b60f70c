"""Rules that hold a request in the queue: each keeps it from an endpoint for a reason of its own.

Rules, in the order in which they are asked:
- `cap`, `rate_limit`: no request is sent beyond the cap of an endpoint, or before the provider lets it pass.
- `turn`: requests that wait for the endpoint already come first.
- `prefill`: an engine has room while the backlog of prefill is at most ROOM seconds. An API always has room.
- `pace`: an engine takes no prefill while its answers take longer than they may (`policies.latency.tpot`).
- `slack`: a prefill that would cost answers their pace is held while the whole queue of the endpoint has time to
  spare, and no request is late: each further token makes the answers bear more.
- Late requests go to idle endpoints alone, where their prefill makes no other request miss a deadline or pace; a
  request of a tenant above its share (`policies.queue.fair_share`), hardly any (`harm`). An API is idle unless at the
  rate limit, or there lately: then each late request takes a place from a request in time.
- `calm`: a late prefill above LONG seconds begins only where answers use at most CALM of the pace that they can bear.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from policies.fleet.fleet import Fleet
from policies.latency.tpot import TIME_CONSTANT, expected_tpot_misses
from policies.queue.endpoint_queues import EndpointQueues
from policies.queue.fair_share import FairShare
from policies.queue.late_work import LONG
from policies.queue.queued_request import HoldRule, QueuedRequest
from policies.types import FOREVER, Candidate, Health, Load

ROOM = 0.1  # s of prefill queued inside an engine: enough for the next step
IDLE = 0.01  # s of prefill under which an engine is idle
HARM = 0.03  # expected TPOT misses, above which a prefill is held while there is slack
GAINING = 0.75  # of their TPOT budget: slower answers gain too little on it for holding to help
HARMLESS = 0.3  # expected TPOT misses because of an already late request
HARMLESS_ABOVE_SHARE = 0.01  # the same because of a request of a tenant above its share
CALM = 0.4  # of the TPOT pressure at which an engine takes no prefill
TICK = 0.05  # s between two rounds without events


@dataclass(slots=True)
class HoldRules:
    """The answers as of `now`."""

    queues: EndpointQueues
    fleet: Fleet
    now: float
    shares: FairShare

    # ---------------------------------------------------------------- requests in time

    def hold(self, queued: QueuedRequest, chosen: Candidate) -> HoldRule | None:
        """The rule that holds a request planned for an endpoint; None: it may be sent there."""
        endpoint = chosen.endpoint.id
        if endpoint in self.queues.assigned:
            return HoldRule.TURN
        return self._hold_first(endpoint, (queued,), chosen.load)

    def hold_next(self, endpoint: str) -> HoldRule | None:
        """The rule that holds the first of the requests assigned to an endpoint; None also where the endpoint is gone,
        and its queue must move."""
        load = self.fleet.snapshot(self.now).loads.get(endpoint)
        if load is None or load.health is Health.DOWN:
            return None
        return self._hold_first(endpoint, self.queues.assigned[endpoint], load)

    def _hold_first(self, endpoint: str, queue: Sequence[QueuedRequest], load: Load) -> HoldRule | None:
        local = self.fleet.is_local(endpoint)
        if local and load.backlog_s > ROOM:
            return HoldRule.PREFILL
        if local and load.reopens_in:
            return HoldRule.PACE
        if self._may_close(endpoint, load) and (rule := self.closed(queue[0], endpoint)) is not None:
            return rule
        return HoldRule.SLACK if self._has_slack(endpoint, queue) else None

    def _has_slack(self, endpoint: str, queue: Sequence[QueuedRequest]) -> bool:
        """The first prefill would cost answers their pace, and waiting helps these: they gain on it, and no request
        is late or would become so."""
        load, first = self.fleet.snapshot(self.now).loads[endpoint], queue[0]
        if first.deadline == FOREVER or expected_tpot_misses(load, first.prefill_s) <= HARM:
            return False
        budget = first.route.tpot_budget(first.request.tpot_budget) or FOREVER
        if load.tpot * (1 - load.prefill_utilization) > GAINING * budget or self.queues.best_effort.late:
            return False
        starts = accumulate((queued.prefill_s for queued in queue), initial=self.now + load.backlog_s + TICK)
        return all(start < queued.send_by for start, queued in zip(starts, queue, strict=False))

    # ---------------------------------------------------------------- caps and rate limits

    def closed(self, queued: QueuedRequest, endpoint: str) -> HoldRule | None:
        """The request would exceed the cap, or a rate limit of the provider."""
        cap, load = self.fleet.cap(endpoint), self.fleet.load_for(queued.request.caller, endpoint, self.now)
        dispatched = [c for c in self.queues.in_dispatch.values() if c.endpoint.id == endpoint]
        if cap is not None and load.in_flight + len(dispatched) >= cap:
            return HoldRule.CAP
        limits = load.limits.behind(len(dispatched), sum(c.prompt_tokens for c in dispatched))
        tokens = queued.estimate.pools[self.fleet.pool_of(endpoint)].tokens
        return HoldRule.RATE_LIMIT if limits.wait(tokens, self.now) > 0 else None

    def must_wait(self, queued: QueuedRequest, chosen: Candidate) -> HoldRule | None:
        """No slot or no rate is left at the chosen endpoint, or a request held there comes first."""
        endpoint = chosen.endpoint.id
        if not self._may_close(endpoint, chosen.load):
            return None
        queue = self.queues.assigned.get(endpoint)
        return HoldRule.TURN if queue and queue[0] < queued else self.closed(queued, endpoint)

    def _may_close(self, endpoint: str, load: Load) -> bool:
        """The endpoint has a cap or a rate limit."""
        return load.limits.may_hold(self.now) or (self.fleet.closes and self.fleet.cap(endpoint) is not None)

    def is_rate_limited(self, endpoint: str) -> bool:
        """The provider refuses for a rate limit, or did lately."""
        return self.fleet.snapshot(self.now).loads[endpoint].limits.refused_lately(self.now)

    def has_room(self, chosen: Candidate) -> bool:
        load = chosen.load
        return (load.backlog_s <= ROOM and not load.reopens_in) or not self.fleet.is_local(chosen.endpoint.id)

    # ---------------------------------------------------------------- late requests

    def hold_late(
        self, queued: QueuedRequest, endpoint: str, prefill_s: float, within: float = IDLE
    ) -> HoldRule | None:
        """The rule that holds a late request with this prefill; None: the endpoint is idle for it, or will be once it
        has prefilled for `within` seconds."""
        if not self.fleet.is_local(endpoint):
            return HoldRule.RATE_LIMIT if self.is_rate_limited(endpoint) else self.closed(queued, endpoint)
        load = self.fleet.snapshot(self.now).loads[endpoint]
        if (rule := self._not_idle(endpoint, load, prefill_s, within)) is not None:
            return rule
        over = self.shares.is_over(queued.tenant)
        if expected_tpot_misses(load, prefill_s) > (HARMLESS_ABOVE_SHARE if over else HARMLESS):
            return HoldRule.SHARE if over else HoldRule.HARM
        if prefill_s > LONG and queued.deadline < FOREVER and load.tpot_pressure > CALM:
            return HoldRule.CALM
        return self.closed(queued, endpoint) if self.fleet.cap(endpoint) is not None else None

    def idle_endpoints(self) -> list[str]:
        """Endpoints that may take a late request, if its prefill is short enough for the answers there."""
        loads = self.fleet.snapshot(self.now).loads
        return [
            name
            for name, load in loads.items()
            if not self.fleet.is_local(name) or self._not_idle(name, load, 0.0, IDLE) is None
        ]

    def _not_idle(self, endpoint: str, load: Load, prefill_s: float, within: float) -> HoldRule | None:
        if load.backlog_s > within or load.health is Health.DOWN:
            return HoldRule.PREFILL
        if endpoint in self.queues.assigned or any(c.endpoint.id == endpoint for c in self.queues.in_dispatch.values()):
            return HoldRule.TURN
        return HoldRule.PACE if load.tpot_pressure * (1 + prefill_s / TIME_CONSTANT) > 1 else None
