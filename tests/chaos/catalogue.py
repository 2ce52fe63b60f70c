"""Imports every module with rows, which registers them."""

from __future__ import annotations

from tests.chaos import correctness, failover_bench, faults, input, operation, overload, security
from tests.chaos.rows import ROWS

MODULES = (failover_bench, faults, operation, overload, input, security, correctness)

__all__ = ["MODULES", "ROWS"]
