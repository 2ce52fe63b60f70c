"""The error for a caller whose request no attempt has answered."""

from __future__ import annotations

from backends.interface import Failure, FailureKind
from gateway.api.api_error import ApiError, retry_later
from policies.attempts.attempt_events import GiveUp

LONGEST_RETRY_AFTER = 3600.0  # s passed on to a caller
LATER = (FailureKind.RATE_LIMITED, FailureKind.REQUEST_RATE, FailureKind.TOKEN_RATE, FailureKind.OVERLOADED)
OWN = (
    *(FailureKind.CLIENT, FailureKind.CONTEXT, FailureKind.CONTENT_FILTER),
    *(FailureKind.CONTENT, FailureKind.REQUEST_SIZE),
)


def refusal_of(failure: Failure | None, given_up: GiveUp | None = None) -> ApiError:
    """The last failure as the caller's error. SDKs need not repeat at once retries already made by the gateway."""
    if failure is None:
        reason = "" if given_up is None else f": {given_up.reason}"
        return ApiError(504, f"No backend answered in time{reason}.", type="server_error", code="timeout")
    headers: dict[str, str] = {"x-should-retry": "false"}
    if failure.kind in OWN:
        headers = {}
    elif failure.kind in LATER:
        headers = retry_later(min(max(failure.retry_after or 1.0, 0.1), LONGEST_RETRY_AFTER))
    return ApiError(
        failure.status,
        failure.message,
        type=failure.type,
        code=failure.code,
        param=failure.param,
        headers=headers,
        logged=failure.said,
    )
