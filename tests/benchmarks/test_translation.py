"""The cost of a translated chunk stays below its limit."""

from __future__ import annotations

import pytest

from benchmarks.translation import LIMIT_US, Case, cases, chunk_us


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_a_translated_chunk_costs_at_most_its_limit(case: Case) -> None:
    assert chunk_us(case, rounds=20) <= LIMIT_US
