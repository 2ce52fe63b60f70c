"""LoRA adapters in decisions: an endpoint that has refused the name of the adapter is left out for a while.

The wait for the load of an adapter is part of the forecast (`policies.adapters.adapter_slots`).
"""

from __future__ import annotations

from policies.route_hooks import Refused
from policies.types import NEVER, Endpoint, Load, PoolEstimate, RejectionKind, RequestView

UNKNOWN_ADAPTER = RejectionKind("unknown_adapter", is_lasting=True)


def knows_adapter(
    request: RequestView, prompt: PoolEstimate, endpoint: Endpoint, load: Load, now: float
) -> Refused | None:
    """For routes with an adapter."""
    if load.unknown_variants and load.unknown_variants.get(prompt.variant, NEVER) > now:
        return UNKNOWN_ADAPTER, f"it does not know the adapter {prompt.variant}"
    return None
