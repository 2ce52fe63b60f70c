"""Workers of one gateway beside as many replicas over Redis: requests a second and CPU per request at saturation.

    python -m benchmarks.workers [ROUNDS [SECONDS]]     # and how well each routes, in SECONDS of sessions

Everything runs on this machine without pinning: engine, load, gateways, Redis. Any process takes any core, so requests
a second are limited by the sum of all CPU per request; that of gateways and Redis is shown apart and carries over to a
larger machine. All gateways run all the time and are loaded in turns; the idle ones cost every variant the same. The
load divides its connections evenly over replicas, as a balancer does; the kernel divides them over workers by chance.

How well they route is measured as `benchmarks.replicas` does, and can be replayed there in virtual time.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import tempfile
from asyncio import gather
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from time import perf_counter
from typing import Any

import uvloop

from benchmarks import replicas
from benchmarks.client import closed_loop, request
from benchmarks.processes import child, cpu_seconds, free_port
from benchmarks.prompts import text
from benchmarks.replicas import VARIANTS, Variant, running_redis

COMPARED = [variant for variant in VARIANTS.values() if variant.name != "apart-4"]
KEY, LIMITED = "sk-bench-0123456789abcdef", "sk-bench-limited-01234567"  # of equal length
AMPLE = 10**9  # a limit that is counted and never reached


@dataclass(frozen=True)
class Load:
    """`count` requests of `size` characters, `at_once` in parallel."""

    name: str
    shape: str  # of the answer
    count: int
    size: int
    key: str = KEY
    at_once: int = 64

    def requests(self) -> Iterator[bytes]:
        """Prompts never used before."""
        for _ in range(self.count):
            yield request(self.shape, [text(self.size)]).replace(KEY.encode(), self.key.encode())


LOADS = (
    Load("200 B, 10 tokens", "stream-10-5", 300, 60),
    Load("200 B, 10 tokens, a key with limits", "stream-10-5", 300, 60, LIMITED),
    Load("8 KB, 50 tokens", "stream-50-2", 150, 8000),
)


def gateway_config(port: int, engines: Sequence[int], redis: str | None) -> dict[str, Any]:
    """Routing is fully on, and nothing is refused: on a saturated machine small prompts teach that tokens are slow."""
    budgets = {"ttft": {"budget": "2s"}, "tpot": {"budget": "200ms"}}
    limits = {"requests_per_minute": AMPLE, "tokens_per_minute": AMPLE, "concurrent_requests": AMPLE}
    return {
        "server": {"listen": f"127.0.0.1:{port}", "admin": "127.0.0.1:0"},
        "pools": {
            "engines": {"backend": "vllm", "model": "bench", "endpoints": [f"http://127.0.0.1:{at}" for at in engines]}
        },
        "routes": {"bench": {"tiers": ["engines"], "on_miss": "best_effort", **budgets}},
        "keys": [
            {"name": "open", "sha256": sha256(KEY.encode()).hexdigest()},
            {"name": "limited", "sha256": sha256(LIMITED.encode()).hexdigest(), **limits},
        ],
        "telemetry": {"access_log": "off"},
        **({"state": {"redis": redis}} if redis else {}),
    }


@dataclass(frozen=True)
class Serving:
    """The gateways of a variant. `redis`: process ids, none or one."""

    ports: Sequence[int]
    gateways: Sequence[int]
    redis: Sequence[int]


@contextmanager
def serving(variant: Variant, engines: Sequence[int], home: Path) -> Iterator[Serving]:
    with ExitStack() as stack:
        url, redis = stack.enter_context(running_redis(home)) if variant.redis else (None, None)
        ports, gateways = [free_port() for _ in range(variant.gateways)], []
        for port in ports:
            config = home / f"{port}.json"
            config.write_text(json.dumps(gateway_config(port, engines, url)))
            gateways.append(stack.enter_context(child(variant.command(config), port, quiet=True)))
        yield Serving(ports, gateways, () if redis is None else (redis,))


async def saturate(ports: Sequence[int], load: Load) -> float:
    """Requests a second."""
    requests = iter(list(load.requests()))
    began = perf_counter()
    await gather(*(closed_loop(port, requests, load.at_once // len(ports)) for port in ports))
    return load.count / (perf_counter() - began)


@dataclass(frozen=True)
class Saturated:
    """`rate`: requests a second; the rest: us of CPU per request."""

    rate: float
    cpu: float  # of gateways and Redis
    redis: float


def measure(served: Serving, load: Load) -> Saturated:
    before = [sum(map(cpu_seconds, pids)) for pids in (served.gateways, served.redis)]
    rate = uvloop.run(saturate(served.ports, load))
    after = [sum(map(cpu_seconds, pids)) for pids in (served.gateways, served.redis)]
    gateways, redis = (1e6 * (now - then) / load.count for now, then in zip(after, before, strict=True))
    return Saturated(rate, gateways + redis, redis)


def main(rounds: int, seconds: float) -> None:
    engines = [free_port() for _ in range(4)]
    found = defaultdict[tuple[str, str], list[Saturated]](list)
    routed = defaultdict[str, list[replicas.RunResult]](list)
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(child([sys.executable, "-m", "benchmarks.engine", *map(str, engines)], engines[-1]))
        served = {each.name: stack.enter_context(serving(each, engines, home)) for each in COMPARED}
        for turn in range(rounds + 1):  # the first warms up
            for load in LOADS:
                for name in list(served)[:: 1 if turn % 2 else -1]:
                    if (one := measure(served[name], load)) and turn:
                        found[load.name, name].append(one)
            for variant in COMPARED if turn and seconds else ():
                routed[variant.name].append(replicas.run(variant, replicas.offered(seconds, 1.0, turn), home))
    report(found)
    if routed:
        replicas.report(routed)


def report(found: Mapping[tuple[str, str], Sequence[Saturated]]) -> None:
    print(
        "| | | requests/s | of as many over Redis | CPU of gateways and Redis | of as many over Redis | Redis alone |"
    )
    print("|---|---|---|---|---|---|---|")
    for (load, name), runs in sorted(found.items(), key=lambda item: item[0][0]):
        peers = found.get((load, re.sub("workers|earlier", "redis", name)), runs)
        rate, rates = compared([one.rate for one in runs], [one.rate for one in peers])
        cpu, cpus = compared([one.cpu for one in runs], [one.cpu for one in peers])
        redis = statistics.median(one.redis for one in runs)
        print(f"| {load} | {name} | {rate:.0f} | {rates:.2f} | {cpu:.0f} us | {cpus:.2f} | {redis:.0f} us |")


def compared(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float]:
    """The median, and the median of the ratios of each round."""
    return statistics.median(ours), statistics.median(one / other for one, other in zip(ours, theirs, strict=True))


if __name__ == "__main__":
    rounds, seconds = [*sys.argv[1:], *("4", "0")[len(sys.argv) - 1 :]]
    main(int(rounds), float(seconds))
