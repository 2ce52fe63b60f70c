"""Generates the dashboards: python -m deploy.grafana.generate

Into the chart, because Helm reads no file outside of it; `firsttoken export` and docker-compose.yml take them
from there. Changes are made in these modules.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from deploy.grafana import pools, routes, why, why_slow
from deploy.grafana.panels import as_json

FOLDER = Path(__file__).parents[1] / "helm" / "firsttoken" / "files" / "dashboards"
DASHBOARDS = {
    "routes": routes.DASHBOARD,
    "pools": pools.DASHBOARD,
    "why-slow": why_slow.DASHBOARD,
    "why": why.DASHBOARD,
}


def files() -> Mapping[Path, str]:
    """Text of each dashboard file, without blanks: a release of Helm, and a ConfigMap, hold 1 MB."""
    return {
        FOLDER / f"{name}.json": json.dumps(as_json(dashboard), separators=(",", ":"), ensure_ascii=False) + "\n"
        for name, dashboard in DASHBOARDS.items()
    }


def main() -> None:
    for path, text in files().items():
        path.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
