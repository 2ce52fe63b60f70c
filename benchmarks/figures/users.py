"""What users run: prompts of 2 to 100 KB, never seen before or with a last turn of 1 KB, answered by 200 tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import cycle, islice, repeat
from statistics import quantiles

from benchmarks.client import Answer, closed_loop, open_loop, request
from benchmarks.figures.figure import Block, Engines, Figure, Goal, Measured, Scenario
from benchmarks.peers import NGINX, SMG, VLLM, Proxy
from benchmarks.processes import cpu_seconds, resident
from benchmarks.prompts import Writer

SIZES = (2_000, 8_000, 32_000, 100_000)  # bytes
TURN, LAST = 2_000, 1_000  # bytes of a turn of a conversation, and of its last one
CONVERSATIONS = 16  # under way in turns
TOKENS, GAP = 200, 5  # of an answer, and ms between two
SHAPE = f"stream-{TOKENS}-{GAP}"
SHORT = 10  # tokens
STREAMS, AT_ONCE = 128, 64
RATES = {
    50.0: 200,
    200.0: 50,
}  # requests per second, and tokens of each: 10,000 chunks a second, what the load can read
SECONDS = 3.0  # at each rate
PATIENCE = 4.0  # s after the last request until a proxy counts as unable to keep up


@dataclass(frozen=True, slots=True)
class Prompts:
    """Requests of one kind. `seen`: all but the last turn of the conversation."""

    size: int
    seen: bool

    @property
    def name(self) -> str:
        return f"{self.size // 1000}k-{'seen' if self.seen else 'new'}"

    @property
    def title(self) -> str:
        return f"{self.size // 1000} KB, {'all but 1 KB seen' if self.seen else 'never seen'}"

    def ask(self, count: int, seed: str, shape: str = SHAPE) -> tuple[Sequence[bytes], Sequence[bytes]]:
        """What must be sent first, and `count` requests, as HTTP."""
        writer = Writer(seed)
        if not self.seen:
            return [], [request(shape, [writer.text(self.size)]) for _ in range(count)]
        histories = [self.history(writer) for _ in range(CONVERSATIONS)]
        first = [request(shape, [*history, writer.text(LAST)]) for history in histories]
        return first, [request(shape, [*each, writer.text(LAST)]) for each in islice(cycle(histories), count)]

    def history(self, writer: Writer) -> list[str]:
        """An even number of turns."""
        turns = max(2, (self.size - LAST) // TURN // 2 * 2)
        return [writer.text((self.size - LAST) // turns) for _ in range(turns)]


KINDS = [Prompts(size, seen) for size in SIZES for seen in (False, True)]


@lru_cache(maxsize=1)
def asked(
    prompts: Prompts, count: int, use: str, turn: int, shape: str = SHAPE
) -> tuple[Sequence[bytes], Sequence[bytes]]:
    """The same for all peers of a round: writing them takes longer than sending them."""
    return prompts.ask(count, f"{prompts.name} {use} {turn}", shape)


async def cost(prompts: Prompts, proxy: Proxy, engines: Engines) -> Measured:
    """CPU of a request with its answer; a slow peer gets fewer requests."""
    first, requests = asked(prompts, STREAMS, "cost", engines.turn)
    await closed_loop(proxy.port, first, AT_ONCE)
    before = cpu_seconds(proxy.pid)
    done = await closed_loop(proxy.port, requests[: STREAMS // proxy.slowness], AT_ONCE)
    return {prompts.name: (cpu_seconds(proxy.pid) - before) * 1e6 / done, "resident": resident(proxy.pid) / 1024**2}


async def chunk(proxy: Proxy, _engines: Engines) -> Measured:
    """The difference between long and short streams is the cost of their chunks."""
    used = []
    count = max(AT_ONCE, 4 * AT_ONCE // proxy.slowness)
    for tokens in (SHORT, TOKENS):
        stream = request(f"stream-{tokens}-{GAP}", ["Go on."])
        await closed_loop(proxy.port, repeat(stream, 8), 8)
        before = cpu_seconds(proxy.pid)
        done = await closed_loop(proxy.port, repeat(stream, count), AT_ONCE)
        used.append((cpu_seconds(proxy.pid) - before) * 1e6 / done)
    return {"chunk": (used[1] - used[0]) / (TOKENS - SHORT)}


async def ttft(prompts: Prompts, rate: float, proxy: Proxy, engines: Engines) -> Measured:
    """Milliseconds, if the proxy keeps up; else only the rate that it achieves."""
    shape = f"stream-{RATES[rate]}-{GAP}"
    first, requests = asked(prompts, int(rate * SECONDS), f"{rate:.0f}/s", engines.turn, shape)
    await closed_loop(proxy.port, [*first, *repeat(request("whole", ["Hello."]), 8)], 8)
    answers = await open_loop(proxy.port, requests, rate, PATIENCE)
    name, achieved = f"{prompts.name}-{rate:.0f}", achieved_rate(answers, RATES[rate] * GAP / 1e3)
    if len(answers) < len(requests):
        return {f"{name}-rate": achieved}
    cuts = quantiles([answer.ttft * 1e3 for answer in answers], n=100)
    return {f"{name}-rate": achieved, f"{name}-p50": cuts[49], f"{name}-p99": cuts[98]}


def achieved_rate(answers: Sequence[Answer], streaming: float) -> float:
    """Answers per second, from the first request to the last end, less the time that a stream takes by itself (s)."""
    if not answers:
        return 0.0
    took = max(answer.ended for answer in answers) - min(answer.sent for answer in answers)
    return len(answers) / max(took - streaming, 1 / len(answers))


# -- scenarios -----------------------------------------------------------------------------

COST_GOALS = {
    "8k-new": [Goal(1.2, SMG)],
    "100k-new": [Goal(3, SMG)],
    "100k-seen": [Goal(1, SMG)],
}
RESIDENT = Figure("resident", "resident memory of the process after these rows, MB")
CHUNK = Figure("chunk", "a chunk of a stream, us", [Goal(1.3, NGINX), Goal(1, SMG)], digits=1)


def cost_scenario(prompts: Prompts) -> Scenario:
    figure = Figure(prompts.name, f"{prompts.title}, us", COST_GOALS.get(prompts.name, ()))
    figures = [figure, RESIDENT] if prompts == KINDS[-1] else [figure]
    return Scenario(f"cost-{prompts.name}", figures, partial(cost, prompts))


def ttft_scenario(prompts: Prompts, rate: float) -> Scenario:
    name = f"{prompts.name}-{rate:.0f}"
    goals = [Goal(1, VLLM)] if name == "8k-new-50" else []
    figures = [
        Figure(
            f"{name}-{cut}", f"{prompts.title}: {cut} at {rate:.0f}/s, ms", goals if cut == "p50" else (), True, 2, rate
        )
        for cut in ("p50", "p99")
    ]
    return Scenario(f"ttft-{name}", figures, partial(ttft, prompts, rate))


BLOCKS = (
    Block(
        f"A prompt answered by a stream of {TOKENS} tokens: CPU",
        f"{AT_ONCE} streams at a time, a token every {GAP} ms. Prompts are prose and code of a large vocabulary; "
        f"conversations have turns of {TURN // 1000} KB, and {CONVERSATIONS} of them are under way.",
        [*(cost_scenario(prompts) for prompts in KINDS), Scenario("chunk", [CHUNK], chunk)],
    ),
    *(
        Block(
            f"Time to first token, added, at {rate:.0f} requests a second",
            f"Open loop for {SECONDS:g} s, each answered by {tokens} tokens: {rate * tokens:,.0f} chunks a second. "
            "A peer that does not keep up shows the rate that it achieves instead.",
            [ttft_scenario(prompts, rate) for prompts in KINDS],
        )
        for rate, tokens in RATES.items()
    ),
)
