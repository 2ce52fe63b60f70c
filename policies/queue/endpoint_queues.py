"""Who waits, and where: the lanes of the gateway's own queue, without the rules (`policies.queue.queue_scheduler`).

A request is in one place at a time: new, in the lane of the endpoint that it is bound to, in the last
lane, or leaving: released, and not yet known to the fleet. A lane that is empty is not there.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, takewhile

from policies.routes.route import Route
from policies.types import FOREVER, NEVER, Endpoint, PromptEstimate, RequestView


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """A request that waits. `deadline` is that of its first token; `seed` its ordinal."""

    request_key: Hashable
    ask: RequestView
    estimate: PromptEstimate
    route: Route
    seed: int
    deadline: float
    endpoint: Endpoint | None = None  # the one that it is bound to
    seconds: float = 0.0  # of an engine's time, to prefill it
    spill_at: float = FOREVER  # when another tier could only just make its deadline
    looked_at: float = NEVER  # whether another tier should have it
    rate_limited_s: float = 0.0  # s that a provider's rate limit has kept it here
    limited_at: float = FOREVER  # since when one does, beyond those; FOREVER: none

    def __lt__(self, other: QueuedRequest) -> bool:
        return (self.deadline, self.seed) < (other.deadline, other.seed)

    @property
    def tenant(self) -> str:
        return self.ask.cache_group

    def wait_on(self, now: float, limited: bool = False) -> None:
        """From `now` on it is a rate limit that keeps it, or not."""
        if self.limited_at < now:
            self.rate_limited_s += now - self.limited_at
        self.limited_at = now if limited else FOREVER


class EndpointQueues:
    """All requests that wait."""

    __slots__ = ("_leave_by", "assigned", "best_effort_queue", "leaving", "new")

    def __init__(self) -> None:
        self.new: list[QueuedRequest] = []
        self.assigned: dict[str, list[QueuedRequest]] = {}  # by endpoint, earliest deadline first
        self.best_effort_queue: list[QueuedRequest] = []  # in order of arrival
        self.leaving: dict[Hashable, tuple[str, float]] = {}  # endpoint, and seconds of its time
        self._leave_by = FOREVER  # no later than the earliest of the bound

    def __len__(self) -> int:
        """Those that are held."""
        return len(self.new) + len(self.best_effort_queue) + sum(map(len, self.assigned.values()))

    @property
    def quiet(self) -> bool:
        """Loads are as the fleet knows them: nothing is bound, and nothing on its way."""
        return not self.leaving and not self.assigned

    def of(self, endpoint: str) -> list[QueuedRequest]:
        return self.assigned.get(endpoint, [])

    def bind(self, held: QueuedRequest, endpoint: Endpoint, seconds: float, leave_by: float = FOREVER) -> None:
        held.endpoint, held.seconds, held.spill_at = endpoint, seconds, leave_by
        self._leave_by = min(self._leave_by, leave_by)
        insort(self.assigned.setdefault(endpoint.id, []), held)

    def unbind(self, held: QueuedRequest) -> None:
        """Out of its lane, to another place."""
        assert held.endpoint is not None
        lane = self.assigned[held.endpoint.id]
        lane.remove(held)
        if not lane:
            del self.assigned[held.endpoint.id]

    def leave_later(self, held: QueuedRequest, at: float) -> None:
        """It stays for now."""
        held.spill_at = at
        self._leave_by = min(self._leave_by, at)

    def put_last(self, held: QueuedRequest) -> None:
        held.endpoint = None
        insort(self.best_effort_queue, held, key=lambda other: other.seed)

    def send(self, ticket: Hashable, endpoint: Endpoint, seconds: float) -> None:
        self.leaving[ticket] = endpoint.id, seconds

    def drop(self, ticket: Hashable) -> QueuedRequest | None:
        """Out of all lanes, whichever it is in."""
        self.leaving.pop(ticket, None)
        for lane in (self.new, self.best_effort_queue):
            for held in lane:
                if held.request_key == ticket:
                    lane.remove(held)
                    return held
        for held in chain.from_iterable(self.assigned.values()):
            if held.request_key == ticket:
                self.unbind(held)
                return held
        return None

    def waiting(self) -> Iterator[QueuedRequest]:
        """Those that have their place."""
        return chain(self.best_effort_queue, *self.assigned.values())

    def must_leave(self, now: float) -> list[QueuedRequest]:
        """The bound whose last moment has come."""
        if now < self._leave_by:
            return []
        bound = list(chain.from_iterable(self.assigned.values()))
        self._leave_by = min((held.spill_at for held in bound), default=FOREVER)
        return [held for held in bound if held.spill_at <= now]

    def on_the_way(self, endpoint: str) -> bool:
        return any(name == endpoint for name, _ in self.leaving.values())

    def need(self) -> Mapping[str, float]:
        """Seconds of engine time that are bound, by tenant."""
        total: Counter[str] = Counter()
        for held in chain.from_iterable(self.assigned.values()):
            total[held.tenant] += held.seconds  # type: ignore[assignment]  # counters take floats, typeshed does not
        return total

    def ahead(self, held: QueuedRequest) -> Mapping[str, float]:
        """Seconds that go before it, by endpoint: what is due earlier, and what is on its way."""
        seconds = {name: sum(other.seconds for other in _due(lane, held)) for name, lane in self.assigned.items()}
        for name, needed in self.leaving.values():
            seconds[name] = seconds.get(name, 0.0) + needed
        return seconds

    def most(self) -> QueuedRequest:
        """The latest of the tenant that holds most."""
        [(tenant, _)] = Counter(held.tenant for held in self.waiting()).most_common(1)
        return max((held for held in self.waiting() if held.tenant == tenant), key=lambda held: held.seed)


def _due(lane: list[QueuedRequest], held: QueuedRequest) -> Iterator[QueuedRequest]:
    """Those of a lane that are due no later, but for itself."""
    due = takewhile(lambda other: other.deadline <= held.deadline, lane)
    return (other for other in due if other is not held)
