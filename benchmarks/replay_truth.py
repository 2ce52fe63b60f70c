"""Does a replay of an overload say what happened? `python -m benchmarks.replay_truth [--logs FOLDER]` writes REPLAY.md.

Ten overloads are played in real time over real sockets (`benchmarks.overloads`, two at a time, 6 minutes), or their
logs are taken from FOLDER. Each log is replayed as `firsttoken replay` does it: from the access log and the
configuration alone, with SEEDS seeds. A figure is the share of the requests with a TTFT budget that met it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

from benchmarks.overloads import OVERLOADS, record
from gateway.config.loading import load
from lab.replay.from_log import LoggedAttainment, ReplayedLogs, with_fits
from lab.replay.player import play
from lab.replay.sim_fleet import Scenario, scenario_from
from lab.traffic.traces import Arrival
from lab.traffic.traffic import Traffic, TrafficSource

SEEDS = 5
AIM = 3.0  # points
AT_ONCE = 2
PAGE = Path(__file__).parent / "REPLAY.md"
INTRODUCTION = f"""# Does a replay say what happened?

Written by `python -m benchmarks.replay_truth`. Overloads of a gateway, played in real time over real sockets, against
simulated engines of altered speed; then replayed from the access log and the configuration alone, without profiles:
engines are fitted to the log. A figure is the share of the requests with a TTFT budget that met it; a replay is the
mean of {SEEDS} seeds, *seeds* the least and the most of them. *assumed* is the same replay with the profiles that are
assumed where nothing is known. The aim: at most {AIM:g} points off.

The same overload, played twice, differs too: the interval of what happened is Wilson's, of 95%.
Two at a time were recorded on a machine of two cores: what else it does delays first tokens that no replay knows of.

"""


@dataclass(frozen=True, slots=True)
class Truth:
    """Shares of one log. `seeds`: replayed, fitted; `assumed`: replayed with assumed profiles."""

    name: str
    happened: LoggedAttainment
    seeds: Sequence[float]
    assumed: float
    fit: str

    @property
    def off(self) -> float:
        """Points."""
        return 100 * (fmean(self.seeds) - self.happened.share)

    def row(self) -> str:
        low, high = self.happened.interval
        seeds = f"{min(self.seeds):.1%} to {max(self.seeds):.1%}"
        shares = f"{self.happened.share:.1%} | {low:.1%} to {high:.1%} | {fmean(self.seeds):.1%} | {seeds}"
        return (
            f"| {self.name} | {self.happened.judged} | {shares} | {self.off:+.1f} | {self.assumed:.1%} | {self.fit} |"
        )


def truth_of(name: str, folder: Path) -> Truth:
    config = load([folder / f"{name}.yaml"], {})
    traffic = Traffic((TrafficSource(str(folder / f"{name}.jsonl")),))
    scenario, logs = scenario_from(config), ReplayedLogs(traffic)
    arrivals = traffic.arrivals(scenario.routes, 1.0, 0)
    scenario = replace(scenario, block=arrivals[0].block)
    fits = logs.fit(scenario, config.pools)
    errors = ", ".join(f"{fit.ttft_error:.0%}" for fit in fits.values())
    happened = logs.attainments([route.name for route in scenario.routes.values() if route.ttft is not None])[-1]
    seeds = [_share(with_fits(scenario, fits), arrivals, seed) for seed in range(SEEDS)]
    return Truth(name, happened, seeds, _share(scenario, arrivals, 0), errors)


def _share(scenario: Scenario, arrivals: Sequence[Arrival], seed: int) -> float:
    return play(scenario, arrivals, seed).overall().attainment


def page(found: Sequence[Truth]) -> Iterator[str]:
    yield INTRODUCTION
    yield "| overload | requests | happened | 95% | replayed | seeds | off | assumed | fit: error of first tokens |"
    yield "|---|---|---|---|---|---|---|---|---|"
    yield from (each.row() for each in found)
    near = sum(abs(each.off) <= AIM for each in found)
    yield f"\n{near} of {len(found)} within {AIM:g} points.\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--logs", type=Path, help="folder with logs of an earlier run, or to keep those of this one")
    parser.add_argument("--record", metavar="NAME", help="only play this overload, into --logs")
    parser.add_argument("--seed", type=int, default=0, help="of the callers and engines that are recorded (default: 0)")
    args = parser.parse_args()
    if args.record is not None:
        record(args.record, args.logs, args.seed)
        return
    with TemporaryDirectory() as temporary:
        folder = args.logs or Path(temporary)
        missing = [name for name in OVERLOADS if not (folder / f"{name}.jsonl").exists()]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(lambda name: _record_apart(name, folder, args.seed), missing))
        text = "\n".join(page([truth_of(name, folder) for name in OVERLOADS]))
    PAGE.write_text(text)
    print(text)


def _record_apart(name: str, folder: Path, seed: int) -> None:
    """In a process of its own: an event loop is not shared with another overload."""
    command = [sys.executable, "-m", "benchmarks.replay_truth", "--record", name, "--logs", str(folder)]
    subprocess.run([*command, "--seed", str(seed)], check=True, timeout=120)


if __name__ == "__main__":
    main()
