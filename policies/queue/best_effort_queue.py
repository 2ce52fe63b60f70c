"""Requests that wait for an idle endpoint: late, without a deadline, or put behind by a part.

At an overload it holds thousands, and every event looks at it. So what an event costs depends on the number of tenants
and routes, not on the number of requests. Requests that came back after a refusal are first. A long prefill holds up no
short one. A short one waits for the endpoint with its prompt in the cache, and holds up none that waits for another.
Prompts come into caches while they wait, so besides the first of each queue some are decided at each event, in turn.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterator
from itertools import islice

from policies.queue.late_work import LONG, LateRate, patience_left
from policies.queue.queue_part import QueueHooks
from policies.queue.queued_request import HoldRule, QueuedRequest
from policies.types import FOREVER

CHECKED = 2  # requests behind the first of their queue that are decided at an event

Owner = tuple[str, str, str]  # tenant, route, and the endpoint waited for: none with a prefill above LONG


def _precedence(queued: QueuedRequest) -> tuple[bool, float, int]:
    return not queued.returned, queued.due, queued.sequence


def _owner(queued: QueuedRequest, endpoint: str) -> Owner:
    return queued.tenant, queued.route.name, queued.request.pinned if queued.prefill_s > LONG else endpoint


class BestEffortQueue:
    """Queues by Owner, each in order of `_precedence`."""

    def __init__(self, hooks: QueueHooks) -> None:
        self._hooks = hooks
        self._held: dict[Hashable, tuple[QueuedRequest, Owner]] = {}  # longest undecided first
        self._queues: dict[Owner, list[QueuedRequest]] = {}
        self._rates = defaultdict[tuple[str, bool], LateRate](LateRate)  # by route, and long or not

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[QueuedRequest]:
        return iter(sorted((queued for queued, _ in self._held.values()), key=_precedence))

    @property
    def late(self) -> bool:
        """A request with a deadline waits."""
        return any(rate.requests for rate in self._rates.values())

    def queues(self) -> Collection[list[QueuedRequest]]:
        """Each of one tenant."""
        return self._queues.values()

    def get(self, request_key: Hashable) -> QueuedRequest | None:
        return self._held.get(request_key, (None,))[0]

    def hold_late(self, queued: QueuedRequest, rule: HoldRule, endpoint: str, now: float) -> None:
        """A request enters with a rule that holds it, or is held by another, or elsewhere, from now on. All but the
        first of a queue wait their turn."""
        owner = _owner(queued, endpoint)
        _, before = self._held.pop(queued.request_key, (queued, None))
        if before is None:
            self._count(queued, now)
        elif before != owner:
            self._leave_queue(queued, before)
        if before != owner:
            self._enter_queue(queued, owner, now)
        self._held[queued.request_key] = queued, owner
        holds = rule is HoldRule.RATE_LIMIT or self._queues[owner][0] is queued
        queued.hold_by(rule if holds else HoldRule.TURN, endpoint, now)

    def _count(self, queued: QueuedRequest, now: float) -> None:
        queued.late_since = min(queued.late_since, now)
        if queued.deadline < FOREVER:
            self.rate(queued).add(queued, now)
        for on_held in self._hooks.on_held:
            on_held(queued, now)

    def _enter_queue(self, queued: QueuedRequest, owner: Owner, now: float) -> None:
        queue = self._queues.setdefault(owner, [])
        insort(queue, queued, key=_precedence)
        for displaced in queue[1:2] if queue[0] is queued else ():
            if displaced.hold is not None:
                displaced.hold_here(HoldRule.TURN, displaced.hold.endpoint, now)

    def _leave_queue(self, queued: QueuedRequest, owner: Owner) -> None:
        queue = self._queues[owner]
        del queue[bisect_left(queue, _precedence(queued), key=_precedence)]
        if not queue:
            del self._queues[owner]

    def begin(self, queued: QueuedRequest, now: float) -> None:
        """Removes a request whose prefill begins."""
        if queued.deadline < FOREVER:
            self.rate(queued).begin(queued, now)
        for on_begun in self._hooks.on_begun:
            on_begun(queued, now)
        self._leave_queue(*self._held.pop(queued.request_key))

    def leave(self, queued: QueuedRequest, now: float) -> None:
        """Removes a request that does not begin: refused, or its caller is gone."""
        if queued.deadline < FOREVER:
            self.rate(queued).leave(queued, now)
        for on_left in self._hooks.on_left:
            on_left(queued, now)
        self._leave_queue(*self._held.pop(queued.request_key))

    def heads(self, now: float) -> list[QueuedRequest]:
        """The next request of each queue: the first. Where a part puts it behind it is the latest in time: behind a
        queue that only grows, every request would come too late. On a route that sheds the queue does not grow."""
        return [
            _latest_in_time(queue, now)
            if queue[0].route.on_miss != "shed" and self._hooks.behind_rule(queue[0]) is not None
            else queue[0]
            for queue in self._queues.values()
        ]

    def longest_undecided(self) -> list[QueuedRequest]:
        """CHECKED requests whose latest decision is the oldest."""
        return [queued for queued, _ in islice(self._held.values(), CHECKED)]

    def is_overdue(self, queued: QueuedRequest, now: float) -> bool:
        """The wait has become too long, even as the next to begin."""
        if queued.route.on_miss != "queue" or queued.deadline == FOREVER:
            return False
        return self.rate(queued).wait(queued.prefill_s, now) > patience_left(queued, now)

    def rate(self, queued: QueuedRequest) -> LateRate:
        """The waits of requests like this one."""
        return self._rates[queued.route.name, queued.prefill_s > LONG]


def _latest_in_time(queue: list[QueuedRequest], now: float) -> QueuedRequest:
    """The first where none is."""
    return next((queued for queued in reversed(queue) if now < queued.deadline < FOREVER), queue[0])
