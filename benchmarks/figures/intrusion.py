"""Effect of a very long prompt on streams under way: the largest added gap between two tokens."""

from __future__ import annotations

import asyncio
from time import perf_counter

from benchmarks.client import BadAnswer, connect, request
from benchmarks.figures.figure import Engines, Figure, Goal, Measured, Scenario
from benchmarks.peers import Proxy
from benchmarks.prompts import text

MODEL = "unhurried"
STREAMS, GAP = 50, 0.05  # s between two tokens of each
PROMPT = 900_000  # bytes: 200,000 tokens
PROMPTS = 3
BEFORE, AFTER = 1.0, 0.5  # s


async def intrusion(proxy: Proxy, _engines: Engines) -> Measured:
    streams = [await connect(proxy.port) for _ in range(STREAMS)]
    asked = request("stream-400-50", ["Go on."], MODEL)
    prompts = [request("whole", [text(PROMPT)], MODEL) for _ in range(PROMPTS)]
    for each in streams:
        each.ask(asked)
        await asyncio.sleep(GAP / STREAMS)
    intruder = await connect(proxy.port)
    await asyncio.sleep(BEFORE)
    began = perf_counter()
    for prompt in prompts:
        await intruder.ask(prompt)
        await asyncio.sleep(AFTER)
    gaps = [gap for each in streams for gap in each.answer.gaps(began)]
    wrong = [each.stall_reason(perf_counter() - 1.0) for each in streams]
    for connection in (*streams, intruder):
        connection.disconnect()
    if any(wrong):
        raise BadAnswer(next(filter(None, wrong)))
    return {"intrusion": (max(gaps) - GAP) * 1e3}


SCENARIOS = (
    Scenario(
        "intrusion",
        (
            Figure(
                "intrusion",
                f"largest gap that a prompt of 200k tokens adds to {STREAMS} streams, ms",
                [Goal(10)],
                added=True,
            ),
        ),
        intrusion,
    ),
)
