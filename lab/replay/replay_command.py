"""`firsttoken replay`: a policy on recorded traffic, compared with baselines and the clairvoyant reference."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from gateway.config.config_errors import ConfigError, did_you_mean
from gateway.config.loading import load
from gateway.part_list import CONFIG
from lab.replay.from_log import ReplayedLogs, fit_lines, with_fits
from lab.replay.player import ReplayResult, ReplayTask, run
from lab.replay.replay_html import write_html
from lab.replay.replay_report import OTHER, as_json, report, worst_decisions
from lab.replay.sim_fleet import (
    BASELINES,
    OURS,
    REFERENCE,
    SCORERS,
    Scenario,
    ScheduledFault,
    assumed_profiles,
    scenario_from,
)
from lab.replay.what_if import changed
from lab.traffic.traces import TraceError
from lab.traffic.traffic import Traffic, TrafficSource
from policies.routes.route import seconds

LIVE = ("ttft", "speed", "model", "key", "key_env", "timeout")  # options of a replay in real time
RANGE_LOADS = 5  # loads in `LOW..HIGH`
FAULT = re.compile(r"(?P<endpoint>\S+)@(?P<at>[^@=]+)=(?P<kind>slow|kill|restart)(:(?P<factor>\d+(\.\d+)?))?")


def replay(args: argparse.Namespace) -> int:
    """Returns exit code 0; raises ConfigError if the configuration, a trace or an argument is wrong."""
    if args.live is not None:
        from lab.live.live_command import replay_live

        return replay_live(args)
    if not args.files:
        raise _error("the following arguments are required: --config, or --live URL (see firsttoken replay --help)")
    if given := [name for name in LIVE if getattr(args, name) is not None]:
        raise _error(f"--{given[0].replace('_', '-')} belongs to --live: add --live URL")
    if args.seeds < 1:
        raise _error("--seeds 0: must be at least 1")
    sources = tuple(map(TrafficSource.parse, args.traces))
    traffic = Traffic(sources, args.limit, args.seconds, args.sessions, args.closed)
    logs, scorers = _logs(traffic), _scorers(args.scorers, not args.no_reference)
    asked = {name: _scenario(files, args) for name, files in ((OURS, args.files), (OTHER, args.files_b)) if files}
    loads = _loads(args.load)
    for text in args.what_if:
        _changed(asked[OURS][0], text, logs)  # a mistake is told before engines are fitted, which takes minutes
    policies = {name: _with_profiles(scenario, assumed, logs) for name, (scenario, assumed) in asked.items()}
    policies |= {f"with {text}": _changed(policies[OURS], text, logs) for text in args.what_if}
    tasks = list(_tasks(args, policies, loads, scorers))
    _check_traffic(traffic, policies, tasks[0])
    results = list(_with_progress(run(tasks, traffic), len(tasks)))
    happened = logs.attainments(policies[OURS].routes)
    told = report(results, {name: policy.routes for name, policy in policies.items()})
    if args.html is not None:
        write_html(args.html, results, happened, fit_lines(logs.fits), told)
    if args.json:
        print(json.dumps(as_json(results), indent=2))
        return 0
    print("\n".join([*(each.line() for each in happened), told]))
    if args.worst:
        print("\n" + (worst_decisions(results) or "no decision with regret"))
    return 0


def _tasks(
    args: argparse.Namespace, policies: Mapping[str, Scenario], loads: Sequence[float], scorers: Sequence[str]
) -> Iterator[ReplayTask]:
    played = {**policies, **{scorer: policies[OURS].with_scorer(scorer) for scorer in scorers}}
    for factor in loads:
        for name, scenario in played.items():
            for seed in range(args.seed, args.seed + args.seeds):
                keep = args.worst if name in policies and seed == args.seed else 0
                yield ReplayTask(name, scenario, factor, seed, keep)


def _check_traffic(traffic: Traffic, policies: Mapping[str, Scenario], first: ReplayTask) -> None:
    """Reports an error in a trace before the first replay."""
    try:
        if not all(traffic.arrivals(scenario.routes, first.load, first.seed) for scenario in policies.values()):
            raise TraceError("no request left to replay; raise --seconds")
    except TraceError as error:
        raise _error(str(error)) from None


def _with_progress(results: Iterable[ReplayResult], total: int) -> Iterator[ReplayResult]:
    """Shows the progress on a terminal."""
    for number, result in enumerate(results, 1):
        if sys.stderr.isatty():
            print(f"\rreplayed {number} of {total}", end="" if number < total else "\n", file=sys.stderr, flush=True)
        yield result


# ---------------------------------------------------------------- arguments


def _logs(traffic: Traffic) -> ReplayedLogs:
    try:
        return ReplayedLogs(traffic)
    except TraceError as error:
        raise _error(str(error)) from None


def _changed(scenario: Scenario, text: str, logs: ReplayedLogs) -> Scenario:
    try:
        found = changed(scenario, text)
        if found.repaired is not None:
            logs.check_breaks(found.repaired, scenario.routes)
        return found
    except ValueError as error:
        raise _error(f"--what-if {text}: {error}") from None


def _scenario(files: Sequence[Path], args: argparse.Namespace) -> tuple[Scenario, Mapping[str, str]]:
    """The scenario, and the profiles that it assumes of servers without a configured one, by pool."""
    config = load(files, os.environ, CONFIG)
    if args.workers is not None:
        config = config.with_workers(args.workers)
    scenario = scenario_from(config)
    if args.replicas is not None:
        if args.workers is not None and args.workers > 1:
            raise _error("--replicas: each replica has one process; leave --workers out")
        scenario = replace(scenario, workers=1, replicas=args.replicas, peer_delay=_peer_delay(args.news))
    if not scenario.routes:
        raise _error("the configuration has no routes to replay on")
    faults = tuple(_fault(text, scenario) for text in args.fault)
    scenario = replace(scenario, faults=faults, score_per_1k=_score_per_1k(args.score_per_1k))
    return scenario, assumed_profiles(config)


def _with_profiles(scenario: Scenario, assumed: Mapping[str, str], logs: ReplayedLogs) -> Scenario:
    """Servers without a configured profile are fitted to the log, else assumed: either is reported."""
    fits = logs.fit(scenario, assumed)
    for line in fit_lines(fits):
        print(f"firsttoken: {line}", file=sys.stderr)
    for pool in scenario.pools:
        if pool.name in assumed and not any(endpoint.id in fits for endpoint in pool.endpoints):
            print(f"firsttoken: pool {pool.name} has no `profile`: assuming {assumed[pool.name]}", file=sys.stderr)
    return with_fits(scenario, fits)


def _score_per_1k(text: str | None) -> float | None:
    try:
        return None if text is None else seconds(text)
    except ValueError as error:
        raise _error(f"--score-per-1k {text}: {error}") from None


def _peer_delay(text: str) -> float | None:
    try:
        return None if text == "off" else seconds(text)
    except ValueError as error:
        raise _error(f"--news {text}: {error}; or off") from None


def _error(message: str) -> ConfigError:
    return ConfigError([f"firsttoken: {message}"])


def _fault(text: str, scenario: Scenario) -> ScheduledFault:
    found = FAULT.fullmatch(text)
    if found is None:
        raise _error(f"--fault {text}: write ENDPOINT@TIME=WHAT, such as main/h1:8000@90s=slow:5, =kill or =restart")
    endpoint = found["endpoint"]
    if endpoint not in scenario.profiles:
        raise _error(f"--fault {text}: no endpoint '{endpoint}'{did_you_mean(endpoint, scenario.profiles)}")
    try:
        at = seconds(found["at"])
    except ValueError as error:
        raise _error(f"--fault {text}: {error}") from None
    return ScheduledFault(at, endpoint, found["kind"], float(found["factor"] or 1.0))


def _loads(text: str) -> list[float]:
    """`1`, `0.6,1,1.4`, or `0.6..1.4`: RANGE_LOADS equidistant loads."""
    try:
        low, is_range, high = text.partition("..")
        if is_range:
            step = (float(high) - float(low)) / (RANGE_LOADS - 1)
            loads = [round(float(low) + step * i, 6) for i in range(RANGE_LOADS)]
        else:
            loads = [float(part) for part in text.split(",")]
        if not all(0 < factor < float("inf") for factor in loads):
            raise ValueError
    except ValueError:
        raise _error(f"--load {text}: write numbers above 0, such as 1, 0.6,1,1.4 or 0.6..1.4") from None
    return sorted(set(loads))


def _scorers(text: str, reference: bool) -> list[str]:
    names = list(BASELINES) if text == "all" else [] if text == "none" else text.split(",")
    for name in names:
        if name not in SCORERS:
            raise _error(f"--scorers: no scorer '{name}'{did_you_mean(name, SCORERS)}")
    chosen = [name for name in names if name not in (OURS, REFERENCE)]
    return [*chosen, *([REFERENCE] if reference else [])]
