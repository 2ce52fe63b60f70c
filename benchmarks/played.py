"""The scenarios through a whole gateway, over real sockets and in virtual time.

    python -m benchmarks.played --traces DIR agents --loads .65 --seeds 3
    python -m benchmarks.played --traces DIR c --loads 1 --seconds 60 --json

Per route: share of good requests, TTFT and TPOT met, quantiles of the TTFT from the time at which a request is due, and
what the gateway has done: seconds held by each rule, attempts by their ending, refusals by rate limits. A replay
(`benchmarks.routing`) takes a tenth of the CPU, and calls the decision code alone. To compare two commits, run this in
a checkout of each.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from math import isnan
from multiprocessing import get_context
from time import process_time
from typing import Any

import yaml

from benchmarks.replays import Replay, add_replays, command, replays
from benchmarks.scenarios import HERE, SCENARIOS, arrivals, setting
from gateway.cli.tables import aligned
from lab.played.play import Played, PlayedRow, played
from lab.replay.sim_fleet import OURS

HEADING = ("route", "requests", "good", "TTFT met", "TPOT met", "p50", "p90", "p99", "failed", "429s")


def play_one(task: tuple[Replay, float | None]) -> dict[str, Any]:
    (name, load, _, seed, traces), seconds = task
    logging.disable(logging.WARNING)
    began, offered = process_time(), arrivals(name, load, traces, seed)
    if seconds is not None:
        offered = [each for each in offered if each.at < seconds]
    configured = yaml.safe_load((HERE / f"{SCENARIOS[name].fleet or name}.yaml").read_text())
    found = played(setting(name), configured, offered, seed)
    return {"scenario": name, "load": load, "seed": seed, "played": found, "cpu_s": process_time() - began}


def report(found: Mapping[str, Any]) -> Iterator[str]:
    done: Played = found["played"]
    yield f"{found['scenario']} {found['load']:g} seed {found['seed']}: {found['cpu_s']:.0f} s of CPU"
    yield from aligned([HEADING, *map(_row, done.rows)])
    every = done.rows[-1]
    yield f"held: {_counts(every.held, ' s') or 'never'}"
    yield f"attempts: {_counts(every.attempts)}"
    if done.late > 0.001 or done.lost_records:
        yield f"sent up to {done.late * 1e3:.0f} ms late; {done.lost_records} requests without a Record"


def as_json(found: Mapping[str, Any]) -> str:
    """A line; keys of several names are joined by a space."""
    return json.dumps(_named(asdict(found["played"]) | {name: found[name] for name in found if name != "played"}))


def _named(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {" ".join(map(str, key)) if isinstance(key, tuple) else key: _named(each) for key, each in value.items()}
    return [_named(each) for each in value] if isinstance(value, list | tuple) else value


def _row(found: PlayedRow) -> tuple[str, ...]:
    row = found.row
    times = [f"{ttft * 1e3:.0f} ms" for ttft in row.ttft]
    failed = f"{row.sheds}/{row.lost}/{row.broken}/{row.unfinished}"
    shares = [_percent(share) for share in (row.good, row.attainment, found.tpot_met)]
    return row.name, str(row.offered), *shares, *times, failed, str(found.limited)


def _percent(share: float) -> str:
    return "-" if isnan(share) else f"{share:.1%}"


def _counts(counts: Mapping[str, float], unit: str = "") -> str:
    return ", ".join(f"{name} {count:.0f}{unit}" for name, count in counts.items())


def main() -> None:
    parser = command(__doc__, 1)
    add_replays(parser)
    parser.add_argument("--seconds", type=float, help="only the first seconds of the traffic")
    parser.add_argument("--json", action="store_true", help="a line of JSON per run")
    args = parser.parse_args()
    args.scorers = [OURS]
    os.environ["PYTHONHASHSEED"] = "0"  # of the processes that play
    tasks = [(replay, args.seconds) for replay in replays(args)]
    with ProcessPoolExecutor(args.jobs, get_context("spawn"), max_tasks_per_child=1) as workers:
        for found in workers.map(play_one, tasks):
            print(as_json(found) if args.json else "\n".join([*report(found), ""]), flush=True)


if __name__ == "__main__":
    main()
