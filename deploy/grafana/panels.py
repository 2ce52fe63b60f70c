"""Panels and dashboards as values, and their classic JSON for Grafana 10 to 12.

Rules:
- A panel's description is its `meaning` and the operator's `action`.
- Positions are computed: rows fill from left to right, and ids follow the order.
- Every data source is the dashboard's variable.
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
    """One target. `legend` is a Grafana template, `{{label}}`; `instant`: one value for the whole range, not a line."""

    expr: str
    legend: str
    instant: bool = False
    format: str = "time_series"  # table | heatmap
    exemplars: bool = False


@dataclass(frozen=True)
class Panel:
    """One panel. `thresholds`: lower bounds and their colours, drawn if `threshold_lines`."""

    title: str
    meaning: str
    action: str
    queries: tuple[Query, ...]
    unit: str
    kind: str = "timeseries"  # stat | table | bargauge | heatmap | state-timeline
    width: int = 8
    height: int = 8
    thresholds: Sequence[tuple[float, str]] = ()
    threshold_lines: bool = False
    stack: str = ""  # normal | percent
    minimum: float | None = 0
    maximum: float | None = None
    dashed: str = ""  # pattern of the legends that are a target, not a measurement
    repeat: str = ""  # a variable: one panel for each of its values
    columns: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # of a table: refId -> name, unit
    coloured_column: str = ""  # of a table, by `thresholds`
    states: Sequence[tuple[float, str, str]] = ()  # value, text, colour


@dataclass(frozen=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Dashboard:
    uid: str
    title: str
    description: str
    rows: tuple[Row, ...]


def as_json(dashboard: Dashboard) -> Json:
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "description": dashboard.description,
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


# ----------------------------------------------------------------------------------- dashboard


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
    yield _variable("job", "Gateways", "label_values(firsttoken_loop_lag_seconds_count, job)", all_value=None)
    yield _variable("route", "Route", 'label_values(firsttoken_requests_total{job=~"$job"}, route)')
    yield _variable("pool", "Pool", 'label_values(firsttoken_endpoint_state{job=~"$job"}, pool)')


def _variable(name: str, label: str, query: str, all_value: str | None = ".*") -> Json:
    """A query variable. `all_value`: the pattern of All; None: every existing value, one by one."""
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
        "allValue": all_value,
        "current": {"text": "All", "value": "$__all"},
        "options": [],
        "hide": 0,
        "sort": 1,
    }


def _alerts() -> Json:
    """Marks the times of firing alerts."""
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
    """Link to the other dashboards, with the selected variables and time range."""
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
        "description": f"{panel.meaning}\n\n{panel.action}",
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
        "format": query.format,
        "instant": query.instant,
        "range": not query.instant,
        "exemplar": query.exemplars,
    }


def _defaults(panel: Panel) -> Json:
    defaults: Json = {
        "unit": panel.unit,
        "color": {"mode": "palette-classic"},
        "mappings": [],
        "custom": _custom(panel),
    }
    if panel.minimum is not None:
        defaults["min"] = panel.minimum
    if panel.maximum is not None:
        defaults["max"] = panel.maximum
    if panel.thresholds:
        defaults["thresholds"] = {"mode": "absolute", "steps": [*_steps(panel.thresholds)]}
        if not panel.threshold_lines:
            defaults["color"] = {"mode": "thresholds"}
    if panel.states:
        defaults["color"] = {"mode": "thresholds"}
        defaults["mappings"] = [
            {"type": "value", "options": {f"{value:g}": {"text": text, "color": color, "index": i}}}
            for i, (value, text, color) in enumerate(panel.states)
        ]
    return defaults


def _steps(steps: Sequence[tuple[float, str]]) -> Iterator[Json]:
    """Steps of the thresholds; the first colour has no lower bound."""
    for i, (value, color) in enumerate(steps):
        yield {"color": color, "value": value if i else None}


def _custom(panel: Panel) -> Json:
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
        "thresholdsStyle": {"mode": "dashed" if panel.threshold_lines else "off"},
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
        if name == panel.coloured_column:
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
    """Joins the queries' values in one row per set of labels."""
    names = {f"Value #{letter}": name for letter, (name, _) in panel.columns.items()}
    organize: Json = {"excludeByName": {"Time": True}, "indexByName": {}, "renameByName": names}
    return [{"id": "merge", "options": {}}, {"id": "organize", "options": organize}]
