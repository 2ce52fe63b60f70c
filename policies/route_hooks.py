"""Hooks of features in decisions, which a route binds when it is made: a route that uses no feature holds none.

The core of routing calls them and names no feature. Rules:
- A hook is pure, and is asked before anything else about an endpoint or a pool. None: nothing is against it.
- Words of a refusal are for people; code reads the kind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from policies.types import Candidate, Endpoint, Load, Pool, PoolEstimate, RejectionKind, RequestView

Refused = tuple[RejectionKind, str]  # kind and reason

# The endpoint cannot take the request at this time: request, its prompt in the pool, endpoint, load, time.
Fits = Callable[[RequestView, PoolEstimate, Endpoint, Load, float], Refused | None]


class SpendingView(Protocol):
    """Spending of routes, as the fleet knows it."""

    def may_use_api(self, route: Any, usd: float, now: float) -> bool: ...


# Parts of a tier, ordered as tiers are.
Divide = Callable[[Sequence[Candidate]], list[list[Candidate]]]

# The pool cannot take the request at this price: pool, USD, what was spent, time.
PoolFits = Callable[[Pool, float, SpendingView, float], Refused | None]
