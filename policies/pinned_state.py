"""State that an endpoint keeps for a request (an earlier response): no other endpoint can serve it. State that other
pools do without (encrypted reasoning) is read by one endpoint of its pool."""

from __future__ import annotations

from policies.route_hooks import Refused
from policies.types import Endpoint, Load, PoolEstimate, RejectionKind, RequestView

_ELSEWHERE = RejectionKind.PINNED_ELSEWHERE, "the state of the request is at another endpoint"


def has_its_state(
    request: RequestView, prompt: PoolEstimate, endpoint: Endpoint, load: Load, now: float
) -> Refused | None:
    """For requests with state."""
    if request.pinned and endpoint.id != request.pinned:
        return _ELSEWHERE
    return None if request.readers.get(endpoint.pool, endpoint.id) == endpoint.id else _ELSEWHERE
