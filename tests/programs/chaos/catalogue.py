"""Imports every module with rows: the import registers the rows."""

from __future__ import annotations

from tests.programs.chaos import (
    correctness,
    engine_faults,
    failover_bench,
    input,
    network_faults,
    operation,
    overload,
    security,
    tier_down,
)
from tests.programs.chaos.rows import ROWS

MODULES = (failover_bench, tier_down, engine_faults, network_faults, operation, overload, input, security, correctness)

__all__ = ["MODULES", "ROWS"]
