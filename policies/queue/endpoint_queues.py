"""The gateway's queues of requests, without the rules of `policies.queue.queue_scheduler`.

A request is in one place at a time: new, in the queue of its assigned endpoint, in the best-effort queue, or in
dispatch: released, and not yet known to the fleet. Empty endpoint queues are removed.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, takewhile

from policies.routing.queued_request import QueuedRequest
from policies.types import FOREVER, Endpoint


@dataclass(frozen=True, slots=True)
class PendingDispatch:
    """A released request: its endpoint and the engine time of its prefill, s."""

    endpoint: str
    prefill_s: float


@dataclass(slots=True)
class EndpointQueues:
    """All requests that wait in the gateway."""

    new: list[QueuedRequest] = field(default_factory=list)
    assigned: dict[str, list[QueuedRequest]] = field(default_factory=dict)  # by endpoint, earliest deadline first
    best_effort: list[QueuedRequest] = field(default_factory=list)  # in order of arrival
    in_dispatch: dict[Hashable, PendingDispatch] = field(default_factory=dict)  # by request key

    def __len__(self) -> int:
        """Requests held, those in dispatch not counted."""
        return len(self.new) + len(self.best_effort) + sum(map(len, self.assigned.values()))

    def of(self, endpoint: str) -> list[QueuedRequest]:
        return self.assigned.get(endpoint, [])

    def assign(self, queued: QueuedRequest, endpoint: Endpoint, prefill_s: float, spill_at: float = FOREVER) -> None:
        queued.assigned = endpoint
        queued.prefill_s = prefill_s
        queued.spill_at = spill_at
        insort(self.assigned.setdefault(endpoint.id, []), queued)

    def unassign(self, queued: QueuedRequest) -> None:
        """Takes the request out of its endpoint's queue."""
        assert queued.assigned is not None
        queue = self.assigned[queued.assigned.id]
        queue.remove(queued)
        if not queue:
            del self.assigned[queued.assigned.id]
        queued.assigned = None

    def add_best_effort(self, queued: QueuedRequest) -> None:
        insort(self.best_effort, queued, key=lambda other: other.sequence)

    def begin_dispatch(self, request_key: Hashable, endpoint: Endpoint, prefill_s: float) -> None:
        self.in_dispatch[request_key] = PendingDispatch(endpoint.id, prefill_s)

    def is_dispatching_to(self, endpoint: str) -> bool:
        return any(pending.endpoint == endpoint for pending in self.in_dispatch.values())

    def remove(self, request_key: Hashable) -> QueuedRequest | None:
        """Takes a request out of all queues; None: it is in none."""
        self.in_dispatch.pop(request_key, None)
        for queued in chain(self.new, self.settled()):
            if queued.request_key == request_key:
                if queued.assigned is not None:
                    self.unassign(queued)
                else:
                    (self.new if queued in self.new else self.best_effort).remove(queued)
                return queued
        return None

    def settled(self) -> Iterator[QueuedRequest]:
        """Requests with a place: assigned or best-effort."""
        return chain(self.best_effort, *self.assigned.values())

    def due_to_spill(self, now: float) -> list[QueuedRequest]:
        """Assigned requests at their last moment for another tier."""
        return [queued for queue in self.assigned.values() for queued in queue if queued.spill_at <= now]

    def prefill_ahead(self, queued: QueuedRequest) -> Mapping[str, float]:
        """Seconds of prefill before a request, by endpoint: due no later, or in dispatch. Its own are not counted."""
        ahead: dict[str, float] = {}
        for endpoint, queue in self.assigned.items():
            due = takewhile(lambda other: other.deadline <= queued.deadline, queue)
            ahead[endpoint] = sum(other.prefill_s for other in due if other is not queued)
        for pending in self.in_dispatch.values():
            ahead[pending.endpoint] = ahead.get(pending.endpoint, 0.0) + pending.prefill_s
        return ahead

    def latest_of_largest_tenant(self) -> QueuedRequest:
        """The latest arrival of the tenant with most requests in the queues."""
        [(tenant, _)] = Counter(queued.cache_group for queued in self.settled()).most_common(1)
        return max((q for q in self.settled() if q.cache_group == tenant), key=lambda q: q.sequence)
