"""Table of all metric families, by section of docs/metrics.md.

`gateway.observe.metrics.series` makes series from the table, `scripts/metrics_page.py` writes docs/metrics.md, and
gauges of several workers are merged by `Family.merge`.
"""

from __future__ import annotations

from collections.abc import Mapping

from gateway.observe.metrics.attempt_families import SENT
from gateway.observe.metrics.metric_family import Family
from gateway.observe.metrics.process_families import LLM_D, OURSELVES, SHARED
from gateway.observe.metrics.request_families import PREDICTED, PROMISED, PROMPTS

# Sections of docs/metrics.md, in order: heading and metrics.
GROUPS: Mapping[str, tuple[Family, ...]] = {
    "Requests": PROMISED,
    "Predictions": PREDICTED,
    "Attempts and endpoints": SENT,
    "Prompts and sessions": PROMPTS,
    "Shared state": SHARED,
    "Names of llm-d": LLM_D,
    "The gateway itself": OURSELVES,
}
CATALOG: Mapping[str, Family] = {family.name: family for group in GROUPS.values() for family in group}
BY_FAMILY: Mapping[str, Family] = {family.family: family for family in CATALOG.values()}  # by prometheus-client's names
