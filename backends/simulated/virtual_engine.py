"""An engine in virtual time, as fast as the arithmetic goes.

`run_until(t)` returns the events up to `t`. A step under way at `t` was planned without requests after `t`, exactly as
in a real engine; a later call returns its events. A request needs `profile.overhead` to reach the scheduler, so an
engine may run so far ahead of the next `submit`, and the outcome is still exact.
"""

from __future__ import annotations

from backends.simulated.engine import Engine
from backends.simulated.events import EngineRequest, Event, RequestId, StepResult


class VirtualEngine:
    """Drives one `Engine`. All times are the caller's, and must not go back."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.steps = 0
        self._clock = 0.0  # end of the last finished step
        self._under_way: StepResult | None = None
        self._aborted: set[RequestId] = set()  # during the step under way, which may serve them

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
