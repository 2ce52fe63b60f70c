"""Measures of one data path: CPU and TTFT of short answers, CPU of long ones, large prompts of many callers, memory."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import repeat
from statistics import mean, quantiles
from time import perf_counter

from benchmarks.client import Answer, closed_loop, connect, open_loop, request
from benchmarks.figures.users import Prompts
from benchmarks.picker.paths import DataPath
from benchmarks.processes import cpu_seconds, resident
from benchmarks.prompts import Writer

Measured = Mapping[str, float]  # by key of the figure
RATE, SECONDS = 150.0, 6.0  # requests per second, and s, of short answers
COUNT, AT_ONCE = 600, 16  # requests in a closed loop
LONG_RATE, LONG_SECONDS = 17.0, 8.0  # of answers of 200 tokens
SHORT, LONG = "stream-1-5", "stream-200-5"
CALLERS, LARGE = 150, 220_000  # callers without a pause, and bytes of a prompt
WINDOW = 3.0  # s of their measurement
UNSEEN = 1_200  # large prompts at most in a round
NEW, SEEN = Prompts(8_000, False), Prompts(8_000, True)


@dataclass(frozen=True, slots=True)
class Cpu:
    """us of CPU of each request."""

    envoy: float
    brain: float


class CpuMeter:
    """CPU of the processes of a path since its creation."""

    def __init__(self, path: DataPath) -> None:
        self._path = path
        self._before = self._used()

    def per_request(self, count: int) -> Cpu:
        spent = [(now - then) * 1e6 / count for now, then in zip(self._used(), self._before, strict=True)]
        return Cpu(*spent)

    def _used(self) -> list[float]:
        return [cpu_seconds(pid) if pid else 0.0 for pid in (self._path.envoy, self._path.brain)]


@lru_cache(maxsize=2)
def asked(prompts: Prompts, count: int, shape: str, turn: int) -> tuple[Sequence[bytes], Sequence[bytes]]:
    """The same for all paths of a round: writing them takes longer than sending them."""
    return prompts.ask(count, f"{prompts.name} {shape} {turn}", shape)


async def paced(prompts: Prompts, shape: str, rate: float, seconds: float, path: DataPath, turn: int) -> Measured:
    """Open loop: CPU of a request with its answer, in us, and TTFT, in ms."""
    first, requests = asked(prompts, int(rate * seconds), shape, turn)
    await closed_loop(path.port, [*first, *repeat(request("whole", ["Hello."]), 64)], 8)
    meter = CpuMeter(path)
    answers = await open_loop(path.port, requests, rate)
    if len(answers) < len(requests):
        raise TimeoutError(f"{len(requests) - len(answers)} requests without an answer")
    cpu, cuts = meter.per_request(len(answers)), quantiles([answer.ttft * 1e3 for answer in answers], n=100)
    return {"envoy": cpu.envoy, "brain": cpu.brain, "p50": cuts[49], "p99": cuts[98]}


async def busy(prompts: Prompts, path: DataPath, turn: int) -> Measured:
    """Closed loop of AT_ONCE: us of CPU of a request with an answer of one token, as `benchmarks.figures.cost`."""
    first, requests = asked(prompts, COUNT, SHORT, turn)
    await closed_loop(path.port, [*first, *repeat(request("whole", ["Hello."]), 64)], 8)
    meter = CpuMeter(path)
    cpu = meter.per_request(await closed_loop(path.port, requests, AT_ONCE))
    return {"envoy": cpu.envoy, "brain": cpu.brain}


async def same(path: DataPath, _turn: int) -> Measured:
    """As `busy`, with one prompt again and again."""
    again = request(SHORT, [Writer("the same").text(NEW.size)])
    await closed_loop(path.port, repeat(again, 64), 8)
    meter = CpuMeter(path)
    cpu = meter.per_request(await closed_loop(path.port, repeat(again, COUNT), AT_ONCE))
    return {"envoy": cpu.envoy, "brain": cpu.brain}


@lru_cache(maxsize=1)
def large(turn: int) -> Sequence[bytes]:
    writer = Writer(f"large {turn}")
    return [request(SHORT, [writer.text(LARGE)]) for _ in range(UNSEEN)]


async def crowd(path: DataPath, turn: int, *, unseen: bool) -> Measured:
    """Closed loop of CALLERS: requests per second, mean TTFT in ms, and CPU in us."""
    prompts = large(turn) if unseen else [request(SHORT, [Writer("same").text(LARGE)])]
    source = iter(prompts) if unseen else repeat(prompts[0])
    begins = perf_counter()
    meter, answers = CpuMeter(path), await _saturated(path.port, source, begins + WINDOW)
    took, cpu = max(answer.ended for answer in answers) - begins, meter.per_request(len(answers))
    ttft = mean(answer.ttft for answer in answers) * 1e3
    return {"rate": len(answers) / took, "ttft": ttft, "envoy": cpu.envoy, "brain": cpu.brain}


async def _saturated(port: int, source: Iterator[bytes], ends: float) -> list[Answer]:
    answers = list[Answer]()

    async def caller() -> None:
        connection = await connect(port)
        while perf_counter() < ends and (each := next(source, None)) is not None:
            answers.append(await connection.ask(each))
        connection.disconnect()

    await asyncio.gather(*(caller() for _ in range(CALLERS)))
    return answers


async def memory(path: DataPath, _turn: int) -> Measured:
    """MB of resident memory, after all that was played before."""
    of = {"envoy": path.envoy, "brain": path.brain}
    return {name: resident(pid) / 1e6 for name, pid in of.items() if pid}


@dataclass(frozen=True, slots=True)
class Measure:
    """`pinned`: Envoy, picker and proxy on one core, engines and load on the other."""

    play: Callable[[DataPath, int], Awaitable[Measured]]
    pinned: bool = True


MEASURES = {
    "crowd-same": Measure(partial(crowd, unseen=False), pinned=False),
    "crowd-new": Measure(partial(crowd, unseen=True), pinned=False),
    "memory": Measure(memory, pinned=False),
    "busy-new": Measure(partial(busy, NEW)),
    "busy-seen": Measure(partial(busy, SEEN)),
    "busy-same": Measure(same),
    "short": Measure(partial(paced, NEW, SHORT, RATE, SECONDS), pinned=False),
    "long": Measure(partial(paced, NEW, LONG, LONG_RATE, LONG_SECONDS)),
}
