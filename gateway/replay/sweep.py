"""Many replays over all cores: one per load, scorer and seed."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields
from functools import partial
from statistics import fmean
from time import process_time
from typing import Any

from gateway.admin.admin_views import explain
from gateway.replay.player import play
from gateway.replay.results import CalibrationResult, RegrettedDecision, ResultRow
from gateway.replay.scenario import Scenario
from gateway.replay.traces import Traffic


@dataclass(frozen=True, slots=True)
class ReplayTask:
    """One replay. `name`: its label in the report; `keep`: decisions to show, those with the most regret."""

    name: str
    scenario: Scenario
    load: float
    seed: int
    keep: int = 0


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """The figures of a task, as `--json` prints them."""

    name: str
    load: float
    seed: int
    rows: tuple[ResultRow, ...]
    calibration: tuple[CalibrationResult, ...]
    seconds: float  # of offered traffic
    played: float  # virtual seconds until the last answer
    took: float  # CPU seconds, reading the trace included
    worst: tuple[dict[str, Any], ...] = ()


def run(tasks: Sequence[ReplayTask], traffic: Traffic) -> Iterator[ReplayResult]:
    """In the order of the tasks. Deterministic for any number of cores."""
    workers = min(len(tasks), os.cpu_count() or 1)
    if workers < 2:
        yield from map(partial(_run, traffic), tasks)
        return
    with ProcessPoolExecutor(workers) as pool:
        yield from pool.map(partial(_run, traffic), tasks)


def _run(traffic: Traffic, task: ReplayTask) -> ReplayResult:
    began = process_time()
    arrivals = traffic.arrivals(task.scenario.routes, task.load, task.seed)
    results = play(task.scenario, arrivals, task.seed, task.keep)
    return ReplayResult(
        name=task.name,
        load=task.load,
        seed=task.seed,
        rows=tuple(results.rows()),
        calibration=tuple(results.calibration()),
        seconds=results.seconds,
        played=max((result.ended_at or result.arrived for result in results.requests), default=0.0),
        took=process_time() - began,
        worst=tuple(_described(rank, decision) for rank, decision in enumerate(results.worst(), 1)),
    )


def _described(rank: int, regretted: RegrettedDecision) -> dict[str, Any]:
    """The decision as /explain describes it, and its outcome."""
    result = regretted.result
    return {
        "rank": rank,
        "request": result.number,
        "arrived_s": round(result.arrived, 3),
        "route": result.route,
        "endpoint": result.endpoint,
        "ttft_ms": round((result.ttft or 0.0) * 1e3, 1),
        "upstream_ms": round((result.upstream or 0.0) * 1e3, 1),
        "regret_ms": round(result.regret * 1e3, 1),
        "cached_tokens": result.cached,
        **explain(regretted.decision, regretted.estimate, {}, {}),
    }


def mean_rows(results: Iterable[ReplayResult]) -> list[ResultRow]:
    """Row by row, over the seeds."""
    return [
        ResultRow(**{field.name: _mean([getattr(row, field.name) for row in rows]) for field in fields(ResultRow)})
        for rows in zip(*(result.rows for result in results), strict=True)
    ]


def _mean(values: Sequence[Any]) -> Any:
    if len(values) == 1 or isinstance(values[0], str):
        return values[0]
    if isinstance(values[0], tuple):
        longest = max(map(len, values))
        padded = [(*value, *(0.0,) * (longest - len(value))) for value in values]
        return tuple(fmean(column) for column in zip(*padded, strict=True))
    return fmean(values)
