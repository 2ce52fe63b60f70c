"""Queues of the requests held in the gateway, and the work ahead of a request, by endpoint.

A request is in one place at a time: new, in the queue of the assigned endpoint, in the best-effort queue, or in
dispatch: released, and not yet known to the fleet. A request that waits for a limit which its caller alone has met is
beside the queue of the endpoint: it holds up no other caller, and is no work ahead.

A decision counts the prefill queued before a request as a wait at the endpoint; so do the seconds until the answers
there can bear another prefill (`policies.latency.tpot`). Requests held before it count in the provider's rate limit.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, takewhile

from policies.fleet.fleet import Fleet
from policies.queue.best_effort_queue import BestEffortQueue
from policies.queue.queued_request import HoldRule, QueuedRequest
from policies.routing.decide import decide
from policies.scorers.scorers import Scorer
from policies.types import FOREVER, Candidate, Decision, Endpoint, FleetSnapshot, Load

QueueKey = tuple[str, str]  # endpoint, and caller with an own limit; "": the shared queue


@dataclass(frozen=True, slots=True)
class Ahead:
    """Requests ahead of a request at an endpoint: count, seconds of prefill, prompt tokens."""

    requests: int = 0
    prefill_s: float = 0.0
    tokens: float = 0.0

    def with_one(self, prefill_s: float, tokens: float) -> Ahead:
        return Ahead(self.requests + 1, self.prefill_s + prefill_s, self.tokens + tokens)


NOTHING_AHEAD: Mapping[str, Ahead] = {}


def _key(queued: QueuedRequest) -> QueueKey:
    assert queued.assigned is not None
    return queued.assigned.id, queued.request.caller if queued.own_limit else ""


@dataclass(slots=True)
class EndpointQueues:
    """All requests held in the gateway."""

    best_effort: BestEffortQueue
    new: list[QueuedRequest] = field(default_factory=list)
    assigned: dict[QueueKey, list[QueuedRequest]] = field(default_factory=dict)  # earliest deadline first
    in_dispatch: dict[Hashable, Candidate] = field(default_factory=dict)  # destinations of released requests, by key

    def __len__(self) -> int:
        """Requests held; requests in dispatch are not counted."""
        return len(self.new) + len(self.best_effort) + sum(map(len, self.assigned.values()))

    def of(self, endpoint: str) -> Sequence[QueuedRequest]:
        """Requests in an endpoint's shared queue, without requests held by a caller's own limit."""
        return self.assigned.get((endpoint, ""), ())

    def assign(
        self, queued: QueuedRequest, endpoint: Endpoint, rule: HoldRule, now: float, own_limit: bool = False
    ) -> None:
        """The first request behind waits its turn. `own_limit`: the caller alone has met the limit waited for."""
        queued.hold_by(rule, endpoint.id, now)
        queued.assigned, queued.own_limit = endpoint, own_limit
        queue = self.assigned.setdefault(_key(queued), [])
        insort(queue, queued)
        for displaced in queue[1:2] if queue[0] is queued else ():
            displaced.hold_here(HoldRule.TURN, endpoint.id, now)

    def unassign(self, queued: QueuedRequest) -> Endpoint:
        """Takes the request out of the queue of an endpoint, and returns the endpoint."""
        key, endpoint = _key(queued), queued.assigned
        assert endpoint is not None
        self.assigned[key].remove(queued)
        if not self.assigned[key]:
            del self.assigned[key]
        queued.assigned, queued.own_limit = None, False
        return endpoint

    def remove(self, request_key: Hashable, now: float) -> QueuedRequest | None:
        """Takes a request that will not be sent out of all queues; None: not found."""
        self.in_dispatch.pop(request_key, None)
        if (late := self.best_effort.get(request_key)) is not None:
            self.best_effort.leave(late, now)
            return late
        for queued in chain(self.new, *self.assigned.values()):
            if queued.request_key == request_key:
                self.new.remove(queued) if queued.assigned is None else self.unassign(queued)
                return queued
        return None

    def ahead(self, queued: QueuedRequest) -> Mapping[str, Ahead]:
        """Requests sent before another, by endpoint: due before, or in dispatch."""
        found: dict[str, Ahead] = {}
        for (endpoint, caller), queue in self.assigned.items():
            for other in takewhile(lambda other: other < queued, () if caller else queue):
                assert other.assigned is not None
                tokens = other.estimate.pools[other.assigned.pool].tokens
                found[endpoint] = found.get(endpoint, Ahead()).with_one(other.prefill_s, tokens)
        for sent in self.in_dispatch.values():
            before = found.get(sent.endpoint.id, Ahead())
            found[sent.endpoint.id] = before.with_one(sent.forecast.prefill, sent.prompt_tokens)
        return found

    def latest_of_largest_tenant(self) -> QueuedRequest:
        """The latest arrival of the tenant with most requests in the queues; of its work that is due later, if there is
        some."""
        late, assigned = self.best_effort.queues(), [*chain(*self.assigned.values())]
        held = Counter(queued.tenant for queued in assigned)
        for queue in late:
            held[queue[0].tenant] += len(queue)
        [(tenant, _)] = held.most_common(1)
        own = (queued for queued in (*assigned, *(queue[-1] for queue in late)) if queued.tenant == tenant)
        return max(own, key=lambda queued: (queued.due < FOREVER, queued.sequence))


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
            queues, delayed = self.queues, dict[str, Load]()
            ahead = queues.ahead(queued) if queues.assigned or queues.in_dispatch else NOTHING_AHEAD
            for name, load in snapshot.loads.items():
                # Loading a variant at another engine stalls the answers there, and closes that engine as well.
                reopens_in = 0.0 if queued.route.variants else load.reopens_in
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
