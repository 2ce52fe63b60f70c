"""Warms up engines after a loss of cache, and keeps idle engines warm, by synthetic requests.

Rules:
- `policies.prefix_cache.warm_up` decides when, how much and with which prompts.
- A task looks at the fleet every TICK and has a child task for each endpoint in work. Failures are harmless: an
  endpoint without a warm-up takes a share of the traffic cold.
- Saved prompts are the bytes of requests, in memory only, never shown or logged, parsed again only if needed.
- A prefix ends with the first message that fills the wanted blocks, and includes the other fields rendered into the
  prompt. Chat templates want a user's or a tool's message last: a message is added if need be.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from time import monotonic
from typing import Any

from backends.interface import BackendRequest, Operation
from gateway.core.hooks import NO_HOOKS, Ask, Hooks, RoutePlan
from gateway.core.part import Part
from gateway.strict_json import decode
from gateway.synthetic_request import PING, send_synthetic, synthetic
from gateway.tokenize.estimator import Estimator
from gateway.tokenize.prefix_breakers import without_breakers
from gateway.tokenize.prompt import prompt_of
from gateway.tokenize.prompt_reader import PromptText
from gateway.upstream.attempt import WireAttempt
from gateway.upstream.race import Race
from gateway.upstream.routed_request import EVERYWHERE, Upstream
from gateway.wiring import Core
from policies.prefix_cache.warm_up import (
    CONCURRENCY,
    MIN_INTERVAL,
    HotPrefix,
    HotPrefixes,
    WarmUp,
    is_idle,
    warm_up_tokens,
)
from policies.types import (
    NEVER,
    UNUSABLE,
    AttemptOutcome,
    Endpoint,
    Health,
    Load,
    Pool,
    PoolEstimate,
)

log = logging.getLogger("firsttoken")

TICK = 0.05  # s
KEPT = 16_000_000  # bytes of prompts, of all pools together
SIBLINGS = 8  # siblings with compared caches
WARMED_UP = "endpoint %s was warmed up: %d prefixes of %d, %d tokens, %.0f ms"
RENDERED = ("tools", "functions", "documents", "chat_template", "chat_template_kwargs", "reasoning_effort")
ANSWERABLE = ("user", "tool")
LAST_WORD = {"role": "user", "content": "hi"}
HASH_BYTES = 8  # a block's


@dataclass(slots=True, eq=False)
class SavedPrompt:
    """An answered request."""

    operation: Operation
    raw: bytes
    model: str  # name at the endpoint
    pool: str
    cache_group: str
    estimate: PoolEstimate
    caller: str  # of the answered request: evidence of a warm-up counts for this caller
    route: str  # of the answered request: the prompt goes to no region that the route may not use

    @property
    def size(self) -> int:
        """Bytes of memory."""
        return len(self.raw) + HASH_BYTES * len(self.estimate.blocks.hashes)

    def prefix(self, blocks: int, estimator: Estimator) -> tuple[Mapping[str, Any], PoolEstimate]:
        """Body of a request with a prompt that begins with these blocks, and the estimate."""
        body = decode(without_breakers(self.operation, self.raw))
        if self.operation is Operation.COMPLETION:
            body = {"prompt": _first_part(body["prompt"], blocks / len(self.estimate.blocks.hashes))}
        else:
            body = _answerable(self._first_messages(body, blocks, estimator))
        return body, self._estimate(body, estimator)

    def _first_messages(self, body: Mapping[str, Any], blocks: int, estimator: Estimator) -> dict[str, Any]:
        rendered = {name: body[name] for name in RENDERED if name in body}
        messages = body["messages"]
        low, high = 1, len(messages)
        while low < high:
            middle = (low + high) // 2
            found = self._estimate({**rendered, "messages": messages[:middle]}, estimator)
            if len(found.blocks.hashes) < blocks:
                low = middle + 1
            else:
                high = middle
        return {**rendered, "messages": messages[:low]}

    def _estimate(self, body: Mapping[str, Any], estimator: Estimator) -> PoolEstimate:
        variants = {self.pool: self.estimate.variant} if self.estimate.variant else {}
        prompt = prompt_of(self.operation, body)
        text = PromptText(prompt, [self.pool], self.cache_group, self.caller, variants)
        return estimator.estimate(text).pools[self.pool]


def _answerable(body: dict[str, Any]) -> dict[str, Any]:
    if body["messages"][-1]["role"] in ANSWERABLE:
        return body
    return {**body, "messages": [*body["messages"], LAST_WORD]}


def _first_part(prompt: Any, share: float) -> Any:
    """First part of a text or of token ids; several prompts stay unchanged."""
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        return prompt[: ceil(len(prompt) * share)]
    return prompt


Prefixes = Sequence[HotPrefix[SavedPrompt]]
MAPPED = 8  # prefixes of a pool in the map
ANY_ROOM = 1 << 40  # blocks


class CacheWarming(Part):
    """Runs in a single process of the workers between `start` and `close`; keeps no prompts unless started."""

    def __init__(self, core: Core) -> None:
        self.fleet = core.fleet
        self.estimator = core.estimator
        self.runtime = core.runtime
        self._is_leader = core.is_leader
        core.admin.map_prefixes = self.prefix_map
        self.hot: dict[str, HotPrefixes[SavedPrompt]] = {}
        self._busy: dict[str, asyncio.Task[None]] = {}
        self._warmed_at: dict[str, float] = {}
        self._keeps_warm = False  # a pool has `keep_warm`
        self._began = 0.0  # 0: not started, or another worker looks after all
        self._task: asyncio.Task[None] | None = None

    def reload(self) -> None:
        """Apply a new Runtime: cancel work for removed endpoints, and look after all once anything can be warmed."""
        if not self._began:
            return
        for endpoint, task in self._busy.items():
            if endpoint not in self.runtime.current.upstreams:
                task.cancel()
        self._keeps_warm = bool(self.runtime.current.config.keep_warm())
        shared = [pool.name for pool in self.runtime.current.pools.values() if pool.local and len(pool.endpoints) > 1]
        if shared != [*self.hot]:  # the shares of memory change
            self.hot = {name: HotPrefixes[SavedPrompt](KEPT // len(shared)) for name in shared}
        if self._task is None and (self.hot or self._keeps_warm):
            self._task = asyncio.get_running_loop().create_task(self._look_forever())

    async def start(self) -> None:
        if not self._is_leader:
            return
        self._began = monotonic()
        self.reload()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def on(self, plan: RoutePlan) -> Hooks:
        wanted = plan.operation in EVERYWHERE and not self.hot.keys().isdisjoint(plan.route.pools)
        return Hooks(ended=self.answered) if wanted else NO_HOOKS

    def answered(self, ask: Ask, race: Race) -> None:
        """Save a prompt computed by an endpoint; siblings may need the prefix."""
        if (run := race.winner) is None:
            return
        job, raw = race.routed, ask.http.body
        pool = run.attempt.candidate.endpoint.pool
        hot, upstream = self.hot.get(pool), self.runtime.current.upstreams.get(run.attempt.candidate.endpoint.id)
        if hot is None or upstream is None or run.times.first_in is None:
            return
        model = job.model_at(run.attempt.candidate.endpoint, upstream)
        request, known = job.request, job.estimate.pools[pool]
        prompt = SavedPrompt(
            request.operation, raw, model, pool, job.cache_group, known, request.caller, job.route.name
        )
        hot.record(prompt.estimate.blocks.hashes, prompt, prompt.size, run.times.first_in)

    def prefix_map(self, now: float) -> list[dict[str, Any]]:
        """The hottest prefixes of each pool, hottest first, and the tokens of each that its endpoints hold. A prefix is
        named by a hash: no text."""
        pools, found = self.runtime.current.pools, list[dict[str, Any]]()
        for name, hot in self.hot.items():
            for prefix in hot.hottest(ANY_ROOM, now, lambda text, blocks: 0)[:MAPPED]:
                estimate = prefix.text.estimate
                tokens = round(prefix.blocks * estimate.blocks.size * estimate.blocks.scale)
                hits = {each.id: min(self.fleet.view.hit(each, estimate), tokens) for each in pools[name].endpoints}
                held = {endpoint: hit for endpoint, hit in hits.items() if hit}
                key = f"{estimate.blocks.hashes[prefix.blocks - 1] & (1 << 64) - 1:016x}"
                found.append({"pool": name, "prefix": key, "tokens": tokens, "held": held})
        return found

    # ----------------------------------------------------------------- looking after all

    async def _look_forever(self) -> None:
        async with asyncio.TaskGroup() as children:
            while True:
                await asyncio.sleep(TICK)
                if not self._keeps_warm and not self.fleet.cache_lost:
                    continue
                now = monotonic()
                loads = self.fleet.snapshot(now).loads
                for pool in self.runtime.current.pools.values():
                    for endpoint in pool.endpoints:
                        if endpoint.id not in self._busy:
                            self._look(pool, endpoint, loads, now, children)

    def _look(
        self, pool: Pool, endpoint: Endpoint, loads: Mapping[str, Load], now: float, children: asyncio.TaskGroup
    ) -> None:
        load = loads[endpoint.id]
        keep_warm = self.runtime.current.config.pools[pool.name].keep_warm
        if endpoint.id in self.fleet.cache_lost and load.health not in UNUSABLE:
            self.fleet.cache_lost.discard(endpoint.id)
            self.fleet.set_warming(endpoint.id, True)  # before any request is placed there
            self._do(endpoint, self._warm_up(pool, endpoint, loads, now), children)
        elif keep_warm is not None and is_idle(
            endpoint.id, load, max(self.fleet.view.last_used_at(endpoint.id), self._began), keep_warm.idle, now
        ):
            self._do(endpoint, self._ping(endpoint), children)

    def _do(self, endpoint: Endpoint, work: Coroutine[None, None, None], children: asyncio.TaskGroup) -> None:
        self._busy[endpoint.id] = task = children.create_task(self._safely(endpoint, work))
        task.add_done_callback(lambda _: self._done(endpoint, work))

    async def _safely(self, endpoint: Endpoint, work: Coroutine[None, None, None]) -> None:
        try:
            await work
        except Exception:
            log.exception("cache warming of endpoint %s failed", endpoint.id)

    def _done(self, endpoint: Endpoint, work: Coroutine[None, None, None]) -> None:
        """Clean up, also after a cancellation before the start."""
        work.close()
        self.fleet.set_warming(endpoint.id, False)
        del self._busy[endpoint.id]

    # ----------------------------------------------------------------- keeping warm

    async def _ping(self, endpoint: Endpoint) -> None:
        upstream = self.runtime.current.upstreams[endpoint.id]
        found = self.estimator.estimate(PromptText(prompt_of(Operation.CHAT, PING), [endpoint.pool]))
        request = synthetic(upstream, Operation.CHAT, PING, upstream.model)
        await self._run(endpoint, upstream, request, found.pools[endpoint.pool])

    # ----------------------------------------------------------------- warming up

    def _needed(self, pool: Pool, endpoint: Endpoint, loads: Mapping[str, Load], now: float) -> Prefixes:
        """Prefixes for a warm-up: none if no sibling can take the traffic meanwhile, or soon after the last warm-up."""
        hot, siblings = self.hot.get(pool.name), [e for e in pool.endpoints if _serves(loads[e.id]) and e != endpoint]
        if hot is None or not siblings or now - self._warmed_at.get(endpoint.id, NEVER) < MIN_INTERVAL:
            return ()
        known = self.fleet.view.statistics(endpoint.id, now)
        tokens = warm_up_tokens(int(known.prefix_capacity * known.block_tokens), known.prefill_rate)
        found = hot.hottest(int(tokens / known.block_tokens), now, self._copies(siblings[:SIBLINGS]))
        able = {route.name for route in self.runtime.current.routes.all if route.allows(endpoint)}
        return [prefix for prefix in found if prefix.text.route in able]

    def _copies(self, siblings: Sequence[Endpoint]) -> Callable[[SavedPrompt, int], int]:
        """Return a function that counts the siblings with the first blocks of a prompt."""
        held: dict[int, list[float]] = {}

        def copies(prompt: SavedPrompt, blocks: int) -> int:
            if (depths := held.get(id(prompt))) is None:
                step = prompt.estimate.blocks.size * prompt.estimate.blocks.scale
                depths = [self.fleet.view.hit(sibling, prompt.estimate) / step + 1 for sibling in siblings]
                held[id(prompt)] = depths
            return sum(depth >= blocks for depth in depths)

        return copies

    async def _warm_up(self, pool: Pool, endpoint: Endpoint, loads: Mapping[str, Load], began: float) -> None:
        prefixes = self._needed(pool, endpoint, loads, began)
        if not prefixes:
            return
        plan = WarmUp(prefixes, loads[endpoint.id].in_flight, began)
        async with asyncio.TaskGroup() as senders:
            for _ in range(CONCURRENCY):
                senders.create_task(self._send(endpoint, plan))
        if plan.prefixes:
            self._warmed_at[endpoint.id] = began
        took = (monotonic() - began) * 1e3
        log.info(WARMED_UP, endpoint.id, plan.prefixes, len(prefixes), plan.tokens, took)

    async def _send(self, endpoint: Endpoint, plan: WarmUp[HotPrefix[SavedPrompt]]) -> None:
        """Send one request after the other until the plan is done."""
        upstream, executor = self.runtime.current.upstreams[endpoint.id], self.estimator.executor
        while True:
            now = monotonic()
            load = self.fleet.snapshot(now).loads[endpoint.id]
            prefix = None if load.health in UNUSABLE else plan.next(load.in_flight, now)
            if prefix is None:
                return
            prompt, loop = prefix.text, asyncio.get_running_loop()
            body, estimate = await loop.run_in_executor(executor, prompt.prefix, prefix.blocks, self.estimator)
            request = synthetic(upstream, prompt.operation, body, prompt.model, prompt.cache_group)
            run = await self._run(endpoint, upstream, request, estimate, prompt.caller)
            plan.on_ended(run.outcome is AttemptOutcome.COMPLETED, run.attempt.candidate.uncached)

    async def _run(
        self, endpoint: Endpoint, upstream: Upstream, request: BackendRequest, estimate: PoolEstimate, caller: str = ""
    ) -> WireAttempt:
        timeout = self.runtime.current.config.defaults.first_token
        return await send_synthetic(self.fleet, endpoint, upstream, request, estimate, timeout, caller)


def _serves(load: Load) -> bool:
    return load.health is Health.UP and not load.warming
