"""Rows 44 and 45: identical bytes in thousands of streams, and a minute of the soak."""

from __future__ import annotations

import asyncio
from collections import Counter

from tests.e2e import test_byte_transparency as transparency
from tests.programs.chaos import soak
from tests.programs.chaos.lab import Lab
from tests.programs.chaos.rows import Result, row
from tests.support.gateways import pool


@row(44, "correctness", "1,000 streams at once, 20 times", "every byte as the upstream sent it")
async def identical_bytes(lab: Lab) -> Result:
    """Seeded streams in several scripts, cut at random into chunks and segments; the callers compare all bytes."""
    rounds, streams = lab.size(20, 1), lab.size(1000, 200)
    wrong, told = 0, Counter[str]()
    async with (
        transparency.random_upstream() as url,
        lab.gateway({"only": pool(url)}, defaults=transparency.PATIENT, check=False) as gateway,
    ):
        for number in range(rounds):
            seeds = range(number * streams, (number + 1) * streams)
            got = await asyncio.gather(
                *(transparency.ask(gateway.port, seed) for seed in seeds), return_exceptions=True
            )
            for seed, body in zip(seeds, got, strict=True):
                if isinstance(body, BaseException):
                    told[type(body).__name__] += 1
                else:
                    wrong += body != transparency.answer(seed)
    total = rounds * streams
    figures = f"{total - wrong - told.total()} of {total} identical"
    return Result(figures, not wrong and not told, ", ".join(told))


@row(
    45,
    "correctness",
    "soak: mixed faults and callers",
    "memory and descriptors flat, gauges zero, one Record a request",
)
async def short_soak(lab: Lab) -> Result:
    """Five minutes of `make soak`, with the seed 1."""
    return await soak.measure(lab, 300.0 if not lab.quick else 20.0, seed=1)
