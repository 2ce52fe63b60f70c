"""TTFT added by a proxy under little load: 50 streams a second, open loop."""

from __future__ import annotations

from statistics import quantiles

from benchmarks.client import open_loop, request
from benchmarks.figures.figure import Engines, Figure, Measured, Scenario
from benchmarks.peers import Proxy

RATE, SECONDS = 50.0, 6.0
WARM_UP = 0.5  # s


async def ttft(proxy: Proxy, _engines: Engines) -> Measured:
    asked = request("stream-10-5", ["Go on."])
    await open_loop(proxy.port, asked, RATE, WARM_UP)
    cuts = quantiles([answer.ttft * 1e3 for answer in await open_loop(proxy.port, asked, RATE, SECONDS)], n=100)
    return {"ttft_p50": cuts[49], "ttft_p99": cuts[98]}


SCENARIOS = (
    Scenario(
        "ttft",
        (
            Figure("ttft_p50", "TTFT added at 50 streams/s, p50, ms", 0.4, added=True, digits=2),
            Figure("ttft_p99", "TTFT added at 50 streams/s, p99, ms", 2, added=True, digits=2),
        ),
        ttft,
    ),
)
