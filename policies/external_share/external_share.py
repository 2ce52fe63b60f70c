"""Limit of what a route sends to external APIs (`limits.external`), in decisions."""

from __future__ import annotations

from typing import Any

from policies.route_hooks import MeterView, Refused
from policies.types import Pool, RejectionKind

EXTERNAL_LIMIT = RejectionKind("external_limit")
_USED_UP = EXTERNAL_LIMIT, "the route has used what limits.external allows"


def within_share(route: Any, pool: Pool, usd: float, meters: MeterView, now: float) -> Refused | None:
    """For routes with such a limit, whose meter is an `ExternalUse`. `usd`: of the request there."""
    if pool.local or meters.meter(route).allows(route.limits.external, usd, now):
        return None
    return _USED_UP
