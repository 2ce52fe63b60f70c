"""Presets of the workloads: the ready-made routes of policies/presets/, one file each.

Tiers, limits and a budget that grows with the prompt are a ready-made route's own: no other route has them unless it
says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import policies
from gateway.config.yaml_source import Document, merge, parse
from policies.routes.route import Workload

FOLDER = Path(policies.__path__[0]) / "presets"
_OWN = ("tiers", "limits", "per_1k_tokens")


@cache
def preset(workload: Workload) -> dict[str, Any]:
    """Keys of a route that says no more than its workload."""
    file = FOLDER / f"{workload}.yaml"
    return _without_own(parse(file.read_text("utf-8"), file.name, {}).data["routes"][workload])


def _without_own(section: Mapping[str, Any]) -> dict[str, Any]:
    values = {key: value for key, value in section.items() if key not in _OWN}
    return {key: _without_own(value) if isinstance(value, Mapping) else value for key, value in values.items()}


def with_preset(workload: Workload, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Merge `raw`, the route as written by the operator, over the preset of the workload."""
    return merge(Document(preset(workload)), Document(dict(raw))).data
