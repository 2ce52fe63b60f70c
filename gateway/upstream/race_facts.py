"""Facts about one request for its attempt machine: answers to the machine's questions, and the course of a failure."""

from __future__ import annotations

from collections.abc import Mapping
from heapq import nsmallest

from backends.failures import CUT_OFF
from backends.interface import Failure
from gateway.upstream.attempt import WireAttempt
from gateway.upstream.dispatcher import Dispatcher
from gateway.upstream.relay import Relay
from gateway.upstream.rescue import Rescue
from gateway.upstream.routed_request import RoutedRequest
from policies.attempts.attempt_events import NO_FACTS, Failed, Progress
from policies.blame.blame import BLAME, Blame, Elsewhere
from policies.types import (
    Attempt,
    AttemptKind,
    Candidate,
    Endpoint,
    FirstTokenOutlook,
    Health,
    RejectionKind,
)

MOST_PEERS = 8  # forecast at a break: those of the pool first, with the least prefill queued


class RaceFacts:
    """Facts about the attempts of one request, by number, and about the fleet."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        routed: RoutedRequest,
        attempts: Mapping[int, WireAttempt],
        relay: Relay,
        rescue: Rescue | None,
    ) -> None:
        self.closes = dispatcher.fleet.closes
        self._dispatcher = dispatcher
        self._routed = routed
        self._attempts = attempts
        self._relay = relay
        self._rescue = rescue
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
        attempt, rescue = self._attempts[number], self._rescue
        complete = attempt.stream and attempt.answered
        return Progress(
            heard_at=attempt.times.last_byte,
            tpot=attempt.tpot(),
            complete=complete,
            relayed=complete and attempt.tap.terminated and self._relay.begun,
            paused=self._relay.is_paused,
            obstacle="" if rescue is None else rescue.obstacle,
        )

    def peer_ttfts(self, number: int, now: float) -> dict[str, float]:
        """Of endpoints with the same model that continue answers and can bear another prefill: MOST_PEERS of them, as a
        thousand streams may ask at once."""
        own, rescue, routed, fleet = self._attempts[number], self._rescue, self._routed, self._dispatcher.fleet
        if rescue is None:
            return {}
        loads = fleet.snapshot_for(routed.request.caller, now).loads
        here = own.attempt.candidate.endpoint
        left_out = {here.id, *rescue.unable(own.attempt, loads), *self._dispatcher.restarting}
        able = (
            each.endpoint
            for each in routed.decision.ranked
            if each.endpoint.id not in left_out
            and loads[each.endpoint.id].tpot_pressure < 1
            and routed.model_at(each.endpoint, routed.upstreams[each.endpoint.id]) == own.request.model
        )

        def order(peer: Endpoint) -> tuple[bool, float]:
            return peer.pool != here.pool, loads[peer.id].backlog_s

        return {
            each.id: fleet.view.continuation_ttft(
                each.id, loads[each.id], routed.estimate.pools[each.pool], rescue.remembered.tokens, now
            )
            for each in nsmallest(MOST_PEERS, able, key=order)
        }

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

    def failed(self, wire: WireAttempt, failure: Failure) -> Failed:
        """The failure, with the facts that decide where the request goes."""
        blame, rescue = BLAME[failure.kind.value], self._rescue
        refused = blame.elsewhere is Elsewhere.NOWHERE
        continued = wire.attempt.kind is AttemptKind.RESCUE and refused
        return Failed(
            wire.attempt.number,
            blame,
            failure.retry_after,
            accepted=wire.accepted,
            translated=self._may_translate(wire, blame),
            doubtful=refused and self._doubt(wire),
            whole=bool(wire.unassembled) and failure not in CUT_OFF,
            whole_at_last=bool(wire.unassembled),
            restart=rescue.restart() if continued and rescue is not None else None,
        )

    def _may_translate(self, wire: WireAttempt, blame: Blame) -> bool:
        """The pool lacks the operation, and can be asked in another dialect."""
        if blame.elsewhere is not Elsewhere.TRANSLATED:
            return False
        routed, pool = self._routed, wire.attempt.candidate.endpoint.pool
        return self._dispatcher.operations.found_lacking(pool, routed.request, routed.route, routed.native[pool])

    def _doubt(self, wire: WireAttempt) -> bool:
        """True for the first refusal by an outlier among siblings: another endpoint is asked to confirm it."""
        endpoint, fleet = wire.attempt.candidate.endpoint.id, self._dispatcher.fleet
        if self._outlier and self._outlier != endpoint:
            fleet.on_refusal_confirmed(self._outlier)
            return False
        self._outlier = endpoint if fleet.view.is_outlier(endpoint) else ""
        return bool(self._outlier)
