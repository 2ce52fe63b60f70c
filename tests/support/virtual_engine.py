"""A vLLM-like engine in virtual time, with a fleet of one endpoint, for tests of learned state.

Chunked prefill, first come, first served, with a prefix cache; a step takes `c0 + (t_w^1.3 + (n / R)^1.3)^(1/1.3) +
attention + KV reads` ms, for n tokens in the step, with lognormal noise. Constants are fitted to published kernel
measurements (Vidur's for the GPUs).
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from random import Random

from policies.fleet.fleet import AttemptReport, Fleet
from policies.types import AttemptOutcome, Candidate, Endpoint, Forecast, Pool, PoolEstimate, PrefixBlocks

BLOCK = 16  # tokens


@dataclass(frozen=True)
class Profile:
    """ms, tokens/ms, ns per attention pair, us per token of context."""

    weights: float
    rate: float
    attention: float
    kv: float
    budget: int  # tokens per step
    fixed: float = 1.0
    api: float = 15.0  # ms beside the steps
    kv_tokens: int = 400_000
    noise: float = 0.05


H100 = Profile(weights=5.74, rate=46.8, attention=1.18, kv=0.071, budget=8192)
A100 = Profile(weights=9.2, rate=15.2, attention=3.36, kv=0.107, budget=2048)
CPU = Profile(weights=3.0, rate=4.2, attention=75.0, kv=0.5, budget=2048)


@dataclass(eq=False)
class Request:
    at: float
    prompt: int
    hashes: Sequence[int]
    output: int
    hit: int = 0  # predicted
    forecast: Forecast = field(default_factory=lambda: Forecast(0.0))
    cached: int = 0
    done: int = 0  # prompt tokens in the KV cache
    made: int = 0  # output tokens
    ttft: float = 0.0


class Engine:
    def __init__(self, profile: Profile, random: Random) -> None:
        self.profile, self.random = profile, random
        self.slowdown = 1.0
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.cache: OrderedDict[int, None] = OrderedDict()

    def step(self) -> tuple[float, list[Request], list[Request]]:
        """Runs a step; returns seconds, and the requests with their first and with their last token."""
        decoding = [r for r in self.running if r.done == r.prompt]
        budget, pairs, first = self.profile.budget - len(decoding), 0.0, []
        for request in [r for r in self.running if r.done < r.prompt] + self.waiting:
            if not budget:
                break
            if not request.done and request in self.waiting:
                self._admit(request)
            chunk = min(budget, request.prompt - request.done)
            pairs += chunk * (request.done + chunk / 2)
            request.done += chunk
            budget -= chunk
            if request.done == request.prompt:
                first.append(request)
        last = []
        for request in decoding + first:
            request.made += 1
            if request.made == request.output:
                last.append(request)
                self.running.remove(request)
        context = sum(r.prompt + r.made for r in decoding)
        return self._seconds(self.profile.budget - budget, pairs, context), first, last

    def _admit(self, request: Request) -> None:
        self.waiting.remove(request)
        self.running.append(request)
        depth = 0
        while depth < len(request.hashes) and request.hashes[depth] in self.cache:
            depth += 1
        request.cached = request.done = min(depth * BLOCK, (request.prompt - 1) // BLOCK * BLOCK)
        for block in reversed(request.hashes):
            self.cache[block] = None
            self.cache.move_to_end(block)
        while len(self.cache) * BLOCK > self.profile.kv_tokens:
            self.cache.popitem(last=False)

    def _seconds(self, tokens: int, pairs: float, context: int) -> float:
        p = self.profile
        compute = (p.weights**1.3 + (tokens / p.rate) ** 1.3) ** (1 / 1.3)
        ms = p.fixed + compute + p.attention * pairs * 1e-6 + p.kv * context * 1e-3
        return ms * self.slowdown * self.random.lognormvariate(0, p.noise) / 1e3


def conversations(profile: Profile, requests: int, load: float, random: Random) -> list[Request]:
    """Poisson arrivals at about `load` of the engine's prefill rate; half continue an earlier prompt."""
    fresh, prompts, at, made = count(1), [], 0.0, []
    gap = (1500 / profile.rate + profile.attention * 1.1 + 10) / 1e3 / load
    for _ in range(requests):
        at += random.expovariate(1 / gap)
        if prompts and random.random() < 0.5:
            hashes = random.choice(prompts[-50:])[:900] + [next(fresh) for _ in range(random.randint(1, 30))]
        else:
            hashes = [next(fresh) for _ in range(min(int(random.lognormvariate(4, 1.1)) + 1, 900))]
        prompts.append(hashes)
        made.append(Request(at, len(hashes) * BLOCK + random.randrange(1, BLOCK), hashes, random.randint(20, 200)))
    return made


def fleet_of_one(profile: Profile) -> tuple[Fleet, Endpoint]:
    endpoint = Endpoint("p/1", "p")
    return Fleet([Pool("p", "m", (endpoint,), kv_tokens=profile.kv_tokens)]), endpoint


def serve(
    profile: Profile, requests: Sequence[Request], seed: int = 1, slowdown: float = 1.0, after: int = 0
) -> tuple[list[Request], Fleet]:
    """Requests in order of first tokens; after `after` first tokens the engine is slower by `slowdown`."""
    fleet, endpoint = fleet_of_one(profile)
    engine, answered, busy, order = Engine(profile, Random(seed)), [], False, count()
    events: list[tuple[float, int, str, Request]] = [(r.at, next(order), "arrive", r) for r in requests]
    heapq.heapify(events)

    def later(at: float, what: str, request: Request) -> None:
        heapq.heappush(events, (at, next(order), what, request))

    while events:
        now, _, what, request = heapq.heappop(events)
        if what == "arrive":
            _send(fleet, endpoint, request, now)
            later(now + 0.7 * profile.api / 1e3, "admit", request)
        elif what == "first":
            fleet.on_first_token(request, now)
            request.ttft = now - request.at
            answered.append(request)
        elif what == "last":
            itl = (now - request.at - request.ttft) / max(request.output - 1, 1)
            fleet.on_ended(
                request,
                AttemptOutcome.COMPLETED,
                now,
                AttemptReport(request.prompt, request.cached, request.output, itl),
            )
        elif what == "admit":
            engine.waiting.append(request)
        elif what == "stepped":
            busy = False
        if not busy and (engine.waiting or engine.running):
            engine.slowdown = slowdown if len(answered) >= after else 1.0
            seconds, first, last = engine.step()
            busy = True
            later(now + seconds, "stepped", request)
            for token, requests_of_token in (("first", first), ("last", last)):
                for r in requests_of_token:
                    later(now + seconds + 0.3 * profile.api / 1e3, token, r)
    return answered, fleet


def _send(fleet: Fleet, endpoint: Endpoint, request: Request, now: float) -> None:
    estimate = PoolEstimate(request.prompt, PrefixBlocks(request.hashes, BLOCK), request.prompt - 7, 1)
    load = fleet.snapshot(now).loads[endpoint.id]
    request.hit = fleet.view.hit(endpoint, estimate)
    request.forecast = fleet.view.forecast(endpoint, load, request.prompt, request.hit, now)
    candidate = Candidate(endpoint, 0, request.prompt, request.hit, request.forecast, 1.0, 0.0)
    fleet.on_sent(request, candidate, estimate, now, True)
