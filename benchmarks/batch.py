"""Batch work by a deadline beside chat, in replay: a day in small.

    python -m benchmarks.batch --traces DIR [--seeds N] [--peak R] [--batch R]

A day takes DAY seconds: chat (`azure2023_conv.csv`) with a valley at night and a peak at noon, and batch jobs of the
same prompts and answers, all of a job at once, due a quarter of a day later (`benchmarks/scenarios/day.yaml`). Prints,
for each peak of chat and each amount of batch work, the good requests of chat without and with it, in points the
difference with its standard error over the seeds, and the share of the batch work that was done by its deadline.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from math import cos, pi, sqrt
from pathlib import Path
from random import Random
from statistics import fmean, stdev

from benchmarks.scenarios import HERE
from gateway.config.loading import load
from lab.replay.player import play
from lab.replay.results import ResultRow
from lab.replay.sim_fleet import Scenario, scenario_from
from lab.traffic.traces import Arrival, read_trace

DAY = 600.0  # s
DAYS = 1.0
NIGHT = 0.1  # rate of chat at midnight, of the peak
JOBS_A_DAY = 8


def chat_rate(at: float, peak: float) -> float:
    """Requests/s; a day begins at midnight."""
    return peak * (NIGHT + (1 - NIGHT) * (1 - cos(2 * pi * at / DAY)) / 2)


def chat(trace: list[Arrival], peak: float, random: Random) -> Iterator[Arrival]:
    """Poisson arrivals at the rate of the hour, with prompts and answers of the trace."""
    at = 0.0
    while (at := at + random.expovariate(peak)) < DAY * DAYS:
        if random.random() < chat_rate(at, peak) / peak:
            yield replace(random.choice(trace), at=at, route="chat", tenant="web")


def jobs(trace: list[Arrival], rate: float, random: Random) -> Iterator[Arrival]:
    """`rate`: requests/s, on the mean of the day."""
    count = round(JOBS_A_DAY * DAYS)
    for job in range(count):
        at = (job + random.random()) * DAY * DAYS / count
        for _ in range(round(rate * DAY * DAYS / count)):
            yield replace(random.choice(trace), at=at, route="nightly", tenant="jobs")


def played(trace: list[Arrival], scenario: Scenario, peak: float, rate: float, seed: int) -> dict[str, ResultRow]:
    """Row by route. Chat is the same for any `rate`."""
    offered = [*chat(trace, peak, Random(seed)), *jobs(trace, rate, Random(seed + 1000))]
    results = play(scenario, sorted(offered, key=lambda arrival: arrival.at), seed)
    return {row.name: row for row in results.rows()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--peak", type=float, action="append", help="requests/s of chat at noon")
    parser.add_argument("--batch", type=float, action="append", help="requests/s of batch work, on the mean")
    args = parser.parse_args()
    trace = read_trace(args.traces / "azure2023_conv.csv")
    scenario = replace(scenario_from(load([HERE / "day.yaml"], {})), seconds=DAY * DAYS)
    print(f"{'peak':>6} {'batch':>6}  chat good, without and with batch      batch done  tokens/s of batch")
    for peak in args.peak or (26.0,):
        seeds = range(1, args.seeds + 1)
        alone = [played(trace, scenario, peak, 0.0, seed)["chat"].good for seed in seeds]
        for rate in args.batch or (3.0, 8.0):
            found = [played(trace, scenario, peak, rate, seed) for seed in seeds]
            with_batch = [rows["chat"].good for rows in found]
            changes = [(after - before) * 100 for before, after in zip(alone, with_batch, strict=True)]
            error = stdev(changes) / sqrt(len(changes)) if len(changes) > 1 else float("nan")
            done = fmean(rows["nightly"].total for rows in found)
            tokens = fmean(rows["nightly"].output_rate for rows in found)
            good = f"{fmean(alone):.4f} {fmean(with_batch):.4f} {fmean(changes):+.2f} ±{error:.2f}"
            print(f"{peak:6.1f} {rate:6.1f}  {good}        {done:.4f}  {tokens:.0f}", flush=True)


if __name__ == "__main__":
    main()
