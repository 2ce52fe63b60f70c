"""Live views of routes, read from the metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, PlatformCollector
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from gateway.observe.metrics.request_metrics import RequestMetrics
from gateway.observe.metrics.scrape_collectors import (
    GatewayCollector,
    Registry,
    counts_in_place,
    counts_of,
    route_stats,
)
from gateway.observe.record import RequestOutcome
from tests.support.builders import record, route

ROUTES = [route("chat", ttft={"budget": "150ms"}), route("agent")]


class Few(Collector):
    """A collector of another part of the gateway."""

    def collect(self) -> list[GaugeMetricFamily]:
        return [
            GaugeMetricFamily("firsttoken_redis_up", "", value=1.0),
            GaugeMetricFamily("firsttoken_else", "", value=7.0),
        ]


Few.__module__ = "gateway.few"


def observed() -> tuple[Registry, RequestMetrics]:
    registry = Registry()
    metrics = RequestMetrics(registry, ROUTES)
    registry.register(GatewayCollector(lambda: ROUTES, depth=lambda: {"chat": 3}))
    registry.register(Few())
    PlatformCollector(registry)
    for known in (
        record(ttft=0.12, ttft_budget=0.15),
        record(ttft=0.3, ttft_budget=0.15, pool="large"),
        record(end=RequestOutcome.SHED, pool="-", ttft=None, ttft_budget=0.15),
        record(route="agent", ttft=700.0, ttft_budget=None),
    ):
        metrics(known)
    metrics.loop_lag.saw(0.002, 1.0)
    return registry, metrics


def test_counters_read_in_place_equal_collected_metrics() -> None:
    """Reading counters in place and summing collected metrics give the same result."""
    registry, _ = observed()
    assert route_stats(counts_in_place(registry.collectors), ROUTES, 5.0) == route_stats(
        counts_of(registry.collect()), ROUTES, 5.0
    )


def test_route_stats_sum_over_all_pools() -> None:
    """Milliseconds; separate counts per bucket; queued requests."""
    registry, metrics = observed()
    said = route_stats(counts_in_place(registry.collectors), ROUTES, 5.0)
    chat, agent = said["routes"]
    assert (said["at"], chat["ttft_budget_ms"], agent["ttft_budget_ms"]) == (5.0, 150.0, None)
    assert (chat["requests"], chat["pools"]) == ({"completed": 2, "shed": 1}, {"small": 1, "large": 1, "-": 1})
    found = {le: n for le, n in zip((*chat["ttft_ms"]["le"], None), chat["ttft_ms"]["counts"], strict=True) if n}
    assert found == {150.0: 1, 500.0: 1}
    assert agent["ttft_ms"]["counts"][-1] == 1
    assert chat["slo"]["ttft"] == {"true": 1, "false": 2}
    assert (chat["held"], agent["held"]) == (3, 0)
    assert (said["gateway"]["redis_up"], "replicas" in said["gateway"]) == (1, False)
    assert sum(said["gateway"]["loop_lag_ms"]["counts"]) == 1
    assert metrics.loop_lag._greatest == 0.002  # looking is no scrape


def test_a_registry_knows_its_collectors() -> None:
    """Any registered collector is read, until unregistered."""
    registry = Registry()
    few = Few()
    registry.register(few)
    assert (registry.collectors, isinstance(registry, CollectorRegistry)) == ([few], True)
    registry.unregister(few)
    assert (registry.collectors, list(registry.collect())) == ([], [])
