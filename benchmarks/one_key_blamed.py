"""What faults in the replies to one key cost another key: `python -m benchmarks.one_key_blamed [SECONDS [ROW...]]`.

A gateway of one process has a pool with one server for each row. Key b asks for a small chat every 4 ms, in an open
loop, while two senders of key a get the reply of the row (`tests.support.two_callers`). The rows give the latency of
key b's answers in ms, and how many of them had no answer. Two rows come at the beginning, after every 20 others and at
the end: `quiet` is key b alone, and `key a answered well` shows what a second key's requests cost without any fault.
All rows take about two minutes. Processes share the cores of the machine: compare rows of one run.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

from benchmarks.client import HOST, BadAnswer, Connection, connect
from benchmarks.processes import child, free_port
from gateway.config.models import Config
from gateway.serve import serve
from tests.support.two_callers import KEYS, PROVOCATIONS, A, B, Provocation, UpstreamByCaller, provoke, request

SECONDS, WARM_UP, PACE = 1.0, 0.15, 0.004  # s
SENDERS, PAUSE = 2, 0.02  # of key a; s between two requests of a sender
REFERENCES_EVERY = 20  # rows
ADDED = 10.0  # ms to the p99 of key b alone: the goal of each row
WELL = Provocation("key a answered well", ())


@dataclass(frozen=True)
class Latencies:
    """Of key b's requests. `took`: s of each; `unanswered`: errors, and answers that broke off."""

    took: Sequence[float]
    unanswered: int

    def quantile(self, share: float) -> float:
        """ms"""
        return sorted(self.took)[min(int(len(self.took) * share), len(self.took) - 1)] * 1e3

    def shown(self, name: str) -> str:
        p50, p99, most = map(self.quantile, (0.5, 0.99, 1.0))
        return f"{name:48}{p50:8.1f}{p99:9.1f}{most:9.1f}{self.unanswered:7} of {len(self.took)}"


def model_of(kind: Provocation) -> str:
    return "well" if kind is WELL else f"row-{PROVOCATIONS.index(kind)}"


def host_of(kind: Provocation) -> str:
    """An address for each row: endpoints of one server are taken for keys of one account."""
    return HOST if kind is WELL else f"127.0.1.{PROVOCATIONS.index(kind) + 1}"


# --------------------------------------------------------------------------- the keys


async def ask_at_pace(port: int, model: str, seconds: float) -> Latencies:
    """Times from the due time of each request to the end of its answer."""
    free, took, failed = list[Connection](), list[float](), 0

    async def one(number: int, due: float) -> None:
        nonlocal failed
        connection = free.pop() if free else await connect(port)
        try:
            await connection.ask(request(B, number, model=model))
            free.append(connection)
        except (BadAnswer, ConnectionError):
            connection.disconnect()
            failed += 1
        took.append(perf_counter() - due)

    began = perf_counter()
    async with asyncio.TaskGroup() as group:
        for number in range(int(seconds / PACE)):
            due = began + number * PACE
            await asyncio.sleep(max(due - perf_counter(), 0.0))
            group.create_task(one(number, due))
    for connection in free:
        connection.disconnect()
    return Latencies(took, failed)


async def provoke_for_ever(port: int, kind: Provocation) -> None:
    number = 0
    while True:
        number += 1
        await provoke(f"http://{HOST}:{port}", kind, number, A, model=model_of(kind))
        await asyncio.sleep(PAUSE)


async def measure(port: int, kind: Provocation, seconds: float, senders_of_a: int = SENDERS) -> Latencies:
    await ask_at_pace(port, model_of(kind), WARM_UP)
    senders = [asyncio.create_task(provoke_for_ever(port, kind)) for _ in range(senders_of_a)]
    try:
        return await ask_at_pace(port, model_of(kind), seconds)
    finally:
        for sender in senders:
            sender.cancel()
        await asyncio.gather(*senders, return_exceptions=True)


# --------------------------------------------------------------------------- the processes


def gateway_config(port: int, server: int) -> dict[str, Any]:
    pools = {
        model_of(kind): {**kind.pool, **kind.defaults, "endpoints": [f"http://{host_of(kind)}:{server}"]}
        for kind in (WELL, *PROVOCATIONS)
    }
    return {
        "server": {"listen": f"{HOST}:{port}", "admin": f"{HOST}:0"},
        "pools": pools,
        "routes": {name: {"tiers": [name]} for name in pools},
        "keys": KEYS,
        "defaults": {"scrape": "5s"},
        "telemetry": {"access_log": "off"},
    }


async def serve_replies(port: int) -> None:
    """Serve the replies of all rows. The server of `WELL` is the last to listen."""
    async with AsyncExitStack() as stack:
        for kind in PROVOCATIONS:
            await stack.enter_async_context(UpstreamByCaller({A: kind.script}, host_of(kind), port))
        await stack.enter_async_context(UpstreamByCaller({}, HOST, port))
        await asyncio.Event().wait()


class References:
    """p99 without any fault, ms. Measured several times in a run."""

    def __init__(self) -> None:
        self.quiet, self.well = list[float](), list[float]()

    async def measure(self, port: int, seconds: float) -> None:
        for name, senders, found in (("quiet", 0, self.quiet), (WELL.name, SENDERS, self.well)):
            latencies = await measure(port, WELL, seconds, senders)
            found.append(latencies.quantile(0.99))
            print(latencies.shown(name), flush=True)

    def __str__(self) -> str:
        return f"p99 quiet {median(self.quiet):.1f} ms, with key a answered well {median(self.well):.1f} ms"


async def run(port: int, kinds: Sequence[Provocation], seconds: float) -> None:
    references, p99, unanswered = References(), dict[str, float](), 0
    for place, kind in enumerate(kinds):
        if place % REFERENCES_EVERY == 0:
            await references.measure(port, seconds)
        found = await measure(port, kind, seconds)
        print(found.shown(kind.name), flush=True)
        p99[kind.name] = found.quantile(0.99)
        unanswered += found.unanswered
    await references.measure(port, seconds)
    print(f"{references}; {summary(p99, median(references.quiet))}; {unanswered} unanswered")


def summary(p99: Mapping[str, float], quiet: float) -> str:
    """How many rows meet the goal, and the worst of all."""
    met = sum(value <= quiet + ADDED for value in p99.values())
    worst = max(p99, key=lambda name: p99[name])
    return f"{met} of {len(p99)} rows within {ADDED:g} ms of quiet; worst {p99[worst]:.1f} ms, '{worst}'"


def main(seconds: float, names: Sequence[str]) -> None:
    module = [sys.executable, "-m", "benchmarks.one_key_blamed"]
    port, server = free_port(), free_port()
    print(f"{'':48}{'p50':>8}{'p99':>9}{'most':>9}  unanswered")
    with (
        child([*module, "--servers", str(server)], server),
        child([*module, "--gateway", str(port), str(server)], port, quiet=True),
    ):
        asyncio.run(run(port, [kind for kind in PROVOCATIONS if not names or kind.name in names], seconds))


if __name__ == "__main__":
    if "--gateway" not in sys.argv:
        gc.disable()  # a collection in the load or in the servers would be a wait of key b
    match sys.argv[1:]:
        case ["--servers", port]:
            asyncio.run(serve_replies(int(port)))
        case ["--gateway", *ports]:
            sys.exit(serve(Config.model_validate(gateway_config(*map(int, ports)))))
        case [seconds, *names]:
            main(float(seconds), names)
        case _:
            main(SECONDS, ())
