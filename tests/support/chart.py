"""The Helm chart in tests: files of values, the renders that the repository keeps, and Helm, where installed."""

from __future__ import annotations

import functools
import hashlib
import importlib
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from deploy.helm.generate import CHART, files
from scripts.chart_setup import HELM

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tests" / "deploy" / "chart"
CASES = sorted(path.stem for path in (FOLDER / "values").glob("*.yaml"))
DIGEST = FOLDER / "rendered" / "CHART"

Manifest = dict[str, Any]


def values(case: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((FOLDER / "values" / f"{case}.yaml").read_text())
    return found


def golden(case: str) -> Path:
    return FOLDER / "rendered" / f"{case}.yaml"


def manifests(text: str) -> list[Manifest]:
    return [one for one in yaml.load_all(text, yaml.CSafeLoader) if one]


@functools.cache
def kept(case: str) -> list[Manifest]:
    """Read once for all tests; no test changes it."""
    return manifests(golden(case).read_text())


def of_kind(found: list[Manifest], kind: str, ending: str = "") -> Iterator[Manifest]:
    return (one for one in found if one["kind"] == kind and one["metadata"]["name"].endswith(ending))


def helm() -> Any:
    """The module; `make chart` installs it."""
    if str(HELM) not in sys.path:
        sys.path.append(str(HELM))
    return importlib.import_module("helm_python")


def rendered(given: Mapping[str, Any], release: str = "gw", namespace: str = "ai") -> str:
    """What `helm template` prints, notes left out. Raises HelmValuesError and HelmRenderError."""
    with helm().Chart.load(CHART) as loaded:
        found = loaded.render(given, name=release, namespace=namespace)
    texts = {path: text.strip() for path, text in sorted(found.items()) if path.endswith(".yaml") and text.strip()}
    return "".join(f"---\n# Source: {path}\n{text.removeprefix('---').strip()}\n" for path, text in texts.items())


def without_generated(text: str) -> str:
    """A dashboard, or a group of rules, is replaced by its file's name: the chart holds both unchanged."""
    found = []
    for one in text.split("---\n"):
        if "\nkind: PrometheusRule\n" in one:
            one = re.sub(r"(?s)\nspec:.*", "\nspec: {groups: []} # of files/rules\n", one)
        elif "-dashboard-" in one:
            one = re.sub(r"(?s)\ndata:.*", "\ndata: {} # of files/dashboards\n", one)
        found.append(one)
    return "---\n".join(found)


def digest() -> str:
    """Of the files that decide what is rendered."""
    found = hashlib.sha256()
    unchanged = {CHART / "files" / "rules", CHART / "files" / "dashboards"}
    for path in sorted(path for path in CHART.rglob("*") if path.is_file() and path not in files()):
        if path.parent in unchanged:
            continue
        found.update(f"{path.relative_to(CHART)}\n".encode() + path.read_bytes())
    for path in sorted((FOLDER / "values").glob("*.yaml")):
        found.update(path.read_bytes())
    return found.hexdigest()
