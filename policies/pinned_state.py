"""State that an endpoint keeps for a request (an earlier response): no other endpoint can serve it."""

from __future__ import annotations

from policies.route_hooks import Refused
from policies.types import Endpoint, Load, PoolEstimate, RejectionKind, RequestView

_ELSEWHERE = RejectionKind.PINNED_ELSEWHERE, "the state of the request is at another endpoint"


def has_its_state(
    request: RequestView, prompt: PoolEstimate, endpoint: Endpoint, load: Load, now: float
) -> Refused | None:
    """For pinned requests."""
    return None if endpoint.id == request.pinned else _ELSEWHERE
