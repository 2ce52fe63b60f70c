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
from policies.types import FOREVER, NEVER, Ask, Endpoint, PromptEstimate


@dataclass(slots=True, eq=False)
class Held:
    """A request that waits. `deadline` is that of its first token; `seed` its ordinal."""

    ticket: Hashable
    ask: Ask
    estimate: PromptEstimate
    route: Route
    seed: int
    deadline: float
    endpoint: Endpoint | None = None  # the one that it is bound to
    seconds: float = 0.0  # of an engine's time, to prefill it
    leave_by: float = FOREVER  # when another tier could only just make its deadline
    looked_at: float = NEVER  # whether another tier should have it
    limited: float = 0.0  # s that a provider's rate limit has kept it here
    limited_at: float = FOREVER  # since when one does, beyond those; FOREVER: none

    def __lt__(self, other: Held) -> bool:
        return (self.deadline, self.seed) < (other.deadline, other.seed)

    @property
    def tenant(self) -> str:
        return self.ask.cache_group

    def wait_on(self, now: float, limited: bool = False) -> None:
        """From `now` on it is a rate limit that keeps it, or not."""
        if self.limited_at < now:
            self.limited += now - self.limited_at
        self.limited_at = now if limited else FOREVER


class Lanes:
    """All requests that wait."""

    __slots__ = ("_leave_by", "bound", "last", "leaving", "new")

    def __init__(self) -> None:
        self.new: list[Held] = []
        self.bound: dict[str, list[Held]] = {}  # by endpoint, earliest deadline first
        self.last: list[Held] = []  # in order of arrival
        self.leaving: dict[Hashable, tuple[str, float]] = {}  # endpoint, and seconds of its time
        self._leave_by = FOREVER  # no later than the earliest of the bound

    def __len__(self) -> int:
        """Those that are held."""
        return len(self.new) + len(self.last) + sum(map(len, self.bound.values()))

    @property
    def quiet(self) -> bool:
        """Loads are as the fleet knows them: nothing is bound, and nothing on its way."""
        return not self.leaving and not self.bound

    def of(self, endpoint: str) -> list[Held]:
        return self.bound.get(endpoint, [])

    def bind(self, held: Held, endpoint: Endpoint, seconds: float, leave_by: float = FOREVER) -> None:
        held.endpoint, held.seconds, held.leave_by = endpoint, seconds, leave_by
        self._leave_by = min(self._leave_by, leave_by)
        insort(self.bound.setdefault(endpoint.id, []), held)

    def unbind(self, held: Held) -> None:
        """Out of its lane, to another place."""
        assert held.endpoint is not None
        lane = self.bound[held.endpoint.id]
        lane.remove(held)
        if not lane:
            del self.bound[held.endpoint.id]

    def leave_later(self, held: Held, at: float) -> None:
        """It stays for now."""
        held.leave_by = at
        self._leave_by = min(self._leave_by, at)

    def put_last(self, held: Held) -> None:
        held.endpoint = None
        insort(self.last, held, key=lambda other: other.seed)

    def send(self, ticket: Hashable, endpoint: Endpoint, seconds: float) -> None:
        self.leaving[ticket] = endpoint.id, seconds

    def drop(self, ticket: Hashable) -> Held | None:
        """Out of all lanes, whichever it is in."""
        self.leaving.pop(ticket, None)
        for lane in (self.new, self.last):
            for held in lane:
                if held.ticket == ticket:
                    lane.remove(held)
                    return held
        for held in chain.from_iterable(self.bound.values()):
            if held.ticket == ticket:
                self.unbind(held)
                return held
        return None

    def waiting(self) -> Iterator[Held]:
        """Those that have their place."""
        return chain(self.last, *self.bound.values())

    def must_leave(self, now: float) -> list[Held]:
        """The bound whose last moment has come."""
        if now < self._leave_by:
            return []
        bound = list(chain.from_iterable(self.bound.values()))
        self._leave_by = min((held.leave_by for held in bound), default=FOREVER)
        return [held for held in bound if held.leave_by <= now]

    def on_the_way(self, endpoint: str) -> bool:
        return any(name == endpoint for name, _ in self.leaving.values())

    def need(self) -> Mapping[str, float]:
        """Seconds of engine time that are bound, by tenant."""
        total: Counter[str] = Counter()
        for held in chain.from_iterable(self.bound.values()):
            total[held.tenant] += held.seconds  # type: ignore[assignment]  # counters take floats, typeshed does not
        return total

    def ahead(self, held: Held) -> Mapping[str, float]:
        """Seconds that go before it, by endpoint: what is due earlier, and what is on its way."""
        seconds = {name: sum(other.seconds for other in _due(lane, held)) for name, lane in self.bound.items()}
        for name, needed in self.leaving.values():
            seconds[name] = seconds.get(name, 0.0) + needed
        return seconds

    def most(self) -> Held:
        """The latest of the tenant that holds most."""
        [(tenant, _)] = Counter(held.tenant for held in self.waiting()).most_common(1)
        return max((held for held in self.waiting() if held.tenant == tenant), key=lambda held: held.seed)


def _due(lane: list[Held], held: Held) -> Iterator[Held]:
    """Those of a lane that are due no later, but for itself."""
    due = takewhile(lambda other: other.deadline <= held.deadline, lane)
    return (other for other in due if other is not held)
