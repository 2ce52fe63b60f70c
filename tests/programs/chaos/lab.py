"""Processes of a row (gateways, engines), and the invariants checked at the end of a gateway.

Invariants: one Record for every request sent whole, and never two for a request; no outcome `internal`; gauges at zero;
descriptors and tasks back to the baseline within SETTLE seconds; a healthy probe is answered.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, Process
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from time import monotonic
from typing import Any

import aiohttp

from benchmarks.processes import ROOT, resident
from tests.programs.chaos.callers import Sent, ask, chat
from tests.support.served import SERVING

SETTLE = 6.0  # s: an idle connection to an endpoint is kept for 4 s
PROBE = 20.0  # s until an ejected endpoint is used again
SLACK = 4  # descriptors: scrapes, the admin port
READY = 60.0  # s until a process must be ready
GAUGES = ("firsttoken_requests_in_progress", "firsttoken_endpoint_in_flight", "firsttoken_queue_depth")


@dataclass
class GatewayProcess:
    """`sent`: ids of the requests sent to the gateway, see `callers`."""

    process: Process
    url: str
    admin: str
    home: Path
    sent: Sent = field(default_factory=Sent)
    baseline: tuple[int, int] = (0, 0)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def rss(self) -> int:
        return resident(self.pid)

    @property
    def peak_rss(self) -> int:
        """Bytes; the greatest since `reset_peak`."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024

    def reset_peak(self) -> None:
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")

    @property
    def stderr(self) -> str:
        return (self.home / "stderr").read_text()

    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.home / "access.jsonl").read_text().splitlines()]

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    async def tasks(self) -> int:
        """Tasks of the event loop."""
        target = self.home / "tasks"
        target.unlink(missing_ok=True)
        self.process.send_signal(signal.SIGUSR1)
        async with asyncio.timeout(5):
            while not target.exists():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        return int(target.read_text())

    async def admin_text(self, path: str) -> str:
        async with aiohttp.ClientSession() as session, session.get(self.admin + path) as page:
            return await page.text()

    async def metrics(self) -> Counter[str]:
        """Sums over all labels, by name."""
        sums: Counter[str] = Counter()
        for line in (await self.admin_text("/metrics")).splitlines():
            if line[:1] != "#":
                name, _, value = line.partition(" # ")[0].rpartition(" ")
                sums[name.partition("{")[0]] += float(value)  # type: ignore[assignment]
        return sums

    async def fleet(self) -> list[dict[str, Any]]:
        fleet: list[dict[str, Any]] = json.loads(await self.admin_text("/fleet"))
        return fleet


@dataclass
class EngineProcess:
    """`firsttoken simulate` in a separate process."""

    command: list[str]
    process: Process
    url: str = ""

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    async def kill(self) -> None:
        self.signal(signal.SIGCONT)
        self.process.kill()
        await self.process.wait()

    async def restart(self) -> None:
        """On the former port, with an empty cache."""
        started = await _engine(self.command, self.port)
        self.process = started.process

    async def faults(self, **faults: Any) -> None:
        """Replace all faults; without any, the engine is healthy."""
        async with aiohttp.ClientSession() as session:
            reply = await session.post(f"{self.url}/simulate/faults", json=faults)
            assert reply.status == 200


async def _engine(command: list[str], port: int) -> EngineProcess:
    process = await asyncio.create_subprocess_exec(
        *command, "--port", str(port), cwd=ROOT, stdout=DEVNULL, stderr=asyncio.subprocess.PIPE
    )
    assert process.stderr is not None
    async with asyncio.timeout(READY):
        line = (await process.stderr.readline()).decode()
    url = line.rpartition(" at ")[2].strip().removesuffix("/v1")
    assert url.startswith("http"), line
    return EngineProcess(command, process, url)


class Lab:
    """`quick`: smaller numbers, for a smoke test."""

    def __init__(self, home: Path, quick: bool = False) -> None:
        self.home, self.quick = home, quick
        self.violations: list[str] = []
        self._names = count(1)

    def size(self, full: int, quick: int) -> int:
        return quick if self.quick else full

    @asynccontextmanager
    async def engines(self, number: int, profile: str = "8b-h100", speed: float = 1.0) -> AsyncIterator[list[Any]]:
        command = [sys.executable, "-m", "lab", "simulate", "--profile", profile, "--model", "served"]
        command += ["--speed", str(speed)]
        started = await asyncio.gather(*(_engine(command, 0) for _ in range(number)))
        try:
            yield started
        finally:
            for engine in started:
                if engine.process.returncode is None:
                    await engine.kill()

    @asynccontextmanager
    async def gateway(
        self,
        pools: Mapping[str, Any],
        routes: Mapping[str, Any] | None = None,
        *,
        arguments: tuple[str, ...] = (),
        prefix: tuple[str, ...] = (),
        check: bool = True,
        probe: Mapping[str, Any] | None = None,
        **sections: Any,
    ) -> AsyncIterator[GatewayProcess]:
        """Run a gateway; check the invariants at the end. `probe`: more fields of the healthy probe. `prefix`: words
        before the command."""
        home = self.home / f"gateway-{next(self._names)}"
        home.mkdir()
        document = {
            "server": {"listen": "127.0.0.1:0", "admin": "127.0.0.1:0", **sections.pop("server", {})},
            "pools": dict(pools),
            "routes": routes if routes is not None else {"chat": {"tiers": list(pools)}},
            "telemetry": {"access_log": str(home / "access.jsonl")},
            **sections,
        }
        (home / "config.yaml").write_text(json.dumps(document))
        gateway = await _start_gateway(home, arguments, prefix)
        try:
            if not arguments:
                await asyncio.sleep(0.3)
                gateway.baseline = (gateway.descriptors(), await gateway.tasks())
            yield gateway
            if check:
                self.violations += await violations(gateway, probe or {})
        finally:
            if gateway.process.returncode is None:
                gateway.process.send_signal(signal.SIGCONT)
                gateway.process.kill()
                await gateway.process.wait()


async def _start_gateway(home: Path, arguments: tuple[str, ...], prefix: tuple[str, ...]) -> GatewayProcess:
    command = (
        *prefix,
        sys.executable,
        "-m",
        "tests.programs.chaos.serve",
        "--config",
        str(home / "config.yaml"),
        *arguments,
    )
    with (home / "stderr").open("wb") as stderr:
        process = await asyncio.create_subprocess_exec(
            *command, cwd=ROOT, stdout=DEVNULL, stderr=stderr, env={**os.environ, "CHAOS_TASKS": str(home / "tasks")}
        )
    async with asyncio.timeout(READY):
        while (found := SERVING.search((home / "stderr").read_text())) is None:
            assert process.returncode is None, (home / "stderr").read_text()
            await asyncio.sleep(0.05)
    return GatewayProcess(process, found["url"], found["admin"], home)


# --------------------------------------------------------------------------- invariants


async def violations(gateway: GatewayProcess, probe: Mapping[str, Any]) -> list[str]:
    """Violated invariants; empty after a good row."""
    found = []
    if gateway.process.returncode is not None:
        return [f"the gateway ended with exit code {gateway.process.returncode}"]
    if not await within(PROBE, lambda: _probe(gateway, probe)):
        found.append(f"no healthy answer within {PROBE:g} s")
    found += await _gauges(gateway)
    if gateway.baseline != (0, 0):
        found += await _resources(gateway)

    async def recorded() -> bool:
        return not record_violations(gateway.records(), gateway.sent)

    await within(SETTLE, recorded)  # lines of the access log are written by a thread
    return found + record_violations(gateway.records(), gateway.sent)


async def within(seconds: float, holds: Callable[[], Any]) -> bool:
    """Poll an async condition."""
    ends = monotonic() + seconds
    while not await holds():
        if monotonic() > ends:
            return False
        await asyncio.sleep(0.1)
    return True


async def _probe(gateway: GatewayProcess, probe: Mapping[str, Any]) -> bool:
    body = chat(**{"stream": True, "max_tokens": 4, **probe})
    return (await ask(gateway.port, body, sent=gateway.sent)).completed


async def _gauges(gateway: GatewayProcess) -> list[str]:
    async def at_zero() -> bool:
        metrics = await gateway.metrics()
        return not any(metrics[name] for name in GAUGES)

    if await within(SETTLE, at_zero):
        return []
    metrics = await gateway.metrics()
    return [f"{name} is {metrics[name]:g}" for name in GAUGES if metrics[name]]


async def _resources(gateway: GatewayProcess) -> list[str]:
    descriptors, tasks = gateway.baseline

    async def back() -> bool:
        return gateway.descriptors() <= descriptors + SLACK and await gateway.tasks() <= tasks + SLACK

    if await within(SETTLE, back):
        return []
    now, running = gateway.descriptors(), await gateway.tasks()
    return [f"descriptors {descriptors} -> {now}, tasks {tasks} -> {running}"]


def record_violations(records: list[dict[str, Any]], sent: Sent) -> list[str]:
    """Check for one Record for every request sent whole, at most one for every other request, and no `internal`."""
    seen = Counter(record["request_id"] for record in records)
    ends = Counter(record["end"] for record in records)
    missing = [one for one in sent.whole if not seen[one]]
    twice = [one for one, times in seen.items() if times > 1]
    found = [f"{len(missing)} requests without a Record"] if missing else []
    found += [f"{len(twice)} requests with two Records"] if twice else []
    return found + ([f"{ends['internal']} Records say internal"] if ends["internal"] else [])
