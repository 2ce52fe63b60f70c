"""Queues of the requests held in the gateway, and the work ahead of a request, by endpoint.

Rules:
- A request is in one place at a time: new, in the queue of the assigned endpoint, in the best-effort queue, or in
  dispatch: released, and not yet known to the fleet.
- Requests queued for an endpoint and due no later count there as work ahead.
- A request that waits for a limit which its caller alone has met waits beside the endpoint's queue: it holds up no
  other caller, and is no work ahead.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, takewhile
from typing import TypeVar

from policies.queue.best_effort_queue import BestEffortQueue
from policies.queue.queued_request import QueuedRequest
from policies.types import FOREVER, Candidate, Endpoint

K = TypeVar("K")


def _take_out(queues: dict[K, list[QueuedRequest]], key: K, queued: QueuedRequest) -> None:
    """An empty queue is removed."""
    queues[key].remove(queued)
    if not queues[key]:
        del queues[key]


def _prompt_tokens(queued: QueuedRequest) -> int:
    """Of a request that is assigned to an endpoint."""
    assert queued.assigned is not None
    return queued.estimate.pools[queued.assigned.pool].tokens


@dataclass(slots=True)
class EndpointQueues:
    """All requests held in the gateway."""

    new: list[QueuedRequest] = field(default_factory=list)
    assigned: dict[str, list[QueuedRequest]] = field(default_factory=dict)  # by endpoint, earliest deadline first
    limited: dict[tuple[str, str], list[QueuedRequest]] = field(default_factory=dict)  # by endpoint and caller
    best_effort: BestEffortQueue = field(default_factory=BestEffortQueue)
    in_dispatch: dict[Hashable, Candidate] = field(default_factory=dict)  # destinations of released requests, by key

    def __len__(self) -> int:
        """Requests held; requests in dispatch are not counted."""
        return len(self.new) + len(self.best_effort) + sum(map(len, self.waiting()))

    def waiting(self) -> Iterator[list[QueuedRequest]]:
        """The requests that wait for an endpoint."""
        return chain(self.assigned.values(), self.limited.values())

    def assign(
        self, queued: QueuedRequest, endpoint: Endpoint, spill_at: float = FOREVER, own_limit: bool = False
    ) -> None:
        """`own_limit`: the request waits for a limit that its caller alone has met."""
        queued.assigned, queued.own_limit = endpoint, own_limit
        queued.spill_at = spill_at
        if own_limit:
            insort(self.limited.setdefault((endpoint.id, queued.request.caller), []), queued)
        else:
            insort(self.assigned.setdefault(endpoint.id, []), queued)

    def unassign(self, queued: QueuedRequest) -> None:
        """Takes the request out of the queue of an endpoint."""
        assert queued.assigned is not None
        if queued.own_limit:
            _take_out(self.limited, (queued.assigned.id, queued.request.caller), queued)
        else:
            _take_out(self.assigned, queued.assigned.id, queued)
        queued.assigned = None

    def remove(self, request_key: Hashable) -> QueuedRequest | None:
        """Takes a request out of all queues; None: not found."""
        self.in_dispatch.pop(request_key, None)
        if (late := self.best_effort.get(request_key)) is not None:
            self.best_effort.remove(late)
            return late
        for queued in chain(self.new, *self.waiting()):
            if queued.request_key == request_key:
                if queued in self.new:
                    self.new.remove(queued)
                else:
                    self.unassign(queued)
                return queued
        return None

    def due_to_spill(self, now: float) -> list[QueuedRequest]:
        """Assigned requests at the last moment for another tier."""
        return [queued for queue in self.waiting() for queued in queue if queued.spill_at <= now]

    def prefill_ahead(self, queued: QueuedRequest) -> Mapping[str, float]:
        """Seconds of prefill before a request, by endpoint: due no later, or in dispatch. Without its own."""
        ahead: dict[str, float] = {}
        for endpoint, queue in self.assigned.items():
            due = takewhile(lambda other: other.deadline <= queued.deadline, queue)
            ahead[endpoint] = sum(other.prefill_s for other in due if other is not queued)
        for chosen in self.in_dispatch.values():
            ahead[chosen.endpoint.id] = ahead.get(chosen.endpoint.id, 0.0) + chosen.forecast.prefill
        return ahead

    def held_ahead(self, queued: QueuedRequest) -> Mapping[str, tuple[int, float]]:
        """Requests, and tokens of their prompts, that are sent before a request, by endpoint."""
        ahead: dict[str, tuple[int, float]] = {}
        for endpoint, queue in self.assigned.items():
            before = [*takewhile(lambda other: other < queued, queue)]
            ahead[endpoint] = len(before), sum(map(_prompt_tokens, before))
        for chosen in self.in_dispatch.values():
            requests, tokens = ahead.get(chosen.endpoint.id, (0, 0.0))
            ahead[chosen.endpoint.id] = requests + 1, tokens + chosen.prompt_tokens
        return ahead

    def latest_of_largest_tenant(self) -> QueuedRequest:
        """The latest arrival of the tenant with most requests in the queues."""
        assigned = list(chain(*self.waiting()))
        held = self.best_effort.by_tenant() + Counter(queued.tenant for queued in assigned)
        [(tenant, _)] = held.most_common(1)
        latest = self.best_effort.latest_of(tenant)
        own = [queued for queued in assigned if queued.tenant == tenant] + ([latest] if latest else [])
        return max(own, key=lambda queued: queued.sequence)
