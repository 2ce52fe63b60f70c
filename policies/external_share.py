"""Limit of what a route sends to external APIs (`limits.external`), in decisions."""

from __future__ import annotations

from typing import Any

from policies.route_hooks import Refused, SpendingView
from policies.types import Pool, RejectionKind

_USED_UP = RejectionKind.EXTERNAL_LIMIT, "the route has used what limits.external allows"


def within_share(route: Any, pool: Pool, usd: float, spent: SpendingView, now: float) -> Refused | None:
    """For routes with such a limit. `usd`: of the request there."""
    return None if pool.local or spent.may_use_api(route, usd, now) else _USED_UP
