"""CPU profile of a request: `profile_request.py [SECONDS]` prints microseconds by stage and by function.

Four loads: a small request, a new prompt of 8 KB and a conversation of 100 KB with a new last 1 KB, each answered by a
stream of 200 tokens, and a chunk of such a stream. The cost is
measured on an undisturbed gateway; the shares by stage on another, sampled meanwhile (`sampled.py`) for SECONDS of its
CPU. Time in a library or the kernel is in the row of the caller; reading from sockets, accepting and waiting are in
`loop`. The kernel ticks about 250 times a second: at 30 s a row of 1% has an error of a tenth.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count, repeat
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import uvloop

from benchmarks.client import closed_loop, request
from benchmarks.figures.cost import QUESTION
from benchmarks.figures.users import AT_ONCE, SHAPE, TOKENS, Prompts
from benchmarks.peers import CORE
from benchmarks.processes import ROOT, child, cpu_seconds, free_port, gateway, pin
from benchmarks.suite import engines

SHOWN = 30  # functions
ROWS = (  # the first match: by the beginning of a file's path from the root of the repository
    ("downstream", ("gateway/downstream/",)),
    ("api", ("gateway/api/", "gateway/admission/")),
    ("tokenize", ("gateway/tokenize/",)),
    (
        "attempts",
        ("gateway/proxy", "gateway/upstream/dispatcher", "policies/attempts/"),
    ),
    ("relay", ("gateway/upstream/answer", "backends/stream/")),
    ("upstream", ("gateway/upstream/", "backends/")),
    ("observe", ("gateway/observe/",)),
    ("cache warming", ("gateway/parts/warming",)),
    ("decide", ("gateway/scheduler", "gateway/fleet/monitor", "policies/")),
)
LOOP, THREADS = "loop", "threads"
WRITING = 10.0  # s

Play = Callable[[int], int]  # on this port; how many there were


@dataclass(slots=True)
class Samples:
    """Seconds of CPU by row of the table and by function: own, and cumulative."""

    garbage: float
    rows: Counter[str] = field(default_factory=Counter)
    own: Counter[str] = field(default_factory=Counter)
    cumulative: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, found: Any) -> Samples:
        """Reads the output of a Sampler."""
        samples = cls(found["garbage"])
        samples.rows[THREADS] = samples.own[THREADS] = samples.cumulative[THREADS] = found["threads"]
        for stack, used in found["stacks"]:
            samples.add(stack, used)
        return samples

    def add(self, stack: Sequence[tuple[str, str]], used: float) -> None:
        """File and function, the innermost first. Library time is its caller's."""
        known = [(row, path, name) for file, name in stack if (row := row_of(path := os.path.relpath(file, ROOT)))]
        named = [(row, f"{path}:{name}") for row, path, name in known] or [(LOOP, LOOP)]
        self.rows[named[0][0]] += used  # type: ignore[assignment]
        self.own[named[0][1]] += used  # type: ignore[assignment]
        for name in {name for _, name in named}:
            self.cumulative[name] += used  # type: ignore[assignment]

    @property
    def total(self) -> float:
        return sum(self.rows.values())


def row_of(path: str) -> str | None:
    """None: of a library, or of the gateway's start-up."""
    return next((row for row, begins in ROWS if path.startswith(begins)), None)


# -- the loads -----------------------------------------------------------------------------


def small(port: int) -> int:
    return uvloop.run(closed_loop(port, repeat(request("whole", QUESTION), 2_000), 32))


def streams(prompts: Prompts) -> Play:
    """Never the same prompts twice, but for the two gateways, which take turns."""
    seeds = count()

    def play(port: int) -> int:
        first, requests = prompts.ask(2 * AT_ONCE, f"{prompts.name} {next(seeds) // 2}")
        uvloop.run(closed_loop(port, first, AT_ONCE))
        return uvloop.run(closed_loop(port, requests, AT_ONCE))

    return play


def chunk(port: int) -> int:
    return TOKENS * uvloop.run(closed_loop(port, repeat(request(SHAPE, ["Go on."]), AT_ONCE), AT_ONCE))


LOADS: Mapping[str, Play] = {
    "small request": small,
    "8 KB, new, streamed": streams(Prompts(8_000, False)),
    "100 KB, 1 KB new, streamed": streams(Prompts(100_000, True)),
    f"chunk of {TOKENS}": chunk,
}


@dataclass(frozen=True, slots=True)
class Gateways:
    """Port and process of an undisturbed and of a sampled gateway; the file of its samples."""

    alone: tuple[int, int]
    sampled: tuple[int, int]
    samples: Path


def profile(play: Play, gateways: Gateways, seconds: float) -> tuple[float, Samples]:
    """Microseconds of each, and the samples."""
    play(gateways.alone[0])
    play(gateways.sampled[0])
    read_samples(gateways)
    used, played, until = 0.0, 0, cpu_seconds(gateways.sampled[1]) + seconds
    while cpu_seconds(gateways.sampled[1]) < until:
        before = cpu_seconds(gateways.alone[1])
        played += play(gateways.alone[0])
        used += cpu_seconds(gateways.alone[1]) - before
        play(gateways.sampled[0])
    return used * 1e6 / played, Samples.of(read_samples(gateways))


def read_samples(gateways: Gateways) -> Any:
    """Samples since the last call. Raises TimeoutError."""
    gateways.samples.unlink(missing_ok=True)
    os.kill(gateways.sampled[1], signal.SIGUSR1)
    ends = monotonic() + WRITING
    while not gateways.samples.exists():
        if monotonic() > ends:
            raise TimeoutError("the sampled gateway does not say what it found")
        sleep(0.01)
    return json.loads(gateways.samples.read_text())


# -- the tables ----------------------------------------------------------------------------


def by_row(found: Mapping[str, tuple[float, Samples]]) -> Iterator[str]:
    yield f"| us of CPU | {' | '.join(found)} |"
    yield f"| --- |{' ---: |' * len(found)}"
    for row in (LOOP, *(row for row, _ in ROWS), THREADS):
        cells = (f"{cost * samples.rows[row] / samples.total:.1f}" for cost, samples in found.values())
        yield f"| {row} | {' | '.join(cells)} |"
    yield f"| **in all** | {' | '.join(f'**{cost:.1f}**' for cost, _ in found.values())} |"
    garbage = (f"{cost * samples.garbage / samples.total:.1f}" for cost, samples in found.values())
    yield f"| of which garbage collection | {' | '.join(garbage)} |"


def by_function(name: str, cost: float, samples: Samples) -> Iterator[str]:
    yield f"\n{name}: {samples.total:.1f} s of CPU\n"
    yield "| function | own us | with all that it calls |"
    yield "| --- | ---: | ---: |"
    for function, own in samples.own.most_common(SHOWN):
        cells = (f"{cost * used / samples.total:.1f}" for used in (own, samples.cumulative[function]))
        yield f"| {function} | {' | '.join(cells)} |"


def main(seconds: float) -> None:
    pin(CORE + 1)
    with tempfile.TemporaryDirectory() as home, ExitStack() as stack:
        behind, samples = stack.enter_context(engines()), Path(home) / "samples"
        urls = [f"http://127.0.0.1:{port}" for port in behind.ports]
        ports = free_port(), free_port()
        commands: Sequence[list[str]] = (
            gateway(ports[0], *urls),
            [sys.executable, "-m", "benchmarks.sampled", str(samples), str(ports[1]), *urls],
        )
        pids = [
            stack.enter_context(child(command, port, CORE, quiet=True))
            for command, port in zip(commands, ports, strict=True)
        ]
        gateways = Gateways((ports[0], pids[0]), (ports[1], pids[1]), samples)
        found = {name: profile(play, gateways, seconds) for name, play in LOADS.items()}
    print("\n".join(by_row(found)))
    for name, (cost, samples_of) in found.items():
        print("\n".join(by_function(name, cost, samples_of)))


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 30.0)
