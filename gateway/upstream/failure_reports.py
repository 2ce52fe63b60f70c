"""Reports a failed attempt of one request to its attempt machine, with the facts that decide where the request goes."""

from __future__ import annotations

from backends.failures import NOT_ASSEMBLED
from backends.interface import Failure
from gateway.upstream.attempt import WireAttempt
from gateway.upstream.dispatcher import Dispatcher
from gateway.upstream.rescue import Rescue
from gateway.upstream.routed_request import RoutedRequest
from policies.attempts.attempt_events import Failed
from policies.blame.blame import BLAME, Blame, Elsewhere
from policies.types import AttemptKind


class FailureReports:
    """Failures of the attempts of one request."""

    def __init__(self, dispatcher: Dispatcher, routed: RoutedRequest, rescue: Rescue | None) -> None:
        self._dispatcher = dispatcher
        self._routed = routed
        self._rescue = rescue
        self._outlier = ""  # endpoint that has refused the request, to be confirmed by another

    def of(self, wire: WireAttempt, failure: Failure) -> Failed:
        blame, rescue = BLAME[failure.kind.value], self._rescue
        refused = blame.elsewhere is Elsewhere.NOWHERE
        continued = wire.attempt.kind is AttemptKind.RESCUE and refused
        return Failed(
            wire.attempt.number,
            blame,
            failure.retry_after,
            accepted=wire.accepted,
            translated=failure is NOT_ASSEMBLED or self._may_translate(wire, blame),
            doubtful=refused and self._doubt(wire),
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
        self._outlier = endpoint if fleet.is_outlier(endpoint) else ""
        return bool(self._outlier)
