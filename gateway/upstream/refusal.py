"""The error for a caller whose request no attempt has answered."""

from __future__ import annotations

from backends.interface import OF_REQUEST, RATE_LIMITS, Failure, FailureKind
from gateway.api.api_error import ApiError, retry_later
from policies.attempts.attempt_events import GiveUp

LONGEST_RETRY_AFTER = 3600.0  # s passed on to a caller


def refusal_of(failure: Failure | None, given_up: GiveUp | None = None) -> ApiError:
    """The last failure as the caller's error. SDKs need not repeat at once retries already made by the gateway."""
    if failure is None:
        reason = "" if given_up is None else f": {given_up.reason}"
        return ApiError(504, f"No backend answered in time{reason}.", type="server_error", code="timeout")
    headers: dict[str, str] = {"x-should-retry": "false"}
    if failure.kind in OF_REQUEST:
        headers = {} if failure.retry_after is None else retry_later(min(failure.retry_after, LONGEST_RETRY_AFTER))
    elif failure.kind in RATE_LIMITS or failure.kind is FailureKind.OVERLOADED:
        headers = retry_later(min(max(failure.retry_after or 1.0, 0.1), LONGEST_RETRY_AFTER))
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
