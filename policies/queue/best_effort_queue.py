"""Requests that wait for an idle endpoint: late, without a deadline, or of a tenant above its share.

At an overload it holds thousands, and every event looks at it. So what an event costs depends on the number of tenants
and routes, not on the number of requests. Late requests of a tenant and route begin with those that came back after a
refusal, and then the least prefill: it brings most sessions back for the same engine time.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator
from heapq import heappop, heappush

from policies.queue.late_work import LateWork
from policies.routing.candidates import QueuedRequest
from policies.types import FOREVER, NEVER


def _sequence(queued: QueuedRequest) -> int:
    return queued.sequence


def _owner(queued: QueuedRequest) -> tuple[str, str, str]:
    """A request that waits for the endpoint with its state holds up no other."""
    return queued.tenant, queued.route.name, queued.request.pinned


Precedence = tuple[bool, float, int]


def _precedence(queued: QueuedRequest) -> Precedence:
    """Order among the late requests of a tenant and route; arrival among those without a deadline."""
    return not queued.returned, queued.prefill_s if queued.deadline < FOREVER else 0.0, queued.sequence


class BestEffortQueue:
    """Queues by tenant, route and the endpoint with the request's state, each in order of arrival."""

    def __init__(self) -> None:
        self._by_key: dict[Hashable, QueuedRequest] = {}
        self._queues: dict[tuple[str, str, str], list[QueuedRequest]] = {}
        self._first: dict[tuple[str, str, str], list[tuple[Precedence, QueuedRequest]]] = {}  # heaps; some have left
        self._late = defaultdict[str, LateWork](LateWork)  # by route

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[QueuedRequest]:
        """In order of arrival."""
        return iter(sorted(self._by_key.values(), key=_sequence))

    @property
    def late(self) -> bool:
        """A request with a deadline waits."""
        return any(queued.deadline < FOREVER for queued in self._by_key.values())

    def get(self, request_key: Hashable) -> QueuedRequest | None:
        return self._by_key.get(request_key)

    def add(self, queued: QueuedRequest, now: float) -> None:
        """`prefill_s` of the request does not change from here on."""
        self._by_key[queued.request_key] = queued
        owner, queued.late_since = _owner(queued), now
        insort(self._queues.setdefault(owner, []), queued, key=_sequence)
        heappush(self._first.setdefault(owner, []), (_precedence(queued), queued))
        if queued.deadline < FOREVER:
            self._late[queued.route.name].add(queued.prefill_s, now)

    def remove(self, queued: QueuedRequest, now: float = NEVER) -> None:
        del self._by_key[queued.request_key]
        owner = _owner(queued)
        queue = self._queues[owner]
        del queue[bisect_left(queue, queued.sequence, key=_sequence)]
        if not queue:
            del self._queues[owner], self._first[owner]
        if queued.deadline < FOREVER:
            self._late[queued.route.name].add(queued.prefill_s, now, times=-1)

    def begin(self, queued: QueuedRequest, now: float) -> None:
        """Removes a request whose prefill begins."""
        self.remove(queued, now)
        if queued.deadline < FOREVER:
            self._late[queued.route.name].on_begun(queued.prefill_s)

    def late_work(self, queued: QueuedRequest) -> LateWork:
        """Of the route."""
        return self._late[queued.route.name]

    def heads(self, now: float, is_over: Callable[[str], bool]) -> list[QueuedRequest]:
        """The next request of each queue. Above the share it is the latest in time: behind a queue that only grows,
        every request would come too late. On a route that sheds the queue does not grow."""
        return [
            _latest_in_time(queue, now) if queue[0].route.on_miss != "shed" and is_over(owner[0]) else self._next(owner)
            for owner, queue in self._queues.items()
        ]

    def _next(self, owner: tuple[str, str, str]) -> QueuedRequest:
        first = self._first[owner]
        while self._by_key.get(first[0][1].request_key) is not first[0][1]:
            heappop(first)
        return first[0][1]

    def oldest(self) -> list[QueuedRequest]:
        """The earliest arrival of each queue."""
        return [queue[0] for queue in self._queues.values()]

    def prefill_ahead(self, queued: QueuedRequest) -> float:
        """Seconds of prefill of the same tenant and route that arrived before."""
        same = (queue for owner, queue in self._queues.items() if owner[:2] == _owner(queued)[:2])
        return sum(other.prefill_s for queue in same for other in queue if other.sequence < queued.sequence)

    def by_tenant(self) -> Counter[str]:
        """Number of requests."""
        held = Counter[str]()
        for (tenant, _, _), queue in self._queues.items():
            held[tenant] += len(queue)
        return held

    def latest_of(self, tenant: str) -> QueuedRequest | None:
        latest = (queue[-1] for (name, _, _), queue in self._queues.items() if name == tenant)
        return max(latest, key=_sequence, default=None)


def _latest_in_time(queue: list[QueuedRequest], now: float) -> QueuedRequest:
    """The first where none is."""
    return next((queued for queued in reversed(queue) if now < queued.deadline < FOREVER), queue[0])
