"""A vLLM-like continuous-batching scheduler. Pure: no clock, no sockets, no tasks; seeded noise.

Rules, as in vLLM's V1 scheduler (vllm/v1/core/sched/scheduler.py):
- A step first gives a token to every decoding request, then fills the rest of `max_num_batched_tokens` with prefill
  chunks, first come first served.
- A waiting request is admitted when the whole prompt fits into free blocks (`scheduler_reserve_full_isl`) and fewer
  than `max_num_seqs` run. Cached blocks of the prefix are hits, but never the whole prompt: the last token is always
  computed. Blocks in an earlier request's planned chunks are hits already, within the same step too.
- A waiting request whose LoRA adapter finds no place is left out, and those behind it go on.
- When decoding needs a block and none is free, the request admitted last is preempted: all blocks are taken, and the
  request goes to the head of the queue, to be recomputed with the generated tokens. (vLLM also admits nothing in such
  a step. Here too: the preempted request is first in the queue, and never fits at once.)
- The blocks of an answer enter the prefix cache at the end of the request.
- Blocks in the CPU's memory are loaded one request after the other, over one link, while other requests compute.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from math import exp, inf
from random import Random

from backends.server_profiles import EngineProfile
from lab.engines.engine_events import EngineFirstToken, EngineRequest, Finished, Refused, RequestId, StepResult
from lab.engines.kv_cache import PrefixCache
from lab.engines.lora_adapters import LoraAdapters


class RequestState(Enum):
    """In order; a preemption leads back to WAITING."""

    ARRIVING = 0  # in the API server
    WAITING = 1
    PREFILLING = 2
    DECODING = 3
    ENDING = 4  # last token planned; the blocks are freed when the next step is planned


@dataclass(eq=False, slots=True)
class LiveRequest:
    """A request inside the engine. During decoding, `computed` and `generated` are as of tick `joined`."""

    request: EngineRequest
    ready_at: float  # time of arrival in the scheduler
    target: int  # tokens to prefill: the prompt, after a preemption the tokens generated so far too
    chain: list[Hashable]  # block hashes of prompt and answer
    state: RequestState = RequestState.ARRIVING
    computed: int = 0  # tokens in the KV cache
    generated: int = 0
    joined: int = 0
    loaded_at: float = 0.0  # end of the load of cached blocks
    committed: int = 0  # leading blocks of `chain` in the prefix cache
    cached: int | None = None  # tokens hit at the first admission
    queue_time: float = 0.0
    preemptions: int = 0

    @property
    def last_tick(self) -> int:
        """The tick with the last token of a decoding request."""
        return self.joined + self.request.output_tokens - self.generated - 1


class DecodeBatch:
    """The decoding requests, in the order of joining, at O(1) per step for any number of requests.

    Between two events the batch is static: every request gets one token per step. So a step does not touch the
    requests: the batch counts steps (`tick`), and each request remembers the tick of joining.
    """

    def __init__(self, block_size: int) -> None:
        self.requests: dict[RequestId, LiveRequest] = {}
        self.tick = 0  # number of the next step
        self.context = 0  # tokens of all requests in the KV cache
        self.due: dict[int, list[LiveRequest]] = {}  # requests by the tick of the last token
        self.growing = [0] * block_size  # number of requests which need a block, by tick modulo block size

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def blocks_needed(self) -> int:
        """New blocks for the next step."""
        return self.growing[self.tick % len(self.growing)]

    def join(self, live: LiveRequest) -> None:
        """Decode a prefilled request, with its first token, from the next step on."""
        live.joined = self.tick
        self.requests[live.request.id] = live
        self.context += live.computed
        self.growing[(live.joined - live.computed) % len(self.growing)] += 1
        self.due.setdefault(live.last_tick, []).append(live)

    def leave(self, live: LiveRequest) -> None:
        """Undo `join`, and bring the request's counts up to this tick."""
        del self.requests[live.request.id]
        ending = self.due[live.last_tick]
        ending.remove(live)
        if not ending:
            del self.due[live.last_tick]
        self.growing[(live.joined - live.computed) % len(self.growing)] -= 1
        live.computed += self.tick - live.joined
        live.generated += self.tick - live.joined
        self.context -= live.computed

    def decode(self, steps: int) -> list[LiveRequest]:
        """Give every request `steps` tokens. Returns the requests with their last token, removed from the batch."""
        if not self.requests:
            return []
        self.context += steps * len(self.requests)
        self.tick += steps
        ended = list(self.due.get(self.tick - 1, ()))
        for live in ended:
            self.leave(live)
        return ended


class Engine:
    """`step` plans the next batch and returns the end and the events."""

    def __init__(self, profile: EngineProfile, seed: int = 0, adapters: LoraAdapters | None = None) -> None:
        self.profile = profile
        self.adapters = adapters or LoraAdapters()
        self.alive = True
        self.slowness = 1.0  # factor on the duration of a step
        self.cache = PrefixCache(profile.num_blocks, profile.host_tokens // profile.block_size)
        self._noise = Random(seed)
        self._reset()

    def _reset(self) -> None:
        self.prefix_queries = 0  # tokens, counted once per request, at its first admission
        self.prefix_hits = 0
        self.preemptions = 0
        self.rejections = 0  # by its queue limit
        self._live: dict[RequestId, LiveRequest] = {}
        self._arriving: deque[LiveRequest] = deque()
        self._waiting: deque[LiveRequest] = deque()
        self._prefilling: list[LiveRequest] = []
        self._decoding = DecodeBatch(self.profile.block_size)
        self._ending: list[LiveRequest] = []
        self._stuck = False  # nobody in the queue can be admitted before a block is freed, or another request arrives
        self._link_free_at = 0.0  # no block is loaded from then on

    @property
    def running(self) -> int:
        return len(self._prefilling) + len(self._decoding) + len(self._ending)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running_adapters(self) -> frozenset[str]:
        """LoRA adapters of the running requests."""
        waiting = RequestState.ARRIVING, RequestState.WAITING
        return frozenset(
            live.request.adapter for live in self._live.values() if live.request.adapter and live.state not in waiting
        )

    @property
    def unfinished(self) -> int:
        """Requests in the engine, including those still in the API server."""
        return len(self._live)

    @property
    def backlog(self) -> int:
        """Prompt tokens neither computed nor in the planned step (cached tokens are unknown yet)."""
        queued = sum(live.target for live in self._waiting) + sum(live.target for live in self._arriving)
        return queued + sum(live.target - live.computed for live in self._prefilling)

    @property
    def kv_usage(self) -> float:
        return self.cache.usage

    def progress(self) -> list[tuple[RequestId, int]]:
        """Tokens of every decoding request, the planned step included."""
        tick = self._decoding.tick
        return [(key, live.generated + tick - live.joined) for key, live in self._decoding.requests.items()]

    def wakes_at(self, now: float) -> float | None:
        """The next time, not before `now`, at which a step finds work; None: not before the next `submit`."""
        if self._decoding or self._ending or (self._waiting and not self._stuck):
            return now
        times = [live.loaded_at for live in self._prefilling] + [live.ready_at for live in islice(self._arriving, 1)]
        return max(now, min(times)) if times else None

    def submit(self, request: EngineRequest, now: float) -> None:
        """Accept a request; the scheduler sees it `profile.overhead` later. Raises Refused, or ValueError."""
        limit = self.profile.max_queued_requests
        if not self.alive:
            raise Refused(0, "the engine is dead")
        if limit is not None and len(self._live) >= limit:
            self.rejections += 1
            raise Refused(503, f"{limit} requests are unfinished already")
        if request.id in self._live:
            raise ValueError(f"request {request.id} is already here")
        if request.prompt_tokens + request.output_tokens > self.cache.capacity * self.profile.block_size:
            raise ValueError(f"request {request.id} is larger than the KV cache of {self.profile.kv_tokens} tokens")
        whole = request.prompt_tokens // self.profile.block_size
        chain = list(request.block_hashes[:whole])
        if len(chain) == whole:
            chain.extend(request.output_hashes)
        live = LiveRequest(request, now + self.profile.overhead, request.prompt_tokens, chain)
        self._live[request.id] = live
        self._arriving.append(live)

    def abort(self, request_id: RequestId) -> bool:
        """Drop a request, and free its blocks, at once. False after the end, or once the last token is planned."""
        live = self._live.get(request_id)
        if live is None or live.state is RequestState.ENDING:
            return False
        del self._live[request_id]
        if live.state is RequestState.ARRIVING:
            self._arriving.remove(live)
        elif live.state is RequestState.WAITING:
            self._waiting.remove(live)
            self._stuck = False
        else:
            self._evict(live)
        return True

    def kill(self) -> tuple[RequestId, ...]:
        """Stop, and lose all requests and the cache. Returns the requests lost."""
        lost = tuple(self._live)
        self.alive = False
        self.cache.clear()
        self.adapters.clear()
        self._reset()
        return lost

    def restart(self) -> None:
        self.alive = True

    def step(self, now: float, until: float | None = None) -> StepResult | None:
        """Plan one step which starts at `now`; None if there is nothing to do. `now` must not go back.

        With `until`, take all decode-only steps which start before `until` at once, up to the next event, with the
        same arithmetic and the same draws of noise: the outcome is equal, bit for bit.
        """
        for live in self._ending:
            del self._live[live.request.id]
            self._release(live)
        self._ending.clear()
        while self._arriving and self._arriving[0].ready_at <= now:
            live = self._arriving.popleft()
            live.state = RequestState.WAITING
            self._waiting.append(live)
            self._stuck = False
        static = len(self._decoding) > 0 and not self._prefilling and (self._stuck or not self._waiting)
        coasted = self._coast(now, until) if static and until is not None else None
        return coasted or self._plan(now)

    def _plan(self, now: float) -> StepResult | None:
        self._reserve_decode_blocks()
        decoding, context = tuple(self._decoding.requests), self._decoding.context
        chunks = self._schedule(self.profile.max_num_batched_tokens - len(decoding), now)
        if not decoding and not chunks:
            return None
        prefill = sum(size for _, size in chunks)
        pairs = sum(size * (live.computed - size / 2) for live, size in chunks)
        took = self.profile.duration_ms(len(decoding) + prefill, len(decoding) + len(chunks), pairs, context)
        ends_at = now + took * 1e-3 * self.slowness * exp(self._noise.gauss(0.0, self.profile.sigma))
        ends_at += self.adapters.take_delay()
        begun = [live for live, _ in chunks if live.computed == live.target]
        first = tuple(
            EngineFirstToken(live.request.id, ends_at, live.queue_time, live.cached or 0)
            for live in begun
            if live.generated == 0
        )
        ended = self._decoding.decode(1)
        ended += [live for live in begun if not self._decodes(live)]
        tokens = decoding + tuple(live.request.id for live in begun)
        return StepResult(ends_at, 1, prefill, tokens, first, self._finish(ended, ends_at))

    def _coast(self, now: float, until: float) -> StepResult | None:
        """Decode-only steps of a static batch, until a request ends or arrives, or blocks run short."""
        batch, cache, gauss = self._decoding, self.cache, self._noise.gauss
        tick, context, seqs = batch.tick, batch.context, len(batch)
        sigma, slowness = self.profile.sigma, self.slowness
        fixed, per_token = self.profile.fixed_ms(seqs, seqs), self.profile.context_us * 1e-3
        stop = min(until, self._arriving[0].ready_at if self._arriving else inf)
        at = now
        while True:
            need = batch.growing[tick % len(batch.growing)]
            if need:
                if need > cache.free:
                    break
                cache.allocate(need)
            at += (fixed + per_token * context) * 1e-3 * slowness * exp(gauss(0.0, sigma))
            context += seqs
            tick += 1
            if at >= stop or tick - 1 in batch.due:
                break
        steps = tick - batch.tick
        if steps == 0:
            return None
        return StepResult(at, steps, finished=self._finish(batch.decode(steps), at))

    def _finish(self, ended: Iterable[LiveRequest], at: float) -> tuple[Finished, ...]:
        for live in ended:
            live.state = RequestState.ENDING
            self._ending.append(live)
        return tuple(Finished(live.request.id, at, live.request.output_tokens, live.preemptions) for live in ended)

    def _schedule(self, budget: int, now: float) -> list[tuple[LiveRequest, int]]:
        """The prefill chunks of this step, (request, tokens); `computed` includes them on return."""
        chunks: list[tuple[LiveRequest, int]] = []
        for live in self._prefilling:
            if budget > 0 and live.loaded_at <= now:
                chunks.append(self._compute(live, budget))
                budget -= chunks[-1][1]
        running = self.running_adapters if self.adapters.names else frozenset()
        skipped: list[LiveRequest] = []
        while budget > 0 and self._waiting:
            live = self._waiting[0]
            if (adapter := live.request.adapter) and not self.adapters.admits(adapter, running):
                skipped.append(self._waiting.popleft())
            elif self._admit(live, running, now):
                self._waiting.popleft()
                running |= {adapter} if adapter else set()
                if live.loaded_at <= now:
                    chunks.append(self._compute(live, budget))
                    budget -= chunks[-1][1]
            else:
                break
        self._waiting.extendleft(reversed(skipped))
        self._stuck = budget > 0 and bool(self._waiting)
        return chunks

    def _admit(self, live: LiveRequest, running: frozenset[str], now: float) -> bool:
        """`running`: adapters of the running requests."""
        size = self.profile.block_size
        if self.running >= self.profile.max_num_seqs:
            return False
        hit = self.cache.match(live.chain, (live.target - 1) // size)
        if not self.cache.acquire(live.chain, hit, -(-live.target // size)):
            return False
        if live.request.adapter:
            self.adapters.use(live.request.adapter, running)
        if loaded := self.cache.loadable(live.chain, hit, (live.target - 1) // size):
            live.loaded_at = max(self._link_free_at, now) + loaded * size * self.profile.load_us * 1e-6
            self._link_free_at = live.loaded_at
        live.committed = hit
        live.computed = (hit + loaded) * size
        if live.cached is None:
            live.cached = live.computed
            live.queue_time = now - live.ready_at
            self.prefix_queries += live.target
            self.prefix_hits += live.computed
        live.state = RequestState.PREFILLING
        self._prefilling.append(live)
        return True

    def _compute(self, live: LiveRequest, budget: int) -> tuple[LiveRequest, int]:
        size = min(budget, live.target - live.computed)
        live.computed += size
        self._commit(live)
        return live, size

    def _decodes(self, live: LiveRequest) -> bool:
        """Give a prefilled request its next token; False if this was the last."""
        self._prefilling.remove(live)
        live.generated += 1
        if live.generated == live.request.output_tokens:
            return False
        live.state = RequestState.DECODING
        self._decoding.join(live)
        return True

    def _reserve_decode_blocks(self) -> None:
        """Allocate blocks for the decodes of this step, from the newest requests if none are free."""
        while self._decoding.blocks_needed > self.cache.free:
            self._preempt(next(reversed(self._prefilling or self._decoding.requests.values())))
        self.cache.allocate(self._decoding.blocks_needed)

    def _preempt(self, live: LiveRequest) -> None:
        self._evict(live)
        live.state = RequestState.WAITING
        live.target = live.request.prompt_tokens + live.generated
        live.preemptions += 1
        self.preemptions += 1
        self._waiting.appendleft(live)

    def _evict(self, live: LiveRequest) -> None:
        """Remove a running request from the batch, and free the request's blocks."""
        if live.state is RequestState.DECODING:
            self._decoding.leave(live)
        else:
            self._prefilling.remove(live)
        self._release(live)

    def _commit(self, live: LiveRequest) -> None:
        """Put full blocks into the prefix cache."""
        full = min(live.computed // self.profile.block_size, len(live.chain))
        if full > live.committed:
            parent = live.chain[live.committed - 1] if live.committed else None
            self.cache.commit(live.chain[live.committed : full], parent, live.request.id)
            live.committed = full

    def _release(self, live: LiveRequest) -> None:
        held = live.target if live.state is RequestState.PREFILLING else live.computed
        self._commit(live)
        self.cache.release(live.chain[: live.committed], -(-held // self.profile.block_size) - live.committed)
        live.committed = 0
        self._stuck = False
