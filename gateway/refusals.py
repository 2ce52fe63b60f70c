"""Refusals of requests by the gateway itself: by their heads, and by the decision."""

from __future__ import annotations

from collections.abc import Collection

from gateway.api.api_error import ApiError, retry_later
from gateway.observe.record import RequestOutcome
from policies.types import Decision, Placement, RejectionKind


def reject_unplaced(decision: Decision) -> None:
    """Raises ApiError where the decision has placed the request nowhere."""
    if decision.outcome is Placement.PLACE:
        return
    later = retry_later(decision.retry_after)
    if decision.outcome is Placement.SHED:
        message = f"No tier can meet the time-to-first-token budget now: {decision.reason}."
        raise ApiError(429, message, type="rate_limit_error", code="rate_limit_exceeded", headers=later)
    if decision.outcome is Placement.RATE_LIMITED:
        message = f"No endpoint takes a request now: {decision.reason}."
        raise ApiError(429, message, type="rate_limit_error", code="rate_limit_exceeded", headers=later)
    if decision.outcome is Placement.OVERLOADED:
        message = f"No server has time for this request now: {decision.reason}."
        raise ApiError(503, message, type="server_error", code="unavailable", headers=later)
    if decision.outcome is Placement.UNAVAILABLE:
        message = f"No endpoint is usable now: {decision.reason}."
        raise ApiError(503, message, type="server_error", code="unavailable", headers=later)
    too_long = decision.cause is RejectionKind.CONTEXT_WINDOW
    code = "context_length_exceeded" if too_long else "no_suitable_tier"
    raise ApiError(400, f"No tier of this route can take the request: {decision.reason}.", code=code)


def outcome_of(refusal: ApiError, decision: Decision | None) -> RequestOutcome:
    """The outcome to record: an error after placement is a failure of the backends, unless the request is at fault."""
    placement = None if decision is None else decision.outcome
    if placement in (Placement.SHED, Placement.OVERLOADED):
        return RequestOutcome.SHED
    if placement in (Placement.UNAVAILABLE, Placement.RATE_LIMITED):
        return RequestOutcome.UNAVAILABLE
    if placement is Placement.PLACE and not refusal.own_fault and (refusal.status == 429 or refusal.status >= 500):
        return RequestOutcome.FAILED
    return RequestOutcome.REFUSED


def origin_refused() -> ApiError:
    return ApiError(403, "This origin is not listed in server.cors.origins.", code="origin_not_allowed")


def not_found() -> ApiError:
    return ApiError(404, "There is nothing at this path.", code="unknown_url")


def wrong_method(right: Collection[str]) -> ApiError:
    said, allow = " or ".join(right), ", ".join(right)
    return ApiError(405, f"This path takes {said} only.", code="method_not_allowed", headers={"allow": allow})
