"""Merged metrics and endpoint state of several workers."""

from __future__ import annotations

import re
from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, Exemplar, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from gateway.admin.admin_views import merge_endpoints
from gateway.observe.metrics.merged_metrics import (
    add_retired,
    decode_counts,
    encode_counts,
    keep_maxima,
    merge_metrics,
)
from gateway.workers.shared_state import SharedValue


def counted(chat: float, batch: float | None = None) -> list[Metric]:
    """A worker's counter, by route."""
    family = CounterMetricFamily("firsttoken_requests", "Requests", labels=["route"])
    family.add_metric(["chat"], chat)
    if batch is not None:
        family.add_metric(["batch"], batch)
    return [family]


def gauge(name: str, value: float) -> list[Metric]:
    return [GaugeMetricFamily(name, "a gauge", value)]


def values(metrics: Iterable[Metric]) -> dict[tuple[str, ...], float]:
    """By name and label values."""
    return {(s.name, *s.labels.values()): s.value for metric in metrics for s in metric.samples}


def test_counters_are_summed_by_label() -> None:
    """Labels of a single worker included."""
    found = values(merge_metrics({1: counted(3), 2: counted(4, 5)}))
    assert found == {("firsttoken_requests_total", "chat"): 7, ("firsttoken_requests_total", "batch"): 5}


def test_histograms_are_summed_by_bucket() -> None:
    """With sum and count."""
    reports: list[list[Metric]] = []
    for low, total in ((1, 0.5), (2, 4.0)):
        family = HistogramMetricFamily("firsttoken_ttft_seconds", "TTFT", labels=["route"])
        family.add_metric(["chat"], [("0.1", low), ("+Inf", low + 1)], total)
        reports.append([family])
    found = values(merge_metrics(dict(enumerate(reports, 1))))
    assert found["firsttoken_ttft_seconds_bucket", "chat", "0.1"] == 3
    assert (
        found["firsttoken_ttft_seconds_bucket", "chat", "+Inf"] == found["firsttoken_ttft_seconds_count", "chat"] == 5
    )
    assert found["firsttoken_ttft_seconds_sum", "chat"] == 4.5


def exemplified(count: float, *exemplars: tuple[str, str, float]) -> list[Metric]:
    """A worker's histogram of one bucket; `exemplars`: bucket, trace id and time of each."""
    shown = {le: Exemplar({"trace_id": trace}, 0.05, at) for le, trace, at in exemplars}
    family = HistogramMetricFamily("firsttoken_ttft_seconds", "TTFT", labels=["route"])
    buckets = [(le, count, shown[le]) if le in shown else (le, count) for le in ("0.1", "+Inf")]
    family.add_metric(["chat"], buckets, 0.5)
    return [family]


def test_the_latest_exemplar_of_a_bucket_is_kept() -> None:
    """From any worker, exited ones included; after encoding and decoding."""
    reports = [
        exemplified(1, ("0.1", "b" * 32, 200.0)),
        exemplified(2, ("0.1", "a" * 32, 100.0), ("+Inf", "c" * 32, 50.0)),
        add_retired(exemplified(3), exemplified(4, ("+Inf", "d" * 32, 60.5))),
    ]
    reports = [decode_counts(encode_counts(1, metrics))[1] for metrics in reports]
    registry = CollectorRegistry()
    registry.register(Fixed(merge_metrics({1: reports[0], 2: reports[1], None: reports[2]})))
    page = openmetrics.generate_latest(registry).decode()
    assert re.findall(r'le="([^"]+)",route="chat"} ([\d.]+) # {trace_id="(.)\3*"} 0.05 ([\d.]+)', page) == [
        ("0.1", "10.0", "b", "200.0"),
        ("+Inf", "10.0", "d", "60.5"),
    ]


class Fixed(Collector):
    def __init__(self, metrics: list[Metric]) -> None:
        self.metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self.metrics


def test_each_gauge_has_its_own_merge_rule() -> None:
    """Queues are summed; load, known to all workers, is not; failures show if any worker sees a failure."""
    cases = {
        "firsttoken_queue_depth": 5.0,
        "firsttoken_requests_in_progress": 5.0,
        "firsttoken_endpoint_in_flight": 3.0,
        "firsttoken_endpoint_waiting": 3.0,
        "firsttoken_endpoint_state": 2.0,
        "firsttoken_redis_up": 2.0,
        "firsttoken_config_loaded_timestamp_seconds": 2.0,
        "firsttoken_not_in_the_table": 3.0,
    }
    for name, expected in cases.items():
        assert values(merge_metrics({1: gauge(name, 2.0), 2: gauge(name, 3.0)})) == {(name,): expected}


def test_process_metrics_are_not_merged() -> None:
    """CPU is per process, and memory pages are shared."""
    found = values(merge_metrics({1: gauge("process_open_fds", 7), 2: gauge("process_open_fds", 9)}))
    assert found == {("process_open_fds", "1"): 7, ("process_open_fds", "2"): 9}


def test_counters_of_exited_workers_are_kept_and_gauges_dropped() -> None:
    """For any number of exited workers."""
    last = counted(3) + gauge("firsttoken_endpoint_in_flight", 9) + gauge("process_open_fds", 7)
    dead = add_retired(add_retired([], last), counted(2, 1))
    found = values(merge_metrics({None: dead, 1: counted(1)}))
    assert found == {("firsttoken_requests_total", "chat"): 6, ("firsttoken_requests_total", "batch"): 1}


def test_maxima_are_kept_until_the_next_scrape() -> None:
    """The aggregator reads more often than Prometheus, and each read resets the worker's maximum."""
    name = "firsttoken_loop_lag_max_seconds"
    looked = keep_maxima(gauge(name, 3.0) + counted(1), gauge(name, 2.0) + counted(4))
    assert values(merge_metrics({1: looked})) == {(name,): 3.0, ("firsttoken_requests_total", "chat"): 4}
    assert keep_maxima([], gauge(name, 2.0)) == gauge(name, 2.0)


def test_retired_counters_outlive_the_aggregator() -> None:
    """The process that sums the counters may exit too."""
    kept = SharedValue()
    assert kept.get() is None
    for dead in (add_retired([], counted(3, 4)), add_retired([], counted(3))):
        kept.put(dead)
        assert kept.get() == dead


DOWN = {"what": "down", "why": "nobody answered 2 times in a row", "for_s": 3.0, "callers": "all"}
BELIEVED: dict[str, list[dict[str, object]]] = {"up": [], "down": [DOWN]}


def held(requests: int) -> dict[str, object]:
    """Requests that a worker holds, each for a second."""
    return {"rule": "calm", "requests": requests, "longest_s": float(requests), "freed_by": "a calm engine"}


def test_an_endpoint_is_shown_by_the_worker_with_most_samples() -> None:
    """Load is common to all workers; learned statistics are not."""
    reports = {
        number: [
            {
                "endpoint": {"id": name},
                "samples": samples,
                "load": {"health": health},
                "believed": BELIEVED[health],
                "held": [held(number)] if name == "a" else [],
            }
            for name, (samples, health) in known.items()
        ]
        for number, known in {1: {"a": (5, "up"), "b": (1, "up")}, 2: {"a": (4, "down"), "b": (2, "up")}}.items()
    }
    assert {entry["endpoint"]["id"]: entry["worker"] for entry in merge_endpoints(reports)} == {"a": 1, "b": 2}
    assert {entry["endpoint"]["id"]: entry["health_by_worker"] for entry in merge_endpoints(reports)} == {
        "a": {"1": "up", "2": "down"},
        "b": {"1": "up", "2": "up"},
    }
    believed = {entry["endpoint"]["id"]: entry["believed"] for entry in merge_endpoints(reports)}
    assert believed == {"a": [DOWN], "b": []}


def test_requests_that_workers_hold_for_an_endpoint_are_counted_together() -> None:
    """By rule, with the longest wait of all."""
    entry = {"endpoint": {"id": "a"}, "samples": 1, "load": {"health": "up"}, "believed": []}
    [merged] = merge_endpoints({number: [{**entry, "held": [held(number)]}] for number in (1, 2)})
    assert merged["held"] == [{**held(2), "requests": 3}]
