"""Generates the chart's `values.schema.json` from the gateway's configuration: python -m deploy.helm.generate"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from deploy.helm.values_schema import values_schema

DEPLOY = Path(__file__).resolve().parents[1]
CHART = DEPLOY / "helm" / "firsttoken"


def files() -> Mapping[Path, str]:
    """Text of the generated file, without blanks: a release of Helm holds 1 MB."""
    schema = json.dumps(values_schema(), separators=(",", ":"), ensure_ascii=False)
    return {CHART / "values.schema.json": schema + "\n"}


def main() -> None:
    for path, text in files().items():
        path.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
