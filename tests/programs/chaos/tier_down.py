"""Row 1, second part: the first tier is down in eight ways, the second healthy, 200 callers at once.

Two hundred callers at once wait for each other, with or without a fault. So each figure is a difference: p99 of the
first token with the fault, less p99 of as many callers on a route with the second tier alone. The first tier's own
time is p99 of the reply, or failure, to as many callers without a gateway; for a silent tier, the time until the
gateway abandons the attempt. Callers and both tiers share a process, the gateway has a separate process. The gateway's
CPU time for a request hardly depends on other load of the machine; the last of 200 callers waits for 200 times the
difference.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any

from tests.e2e.test_failover import FAULTS, SERVED
from tests.programs.chaos.callers import Reply, ask, chat, quantile
from tests.programs.chaos.lab import GatewayProcess, Lab
from tests.programs.chaos.rows import Result, row
from tests.support.gateways import pool
from tests.support.upstream import CLOSE, HANG, Upstream

CALLERS = 200
ADDED = 0.01  # s at p99, beyond the first tier's own time
BUDGET = 2.0  # s
REPLIES = ("429", "an exhausted quota", "500", "404 for our model", "200 with an error")
REFUSED, SILENT, TLS = "refused", "silent", "TLS failure"
KINDS = (*REPLIES, REFUSED, SILENT, TLS)


@dataclass
class Rounds:
    """s, a value per round: p99 with the fault, on the second tier alone, of the first tier's own reply; and the
    gateway's CPU time for a request."""

    failed_over: list[float] = field(default_factory=list)
    direct: list[float] = field(default_factory=list)
    own: list[float] = field(default_factory=list)
    answered: list[int] = field(default_factory=list)
    cpu_failed_over: list[float] = field(default_factory=list)
    cpu_direct: list[float] = field(default_factory=list)

    @property
    def added(self) -> float:
        return median(self.failed_over) - median(self.direct)

    @property
    def beyond(self) -> float:
        """Added, less the first tier's own time."""
        return self.added - median(self.own)

    def line(self, kind: str) -> str:
        cells = (median(self.direct), median(self.failed_over), self.added, median(self.own), self.beyond)
        times = " | ".join(f"{each * 1e3:.0f}" for each in cells)
        cpu = " | ".join(f"{median(each) * 1e3:.2f}" for each in (self.cpu_direct, self.cpu_failed_over))
        return f"| {kind} | {min(self.answered)} of {CALLERS} | {times} | {cpu} |"


HEADING = """### A first tier that is down

Milliseconds, of 200 callers at once; medians over the rounds.

| first tier | answered | p99, second tier alone | p99, failed over | added | own time | beyond it | CPU, alone | CPU |
|---|---|---|---|---|---|---|---|---|"""


async def at_once(port: int, model: str) -> list[Reply]:
    body = chat(model=model, stream=True)
    return list(await asyncio.gather(*(ask(port, body) for _ in range(CALLERS))))


def p99(replies: list[Reply]) -> float:
    """p99 of the time to the first token; for a refusal, to the end of the reply."""
    return quantile([reply.total if reply.ttft is None else reply.ttft for reply in replies], 0.99)


def cpu_time(gateway: GatewayProcess) -> float:
    """Seconds, of all threads."""
    threads = Path(f"/proc/{gateway.pid}/task").glob("*/schedstat")
    return sum(int(each.read_text().split()[0]) for each in threads) / 1e9


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


@asynccontextmanager
async def first_tiers() -> AsyncIterator[dict[str, str]]:
    """URLs by kind."""
    async with AsyncExitStack() as stack:
        urls = {kind: (await stack.enter_async_context(Upstream(FAULTS[kind]))).url for kind in REPLIES}
        urls[SILENT] = (await stack.enter_async_context(Upstream([HANG]))).url
        plain = await stack.enter_async_context(Upstream(banner=[b"HTTP/1.1 400 Bad Request\r\n\r\n", CLOSE]))
        closed = await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0)
        port = closed.sockets[0].getsockname()[1]
        closed.close()
        yield {**urls, REFUSED: f"http://127.0.0.1:{port}", TLS: plain.url.replace("http://", "https://")}


@row(1, "faults", "200 callers at once, the first tier down", "all answered; p99 + at most the tier's own time + 10 ms")
async def tier_down(lab: Lab) -> Result:
    """429, quota, 500, 404 for our model, an error inside a 200, refused, silent, TLS failure; see the table."""
    rounds = lab.size(5, 1)
    async with first_tiers() as urls, Upstream(SERVED[True]) as second:
        names = {(kind, turn): f"{kind}-{turn}".replace(" ", "-").lower() for kind in KINDS for turn in range(rounds)}
        pools = {name: pool(urls[kind]) for (kind, _), name in names.items()}  # new pools: no breaker knows the fault
        routes = {name: _route(name, "second") for name in names.values()} | {"direct": _route("second")}
        async with lab.gateway({**pools, "second": pool(second.url)}, routes, check=False) as gateway:
            await at_once(gateway.port, "direct")
            seen = {kind: await _measured(gateway, urls[kind], names, kind, rounds) for kind in KINDS}
    table = "\n".join([HEADING, *(each.line(kind) for kind, each in seen.items())])
    worst = max(seen, key=lambda kind: seen[kind].beyond)
    figures = f"{sum(min(each.answered) for each in seen.values())} of {CALLERS * len(KINDS)} answered; "
    figures += f"beyond the tier's own time {seen[worst].beyond * 1e3:+.0f} ms at most ({worst})"
    whole = all(min(each.answered) == CALLERS for each in seen.values())
    return Result(figures, whole and seen[worst].beyond <= ADDED, table=table)


def _route(*tiers: str) -> dict[str, Any]:
    return {"tiers": list(tiers), "ttft": {"budget": f"{BUDGET:g}s"}, "hedge": "off"}


async def _measured(
    gateway: GatewayProcess, url: str, names: dict[tuple[str, int], str], kind: str, rounds: int
) -> Rounds:
    seen = Rounds()
    for turn in range(rounds):
        name = names[kind, turn]
        began = cpu_time(gateway)
        seen.direct.append(p99(await at_once(gateway.port, "direct")))
        between = cpu_time(gateway)
        replies = await at_once(gateway.port, name)
        seen.cpu_direct.append((between - began) / CALLERS)
        seen.cpu_failed_over.append((cpu_time(gateway) - between) / CALLERS)
        seen.failed_over.append(p99(replies))
        seen.answered.append(sum(reply.completed for reply in replies))
        seen.own.append(await OWN_TIME.get(kind, _of_its_reply)(gateway, url, name))
    return seen


async def _of_its_reply(gateway: GatewayProcess, url: str, name: str) -> float:
    return p99(await at_once(port_of(url), name))


async def _until_abandoned(gateway: GatewayProcess, url: str, name: str) -> float:
    await asyncio.sleep(0.5)  # lines of the access log are written by a thread
    stages = [each["stages_ms"] for each in gateway.records() if each["route"] == name]
    return quantile([each["failover"] for each in stages if "failover" in each], 0.0) / 1e3


async def _of_its_failure(gateway: GatewayProcess, url: str, name: str) -> float:
    tls = ssl.create_default_context() if url.startswith("https") else None
    return quantile(list(await asyncio.gather(*(_connect(port_of(url), tls) for _ in range(CALLERS)))), 0.99)


async def _connect(port: int, tls: ssl.SSLContext | None) -> float:
    began = monotonic()
    with suppress(OSError):
        await asyncio.open_connection("localhost" if tls else "127.0.0.1", port, ssl=tls)
    return monotonic() - began


OWN_TIME: dict[str, Callable[[GatewayProcess, str, str], Awaitable[float]]] = {
    SILENT: _until_abandoned,
    REFUSED: _of_its_failure,
    TLS: _of_its_failure,
}
