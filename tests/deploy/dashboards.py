"""The dashboards and rules as their readers see them: files, and the queries in them."""

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
    path.stem: json.loads(path.read_text("utf-8")) for path in sorted((DEPLOY / "grafana/dashboards").glob("*.json"))
}
RULE_FILES = sorted((DEPLOY / "prometheus/rules").glob("*.yml"))
RULES: list[dict[str, Any]] = [
    rule
    for path in RULE_FILES
    for group in yaml.safe_load(path.read_text("utf-8"))["groups"]
    for rule in group["rules"]
]
LABEL_VALUES = re.compile(r"label_values\((.+), (\w+)\)")
EVERYTHING = {"job": "firsttoken", "route": ".*", "pool": ".*", "__rate_interval": "10s", "__range": "30s"}


@dataclass(frozen=True)
class Asked:
    """A query, and who asks it."""

    where: str
    expr: str

    def __str__(self) -> str:
        return self.where


def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    """Those that show something: not the headings."""
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def filled(expr: str, **chosen: str) -> str:
    """The variables replaced, as Grafana does it."""
    values = {**EVERYTHING, **chosen}
    return re.sub(r"\$(\w+)", lambda match: values[match[1]], expr)


def of_panels() -> Iterator[Asked]:
    """Every query of every panel; those of a panel that is repeated by route, for one route."""
    for name, dashboard in DASHBOARDS.items():
        for panel in panels(dashboard):
            chosen = {"route": "chat"} if panel.get("repeat") == "route" else {}
            for target in panel["targets"]:
                where = f"{name}: {panel['title']}: {target['refId']}"
                yield Asked(where, filled(target["expr"], **chosen))


def of_variables() -> Iterator[Asked]:
    """What fills the choices at the top; each as the query that `label_values` stands for."""
    for name, dashboard in DASHBOARDS.items():
        for variable in dashboard["templating"]["list"]:
            if variable["type"] == "query":
                asked = LABEL_VALUES.fullmatch(variable["query"]["query"])
                assert asked is not None
                yield Asked(f"{name}: variable {variable['name']}", filled(f"group by ({asked[2]}) ({asked[1]})"))


def of_annotations() -> Iterator[Asked]:
    for name, dashboard in DASHBOARDS.items():
        for annotation in dashboard["annotations"]["list"]:
            yield Asked(f"{name}: annotation {annotation['name']}", filled(annotation["expr"]))


def of_rules(kind: str) -> Iterator[Asked]:
    """`record` or `alert`."""
    for rule in RULES:
        if kind in rule:
            yield Asked(rule[kind], rule["expr"])
