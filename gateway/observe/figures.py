"""What the live views show of routes, out of the metrics: GET /routes.

Rules:
- Numbers count since the start, as metrics do; who looks twice has what happened in between. So no state is kept
  for those who look, and several may.
- Made from the families that /metrics shows, by name: of one process, or of many workers added up. What is not there is
  left out.
- Milliseconds, as in all JSON of the admin port.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from prometheus_client.core import Metric

from policies.route import Route

TTFT, SLO, STAGE = "firsttoken_ttft_seconds", "firsttoken_slo", "firsttoken_stage_seconds"
REQUESTS, QUEUE, ON_SCREEN = "firsttoken_requests", "firsttoken_queue_depth", "firsttoken_ttft_on_screen_seconds"
LAG, STALLS, BUILD = "firsttoken_loop_lag_seconds", "firsttoken_loop_stalls", "firsttoken_build_info"
OBJECTIVES = ("ttft", "tpot", "total")
# Of the gateway as a whole, where there is such a thing: shown name, family.
GAUGES = (
    ("in_progress", "firsttoken_requests_in_progress"),
    ("workers", "firsttoken_workers"),
    ("replicas", "firsttoken_replicas"),
    ("redis_up", "firsttoken_redis_up"),
    ("config_loaded_at", "firsttoken_config_loaded_timestamp_seconds"),
)
SHOWN = {TTFT, SLO, STAGE, REQUESTS, QUEUE, ON_SCREEN, LAG, STALLS, BUILD, *(family for _, family in GAUGES)}

Sample = tuple[str, Mapping[str, str], float]  # the end of its name, labels, value


class Known:
    """Samples by family and route; those that have no route under none."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self.families: set[str] = set()
        self._samples: dict[tuple[str, str], list[Sample]] = {}
        for metric in metrics:
            if metric.name in SHOWN:
                self.families.add(metric.name)
                self._add(metric)

    def _add(self, metric: Metric) -> None:
        name, samples = metric.name, self._samples
        for sample in metric.samples:
            labels = sample.labels
            key = name, labels.get("route", "")
            samples.setdefault(key, []).append((sample.name[len(name) :], labels, sample.value))

    def total(self, family: str, route: str = "") -> float:
        """Of a gauge, or a counter."""
        return sum(value for end, _, value in self._samples.get((family, route), ()) if end in ("", "_total"))

    def by(self, family: str, label: str, route: str = "", end: str = "_total", **where: str) -> dict[str, float]:
        """Sums by the values of one label."""
        sums: dict[str, float] = {}
        for ending, labels, value in self._samples.get((family, route), ()):
            if ending == end and all(labels.get(name) == wanted for name, wanted in where.items()):
                sums[labels[label]] = sums.get(labels[label], 0.0) + value
        return sums

    def histogram(self, family: str, route: str = "") -> dict[str, list[float]]:
        """Buckets by their upper bound, each with what it holds alone; the last has no bound."""
        totals = sorted((float(le), total) for le, total in self.by(family, "le", route, "_bucket").items())
        before = [0.0, *(total for _, total in totals)]
        counts = [total - less for (_, total), less in zip(totals, before, strict=False)]
        return {"le": [round(bound * 1e3, 6) for bound, _ in totals[:-1]], "counts": counts}


def figures(metrics: Iterable[Metric], routes: Sequence[Route], wall: float) -> dict[str, Any]:
    """Ready for JSON. `wall`: now, as Unix time."""
    known = Known(metrics)
    return {"at": wall, "gateway": _gateway(known), "routes": [_route(route, known) for route in routes]}


def _gateway(known: Known) -> dict[str, Any]:
    said: dict[str, Any] = {name: known.total(family) for name, family in GAUGES if family in known.families}
    said["version"] = next(iter(known.by(BUILD, "version", end="")), None)
    return {**said, "loop_stalls": known.total(STALLS), "loop_lag_ms": known.histogram(LAG)}


def _route(route: Route, known: Known) -> dict[str, Any]:
    name = route.name
    stages = known.by(STAGE, "stage", name, "_sum")
    return {
        "route": name,
        "workload": route.workload,
        "ttft_budget_ms": round(route.ttft.budget * 1e3, 3) if route.ttft else None,
        "ttft_target": route.ttft.target if route.ttft else None,
        "requests": known.by(REQUESTS, "outcome", name),
        "pools": known.by(REQUESTS, "pool", name),
        "held": known.total(QUEUE, name),
        "ttft_ms": known.histogram(TTFT, name),
        "on_screen_ms": known.histogram(ON_SCREEN, name),
        "slo": {objective: known.by(SLO, "met", name, objective=objective) for objective in OBJECTIVES},
        "stages_ms": {stage: round(seconds * 1e3, 3) for stage, seconds in stages.items()},
    }
