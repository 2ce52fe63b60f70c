"""`firsttoken replay`: a policy tried on recorded traffic, beside yardsticks and what was possible."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from gateway.config.config_errors import ConfigError, did_you_mean
from gateway.config.loading import load
from gateway.replay.replay_report import OTHER, as_json, report, worst
from gateway.replay.scenario import OURS, REFERENCE, SCORERS, YARDSTICKS, Scenario, setting_of, without_profile
from gateway.replay.sim_fleet import Fault
from gateway.replay.sweep import Result, Task, run
from gateway.replay.traces import TraceError
from gateway.replay.traffic_sources import Traffic, TrafficSource
from policies.routes.units import seconds

SWEPT = 5  # loads of a range
FAULT = re.compile(r"(?P<endpoint>\S+)@(?P<at>[^@=]+)=(?P<what>slow|kill|restart)(:(?P<factor>\d+(\.\d+)?))?")


def replay(args: argparse.Namespace) -> int:
    """Exit code 0; raises ConfigError where the configuration, a trace or an argument is wrong."""
    if args.seeds < 1:
        raise _wrong("--seeds 0: one at least")
    traffic = Traffic(tuple(map(TrafficSource.parse, args.traces)), args.limit, args.seconds)
    setting = _setting(args.files, args)
    other = _setting(args.files_b, args) if args.files_b else None
    loads, scorers = _loads(args.load), _scorers(args.scorers, not args.no_reference)
    _check(traffic, [setting, *([other] if other else [])], loads, args.seed)
    tasks = list(_tasks(args, setting, other, loads, scorers))
    results = list(_watched(run(tasks, traffic), len(tasks)))
    if args.json:
        print(json.dumps(as_json(results), indent=2))
        return 0
    print(report(results, setting.routes, other.routes if other else {}))
    if args.worst:
        print("\n" + (worst(results) or "no decision was regretted"))
    return 0


def _tasks(
    args: argparse.Namespace, setting: Scenario, other: Scenario | None, loads: Sequence[float], scorers: Sequence[str]
) -> Iterator[Task]:
    played = [(OURS, setting), *([(OTHER, other)] if other else []), *((s, setting.with_scorer(s)) for s in scorers)]
    for factor in loads:
        for name, chosen in played:
            for seed in range(args.seed, args.seed + args.seeds):
                yield Task(name, chosen, factor, seed, args.worst if name in (OURS, OTHER) and seed == args.seed else 0)


def _watched(results: Iterable[Result], total: int) -> Iterator[Result]:
    """Progress is for whoever looks at a terminal."""
    shown = sys.stderr.isatty()
    for number, result in enumerate(results, 1):
        if shown:
            print(f"\rreplayed {number} of {total}", end="" if number < total else "\n", file=sys.stderr, flush=True)
        yield result


# ---------------------------------------------------------------- arguments


def _setting(files: Sequence[Path], args: argparse.Namespace) -> Scenario:
    config = load(files, os.environ)
    if args.workers is not None:
        config = config.with_workers(args.workers)
    setting = setting_of(config)
    if args.replicas is not None:
        if args.workers is not None and args.workers > 1:
            raise _wrong("--replicas: of one process each; leave --workers out")
        setting = replace(setting, workers=1, replicas=args.replicas, news=_news(args.news))
    if not setting.routes:
        raise _wrong("the configuration has no routes to replay on")
    for pool, profile in without_profile(config).items():
        print(f"firsttoken: pool {pool} has no `profile`: taken for {profile}", file=sys.stderr)
    return replace(setting, faults=tuple(_fault(text, setting) for text in args.fault))


def _news(text: str) -> float | None:
    try:
        return None if text == "off" else seconds(text)
    except ValueError as error:
        raise _wrong(f"--news {text}: {error}; or off") from None


def _wrong(message: str) -> ConfigError:
    return ConfigError([f"firsttoken: {message}"])


def _fault(text: str, setting: Scenario) -> Fault:
    found = FAULT.fullmatch(text)
    if found is None:
        raise _wrong(f"--fault {text}: write ENDPOINT@TIME=WHAT, such as main/h1:8000@90s=slow:5, =kill or =restart")
    endpoint, what = found["endpoint"], found["what"]
    if endpoint not in setting.profiles:
        raise _wrong(f"--fault {text}: no endpoint '{endpoint}'{did_you_mean(endpoint, setting.profiles)}")
    try:
        at = seconds(found["at"])
    except ValueError as error:
        raise _wrong(f"--fault {text}: {error}") from None
    return Fault(at, endpoint, what, float(found["factor"] or 1.0))


def _loads(text: str) -> list[float]:
    """`1`, `0.6,1,1.4`, or `0.6..1.4`: five from one to the other."""
    try:
        low, ranged, high = text.partition("..")
        if ranged:
            step = (float(high) - float(low)) / (SWEPT - 1)
            loads = [round(float(low) + step * i, 6) for i in range(SWEPT)]
        else:
            loads = [float(part) for part in text.split(",")]
        if not all(0 < factor < float("inf") for factor in loads):
            raise ValueError
    except ValueError:
        raise _wrong(f"--load {text}: write numbers above 0, such as 1, 0.6,1,1.4 or 0.6..1.4") from None
    return sorted(set(loads))


def _scorers(text: str, reference: bool) -> list[str]:
    names = list(YARDSTICKS) if text == "all" else [] if text == "none" else text.split(",")
    for name in names:
        if name not in SCORERS:
            raise _wrong(f"--scorers: no '{name}'{did_you_mean(name, SCORERS)}")
    chosen = [name for name in names if name not in (OURS, REFERENCE)]
    return [*chosen, *([REFERENCE] if reference else [])]


def _check(traffic: Traffic, settings: Sequence[Scenario], loads: Sequence[float], seed: int) -> None:
    """What is wrong with a trace is said before anything is played."""
    try:
        if not all(traffic.arrivals(setting, factor, seed) for setting in settings for factor in loads[:1]):
            raise TraceError("no request is left to replay; raise --seconds")
    except TraceError as error:
        raise _wrong(str(error)) from None
