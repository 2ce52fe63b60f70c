"""Rules that hold a request in the queue: may this endpoint take this request now? A question changes nothing.

docs/routing.md has a sentence for each rule. An engine has room while its backlog of prefill is at most ROOM seconds;
an API always has. An API is idle for late requests unless at its rate limit, or there lately: each would take a place
from a request in time.
"""

from __future__ import annotations

from dataclasses import dataclass

from policies.fleet.fleet import Fleet
from policies.latency.tpot import FIRST_SHARE, TIME_CONSTANT, expected_tpot_misses
from policies.queue.endpoint_queues import EndpointQueues
from policies.queue.late_work import LONG
from policies.queue.queue_part import IdleEngine, QueueHooks
from policies.queue.queued_request import HoldRule, QueuedRequest
from policies.types import FOREVER, UNUSABLE, Candidate, Load

ROOM = 0.1  # s of prefill queued inside an engine: enough for the next step
IDLE = 0.01  # s of prefill under which an engine is idle
AT_LIMIT = 0.95  # of the TPOT pressure at which an engine takes no prefill
LEAST_LEFT = 0.1  # least share of time for prefills, even with answers close to their budget
WORTH = 2.0  # ratio of prefill times from which a longer prefill is postponed for a shorter one behind
HARMLESS = 0.3  # expected TPOT misses because of an already late request
CALM = 0.4  # of the TPOT pressure at which an engine takes no prefill: for a late one above LONG
FORCED_AFTER = 30.0  # s from arrival, where a route says `on_miss: best_effort`
TICK = 0.05  # s between two rounds without events


@dataclass(slots=True)
class HoldRules:
    """The answers as of `now`."""

    queues: EndpointQueues
    fleet: Fleet
    now: float
    hooks: QueueHooks

    def held_by(self, queued: QueuedRequest, chosen: Candidate, late: bool, within: float = IDLE) -> HoldRule | None:
        """The rule that holds a request at an endpoint; None: the endpoint takes the request."""
        if late:
            rule = self.late_rule(queued, chosen.endpoint.id, chosen.forecast.prefill, within)
            has_others = within == IDLE and not queued.is_late and self.queues.best_effort
            return HoldRule.TURN if rule is None and has_others else rule
        return self.rule_in_time(queued, chosen.endpoint.id)

    # ---------------------------------------------------------------- requests in time

    def rule_in_time(self, queued: QueuedRequest, endpoint: str) -> HoldRule | None:
        """The rule that holds a request in time, new or at a queue's head. None: the endpoint takes the request; is
        gone, so that the queue must move; or is down, a last resort for which no request waits."""
        load, queue = self.fleet.snapshot(self.now).loads.get(endpoint), self.queues.of(endpoint)
        if load is None or load.health in UNUSABLE:
            return None
        is_head = queued.assigned is not None and queued.assigned.id == endpoint
        if queue and queue[0] < queued and not (is_head and queued.own_limit):
            return HoldRule.TURN
        is_queue_ours = queued.route.scorer == "predicted" and self.fleet.view.is_local(endpoint)
        if is_queue_ours and (rule := no_room(load)) is not None:
            return rule
        return self.closed(queued, endpoint)

    def longest_in_the_way(self, endpoint: str) -> QueuedRequest | None:
        """The longest prefill that would make a much shorter prefill behind late, of the same caller and route; None:
        none. No request is delayed for another caller. Answers at their TPOT limit leave prefills a share of the time,
        by route budgets only: a budget set by a caller would delay other callers."""
        load = self.fleet.snapshot(self.now).loads.get(endpoint)
        if load is None or load.tpot_pressure < AT_LIMIT:
            return None
        at, longest = self.now + max(load.backlog_s, load.reopens_in), dict[tuple[str, ...], QueuedRequest]()
        for queued in self.queues.of(endpoint):
            own = queued.tenant, queued.request.caller, queued.route.name
            long = longest.get(own)
            if at + queued.prefill_s <= queued.deadline - TICK:
                left = _left_for_prefills(queued.route.tpot_budget(None), load, FIRST_SHARE)
                at += queued.prefill_s / max(left, LEAST_LEFT)
                if long is None or queued.prefill_s > long.prefill_s:
                    longest[own] = queued
            elif long and long.prefill_s > WORTH * queued.prefill_s and queued.route.scorer == "predicted":
                return long
        return None

    def closed(self, queued: QueuedRequest, endpoint: str) -> HoldRule | None:
        """The request would exceed the cap, or a rate limit of the provider."""
        if not self.fleet.closes:
            return None
        cap, load = (
            self.fleet.view.cap(endpoint, self.now, queued.request.caller),
            self.fleet.load_for(queued.request.caller, endpoint, self.now),
        )
        dispatched = [sent for sent in self.queues.in_dispatch.values() if sent.endpoint.id == endpoint]
        if cap is not None and load.in_flight + len(dispatched) >= cap:
            return HoldRule.CAP
        limits = load.limits.behind(len(dispatched), sum(sent.prompt_tokens for sent in dispatched))
        tokens = queued.estimate.pools[self.fleet.view.pool_of(endpoint)].tokens
        return HoldRule.RATE_LIMIT if limits.wait(tokens, self.now) > 0 else None

    # ---------------------------------------------------------------- late requests

    def late_rule(
        self, queued: QueuedRequest, endpoint: str, prefill_s: float, within: float = IDLE
    ) -> HoldRule | None:
        """The rule that holds a late request with this prefill; None: the endpoint is idle, or will be after `within`
        seconds of prefill."""
        if self._must_begin(queued):
            return self.closed(queued, endpoint)
        if not self.fleet.view.is_local(endpoint):
            limits = self.fleet.snapshot(self.now).loads[endpoint].limits
            return HoldRule.RATE_LIMIT if limits.refused_lately(self.now) else self.closed(queued, endpoint)
        load = self.fleet.snapshot(self.now).loads[endpoint]
        if (rule := self._not_idle(endpoint, load, prefill_s, within)) is not None:
            return rule
        if (rule := self._held_by_parts(queued, endpoint, load, prefill_s)) is not None:
            return rule
        if expected_tpot_misses(load, prefill_s) > HARMLESS:
            return HoldRule.HARM
        if queued.deadline < FOREVER and prefill_s > LONG and load.tpot_pressure > CALM:
            return HoldRule.CALM
        return self.closed(queued, endpoint)

    def _held_by_parts(self, queued: QueuedRequest, endpoint: str, load: Load, prefill_s: float) -> HoldRule | None:
        if not self.hooks.hold:
            return None
        pool = self.fleet.snapshot(self.now).pools[self.fleet.view.pool_of(endpoint)]
        engine = IdleEngine(load, pool, prefill_s, self.queues.best_effort.late, self.now)
        return next((rule for hold in self.hooks.hold if (rule := hold(queued, engine)) is not None), None)

    def _must_begin(self, queued: QueuedRequest) -> bool:
        """The route promises a late answer, whatever that costs other requests."""
        if queued.route.on_miss != "best_effort" or self.now - queued.request.arrival <= FORCED_AFTER:
            return False
        return queued.deadline < FOREVER and self.hooks.behind_rule(queued) is None

    def _not_idle(self, endpoint: str, load: Load, prefill_s: float = 0.0, within: float = IDLE) -> HoldRule | None:
        if load.backlog_s > within or (load.health in UNUSABLE and not load.wake_s):
            return HoldRule.PREFILL
        if load.kv_room < 0:
            return HoldRule.BLOCKS
        if self.queues.of(endpoint) or any(sent.endpoint.id == endpoint for sent in self.queues.in_dispatch.values()):
            return HoldRule.TURN
        return HoldRule.PACE if load.tpot_pressure * (1 + prefill_s / TIME_CONSTANT) > 1 else None

    def able_to_begin(self, heads: list[QueuedRequest]) -> list[QueuedRequest]:
        """Late requests that the endpoint waited for may take now, if their prefill is as long as when last decided."""
        loads, is_local = self.fleet.snapshot(self.now).loads, self.fleet.view.is_local
        idle = {name for name, load in loads.items() if not is_local(name) or self._not_idle(name, load) is None}
        return [each for each in heads if each.route.on_miss == "shed" or self._may_take(idle, each)]

    def _may_take(self, idle: set[str], queued: QueuedRequest) -> bool:
        assert queued.hold is not None
        endpoint = queued.hold.endpoint
        return endpoint in idle and self.late_rule(queued, endpoint, queued.prefill_s) is None


def no_room(load: Load) -> HoldRule | None:
    """The rule by which an engine takes no request in time; None: it has room."""
    if load.backlog_s > ROOM:
        return HoldRule.PREFILL
    if load.kv_room < 0:
        return HoldRule.BLOCKS
    return HoldRule.PACE if load.reopens_in else None


def _left_for_prefills(budget: float | None, load: Load, share: float = 1.0) -> float:
    """Share of time left for prefills by answers at their undisturbed TPOT, with this share of a TPOT budget."""
    return 1 - load.tpot * (1 - load.prefill_utilization) / (share * (budget or FOREVER))
