"""The resource that limits an engine, or a pool: what one more engine, or one fewer request, would relieve.

In the order of the rules: KV cache, prefill, decode. An engine with requests that no rule explains has room.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from enum import StrEnum

from policies.types import UNUSABLE, Load

FULL = 0.95  # used share of the KV cache from which answers are preempted
PREFILLING = 0.5  # share of the time spent on prompts from which these are the limit
PRESSED = 0.9  # TPOT as a share of what the answers bear
QUIET = 0.05  # share of the time spent on prompts below which an engine without requests is idle


class Bottleneck(StrEnum):
    """In the order of `BOUND_VALUES`, from least to most load."""

    IDLE = "idle"
    NONE = "none"  # requests, and room for more
    DECODE = "decode"
    PREFILL = "prefill"
    KV = "kv"


BOUND_VALUES = {bound: float(value) for value, bound in enumerate(Bottleneck)}  # in metrics


def engine_bottleneck(load: Load, preemptions_per_s: float | None = None) -> Bottleneck:
    """Bottleneck of one engine. `preemptions_per_s`: None where the engine reports no preemptions."""
    if preemptions_per_s or (load.kv_usage >= FULL and load.waiting):
        return Bottleneck.KV
    if load.prefill_utilization >= PREFILLING:
        return Bottleneck.PREFILL
    if load.tpot_pressure >= PRESSED or load.waiting:  # requests wait, and neither prompts nor memory are the reason
        return Bottleneck.DECODE
    if load.in_flight or load.running or load.prefill_utilization > QUIET:
        return Bottleneck.NONE
    return Bottleneck.IDLE


def pool_bottleneck(engines: Iterable[tuple[Load, float | None]]) -> Bottleneck:
    """Of the usable engines of a pool: that of most of them, and of as many the one with more load."""
    found = Counter(
        engine_bottleneck(load, preemptions) for load, preemptions in engines if load.health not in UNUSABLE
    )
    return max(found, key=lambda bound: (found[bound], BOUND_VALUES[bound]), default=Bottleneck.IDLE)
