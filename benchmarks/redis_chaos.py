"""What callers notice when Redis goes away: `redis_chaos.py [SECONDS [RATE]]` prints a table, a row per fault.

A gateway in a process of its own, with a quota that is kept in a real Redis, before an engine that costs nothing; RATE
requests a second (50), at even distances, whether or not the ones before have been answered. Per fault SECONDS (90)
with Redis, as many without, and the time after until the gateway says that Redis is back:

    killed   the process is gone, and starts again empty
    frozen   SIGSTOP: its sockets stay, nobody answers
    slow     100 ms more in each direction
    absent   it is not there when the gateway starts

Printed: requests that failed; p50 and p99, ms, with Redis and without it, the first second of which stands apart
(`first`: its longest request); MB of the gateway before and after; its CPU, us a request; lines on its stderr; s until
Redis was back. Held up beside the promise, the last column says `ok` or which part was missed: none failed, p99 at most
10 ms more, memory at most 1.1 times, CPU at most 1.2 times, at most 5 s.
"""

from __future__ import annotations

import asyncio
import hashlib
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic

import aiohttp

from benchmarks.client import HOST, Connection, request
from benchmarks.processes import ROOT, child, cpu_seconds, free_port, resident, wait_for
from tests.kit.redis import Between, RedisServer

FAULTS = ("killed", "frozen", "slow", "absent")
KEY = "sk-bench-0123456789abcdef"  # what the load sends
SLOWER = 0.1  # s each way
OPENING = 1.0  # s
BACK = 30.0  # s that is waited for it
WARM = 200  # requests that nobody counts


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
    def cpu_each(self) -> float:
        """us"""
        return self.cpu / max(len(self.rest) + len(self.first), 1) * 1e6


class Load:
    """As many connections as are needed at a time."""

    def __init__(self, port: int) -> None:
        self.port, self.idle, self.raw = port, list[Connection](), request("whole", ["hi"], "chat")

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


@contextmanager
def gateway(home: Path, engine: int, redis: str) -> Iterator[tuple[subprocess.Popen[bytes], int, int]]:
    """Its process, data port and admin port."""
    port, admin = free_port(), free_port()
    config, said = home / "config.yaml", home / "stderr"
    config.write_text(
        f"server: {{listen: '{HOST}:{port}', admin: '{HOST}:{admin}'}}\n"
        f"pools: {{only: {{backend: compatible, model: m, endpoints: ['http://{HOST}:{engine}']}}}}\n"
        "routes: {chat: {tiers: [only]}}\ntelemetry: {access_log: off}\n"
        f"state: {{redis: '{redis}'}}\n"
        f"keys: [{{name: bench, sha256: {hashlib.sha256(KEY.encode()).hexdigest()}, requests_per_minute: 1000000,"
        " tokens_per_minute: 1000000000, concurrent_requests: 10000, monthly_cost_usd: 1000}]\n"
    )
    with said.open("wb") as stderr:
        command = [sys.executable, "-m", "gateway.cli", "serve", "--config", str(config)]
        process = subprocess.Popen(command, cwd=ROOT, stderr=stderr)
        try:
            wait_for(port, process)
            yield process, port, admin
        finally:
            process.terminate()
            process.wait(40)


async def up(admin: int) -> bool:
    async with aiohttp.ClientSession() as session, session.get(f"http://{HOST}:{admin}/metrics") as page:
        return "firsttoken_redis_up 1.0" in await page.text()


async def until_up(admin: int) -> float:
    """s; NaN: not within BACK."""
    began = monotonic()
    while monotonic() - began < BACK:
        if await up(admin):
            return monotonic() - began
        await asyncio.sleep(0.05)
    return float("nan")


async def strike(fault: str, server: RedisServer, way: Between) -> None:
    if fault in ("killed", "absent"):
        server.kill()
    elif fault == "frozen":
        server.freeze()
    else:
        way.delay = SLOWER


async def mend(fault: str, server: RedisServer, way: Between) -> None:
    if fault in ("killed", "absent"):
        await server.start()
    elif fault == "frozen":
        server.thaw()
    way.delay = 0.0


async def played(fault: str, seconds: float, rate: float) -> str:
    """A row of the table."""
    async with AsyncExitStack() as stack:
        home = Path(stack.enter_context(TemporaryDirectory()))
        engine = free_port()
        stack.enter_context(child([sys.executable, "-m", "benchmarks.engine", str(engine)], engine))
        server = RedisServer(home)
        stack.callback(server.kill)
        way = await stack.enter_async_context(Between(server.port))
        if fault != "absent":
            await server.start()
        process, port, admin = stack.enter_context(gateway(home, engine, way.url))
        load, pid = Load(port), process.pid
        without: Seen | None = None
        if fault == "absent":
            without = await load.run(seconds, rate, pid)
            await mend(fault, server, way)
        back = await until_up(admin)
        await load.run(WARM / rate, rate, pid)
        before = resident(pid)
        healthy = await load.run(seconds, rate, pid)
        if without is None:
            await strike(fault, server, way)
            without = await load.run(seconds, rate, pid)
            await mend(fault, server, way)
            back = await until_up(admin)
        memory = resident(pid) / before
        lines = len((home / "stderr").read_text().splitlines()) - 1  # where it serves
        return row(fault, healthy, without, before / 1e6, memory, lines, back)


def row(fault: str, healthy: Seen, without: Seen, mb: float, memory: float, lines: int, back: float) -> str:
    failed = healthy.failed + without.failed
    more = without.quantile(0.99) - healthy.quantile(0.99)
    cpu = without.cpu_each / healthy.cpu_each
    missed = [
        name for name, met in (
            ("failed", failed == 0), ("p99", more <= 10), ("memory", memory <= 1.1), ("cpu", cpu <= 1.2),
            ("back", back <= 5),
        ) if not met
    ]  # fmt: skip
    return (
        f"{fault:<8} {failed:>6} {healthy.quantile(0.5):>6.1f} {healthy.quantile(0.99):>6.1f}"
        f" {without.quantile(0.5):>6.1f} {without.quantile(0.99):>6.1f} {max(without.first) * 1e3:>6.0f}"
        f" {mb:>6.0f} {mb * memory:>6.0f} {healthy.cpu_each:>6.0f} {without.cpu_each:>6.0f} {lines:>5} {back:>5.1f}"
        f"  {', '.join(missed) or 'ok'}"
    )


async def main(seconds: float, rate: float) -> None:
    print(
        f"{'fault':<8} failed    p50    p99  -p50-  -p99-  first     MB  after     us   -us-  said  back  verdict\n"
        f"{'':<8}        with Redis     without it"
    )
    for fault in FAULTS:
        print(await played(fault, seconds, rate), flush=True)


if __name__ == "__main__":
    given = [float(each) for each in sys.argv[1:]]
    asyncio.run(main(*(given + [90.0, 50.0][len(given) :])))
