"""Decisions that count what is queued before a request.

The prefill queued before a request counts as a wait at the endpoint; so do the seconds until the answers there can
bear another prefill (`policies.latency.tpot`). Requests held before it count in the provider's rate limit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from policies.fleet.fleet import Fleet
from policies.queue.endpoint_queues import Ahead, EndpointQueues
from policies.queue.queued_request import QueuedRequest
from policies.routing.decide import decide
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
        if queued.route.scorer == "predicted":
            ahead, delayed = self.queues.ahead(queued), dict[str, Load]()
            for name, load in snapshot.loads.items():
                # To load an adapter elsewhere stalls the answers there, until that engine is closed for its pace too.
                reopens_in = 0.0 if queued.route.adapters else load.reopens_in
                if name in ahead or reopens_in or behind:
                    delayed[name] = self._delayed(name, load, ahead.get(name, Ahead()), behind, reopens_in)
            if delayed:
                snapshot = FleetSnapshot(snapshot.at, snapshot.pools, {**snapshot.loads, **delayed})
        queued.checked_at = self.now
        return decide(queued, snapshot, self.fleet.view, self.now, self.scorers)

    def _delayed(self, name: str, load: Load, ahead: Ahead, behind: float, reopens_in: float) -> Load:
        behind = behind if self.fleet.view.is_local(name) else 0.0
        wait = ahead.prefill_s + behind + max(reopens_in - load.backlog_s, 0.0)
        return replace(load, wait=wait, limits=load.limits.behind(ahead.requests, ahead.tokens))
