"""A few hundred cases of `python -m tests.programs.envoy.fuzz`."""

from __future__ import annotations

from tests.programs.envoy import fuzz


async def test_hostile_peers_leave_nothing_behind_and_healthy_ones_are_answered() -> None:
    """Changed messages, calls out of order, broken frames, floods, over memory and sockets."""
    found = await fuzz.run(600)
    assert found.failures == []
    assert found.cases.total() == 600
