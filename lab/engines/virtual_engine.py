"""Simulated backends in virtual time, as fast as the arithmetic goes.

`run_until(t)` returns the events up to `t`. A step under way at `t` was planned without requests after `t`, as in a
real engine; a later call returns the events of the step. A request needs `profile.overhead` to reach the scheduler,
so an engine may run ahead of the next `submit` by this time, and the outcome is still exact.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from random import Random

from backends.server_profiles import ApiProfile
from lab.engines.engine import Engine
from lab.engines.engine_events import EngineFirstToken, EngineRequest, Event, Finished, Refused, RequestId, StepResult


class VirtualEngine:
    """Drives an `Engine`. All times are the caller's, and must not go back."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.steps = 0
        self._clock = 0.0  # end of the last finished step
        self._under_way: StepResult | None = None
        self._aborted: set[RequestId] = set()  # during the step under way, still in its events

    @property
    def alive(self) -> bool:
        return self.engine.alive

    @property
    def busy_until(self) -> float:
        """End of the step under way, or of the last step."""
        return self._clock if self._under_way is None else self._under_way.ends_at

    def submit(self, request: EngineRequest, now: float) -> None:
        self.engine.submit(request, now)

    def abort(self, request_id: RequestId) -> bool:
        """Drop a request, without further events."""
        if self._under_way is not None:
            self._aborted.add(request_id)
        return self.engine.abort(request_id)

    def slow(self, factor: float) -> None:
        self.engine.slowness = factor

    def kill(self) -> tuple[RequestId, ...]:
        """Stop, also in the middle of a step. Returns the requests lost."""
        self._under_way = None
        return self.engine.kill()

    def restart(self, now: float) -> None:
        self._clock = max(self._clock, now)
        self.engine.restart()

    def forget(self) -> None:
        """Drop cached blocks that no request holds."""
        self.engine.cache.drop_idle()

    def run_until(self, until: float) -> list[Event]:
        """All events up to `until`, in order of time."""
        events: list[Event] = []
        while True:
            if self._under_way is not None:
                if self._under_way.ends_at > until:
                    return events
                events += self._complete(self._under_way)
            start = self.engine.wakes_at(self._clock)
            if start is None or start >= until:
                return events
            self._under_way = self.engine.step(start, until)

    def _complete(self, step: StepResult) -> list[Event]:
        self._under_way = None
        self._clock = step.ends_at
        self.steps += step.steps
        events: tuple[Event, ...] = (*step.first, *step.finished)
        seen = [event for event in events if event.id not in self._aborted]
        self._aborted.clear()
        return seen


_WINDOW = 60.0  # s, of the rate limit


@dataclass(frozen=True, slots=True)
class ApiTiming:
    """Times of an answer's tokens."""

    first_at: float
    gap: float  # s between tokens
    tokens: int

    @property
    def ends_at(self) -> float:
        return self.first_at + self.gap * (self.tokens - 1)


@dataclass(frozen=True, slots=True)
class RecordedApi(ApiProfile):
    """An API of an access log. `answers`: time of each request in s, its TTFT in s and its TPOT, in order of time."""

    answers: tuple[tuple[float, float, float], ...] = ()


class HostedApi:
    """An external API as seen by its callers, with the methods of `VirtualEngine`; seeded.

    Queue and batch are not visible: the time to the first token is log-normal around a median that grows with the
    prompt, further tokens come steadily, and requests above the rate limit are refused: more than `requests_per_minute`
    in any 60 s, or, with `burst`, what a bucket of so many requests does not hold, which is refilled at that rate. A
    `RecordedApi` takes the times of its answers from those that were recorded, each once, the nearest in time first.
    """

    def __init__(self, profile: ApiProfile, seed: int = 0) -> None:
        self.profile = profile
        self.alive = True
        self._random = Random(seed)
        self._recorded = [*profile.answers] if isinstance(profile, RecordedApi) else []
        self._slowness = 1.0
        self._accepted: deque[float] = deque()  # times of the requests in the window
        self._level, self._filled_at = float(profile.burst), 0.0  # of the bucket
        self._running: set[RequestId] = set()
        self._events: list[tuple[float, int, Event]] = []
        self._sequence = count()

    @property
    def running(self) -> int:
        return len(self._running)

    def remaining(self, now: float) -> int:
        """Requests left in the present window, or in the bucket."""
        if self.profile.burst:
            return int(self._bucket(now))
        while self._accepted and self._accepted[0] <= now - _WINDOW:
            self._accepted.popleft()
        return self.profile.requests_per_minute - len(self._accepted)

    def _bucket(self, now: float) -> float:
        """Requests in the bucket."""
        return min(self._level + (now - self._filled_at) / self._refill_s, float(self.profile.burst))

    @property
    def _refill_s(self) -> float:
        """Seconds in which the bucket gains a request."""
        return _WINDOW / self.profile.requests_per_minute

    def resets_in(self, now: float) -> float:
        """Seconds until the window is empty."""
        return max(0.0, self._accepted[-1] + _WINDOW - now) if self._accepted else 0.0

    def submit(self, request: EngineRequest, now: float) -> ApiTiming:
        """Accept a request. Raises Refused."""
        if not self.alive:
            raise Refused(0, "the service is down")
        if self.remaining(now) <= 0:
            limit = self.profile.requests_per_minute
            raise Refused(429, f"the limit is {limit} requests per minute", retry_after=self._reopens_in(now))
        self._count(now)
        self._running.add(request.id)
        timing = self._timing(request, now)
        self._push(EngineFirstToken(request.id, timing.first_at, 0.0, 0))
        self._push(Finished(request.id, timing.ends_at, request.output_tokens))
        return timing

    def _count(self, now: float) -> None:
        """Count an accepted request."""
        if self.profile.burst:
            self._level, self._filled_at = self._bucket(now) - 1, now
        else:
            self._accepted.append(now)

    def _reopens_in(self, now: float) -> float:
        """Seconds until the next request is accepted, at the rate limit."""
        if self.profile.burst:
            return (1 - self._bucket(now)) * self._refill_s
        return self._accepted[0] + _WINDOW - now

    def abort(self, request_id: RequestId) -> bool:
        """Drop a request, without further events."""
        if request_id not in self._running:
            return False
        self._running.remove(request_id)
        return True

    def slow(self, factor: float) -> None:
        """Answers to requests from now on take `factor` times as long."""
        self._slowness = factor

    def kill(self) -> tuple[RequestId, ...]:
        """Stop. Returns the requests lost."""
        lost = tuple(self._running)
        self._running.clear()
        self._events.clear()
        self.alive = False
        return lost

    def restart(self, now: float) -> None:
        """Serve again, with the same rate limit window."""
        self.alive = True

    def forget(self) -> None:
        """An API shows no cache."""

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

    def _timing(self, request: EngineRequest, now: float) -> ApiTiming:
        profile, noise = self.profile, self._random.lognormvariate
        if self._recorded:
            ttft, tpot = self._take_nearest(now)
        else:
            median = profile.ttft + profile.ttft_per_token * request.prompt_tokens
            ttft, tpot = median * noise(0.0, profile.ttft_sigma), profile.tpot * noise(0.0, profile.tpot_sigma)
        return ApiTiming(now + ttft * self._slowness, tpot * self._slowness, request.output_tokens)

    def _take_nearest(self, now: float) -> tuple[float, float]:
        """TTFT and TPOT."""
        behind = bisect_left(self._recorded, (now, 0.0, 0.0))
        near = self._recorded[max(behind - 1, 0) : behind + 1]
        nearest = min(near, key=lambda answer: abs(answer[0] - now))
        self._recorded.remove(nearest)
        return nearest[1], nearest[2]

    def _push(self, event: Event) -> None:
        heappush(self._events, (event.at, next(self._sequence), event))
