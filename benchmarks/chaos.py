"""Effect on callers of a failing dependency of the gateway, under an even load.

A gateway in a process of its own, before an engine of negligible cost; RATE requests a second, at even distances, open
loop. Per fault: SECONDS with the server, as many without, and the time after until the gateway has reconnected:

    killed   the process is gone, and starts again empty
    frozen   SIGSTOP: sockets stay, without replies
    slow     100 ms more in each direction
    absent   not running when the gateway starts

The server and its own columns are a Story: benchmarks/redis_chaos.py, benchmarks/collector_chaos.py.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Protocol

import aiohttp

from benchmarks.client import HOST, Connection, request
from benchmarks.processes import ROOT, child, cpu_seconds, free_port, resident, wait_for
from tests.support.redis import TcpProxy

FAULTS = ("killed", "frozen", "slow", "absent")
SLOWER = 0.1  # s each way
OPENING = 1.0  # s
BACK = 30.0  # s, timeout of the reconnection
WARM = 200  # requests before counting starts
HEADING = f"{'fault':<8} failed    p50    p99  -p50-  -p99-  first     MB  after     us   -us-  said  back"


@dataclass(slots=True)
class Seen:
    """Latencies, s; of the first second apart."""

    first: list[float] = field(default_factory=list)
    rest: list[float] = field(default_factory=list)
    failed: int = 0
    cpu: float = 0.0  # s

    def quantile(self, share: float) -> float:
        """ms"""
        ordered = sorted(self.rest)
        return ordered[min(int(share * len(ordered)), len(ordered) - 1)] * 1e3

    @property
    def count(self) -> int:
        return len(self.first) + len(self.rest) + self.failed

    @property
    def cpu_each(self) -> float:
        """us"""
        return self.cpu / max(len(self.rest) + len(self.first), 1) * 1e6


class Load:
    """As many connections as are needed at a time. `sent`: requests so far."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.idle: list[Connection] = []
        self.raw = request("whole", ["hi"], "chat")
        self.sent = 0

    async def run(self, seconds: float, rate: float, pid: int) -> Seen:
        seen, began, cpu = Seen(), monotonic(), cpu_seconds(pid)
        async with asyncio.TaskGroup() as group:
            for n in range(int(seconds * rate)):
                await asyncio.sleep(max(began + n / rate - monotonic(), 0.0))
                group.create_task(self._ask(seen, monotonic() - began < OPENING))
        seen.cpu = cpu_seconds(pid) - cpu
        return seen

    async def _ask(self, seen: Seen, first: bool) -> None:
        sent = monotonic()
        self.sent += 1
        try:
            connection = self.idle.pop() if self.idle else await self._connected()
            async with asyncio.timeout(10):
                await connection.ask(self.raw)
        except Exception as error:
            seen.failed += 1
            print(f"failed: {error!r}", file=sys.stderr)
            return
        self.idle.append(connection)
        (seen.first if first else seen.rest).append(monotonic() - sent)

    async def _connected(self) -> Connection:
        _, connection = await asyncio.get_running_loop().create_connection(Connection, HOST, self.port)
        return connection


@dataclass(frozen=True, slots=True)
class Gateway:
    """Port and resource use."""

    pid: int
    port: int
    admin: int

    async def figures(self) -> dict[str, float]:
        """The gateway's metrics without labels, by name."""
        async with aiohttp.ClientSession() as session, session.get(f"http://{HOST}:{self.admin}/metrics") as page:
            lines = [line.rpartition(" ") for line in (await page.text()).splitlines() if line[:1] != "#"]
        return {name: float(value) for name, _, value in lines if "{" not in name}

    async def until(self, holds: Callable[[dict[str, float]], bool], at_most: float = BACK) -> float:
        """s; NaN: not within the time limit."""
        began = monotonic()
        while monotonic() - began < at_most:
            if holds(await self.figures()):
                return monotonic() - began
            await asyncio.sleep(0.05)
        return float("nan")


class Server(Protocol):
    """A server which can be killed, frozen, and restarted on the same port."""

    port: int

    async def start(self) -> None: ...
    def kill(self) -> None: ...
    def freeze(self) -> None: ...
    def thaw(self) -> None: ...


class Story(Protocol):
    """`room`: bytes by which the gateway may have grown, known after the fault; `fullest`: largest size."""

    server: Server
    room: float
    fullest: float

    def sections(self, address: str) -> str:
        """Of the configuration. `address`: where the server is to be found."""

    async def warmed(self, gateway: Gateway, warm: Callable[[], Awaitable[Seen]]) -> None: ...
    async def ending(self, gateway: Gateway, load: Load) -> None:
        """Of the fault, in a moment."""

    async def back(self, gateway: Gateway) -> float:
        """s until reconnected; NaN: not within BACK."""

    async def told(self, gateway: Gateway, load: Load) -> tuple[str, list[str]]:
        """The story's own columns, and its missed promises."""


@asynccontextmanager
async def running_gateway(home: Path, engine: int, sections: str) -> AsyncIterator[Gateway]:
    """Waits in a thread: the gateway needs the proxy of this loop to start, and to stop."""
    port, admin = free_port(), free_port()
    config, said = home / "config.yaml", home / "stderr"
    config.write_text(
        f"server: {{listen: '{HOST}:{port}', admin: '{HOST}:{admin}'}}\n"
        f"pools: {{only: {{backend: compatible, model: m, endpoints: ['http://{HOST}:{engine}']}}}}\n"
        f"routes: {{chat: {{tiers: [only]}}}}\n{sections}"
    )
    with said.open("wb") as stderr:
        command = [sys.executable, "-m", "gateway.cli", "serve", "--config", str(config)]
        process = subprocess.Popen(command, cwd=ROOT, stderr=stderr)  # noqa: ASYNC220
        try:
            await asyncio.to_thread(wait_for, port, process)
            yield Gateway(process.pid, port, admin)
        finally:
            process.terminate()
            await asyncio.to_thread(process.wait, 40)


async def inject_fault(fault: str, server: Server, way: TcpProxy) -> None:
    if fault in ("killed", "absent"):
        server.kill()
    elif fault == "frozen":
        server.freeze()
    else:
        way.delay = SLOWER


async def heal(fault: str, server: Server, way: TcpProxy) -> None:
    if fault in ("killed", "absent"):
        await server.start()
    elif fault == "frozen":
        server.thaw()
    way.delay = 0.0


async def run_fault(fault: str, seconds: float, rate: float, tells: Callable[[Path], Story]) -> str:
    """A row of the table."""
    async with AsyncExitStack() as stack:
        home = Path(stack.enter_context(TemporaryDirectory()))
        engine = free_port()
        stack.enter_context(child([sys.executable, "-m", "benchmarks.engine", str(engine)], engine))
        story = tells(home)
        server = story.server
        stack.callback(server.kill)
        way = await stack.enter_async_context(TcpProxy(server.port))
        if fault != "absent":
            await server.start()
        gateway = await stack.enter_async_context(running_gateway(home, engine, story.sections(way.address)))
        load, pid = Load(gateway.port), gateway.pid
        without: Seen | None = None
        if fault == "absent":
            without = await load.run(seconds, rate, pid)
            await story.ending(gateway, load)
            await heal(fault, server, way)
        back = await story.back(gateway)
        await story.warmed(gateway, lambda: load.run(WARM / rate, rate, pid))
        before = resident(pid)
        healthy = await load.run(seconds, rate, pid)
        if without is None:
            await inject_fault(fault, server, way)
            without = await load.run(seconds, rate, pid)
            await story.ending(gateway, load)
            await heal(fault, server, way)
            back = await story.back(gateway)
        after = max(resident(pid), story.fullest)
        lines = len((home / "stderr").read_text().splitlines()) - 1  # address of the server
        columns, missed = await story.told(gateway, load)
        missed = missed_promises(healthy, without, (after - story.room) / before, back) + missed
        return row(fault, healthy, without, before, after, lines, back) + columns + f"  {', '.join(missed) or 'ok'}"


def missed_promises(healthy: Seen, without: Seen, memory: float, back: float) -> list[str]:
    """Missed promises."""
    return [
        name
        for name, met in (
            ("failed", healthy.failed + without.failed == 0),
            ("p99", without.quantile(0.99) - healthy.quantile(0.99) <= 10),
            ("memory", memory <= 1.1),
            ("cpu", without.cpu_each / healthy.cpu_each <= 1.2),
            ("back", back <= 5),
        )
        if not met
    ]


def row(fault: str, healthy: Seen, without: Seen, before: float, after: float, lines: int, back: float) -> str:
    return (
        f"{fault:<8} {healthy.failed + without.failed:>6} {healthy.quantile(0.5):>6.1f} {healthy.quantile(0.99):>6.1f}"
        f" {without.quantile(0.5):>6.1f} {without.quantile(0.99):>6.1f} {max(without.first) * 1e3:>6.0f}"
        f" {before / 1e6:>6.0f} {after / 1e6:>6.0f} {healthy.cpu_each:>6.0f} {without.cpu_each:>6.0f} {lines:>5}"
        f" {back:>5.1f}"
    )


def main(tells: Callable[[Path], Story], what: str, columns: str = "") -> None:
    """The command: [SECONDS [RATE]]."""
    given = [float(each) for each in sys.argv[1:]]
    seconds, rate = given + [90.0, 50.0][len(given) :]
    print(f"{HEADING}{columns}  verdict\n{'':<8}        {f'with {what}':<15}without it")
    for fault in FAULTS:
        print(asyncio.run(run_fault(fault, seconds, rate, tells)), flush=True)
