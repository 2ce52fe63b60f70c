"""An external API as its callers see it. Pure: seeded, and in the caller's time.

There is no queue and no batch to be seen: the time to the first token is log-normal around a median
that grows with the prompt, tokens then come steadily, and more than `requests_per_minute` in any
60 seconds are refused with the time at which the next one would be taken.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from heapq import heappop, heappush
from random import Random

from backends.simulated.events import EngineFirstToken, EngineRequest, Event, Finished, Refused, RequestId
from backends.simulated.profiles import ApiProfile

_WINDOW = 60.0  # s, of the rate limit


@dataclass(frozen=True, slots=True)
class ApiTiming:
    """When the tokens of an answer come."""

    first_at: float
    gap: float  # s between tokens
    tokens: int

    @property
    def ends_at(self) -> float:
        return self.first_at + self.gap * (self.tokens - 1)


class HostedApi:
    """Has the methods of `VirtualEngine`; `submit` also tells the course of the answer."""

    def __init__(self, profile: ApiProfile, seed: int = 0) -> None:
        self.profile = profile
        self.alive = True
        self._random = Random(seed)
        self._slowness = 1.0
        self._taken: deque[float] = deque()  # times of the requests in the window
        self._running: set[RequestId] = set()
        self._events: list[tuple[float, int, Event]] = []
        self._number = 0

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return 0

    def remaining(self, now: float) -> int:
        """Requests that would still be taken."""
        while self._taken and self._taken[0] <= now - _WINDOW:
            self._taken.popleft()
        return self.profile.requests_per_minute - len(self._taken)

    def resets_in(self, now: float) -> float:
        """Seconds until the limit is whole again."""
        return max(0.0, self._taken[-1] + _WINDOW - now) if self._taken else 0.0

    def submit(self, request: EngineRequest, now: float) -> ApiTiming:
        """Take a request, or raise Refused."""
        if not self.alive:
            raise Refused(0, "the service is down")
        if self.remaining(now) <= 0:
            limit = self.profile.requests_per_minute
            raise Refused(429, f"the limit is {limit} requests per minute", self._taken[0] + _WINDOW - now)
        self._taken.append(now)
        self._running.add(request.id)
        course = self._course(request, now)
        self._push(EngineFirstToken(request.id, course.first_at, 0.0, 0))
        self._push(Finished(request.id, course.ends_at, request.output_tokens))
        return course

    def abort(self, request_id: RequestId) -> bool:
        """Drop a request; nothing more is heard of it."""
        if request_id not in self._running:
            return False
        self._running.remove(request_id)
        return True

    def slow(self, factor: float) -> None:
        """Answers that begin from now on take `factor` times as long."""
        self._slowness = factor

    def kill(self) -> tuple[RequestId, ...]:
        """The service goes down. Returns the requests lost."""
        lost = tuple(self._running)
        self._running.clear()
        self._events.clear()
        self.alive = False
        return lost

    def restart(self, now: float) -> None:
        """The service is back; its rate limit remembers."""
        self.alive = True

    def run_until(self, until: float) -> list[Event]:
        """All events up to `until`, in order of time."""
        events: list[Event] = []
        while self._events and self._events[0][0] <= until:
            event = heappop(self._events)[2]
            if event.id in self._running:
                events.append(event)
                if isinstance(event, Finished):
                    self._running.remove(event.id)
        return events

    def _course(self, request: EngineRequest, now: float) -> ApiTiming:
        profile, noise = self.profile, self._random.lognormvariate
        median = profile.ttft + profile.ttft_per_token * request.prompt_tokens
        first_at = now + median * self._slowness * noise(0.0, profile.ttft_sigma)
        gap = profile.tpot * self._slowness * noise(0.0, profile.tpot_sigma)
        return ApiTiming(first_at, gap, request.output_tokens)

    def _push(self, event: Event) -> None:
        self._number += 1
        heappush(self._events, (event.at, self._number, event))
