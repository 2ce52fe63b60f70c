"""Many replays, over all cores: every load, scorer and seed is one of its own."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from statistics import fmean
from time import process_time
from typing import Any

from gateway.admin.admin_views import explain
from gateway.replay.player import play
from gateway.replay.results import CalibrationResult, ResultRow, Worst
from gateway.replay.scenario import Scenario
from gateway.replay.traffic_sources import Traffic


@dataclass(frozen=True, slots=True)
class Task:
    """One replay. `name`: what it is called in the report; `keep`: decisions of the most regret to show."""

    name: str
    setting: Scenario
    load: float
    seed: int
    keep: int = 0


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a task. `seconds`: offered; `took`: s of one core, arrivals read and all."""

    name: str
    load: float
    seed: int
    rows: tuple[ResultRow, ...]
    calibration: tuple[CalibrationResult, ...]
    seconds: float
    played: float  # virtual, the draining included
    took: float
    worst: tuple[dict[str, Any], ...] = ()

    @property
    def overall(self) -> ResultRow:
        return self.rows[-1]


def run(tasks: Sequence[Task], traffic: Traffic) -> Iterator[Result]:
    """In the order of the tasks. Deterministic whatever the number of cores."""
    workers = min(len(tasks), os.cpu_count() or 1)
    if workers < 2:
        _prepare(traffic)
        yield from map(_run, tasks)
        return
    with ProcessPoolExecutor(workers, initializer=_prepare, initargs=(traffic,)) as pool:
        yield from pool.map(_run, tasks)


_traffic = Traffic(())


def _prepare(traffic: Traffic) -> None:
    """Once per process: a fork inherits it, so that no trace is copied for each task."""
    global _traffic
    _traffic = traffic


def _run(task: Task) -> Result:
    began = process_time()
    arrivals = _traffic.arrivals(task.setting, task.load, task.seed)
    tally = play(task.setting, arrivals, task.seed, task.keep)
    worst = tuple(_told(number, entry) for number, entry in enumerate(tally.worst(), 1))
    played = max((fate.ended_at or fate.arrived for fate in tally.fates), default=0.0)
    return Result(
        task.name,
        task.load,
        task.seed,
        tuple(tally.rows()),
        tuple(tally.calibration()),
        tally.seconds,
        played,
        process_time() - began,
        worst,
    )


def _told(number: int, worst: Worst) -> dict[str, Any]:
    """A decision as /explain would tell it, and what came of it."""
    fate = worst.fate
    return {
        "rank": number,
        "request": fate.number,
        "arrived_s": round(fate.arrived, 3),
        "route": fate.route,
        "endpoint": fate.endpoint,
        "ttft_ms": round((fate.ttft or 0.0) * 1e3, 1),
        "upstream_ms": round((fate.upstream or 0.0) * 1e3, 1),
        "regret_ms": round(fate.regret * 1e3, 1),
        "cached_tokens": fate.cached,
        **explain(worst.decision, worst.estimate, {}, {}),
    }


def mean(results: Iterable[Result]) -> list[ResultRow]:
    """Row by row over the seeds."""
    return [_mean(rows) for rows in zip(*(result.rows for result in results), strict=True)]


def _mean(rows: Sequence[ResultRow]) -> ResultRow:
    if len(rows) == 1:
        return rows[0]
    values = {name: _merged([getattr(row, name) for row in rows]) for name in ResultRow.__slots__}
    return ResultRow(**values)


def _merged(values: Sequence[Any]) -> Any:
    if isinstance(values[0], str):
        return values[0]
    if isinstance(values[0], tuple):
        longest = max(map(len, values))
        padded = [(*value, *(0.0,) * (longest - len(value))) for value in values]
        return tuple(fmean(column) for column in zip(*padded, strict=True))
    return fmean(values)
