"""The whole suite: our gateway beside its peers and beside the last committed result (`make bench`).

    python -m benchmarks.suite [--rounds N] [--peers ours,nginx,...] [--only PATTERN,...] [--write]

The proxy is on one core, the engines and the load on the other. In each round every scenario is played to one peer
after the other, so a drifting machine drifts for all; a figure is the median of the rounds. `--write` stores RESULTS.md
and results.json, whose committed version the next run shows; with `--only`, it replaces these figures alone.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from fnmatch import fnmatch

import uvloop

from benchmarks import decision, page
from benchmarks.client import BadAnswer
from benchmarks.figures import cost, crowd, held, intrusion, latency, users
from benchmarks.figures.figure import Block, Engines, Measured, Scenario
from benchmarks.peers import CORE, DIRECT, OURS, PEERS, Proxy, allow_connections, running
from benchmarks.processes import MachineTime, ahead_of_others, child, free_port, pin

log = logging.getLogger("benchmarks")

OTHERS = Block(
    "Prompts without a long answer, small requests, and those who wait",
    "As in earlier versions of this page, but for the prompts' text, which was of a hundred words.",
    [*cost.SCENARIOS, *latency.SCENARIOS, *held.SCENARIOS, *intrusion.SCENARIOS],
)
BLOCKS: Sequence[Block] = (*users.BLOCKS, *crowd.BLOCKS, OTHERS)
SCENARIOS: Sequence[Scenario] = [scenario for block in BLOCKS for scenario in block.scenarios]
ENGINES = 2
LIMIT = 120.0  # s, limit of one scenario and peer
ALL = "*"
Values = dict[str, dict[str, list[float]]]  # by figure, then by peer


@contextmanager
def engines() -> Iterator[Engines]:
    ports = [free_port() for _ in range(ENGINES)]
    with child([sys.executable, "-m", "benchmarks.engine", *map(str, ports)], ports[-1], CORE + 1) as pid:
        yield Engines(ports, pid)


def play(scenario: Scenario, proxy: Proxy, behind: Engines) -> Measured:
    """Empty, with a message, if the peer fails."""
    gc.collect()
    try:
        with running(proxy.name, behind.ports) if scenario.fresh else nullcontext(proxy) as played:
            return uvloop.run(_within(scenario, played, behind))
    except (BadAnswer, OSError, RuntimeError, TimeoutError) as error:
        log.warning("%s, %s: %s", proxy.name, scenario.name, str(error)[:200] or type(error).__name__)
        return {}


async def _within(scenario: Scenario, proxy: Proxy, behind: Engines) -> Measured:
    async with asyncio.timeout(LIMIT):
        return await scenario.measure(proxy, behind)


def measure(names: Sequence[str], scenarios: Sequence[Scenario], rounds: int) -> Values:
    values: Values = defaultdict(lambda: defaultdict(list))
    with ExitStack() as stack:
        behind = stack.enter_context(engines())
        proxies = list(started(names, behind, stack))
        direct = Proxy(DIRECT, behind.ports[0], 0)
        for number in range(rounds):
            behind = replace(behind, turn=number)
            for scenario in scenarios:
                print(f"round {number + 1} of {rounds}: {scenario.name}", file=sys.stderr, flush=True)
                played = [direct, *proxies] if scenario.with_direct else proxies
                note(scenario, {proxy.name: play(scenario, proxy, behind) for proxy in played}, values)
    return values


def started(names: Sequence[str], behind: Engines, stack: ExitStack) -> Iterator[Proxy]:
    """The peers which start; prints the others."""
    for name in names:
        try:
            yield stack.enter_context(running(name, behind.ports))
        except (OSError, subprocess.SubprocessError) as error:
            log.warning("%s is left out: %s", name, error)


def note(scenario: Scenario, found: dict[str, Measured], values: Values) -> None:
    """Subtracts the direct connection's value where a figure is an addition."""
    bare = found.get(DIRECT, {})
    for name, measured in found.items():
        for key in {figure.achieved for figure in scenario.figures} & set(measured):
            values[key][name].append(measured[key])
        for figure in scenario.figures:
            if figure.key in measured and (not figure.added or figure.key in bare):
                off = bare[figure.key] if figure.added and name != DIRECT else 0.0
                values[figure.key][name].append(measured[figure.key] - off)


def main(arguments: Sequence[str]) -> int:
    asked = parser().parse_args(arguments)
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    scenarios = [each for each in SCENARIOS if any(fnmatch(each.name, only) for only in asked.only.split(","))]
    pin(CORE + 1)
    allow_connections()
    gc.disable()  # a collection in the load would be a gap in every stream
    before = MachineTime.now()
    with ahead_of_others():
        values = measure(asked.peers.split(","), scenarios, asked.rounds)
    gc.enable()
    decided = list(decision.lines()) if asked.only == ALL else []
    results = page.Results.of(values, decided, asked.rounds, MachineTime.now().stolen_since(before))
    print(page.tables(BLOCKS, results, page.committed()))
    print("\n".join(decided))
    if asked.write:
        page.write(BLOCKS, results.on_top_of(page.stored() if asked.only != ALL else None), page.committed())
    return 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m benchmarks.suite", description="Ours beside its peers.")
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--peers", default=",".join(PEERS), help=f"of {', '.join(PEERS)}; {OURS} is what it is about")
    scenarios = ", ".join(each.name for each in SCENARIOS)
    made.add_argument("--only", default=ALL, help=f"scenarios, `*` for any letters: {scenarios}")
    made.add_argument("--write", action="store_true", help="keep the results beside this file")
    return made


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
