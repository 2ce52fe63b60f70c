"""The dashboards, as far as they can be judged without Grafana: their shape, and that their queries are PromQL."""

from __future__ import annotations

import re
from itertools import combinations
from typing import Any

import promql_parser
import pytest

from deploy.grafana import generate
from tests.deploy.dashboards import (
    DASHBOARDS,
    DEPLOY,
    RULES,
    Asked,
    of_annotations,
    of_panels,
    of_rules,
    of_variables,
    panels,
)

PANELS = [
    pytest.param(panel, id=f"{name}: {panel['title']}") for name, board in DASHBOARDS.items() for panel in panels(board)
]
QUERIES = [*of_panels(), *of_variables(), *of_annotations(), *of_rules("record"), *of_rules("alert")]
KINDS = {"timeseries", "stat", "table", "bargauge", "heatmap", "state-timeline"}
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
AGGREGATED = re.compile(r"by \(([^)]*)\)")


def test_the_files_are_what_the_generator_writes() -> None:
    """`make dashboards` writes them; nobody edits them by hand."""
    assert {path.name: path.read_text("utf-8") for path in generate.FOLDER.glob("*.json")} == {
        path.name: text for path, text in generate.files().items()
    }


def test_each_dashboard_has_a_name_of_its_own_that_stays() -> None:
    """Bookmarks, links and alerts hold on to the uid."""
    assert {name: board["uid"] for name, board in DASHBOARDS.items()} == {
        "routes": "firsttoken-routes",
        "pools": "firsttoken-pools",
        "why-slow": "firsttoken-why-slow",
    }


@pytest.mark.parametrize("name", DASHBOARDS)
def test_a_dashboard_leads_to_the_others_with_what_was_chosen(name: str) -> None:
    """By the tag that all of them bear."""
    board = DASHBOARDS[name]
    (link,) = board["links"]
    assert (link["type"], link["includeVars"], link["keepTime"]) == ("dashboards", True, True)
    assert set(link["tags"]) <= set(board["tags"])


@pytest.mark.parametrize("name", DASHBOARDS)
def test_a_dashboard_asks_for_data_source_route_and_pool(name: str) -> None:
    """Choosing all of them is where it begins."""
    variables = {variable["name"]: variable for variable in DASHBOARDS[name]["templating"]["list"]}
    assert {"datasource", "job", "route", "pool"} == set(variables)
    for variable in (variables["job"], variables["route"], variables["pool"]):
        assert variable["multi"]
        assert variable["current"]["value"] == "$__all"
        assert variable["datasource"] == SOURCE


@pytest.mark.parametrize("name", DASHBOARDS)
def test_panels_have_numbers_of_their_own(name: str) -> None:
    """Grafana drops one of two that share a number."""
    numbers = [panel["id"] for panel in DASHBOARDS[name]["panels"]]
    assert len(set(numbers)) == len(numbers)


@pytest.mark.parametrize("name", DASHBOARDS)
def test_no_panel_lies_on_another_or_beyond_the_edge(name: str) -> None:
    """24 columns."""
    places = [(panel["title"], panel["gridPos"]) for panel in DASHBOARDS[name]["panels"]]
    assert [title for title, place in places if place["x"] < 0 or place["x"] + place["w"] > 24] == []
    assert [(one, two) for (one, a), (two, b) in combinations(places, 2) if overlap(a, b)] == []


def overlap(a: dict[str, int], b: dict[str, int]) -> bool:
    return all(a[at] < b[at] + b[size] and b[at] < a[at] + a[size] for at, size in (("x", "w"), ("y", "h")))


@pytest.mark.parametrize("panel", PANELS)
def test_a_panel_says_what_it_answers_and_what_to_do(panel: dict[str, Any]) -> None:
    """Two paragraphs, and a unit, and a kind that Grafana has."""
    answers, todo = panel["description"].split("\n\n")
    assert answers
    assert todo
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["type"] in KINDS


@pytest.mark.parametrize("panel", PANELS)
def test_a_panel_asks_the_chosen_data_source(panel: dict[str, Any]) -> None:
    """As a whole and in each query; each query has a letter and a legend."""
    targets = panel["targets"]
    assert targets
    assert [panel["datasource"], *(target["datasource"] for target in targets)] == [SOURCE] * (len(targets) + 1)
    assert len({target["refId"] for target in targets}) == len(targets)
    assert all(target["legendFormat"] for target in targets)


@pytest.mark.parametrize("panel", PANELS)
def test_a_legend_names_only_labels_that_the_query_keeps(panel: dict[str, Any]) -> None:
    """Grafana shows nothing for the others, and two lines would have one name."""
    for target in panel["targets"]:
        named = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        kept = {label.strip() for group in AGGREGATED.findall(target["expr"]) for label in group.split(",")}
        assert named <= kept


@pytest.mark.parametrize("panel", PANELS)
def test_a_panel_heeds_what_was_chosen(panel: dict[str, Any]) -> None:
    """Every selector of our series names at least the gateways; rates are over what the scrapes allow."""
    for target in panel["targets"]:
        selectors = re.findall(r"(?<![:\w])(?:route:)?(?:firsttoken|process)_\w+(?::\w+)?(\{[^}]*\})?", target["expr"])
        assert selectors
        assert all('job=~"$job"' in selector for selector in selectors)
        assert set(re.findall(r"\[([^]]+)\]", target["expr"])) <= {"$__rate_interval", "$__range", "1h"}


@pytest.mark.parametrize("asked", QUERIES, ids=str)
def test_every_query_is_promql(asked: Asked) -> None:
    """By a parser of its own; what it answers is for test_prometheus.py."""
    promql_parser.parse(asked.expr)


@pytest.mark.parametrize("name", [rule["record"] for rule in RULES if "record" in rule])
def test_a_recorded_name_says_over_which_time(name: str) -> None:
    """The window of the name is the window of the query, so that no two are mixed up."""
    (rule,) = [rule for rule in RULES if rule.get("record") == name]
    windows = set(re.findall(r"\[(\w+)\]", rule["expr"])) | set(re.findall(r":\w*?rate(\d+\w)", rule["expr"]))
    assert windows == set(re.findall(r"(?:rate|increase)(\d+\w)$", name))


def test_every_recorded_series_that_is_asked_for_is_recorded() -> None:
    """By a panel, or by another rule."""
    recorded = {rule["record"] for rule in RULES if "record" in rule}
    asked = {name for query in QUERIES for name in re.findall(r"\w+:firsttoken_\w+:\w+", query.expr)}
    assert asked - recorded == set()


@pytest.mark.parametrize("rule", [rule for rule in RULES if "alert" in rule], ids=lambda rule: rule["alert"])
def test_an_alert_says_what_to_do(rule: dict[str, Any]) -> None:
    """A summary, an action, and a runbook that exists; it wakes somebody or it does not."""
    notes = rule["annotations"]
    assert notes["summary"]
    assert notes["action"]
    assert rule["labels"]["severity"] in ("page", "ticket")
    page, _, anchor = notes["runbook"].partition("#")
    headings = re.findall(r"^#+ (.+)$", (DEPLOY.parent / page).read_text("utf-8"), re.MULTILINE)
    assert anchor in {heading.lower() for heading in headings}
    assert anchor == rule["alert"].lower()
