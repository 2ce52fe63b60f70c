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


class Confines(Protocol):
    """Endpoints that a route may use, whatever their state. Hashable: equal ones are asked once."""

    def allows(self, endpoint: Endpoint) -> bool: ...


class Meter(Protocol):
    """Counts the requests of a route and its attempts at APIs, for a hook that limits these."""

    def on_arrived(self, now: float) -> None:
        """A request of the route has arrived."""

    def on_sent(self, usd: float, now: float) -> None:
        """An attempt at an API, of an expected cost."""

    def on_cost(self, more_usd: float, now: float) -> None:
        """Cost of an attempt beyond the expectation."""


class MeterView(Protocol):
    """The meters of routes, which the fleet keeps."""

    def meter(self, route: Any) -> Any:
        """Meter of a route with one, of the kind bound by the hook of the route."""


# Parts of a tier, ordered as tiers are.
Divide = Callable[[Sequence[Candidate]], list[list[Candidate]]]

# The pool cannot take the request at this price: pool, USD, meters of routes, time.
PoolFits = Callable[[Pool, float, MeterView, float], Refused | None]
