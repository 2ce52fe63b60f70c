"""Requests that wait for an idle endpoint: late, without a deadline, or of a tenant above its share.

At an overload it holds thousands, and every event looks at it. So what an event costs depends on the number of tenants
and routes, not on the number of requests. Requests that came back after a refusal are first. A long prefill holds up no
short one, and a request that waits for the endpoint with its state no other.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator

from policies.queue.late_work import LONG, LateRate, patience_left
from policies.queue.queued_request import HoldRule, QueuedRequest
from policies.types import FOREVER

Owner = tuple[str, str, bool, str]  # tenant, route, a prefill above LONG, and the endpoint with the request's state


def _precedence(queued: QueuedRequest) -> tuple[bool, int]:
    return not queued.returned, queued.sequence


def _owner(queued: QueuedRequest) -> Owner:
    return queued.tenant, queued.route.name, queued.prefill_s > LONG, queued.request.pinned


class BestEffortQueue:
    """Queues by Owner, each in order of `_precedence`."""

    def __init__(self) -> None:
        self._by_key: dict[Hashable, QueuedRequest] = {}
        self._queues: dict[Owner, list[QueuedRequest]] = {}
        self._rates = defaultdict[tuple[str, bool], LateRate](LateRate)  # by route, and long or not

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[QueuedRequest]:
        return iter(sorted(self._by_key.values(), key=_precedence))

    @property
    def late(self) -> bool:
        """A request with a deadline waits."""
        return any(rate.requests for rate in self._rates.values())

    def queues(self) -> Collection[list[QueuedRequest]]:
        """Each of one tenant."""
        return self._queues.values()

    def get(self, request_key: Hashable) -> QueuedRequest | None:
        return self._by_key.get(request_key)

    def hold_late(self, queued: QueuedRequest, rule: HoldRule, endpoint: str, now: float) -> None:
        """A request enters with a rule that holds it, or is held by another from now on."""
        queued.hold_by(rule, endpoint, now)
        if not queued.is_late:
            self._add(queued, now)

    def _add(self, queued: QueuedRequest, now: float) -> None:
        """`prefill_s` of the request does not change from here on. All but the first of its queue wait their turn."""
        self._by_key[queued.request_key] = queued
        queued.late_since = now
        queue = self._queues.setdefault(_owner(queued), [])
        insort(queue, queued, key=_precedence)
        for behind in queue[1:2] if queue[0] is queued else [queued]:
            if behind.hold is not None:
                behind.hold_here(HoldRule.TURN, behind.hold.endpoint, now)
        if queued.deadline < FOREVER:
            self.rate(queued).add(queued, now)

    def begin(self, queued: QueuedRequest, now: float) -> None:
        """Removes a request whose prefill begins."""
        if queued.deadline < FOREVER:
            self.rate(queued).begin(queued, now)
        self._remove(queued)

    def leave(self, queued: QueuedRequest, now: float) -> None:
        """Removes a request that does not begin: refused, or its caller is gone."""
        if queued.deadline < FOREVER:
            self.rate(queued).leave(queued, now)
        self._remove(queued)

    def _remove(self, queued: QueuedRequest) -> None:
        del self._by_key[queued.request_key]
        owner = _owner(queued)
        queue = self._queues[owner]
        del queue[bisect_left(queue, _precedence(queued), key=_precedence)]
        if not queue:
            del self._queues[owner]

    def heads(self, now: float, is_over: Callable[[str], bool]) -> list[QueuedRequest]:
        """The next request of each queue: the first. Above the share it is the latest in time: behind a
        queue that only grows, every request would come too late. On a route that sheds the queue does not grow."""
        return [
            _latest_in_time(queue, now) if queue[0].route.on_miss != "shed" and is_over(owner[0]) else queue[0]
            for owner, queue in self._queues.items()
        ]

    def overdue(self, now: float) -> list[QueuedRequest]:
        """The first of each queue, where its wait has become too long, even as the next to begin."""
        first = (queue[0] for queue in self._queues.values())
        may_leave = (each for each in first if each.route.on_miss == "queue" and each.deadline < FOREVER)
        return [each for each in may_leave if self.rate(each).wait(each.prefill_s, now) > patience_left(each, now)]

    def rate(self, queued: QueuedRequest) -> LateRate:
        """The waits of requests like this one."""
        return self._rates[queued.route.name, queued.prefill_s > LONG]


def _latest_in_time(queue: list[QueuedRequest], now: float) -> QueuedRequest:
    """The first where none is."""
    return next((queued for queued in reversed(queue) if now < queued.deadline < FOREVER), queue[0])
