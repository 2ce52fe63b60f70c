"""Metrics of the picker under the names that autoscaling guides of llm-d query, so that their KEDA objects work here.

Saturation is llm-d's own rule with its default thresholds: the mean over the ready endpoints of the greater of two
ratios, waiting requests of WAITING and used KV cache of KV_USAGE; 1 and above is saturated. Requests that the gateway
holds in place of an engine's queue count as waiting.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from gateway.observe.metrics.series import gauge
from policies.routes.route import Route
from policies.types import Health, Load

WAITING = 5  # requests per endpoint
KV_USAGE = 0.8


@dataclass(eq=False)
class LlmDMetrics(Collector):
    """`depth`: requests held by the gateway, by route. A held request counts in the first pool of its route."""

    pool_of: Callable[[str], str]
    loads: Callable[[], Mapping[str, Load]]
    routes: Callable[[], Iterable[Route]]
    depth: Callable[[], Mapping[str, int]]

    def collect(self) -> Iterable[Metric]:
        pools, held = self._ready(), self._held()
        yield gauge("llm_d_epp_ready_endpoints", [((pool,), len(loads)) for pool, loads in pools.items()])
        yield gauge("llm_d_epp_request_running", [((pool,), _in_flight(loads)) for pool, loads in pools.items()])
        yield gauge("llm_d_epp_flow_control_queue_size", [((pool,), held[pool]) for pool in pools])
        saturation = [((pool,), _saturation(loads, held[pool])) for pool, loads in pools.items()]
        yield gauge("llm_d_epp_flow_control_pool_saturation", saturation)

    def _ready(self) -> Mapping[str, list[Load]]:
        """Loads of usable endpoints, by pool; a pool without one has an empty list."""
        pools = defaultdict[str, list[Load]](list)
        for name, load in self.loads().items():
            pools[self.pool_of(name)] += [load] if load.health is Health.UP else []
        return pools

    def _held(self) -> Mapping[str, int]:
        depth, held = self.depth(), Counter[str]()
        for route in self.routes():
            held[route.pools[0]] += depth.get(route.name, 0)
        return held


def _in_flight(loads: Iterable[Load]) -> int:
    return sum(load.in_flight for load in loads)


def _saturation(loads: list[Load], held: int) -> float:
    """Without a ready endpoint the pool is saturated."""
    if not loads:
        return 1.0
    waiting = held / len(loads)
    return fmean(max((load.waiting + waiting) / WAITING, load.kv_usage / KV_USAGE) for load in loads)
