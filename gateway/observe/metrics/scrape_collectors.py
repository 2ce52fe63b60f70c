"""What is read when Prometheus asks: no series is kept up per request."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from gateway.observe.metrics.series import gauge, total
from policies.routes.route import Route
from policies.types import EngineLoad, Health, Load

STATES = {Health.UP: 1.0, Health.PROBING: 0.5, Health.DOWN: 0.0}


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
    """firsttoken_endpoint_*: the fleet's ledger, and in `told` what engines said of themselves lately."""

    def __init__(
        self, loads: Callable[[], Mapping[str, Load]], told: Callable[[], Mapping[str, EngineLoad]] = dict
    ) -> None:
        self.loads, self.told = loads, told

    def collect(self) -> Iterable[Metric]:
        loads, told = self.loads(), self.told()
        yield _of("in_flight", {name: load.in_flight for name, load in loads.items()})
        yield _of("uncached_tokens_ahead", {name: load.queued_tokens for name, load in loads.items()})
        yield _of("state", {name: STATES[load.health] for name, load in loads.items()})
        yield _of("running", {name: engine.running for name, engine in told.items()})
        yield _of("waiting", {name: engine.waiting for name, engine in told.items()})
        yield _of("kv_usage_ratio", {name: engine.kv_usage for name, engine in told.items()})


def _of(what: str, values: Mapping[str, float | None]) -> Metric:
    """By endpoint id, which begins with its pool."""
    known = [((name.partition("/")[0], name), value) for name, value in values.items() if value is not None]
    return gauge(f"firsttoken_endpoint_{what}", known)


class OwnCollector(Collector):
    """Of the gateway itself: its version, what it has under way, and lines of the access log that it lost."""

    def __init__(self, live: Callable[[], int], lost: Callable[[], int] | None) -> None:
        self.live, self.lost, self.version = live, lost, running_version()

    def collect(self) -> Iterable[Metric]:
        yield gauge("firsttoken_build_info", [((self.version,), 1)])
        yield gauge("firsttoken_requests_in_progress", [((), self.live())])
        if self.lost is not None:
            yield from total("firsttoken_access_log_lines_lost_total", self.lost())


class ReplicasCollector(Collector):
    """Gateways that are heard of now; one, where nothing is shared."""

    def __init__(self, count: Callable[[], int]) -> None:
        self.count = count

    def collect(self) -> Iterable[Metric]:
        yield gauge("firsttoken_replicas", [((), self.count())])


def running_version() -> str:
    """As installed; run from its sources there is none."""
    try:
        return version("firsttoken")
    except PackageNotFoundError:
        return "unknown"
