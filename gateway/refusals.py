"""Refusals of requests by the gateway itself: by their heads, by the decision, and where no attempt has answered."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import ceil

from backends.interface import OF_REQUEST, RATE_LIMITS, Failure, FailureKind
from gateway.api.api_error import ApiError, retry_later
from gateway.observe.record import RequestOutcome
from policies.rate_limit.endpoint_limits import MAX_RETRY_AFTER
from policies.types import Decision, Placement, RejectionKind

LONGEST_RETRY_AFTER = 3600.0  # s passed on to a caller
_UNPLACED: Mapping[Placement, tuple[int, str]] = {  # status and message; the client may ask again later
    Placement.SHED: (429, "No tier can meet the time-to-first-token budget now"),
    Placement.RATE_LIMITED: (429, "No endpoint takes a request now"),
    Placement.OVERLOADED: (503, "No server has time for this request now"),
    Placement.UNAVAILABLE: (503, "No endpoint is usable now"),
}
NO_QUOTES = (
    "Quotes were removed. POST /explain on the admin port tells TTFT and price of each candidate; a refusal has"
    " x-firsttoken-ttft-p50-ms and retry-after."
)
_KINDS = {429: ("rate_limit_error", "rate_limit_exceeded"), 503: ("server_error", "unavailable")}  # type and code


def reject_unplaced(decision: Decision) -> None:
    """Raises ApiError where the decision has placed the request nowhere."""
    if decision.outcome is Placement.PLACE:
        return
    if decision.outcome in _UNPLACED:
        status, message = _UNPLACED[decision.outcome]
        kind, code = _KINDS[status]
        later = {**retry_later(decision.retry_after), **ttft_now(decision)}
        raise ApiError(status, f"{message}: {decision.reason}.", type=kind, code=code, headers=later)
    too_long = decision.cause is RejectionKind.CONTEXT_WINDOW
    code = "context_length_exceeded" if too_long else "no_suitable_tier"
    raise ApiError(400, f"No tier of this route can take the request: {decision.reason}.", code=code)


def refusal_of(
    failure: Failure | None,
    reason: str = "",
    decision: Decision | None = None,
    reopens_in: float = 0.0,
    *,
    unasked: bool = False,
) -> ApiError:
    """The last failure of an attempt as the caller's error; without one, the `reason` to give up. SDKs need not repeat
    at once retries already made by the gateway. `decision`: with the forecast that a caller is told where engines have
    no room; `reopens_in`: seconds in which limits keep such a request from every endpoint; 0: from none; `unasked`: no
    endpoint is expected to answer in time."""
    if failure is None and unasked:
        told = {"x-should-retry": "false", **({} if decision is None else ttft_now(decision))}
        message = f"No endpoint is expected to answer in time: {reason}."
        return ApiError(504, message, type="server_error", code="timeout", headers=told)
    if failure is None:
        message = f"No backend answered in time: {reason}." if reason else "No backend answered in time."
        return ApiError(504, message, type="server_error", code="timeout")
    headers: dict[str, str] = {"x-should-retry": "false"}
    if failure.kind in OF_REQUEST:
        headers = {} if failure.retry_after is None else retry_later(min(failure.retry_after, LONGEST_RETRY_AFTER))
    elif failure.kind is FailureKind.QUEUE_LIMIT:
        soonest = 1.0 if decision is None or not decision.ranked else decision.ranked[0].forecast.p50
        headers = retry_later(min(max(failure.retry_after or soonest, 0.1), LONGEST_RETRY_AFTER))
        headers |= {} if decision is None else ttft_now(decision)
    elif failure.kind in RATE_LIMITS or failure.kind is FailureKind.OVERLOADED:
        headers = retry_later(min(_again_in(failure, reopens_in), LONGEST_RETRY_AFTER))
    return ApiError(
        failure.status,
        failure.message,
        type=failure.type,
        code=failure.code,
        param=failure.param,
        headers=headers,
        own_fault=failure.kind in OF_REQUEST,
        logged=failure.said,
    )


def _again_in(failure: Failure, reopens_in: float) -> float:
    """Seconds for Retry-After: until the endpoint reopens, or the provider's time if beyond MAX_RETRY_AFTER."""
    named = failure.retry_after or 0.0
    if reopens_in > 0:
        return named if named > MAX_RETRY_AFTER <= ceil(reopens_in) else reopens_in
    return max(named or 1.0, 0.1)


def ttft_now(decision: Decision) -> dict[str, str]:
    """Headers with the TTFT forecast of a refused request, if known."""
    forecast = decision.expected
    if forecast is None and decision.ranked:
        forecast = decision.ranked[0].forecast
    if forecast is None:
        return {}
    percentiles = {"p50": forecast.p50, "p90": forecast.p90}
    return {f"x-firsttoken-ttft-{name}-ms": f"{s * 1e3:.0f}" for name, s in percentiles.items()}


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


def not_found(path: str) -> ApiError:
    said = NO_QUOTES if path.startswith("/quote/") else "There is nothing at this path."
    return ApiError(404, said, code="unknown_url")


def wrong_method(right: Collection[str]) -> ApiError:
    said, allow = " or ".join(right), ", ".join(right)
    return ApiError(405, f"This path takes {said} only.", code="method_not_allowed", headers={"allow": allow})
