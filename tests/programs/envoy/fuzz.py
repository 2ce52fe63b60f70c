"""`python -m tests.programs.envoy.fuzz [CASES] [SEED]`: hostile peers of the endpoint picker, in this process.

Half of the cases are messages, mutated, and read alone. The others are connections (`hostile_peers`): over transports
in memory, and each 20th over a real socket. Rules that hold for all of them:

    - a case ends: the picker answers, or ends the connection, and holds no call, no byte and no connection behind it
    - no exception that is not handled, and none in the log
    - memory does not grow with their number
    - a request on a healthy connection beside them is answered, after each 500
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Any

from backends.ext_proc.messages import BodyMode, decode
from gateway.app import Gateway
from gateway.parts.picker.grpc_server import GrpcConnection
from gateway.parts.picker.part import PickerPart
from gateway.process import loop_factory
from tests.gateway.picker.test_picker import Envoy, addresses, destination
from tests.programs.envoy.hostile_peers import FAMILIES, MESSAGES, Case, mutated
from tests.support.gateways import running
from tests.support.grpc_client import GrpcClient, grpc_client
from tests.support.simulated import engine_pool, engines

TURNS = 2_000  # of the loop, within which a case ends
PATIENCE = 10.0  # s: a hang, over a socket
SOCKETS, HEALTHY = 20, 500  # each so many cases: over a socket; a request beside them
BUFFER = 1 << 16  # bytes, above which a transport has its writer pause
ROUTES = {"served": {"tiers": ["only"]}}


@dataclass
class Findings:
    """`slowest`: seconds by family. `failures`: a line each, with the seed of the case. `memory`: KB, by time."""

    cases: Counter[str] = field(default_factory=Counter)
    slowest: dict[str, float] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    took: float = 0.0

    def add(self, family: str, seconds: float) -> None:
        self.cases[family] += 1
        self.slowest[family] = max(self.slowest.get(family, 0.0), seconds)

    @property
    def summary(self) -> str:
        lines = [
            f"{name}: {count}, slowest {self.slowest[name] * 1e3:.1f} ms" for name, count in self.cases.most_common()
        ]
        memory = ", ".join(f"{kb / 1024:.0f}" for kb in self.memory)
        total = self.cases.total()
        return "\n".join([*lines, f"{total} cases, {total / self.took:.0f}/s; memory, MB: {memory}"])


class MemoryTransport(asyncio.Transport):
    """A peer in memory, which reads the answers, or does not."""

    def __init__(self, protocol: GrpcConnection, reads: bool) -> None:
        super().__init__()
        self._protocol = protocol
        self._reads = reads
        self._unread = 0
        self.is_paused = self.is_lost = self._is_closing = False

    def write(self, data: Any) -> None:
        if not self._reads and (before := self._unread) <= BUFFER < (after := before + len(data)):
            self._unread = after
            self._protocol.pause_writing()

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            asyncio.get_running_loop().call_soon(self._lose)

    abort = close

    def _lose(self) -> None:
        self.is_lost = True
        self._protocol.connection_lost(None)


class LogOfErrors(logging.Handler):
    """Keeps what is logged as an error, and what the event loop was left with."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(self.format(record).replace("\n", " | ")[-300:])

    def on_unhandled(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.found.append(f"unhandled: {context.get('message')}: {context.get('exception')!r}")


class PickerFuzzer:
    """A gateway with a picker before engines, and a healthy connection beside the hostile ones."""

    def __init__(self, gateway: Gateway, healthy: GrpcClient, expected: set[str], errors: LogOfErrors) -> None:
        self._gateway = gateway
        self._calls = gateway.part(PickerPart).server._calls
        self._port = int(gateway.part(PickerPart).url.rpartition(":")[2])
        self._healthy = healthy
        self._expected = expected
        self._errors = errors

    async def message(self, random: Random) -> str:
        """Reads a changed message: a value, or ValueError."""
        with suppress(ValueError):
            decode(mutated(random.choice(MESSAGES), random))
        return "messages"

    async def connection(self, case: Case, random: Random) -> None:
        """Over a transport in memory, cut anywhere."""
        protocol = self._calls()
        transport = MemoryTransport(protocol, case.reads)
        protocol.connection_made(transport)
        at = 0
        while at < len(case.data) and not transport.is_closing():
            step = random.choice((1 + len(case.data), 1 + len(case.data) // 2, random.randint(1, 70)))
            protocol.data_received(case.data[at : at + step])
            at += step
            await self._turns(lambda: not transport.is_paused or transport.is_closing(), case.reads)
        for _ in range(random.choice((1, 4, 20))):
            await asyncio.sleep(0)
        transport.close()
        await self._turns(lambda: transport.is_lost, True)

    async def _turns(self, is_over: Any, must_end: bool) -> None:
        for _ in range(TURNS if must_end else 5):
            await asyncio.sleep(0)
            if is_over():
                return
        assert not must_end, "does not end"

    async def socket(self, case: Case) -> None:
        """The picker ends the connection, at the latest when its peer has sent all."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            async with asyncio.timeout(PATIENCE):
                writer.write(case.data)
                writer.write_eof()
                while await reader.read(1 << 16):
                    pass
        except (ConnectionError, OSError):
            pass
        finally:
            writer.transport.abort()

    async def healthy(self) -> None:
        """A request, picked and given up. Raises TimeoutError."""
        envoy = Envoy(self._healthy, BodyMode.BUFFERED)
        async with asyncio.timeout(PATIENCE):
            assert destination(await envoy.pick()) in self._expected, "another address"
        self._healthy.h2.reset_stream(envoy.call)
        self._healthy.flush()

    async def at_rest(self) -> None:
        """Nothing is left of the hostile connections; and no error."""
        intake, calls = self._gateway.core.intake, self._calls
        await self._turns(lambda: not intake.body_bytes and not calls._calls and len(calls._connections) <= 1, True)
        found, self._errors.found = self._errors.found, []
        assert not found, found[0]


async def run(cases: int, seed: int = 1) -> Findings:
    """Runs `cases` cases; the first 20 failures are kept."""
    findings, errors = Findings(), LogOfErrors()
    logging.getLogger().addHandler(errors)
    asyncio.get_running_loop().set_exception_handler(errors.on_unhandled)
    try:
        async with (
            engines(2) as servers,
            running({"only": engine_pool(*servers)}, ROUTES, pick={"listen": "127.0.0.1:0"}) as gateway,
            grpc_client(gateway.part(PickerPart).url) as healthy,
        ):
            fuzzer = PickerFuzzer(gateway, healthy, addresses(servers), errors)
            await examine(fuzzer, cases, seed, findings)
    finally:
        logging.getLogger().removeHandler(errors)
    return findings


async def examine(fuzzer: PickerFuzzer, cases: int, seed: int, findings: Findings) -> None:
    began = perf_counter()
    for number in range(cases):
        random = Random(f"{seed} {number}")
        started, family = perf_counter(), "failed"
        try:
            family = await one(fuzzer, random, number)
            if number % HEALTHY == 0:
                await fuzzer.healthy()
        except Exception as error:
            findings.failures.append(f"seed {seed} case {number}: {type(error).__name__}: {error}")
            if len(findings.failures) >= 20:
                break
        findings.add(family, perf_counter() - started)
        if number % max(cases // 10, 1) == 0:
            findings.memory.append(resident())
    findings.took = perf_counter() - began
    findings.memory.append(resident())


async def one(fuzzer: PickerFuzzer, random: Random, number: int) -> str:
    """The family of the case."""
    if number % 2:
        return await fuzzer.message(random)
    (make,) = random.choices([*FAMILIES], [*FAMILIES.values()])
    case = make(random)
    if number % (2 * SOCKETS):
        await fuzzer.connection(case, random)
    else:
        await fuzzer.socket(case)
    await fuzzer.at_rest()
    return case.family


def resident() -> int:
    """KB of memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4


def main() -> int:
    logging.getLogger("firsttoken").setLevel(logging.ERROR)
    cases, seed = (int(given) for given in (*sys.argv[1:], *("20000", "1")[len(sys.argv) - 1 :]))
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        found = runner.run(run(cases, seed))
    print(found.summary)
    print("\n".join(found.failures[:5]) or "no failure")
    return 1 if found.failures else 0


if __name__ == "__main__":
    sys.exit(main())
