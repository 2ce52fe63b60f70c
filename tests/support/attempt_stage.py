"""An attempt on a stage: its fleet, and a sink that plays the race."""

from __future__ import annotations

from typing import Any

from backends.interface import Failure, FailureKind
from gateway.upstream.attempt import Milestone
from tests.support.builders import RecordingFleet, RecordingSink, wire

RESET = Failure(FailureKind.RESET, "The backend closed the connection before its reply was complete.")
REFUSED = Failure(FailureKind.CONNECT, "The backend refused the connection.")


class Stage:
    """`headers`: of the reply; `status` 0: no head yet. `more`: arguments of the attempt."""

    def __init__(self, *, stream: bool = True, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.fleet = RecordingFleet()
        self.wire = wire(self.fleet, stream=stream)
        self.sink = RecordingSink(self.wire)
        if status:
            self.sink.on_head(status, {"content-type": "text/event-stream", "retry-after": "7", **(headers or {})})

    def reads(self, *parts: bytes) -> Stage:
        for part in parts:
            self.sink.on_body(part)
        return self

    def ends(self) -> Stage:
        self.sink.on_end()
        return self

    @property
    def firsts(self) -> list[Any]:
        """Milestones at which an answer began."""
        return [event for event in self.sink.events if event in (Milestone.FIRST_TOKEN, Milestone.WHOLE)]

    @property
    def ended(self) -> bool:
        """The answer was told to be complete, once."""
        return self.sink.events[-1] is Milestone.ENDED and self.sink.events.count(Milestone.ENDED) == 1

    @property
    def passed(self) -> bytes:
        """Bytes given to the answer."""
        return b"".join(self.sink.answer.reads)

    @property
    def failure(self) -> Failure:
        (failure,) = self.sink.failures
        return failure

    @property
    def load(self) -> tuple[int, int]:
        """Attempts in flight in the fleet, and attempts without a token; at the time of sending, as a whole answer
        counts as prefilling for its expected prefill time alone."""
        load = self.fleet.snapshot(self.wire.times.opened).loads["small/a"]
        return load.in_flight, load.prefilling
