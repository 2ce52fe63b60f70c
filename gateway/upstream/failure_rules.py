"""Rules about failed attempts: which other endpoints may do better, and what the caller is told in the end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from backends.failures import CONTENT_CODES, CONTEXT_LENGTH
from backends.interface import Failure, FailureKind, Operation
from gateway.api.api_error import ApiError, retry_later
from gateway.api.inference_request import InferenceRequest
from gateway.upstream.operation_fit import OperationFit
from policies.attempts.attempt_events import Failed
from policies.fleet.fleet import Fleet
from policies.routes.route import Route
from policies.types import Attempt, Decision, Endpoint

OVERLOAD = (FailureKind.RATE_LIMITED, FailureKind.OVERLOADED, FailureKind.SERVER)
CONNECTION_LOST = (FailureKind.CONNECT, FailureKind.RESET, FailureKind.TIMEOUT)
LONGEST_RETRY_AFTER = 3600.0  # s passed on to a caller


@dataclass(slots=True, kw_only=True)
class FailureRules:
    """Rules for the failures of one request. `native`: operations spoken natively, by pool."""

    request: InferenceRequest
    route: Route
    decision: Decision
    native: Mapping[str, frozenset[Operation]]
    fleet: Fleet
    operations: OperationFit
    outlier: str = ""  # endpoint that has refused the request, to be confirmed by another

    def event_of(self, attempt: Attempt, failure: Failure, *, accepted: bool, restart: bool | None) -> Failed:
        """The event for the attempt machine. `accepted`: the engine had taken the request; `restart`: of a
        continuation that was refused: the whole answer may be asked for; None: not a refused continuation."""
        endpoint, lost = attempt.candidate.endpoint, failure.kind in CONNECTION_LOST
        avoid = self._pools_alike(failure, endpoint)
        translatable = failure.kind is FailureKind.UNSUPPORTED and not avoid
        elsewhere = bool(avoid) or restart is not None or self._is_doubtful(failure, endpoint.id)
        return Failed(
            attempt.number,
            failure.retryable or elsewhere,
            connection_lost=lost or translatable,
            retry_after=failure.retry_after,
            taken=lost and accepted,
            again=failure.again,
            avoid=avoid,
            restart=bool(restart),
        )

    def is_charged(self, failure: Failure, endpoint: Endpoint) -> bool:
        """A retry of this failure adds load to the pool, and is taken from the retry budget."""
        of_key = failure.kind is FailureKind.RATE_LIMITED and self._has_other_key(endpoint)
        return failure.kind in OVERLOAD and not of_key

    def _has_other_key(self, endpoint: Endpoint) -> bool:
        """The server also takes requests by another API key, with separate limits."""
        others = self.decision.ranked if endpoint.server else ()
        return any(other.endpoint.server == endpoint.server and other.endpoint.id != endpoint.id for other in others)

    def _pools_alike(self, failure: Failure, endpoint: Endpoint) -> frozenset[str]:
        """Pools that would fail in the same way. Of refusals of the request: empty, unless another pool may take it."""
        fallback, pool = self.route.fallback, endpoint.pool
        if failure.kind is FailureKind.UNSUPPORTED:
            translates = self.operations.found_lacking(pool, self.request, self.route, self.native[pool])
            return frozenset() if translates else frozenset({pool})
        if failure.kind is FailureKind.QUOTA:
            return frozenset() if self._has_other_key(endpoint) else frozenset({pool})
        if failure.kind is FailureKind.CLIENT and failure.code == CONTEXT_LENGTH and fallback.context:
            return self.fleet.without_larger_window(pool)
        if failure.kind is FailureKind.CLIENT and failure.code in CONTENT_CODES and fallback.content_filter:
            return frozenset({pool})
        return frozenset()

    def _is_doubtful(self, failure: Failure, endpoint: str) -> bool:
        """True for the first refusal by an outlier among siblings: another endpoint is asked to confirm the refusal."""
        if failure.kind is not FailureKind.CLIENT:
            return False
        if self.outlier and self.outlier != endpoint:
            self.fleet.on_refusal_confirmed(self.outlier)
            return False
        self.outlier = endpoint if self.fleet.is_outlier(endpoint) else ""
        return bool(self.outlier)


def refusal_of(failure: Failure | None, reason: str) -> ApiError:
    """The last failure as the caller's error. SDKs need not repeat at once retries already made by the gateway."""
    if failure is None:
        return ApiError(504, f"No backend answered in time: {reason}.", type="server_error", code="timeout")
    headers: dict[str, str] = {"x-should-retry": "false"}
    if failure.kind is FailureKind.CLIENT:
        headers = {}
    elif failure.kind in (FailureKind.RATE_LIMITED, FailureKind.OVERLOADED):
        headers = retry_later(min(max(failure.retry_after or 1.0, 0.1), LONGEST_RETRY_AFTER))
    return ApiError(
        failure.status,
        failure.message,
        type=failure.type,
        code=failure.code,
        param=failure.param,
        headers=headers,
        logged=f"the backend's {failure.kind.value}",
    )
