"""TTFT added by a proxy to small requests: 50 streams a second, open loop."""

from __future__ import annotations

from statistics import quantiles

from benchmarks.client import open_loop, request
from benchmarks.figures.figure import Engines, Figure, Goal, Measured, Scenario
from benchmarks.peers import Proxy

RATE, SECONDS = 50.0, 6.0
WARM_UP = 0.5  # s


async def ttft(proxy: Proxy, _engines: Engines) -> Measured:
    asked = request("stream-10-5", ["Go on."])
    await open_loop(proxy.port, [asked] * int(RATE * WARM_UP), RATE)
    answers = await open_loop(proxy.port, [asked] * int(RATE * SECONDS), RATE)
    cuts = quantiles([answer.ttft * 1e3 for answer in answers], n=100)
    return {"ttft_p50": cuts[49], "ttft_p99": cuts[98]}


SCENARIOS = (
    Scenario(
        "ttft",
        (
            Figure("ttft_p50", "TTFT added at 50 small streams/s, p50, ms", [Goal(0.4)], added=True, digits=2),
            Figure("ttft_p99", "TTFT added at 50 small streams/s, p99, ms", [Goal(2)], added=True, digits=2),
        ),
        ttft,
    ),
)
