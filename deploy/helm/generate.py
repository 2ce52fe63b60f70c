"""Generates the files of the chart that others state: python -m deploy.helm.generate

`values.schema.json` from the gateway's configuration, rules and dashboards from deploy/prometheus and deploy/grafana:
Helm reads no file outside of a chart.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from deploy.helm.values_schema import values_schema

DEPLOY = Path(__file__).resolve().parents[1]
CHART = DEPLOY / "helm" / "firsttoken"


def files() -> Mapping[Path, str]:
    """Text of each generated file."""
    found = {CHART / "values.schema.json": compact(values_schema())}
    for source in sorted((DEPLOY / "prometheus" / "rules").glob("*.yml")):
        found[CHART / "files" / "rules" / source.name] = source.read_text("utf-8")
    for source in sorted((DEPLOY / "grafana" / "dashboards").glob("*.json")):
        found[CHART / "files" / "dashboards" / source.name] = compact(json.loads(source.read_text("utf-8")))
    return found


def compact(document: object) -> str:
    """Without blanks: a release of Helm, and a ConfigMap, hold 1 MB."""
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False) + "\n"


def main() -> None:
    for path, text in files().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
