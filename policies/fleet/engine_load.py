"""Load of an engine by its own report, which workers pass on to each other (`gateway.workers.worker_peers`)."""

from __future__ import annotations

from dataclasses import dataclass


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
    ttft_count: float | None = None  # histograms, since the engine's start: first tokens
    ttft_sum: float | None = None  # s, from the arrival at the engine
    itl_count: float | None = None  # gaps between tokens
    itl_sum: float | None = None  # s
    e2e_count: float | None = None  # whole answers
    e2e_sum: float | None = None  # s, from the arrival
