"""Registry, and collectors that read values at scrape time: no series is updated per request."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from gateway.observe.metrics.series import gauge, total
from policies.routes.route import Route
from policies.types import EngineLoad, Health, Load

STATES = {Health.UP: 1.0, Health.PROBING: 0.5, Health.DOWN: 0.0}


class Registry(CollectorRegistry):
    """Lists the collectors in order of registration: reading some directly is cheaper than collecting."""

    def __init__(self) -> None:
        super().__init__()
        self.collectors: list[Collector] = []

    def register(self, collector: Collector) -> None:
        super().register(collector)
        self.collectors.append(collector)

    def unregister(self, collector: Collector) -> None:
        super().unregister(collector)
        self.collectors.remove(collector)


class RouteCollector(Collector):
    """Time-to-first-token budget and target of each route."""

    def __init__(self, routes: Callable[[], Iterable[Route]]) -> None:
        self.routes = routes

    def collect(self) -> Iterable[Metric]:
        promised = [(route.name, route.ttft) for route in self.routes() if route.ttft is not None]
        yield gauge("firsttoken_route_ttft_budget_seconds", [((name,), ttft.budget) for name, ttft in promised])
        yield gauge("firsttoken_route_ttft_target_ratio", [((name,), ttft.target) for name, ttft in promised])


class QueueCollector(Collector):
    """firsttoken_queue_depth."""

    def __init__(self, routes: Callable[[], Iterable[Route]], depth: Callable[[], Mapping[str, int]]) -> None:
        self.routes, self.depth = routes, depth

    def collect(self) -> Iterable[Metric]:
        depth = self.depth()
        yield gauge("firsttoken_queue_depth", [((route.name,), depth.get(route.name, 0)) for route in self.routes()])


class EndpointCollector(Collector):
    """firsttoken_endpoint_*. `loads`: by the gateway's own counts; `reported`: by recent scrapes of engines."""

    def __init__(
        self, loads: Callable[[], Mapping[str, Load]], reported: Callable[[], Mapping[str, EngineLoad]] = dict
    ) -> None:
        self.loads, self.reported = loads, reported

    def collect(self) -> Iterable[Metric]:
        loads, reported = self.loads(), self.reported()
        yield _by_endpoint("in_flight", {name: load.in_flight for name, load in loads.items()})
        yield _by_endpoint("uncached_tokens_ahead", {name: load.queued_tokens for name, load in loads.items()})
        yield _by_endpoint("state", {name: STATES[load.health] for name, load in loads.items()})
        yield _by_endpoint("running", {name: engine.running for name, engine in reported.items()})
        yield _by_endpoint("waiting", {name: engine.waiting for name, engine in reported.items()})
        yield _by_endpoint("kv_usage_ratio", {name: engine.kv_usage for name, engine in reported.items()})


def _by_endpoint(metric: str, values: Mapping[str, float | None]) -> Metric:
    """`values`: by endpoint id, which begins with the pool's name."""
    known = [((name.partition("/")[0], name), value) for name, value in values.items() if value is not None]
    return gauge(f"firsttoken_endpoint_{metric}", known)


class OwnCollector(Collector):
    """Version, requests in progress and lost access log lines of this process."""

    def __init__(self, live: Callable[[], int], lost: Callable[[], int] | None) -> None:
        self.live = live
        self.lost = lost
        self.version = running_version()

    def collect(self) -> Iterable[Metric]:
        yield gauge("firsttoken_build_info", [((self.version,), 1)])
        yield gauge("firsttoken_requests_in_progress", [((), self.live())])
        if self.lost is not None:
            yield from total("firsttoken_access_log_lines_lost_total", self.lost())


class ReplicasCollector(Collector):
    """Number of gateways that share state; 1 without shared state."""

    def __init__(self, count: Callable[[], int]) -> None:
        self.count = count

    def collect(self) -> Iterable[Metric]:
        yield gauge("firsttoken_replicas", [((), self.count())])


def running_version() -> str:
    """Version of the installed distribution, or `unknown` in a source tree."""
    try:
        return version("firsttoken")
    except PackageNotFoundError:
        return "unknown"
