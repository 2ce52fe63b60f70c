"""Facts that the attempt machine of one request asks for."""

from __future__ import annotations

from collections.abc import Mapping

from gateway.upstream.attempt import WireAttempt
from gateway.upstream.dispatcher import Dispatcher
from gateway.upstream.relay import Relay
from gateway.upstream.rescue import Rescue
from policies.attempts.attempt_events import Progress
from policies.types import Candidate


class RaceFacts:
    """Facts about the attempts of one request, and about the fleet."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        attempts: Mapping[int, WireAttempt],
        relay: Relay,
        rescue: Rescue | None,
        caller: str,
    ) -> None:
        self.closes = dispatcher.fleet.closes
        self._rescue = rescue
        self._dispatcher = dispatcher
        self._attempts = attempts
        self._relay = relay
        self._caller = caller

    def is_closed(self, candidate: Candidate, now: float) -> bool:
        return self._dispatcher.fleet.is_closed(candidate, now, self._caller)

    def is_saturated(self) -> bool:
        return self._dispatcher.saturated()

    def is_overtaken(self, number: int) -> bool:
        return self._dispatcher.fleet.overtaken(self._attempts[number])

    def progress(self, number: int) -> Progress:
        attempt, rescue = self._attempts[number], self._rescue
        return Progress(
            heard_at=attempt.times.last_byte,
            tpot=attempt.tpot(),
            complete=attempt.stream and attempt.answered,
            paused=self._relay.is_paused,
            obstacle="" if rescue is None else rescue.obstacle,
        )

    def without_larger_window(self, pool: str) -> frozenset[str]:
        return self._dispatcher.fleet.without_larger_window(pool)
