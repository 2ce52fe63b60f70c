"""Cost of the endpoint picker behind the real Envoy.

    python scripts/envoy_setup.py                                            # once
    python -m benchmarks.picker [--rounds N] [--only KEY,...] [--write]

A plain Envoy, an Envoy that asks a picker (BUFFERED as in deploy/envoy, and FULL_DUPLEX_STREAMED), and our own proxy
take turns in every round, before the same engines; a figure is the median of the rounds. For CPU, Envoy, picker and
proxy share one core, and engines and load have the other; for TTFT, and for large prompts, all share all cores.
`--write` stores the figures that were measured, and the page.
"""

from __future__ import annotations

import argparse
import gc
import logging
import sys
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack

import uvloop

from benchmarks.client import BadAnswer
from benchmarks.peers import CORE, allow_connections
from benchmarks.picker.measures import MEASURES
from benchmarks.picker.page import Found, Run, table, write
from benchmarks.picker.paths import NAMES, DataPath, running
from benchmarks.processes import MachineTime, ahead_of_others, child, free_port, pin

ENGINES = 2
log = logging.getLogger("benchmarks")


def play(keys: Sequence[str], rounds: int, found: Found, *, pinned: bool) -> None:
    """Memory is of processes that have played all of `keys`."""
    with ExitStack() as stack:
        ports, core = [free_port() for _ in range(ENGINES)], CORE if pinned else None
        engine = [sys.executable, "-m", "benchmarks.engine", *map(str, ports)]
        stack.enter_context(child(engine, ports[-1], CORE + 1 if pinned else None))
        paths = [stack.enter_context(running(name, ports, core)) for name in NAMES]
        for turn in range(rounds):
            for key in keys:
                for path in paths:
                    print(f"round {turn + 1} of {rounds}: {key}, {path.name}", file=sys.stderr, flush=True)
                    one(key, path, turn, found)


def one(key: str, path: DataPath, turn: int, found: Found) -> None:
    """A path that fails is left out of the figure, with a message."""
    gc.collect()
    try:
        measured = uvloop.run(MEASURES[key].play(path, turn))
    except (BadAnswer, OSError, TimeoutError) as error:
        log.warning("%s, %s: %s", path.name, key, str(error)[:200] or type(error).__name__)
        return
    for name, value in measured.items():
        found[key][path.name][name].append(value)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.picker", description="Cost of the endpoint picker.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default=",".join(MEASURES), help=f"of {', '.join(MEASURES)}")
    parser.add_argument("--write", action="store_true", help="keep the results, and write the page")
    asked = parser.parse_args(arguments)
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    found: Found = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    allow_connections()
    gc.disable()  # a collection in the load would be a gap in every stream
    before, keys = MachineTime.now(), asked.only.split(",")
    with ahead_of_others():
        for pinned in (False, True):
            if chosen := [key for key in keys if MEASURES[key].pinned is pinned]:
                if pinned:
                    pin(CORE + 1)
                play(chosen, asked.rounds, found, pinned=pinned)
    run = Run.of(found, asked.rounds, MachineTime.now().stolen_since(before))
    print(table(run))
    if asked.write:
        write(run)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
