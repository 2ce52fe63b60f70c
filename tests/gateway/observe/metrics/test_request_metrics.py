"""Records as Prometheus series."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import prometheus_client
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from gateway.app import Gateway
from gateway.config.models import API_FIRST_TOKEN, API_STREAM_IDLE
from gateway.observe.metrics.metric_table import CATALOG
from gateway.observe.metrics.request_families import TTFT_BOUNDS
from gateway.observe.metrics.request_metrics import PROMPTS, RequestMetrics, ServedLabels
from gateway.observe.metrics.scrape_collectors import EndpointCollector, GatewayCollector
from gateway.observe.metrics.series import Counter, Histogram
from gateway.observe.record import AttemptRecord, RequestOutcome, Stage, TokenGaps
from gateway.observe.trace_context import Trace
from gateway.upstream.routed_request import WHOLE_ANSWER
from policies.fleet.engine_load import EngineCounters, EngineLoad, EngineRates
from policies.rescue.successors import RESCUE_ATTEMPT
from policies.routes.route import Route
from policies.types import AttemptKind, AttemptOutcome, Health, Load
from tests.support.builders import ANSWER, CHAT, STREAMED, calling, conversing, get, post, record, route
from tests.support.gateways import pool, running
from tests.support.simulated import eventually
from tests.support.upstream import LAST_CHUNK, STREAM_HEAD, Upstream, chunk

pytestmark = pytest.mark.virtual_time


def spent(stages: dict[Stage, float]) -> list[float | None]:
    return [stages.get(stage) for stage in Stage]


PAGE = Path(__file__).parents[4] / "docs/metrics.md"
ROUTE = route(ttft={"budget": "800ms"})
BUDGETS = {"chat": 700, "agent": 1_100, "autocomplete": 333}  # ms
LOST = AttemptRecord(
    1, AttemptKind.PRIMARY, "small/b", "small", 0.0, 0.1, AttemptOutcome.SILENT, cost_usd=0.001, locality="eu"
)
WON = AttemptRecord(2, AttemptKind.FALLBACK, "small/a", "small", 0.1, 1.0, AttemptOutcome.COMPLETED, cost_usd=0.002)
FULL: dict[str, Any] = {
    "spent": spent({Stage.READ: 0.001, Stage.UPSTREAM: 0.19, Stage.STREAM: 0.8}),
    "tpot": 0.02,
    "tpot_budget": 0.05,
    "total_budget": 5.0,
    "prompt_tokens_estimated": 100,
    "prompt_tokens_reported": 110,
    "cached_tokens_predicted": 50,
    "cached_tokens_reported": 55,
    "ttft_predicted_p50": 0.125,
    "attempts": [LOST, WON],
}


class Exported:
    """Metrics, and the page that Prometheus would read."""

    def __init__(self, *records: dict[str, Any], routes: Sequence[Route] = (ROUTE,)) -> None:
        self.registry = CollectorRegistry()
        self.metrics = RequestMetrics(self.registry, routes)
        for known in records:
            self.metrics(record(**{**FULL, **known}))

    def samples(self, name: str) -> list[Sample]:
        return [s for family in self.registry.collect() for s in family.samples if s.name == f"firsttoken_{name}"]

    def __getitem__(self, name: str) -> dict[tuple[str, ...], float]:
        """Label values -> value for one series, without `_created` and empty buckets."""
        return {tuple(s.labels.values()): s.value for s in self.samples(name)}


# --------------------------------------------------------------------------- series of a Record


def test_a_record_is_counted_once_in_each_series() -> None:
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
    assert exported["slo_total"] == {("chat", name, "true"): 1 for name in ("ttft", "tpot", "total", "goodput")}
    assert exported["attempts_total"] == {
        ("small", "eu", "primary", "silent"): 1,
        ("small", "", "fallback", "completed"): 1,
    }
    assert exported["tokens_total"] == {("chat", "small", "input"): 110, ("chat", "small", "output"): 10}
    assert exported["cached_tokens_total"] == {("chat", "small"): 55}
    assert exported["cost_usd_total"] == {("chat", "small"): 0.003}
    assert exported["prefix_hit_ratio_sum"] == {("small", "predicted"): 0.5, ("small", "reported"): 0.5}
    errors = exported.samples("ttft_prediction_error_seconds_bucket")
    assert next(s.labels["le"] for s in errors if s.value) == "0.1"  # 75 ms late


@pytest.mark.parametrize("end", RequestOutcome)
def test_every_outcome_has_its_series(end: RequestOutcome) -> None:
    """docs/metrics.md explains each series."""
    assert Exported({"end": end})["requests_total"] == {("chat", "small", end.value): 1}
    assert f"`{end.value}`" in PAGE.read_text("utf-8")


KINDS = (
    *(AttemptKind.PRIMARY, AttemptKind.FALLBACK, AttemptKind.HEDGE, AttemptKind.WHOLE, AttemptKind.MENDED),
    RESCUE_ATTEMPT,
)


@pytest.mark.parametrize("value", [*AttemptOutcome, *KINDS])
def test_every_kind_and_outcome_of_an_attempt_is_explained(value: AttemptOutcome | AttemptKind) -> None:
    """By docs/metrics.md."""
    assert f"`{value.value}`" in PAGE.read_text("utf-8")


def test_a_gap_is_judged_where_the_route_promises_one_and_is_a_part_of_goodput() -> None:
    exported = Exported({"gap_budget": 1.0, "gaps": TokenGaps(1.5)}, {"gaps": TokenGaps(1.5)})
    found = {labels[1:]: count for labels, count in exported["slo_total"].items() if labels[1] in ("gap", "goodput")}
    assert found == {("gap", "false"): 1, ("goodput", "false"): 1, ("goodput", "true"): 1}


def test_met_and_missed_objectives_are_counted() -> None:
    """Attainment is met over all requests with the objective; faults of callers are in neither."""
    exported = Exported(
        {},
        {"ttft": 0.9},
        {"ttft": None, "end": RequestOutcome.SHED, "tpot": None},
        {"ttft": None, "end": RequestOutcome.REFUSED},
    )
    assert exported["slo_total"] == {
        ("chat", "ttft", "true"): 1,
        ("chat", "ttft", "false"): 2,
        ("chat", "tpot", "true"): 2,
        ("chat", "total", "true"): 2,
        ("chat", "total", "false"): 1,
        ("chat", "goodput", "true"): 1,
        ("chat", "goodput", "false"): 2,
    }


def test_the_longest_gap_of_an_answer_is_a_histogram() -> None:
    """A short one counts as 0, an answer of one token not at all; gaps above a second are counted singly."""
    told = {"gaps": TokenGaps(0.3, 0.2, 0)}, {"gaps": TokenGaps(2.0, 1.5, 3)}, {}, {"tpot": None}
    exported = Exported(*told)
    assert exported["longest_gap_seconds_sum"] == {("chat", "small"): pytest.approx(2.3)}
    assert exported["longest_gap_seconds_count"] == {("chat", "small"): 3}
    assert exported["long_gaps_total"] == {("chat", "small"): 3}


def test_rates_of_engines_and_the_verdict_on_their_pool_are_exposed() -> None:
    """Preemptions alone say that memory is the limit; a rate that no engine tells has no family."""
    registry, rates = CollectorRegistry(), EngineRates()
    rates.note(EngineCounters(preemptions=0.0), 0.0)
    rates.note(EngineCounters(preemptions=5.0), 10.0)
    registry.register(EndpointCollector(lambda _: "small", lambda: {"a": Load()}, dict, lambda: {"a": rates}))
    value = registry.get_sample_value
    labels = {"pool": "small", "endpoint": "a"}
    assert value("firsttoken_endpoint_preemptions_per_second", labels) == 0.5
    assert value("firsttoken_endpoint_evictions_per_second", labels) is None
    assert value("firsttoken_pool_bound", {"pool": "small"}) == 4.0


def test_hedges_are_counted_by_outcome() -> None:
    """Won, lost to the other attempt, or failed; attempts of other kinds are not counted here."""
    hedge = replace(LOST, kind=AttemptKind.HEDGE, ending=AttemptOutcome.CANCELLED)
    won, failed = replace(WON, kind=AttemptKind.HEDGE), replace(hedge, ending=AttemptOutcome.FAILED)
    exported = Exported(
        {},
        {"attempts": [LOST, won]},
        {"attempts": [hedge, WON]},
        {"attempts": [failed, WON]},
        {"attempts": [LOST, hedge], "ttft": None, "end": RequestOutcome.CLIENT_GONE},
    )
    assert exported["hedges_total"] == {("chat", "won"): 1, ("chat", "lost"): 2, ("chat", "failed"): 1}


def test_a_hedge_that_won_and_broke_off_has_won() -> None:
    """The race is about the first token."""
    won = replace(WON, kind=AttemptKind.HEDGE, ending=AttemptOutcome.BROKEN)
    assert Exported({"attempts": [LOST, won], "end": RequestOutcome.UPSTREAM_BROKE})["hedges_total"] == {
        ("chat", "won"): 1
    }


def test_unanswered_requests_count_no_tokens() -> None:
    """Only answered requests have tokens; attempts and what they cost are counted anyway."""
    exported = Exported({"ttft": None, "tpot": None, "end": RequestOutcome.FAILED, "attempts": [LOST]})
    names = ("ttft_seconds_count", "tpot_seconds_count", "tokens_total", "prefix_hit_ratio_count")
    assert [exported[name] for name in names] == [{}] * len(names)
    assert exported["attempts_total"] == {("small", "eu", "primary", "silent"): 1}
    assert exported["cost_usd_total"] == {("chat", "small"): 0.001}


def test_an_engine_that_does_not_report_is_counted_by_the_estimate() -> None:
    """And says nothing about prefix hits."""
    exported = Exported({"prompt_tokens_reported": None, "cached_tokens_reported": None, "output_tokens": None})
    assert exported["tokens_total"] == {("chat", "small", "input"): 100, ("chat", "small", "output"): 0}
    assert exported["prefix_hit_ratio_count"] == {("small", "predicted"): 1}


def test_whole_answers_do_not_count_for_predictions() -> None:
    """A first byte is not a first token: the engine sends the first byte with the last."""
    exported = Exported({"stream": False})
    assert exported["ttft_seconds_count"] == {("chat", "small"): 1}
    names = ("prediction_error_seconds_count", "prediction_covered_total", "predicted_seconds_count")
    assert [exported[f"ttft_{name}"] for name in (*names, "by_prompt_seconds_count")] == [{}] * 4


def test_prediction_metrics_show_error_and_coverage() -> None:
    """Prediction, error, and coverage of each quantile: the bound counts as covered."""
    exported = Exported(
        {"ttft_predicted_p50": 0.2, "ttft_predicted_p90": 0.3}, {"ttft_predicted_p50": 0.1, "ttft_predicted_p90": 0.15}
    )
    assert exported["ttft_predicted_seconds_sum"] == {("small",): pytest.approx(0.3)}
    late = [s for s in exported.samples("ttft_prediction_error_seconds_bucket") if s.labels["le"] in ("0.0", "0.1")]
    assert [s.value for s in late] == [1, 2]
    assert exported["ttft_prediction_covered_total"] == {
        ("small", quantile, covered): 1 for quantile in ("p50", "p90") for covered in ("true", "false")
    }


def test_the_calibration_of_whole_answers_is_counted_by_route() -> None:
    """Of completed answers, streamed or not, that were forecast."""
    forecast = {"total_predicted_p50": 0.9, "total_predicted_p90": 2.0, "total": 1.0}
    exported = Exported(
        forecast, {**forecast, "stream": False}, {**forecast, "end": RequestOutcome.CLIENT_GONE}, {"total": 1.0}
    )
    assert exported["total_prediction_covered_total"] == {("chat", "p50", "false"): 2, ("chat", "p90", "true"): 2}


def test_an_engines_own_times_are_parts_beside_the_stages() -> None:
    """Parts of `upstream` are left out of the sum of stages."""
    exported = Exported({"engine_queue": 0.02, "engine_prefill": 0.15})
    assert exported["stage_seconds_sum"] == {
        ("chat", "read"): 0.001,
        ("chat", "upstream"): 0.19,
        ("chat", "stream"): 0.8,
        ("chat", "engine_queue"): 0.02,
        ("chat", "engine_prefill"): 0.15,
    }


# --------------------------------------------------------------------------- buckets and labels


def test_a_routes_budget_is_a_bucket() -> None:
    """Attainment is read exactly: met budgets are below the bound, near misses above."""
    exported = Exported({"ttft": 0.8}, {"ttft": 0.8000001}, {"ttft": 0.1})
    within = [s.value for s in exported.samples("ttft_seconds_bucket") if s.labels["le"] == "0.8"]
    assert within == [2.0]
    assert exported["slo_total"]["chat", "ttft", "true"] == 2


@pytest.mark.parametrize(
    ("family", "limits"),
    [
        ("ttft", (60.0, API_FIRST_TOKEN, WHOLE_ANSWER)),
        ("served_ttft", (60.0, API_FIRST_TOKEN)),
        ("reasoning", (60.0, API_FIRST_TOKEN)),
        ("answer", (60.0, API_FIRST_TOKEN)),
        ("by_prompt", (60.0, API_FIRST_TOKEN)),
        ("predicted", (60.0, API_FIRST_TOKEN)),
        ("stage", (60.0, API_FIRST_TOKEN, WHOLE_ANSWER)),
        ("error", (60.0, API_FIRST_TOKEN)),
        ("longest_gap", (30.0, API_STREAM_IDLE)),
        ("tpot", (30.0, API_STREAM_IDLE)),
    ],
)
def test_buckets_reach_the_limits_that_the_defaults_allow(family: str, limits: tuple[float, ...]) -> None:
    """A quantile of a slow route is no constant: each limit of time ends a bucket, and another one is below."""
    bounds = getattr(RequestMetrics(CollectorRegistry(), []), family).bounds
    assert {*limits} <= {*bounds}
    assert all(any(limit / 6 < bound < limit for bound in bounds) for limit in limits)


def test_budgets_join_the_usual_buckets_in_order() -> None:
    """Each budget is a bucket once, also where a default bucket equals it; routes without a budget add none."""
    routes = [ROUTE, route("a", ttft={"budget": "800ms"}), route("b", ttft={"budget": "1s"}), route("c")]
    metrics = RequestMetrics(CollectorRegistry(), routes)
    assert metrics.ttft.bounds == metrics.by_prompt.bounds == tuple(sorted({*TTFT_BOUNDS, 0.8}))


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.one_of(st.floats(0.0, 3.0), st.sampled_from([0.7, 0.8, 1.1, 0.7000000001, 1.0999999])),
            st.booleans(),
            st.sampled_from(["chat", "agent", "autocomplete"]),
            st.sampled_from([10, 999, 1_000, 20_000, 90_000]),
        ),
        max_size=60,
    )
)
def test_attainment_by_the_bucket_is_attainment_by_the_verdict(
    answers: list[tuple[float, bool, str, int]],
) -> None:
    """Exact for answered streams of every route; answers without streaming are in neither."""
    routes = [route(name, ttft={"budget": f"{ms}ms"}) for name, ms in BUDGETS.items()]
    exported = Exported(routes=routes)
    for ttft, stream, name, tokens in answers:
        known = {"ttft": ttft, "stream": stream, "route": name, "prompt_tokens_reported": tokens}
        exported.metrics(record(**FULL | known | {"ttft_budget": BUDGETS[name] / 1e3}))
    slo, buckets = exported["slo_total"], exported.samples("ttft_by_prompt_seconds_bucket")
    for name, ms in BUDGETS.items():
        within = [s.value for s in buckets if (s.labels["route"], s.labels["le"]) == (name, f"{ms / 1e3:g}")]
        all_of_them = [s.value for s in buckets if (s.labels["route"], s.labels["le"]) == (name, "+Inf")]
        met, missed = (slo.get((name, "ttft", verdict), 0) for verdict in ("true", "false"))
        assert (sum(within), sum(all_of_them)) == (met, met + missed)


def test_the_ttft_histogram_of_a_streaming_route_shows_attainment() -> None:
    """By pool; a request without an answer is a miss in no bucket."""
    exported = Exported(
        {"ttft": 0.8},
        {"ttft": 0.3, "pool": "large"},
        {"ttft": 0.8000001},
        {"ttft": None, "end": RequestOutcome.SHED, "tpot": None},
    )
    buckets = exported.samples("ttft_seconds_bucket")
    assert (
        sum(s.value for s in buckets if s.labels["le"] == "0.8") == exported["slo_total"]["chat", "ttft", "true"] == 2
    )
    assert sum(s.value for s in buckets if s.labels["le"] == "+Inf") == 3
    assert exported["slo_total"]["chat", "ttft", "false"] == 2


async def test_attainment_is_exact_over_sockets_too() -> None:
    """Histogram and verdict use the same number as the budget."""
    routes = {"chat": {"tiers": ["only"], "ttft": {"budget": "137ms"}}}
    async with Upstream(*[[STREAMED]] * 8) as upstream, running({"only": pool(upstream.url)}, routes) as gateway:
        for _ in range(8):
            async with calling(gateway.url) as caller:
                await caller.ask(post({**CHAT, "stream": True}, "connection: close"))
                await caller.rest()
        assert [r.budgets.ttft for r in gateway.recorder.recent] == [0.137] * 8
        page = generate_latest(gateway.admin.registry).decode()
    met = re.search(r'firsttoken_slo_total\{met="true",objective="ttft",route="chat"\} ([\d.]+)', page)
    within = re.search(r'firsttoken_ttft_seconds_bucket\{le="0.137",pool="only",route="chat"\} ([\d.]+)', page)
    assert within is not None
    assert float(within[1]) == (float(met[1]) if met else 0.0)


def test_requests_that_wait_at_a_reload_are_counted_under_the_labels_before() -> None:
    """They were served by the model before; those that end later are counted under the new one."""
    exported = Exported()
    exported.metrics.reload((), ServedLabels({"small": "qwen"}, ()))
    exported.metrics.flush = lambda: exported.metrics(record(**FULL | {"tenant": "web"}))
    exported.metrics.reload((), ServedLabels({"small": "llama"}, {"web"}))
    exported.metrics.flush = lambda: None
    exported.metrics(record(**FULL | {"tenant": "web"}))
    counts = {(s.labels["model"], s.labels["key"]): s.value for s in exported.samples("served_ttft_seconds_count")}
    assert counts == {("qwen", ""): 1, ("llama", "web"): 1}


def test_other_budgets_are_buckets_from_then_on() -> None:
    """Earlier counts stay, and are not taken to be within a new bound; no bound goes away."""
    exported = Exported({"ttft": 0.6}, {"ttft": 0.1}, {"ttft": 0.6, "trace_id": "a" * 32})
    exported.metrics.reload([route(ttft={"budget": "650ms"})])
    exported.metrics(record(**FULL | {"ttft": 0.6}))
    for name in ("ttft_seconds", "ttft_by_prompt_seconds"):
        found = {s.labels["le"]: s.value for s in exported.samples(f"{name}_bucket")}
        assert [found[le] for le in ("0.5", "0.65", "0.75", "0.8", "+Inf")] == [1, 2, 4, 4, 4]
    (shown,) = [s for s in exported.samples("ttft_seconds_bucket") if s.exemplar]
    assert shown.labels["le"] == "0.75"


@pytest.mark.parametrize(
    ("tokens", "size"),
    [
        (0, "<1k"),
        (999, "<1k"),
        (1_000, "1k-4k"),
        (3_999, "1k-4k"),
        (4_000, "4k-16k"),
        (16_000, "16k-64k"),
        (64_000, ">64k"),
    ],
)
def test_ttft_is_shown_by_the_size_of_the_prompt(tokens: int, size: str) -> None:
    """As counted by the engine, else as estimated by the gateway."""
    reported = {"prompt_tokens_reported": tokens, "prompt_tokens_estimated": 5}
    for known in (reported, {"prompt_tokens_reported": None, "prompt_tokens_estimated": tokens}):
        assert [*Exported(known)["ttft_by_prompt_seconds_count"]] == [("chat", size)]
    assert size in PROMPTS


def test_the_children_of_a_metric_are_made_once() -> None:
    """The request path looks series up without building labels."""
    series = Counter("firsttoken_requests", "", "route", "pool")
    assert series.of["chat", "small"] is series.of["chat", "small"]
    assert series.of["chat", "large"] is not series.of["chat", "small"]


def test_a_series_appears_with_its_first_sample() -> None:
    """A histogram of zeros would suggest a measurement."""
    registry = CollectorRegistry()
    series = Histogram("x_seconds", "x", "route", bounds=(1.0,))
    registry.register(series)
    seen, _ = series.of[("chat",)], series.of[("batch",)]
    seen.observe(0.5)
    assert registry.get_sample_value("x_seconds_count", {"route": "chat"}) == 1
    assert registry.get_sample_value("x_seconds_count", {"route": "batch"}) is None


def test_a_histogram_equals_that_of_prometheus_client() -> None:
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


async def test_hostile_callers_cannot_create_series() -> None:
    """Models, request ids, headers, keys and traces, in every script and with control characters: all are counted,
    none
    becomes a label."""
    odd = [f"{text}-{i}" for i in range(20) for text in ODD]
    assert len(odd) == 200
    async with Upstream(*[[STREAMED]] * 500) as upstream:
        pools = {"only": pool(upstream.url)}
        keys = [{"name": "k", "sha256": hashlib.sha256(b"sk-known").hexdigest()}]
        async with running(pools, passthrough="only", keys=keys) as gateway:
            counted = []
            for names in (["plain"], odd):
                for name in names:
                    for key in (name, "sk-known"):
                        await ask_as(gateway, name, key)
                await eventually(lambda: not gateway.recorder.live)
                for accept in ("text/plain", OPENMETRICS):
                    page = (await get(gateway.admin_url, "/metrics", f"accept: {accept}"))[2].decode()
                    counted.append({series(line) for line in page.splitlines() if line.startswith(CALLERS)})
            assert [before ^ after for before, after in zip(counted[:2], counted[2:], strict=True)] == [set(), set()]
            assert gateway.recorder.recent[-1].end is RequestOutcome.COMPLETED
            total = sum(s.value for f in gateway.admin.registry.collect() for s in f.samples if s.name == REQUESTS)
            assert total == 2 * 201


REQUESTS = "firsttoken_requests_total"
CHANCE = ("firsttoken_loop_", "firsttoken_ttft_prediction_covered_total")  # names of the series shown
CALLERS = tuple(name for name in CATALOG if not name.startswith(CHANCE))
ODD = (
    "../../etc",
    "\u043c\u043e\u0434",
    "型",
    "a b",
    'x"} 1\n',
    "\u202eevil",
    "{}",
    "\x7f",
    "<script>",
    "firsttoken_ttft_seconds",
)


def series(line: str) -> str:
    """Name and labels, without value and exemplar."""
    return line.partition(" # ")[0].rpartition(" ")[0]


async def ask_as(gateway: Gateway, name: str, key: str) -> None:
    """Uses the name in every place that a caller controls."""
    said, key = ("".join(c for c in text if c.isprintable()) for text in (name, key))
    headers = [
        f"{header}: {said}" for header in ("x-request-id", "x-session-id", "traceparent", "user-agent", "cookie")
    ]
    body = {**CHAT, "model": name, "user": name, "stream": True, "metadata": {name: name}}
    async with calling(gateway.url) as caller:
        caller.writer.write(post(body, f"authorization: Bearer {key}", *headers, "connection: close"))
        await caller.rest()


async def test_no_caller_can_mint_a_series() -> None:
    """Two thousand names of models, ids, sessions and headers leave as many series as the first few."""

    def hostile(i: int, *headers: str) -> bytes:
        body = {**CHAT, "model": f"model-{i}", "user": f"user-{i}", "stream": True}
        return post(body, f"x-request-id: id-{i}", f"x-session-id: s-{i}", f"x-priority: {i}", f"x-{i}: {i}", *headers)

    async def ask(gateway: Gateway, names: Sequence[int], status: bytes) -> int:
        """Number of series after sequential requests on one connection."""
        async with calling(gateway.url) as caller:
            caller.writer.write(b"".join(map(hostile, names[:-1])) + hostile(names[-1], "connection: close"))
            assert (await caller.rest()).count(b"HTTP/1.1 " + status) == len(names)
        return len(generate_latest(gateway.admin.registry).splitlines())

    async with Upstream([STREAM_HEAD + chunk(ANSWER) + LAST_CHUNK]) as upstream:
        pools = {"only": pool(upstream.url)}
        async with running(pools) as closed, running(pools, passthrough="only") as through:
            await eventually(
                lambda: all(any(each.core.metrics.loop_lag.seconds.of[()].counts) for each in (closed, through))
            )
            refused = {await ask(closed, range(i, i + 500), b"404") for i in range(0, 2_000, 500)}
            passed = {await ask(through, range(i, i + 100), b"200") for i in range(0, 500, 100)}
    assert (len(refused), len(passed)) == (1, 1)


# --------------------------------------------------------------------------- exemplars

OPENMETRICS = "application/openmetrics-text; version=1.0.0"
TRACE = "0af7651916cd43dd8448eb211c80319c"


def test_a_bucket_names_the_latest_trace_that_fell_into_it() -> None:
    """In OpenMetrics; a request without a trace keeps the last exemplar."""
    exported = Exported(
        {"trace_id": "1" * 32, "ttft": 0.3, "wall": 100.0},
        {"trace_id": TRACE, "ttft": 0.4, "wall": 200.0},
        {"ttft": 0.45},
        {"trace_id": "2" * 32, "ttft": 700.0, "wall": 300.0},
    )
    page = openmetrics.generate_latest(exported.registry).decode()
    shown = {s.labels["le"]: s.exemplar for s in samples_of(page, "firsttoken_ttft_seconds_bucket") if s.exemplar}
    assert {le: (e.labels, e.value, float(e.timestamp)) for le, e in shown.items()} == {
        "0.5": ({"trace_id": TRACE}, 0.4, pytest.approx(200.4)),
        "+Inf": ({"trace_id": "2" * 32}, 700.0, 1000.0),
    }
    assert page.count("# {") == 2


@pytest.mark.parametrize(("sampled", "ttft", "shown"), [(True, 0.4, 1), (False, 0.4, 0), (False, 0.9, 1)])
def test_exemplars_name_exported_traces_only(sampled: bool, ttft: float, shown: int) -> None:
    """A late request is exported though not sampled."""
    exported = Exported({"trace_id": TRACE, "trace": Trace(TRACE, 1, sampled), "ttft": ttft})
    assert openmetrics.generate_latest(exported.registry).count(b"# {") == shown


def test_the_text_format_has_no_exemplars() -> None:
    """The text format has no exemplars, and parsers would fail."""
    assert b"# {" not in generate_latest(Exported({"trace_id": TRACE}).registry)


def samples_of(page: str, name: str) -> list[Sample]:
    return [s for family in text_string_to_metric_families(page) for s in family.samples if s.name == name]


@pytest.mark.parametrize(
    ("traceparent", "known"),
    [
        (f"00-{TRACE}-b7ad6b7169203331-01", TRACE),
        (f"00-{TRACE}-b7ad6b7169203331-00", TRACE),
        (f"cc-{TRACE}-b7ad6b7169203331-01-what-the-future-will-be-like", TRACE),
        (f"ff-{TRACE}-b7ad6b7169203331-01", ""),
        (f"00-{'0' * 32}-b7ad6b7169203331-01", ""),
        (f"00-{TRACE}-{'0' * 16}-01", ""),
        (f"00-{TRACE.upper()}-b7ad6b7169203331-01", ""),
        ('00-"} 1', ""),
        ("", ""),
    ],
)
async def test_an_exemplar_has_the_callers_trace_id(traceparent: str, known: str) -> None:
    """32 hex digits and nothing else gets into an exemplar."""
    headers = f"traceparent: {traceparent}", "connection: close"
    async with conversing([STREAMED]) as (gateway, caller, _):
        await caller.ask(post({**CHAT, "stream": True}, *headers))
        await caller.rest()
        assert [r.trace_id for r in gateway.recorder.recent] == [known]
        page = (await get(gateway.admin_url, "/metrics", f"accept: {OPENMETRICS}"))[2].decode()
    shown = [s.exemplar for s in samples_of(page, "firsttoken_ttft_seconds_bucket") if s.exemplar]
    assert [e.labels for e in shown] == ([{"trace_id": known}] if known else [])


# --------------------------------------------------------------------------- the fleet


def test_the_queue_is_read_when_prometheus_asks() -> None:
    """Every route has a series, also with an empty queue."""
    registry = CollectorRegistry()
    registry.register(GatewayCollector(lambda: [ROUTE, route("agent")], depth=lambda: {"chat": 3}))
    depth = [registry.get_sample_value("firsttoken_queue_depth", {"route": name}) for name in ("chat", "agent")]
    assert depth == [3, 0]


def test_routes_expose_budget_and_target() -> None:
    """The line in a dashboard; routes without a budget have none."""
    registry = CollectorRegistry()
    registry.register(GatewayCollector(lambda: [route("agent"), route(ttft={"budget": "800ms", "target": 0.9})]))
    samples = [s for family in registry.collect() for s in family.samples if s.name.startswith("firsttoken_route_")]
    assert {s.name: (s.labels, s.value) for s in samples} == {
        "firsttoken_route_ttft_budget_seconds": ({"route": "chat"}, 0.8),
        "firsttoken_route_ttft_target_ratio": ({"route": "chat"}, 0.9),
    }


def test_engine_loads_are_exposed_as_reported() -> None:
    """Beside the gateway's own counts; a missing value is absent, not 0."""
    registry = CollectorRegistry()
    told = {"small/a": EngineLoad(running=4, waiting=2, kv_usage=0.5), "small/b": EngineLoad(running=0)}
    registry.register(EndpointCollector(lambda _: "small", lambda: {name: Load() for name in told}, lambda: told))
    found = {s.name.removeprefix("firsttoken_endpoint_"): [] for family in registry.collect() for s in family.samples}
    for family in registry.collect():
        for s in family.samples:
            found[s.name.removeprefix("firsttoken_endpoint_")].append((s.labels["endpoint"], s.value))
    assert found["running"] == [("small/a", 4.0), ("small/b", 0.0)]
    assert (found["waiting"], found["kv_usage_ratio"]) == ([("small/a", 2.0)], [("small/a", 0.5)])


def test_version_and_requests_in_progress_are_exposed() -> None:
    registry = CollectorRegistry()
    registry.register(GatewayCollector(list, live=lambda: 7))
    assert registry.get_sample_value("firsttoken_requests_in_progress") == 7
    (info,) = [s for family in registry.collect() for s in family.samples if s.name == "firsttoken_build_info"]
    assert ([*info.labels], info.value) == (["version"], 1.0)
    assert info.labels["version"]


@pytest.mark.parametrize(("health", "state"), [(Health.UP, 1.0), (Health.PROBING, 0.5), (Health.DOWN, 0.0)])
def test_endpoints_are_read_when_prometheus_asks(health: Health, state: float) -> None:
    """No series is kept up per request; the ledger is the truth."""
    loads = {"a": Load(in_flight=3, queued_tokens=1200.0, health=health), "b": Load()}
    registry = CollectorRegistry()
    pool_of = {"a": "small", "b": "large"}.__getitem__
    registry.register(EndpointCollector(pool_of, lambda: loads, rtts=lambda: {"a": 0.07}))
    value = registry.get_sample_value
    labels = {"pool": "small", "endpoint": "a"}
    assert value("firsttoken_endpoint_in_flight", labels) == 3
    assert value("firsttoken_endpoint_uncached_tokens_ahead", labels) == 1200
    assert value("firsttoken_endpoint_state", labels) == state
    assert value("firsttoken_endpoint_state", {"pool": "large", "endpoint": "b"}) == 1
    assert value("firsttoken_endpoint_rtt_seconds", labels) == 0.07
    assert value("firsttoken_endpoint_rtt_seconds", {"pool": "large", "endpoint": "b"}) is None  # not measured
    loads.pop("a")
    assert value("firsttoken_endpoint_in_flight", labels) is None


async def test_requests_are_told_apart_by_model_region_and_the_keys_that_are_listed() -> None:
    """Labels are of the configuration: neither the name that a caller gives a model, nor a key that is not listed."""
    keys = [{"name": name, "sha256": hashlib.sha256(name.encode()).hexdigest()} for name in ("team-a", "team-b")]
    more: dict[str, Any] = {"keys": keys, "telemetry": {"access_log": "off", "label_keys": ["team-a"]}}
    async with Upstream([STREAMED]) as engine:
        pools = {"only": {**pool(engine.url), "endpoints": [{"url": engine.url, "region": "eu"}], "model": "qwen"}}
        async with running(pools, {"chat": {"tiers": ["only"], "ttft": {"budget": "20s"}}}, **more) as gateway:
            for name in ("team-a", "team-b"):
                async with calling(gateway.url) as caller:
                    await caller.ask(post({**CHAT, "stream": True}, f"authorization: Bearer {name}"))
                    await caller.chunks()
            await eventually(lambda: len(gateway.recorder.recent) == 2)
            read = gateway.registry.get_sample_value
            place = {"model": "qwen", "region": "eu"}
            for key in ("team-a", ""):
                counted = {**place, "key": key, "route": "chat", "goodput": "met"}
                assert read("firsttoken_served_total", counted) == 1
                assert read("firsttoken_served_ttft_seconds_count", {**place, "key": key}) == 1
            sent = {"pool": "only", "region": "eu", "kind": "primary", "outcome": "completed"}
            assert read("firsttoken_attempts_total", sent) == 2
            page = (await get(gateway.admin_url, "/metrics"))[2]
    assert b"team-b" not in page
