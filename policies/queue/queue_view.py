"""Decisions that count what is queued before a request.

Rules:
- The work ahead in the queues (`policies.queue.endpoint_queues`) counts as a wait at the endpoint; so do the seconds
  until the answers there can bear another prefill (`policies.latency.tpot`).
- No request is sent before the provider's rate limit lets it pass: requests held before it count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from policies.fleet.fleet import Fleet
from policies.queue.endpoint_queues import EndpointQueues
from policies.queue.queued_request import QueuedRequest
from policies.routing.tiers import decide
from policies.scorers.scorers import Scorer
from policies.types import Decision, FleetSnapshot, Load


@dataclass(slots=True)
class QueueView:
    """The fleet as of `now`, as a queued request meets it."""

    queues: EndpointQueues
    fleet: Fleet
    now: float
    scorers: Mapping[str, Scorer]

    def decide(self, queued: QueuedRequest, behind: float = 0.0) -> Decision:
        """`behind`: more seconds to wait for any engine."""
        snapshot = self.fleet.snapshot_for(queued.request.caller, self.now)
        if queued.route.scorer == "predicted" and (delayed := self._delayed(queued, snapshot.loads, behind)):
            snapshot = FleetSnapshot(snapshot.at, snapshot.pools, {**snapshot.loads, **delayed})
        queued.checked_at = self.now
        return decide(queued, snapshot, self.fleet, self.now, self.scorers)

    def _delayed(self, queued: QueuedRequest, loads: Mapping[str, Load], behind: float) -> Mapping[str, Load]:
        """Endpoints with something ahead of the request."""
        queues = self.queues
        occupied = queues.in_dispatch or queues.assigned
        ahead = queues.prefill_ahead(queued) if occupied else {}
        held = queues.held_ahead(queued) if occupied and any(load.limits.buckets for load in loads.values()) else {}
        delayed: dict[str, Load] = {}
        for name, load in loads.items():
            wait = ahead.get(name, 0.0) + (behind if behind and self.fleet.is_local(name) else 0.0)
            if load.reopens_in:
                wait += max(load.reopens_in - load.backlog_s, 0.0)
            limits = load.limits.behind(*held.get(name, (0, 0.0)))
            if wait or limits is not load.limits:
                delayed[name] = replace(load, wait=wait, limits=limits)
        return delayed
