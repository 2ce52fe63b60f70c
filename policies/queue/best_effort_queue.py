"""Requests that wait for an idle endpoint: late, without a deadline, or of a tenant above its share.

At an overload it holds thousands, and every event looks at it. So what an event costs depends on the number of tenants
and routes, not on the number of requests. Requests that came back after a refusal are first.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator

from policies.queue.late_work import LONG, LateWork
from policies.routing.candidates import QueuedRequest
from policies.types import FOREVER, NEVER


def _precedence(queued: QueuedRequest) -> tuple[bool, int]:
    return not queued.returned, queued.sequence


def _owner(queued: QueuedRequest) -> tuple[str, str, str]:
    """A request that waits for the endpoint with its state holds up no other."""
    return queued.tenant, queued.route.name, queued.request.pinned


class BestEffortQueue:
    """Queues by tenant, route and the endpoint with the request's state, each in order of `_precedence`."""

    def __init__(self) -> None:
        self._by_key: dict[Hashable, QueuedRequest] = {}
        self._queues: dict[tuple[str, str, str], list[QueuedRequest]] = {}
        self._late = defaultdict[tuple[str, bool], LateWork](LateWork)  # by route, and long or not

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[QueuedRequest]:
        return iter(sorted(self._by_key.values(), key=_precedence))

    @property
    def late(self) -> bool:
        """A request with a deadline waits."""
        return any(work.requests for work in self._late.values())

    def get(self, request_key: Hashable) -> QueuedRequest | None:
        return self._by_key.get(request_key)

    def add(self, queued: QueuedRequest, now: float) -> None:
        """`prefill_s` of the request does not change from here on."""
        self._by_key[queued.request_key] = queued
        owner, queued.late_since = _owner(queued), now
        insort(self._queues.setdefault(owner, []), queued, key=_precedence)
        if queued.deadline < FOREVER:
            self.late_work(queued).add(queued.tenant, queued.prefill_s, now)

    def remove(self, queued: QueuedRequest, now: float = NEVER) -> None:
        del self._by_key[queued.request_key]
        owner = _owner(queued)
        queue = self._queues[owner]
        del queue[bisect_left(queue, _precedence(queued), key=_precedence)]
        if not queue:
            del self._queues[owner]
        if queued.deadline < FOREVER:
            self.late_work(queued).add(queued.tenant, queued.prefill_s, now, times=-1)

    def begin(self, queued: QueuedRequest, now: float) -> None:
        """Removes a request whose prefill begins."""
        self.remove(queued, now)
        if queued.deadline < FOREVER:
            self.late_work(queued).on_begun(queued.prefill_s)

    def late_work(self, queued: QueuedRequest) -> LateWork:
        """Of the route, as long as the request: short prefills do not wait for a calm pool, whoever sends long ones."""
        return self._late[queued.route.name, queued.prefill_s > LONG]

    def heads(self, now: float, is_over: Callable[[str], bool]) -> list[QueuedRequest]:
        """The next request of each queue: the first. Above the share it is the latest in time: behind a
        queue that only grows, every request would come too late. On a route that sheds the queue does not grow."""
        return [
            _latest_in_time(queue, now) if queue[0].route.on_miss != "shed" and is_over(tenant) else queue[0]
            for (tenant, _, _), queue in self._queues.items()
        ]

    def first(self) -> list[QueuedRequest]:
        """Of each queue."""
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
        return max(latest, key=lambda queued: queued.sequence, default=None)


def _latest_in_time(queue: list[QueuedRequest], now: float) -> QueuedRequest:
    """The first where none is."""
    return next((queued for queued in reversed(queue) if now < queued.deadline < FOREVER), queue[0])
