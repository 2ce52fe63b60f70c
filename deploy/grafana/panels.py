"""Panels and dashboards as values, and their classic JSON, which Grafana 10 to 12 read.

Rules:
- A panel says what it answers (`asks`) and what to do about it (`act`); both are its description.
- Nothing is placed by hand: rows are filled from left to right, and numbers follow from the order.
- The data source is the dashboard's variable, everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from string import ascii_uppercase
from typing import Any

Json = dict[str, Any]

COLUMNS = 24
SOURCE: Json = {"type": "prometheus", "uid": "${datasource}"}
TAG = "firsttoken"


@dataclass(frozen=True)
class Query:
    """`legend`: as Grafana reads it, `{{label}}`. `once`: one value for the whole range, not a line."""

    expr: str
    legend: str
    once: bool = False
    form: str = "time_series"  # table | heatmap
    exemplars: bool = False


@dataclass(frozen=True)
class Panel:
    """One picture. `steps`: from which value on which colour; `lines`: they are drawn."""

    title: str
    asks: str
    act: str
    queries: tuple[Query, ...]
    unit: str
    kind: str = "timeseries"  # stat | table | bargauge | heatmap | state-timeline
    width: int = 8
    height: int = 8
    steps: Sequence[tuple[float, str]] = ()
    lines: bool = False
    stack: str = ""  # normal | percent
    least: float | None = 0
    most: float | None = None
    dashed: str = ""  # pattern of the legends that are a promise, not a measurement
    repeat: str = ""  # the variable of whose values each has its own
    columns: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # of a table: refId -> name, unit
    judged: str = ""  # the column of a table that is coloured by `steps`
    states: Sequence[tuple[float, str, str]] = ()  # value, text, colour


@dataclass(frozen=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Dashboard:
    uid: str
    title: str
    asks: str
    rows: tuple[Row, ...]


def as_json(dashboard: Dashboard) -> Json:
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "description": dashboard.asks,
        "tags": [TAG],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "timezone": "browser",
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "graphTooltip": 1,
        "templating": {"list": [*_variables()]},
        "annotations": {"list": [_alerts()]},
        "links": [_link()],
        "panels": [*_placed(dashboard.rows)],
    }


# ----------------------------------------------------------------------------------- around the panels


def _variables() -> Iterator[Json]:
    yield {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
        "hide": 0,
        "refresh": 1,
        "regex": "",
        "multi": False,
        "includeAll": False,
        "options": [],
        "current": {},
    }
    yield _variable("job", "Gateways", "label_values(firsttoken_loop_lag_seconds_count, job)", everything=None)
    yield _variable("route", "Route", 'label_values(firsttoken_requests_total{job=~"$job"}, route)')
    yield _variable("pool", "Pool", 'label_values(firsttoken_endpoint_state{job=~"$job"}, pool)')


def _variable(name: str, label: str, query: str, everything: str | None = ".*") -> Json:
    """`everything`: what All stands for; None: those that there are, one by one."""
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,
        "regex": "",
        "multi": True,
        "includeAll": True,
        "allValue": everything,
        "current": {"text": "All", "value": "$__all"},
        "options": [],
        "hide": 0,
        "sort": 1,
    }


def _alerts() -> Json:
    """A mark wherever an alert fired."""
    return {
        "name": "Alerts",
        "datasource": SOURCE,
        "enable": True,
        "hide": False,
        "iconColor": "red",
        "expr": 'ALERTS{alertname=~"Firsttoken.*", alertstate="firing"}',
        "titleFormat": "{{alertname}}",
        "textFormat": "{{route}} {{pool}} {{endpoint}}",
        "tagKeys": "severity",
        "step": "30s",
    }


def _link() -> Json:
    """To the others, with what was chosen here."""
    return {
        "title": "firsttoken",
        "type": "dashboards",
        "tags": [TAG],
        "asDropdown": False,
        "includeVars": True,
        "keepTime": True,
        "targetBlank": False,
        "icon": "external link",
        "tooltip": "",
        "url": "",
    }


def _placed(rows: Sequence[Row]) -> Iterator[Json]:
    number, y = 0, 0
    for row in rows:
        number += 1
        yield {
            "id": number,
            "type": "row",
            "title": row.title,
            "collapsed": False,
            "panels": [],
            "gridPos": {"x": 0, "y": y, "w": COLUMNS, "h": 1},
        }
        x, y, tallest = 0, y + 1, 0
        for panel in row.panels:
            number += 1
            if x + panel.width > COLUMNS:
                x, y, tallest = 0, y + tallest, 0
            yield _panel(panel, number, {"x": x, "y": y, "w": panel.width, "h": panel.height})
            x, tallest = x + panel.width, max(tallest, panel.height)
        y += tallest


# ----------------------------------------------------------------------------------- one panel


def _panel(panel: Panel, number: int, place: Json) -> Json:
    body: Json = {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": f"{panel.asks}\n\n{panel.act}",
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": _defaults(panel), "overrides": [*_overrides(panel)]},
        "options": _options(panel),
        "targets": [_target(query, letter) for query, letter in zip(panel.queries, ascii_uppercase, strict=False)],
    }
    if panel.kind == "table":
        body["transformations"] = _transformations(panel)
    if panel.repeat:
        body |= {"repeat": panel.repeat, "repeatDirection": "h", "maxPerRow": 3}
    return body


def _target(query: Query, letter: str) -> Json:
    return {
        "refId": letter,
        "datasource": SOURCE,
        "editorMode": "code",
        "expr": query.expr,
        "legendFormat": query.legend,
        "format": query.form,
        "instant": query.once,
        "range": not query.once,
        "exemplar": query.exemplars,
    }


def _defaults(panel: Panel) -> Json:
    defaults: Json = {"unit": panel.unit, "color": {"mode": "palette-classic"}, "mappings": [], "custom": _drawn(panel)}
    if panel.least is not None:
        defaults["min"] = panel.least
    if panel.most is not None:
        defaults["max"] = panel.most
    if panel.steps:
        defaults["thresholds"] = {"mode": "absolute", "steps": [*_steps(panel.steps)]}
        if not panel.lines:
            defaults["color"] = {"mode": "thresholds"}
    if panel.states:
        defaults["color"] = {"mode": "thresholds"}
        defaults["mappings"] = [
            {"type": "value", "options": {f"{value:g}": {"text": text, "color": color, "index": i}}}
            for i, (value, text, color) in enumerate(panel.states)
        ]
    return defaults


def _steps(steps: Sequence[tuple[float, str]]) -> Iterator[Json]:
    """The first colour holds from below."""
    for i, (value, color) in enumerate(steps):
        yield {"color": color, "value": value if i else None}


def _drawn(panel: Panel) -> Json:
    if panel.kind == "state-timeline":
        return {"fillOpacity": 70, "lineWidth": 0, "spanNulls": False}
    if panel.kind != "timeseries":
        return {}
    return {
        "drawStyle": "line",
        "lineWidth": 1,
        "fillOpacity": 40 if panel.stack else 5,
        "showPoints": "auto",
        "pointSize": 4,
        "spanNulls": False,
        "stacking": {"mode": panel.stack or "none", "group": "A"},
        "thresholdsStyle": {"mode": "dashed" if panel.lines else "off"},
    }


def _overrides(panel: Panel) -> Iterator[Json]:
    if panel.dashed:
        yield {
            "matcher": {"id": "byRegexp", "options": f"/{panel.dashed}/"},
            "properties": [
                {"id": "custom.lineStyle", "value": {"fill": "dash", "dash": [10, 10]}},
                {"id": "custom.lineWidth", "value": 2},
                {"id": "custom.fillOpacity", "value": 0},
                {"id": "color", "value": {"mode": "fixed", "fixedColor": "red"}},
            ],
        }
    for name, unit in panel.columns.values():
        properties: list[Json] = [{"id": "unit", "value": unit}]
        if name == panel.judged:
            properties.append({"id": "custom.cellOptions", "value": {"type": "color-text"}})
        yield {"matcher": {"id": "byName", "options": name}, "properties": properties}


def _options(panel: Panel) -> Json:
    legend = {"displayMode": "table", "placement": "bottom", "showLegend": True, "calcs": ["mean", "max"]}
    reduced = {"calcs": ["lastNotNull"], "fields": "", "values": False}
    if panel.kind == "stat":
        return {"reduceOptions": reduced, "colorMode": "value", "graphMode": "area", "textMode": "value_and_name"}
    if panel.kind == "bargauge":
        return {"reduceOptions": reduced, "orientation": "horizontal", "displayMode": "basic", "showUnfilled": True}
    if panel.kind == "table":
        return {"showHeader": True, "cellHeight": "sm", "footer": {"show": False, "reducer": ["sum"], "fields": ""}}
    if panel.kind == "state-timeline":
        return {"mergeValues": True, "showValue": "never", "rowHeight": 0.8, "legend": {**legend, "calcs": []}}
    if panel.kind == "heatmap":
        return {
            "calculate": False,
            "yAxis": {"unit": panel.unit, "axisPlacement": "left"},
            "color": {"mode": "scheme", "scheme": "Oranges", "steps": 64, "exponent": 0.5, "fill": "dark-orange"},
            "cellGap": 1,
            "legend": {"show": True},
            "tooltip": {"mode": "single", "yHistogram": True},
        }
    return {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}


def _transformations(panel: Panel) -> list[Json]:
    """The queries' values side by side, one line per set of labels."""
    names = {f"Value #{letter}": name for letter, (name, _) in panel.columns.items()}
    chosen: Json = {"excludeByName": {"Time": True}, "indexByName": {}, "renameByName": names}
    return [{"id": "merge", "options": {}}, {"id": "organize", "options": chosen}]
