"""Queries of all panels and rules return data from a real Prometheus with a live gateway as target."""

from __future__ import annotations

import asyncio
import math
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from tests.support.dashboards import DEPLOY, RULES, LocatedQuery, of_panels, of_rules, of_variables
from tests.support.live_gateway import ROUTES, live_gateway
from tests.support.prometheus import Prometheus, program, scraping

TIMEOUT = 30.0  # s, until every query has returned data
Samples = list[tuple[dict[str, str], float]]

EXPECTED = [*of_panels(), *of_variables(), *of_rules("record")]
ATTAINMENT = next(query.expr for query in EXPECTED if str(query) == "routes: TTFT attainment: A")


@dataclass(frozen=True)
class Results:
    """Final results from Prometheus."""

    answers: Mapping[str, Samples]
    rules: Mapping[str, str]  # name -> health
    targets: list[str]  # health
    page: str  # /metrics


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    program("prometheus")
    return asyncio.run(_collect(tmp_path_factory.mktemp("prometheus")))


async def _collect(folder: Path) -> Results:
    """Polls until all queries have returned data or the time is up; the tests report missing data."""
    async with live_gateway(folder) as gateway, scraping(gateway.admin, folder) as prometheus:
        answers = await _poll(prometheus)
        rules = (await prometheus.get("rules"))["groups"]
        targets = (await prometheus.get("targets"))["activeTargets"]
        async with aiohttp.ClientSession() as session, session.get(f"{gateway.admin}/metrics") as reply:
            page = await reply.text()
        return Results(
            answers,
            {rule["name"]: rule["health"] for group in rules for rule in group["rules"]},
            [target["health"] for target in targets],
            page,
        )


async def _poll(prometheus: Prometheus) -> dict[str, Samples]:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + TIMEOUT
    answers: dict[str, Samples] = {}
    pending = {query.expr for query in EXPECTED if not query.waits}
    while pending and loop.time() < deadline:
        await asyncio.sleep(0.5)
        for expr in sorted(pending):
            answers[expr] = await prometheus.values(expr)
        pending = {expr for expr in pending if not _complete(expr, answers[expr])}
    answers.update({query.expr: await prometheus.values(query.expr) for query in EXPECTED if query.waits})
    return answers


def _complete(expr: str, found: Samples) -> bool:
    """True for any data; for attainment, only with data of every route, because some routes have little traffic."""
    return bool(_finite(found)) and (expr != ATTAINMENT or {labels["route"] for labels, _ in found} == set(ROUTES))


def _finite(found: Samples) -> Samples:
    return [(labels, value) for labels, value in found if math.isfinite(value)]


@pytest.mark.parametrize("query", EXPECTED, ids=str)
def test_every_query_returns_data(results: Results, query: LocatedQuery) -> None:
    """Or its panel says what it waits for. Only a quantile of an empty histogram may be NaN; all other values are
    finite."""
    found = results.answers[query.expr]
    assert _finite(found) or query.waits
    if "histogram_quantile" not in query.expr:
        assert _finite(found) == found


def test_prometheus_evaluates_every_rule(results: Results) -> None:
    """Every rule has health "ok"."""
    assert results.rules == dict.fromkeys([rule.get("record") or rule["alert"] for rule in RULES], "ok")
    assert results.targets == ["up"]


def test_shares_are_between_zero_and_one(results: Results) -> None:
    """A ratio of mismatched series would leave the range, or not sum to 1."""
    by_location = {str(query): results.answers[query.expr] for query in EXPECTED}
    for location in (
        "routes: TTFT attainment: A",
        "routes: Refused for lack of capacity: A",
        "pools: Prefix hit rate: B",
    ):
        assert all(0 <= value <= 1 for _, value in by_location[location]), location
    assert sum(value for _, value in by_location["routes: Tier share: A"]) == pytest.approx(1)
    shares = [by_location[f"why-slow: TTFT by cause: {letter}"] for letter in "ABCDEFG"]
    assert sum(value for found in shares for _, value in found) == pytest.approx(1, abs=0.05)


def test_attainment_is_shown_for_every_route_with_a_budget(results: Results) -> None:
    """And for no other route; attainment is 0 on the route without an endpoint."""
    attained = {labels["route"]: value for labels, value in results.answers[ATTAINMENT]}
    assert set(attained) == set(ROUTES)
    assert attained["gone"] == 0
    assert attained["chat"] > 0


def test_promtool_has_no_complaint_about_the_metrics(results: Results) -> None:
    """Names, units, types, help, labels."""
    assert "firsttoken_ttft_prediction_covered_total{" in results.page
    run_promtool("check", "metrics", given=results.page)


def test_promtool_accepts_the_rules_and_the_configuration() -> None:
    """In the configuration mounted by compose."""
    rules = sorted((DEPLOY / "helm/firsttoken/files/rules").glob("*.yml"))
    run_promtool("check", "rules", *map(str, rules))
    run_promtool("check", "config", str(DEPLOY / "prometheus/prometheus.yml"))


@pytest.mark.parametrize("path", sorted((DEPLOY / "prometheus/tests").glob("*.yml")), ids=lambda path: path.stem)
def test_alert_rules_pass_promtool_tests(path: Path) -> None:
    """Each alert fires, does not fire at its limit, and resolves."""
    run_promtool("test", "rules", str(path))


def test_every_alert_has_a_test() -> None:
    """Each alert name appears in one of the test files."""
    text = "".join(path.read_text("utf-8") for path in (DEPLOY / "prometheus/tests").glob("*.yml"))
    alerts = {query.where for query in of_rules("alert")}
    assert {name for name in alerts if f'alertname="{name}"' not in text} == set()


def run_promtool(*arguments: str, given: str = "") -> None:
    command = [program("promtool"), *arguments]
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
