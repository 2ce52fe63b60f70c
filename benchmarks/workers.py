"""One worker and two behind one port: requests a second, and CPU per request (`workers.py [ROUNDS]`).

Both gateways run all the time and are loaded in turns. With one worker, one of two cores is the gateway's, the other
the engine's and the load's; two workers have a core each, shared with engine and load. So requests a second are valid
for this machine with everything on it; CPU per request carries over to a larger machine.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from time import perf_counter

import uvloop

from benchmarks.client import closed_loop, request
from benchmarks.processes import child, cpu_seconds, free_port
from benchmarks.prompts import text

CORES = os.cpu_count() or 1
CONFIG = """
server: {{listen: 127.0.0.1:{port}, admin: 127.0.0.1:0}}
pools: {{engines: {{backend: vllm, model: bench, endpoints: [http://127.0.0.1:{engine}]}}}}
passthrough: engines
telemetry: {{access_log: off}}
"""


@dataclass(frozen=True)
class Load:
    """`count` requests of `size` characters, `at_once` in parallel."""

    name: str
    shape: str  # of the answer
    count: int
    at_once: int
    size: int


LOADS = (
    Load("request, 200 B", "whole", 3000, 32, 60),
    Load("request, 8 KB", "whole", 1500, 32, 8000),
    Load("stream of 10", "stream-10-5", 512, 64, 60),
)


@dataclass(frozen=True)
class Serving:
    """A running gateway: the supervisor, if any, and the serving processes."""

    port: int
    pid: int
    workers: tuple[int, ...]


@contextmanager
def serving(home: Path, engine: int, workers: int) -> Iterator[Serving]:
    port = free_port()
    config = home / f"{workers}.yaml"
    config.write_text(CONFIG.format(port=port, engine=engine))
    command = [sys.executable, "-m", "gateway.cli", "serve", "--config", str(config), "--workers", str(workers)]
    with child(command, port) as pid:
        forked = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        serves = tuple(map(int, forked[:workers])) or (pid,)
        for core, worker in enumerate(serves):
            os.sched_setaffinity(worker, {core % CORES})
        yield Serving(port, pid, serves)


def measure(gateway: Serving, load: Load) -> tuple[float, float, float]:
    """Requests a second; microseconds of CPU per request, of all processes; the least share of a worker."""
    before = [cpu_seconds(pid) for pid in (gateway.pid, *gateway.workers)]
    began = perf_counter()
    uvloop.run(closed_loop(gateway.port, repeat(request(load.shape, [text(load.size)]), load.count), load.at_once))
    took = perf_counter() - began
    spent = [cpu_seconds(pid) - was for pid, was in zip((gateway.pid, *gateway.workers), before, strict=True)]
    return load.count / took, spent[0] * 1e6 / load.count, min(spent[1:]) / spent[0]


def main(rounds: int) -> None:
    engine, found = free_port(), defaultdict[tuple[int, str], list[tuple[float, float, float]]](list)
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        engine_pid = stack.enter_context(child([sys.executable, "-m", "benchmarks.engine", str(engine)], engine))
        gateways = {workers: stack.enter_context(serving(home, engine, workers)) for workers in (1, 2)}
        for turn in range(rounds + 1):  # the first warms up
            for load in LOADS:
                for workers, gateway in gateways.items():
                    for pid in (0, engine_pid):
                        os.sched_setaffinity(pid, {1 % CORES} if workers == 1 else range(CORES))
                    if (measured := measure(gateway, load)) and turn:
                        found[workers, load.name].append(measured)
    report(found)


def report(found: Mapping[tuple[int, str], Sequence[tuple[float, float, float]]]) -> None:
    print("| best of all rounds | workers | requests/s | us of CPU per request | least share of a worker |")
    print("|---|---|---|---|---|")
    for (workers, load), measured in sorted(found.items(), key=lambda item: item[0][1]):
        rates, costs, shares = zip(*measured, strict=True)
        rate, cost, share = max(rates), min(costs), statistics.median(shares)
        print(f"| {load} | {workers} | {rate:.0f} | {cost:.0f} | {share:.0%} |")
    print(f"One worker: it on core 0, engine and load on core 1. Two: one on each of {CORES} cores, the rest anywhere.")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
