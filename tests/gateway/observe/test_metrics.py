"""Records as Prometheus series."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import prometheus_client
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.samples import Sample

from gateway.app import Gateway
from gateway.observe.metrics import BATCH, TTFT_BUCKETS, EndpointCollector, Metrics, QueueCollector, ttft_buckets
from gateway.observe.record import AttemptRecord, End, Stage
from gateway.observe.series import Counter, Histogram
from gateway.observe.telemetry import Telemetry
from policies.facts import AttemptKind, Ending, Health, Load
from tests.gateway.builders import ANSWER, CHAT, calling, post, record, route
from tests.kit.gateways import pool, running
from tests.kit.upstream import LAST_CHUNK, STREAM_HEAD, Upstream, chunk


def spent(stages: dict[Stage, float]) -> list[float | None]:
    return [stages.get(stage) for stage in Stage]


PAGE = Path(__file__).parents[3] / "docs/metrics.md"
ROUTE = route(ttft={"budget": "800ms"})
LOST = AttemptRecord(1, AttemptKind.PRIMARY, "small/b", "small", 0.0, 0.1, Ending.SILENT)
WON = AttemptRecord(2, AttemptKind.FALLBACK, "small/a", "small", 0.1, 1.0, Ending.COMPLETED)
FULL: dict[str, Any] = {
    "spent": spent({Stage.READ: 0.001, Stage.UPSTREAM: 0.19, Stage.STREAM: 0.8}), "tpot": 0.02, "tpot_budget": 0.05,
    "total_budget": 5.0, "prompt_tokens_estimated": 100, "prompt_tokens_reported": 110, "cached_tokens_predicted": 50,
    "cached_tokens_reported": 55, "ttft_predicted_p50": 0.125, "cost_usd": 0.002, "attempts": [LOST, WON],
}  # fmt: skip


class Exported:
    """Metrics, and what Prometheus would read of them."""

    def __init__(self, *records: dict[str, Any]) -> None:
        self.registry = CollectorRegistry()
        self.metrics = Metrics(self.registry, [ROUTE])
        for known in records:
            self.metrics(record(**{**FULL, **known}))

    def samples(self, name: str) -> list[Sample]:
        return [s for family in self.registry.collect() for s in family.samples if s.name == f"firsttoken_{name}"]

    def __getitem__(self, name: str) -> dict[tuple[str, ...], float]:
        """Label values -> value, of one series; `_created` and buckets that are empty are left out."""
        return {tuple(s.labels.values()): s.value for s in self.samples(name)}


# --------------------------------------------------------------------------- what a Record becomes


def test_every_series_of_the_page_is_exported_with_its_labels() -> None:
    """docs/metrics.md is what dashboards are written against."""
    exported = Exported({})
    exported.registry.register(EndpointCollector(lambda: {"small/a": Load()}))
    exported.registry.register(QueueCollector([ROUTE], dict))
    exported.registry.register(Telemetry("http://127.0.0.1:9", {}))
    hedge = AttemptRecord(2, AttemptKind.HEDGE, "small/b", "small", 0.1, 1.0, Ending.CANCELLED)
    exported.metrics(record(attempts=[hedge, WON]))
    found = {
        (f"{family.name}_total" if family.type == "counter" else family.name, family.type): {
            label for sample in family.samples for label in sample.labels if label != "le"
        }
        for family in exported.registry.collect()
    }
    rows = re.findall(r"^\| `(firsttoken_\w+)` \| (\w+) \|([^|]+)\|", PAGE.read_text("utf-8"), re.MULTILINE)
    assert found == {(name, kind): set(re.findall(r"`(\w+)`", labels)) for name, kind, labels in rows}


def test_one_record_counts_once_wherever_it_belongs() -> None:
    """A whole request, with a lost attempt, in numbers."""
    exported = Exported({})
    assert exported["requests_total"] == {("chat", "small", "completed"): 1}
    assert exported["ttft_seconds_sum"] == {("chat", "small"): 0.2}
    assert exported["tpot_seconds_sum"] == {("chat", "small"): 0.02}
    assert exported["stage_seconds_sum"] == {
        ("chat", "read"): 0.001,
        ("chat", "upstream"): 0.19,
        ("chat", "stream"): 0.8,
    }
    assert exported["slo_total"] == {("chat", name, "true"): 1 for name in ("ttft", "tpot", "total")}
    assert exported["attempts_total"] == {
        ("small", "primary", "silent"): 1, ("small", "fallback", "completed"): 1,
    }  # fmt: skip
    assert exported["tokens_total"] == {("chat", "small", "input"): 110, ("chat", "small", "output"): 10}
    assert exported["cost_usd_total"] == {("chat", "small"): 0.002}
    assert exported["prefix_hit_ratio_sum"] == {("small", "predicted"): 0.5, ("small", "reported"): 0.5}
    errors = exported.samples("ttft_prediction_error_seconds_bucket")
    assert next(s.labels["le"] for s in errors if s.value) == "0.1"  # 75 ms late


@pytest.mark.parametrize("end", End)
def test_every_outcome_has_its_series(end: End) -> None:
    """And docs/metrics.md explains it."""
    assert Exported({"end": end})["requests_total"] == {("chat", "small", end.value): 1}
    assert f"`{end.value}`" in PAGE.read_text("utf-8")


@pytest.mark.parametrize("value", [*Ending, *(kind for kind in AttemptKind if kind is not AttemptKind.RESCUE)])
def test_every_kind_and_outcome_of_an_attempt_is_explained(value: Ending | AttemptKind) -> None:
    """By docs/metrics.md; a rescue does not happen yet."""
    assert f"`{value.value}`" in PAGE.read_text("utf-8")


@pytest.mark.parametrize("count", [1, BATCH - 1, BATCH, BATCH + 1, 3 * BATCH])
def test_whoever_reads_the_metrics_reads_all_of_them(count: int) -> None:
    """Records are counted in batches; a scrape counts what waits."""
    exported = Exported(*[{}] * count)
    assert exported["requests_total"] == {("chat", "small", "completed"): count}
    assert exported["requests_total"] == {("chat", "small", "completed"): count}


def test_a_record_that_cannot_be_counted_is_its_own_loss(caplog: pytest.LogCaptureFixture) -> None:
    """A bug of ours, which is said; those before it and behind it count."""
    with caplog.at_level(logging.ERROR, "firsttoken"):
        exported = Exported({}, {"attempts": [None]}, {})
        found = exported["attempts_total"]
    assert found == {("small", "primary", "silent"): 2, ("small", "fallback", "completed"): 2}
    assert [entry.message for entry in caplog.records] == ["a Record could not be counted"]


def test_a_miss_is_counted_beside_what_was_met() -> None:
    """Attainment is met over all that have the objective; a request at fault itself is in neither."""
    exported = Exported(
        {}, {"ttft": 0.9}, {"ttft": None, "end": End.SHED, "tpot": None}, {"ttft": None, "end": End.REFUSED}
    )
    assert exported["slo_total"] == {
        ("chat", "ttft", "true"): 1, ("chat", "ttft", "false"): 2,
        ("chat", "tpot", "true"): 2,
        ("chat", "total", "true"): 2, ("chat", "total", "false"): 1,
    }  # fmt: skip


def test_a_hedge_is_counted_by_what_came_of_it() -> None:
    """Won, lost to the attempt that it raced, or failed; an attempt that is none counts nowhere here."""
    hedge = replace(LOST, kind=AttemptKind.HEDGE, ending=Ending.CANCELLED)
    won, failed = replace(WON, kind=AttemptKind.HEDGE), replace(hedge, ending=Ending.FAILED)
    exported = Exported(
        {}, {"attempts": [LOST, won]}, {"attempts": [hedge, WON]}, {"attempts": [failed, WON]},
        {"attempts": [LOST, hedge], "ttft": None, "end": End.CLIENT_GONE},
    )  # fmt: skip
    assert exported["hedges_total"] == {("chat", "won"): 1, ("chat", "lost"): 2, ("chat", "failed"): 1}


def test_a_hedge_that_won_and_broke_off_has_won() -> None:
    """The race is about the first token."""
    won = replace(WON, kind=AttemptKind.HEDGE, ending=Ending.BROKEN)
    assert Exported({"attempts": [LOST, won], "end": End.UPSTREAM_BROKE})["hedges_total"] == {("chat", "won"): 1}


def test_what_was_not_answered_has_no_tokens_and_no_cost() -> None:
    """They are of answered requests; its attempts count all the same."""
    exported = Exported({"ttft": None, "tpot": None, "end": End.FAILED, "attempts": [LOST]})
    names = ("ttft_seconds_count", "tpot_seconds_count", "tokens_total", "cost_usd_total", "prefix_hit_ratio_count")
    assert [exported[name] for name in names] == [{}] * len(names)
    assert exported["attempts_total"] == {("small", "primary", "silent"): 1}


def test_an_engine_that_does_not_report_is_counted_by_the_estimate() -> None:
    """And says nothing about prefix hits."""
    exported = Exported({"prompt_tokens_reported": None, "cached_tokens_reported": None, "output_tokens": None})
    assert exported["tokens_total"] == {("chat", "small", "input"): 100, ("chat", "small", "output"): 0}
    assert exported["prefix_hit_ratio_count"] == {("small", "predicted"): 1}


def test_an_answer_that_comes_whole_says_nothing_about_the_prediction() -> None:
    """A first byte is not a first token: the engine sent it with the last."""
    exported = Exported({"stream": False})
    assert exported["ttft_seconds_count"] == {("chat", "small"): 1}
    assert exported["ttft_prediction_error_seconds_count"] == {}


# --------------------------------------------------------------------------- buckets and labels


def test_a_routes_budget_is_a_bucket() -> None:
    """So that attainment is read exactly: what met it is below, and what missed it by a hair is not."""
    exported = Exported({"ttft": 0.8}, {"ttft": 0.8000001}, {"ttft": 0.1})
    within = [s.value for s in exported.samples("ttft_seconds_bucket") if s.labels["le"] == "0.8"]
    assert within == [2.0]
    assert exported["slo_total"]["chat", "ttft", "true"] == 2


def test_budgets_join_the_usual_buckets_in_order() -> None:
    """Each once, also one that is a usual bucket anyway; a route without a budget adds none."""
    routes = [ROUTE, route("a", ttft={"budget": "800ms"}), route("b", ttft={"budget": "1s"}), route("c")]
    assert ttft_buckets(routes) == tuple(sorted({*TTFT_BUCKETS, 0.8}))


def test_the_children_of_a_metric_are_made_once() -> None:
    """The request path looks them up; it does not build them."""
    series = Counter("firsttoken_requests", "", "route", "pool")
    assert series.of["chat", "small"] is series.of["chat", "small"]
    assert series.of["chat", "large"] is not series.of["chat", "small"]


def test_what_was_never_counted_is_not_shown() -> None:
    """A histogram of zeros says that something was looked at."""
    registry = CollectorRegistry()
    series = Histogram("x_seconds", "x", "route", bounds=(1.0,))
    registry.register(series)
    seen, _ = series.of[("chat",)], series.of[("batch",)]
    seen.observe(0.5)
    assert registry.get_sample_value("x_seconds_count", {"route": "chat"}) == 1
    assert registry.get_sample_value("x_seconds_count", {"route": "batch"}) is None


def test_a_tally_is_what_the_librarys_histogram_would_be() -> None:
    """Bounds are upper and inclusive; values beyond the last are in +Inf."""
    values, bounds = [0.0, 0.1, 0.10001, 0.5, 0.7, 1.0, 9.0], (0.1, 0.5, 1.0)
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    series = Histogram("x_seconds", "x", "route", bounds=bounds)
    ours.register(series)
    library = prometheus_client.Histogram("x_seconds", "x", ["route"], buckets=bounds, registry=theirs)
    for value in values:
        series.of[("chat",)].observe(value)
        library.labels("chat").observe(value)
    assert _plain(generate_latest(ours)) == _plain(generate_latest(theirs))


def _plain(page: bytes) -> list[bytes]:
    return [line for line in page.splitlines() if b"_created" not in line]


async def test_no_caller_can_mint_a_series() -> None:
    """Ten thousand names of models, ids, sessions and headers: as many series after them as after the first few."""

    def hostile(i: int, *headers: str) -> bytes:
        body = {**CHAT, "model": f"model-{i}", "user": f"user-{i}", "stream": True}
        return post(body, f"x-request-id: id-{i}", f"x-session-id: s-{i}", f"x-priority: {i}", f"x-{i}: {i}", *headers)

    async def ask(gateway: Gateway, names: Sequence[int], status: bytes) -> int:
        """One connection's worth of requests, one behind the other; how many series there are after them."""
        async with calling(gateway.url) as caller:
            caller.writer.write(b"".join(map(hostile, names[:-1])) + hostile(names[-1], "connection: close"))
            assert (await caller.rest()).count(b"HTTP/1.1 " + status) == len(names)
        return len(generate_latest(gateway.admin.registry).splitlines())

    async with Upstream([STREAM_HEAD + chunk(ANSWER) + LAST_CHUNK]) as upstream:
        pools = {"only": pool(upstream.url)}
        async with running(pools) as closed, running(pools, passthrough="only") as through:
            refused = {await ask(closed, range(i, i + 500), b"404") for i in range(0, 10_000, 500)}
            passed = {await ask(through, range(i, i + 100), b"200") for i in range(0, 500, 100)}
    assert (len(refused), len(passed)) == (1, 1)


# --------------------------------------------------------------------------- the fleet


def test_the_queue_is_read_when_prometheus_asks() -> None:
    """Every route has its series, also while nobody waits."""
    registry = CollectorRegistry()
    registry.register(QueueCollector([ROUTE, route("agent")], lambda: {"chat": 3}))
    depth = [registry.get_sample_value("firsttoken_queue_depth", {"route": name}) for name in ("chat", "agent")]
    assert depth == [3, 0]


@pytest.mark.parametrize(("health", "state"), [(Health.UP, 1.0), (Health.PROBING, 0.5), (Health.DOWN, 0.0)])
def test_endpoints_are_read_when_prometheus_asks(health: Health, state: float) -> None:
    """No series is kept up per request; the ledger is the truth."""
    loads = {"small/a": Load(in_flight=3, ahead=1200.0, health=health), "large/b": Load()}
    registry = CollectorRegistry()
    registry.register(EndpointCollector(lambda: loads))
    value = registry.get_sample_value
    labels = {"pool": "small", "endpoint": "small/a"}
    assert value("firsttoken_endpoint_in_flight", labels) == 3
    assert value("firsttoken_endpoint_uncached_tokens_ahead", labels) == 1200
    assert value("firsttoken_endpoint_state", labels) == state
    assert value("firsttoken_endpoint_state", {"pool": "large", "endpoint": "large/b"}) == 1
    loads.pop("small/a")
    assert value("firsttoken_endpoint_in_flight", labels) is None
