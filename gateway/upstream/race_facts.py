"""Facts about one request for its attempt machine: answers to the machine's questions, and the course of a failure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from backends.failures import CUT_OFF
from backends.interface import Failure
from gateway.upstream.answer_hooks import Recovery, Rest
from gateway.upstream.attempt import WireAttempt
from gateway.upstream.dispatcher import Dispatcher
from gateway.upstream.relay import Relay
from gateway.upstream.routed_request import RoutedRequest
from policies.attempts.attempt_events import NO_FACTS, Failed, Progress
from policies.blame.blame import BLAME, Blame, Elsewhere
from policies.types import (
    FOREVER,
    Attempt,
    Candidate,
    FirstTokenOutlook,
    Health,
    RejectionKind,
)


class RaceFacts:
    """Facts about the attempts of one request, by number, and about the fleet."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        routed: RoutedRequest,
        attempts: Mapping[int, WireAttempt],
        relay: Relay,
        recovery: Recovery | None,
    ) -> None:
        self.closes = dispatcher.fleet.closes
        self._dispatcher = dispatcher
        self._routed = routed
        self._attempts = attempts
        self._relay = relay
        self._recovery = recovery
        self._outlier = ""  # endpoint that has refused the request, to be confirmed by another

    # -- AttemptFacts -----------------------------------------------------------------------------

    def is_closed(self, candidate: Candidate, now: float) -> bool:
        return self._dispatcher.fleet.is_closed(candidate, now, self._routed.request.caller)

    def is_saturated(self) -> bool:
        return self._dispatcher.saturated()

    def outlook(self, attempt: Attempt, sent_at: float, upcoming: Candidate, now: float) -> FirstTokenOutlook:
        fleet, routed, endpoint = self._dispatcher.fleet, self._routed, upcoming.endpoint
        load, prompt = fleet.snapshot_for(routed.request.caller, now).loads.get(endpoint.id), routed.estimate.pools
        known = fleet.view.outlook(self._attempts[attempt.number], upcoming, load, prompt[endpoint.pool], now)
        return NO_FACTS.outlook(attempt, sent_at, upcoming, now) if known is None else known

    def is_overtaken(self, number: int) -> bool:
        return self._dispatcher.fleet.view.overtaken(self._attempts[number])

    def progress(self, number: int) -> Progress:
        attempt = self._attempts[number]
        complete = attempt.stream and attempt.answered
        return Progress(
            heard_at=attempt.times.last_byte,
            tpot=attempt.tpot(),
            complete=complete,
            relayed=complete and attempt.tap.terminated and self._relay.begun,
            paused=self._relay.is_paused,
        )

    def patience(self, number: int, others: Sequence[Candidate]) -> float:
        if self._recovery is None:
            return FOREVER
        own = self._attempts[number]
        return self._recovery.patience(own.attempt, own.tpot(), others)

    def without_larger_window(self, pool: str) -> frozenset[str]:
        return self._dispatcher.fleet.view.without_larger_window(pool)

    def reopens_in(self, now: float) -> float:
        """Seconds in which limits keep such a request of the caller from every endpoint that is up; 0: from none."""
        routed, fleet = self._routed, self._dispatcher.fleet
        loads = fleet.snapshot_for(routed.request.caller, now).loads
        ranked = [(each.endpoint.id, each.prompt_tokens) for each in routed.decision.ranked]
        limited = (each for each in routed.decision.rejected if each.kind is RejectionKind.RATE_LIMITED)
        ranked += [(each.endpoint, routed.estimate.pools[each.pool].tokens) for each in limited]
        up = ((name, tokens) for name, tokens in ranked if name in loads and loads[name].health is not Health.DOWN)
        return min((loads[name].limits.wait(tokens, now) for name, tokens in up), default=0.0)

    # -- a failed attempt -------------------------------------------------------------------------

    def failed(self, wire: WireAttempt, failure: Failure, rest: Rest | None) -> Failed:
        """The failure, with the facts that decide where the request goes. `rest`: of the answer, that was asked for."""
        blame = BLAME[failure.kind.value]
        refused = blame.elsewhere is Elsewhere.NOWHERE
        return Failed(
            wire.attempt.number,
            blame,
            failure.retry_after,
            accepted=wire.accepted,
            translated=self._may_translate(wire, blame),
            doubtful=refused and self._doubt(wire),
            whole=bool(wire.unassembled) and failure not in CUT_OFF,
            whole_at_last=bool(wire.unassembled),
            anew=rest.asks_anew() if refused and rest is not None else None,
        )

    def _may_translate(self, wire: WireAttempt, blame: Blame) -> bool:
        """The pool lacks the operation, and can be asked in another dialect."""
        if blame.elsewhere is not Elsewhere.TRANSLATED:
            return False
        routed, pool = self._routed, wire.attempt.candidate.endpoint.pool
        return self._dispatcher.operations.found_lacking(pool, routed.request, routed.route, routed.servers)

    def _doubt(self, wire: WireAttempt) -> bool:
        """True for the first refusal by an outlier among siblings: another endpoint is asked to confirm it."""
        endpoint, fleet = wire.attempt.candidate.endpoint.id, self._dispatcher.fleet
        if self._outlier and self._outlier != endpoint:
            fleet.on_refusal_confirmed(self._outlier)
            return False
        self._outlier = endpoint if fleet.view.is_outlier(endpoint) else ""
        return bool(self._outlier)
