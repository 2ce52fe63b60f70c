"""Loads dashboards and rules, and lists their queries."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DASHBOARDS: Mapping[str, dict[str, Any]] = {
    path.stem: json.loads(path.read_text("utf-8"))
    for path in sorted((DEPLOY / "helm/firsttoken/files/dashboards").glob("*.json"))
}
RULE_FILES = sorted((DEPLOY / "helm/firsttoken/files/rules").glob("*.yml"))
RULES: list[dict[str, Any]] = [
    rule
    for path in RULE_FILES
    for group in yaml.safe_load(path.read_text("utf-8"))["groups"]
    for rule in group["rules"]
]
LABEL_VALUES = re.compile(r"label_values\((.+), (\w+)\)")
ALL_SELECTED = {"job": "firsttoken", "route": ".*", "pool": ".*", "__rate_interval": "10s", "__range": "30s"}


@dataclass(frozen=True)
class LocatedQuery:
    """A query and its location."""

    where: str
    expr: str
    waits: bool = False  # the panel says what it waits for

    def __str__(self) -> str:
        return self.where


def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    """Panels without rows."""
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def substituted(expr: str, **selected: str) -> str:
    """Replaces the variables, like Grafana."""
    values = {**ALL_SELECTED, **selected}
    return re.sub(r"\$(\w+)", lambda match: values[match[1]], expr)


def of_panels() -> Iterator[LocatedQuery]:
    """Every query of every panel; of a panel repeated by route, the queries of one route."""
    for name, dashboard in DASHBOARDS.items():
        for panel in panels(dashboard):
            selected = {"route": "chat"} if panel.get("repeat") == "route" else {}
            for target in panel["targets"]:
                where = f"{name}: {panel['title']}: {target['refId']}"
                waits = "Waits for" in panel["description"]
                yield LocatedQuery(where, substituted(target["expr"], **selected), waits)


def of_variables() -> Iterator[LocatedQuery]:
    """Queries of dashboard variables, as the PromQL in `label_values`."""
    for name, dashboard in DASHBOARDS.items():
        for variable in dashboard["templating"]["list"]:
            if variable["type"] == "query":
                match = LABEL_VALUES.fullmatch(variable["query"]["query"])
                assert match is not None
                yield LocatedQuery(
                    f"{name}: variable {variable['name']}", substituted(f"group by ({match[2]}) ({match[1]})")
                )


def of_annotations() -> Iterator[LocatedQuery]:
    for name, dashboard in DASHBOARDS.items():
        for annotation in dashboard["annotations"]["list"]:
            yield LocatedQuery(f"{name}: annotation {annotation['name']}", substituted(annotation["expr"]))


def of_rules(kind: str) -> Iterator[LocatedQuery]:
    """`record` or `alert`."""
    for rule in RULES:
        if kind in rule:
            yield LocatedQuery(rule[kind], rule["expr"])
