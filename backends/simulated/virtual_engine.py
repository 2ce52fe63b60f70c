"""An engine in virtual time: as fast as the arithmetic goes.

`run_until(t)` returns what has become visible up to `t`. A step that is under way at `t` was planned
without what comes after `t`, exactly as in a real engine; what it brings is handed out by a later call.

Several engines and one world: since a request needs `profile.overhead` to reach the scheduler, an
engine may be run up to that far ahead of the next `submit` and the outcome is still exact.
"""

from __future__ import annotations

from backends.simulated.engine import Engine
from backends.simulated.events import EngineRequest, Event, RequestId, StepResult


class VirtualEngine:
    """Drives one `Engine`. All times are the caller's, and must not go back."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.steps = 0
        self._clock = 0.0  # where the last finished step ended
        self._under_way: StepResult | None = None
        self._gone: set[RequestId] = set()  # aborted while a step that serves them is under way

    @property
    def alive(self) -> bool:
        return self.engine.alive

    @property
    def busy_until(self) -> float:
        """Where the step under way ends, or the last one did."""
        return self._clock if self._under_way is None else self._under_way.ends_at

    def submit(self, request: EngineRequest, now: float) -> None:
        """See `Engine.submit`."""
        self.engine.submit(request, now)

    def abort(self, request_id: RequestId) -> bool:
        """Drop a request; nothing more is heard of it."""
        if self._under_way is not None:
            self._gone.add(request_id)
        return self.engine.abort(request_id)

    def slow(self, factor: float) -> None:
        """See `Engine.slow`."""
        self.engine.slow(factor)

    def kill(self) -> tuple[RequestId, ...]:
        """The engine dies, and the step under way with it. Returns the requests lost."""
        self._under_way = None
        return self.engine.kill()

    def restart(self, now: float) -> None:
        """The engine is back, empty."""
        self._clock = max(self._clock, now)
        self.engine.restart()

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
            self._under_way = self.engine.advance(start, until)

    def _complete(self, step: StepResult) -> list[Event]:
        self._under_way = None
        self._clock = step.ends_at
        self.steps += step.steps
        events: tuple[Event, ...] = (*step.first, *step.finished)
        if not self._gone:
            return list(events)
        heard = [event for event in events if event.id not in self._gone]
        self._gone.clear()
        return heard
