"""Cost of a request body: CPU by stage without the tokenizer's own time, and event loop lag.

    python -m benchmarks.body_cost [ROUNDS]

`parse` is bytes to an InferenceRequest, `estimate` is prompt tokens and prefix blocks, `render` is the body for the
engine. Each figure is the least of many, in microseconds of CPU, all threads included; tiktoken's share is subtracted
and shown beside. `held up` is the largest lateness of a timer of the same event loop while a request is parsed,
estimated and rendered: the median of a few, in milliseconds.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from random import Random
from statistics import median
from time import perf_counter, process_time, thread_time

import uvloop

from backends.interface import BackendConfig, BackendRequest, Operation
from backends.vllm import Vllm
from gateway.admission.auth import ANYONE
from gateway.api.inference_request import InferenceRequest, parse
from gateway.decider import Decider
from gateway.process import tune_gc
from gateway.tokenize.estimator import Estimator
from gateway.tokenize.prompt_reader import TokenizerConfig
from gateway.tokenize.tokenizers import Encoder, encoder
from policies.fleet.fleet import Fleet
from policies.routes.route import Route
from policies.types import Endpoint, Pool

ROUNDS = 60
TICK = 0.001  # s
LARGE_ROUNDS = 5
WORDS = """the of and to a in is that for it as was with be by on not he his but at are this have from or had an they
which one you were all her she there would their we him been has when who will no more if out so what up said about
other into than its time only could new them man some these then two first may any request gateway token answer engine
cache prefix deadline "yes" (which) budget, model. stream: latency; list\n- item""".split(" ")
HEADERS = {"host": "x", "content-type": "application/json", "authorization": "Bearer sk-1", "user-agent": "OpenAI/1"}
ROUTE = Route.model_validate({"name": "m", "tiers": ["main"]})
MAIN = Pool("main", "served", (Endpoint("main/a", "main"),))
O200K = encoder("o200k_base")
fresh = count(1)


def text(size: int, seed: int) -> str:
    """Prose of `size` characters, different for each seed from the first word on: 4.5 characters a token."""
    return f"{seed:x} {' '.join(Random(seed).choices(WORDS, k=size // 3))}"[:size]


def texts(sizes: Sequence[int]) -> list[str]:
    """Texts never used before."""
    return [text(size, next(fresh)) for size in sizes]


def body(texts: Sequence[str]) -> bytes:
    """As written by OpenAI's SDK for Python."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": said} for i, said in enumerate(texts)]
    asked = {"messages": messages, "model": "m", "stream": True, "temperature": 0.7, "max_tokens": 256}
    return json.dumps(asked, ensure_ascii=False, separators=(",", ":")).encode()


@dataclass
class Cost:
    """Least seconds of CPU by stage."""

    parse: float = 1e9
    estimate: float = 1e9
    render: float = 1e9
    tokenizer: float = 1e9

    def least(self, parse: float, estimate: float, render: float, tokenizer: float) -> None:
        self.parse, self.estimate = min(self.parse, parse), min(self.estimate, estimate)
        self.render, self.tokenizer = min(self.render, render), min(self.tokenizer, tokenizer)


class TimedEncoder(Encoder):
    """o200k_base, with the time spent in it."""

    took = 0.0  # s

    def count(self, text: str) -> int:
        started = thread_time()
        found = O200K.count(text)
        self.took += thread_time() - started
        return found


class BodyBench:
    """The parts of one gateway which handle a body."""

    def __init__(self) -> None:
        fleet = Fleet([MAIN])
        self.tokenizer = TimedEncoder(O200K.encode)
        self.estimator = Estimator(
            {"main": TokenizerConfig()}, fleet.view.token_scale, encoders=lambda name: self.tokenizer
        )
        self.decider = Decider(self.estimator, fleet)
        self.backend = Vllm(BackendConfig("vllm", "served"))
        self.estimator.warm()

    def parse(self, raw: bytes) -> InferenceRequest:
        return parse(Operation.CHAT, raw, HEADERS, 0.0, "req-1")

    def render(self, request: InferenceRequest) -> None:
        self.backend.call(
            BackendRequest(request.operation, request.body, "served", request.stream, 1024, request.request_id)
        )

    async def once(self, raw: bytes, cost: Cost) -> None:
        self.tokenizer.took, started = 0.0, process_time()
        request = self.parse(raw)
        parsed = process_time()
        await self.decider.estimate(request, ROUTE, ANYONE)
        estimated = process_time()
        self.render(request)
        rendered = process_time()
        tokenizer = self.tokenizer.took
        cost.least(parsed - started, estimated - parsed - tokenizer, rendered - estimated, tokenizer)

    async def held_up(self, raw: bytes) -> float:
        """Largest lateness of a timer meanwhile, in seconds."""
        ended, late = False, [0.0]

        async def tick() -> None:
            while not ended:
                due = perf_counter() + TICK
                await asyncio.sleep(TICK)
                late.append(perf_counter() - due)

        ticking = asyncio.create_task(tick())
        await asyncio.sleep(5 * TICK)
        request = await self.decider.parse(Operation.CHAT, raw, HEADERS, 0.0, "req-1")
        await self.decider.estimate(request, ROUTE, ANYONE)
        self.render(request)
        await asyncio.sleep(2 * TICK)
        ended = True
        await ticking
        return max(late)


def unseen(*sizes: int) -> Callable[[], list[str]]:
    return lambda: texts(sizes)


def with_new_message(known: Sequence[str], size: int) -> Callable[[], list[str]]:
    """A new last message behind these."""
    return lambda: [*known, *texts([size])]


async def table(rounds: int) -> None:
    bench = BodyBench()
    small, turns, single = texts([120]), texts([2000] * 50), texts([100_000])
    cases: dict[str, tuple[Sequence[str], Callable[[], Sequence[str]]]] = {
        "200 B, unseen": ((), unseen(120)),
        "200 B, seen": (small, lambda: small),
        "100 KB in 50 messages, unseen": ((), unseen(*[2000] * 50)),
        "100 KB, all but the last 1 KB seen": (turns, with_new_message(turns, 1000)),
        "100 KB in 50 messages, seen": (turns, lambda: turns),
        "100 KB in one message, unseen": ((), unseen(100_000)),
        "100 KB in one message, seen": (single, lambda: single),
    }
    print("| us of CPU | parse | estimate | render | in all | tokenizer |\n|---|---|---|---|---|---|")
    for name, (before, make) in cases.items():
        cost = Cost()
        if before:
            await bench.once(body(before), Cost())
        for _ in range(rounds):
            await bench.once(body(make()), cost)
        stages = (cost.parse, cost.estimate, cost.render)
        us = [f"{1e6 * each:.1f}" for each in (*stages, sum(stages), cost.tokenizer)]
        print(f"| {name} | {' | '.join(us)} |", flush=True)


async def stalls() -> None:
    print("\n| held up, ms | unseen | seen |\n|---|---|---|")
    for name, sizes in {
        "1 MB in 500 messages": [2_000] * 500,
        "1 MB in one": [1_000_000],
        "8 MB in 4000": [2_000] * 4000,
        "8 MB in one": [8_000_000],
    }.items():
        first, again = [], []
        for _ in range(LARGE_ROUNDS):
            bench, raw = BodyBench(), body(texts(sizes))
            first.append(await bench.held_up(raw))
            again.append(await bench.held_up(raw))
            bench.estimator.close()
        print(f"| {name} | {1e3 * median(first):.1f} | {1e3 * median(again):.1f} |", flush=True)


if __name__ == "__main__":
    tune_gc()
    uvloop.run(table(int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS))
    uvloop.run(stalls())
