"""Command line, processes and stored results, as the benchmarks of replays share them."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, TypeVar

from benchmarks.scenarios import SCENARIOS

Replay = tuple[str, float, str, int, Path]  # scenario, load, scorer or idea that is off, seed, traces
Task = TypeVar("Task")
Found = TypeVar("Found")
DECISIONS = Path(__file__).parents[1] / "docs" / "decisions"


def floats(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def command(doc: str, seeds: int, results: Path | None = None, page: Path | None = None) -> argparse.ArgumentParser:
    """Options of every benchmark of replays. With --page, `page` is written from the file `results`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help=f"of {', '.join(SCENARIOS)}; all, if absent")
    parser.add_argument("--traces", type=Path, required=page is None, help="where the public traces are")
    parser.add_argument("--seeds", type=int, default=seeds)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="replays at a time")
    if page is not None:
        parser.add_argument("--results", type=Path, default=results)
        parser.add_argument("--page", action="store_true", help=f"write {page.name} from the results that there are")
    return parser


def add_replays(parser: argparse.ArgumentParser) -> None:
    """Options of `replays`."""
    parser.add_argument("--loads", type=floats, help="by default, the scenario's own")
    parser.add_argument("--scorers", type=names, help="by default, the scenario's own")
    parser.add_argument("--first-seed", type=int, default=0)


def replays(args: argparse.Namespace) -> list[Replay]:
    return [
        (name, load, scorer, seed, args.traces)
        for name in args.scenarios or SCENARIOS
        for load in args.loads or SCENARIOS[name].loads
        for scorer in args.scorers or SCENARIOS[name].scorers
        for seed in range(args.first_seed, args.first_seed + args.seeds)
    ]


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    args = parser.parse_args()
    if args.traces is None and not args.page:
        parser.error("--traces DIR: where the traces are")
    return args


def sweep(
    work: Callable[[Task], Found], tasks: Iterable[Task], jobs: int, results: Path | None = None
) -> Iterator[Found]:
    """Results in the order of the tasks. Every one is appended to the file `results` at once, as a line of JSON."""
    with ProcessPoolExecutor(jobs) as workers:
        for found in workers.map(work, tasks):
            if results is not None:
                results.parent.mkdir(parents=True, exist_ok=True)
                with results.open("a") as kept:
                    kept.write(json.dumps(found, default=asdict) + "\n")
            yield found


def stored(results: Path, *key: str) -> list[dict[str, Any]]:
    """Rows of the file `results`; of several with the same values under `key`, the last."""
    lines = results.read_text().splitlines() if results.exists() else []
    return list({tuple(row[part] for part in key): row for row in map(json.loads, lines)}.values())


def rules() -> str:
    """Number of the newest decision record: which rules a replay was played with."""
    return max(path.name[:4] for path in DECISIONS.glob("[0-9]*.md"))


def mean_points(points: Sequence[float], digits: int = 1) -> str:
    """With the standard error, where there are several."""
    error = f" ±{stdev(points) / len(points) ** 0.5:.{digits}f}" if len(points) > 1 else ""
    return f"{round(fmean(points), digits) + 0.0:+.{digits}f}{error}"  # 0.0: no -0.0
