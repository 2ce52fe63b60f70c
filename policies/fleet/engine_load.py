"""Load of an engine by its own report, which workers pass on to each other (`gateway.workers.worker_peers`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

RESTART_TOLERANCE = 1.0  # s by which an engine's own start time must move to be another start
Totals = Iterable[float | None]  # since the engine's start; None: not reported


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """A scrape of an engine's metrics. None: not reported."""

    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None  # 0 to 1
    block_size: int | None = None  # tokens
    kv_blocks: int | None = None  # capacity, in blocks
    started_at: float | None = None  # engine's own wall clock, s; a change means a restart
    prefix_queries: float | None = None  # counters, tokens
    prefix_hits: float | None = None
    adapters: tuple[str, ...] = ()  # LoRA adapters of running requests
    adapter_slots: int | None = None
    preemptions: float | None = None  # counters
    drafted: float | None = None
    accepted: float | None = None
    asleep: bool | None = None  # its weights are put aside (vLLM's sleep mode): requests wait until it is woken
    rejections: float | None = None  # counter: requests refused by a limit of the engine's queue


def has_restarted(before: EngineLoad, after: EngineLoad, totals: Callable[[EngineLoad], Totals]) -> bool:
    """Tell by the engine's own start time; where it reports none, by these totals."""
    if before.started_at is not None and after.started_at is not None:
        return abs(after.started_at - before.started_at) > RESTART_TOLERANCE
    return fell(totals(before), totals(after))


def fell(before: Totals, after: Totals) -> bool:
    """A total is less than it was: that of another process."""
    return any(old is not None and new is not None and new < old for old, new in zip(before, after, strict=True))
