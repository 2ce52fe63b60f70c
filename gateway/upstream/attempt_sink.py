"""The `Sink` of an attempt's exchange: hands the event that a read makes to the race, in the call of the read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from backends.interface import Failure
from gateway.upstream.attempt import WireAttempt, WireEvent


@dataclass(slots=True, eq=False)
class AttemptSink:
    """`tell` gets the events of the attempt; `lose` the loss of the connection, which the attempt has not heard of."""

    attempt: WireAttempt
    tell: Callable[[WireAttempt, WireEvent], None]
    lose: Callable[[WireAttempt, Failure], None]

    def on_head(self, status: int, headers: Mapping[str, str]) -> None:
        if (event := self.attempt.on_head(status, headers)) is not None:
            self.tell(self.attempt, event)

    def on_body(self, data: bytes, framed: bytes = b"") -> None:
        if (event := self.attempt.on_body(data, framed)) is not None:
            self.tell(self.attempt, event)

    def on_end(self) -> None:
        if (event := self.attempt.on_end()) is not None:
            self.tell(self.attempt, event)

    def on_failure(self, failure: Failure) -> None:
        self.lose(self.attempt, failure)
