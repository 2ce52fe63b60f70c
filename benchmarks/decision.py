"""Cost of one decision, and of all of `policies` for one request.

    python -m benchmarks.decision

Prints, in microseconds,
- `decide` (from estimate to ranked decision) for an 8k-token prompt of known prefix among 8 and 64 endpoints, some of
  them busy, a million blocks indexed, learned predictors; and the same through the request queue;
- each stage of one small request on a fleet of two: decisions, actions and learning between estimate and end. The
  median of a window of requests, in the quietest window: the machine may have other work;
and the prefix index's bytes per block.
"""

from __future__ import annotations

import gc
import sys
import tracemalloc
from array import array
from collections.abc import Iterator, Sequence
from itertools import pairwise
from random import Random
from statistics import median
from time import perf_counter

from gateway.config.yaml_source import with_preset
from policies.attempts.attempt_machine import AttemptMachine
from policies.attempts.budgets import HedgeBudget, RetryBudget
from policies.attempts.wire import AttemptLimits, Wire
from policies.fleet.fleet import AttemptReport, Fleet
from policies.queue.queue_scheduler import QueueScheduler
from policies.queue.queued_request import QueuedRequest
from policies.queue_parts import queue_parts
from policies.routes.route import Route
from policies.routing.decide import decide
from policies.types import (
    Attempt,
    AttemptOutcome,
    Candidate,
    Endpoint,
    Forecast,
    Pool,
    PoolEstimate,
    PrefixBlocks,
    PromptEstimate,
    RequestView,
)

BLOCKS = 1_000_000  # indexed, over all endpoints
PROMPT, BLOCK = 8_192, 16  # tokens
ROUNDS = 4_000

STAGES = ("snapshot", "decide", "begin", "sent", "first token", "commit", "ended")
SMALL, SYSTEM, OUTPUT = 160, 4, 40  # tokens of a small prompt; shared leading blocks; tokens of an answer
WINDOWS, WINDOW = 100, 60  # requests in each


class Opened(Wire):
    """Keeps the attempt that was opened last."""

    attempt: Attempt

    def open(self, attempt: Attempt) -> None:
        self.attempt = attempt

    def commit(self, number: int, *, was_kept: bool = False) -> None: ...

    def wake(self, at: float) -> None: ...


def prompts(count: int, random: Random) -> list[PoolEstimate]:
    """Prompts of PROMPT tokens: a system prompt of a quarter, shared by every eighth, and a rest of their own."""
    size = PROMPT // BLOCK
    shared = [[random.getrandbits(64) for _ in range(size // 4)] for _ in range(8)]
    made = []
    for i in range(count):
        hashes = array("Q", [*shared[i % 8], *(random.getrandbits(64) for _ in range(size - size // 4))])
        made.append(PoolEstimate(PROMPT, PrefixBlocks(hashes, BLOCK), PROMPT))
    return made


def busy_fleet(endpoints: int, random: Random) -> tuple[Fleet, Route, list[PoolEstimate]]:
    """A fleet which has served BLOCKS worth of prompts and still answers some."""
    pool = Pool(
        "main", "m", tuple(Endpoint(f"main/{i}", "main") for i in range(endpoints)), kv_tokens=8 * BLOCKS * BLOCK
    )
    fleet = Fleet([pool])
    seen = prompts(int(BLOCKS / (PROMPT / BLOCK)), random)
    now = 0.0
    for i, prompt in enumerate(seen):
        candidate = Candidate(pool.endpoints[i % endpoints], 0, PROMPT, 0, Forecast(0.2), 1.0, 0.0)
        now += 0.02
        fleet.on_sent(i, candidate, prompt, now, True, tpot_budget=0.05, output=200)
        if i < len(seen) - endpoints // 2:
            fleet.on_first_token(i, now + 0.2)
        if i < len(seen) - 6 * endpoints:
            fleet.on_ended(i, AttemptOutcome.COMPLETED, now + 0.2)
    route = Route.model_validate({"name": "agent", **with_preset("agent", {"tiers": ["main"]})})
    return fleet, route, seen


def decision_times(endpoints: int, with_queue: bool) -> list[float]:
    """Sorted, s."""
    random = Random(1)
    fleet, route, seen = busy_fleet(endpoints, random)
    room, now, took = QueueScheduler(queue_parts()), 0.02 * len(seen) + 0.3, []
    gc.collect()
    gc.freeze()
    for i in range(ROUNDS):
        prompt = PromptEstimate({"main": seen[random.randrange(len(seen))]}, 200)
        queued = QueuedRequest(i, RequestView(now, stream=True), prompt, route, i)
        now += 0.001
        if i % 200 == 0:
            fleet.on_progress([(key, int(40 * (now - 0.02 * key - 0.2)) + 1) for key in range(len(seen))], now)
        began = perf_counter()
        if with_queue:
            room.enter(queued)
            gone = list(room.release(fleet, now))
        else:
            decide(queued, fleet.snapshot(now), fleet.view, now)
        took.append(perf_counter() - began)
        if with_queue:
            for ticket, _ in gone:
                room.on_dispatched(ticket)
            room.leave(i, now)
    return sorted(took)


class SmallRequests:
    """One after the other on a fleet of two with full caches: every new block evicts another."""

    def __init__(self) -> None:
        self.random = Random(1)
        pool = Pool("main", "m", (Endpoint("main/0", "main"), Endpoint("main/1", "main")), kv_tokens=20_000)
        self.fleet = Fleet([pool])
        self.now = 0.0
        self.number = 0
        self.retries, self.hedges = RetryBudget(), HedgeBudget(0.03)
        self.route = Route.model_validate({"name": "chat", **with_preset("chat", {"tiers": ["main"]})})
        self.system = [self.random.getrandbits(64) for _ in range(SYSTEM)]

    def prompt(self) -> PoolEstimate:
        own = [self.random.getrandbits(64) for _ in range(SMALL // BLOCK - SYSTEM)]
        tokens = SMALL + self.random.randrange(BLOCK)
        return PoolEstimate(tokens, PrefixBlocks(array("Q", [*self.system, *own]), BLOCK), tokens - 10, 2)

    def serve(self) -> list[float]:
        """Serve one request. Returns s of each stage."""
        self.now, self.number, prompt = self.now + 0.01, self.number + 1, self.prompt()
        fleet, route, now, key, estimate = self.fleet, self.route, self.now, object(), PromptEstimate({"main": prompt})
        queued = QueuedRequest(key, RequestView(now, stream=True), estimate, route, self.number)
        first_at = now + 0.02 + 0.01 * self.random.random()
        reported = AttemptReport(prompt.tokens, SYSTEM * BLOCK, OUTPUT, 0.02)
        marks = [perf_counter()]
        snapshot = fleet.snapshot(now)
        marks.append(perf_counter())
        decision = decide(queued, snapshot, fleet.view, now)
        marks.append(perf_counter())
        limits = AttemptLimits(max_attempts=route.max_attempts, hedge=True, first_token_limit=60.0)
        wire = Opened()
        machine = AttemptMachine(decision, limits, self.retries, self.hedges, wire, now=now)
        machine.begin(now)
        marks.append(perf_counter())
        fleet.on_sent(key, wire.attempt.candidate, prompt, now, True, 0.05, OUTPUT)
        marks.append(perf_counter())
        fleet.on_first_token(key, first_at)
        marks.append(perf_counter())
        machine.first_token(1, first_at)
        marks.append(perf_counter())
        fleet.on_ended(key, AttemptOutcome.COMPLETED, first_at + 1.0, reported)
        marks.append(perf_counter())
        return [after - before for before, after in pairwise(marks)]

    def quietest(self) -> Sequence[float]:
        """s of each stage, and of all."""
        gc.collect()
        gc.freeze()
        windows = []
        for _ in range(WINDOWS):
            took = [(*stages, sum(stages)) for stages in (self.serve() for _ in range(WINDOW))]
            windows.append([median(stage) for stage in zip(*took, strict=True)])
        return [min(stage) for stage in zip(*windows, strict=True)]


def bytes_per_block() -> float:
    gc.collect()
    tracemalloc.start()
    fleet, _, seen = busy_fleet(8, Random(1))
    gc.collect()
    used = tracemalloc.get_traced_memory()[0]
    kept = sum(8 * len(prompt.blocks.hashes) + 200 for prompt in seen)  # the prompts themselves
    tracemalloc.stop()
    held = sum(fleet.view.statistics(f"main/{i}", 1_000.0).prefix_blocks for i in range(8))
    return (used - kept) / max(held, 1)


def lines() -> Iterator[str]:
    for endpoints in (8, 64):
        for with_queue in (False, True):
            took = decision_times(endpoints, with_queue)
            p50, p99 = took[len(took) // 2] * 1e6, took[int(len(took) * 0.99)] * 1e6
            what = "through the queue" if with_queue else "decide"
            yield f"{endpoints:3d} endpoints  {what:26s} p50 {p50:6.1f} us   p99 {p99:6.1f} us"
    *stages, total = SmallRequests().quietest()
    told = "  ".join(f"{stage} {s * 1e6:.1f}" for stage, s in zip(STAGES, stages, strict=True))
    yield f"one small request, 2 endpoints: {total * 1e6:.1f} us  ({told})"
    yield f"prefix index: {bytes_per_block():.1f} bytes per block"


if __name__ == "__main__":
    for line in lines():
        print(line, flush=True)
    sys.exit(0)
