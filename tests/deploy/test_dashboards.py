"""Dashboards, checked without Grafana: layout, variables, and PromQL syntax."""

from __future__ import annotations

import re
from itertools import combinations
from typing import Any

import promql_parser
import pytest

from deploy.grafana import generate
from tests.support.dashboards import (
    DASHBOARDS,
    DEPLOY,
    RULES,
    LocatedQuery,
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


def test_the_dashboard_files_are_up_to_date_with_the_generator() -> None:
    """`make dashboards` generates the files; manual edits are lost."""
    assert {path.name: path.read_text("utf-8") for path in generate.FOLDER.glob("*.json")} == {
        path.name: text for path, text in generate.files().items()
    }


def test_each_dashboard_has_a_stable_uid() -> None:
    """Bookmarks, links and alerts refer to the uid."""
    assert {name: board["uid"] for name, board in DASHBOARDS.items()} == {
        "routes": "firsttoken-routes",
        "pools": "firsttoken-pools",
        "why-slow": "firsttoken-why-slow",
        "why": "firsttoken-why",
    }


@pytest.mark.parametrize("name", DASHBOARDS)
def test_a_dashboard_links_to_the_others_with_its_selection(name: str) -> None:
    """The link selects dashboards by their common tag."""
    board = DASHBOARDS[name]
    (link,) = board["links"]
    assert (link["type"], link["includeVars"], link["keepTime"]) == ("dashboards", True, True)
    assert set(link["tags"]) <= set(board["tags"])


@pytest.mark.parametrize("name", DASHBOARDS)
def test_a_dashboard_has_variables_for_data_source_route_and_pool(name: str) -> None:
    """All values are selected initially."""
    variables = {variable["name"]: variable for variable in DASHBOARDS[name]["templating"]["list"]}
    assert {"datasource", "job", "route", "pool"} == set(variables)
    for variable in (variables["job"], variables["route"], variables["pool"]):
        assert variable["multi"]
        assert variable["current"]["value"] == "$__all"
        assert variable["datasource"] == SOURCE


@pytest.mark.parametrize("name", DASHBOARDS)
def test_panel_ids_are_unique(name: str) -> None:
    """Grafana drops one of two panels with the same id."""
    ids = [panel["id"] for panel in DASHBOARDS[name]["panels"]]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("name", DASHBOARDS)
def test_panels_do_not_overlap_or_exceed_the_grid(name: str) -> None:
    """The grid has 24 columns."""
    places = [(panel["title"], panel["gridPos"]) for panel in DASHBOARDS[name]["panels"]]
    assert [title for title, place in places if place["x"] < 0 or place["x"] + place["w"] > 24] == []
    assert [(one, two) for (one, a), (two, b) in combinations(places, 2) if overlap(a, b)] == []


def overlap(a: dict[str, int], b: dict[str, int]) -> bool:
    return all(a[at] < b[at] + b[size] and b[at] < a[at] + a[size] for at, size in (("x", "w"), ("y", "h")))


@pytest.mark.parametrize("panel", PANELS)
def test_a_panel_states_its_meaning_and_an_action(panel: dict[str, Any]) -> None:
    """Two paragraphs, a unit, and a panel type of Grafana."""
    meaning, action = panel["description"].split("\n\n")
    assert meaning
    assert action
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["type"] in KINDS


@pytest.mark.parametrize("panel", PANELS)
def test_a_panel_queries_the_selected_data_source(panel: dict[str, Any]) -> None:
    """The panel and each query name the data source; each query has a letter and a legend."""
    targets = panel["targets"]
    assert targets
    assert [panel["datasource"], *(target["datasource"] for target in targets)] == [SOURCE] * (len(targets) + 1)
    assert len({target["refId"] for target in targets}) == len(targets)
    assert all(target["legendFormat"] for target in targets)


@pytest.mark.parametrize("panel", PANELS)
def test_a_legend_names_only_labels_of_the_query(panel: dict[str, Any]) -> None:
    """Grafana shows no text for a dropped label, and two lines would have the same name."""
    for target in panel["targets"]:
        named = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        kept = {label.strip() for group in AGGREGATED.findall(target["expr"]) for label in group.split(",")}
        assert named <= kept


@pytest.mark.parametrize("panel", PANELS)
def test_a_panel_applies_the_selected_variables(panel: dict[str, Any]) -> None:
    """Every selector of gateway series filters at least by job; rate windows follow the scrape interval."""
    for target in panel["targets"]:
        selectors = re.findall(r"(?<![:\w])(?:route:)?(?:firsttoken|process)_\w+(?::\w+)?(\{[^}]*\})?", target["expr"])
        assert selectors
        assert all('job=~"$job"' in selector for selector in selectors)
        assert set(re.findall(r"\[([^]]+)\]", target["expr"])) <= {"$__rate_interval", "$__range", "1h"}


@pytest.mark.parametrize("query", QUERIES, ids=str)
def test_every_query_is_promql(query: LocatedQuery) -> None:
    """Parsed by promql-parser; test_prometheus.py evaluates the queries."""
    promql_parser.parse(query.expr)


@pytest.mark.parametrize("name", [rule["record"] for rule in RULES if "record" in rule])
def test_a_recorded_name_states_its_window(name: str) -> None:
    """The window in the name is the window of the query."""
    (rule,) = [rule for rule in RULES if rule.get("record") == name]
    windows = set(re.findall(r"\[(\w+)\]", rule["expr"])) | set(re.findall(r":\w*?rate(\d+\w)", rule["expr"]))
    assert windows == set(re.findall(r"(?:rate|increase)(\d+\w)$", name))


def test_every_queried_recorded_series_has_a_rule() -> None:
    """Queries of panels and of other rules."""
    recorded = {rule["record"] for rule in RULES if "record" in rule}
    queried = {name for query in QUERIES for name in re.findall(r"\w+:firsttoken_\w+:\w+", query.expr)}
    assert queried - recorded == set()


@pytest.mark.parametrize("rule", [rule for rule in RULES if "alert" in rule], ids=lambda rule: rule["alert"])
def test_an_alert_has_a_summary_an_action_and_a_runbook(rule: dict[str, Any]) -> None:
    """The runbook heading exists; the severity is page or ticket."""
    notes = rule["annotations"]
    assert notes["summary"]
    assert notes["action"]
    assert rule["labels"]["severity"] in ("page", "ticket")
    page, _, anchor = notes["runbook"].partition("#")
    headings = re.findall(r"^#+ (.+)$", (DEPLOY.parent / page).read_text("utf-8"), re.MULTILINE)
    assert anchor in {heading.lower() for heading in headings}
    assert anchor == rule["alert"].lower()
