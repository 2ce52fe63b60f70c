"""Longest silence and total time of streams on engines that slow down: `python -m benchmarks.steadiness [FAULT...]`.

Four simulated 8B engines on real sockets, 16 streams of TOKENS tokens at a time on a route that promises 50 ms a token.
In the midst of the answers the engine with most of them meets with the fault: `stall`, 5 s without a token; `drip`, a
tenth of the promised pace from there on; `all-stall`, `all-drip`: all engines do. Rows: without rescue, with rescue
alone, and with rescue and a `gap` of 1 s. Figures are of the streams that were on a faulty engine, in seconds.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from random import Random
from statistics import median
from time import monotonic
from typing import Any

import openai

from gateway.observe.record import Record
from lab.servers.simulated_server import SimulatedServer
from tests.support.gateways import running
from tests.support.rescued_answers import Answer, read
from tests.support.simulated import engine_pool, engines, eventually

STREAMS, TOKENS, ENGINES = 16, 150, 4
BEFORE = 0.2  # s of the answers until the fault
STALL, DRIP = 750.0, 75.0  # times 6.7 ms: a step of 5 s; a tenth of the promised pace
ROUTE: Mapping[str, Any] = {"tiers": ["p"], "hedge": "off", "ttft": "off", "tpot": {"budget": "50ms"}}
ROUTES: Mapping[str, Mapping[str, Any]] = {
    "rescue: off": {**ROUTE, "rescue": "off"},
    "rescue: on": {**ROUTE, "rescue": "on"},
    "rescue: on, gap: 1s": {**ROUTE, "rescue": "on", "gap": {"budget": "1s"}},
}
LENGTH: Mapping[str, Any] = {"max_tokens": TOKENS, "extra_body": {"ignore_eos": True}}


async def play(fault: str, route: Mapping[str, Any]) -> str:
    async with (
        engines(ENGINES) as servers,
        running({"p": engine_pool(*servers)}, {"chat": route}) as gateway,
        openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client,
    ):
        await asyncio.gather(*(read(client, prompt(number), **LENGTH) for number in range(STREAMS)))  # learned
        seen = len(gateway.recorder.recent)
        began = monotonic()
        asked = [asyncio.create_task(read(client, prompt(-number), **LENGTH)) for number in range(1, STREAMS + 1)]
        await eventually(lambda: sum(server.engine.running for server in servers) == STREAMS)
        await asyncio.sleep(BEFORE)
        busiest = max(servers, key=lambda server: server.engine.running)
        faulty = servers if fault.startswith("all") else [busiest]
        await slow_down(faulty, STALL if fault.endswith("stall") else DRIP)
        answers = await asyncio.gather(*asked)
        took = monotonic() - began
        names = [server.url.rpartition("/")[2] for server in faulty]
        met = [each for each in [*gateway.recorder.recent][seen:] if first_endpoint(each).endswith(tuple(names))]
        return told(met, answers, took)


def prompt(number: int) -> str:
    """Some 2,000 tokens, none of which another prompt shares: so all engines get some."""
    return " ".join(str(word) for word in Random(number).sample(range(10_000), 800))


async def slow_down(servers: list[SimulatedServer], times: float) -> None:
    """For one step, or to the end of the answers."""
    for server in servers:
        server.faults.slow = times
    if times == STALL:
        await asyncio.sleep(0.1)
        for server in servers:
            server.faults.slow = 1.0


def first_endpoint(record: Record) -> str:
    return min(record.attempts, key=lambda each: each.number).endpoint


def told(records: list[Record], answers: list[Answer], took: float) -> str:
    gaps, totals = [each.gaps.longest or 0.0 for each in records], [each.total for each in records]
    moved = sum(bool(each.rescue) for each in records)
    whole = sum(not each.error and len(each.finish_reasons) == 1 for each in answers)
    return (
        f"{len(records):>3} streams, {moved:>2} moved   longest gap p50 {median(gaps):5.2f} max {max(gaps):5.2f}   "
        f"total p50 {median(totals):6.2f} max {max(totals):6.2f}   whole {whole} of {len(answers)}   all {took:.1f} s"
    )


def main() -> None:
    for fault in sys.argv[1:] or ("stall", "drip", "all-stall", "all-drip"):
        for name, route in ROUTES.items():
            print(f"{fault:<10} {name:<20} {asyncio.run(play(fault, route))}", flush=True)


if __name__ == "__main__":
    main()
