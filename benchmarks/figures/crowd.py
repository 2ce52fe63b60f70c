"""Prompts of 220 KB from 1 to 150 callers at a time: the load under which an endpoint picker was reported to stall.

llm-d-router's issue 1109 (May 2026) reports 129 requests a second and a mean TTFT of 1.1 s at 150 callers, before
engines which answer at once. Callers without a pause saturate any proxy, and the mean TTFT is their number divided by
the throughput. With a request of each caller in PACE seconds, it is what the proxy adds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count, cycle
from statistics import mean
from time import perf_counter

from benchmarks.client import Answer, closed_loop, connect
from benchmarks.figures.figure import Block, Engines, Figure, Goal, Measured, Scenario
from benchmarks.figures.users import CONVERSATIONS, Prompts
from benchmarks.peers import Proxy

SIZE = 220_000  # bytes
CALLERS = (1, 50, 100, 150)
SHAPE = "stream-10-5"
PACE = 3.0  # s between two requests of a caller, who does not saturate
WINDOW = 3.0  # s of measurement
NEW, SEEN = Prompts(SIZE, False), Prompts(SIZE, True)


@dataclass(frozen=True, slots=True)
class Crowd:
    """Callers with these prompts. `pace`: s between two requests of a caller; they begin at equal distances."""

    prompts: Prompts
    pace: float = 0.0

    @property
    def name(self) -> str:
        return f"crowd-{self.prompts.name if self.pace else 'saturated'}"

    async def measure(self, proxy: Proxy, engines: Engines) -> Measured:
        """Requests per second and mean TTFT by number of callers; where callers saturate, the throughput
        of the most beside the best."""
        first, turns = requests(self, engines.turn)
        await closed_loop(proxy.port, first, CONVERSATIONS)
        found, rates = dict[str, float](), list[float]()
        for callers in CALLERS:
            answers = await self.play(proxy.port, turns, callers)
            rates.append(len(answers) / WINDOW)
            ttft = mean(answer.ttft for answer in answers) * 1e3
            found |= {f"{self.name}-{callers}-rate": rates[-1], f"{self.name}-{callers}-ttft": ttft}
        return found if self.pace else {**found, f"{self.name}-kept": rates[-1] / max(rates)}

    async def play(self, port: int, turns: Iterator[bytes], callers: int) -> list[Answer]:
        """Closed loop: the answers which end in the WINDOW after all have begun."""
        answers, begins = list[Answer](), perf_counter() + self.pace

        async def caller(delay: float) -> None:
            await asyncio.sleep(delay)
            connection = await connect(port)
            while (asked_at := perf_counter()) < begins + WINDOW:
                answers.append(await connection.ask(next(turns)))
                await asyncio.sleep(max(asked_at + self.pace - perf_counter(), 0.0))
            connection.disconnect()

        await asyncio.gather(*(caller(self.pace * number / callers) for number in range(callers)))
        return [answer for answer in answers if begins <= answer.ended < begins + WINDOW]


def requests(crowd: Crowd, turn: int) -> tuple[Sequence[bytes], Iterator[bytes]]:
    """What must be sent first, and endless requests; those seen before go on with a turn of their own."""
    if not crowd.prompts.seen:
        first, new = asked(crowd.prompts, sum(3 * callers for callers in CALLERS), turn, SHAPE)
        return first, iter(new)
    first, known = asked(crowd.prompts, 8 * CONVERSATIONS, turn, SHAPE)
    return first, map(with_new_turn, cycle(known), count())


def with_new_turn(request: bytes, number: int) -> bytes:
    """The last turn begins with another number."""
    at = request.rindex(b"Case ") + len(b"Case ")
    return b"%b%015x%b" % (request[:at], number, request[at + 15 :])


@lru_cache(maxsize=1)
def asked(prompts: Prompts, number: int, turn: int, shape: str) -> tuple[Sequence[bytes], Sequence[bytes]]:
    return prompts.ask(number, f"{prompts.name} crowd {turn}", shape)


# -- scenarios -----------------------------------------------------------------------------


def scenario(crowd: Crowd) -> Scenario:
    saturated = not crowd.pace
    what = "saturated" if saturated else crowd.prompts.title.partition(", ")[2]
    figures = [
        figure
        for callers in CALLERS
        for figure in (
            Figure(f"{crowd.name}-{callers}-rate", f"{callers} callers, {what}: requests per second", more=True),
            Figure(
                f"{crowd.name}-{callers}-ttft",
                f"{callers} callers, {what}: mean TTFT{'' if saturated else ' added'}, ms",
                () if saturated else [Goal(30)],
                added=not saturated,
                digits=1,
            ),
        )
    ]
    kept = Figure(
        f"{crowd.name}-kept", f"{what}: throughput of most callers / best", [Goal(0.95, least=True)], digits=2
    )
    return Scenario(crowd.name, [*figures, kept] if saturated else figures, crowd.measure)


BLOCKS = (
    Block(
        "Prompts of 220 KB by up to 150 callers",
        "`saturated`: engines answer at once, all but the last turn is known. The load is the one of [llm-d-router's "
        "issue 1109](https://github.com/llm-d/llm-d-router/issues/1109), where the endpoint picker stayed at 129 "
        "requests a second and 1.1 s mean TTFT. Every proxy saturates its core, so the mean TTFT is callers divided "
        "by throughput. The others: each caller has a request in 3 s, and TTFT is what the proxy adds.",
        [scenario(Crowd(SEEN)), scenario(Crowd(SEEN, PACE)), scenario(Crowd(NEW, PACE))],
    ),
)
