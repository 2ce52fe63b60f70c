"""Every query of every panel and rule returns data, from a real Prometheus that scrapes a live gateway."""

from __future__ import annotations

import asyncio
import math
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.deploy.dashboards import DEPLOY, RULES, Asked, of_panels, of_rules, of_variables
from tests.deploy.scene import ROUTES, played
from tests.support.prometheus import Prometheus, program, scraping

WITHIN = 30.0  # s, until every query has had an answer
Found = list[tuple[dict[str, str], float]]

EXPECTED = [*of_panels(), *of_variables(), *of_rules("record")]
ATTAINMENT = next(asked.expr for asked in EXPECTED if str(asked) == "routes: TTFT attainment: A")


@dataclass(frozen=True)
class Seen:
    """What Prometheus said in the end."""

    answers: Mapping[str, Found]
    rules: Mapping[str, str]  # name -> health
    targets: list[str]  # health


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    program("prometheus")
    return asyncio.run(_watched(tmp_path_factory.mktemp("prometheus")))


async def _watched(folder: Path) -> Seen:
    """Asks until everything was answered, or the time is up: what is missing then is for the tests to say."""
    async with played(folder) as gateway, scraping(gateway.admin, folder) as prometheus:
        answers = await _answered(prometheus)
        rules = (await prometheus.get("rules"))["groups"]
        targets = (await prometheus.get("targets"))["activeTargets"]
        return Seen(
            answers,
            {rule["name"]: rule["health"] for group in rules for rule in group["rules"]},
            [target["health"] for target in targets],
        )


async def _answered(prometheus: Prometheus) -> dict[str, Found]:
    loop = asyncio.get_running_loop()
    ends = loop.time() + WITHIN
    answers: dict[str, Found] = {}
    open_ = {asked.expr for asked in EXPECTED}
    while open_ and loop.time() < ends:
        await asyncio.sleep(0.5)
        for expr in sorted(open_):
            answers[expr] = await prometheus.values(expr)
        open_ = {expr for expr in open_ if not _enough(expr, answers[expr])}
    return answers


def _enough(expr: str, found: Found) -> bool:
    """Something; of attainment, of every route, some of which are seldom asked for."""
    return bool(_finite(found)) and (expr != ATTAINMENT or {labels["route"] for labels, _ in found} == set(ROUTES))


def _finite(found: Found) -> Found:
    return [(labels, value) for labels, value in found if math.isfinite(value)]


@pytest.mark.parametrize("asked", EXPECTED, ids=str)
def test_every_query_returns_data(seen: Seen, asked: Asked) -> None:
    """Not a number is what a quantile of nothing is; for all else, nothing but numbers will do."""
    found = seen.answers[asked.expr]
    assert _finite(found)
    if "histogram_quantile" not in asked.expr:
        assert _finite(found) == found


def test_prometheus_evaluates_every_rule(seen: Seen) -> None:
    """All of them, and without an error."""
    assert seen.rules == dict.fromkeys([rule.get("record") or rule["alert"] for rule in RULES], "ok")
    assert seen.targets == ["up"]


def test_shares_lie_between_nothing_and_all(seen: Seen) -> None:
    """A ratio of the wrong series gives itself away."""
    by_where = {str(asked): seen.answers[asked.expr] for asked in EXPECTED}
    for where in ("routes: TTFT attainment: A", "routes: Refused for lack of capacity: A", "pools: Prefix hit rate: B"):
        assert all(0 <= value <= 1 for _, value in by_where[where]), where
    assert sum(value for _, value in by_where["routes: Tier share: A"]) == pytest.approx(1)
    shares = [by_where[f"why-slow: Who had the time: {letter}"] for letter in "ABCDEFG"]
    assert sum(value for found in shares for _, value in found) == pytest.approx(1, abs=0.05)


def test_attainment_is_shown_for_every_route_with_a_budget(seen: Seen) -> None:
    """And for none that does not exist; nothing was met on the one that has no endpoint."""
    attained = {labels["route"]: value for labels, value in seen.answers[ATTAINMENT]}
    assert set(attained) == set(ROUTES)
    assert attained["gone"] == 0
    assert attained["chat"] > 0


def test_promtool_finds_no_fault_with_the_rules() -> None:
    """Nor with the configuration that compose mounts."""
    rules = sorted((DEPLOY / "prometheus/rules").glob("*.yml"))
    checked("check", "rules", *map(str, rules))
    checked("check", "config", str(DEPLOY / "prometheus/prometheus.yml"))


@pytest.mark.parametrize("path", sorted((DEPLOY / "prometheus/tests").glob("*.yml")), ids=lambda path: path.stem)
def test_the_rules_pass_their_tests(path: Path) -> None:
    """Each alert fires, stays silent at its edge, and ends."""
    checked("test", "rules", str(path))


def test_every_alert_has_a_test() -> None:
    """By name, in one of the files."""
    text = "".join(path.read_text("utf-8") for path in (DEPLOY / "prometheus/tests").glob("*.yml"))
    alerts = {asked.where for asked in of_rules("alert")}
    assert {name for name in alerts if f'alertname="{name}"' not in text} == set()


def checked(*arguments: str) -> None:
    done = subprocess.run([program("promtool"), *arguments], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
