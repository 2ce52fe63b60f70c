"""`firsttoken capacity TRACE`: how many engines recorded traffic takes, and how much of it the present ones carry."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

from gateway.config.config_errors import ConfigError, did_you_mean
from gateway.config.loading import load
from gateway.part_list import CONFIG
from lab.capacity.budget_shares import budgets_of
from lab.capacity.capacity_report import CapacityAnswer, as_json, report
from lab.capacity.fleet_size import FleetSizeQuestion, FleetSizeResult, replayed
from lab.capacity.smallest_fleet import FleetSearch
from lab.replay.sim_fleet import Scenario, assumed_profiles, scenario_from
from lab.traffic.session_sample import with_sessions
from lab.traffic.traces import TraceError
from lab.traffic.traffic import Traffic, TrafficSource
from policies.types import FOREVER

MOST = 64  # engines of a pool
LOADS = 1 / 64, 64.0  # multiples of the trace's rate among which a fleet's own is sought
STEPS = 4  # replays between a load and its double: to 5%


def capacity(args: argparse.Namespace) -> int:
    """Returns exit code 0; raises ConfigError if the configuration, a trace or an argument is wrong."""
    scenario = _scenario(args)
    pool = _pool(args.pool, scenario)
    present = next(len(found.endpoints) for found in scenario.pools if found.name == pool)
    asked = CapacityTask(scenario, _traffic(args), pool, args.load, args.seed)
    sizes = _sizes(args.engines, present)
    results = {result.n: result for result in asked.curve(sizes)}
    search = FleetSearch(results.__getitem__, min(sizes), max(sizes)).whole()
    carried = None if args.no_load else asked.carried_load(present)
    answer = CapacityAnswer(pool, present, args.load, search, carried, asked.rate)
    print(json.dumps(as_json(answer), indent=2) if args.json else report(answer))
    return 0


@dataclass(frozen=True, slots=True)
class CapacityTask:
    """Traffic on the routes of a scenario, for a pool of different sizes."""

    scenario: Scenario
    traffic: Traffic
    pool: str
    load: float
    seed: int

    @property
    def rate(self) -> float:
        """Requests per second at a load of 1."""
        arrivals = self.traffic.arrivals(self.scenario.routes, 1.0, self.seed)
        return len(arrivals) / max(arrivals[-1].at, 1e-9)

    def question(self, load: float, n: int) -> FleetSizeQuestion:
        """`n`: engines, none of them new. Raises ConfigError for a wrong trace."""
        try:
            arrivals = self.traffic.arrivals(self.scenario.routes, load, self.seed)
        except TraceError as error:
            raise _error(str(error)) from None
        if not arrivals:
            raise _error("no request left to replay; raise --seconds")
        return FleetSizeQuestion(self.scenario, with_sessions(arrivals), self.pool, n, slice=FOREVER, seed=self.seed)

    def curve(self, sizes: Sequence[int]) -> Iterator[FleetSizeResult]:
        question = self.question(self.load, 1)
        with ProcessPoolExecutor(min(len(sizes), os.cpu_count() or 1)) as processes:
            found = processes.map(partial(_of_size, question), sizes)
            yield from _with_progress(found, len(sizes))

    def carried_load(self, n: int) -> float | None:
        """The largest multiple of the trace's rate that meets every budget on `n` engines, by bisection; None: even
        the smallest does not."""
        low, high = self._around(n)
        if low < LOADS[0]:
            return None
        for _ in range(STEPS):
            middle = (low * high) ** 0.5
            low, high = (middle, high) if self._is_carried(middle, n) else (low, middle)
        return low

    def _around(self, n: int) -> tuple[float, float]:
        """A load that is carried, and its double that is not."""
        load = self.load
        while load >= LOADS[0] and not self._is_carried(load, n):
            load /= 2
        if load == self.load:
            while load < LOADS[1] and self._is_carried(2 * load, n):
                load *= 2
        return load, 2 * load

    def _is_carried(self, load: float, n: int) -> bool:
        return replayed(self.question(load, n), n).is_enough


def _of_size(question: FleetSizeQuestion, n: int) -> FleetSizeResult:
    return replayed(replace(question, current=n), n)


def _with_progress(results: Iterable[FleetSizeResult], total: int) -> Iterator[FleetSizeResult]:
    """Shows the progress on a terminal."""
    for number, result in enumerate(results, 1):
        if sys.stderr.isatty():
            print(f"\rreplayed {number} of {total}", end="" if number < total else "\n", file=sys.stderr, flush=True)
        yield result


# ---------------------------------------------------------------- arguments


def _scenario(args: argparse.Namespace) -> Scenario:
    config = load(args.files, os.environ, CONFIG)
    scenario = scenario_from(config)
    if not any(budgets_of(route) for route in scenario.routes.values()):
        raise _error("no route of the configuration has a budget: add `ttft: {budget: 1s}` to a route")
    for pool, profile in assumed_profiles(config).items():
        print(f"firsttoken: pool {pool} has no `profile`: assuming {profile}", file=sys.stderr)
    return scenario


def _pool(name: str | None, scenario: Scenario) -> str:
    pools = [pool.name for pool in scenario.pools if pool.local]
    if name is None and len(pools) == 1:
        return pools[0]
    if name is None:
        raise _error(f"--pool: name the pool whose engines are counted: {', '.join(pools) or 'there is none'}")
    if name not in pools:
        raise _error(f"--pool {name}: no pool of engines has this name{did_you_mean(name, pools)}")
    return name


def _traffic(args: argparse.Namespace) -> Traffic:
    return Traffic(tuple(map(TrafficSource.parse, args.traces)), args.limit, args.seconds, args.sessions, False)


def _sizes(text: str | None, present: int) -> list[int]:
    """`LOW..HIGH`; by default from 1 to twice the present number."""
    low, _, high = (text or f"1..{min(2 * present + 2, MOST)}").partition("..")
    if not (low.isdecimal() and high.isdecimal() and 1 <= int(low) <= int(high) <= MOST):
        raise _error(f"--engines {text}: write LOW..HIGH, such as 2..12, up to {MOST}")
    return [*range(int(low), int(high) + 1)]


def _error(message: str) -> ConfigError:
    return ConfigError([f"firsttoken: {message}"])
