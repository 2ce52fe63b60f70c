"""The table of metrics, compared with a live gateway."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from time import monotonic

import pytest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from gateway.app import Gateway
from gateway.config.endpoint_section import PodSource
from gateway.observe.metrics.metric_family import Family, Merge, MetricKind
from gateway.observe.metrics.metric_table import BY_FAMILY, CATALOG, GROUPS
from gateway.observe.metrics.series import counter, gauge, histogram
from gateway.observe.part_notes import AnswerSight
from gateway.observe.record import TokenGaps
from gateway.parts.discovery.part import DiscoveryPart
from policies.diagnosis.causes import Cause, CauseVerdict
from policies.diagnosis.diagnosis_report import Alternatives, Diagnosis
from policies.diagnosis.usual import Usual
from policies.prefix_doctor.break_class import BreakClass
from policies.prefix_doctor.lineage import Lineage, PrefixBreak
from policies.types import AttemptKind, AttemptOutcome
from tests.gateway.observe.metrics.test_request_metrics import LOST, WON
from tests.support.builders import CHAT, calling, get, post, record
from tests.support.gateways import running
from tests.support.simulated import engine_pool, engines, eventually

pytestmark = pytest.mark.virtual_time

# Parts missing in a single gateway without Redis and collector.
ELSEWHERE = {
    "firsttoken_quota_refused_total",
    "firsttoken_redis_up",
    "firsttoken_redis_errors_total",
    "firsttoken_replicas",
    "firsttoken_learned_state_saves_total",
    "firsttoken_learned_state_restored_endpoints",
    "firsttoken_endpoint_evictions_per_second",
    "firsttoken_endpoint_speculative_acceptance_ratio",
    "firsttoken_workers",
    "firsttoken_workers_stalled",
    "firsttoken_certificate_end_timestamp_seconds",
    "firsttoken_certificate_refused",
    "firsttoken_worker_starts_total",
    "firsttoken_spans_exported_total",
    "firsttoken_spans_lost_total",
    "firsttoken_otlp_metric_exports_failed_total",
    "firsttoken_config_reloads_total",
    "firsttoken_config_loaded_timestamp_seconds",
}
UNITS = {"s": "_seconds", "s since 1970": "_timestamp_seconds", "0 to 1": "_ratio", "tokens": "tokens", "USD": "_usd"}
ROUTES = {"chat": {"workload": "chat", "tiers": ["engines"], "ttft": {"budget": "7s"}, "total": {"budget": "60s"}}}


# --------------------------------------------------------------------------- a live gateway


OWN = ("firsttoken_", "llm_d_epp_")


async def exposed(gateway: Gateway) -> dict[str, Metric]:
    """The gateway's own families of a page, by the library's names."""
    page = (await get(gateway.admin_url, "/metrics"))[2].decode()
    return {f.name: f for f in text_string_to_metric_families(page) if f.name.startswith(OWN)}


async def test_a_live_gateway_exposes_the_metrics_of_the_table(tmp_path: Path) -> None:
    """Both ways, but for parts that it does not have: name, type, labels, help, bounds. A hedge is told, not made."""
    log = {"telemetry": {"access_log": f"{tmp_path}/access.jsonl"}, "records": {"dir": f"{tmp_path}/records"}}
    log["pick"] = {"listen": "127.0.0.1:0"}
    async with engines(1) as servers, running({"engines": engine_pool(*servers)}, ROUTES, **log) as gateway:
        for _ in range(2):
            async with calling(gateway.url) as caller:
                await caller.ask(post({**CHAT, "stream": True, "max_tokens": 8}))
                await caller.chunks()
        for _ in range(2):
            gateway.fleet.on_probe_failed(next(iter(gateway.monitor.loads())), monotonic())
        hedge = replace(LOST, kind=AttemptKind.HEDGE, ending=AttemptOutcome.CANCELLED)
        attempts = [hedge, replace(WON, junk=1)]
        verdict = CauseVerdict(Cause.QUEUED, "behind 3 requests", "add an engine", "queue", 0.3)
        lineage = Lineage(
            1, step=2, since=3.0, kept=40, previous=900, broken=PrefixBreak(BreakClass.UUID, "system", 40, 900, 1)
        )
        told = record(
            attempts=attempts,
            first_reasoning=0.2,
            first_answer=0.3,
            rejected=frozenset({"external_limit"}),
            prompt_changes=("sort_tools",),
            tpot=0.02,
            gaps=TokenGaps(1.5, 1.5, 1),
            rescue="refused",
            escalated="length",
            left_out={"seed": "seed"},
            cache="miss",
            tags=("team",),
            sight=AnswerSight.BODY,
            total_predicted_p50=1.0,
            total_predicted_p90=2.0,
            lineage=lineage,
            diagnosis=Diagnosis(verdict, Usual(), Alternatives()),
        )
        for sink in (*gateway.recorder.sinks, *gateway.recorder.batch_sinks):
            sink(told)
        gateway.part(DiscoveryPart).found.pods.left_out[PodSource("default", "vllm")] = 3
        await eventually(lambda: len(gateway.monitor.engine_loads()) == 1 and gateway.recorder.live == 0)
        await eventually(lambda: len(gateway.recorder.recent) == 3)
        (rates,) = gateway.monitor.engine_rates().values()
        await eventually(lambda: rates.preemptions_per_s is not None)
        async with calling(gateway.admin_url) as caller:
            beacon = {"request_id": gateway.recorder.recent[0].request_id, "ttft_ms": 250}
            assert (await caller.ask(post(beacon, path="/ttft")))[0] == 204
        found = await exposed(gateway)
    assert found.keys() - BY_FAMILY.keys() == set()
    for name, metric in found.items():
        assert_told_of(metric, BY_FAMILY[name])
    shown = {BY_FAMILY[name].name for name, metric in found.items() if metric.samples}
    assert CATALOG.keys() - shown <= ELSEWHERE


def assert_told_of(metric: Metric, row: Family) -> None:
    labels = {label for sample in metric.samples for label in sample.labels} - {"le"}
    assert (metric.type, metric.documentation, labels) == (row.kind.value, row.help, set(row.labels)), row.name
    bounds = {float(sample.labels["le"]) for sample in metric.samples if "le" in sample.labels}
    assert bounds >= set(row.bounds)
    assert bounds - set(row.bounds) <= {float("inf"), 7.0}  # the route's budget


# --------------------------------------------------------------------------- the table


@pytest.mark.parametrize("row", CATALOG.values(), ids=lambda row: row.name)
def test_a_row_is_complete_and_has_its_unit_in_its_name(row: Family) -> None:
    """Operators read the page at night."""
    assert re.fullmatch(r"(firsttoken|llm_d_epp)_[a-z0-9_]+", row.name)
    assert row.name.endswith("_total") == (row.kind is MetricKind.COUNTER)
    assert "\n" not in row.help
    assert not row.help.endswith(".")
    assert row.moves
    assert row.act
    assert UNITS.get(row.unit, "") in row.name
    assert list(row.bounds) == sorted(set(row.bounds))
    assert bool(row.bounds) == (row.kind is MetricKind.HISTOGRAM)


def test_no_metric_has_two_rows() -> None:
    """A table by name would hide the first of the two."""
    assert sum(map(len, GROUPS.values())) == len(CATALOG) == len(BY_FAMILY)


def test_a_gauge_that_each_worker_has_its_own_of_is_a_sum() -> None:
    """Other gauges have a worst value, or the same value everywhere."""
    summed = {row.name for row in CATALOG.values() if row.merge is Merge.SUM}
    assert summed == {
        "firsttoken_queue_depth",
        "firsttoken_requests_in_progress",
        "firsttoken_connections",
        "firsttoken_body_bytes",
        "llm_d_epp_flow_control_queue_size",
    }


@pytest.mark.parametrize("make", [counter, histogram, lambda name: gauge(name, [])])
def test_no_series_is_made_of_another_type_than_its_row(make: object) -> None:
    """A slip is an error at the start, not a page refused by Prometheus."""
    kinds = ("firsttoken_slo_total", "firsttoken_ttft_seconds", "firsttoken_queue_depth")
    made = 0
    for name in kinds:
        try:
            make(name)  # type: ignore[operator]
            made += 1
        except AssertionError:
            pass
    assert made == 1
