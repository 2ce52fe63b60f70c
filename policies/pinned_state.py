"""Pins requests to the endpoint that holds their state (an earlier response). Encrypted reasoning limits its own pool
to one endpoint, and other pools go without."""

from __future__ import annotations

from policies.route_hooks import Refused
from policies.types import Endpoint, Load, PoolEstimate, RejectionKind, RequestView

PINNED_ELSEWHERE = RejectionKind(
    "pinned_elsewhere", is_lasting=True, excludes=True, others="the endpoint with its state"
)
_ELSEWHERE = PINNED_ELSEWHERE, "the state of the request is at another endpoint"


def has_its_state(
    request: RequestView, prompt: PoolEstimate, endpoint: Endpoint, load: Load, now: float
) -> Refused | None:
    """Filter of a request with state; None: the endpoint may serve the request."""
    if request.pinned and endpoint.id != request.pinned:
        return _ELSEWHERE
    return None if request.readers.get(endpoint.pool, endpoint.id) == endpoint.id else _ELSEWHERE
