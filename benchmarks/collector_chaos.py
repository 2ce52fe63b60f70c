"""What callers notice when the OpenTelemetry collector goes away: `collector_chaos.py [SECONDS [RATE]]` prints a table.

A gateway that tells every trace, RATE requests a second (50), SECONDS per fault (90), and a collector in a process of
its own that takes spans and writes down how many: see benchmarks/chaos.py for the faults.

Printed: requests that failed; p50 and p99, ms, with the collector and without it, the first second of which stands
apart (`first`: its longest request); MB of the gateway before, and its most of the end of the fault and after it; its
CPU, us a request; lines on its stderr; s until spans were exported again; `queue`: MB of spans that waited when the
fault ended; spans made, exported, lost, and `twice`: those that the collector took more often than the gateway knows.

Held up beside the promise, the last column says `ok` or which part was missed:

    none failed, p99 at most 10 ms more, CPU at most 1.2 times, exported again after at most 5 s;
    memory at most 1.1 times, besides the queue: what waited then, and of that no more than its bound of 16 MB. What
    Python needs around it is not allowed for. With `absent`, `before` is after the fault: a young gateway still grows;
    spans: after the fault, when all that waited is gone, made = exported + lost. How many a request makes is counted in
    the undisturbed time before. The collector has taken as many as were exported, or more: a batch whose reply was lost
    is told again. To lose some is allowed, as each batch is tried a dozen times only; to miscount them is not.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from time import monotonic

from aiohttp import web

from benchmarks.chaos import BACK, Gateway, Load, Seen, main
from benchmarks.client import HOST
from benchmarks.processes import ROOT, free_port, resident, wait_for
from gateway.observe.otel.telemetry import QUEUE

EXPORTED, LOST = "firsttoken_spans_exported_total", "firsttoken_spans_lost_total"
STILL = 3.0  # s without a span: a batch waits for 1 s at most while the collector is well


class CollectorServer:
    """`python -m benchmarks.collector_chaos --collector PORT FILE`, again and again."""

    def __init__(self, home: Path) -> None:
        self.port, self.file = free_port(), home / "taken"
        self.file.touch()
        self.process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        command = [sys.executable, "-m", "benchmarks.collector_chaos", "--collector", str(self.port), str(self.file)]
        self.process = subprocess.Popen(command, cwd=ROOT)  # noqa: ASYNC220 - it forks, and that is all
        await asyncio.to_thread(wait_for, self.port, self.process)

    def kill(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait()
            self.process = None

    def freeze(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def taken(self) -> tuple[int, int]:
        """Spans and bytes, in all its lives."""
        lines = [line.split() for line in self.file.read_text().splitlines()]
        return sum(int(spans) for spans, _ in lines), sum(int(size) for _, size in lines)


class Spans:
    """All that become of them. `each`: of one request."""

    def __init__(self, home: Path) -> None:
        self.server = CollectorServer(home)
        self.room = self.fullest = self.each = 0.0
        self._exported: float | None = None  # when the fault ended, as are these
        self._sent, self._gone = 0, 0.0  # requests; spans that were exported or lost

    def sections(self, address: str) -> str:
        return f"telemetry: {{access_log: off, otlp: 'http://{address}', traces: 100%}}\n"

    async def warmed(self, gateway: Gateway, warm: Callable[[], Awaitable[Seen]]) -> None:
        before = await settled(gateway)
        count = (await warm()).count
        self.each = (await settled(gateway) - before) / count

    async def ending(self, gateway: Gateway, load: Load) -> None:
        figures = await gateway.figures()
        self._exported, self._sent, self._gone = figures[EXPORTED], load.sent, figures[EXPORTED] + figures[LOST]
        self.fullest = resident(gateway.pid)

    async def back(self, gateway: Gateway) -> float:
        exported = self._exported
        return 0.0 if exported is None else await gateway.until(lambda figures: figures[EXPORTED] > exported)

    async def told(self, gateway: Gateway, load: Load) -> tuple[str, list[str]]:
        await settled(gateway)
        figures = await gateway.figures()
        exported, lost, made = figures[EXPORTED], figures[LOST], load.sent * self.each
        taken, _ = self.server.taken()
        self.room = min(self._sent * self.each - self._gone, QUEUE)
        right = made == exported + lost and exported <= taken
        columns = f" {self.room:>5.0f} {made:>7.0f} {exported:>8.0f} {lost:>6.0f} {taken - exported:>5.0f}"
        return columns, [] if right else ["spans"]


async def settled(gateway: Gateway) -> float:
    """Spans exported and lost, once nothing waits any more."""
    last, since, began = -1.0, monotonic(), monotonic()
    while monotonic() - since < STILL and monotonic() - began < BACK:
        figures = await gateway.figures()
        if (now := figures[EXPORTED] + figures[LOST]) != last:
            last, since = now, monotonic()
        await asyncio.sleep(0.1)
    return last


def collect(port: int, file: Path) -> None:
    """A collector that takes everything, and writes it down before it says so."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    async def traces(http: web.Request) -> web.Response:
        body = await http.read()
        found = ExportTraceServiceRequest.FromString(body).resource_spans
        with file.open("a") as out:
            print(sum(len(scope.spans) for resource in found for scope in resource.scope_spans), len(body), file=out)
        return web.Response()

    async def metrics(http: web.Request) -> web.Response:
        await http.read()
        return web.Response()

    app = web.Application(client_max_size=64_000_000)
    app.router.add_post("/v1/traces", traces)
    app.router.add_post("/v1/metrics", metrics)
    web.run_app(app, host=HOST, port=port, print=None, access_log=None)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--collector"]:
        collect(int(sys.argv[2]), Path(sys.argv[3]))
    else:
        main(Spans, "collector", f" queue {'made':>7} exported   lost twice")
