"""`python -m tests.programs.chaos.soak [MINUTES [SEED]]`: mixed callers against engines with random faults.

Callers: streams, whole answers, disconnects, malformed bodies, several tenants. Faults of the engines, each on for
2 to 10 s: silent, errors, slow, stalls, cuts, error events, garbage, no [DONE], frozen, killed and restarted.
Memory is sampled every SAMPLE s; the slope is of the second half of the run.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import sys
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any

import uvloop

from benchmarks.processes import ROOT
from tests.programs.chaos.callers import Reply, ask, chat, words
from tests.programs.chaos.engine_faults import engine_pool
from tests.programs.chaos.lab import EngineProcess, GatewayProcess, Lab
from tests.programs.chaos.rows import Result

RATE = 20.0  # requests/s
SAMPLE = 2.0  # s between two samples of memory
SLOPE = 1.0  # MiB/h allowed in a run of hours
FAULTS: tuple[dict[str, Any], ...] = (
    {"silent": True},
    {"headers_then_silence": True},
    {"status": 500},
    {"status": 503, "status_share": 0.5},
    {"status": 429, "retry_after": 1.0},
    {"slow": 8.0},
    {"stall_share": 0.3, "stall_after_tokens": 3, "stall_seconds": 2.0},
    {"stall_share": 0.3, "stall_seconds": 5.0},
    {"cut_after_tokens": 5},
    {"error_after_tokens": 4},
    {"garbage_after_tokens": 3},
    {"omit_done": True},
)
BAD_BODIES = (b"", b"{", b"[]", b'{"model":"chat"}', b'{"model":"nope","messages":[{"role":"user","content":"x"}]}')


class Soak:
    """The callers and the faults of a run."""

    def __init__(self, gateway: GatewayProcess, engines: list[EngineProcess], seed: int) -> None:
        self.gateway, self.engines = gateway, engines
        self.rng = random.Random(seed)
        self.ends: Counter[str] = Counter()
        self.false: list[str] = []  # answers without an end and without an error
        self.samples: list[tuple[float, int, int]] = []  # s, bytes, descriptors

    async def run(self, seconds: float) -> None:
        faults = [asyncio.create_task(self._faults(engine)) for engine in self.engines[1:]]  # one stays healthy
        sampling = asyncio.create_task(self._sample())
        async with asyncio.TaskGroup() as callers:
            ends = monotonic() + seconds
            while monotonic() < ends:
                await asyncio.sleep(self.rng.expovariate(RATE))
                callers.create_task(self._caller())
        for task in (*faults, sampling):
            task.cancel()
        await asyncio.gather(*faults, sampling, return_exceptions=True)
        await self._heal()

    async def _caller(self) -> None:
        rng, kind = self.rng, self.rng.random()
        text = words(rng.choice([5, 50, 500, 2000]), rng.randrange(200))
        body = chat(text, stream=kind < 0.6, max_tokens=rng.choice([1, 8, 64]))
        if kind > 0.95:
            body = rng.choice(BAD_BODIES)
        leaves = rng.expovariate(2.0) if 0.75 < kind < 0.95 else None
        reply = await ask(self.gateway.port, body, sent=self.gateway.sent, patience=90.0, abort_after=leaves)
        self.ends[verdict(reply)] += 1
        if verdict(reply) == "false":
            self.false.append(
                f"{reply.status} {reply.ended} after {reply.total:.1f} s, {body[:80]!r}: {reply.body[-300:]!r}"
            )

    async def _faults(self, engine: EngineProcess) -> None:
        while True:
            await asyncio.sleep(self.rng.uniform(1, 8))
            kind = self.rng.random()
            if kind < 0.1:
                await engine.kill()
                await asyncio.sleep(self.rng.uniform(0, 3))
                await engine.restart()
            elif kind < 0.2:
                engine.signal(signal.SIGSTOP)
                await asyncio.sleep(self.rng.uniform(0.2, 4))
                engine.signal(signal.SIGCONT)
            else:
                await engine.faults(**self.rng.choice(FAULTS))
                await asyncio.sleep(self.rng.uniform(2, 10))
                await engine.faults()

    async def _heal(self) -> None:
        """End all faults; an engine may have been left frozen or killed."""
        for engine in self.engines:
            if engine.process.returncode is not None:
                await engine.restart()
            engine.signal(signal.SIGCONT)
            await engine.faults()
        await asyncio.sleep(10.0)

    async def _sample(self) -> None:
        while True:
            self.samples.append((monotonic(), self.gateway.rss, self.gateway.descriptors()))
            await asyncio.sleep(SAMPLE)

    @property
    def slope(self) -> float:
        """MiB/h of the second half, by least squares."""
        half = self.samples[len(self.samples) // 2 :]
        x, y = [at for at, *_ in half], [size / 2**20 for _, size, _ in half]
        mx, my = sum(x) / len(x), sum(y) / len(y)
        spread = sum((each - mx) ** 2 for each in x)
        return 3600 * sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True)) / spread if spread else 0.0


def verdict(reply: Reply) -> str:
    """`completed`, `explicit` (a reported failure), `aborted`, or `false`: a hang, or no [DONE] and no error."""
    if reply.completed:
        return "completed"
    if reply.ended == "aborted":
        return "aborted"
    return "explicit" if reply.explicit and reply.ended != "hang" else "false"


async def measure(lab: Lab, seconds: float, seed: int) -> Result:
    async with lab.engines(3) as engines:
        routes = {"chat": {"tiers": ["all"], "hedge": {"max_extra": "10%"}}}
        defaults = {"stream_idle": "5s"}
        async with lab.gateway({"all": engine_pool(*(e.url for e in engines))}, routes, defaults=defaults) as gateway:
            soak = Soak(gateway, engines, seed)
            await soak.run(seconds)
            outcomes = Counter(record["end"] for record in gateway.records())
    first, last = soak.samples[len(soak.samples) // 2][1], soak.samples[-1][1]
    grown = (last - first) / 2**20
    ends = ", ".join(f"{count} {name}" for name, count in soak.ends.most_common())
    figures = f"{seconds / 60:g} min, {ends}; Records: {', '.join(f'{n} {e}' for e, n in outcomes.most_common())}; "
    figures += f"memory {last / 1e6:.0f} MB, second half {grown:+.1f} MiB ({soak.slope:+.0f} MiB/h); "
    figures += f"descriptors at most {max(each for *_, each in soak.samples)}"
    flat = soak.slope <= SLOPE or grown <= 8
    return Result(figures, flat and not soak.ends["false"], "; ".join(soak.false[:3]))


async def main() -> int:
    minutes = float(sys.argv[1]) if len(sys.argv) > 1 else 60.0
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    with TemporaryDirectory() as home:
        lab = Lab(Path(home))
        result = await measure(lab, minutes * 60, seed)
    print(result.figures)
    print(result.note)
    print("\n".join(lab.violations) or "all invariants hold")
    return 0 if result.passed and not lab.violations else 1


if __name__ == "__main__":
    os.environ["PYTHONPATH"] = str(ROOT)
    logging.disable(logging.WARNING)
    sys.exit(uvloop.run(main()))
