"""Counters and histograms as collected for Prometheus."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from prometheus_client.core import Metric

from gateway.observe.metrics.series import Counter, Histogram


def values(metric: Metric) -> dict[tuple[str, str], float]:
    return {(sample.name, sample.labels.get("le", "")): sample.value for sample in metric.samples}


def test_collected_values_are_a_snapshot() -> None:
    """Samples are made later, in another thread, while counting goes on."""
    counter, histogram = Counter("a", "?", "route"), Histogram("b_seconds", "?", "route", bounds=(1.0, 2.0))
    counter.of[("chat",)].value += 1
    histogram.of[("chat",)].observe(0.5)
    (counted,), (observed,) = counter.collect(), histogram.collect()
    counter.of[("chat",)].value += 1
    counter.of[("late",)].value += 1
    histogram.of[("chat",)].observe(0.5)
    histogram.refine((1.5,))
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(values, counted).result() == {("a_total", ""): 1}
        assert thread.submit(values, observed).result() == {
            ("b_seconds_bucket", "1.0"): 1,
            ("b_seconds_bucket", "2.0"): 1,
            ("b_seconds_bucket", "+Inf"): 1,
            ("b_seconds_count", ""): 1,
            ("b_seconds_sum", ""): 0.5,
        }
    assert (counted.type, observed.type, len(observed.samples)) == ("counter", "histogram", 5)
