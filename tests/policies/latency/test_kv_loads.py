"""Seconds to load cached tokens from slower tiers."""

from __future__ import annotations

import pytest

from policies.fleet.engine_kv_cache import PRIOR, KvLoads

CPU = (32_768, 0, 0)


def test_a_load_costs_what_was_published_until_one_is_measured() -> None:
    """64k tokens of an H20: 0.16 s more from the CPU's memory than from the GPU, 0.86 s more by RDMA."""
    loads = KvLoads()
    assert loads.seconds((65_536, 0, 0)) == pytest.approx(0.16)
    assert loads.seconds((0, 0, 65_536)) == pytest.approx(0.86)
    assert loads.seconds(()) == 0.0


def test_measured_loads_are_learned_by_tier() -> None:
    """Within 10% after twenty loads, of a link ten times slower; another tier stays as it was."""
    loads = KvLoads()
    for _ in range(40):
        loads.learn(CPU, 10 * PRIOR["cpu"] * CPU[0])
    assert loads.seconds(CPU) == pytest.approx(10 * PRIOR["cpu"] * CPU[0], rel=0.1)
    assert loads.seconds((0, 1, 0)) == PRIOR["disk"]


def test_a_load_from_two_tiers_teaches_both_by_their_share() -> None:
    loads = KvLoads()
    for tokens in ((30_000, 10_000, 0), (5_000, 40_000, 0)) * 60:
        loads.learn(tokens, 5e-6 * tokens[0] + 20e-6 * tokens[1])
    assert loads.token_s[:2] == pytest.approx([5e-6, 20e-6], rel=0.15)


def test_an_absurd_time_moves_a_cost_by_less_than_half() -> None:
    """A stalled engine, or a clock: and no cost is negative."""
    loads = KvLoads()
    loads.learn(CPU, 1e9)
    assert loads.seconds(CPU) < 1.5 * PRIOR["cpu"] * CPU[0]
    for _ in range(100):
        loads.learn(CPU, -1e9)
    assert 0.0 <= loads.seconds(CPU) < 1e-3


def test_a_tier_that_seemed_free_is_measured_again() -> None:
    """Loads from two tiers that took no time at all leave a cost from which later loads are learned."""
    loads = KvLoads()
    for _ in range(50):
        loads.learn((3_000, 0, 3_000), 0.0)
    for _ in range(50):
        loads.learn(CPU, 0.5)
    assert loads.seconds(CPU) == pytest.approx(0.5, rel=0.1)
