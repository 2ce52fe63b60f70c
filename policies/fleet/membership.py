"""Who belongs to the fleet, by endpoint and by pool.

Of another configuration, what stays keeps what was learned of it: an endpoint that serves the same model, and the token
scale of a pool.
"""

from __future__ import annotations

from collections.abc import Iterable

from policies.fleet.endpoint_state import EndpointState
from policies.fleet.pool_state import PoolState
from policies.latency.token_scale import TokenScale
from policies.prefix_cache.prefix_caches import PrefixCaches
from policies.types import Endpoint, Pool


class Membership:
    """Tells the caches of every endpoint that comes or goes."""

    def __init__(self, caches: PrefixCaches) -> None:
        self.states: dict[str, EndpointState] = {}  # by endpoint
        self.groups: dict[str, PoolState] = {}  # by pool
        self._caches = caches

    def reload(self, pools: Iterable[Pool]) -> set[str]:
        """Another configuration; the endpoints that joined those that were there."""
        known, before = self.states, self.groups
        self.states, self.groups = {}, {}
        for pool in pools:
            scale = before[pool.name].scale if pool.name in before else TokenScale()
            group = self.groups[pool.name] = PoolState(pool, scale)
            for endpoint in pool.endpoints:
                group.members.append(self._keep_or_create(known.get(endpoint.id), endpoint, pool))
            group.untaught = list(group.members)
        for gone in known.keys() - self.states.keys():
            self._caches.remove(gone)
        return self.states.keys() - known.keys() if known else set()

    def _keep_or_create(self, known: EndpointState | None, endpoint: Endpoint, pool: Pool) -> EndpointState:
        if known is not None and (known.pool.model, known.local) == (pool.model, pool.local):
            known.endpoint, known.pool = endpoint, pool
            state = known
        else:
            self._caches.remove(endpoint.id)
            state = EndpointState(endpoint, pool)
            self._caches.index.resize(endpoint.id, state.blocks)
        self.states[endpoint.id] = state
        return state
