"""The verdict on an engine and on a pool."""

from __future__ import annotations

import pytest

from gateway.bottleneck import Bottleneck, engine_bottleneck, pool_bottleneck
from policies.types import Health, Load


@pytest.mark.parametrize(
    ("load", "preemptions", "bound"),
    [
        (Load(), None, Bottleneck.IDLE),
        (Load(prefill_utilization=0.05), 0.0, Bottleneck.IDLE),
        (Load(in_flight=1), 0.0, Bottleneck.NONE),
        (Load(running=1), None, Bottleneck.NONE),
        (Load(prefill_utilization=0.06), None, Bottleneck.NONE),
        (Load(running=8, prefill_utilization=0.5), 0.0, Bottleneck.PREFILL),
        (Load(running=8, waiting=3, prefill_utilization=0.7), 0.0, Bottleneck.PREFILL),
        (Load(running=8, waiting=3, prefill_utilization=0.2), 0.0, Bottleneck.DECODE),
        (Load(running=8, tpot_pressure=0.9), None, Bottleneck.DECODE),
        (Load(running=8, kv_usage=0.95, waiting=1), None, Bottleneck.KV),
        (Load(running=8, kv_usage=0.99), None, Bottleneck.NONE),
        (Load(running=8, prefill_utilization=0.9), 0.1, Bottleneck.KV),
    ],
)
def test_an_engine_is_bound_by_what_its_load_shows(load: Load, preemptions: float | None, bound: Bottleneck) -> None:
    """A full KV cache limits only where requests wait for it; preemptions always come of it."""
    assert engine_bottleneck(load, preemptions) is bound


def test_a_pool_is_bound_as_most_of_its_usable_engines_are() -> None:
    """Engines that are down have no say; a tie goes to the verdict of more load."""
    idle, full = (Load(), None), (Load(running=9, kv_usage=1.0, waiting=2), None)
    assert pool_bottleneck([idle, idle, full]) is Bottleneck.IDLE
    assert pool_bottleneck([idle, full]) is Bottleneck.KV
    assert pool_bottleneck([(Load(health=Health.DOWN), None), full]) is Bottleneck.KV
    assert pool_bottleneck([]) is Bottleneck.IDLE
