"""One engine as the clairvoyant scheduler knows it: exact service times, and the exact slack of every answer.

Only the noise of the next steps is unknown.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from lab.engines.engine_events import RequestId
from lab.engines.kv_cache import PrefixCache
from lab.engines.virtual_engine import VirtualEngine
from lab.traffic.traces import Arrival
from policies.types import FOREVER, Endpoint


class SharedCache(PrefixCache):
    """An engine's cache that holds every block that any engine of the pool ever computed."""

    def __init__(self, capacity: int, known: set[Hashable]) -> None:
        super().__init__(capacity)
        self._known = known

    def match(self, chain: Sequence[Hashable], limit: int) -> int:
        for block in chain[:limit]:
            if block in self._idle:
                self._idle.move_to_end(block)
            elif block in self._known and block not in self._used and self.free:
                self.allocate(1)
                self._idle[block] = None
        return super().match(chain, limit)

    def commit(self, blocks: Sequence[Hashable], parent: Hashable | None = None, request: Hashable = "") -> None:
        super().commit(blocks, parent, request)
        self._known.update(blocks)


@dataclass(slots=True, eq=False)
class ExactAnswer:
    """An answer in progress. `left` and `context` are as of the last `ExactEngine.refresh`, as the two below.

    `finish`: the end if no prefill intervenes; `slack`: s from there until `due`.
    """

    tokens: int
    prompt: int
    due: float
    left: int = 0  # output tokens
    context: int = 0  # tokens in the KV cache
    slack: float = 0.0
    finish: float = 0.0


class ExactEngine:
    """Call `refresh` before asking anything, and set `stale` when `answers` have changed.

    `known`: blocks computed by any engine of the pool, all cached by every engine; None: the engine's own cache.
    """

    def __init__(self, endpoint: Endpoint, virtual: VirtualEngine, known: set[Hashable] | None) -> None:
        self.endpoint = endpoint
        self.virtual = virtual
        self.engine = virtual.engine
        self.profile = self.engine.profile
        if known is not None:
            self.engine.cache = SharedCache(self.engine.cache.capacity, known)
        self.cache = self.engine.cache
        self.answers: dict[RequestId, ExactAnswer] = {}
        self.stale = True
        self.clear_at = 0.0  # all prompts sent are computed by then
        self.context = 0  # tokens that the answers attend to
        self._running_adapters = frozenset[str]()
        self._decoding: list[ExactAnswer] = []  # fewest tokens left first
        self._slacks: list[float] = []  # of the answers within their TPOT, ascending
        self._finished_by: list[float] = []  # latest finish of the answers up to the same index of `_slacks`

    def refresh(self) -> None:
        """Computes each answer's end without further prefills, and the stall tolerated until then."""
        if self.engine.adapters.names:
            self._running_adapters = self.engine.running_adapters
        if not self.stale:
            return
        self.stale = False
        generated = dict(self.engine.progress())
        for key, answer in self.answers.items():
            answer.left = answer.tokens - generated.get(key, answer.tokens)
            answer.context = answer.prompt + generated.get(key, 0)
        self._decoding = sorted(self.answers.values(), key=lambda answer: answer.left)
        self.context = sum(answer.context for answer in self._decoding)
        for answer, finish in self._finishes(self._decoding, self.virtual.busy_until, 0):
            answer.finish = finish
            answer.slack = answer.due - finish
        kept = sorted((answer.slack, answer.finish) for answer in self._decoding if answer.slack >= 0)
        self._slacks = [slack for slack, _ in kept]
        self._finished_by = list(accumulate((finish for _, finish in kept), max))

    def cached(self, arrival: Arrival) -> int:
        """Blocks of a prompt in the cache, at least one token excluded.

        A cached block has all blocks before it cached: requests free their blocks tail first.
        """
        blocks = arrival.hashes[: (arrival.prompt_tokens - 1) // self.profile.block_size]
        return bisect_left(blocks, True, key=lambda block: block not in self.cache)

    # ---------------------------------------------------------------- LoRA adapters

    def has_place(self, adapter: str) -> bool:
        """A request for the adapter would not wait for answers of other adapters."""
        return not adapter or self.engine.adapters.admits(adapter, self._running_adapters)

    def loading(self, adapter: str) -> float:
        """Seconds to load the adapter before the prefill."""
        adapters = self.engine.adapters
        return adapters.load if adapter and not adapters.holds(adapter) else 0.0

    # ---------------------------------------------------------------- moments

    def accepts_prompt(self, now: float) -> bool:
        """No prefill remains after the step in progress, and a request sent now joins the next step."""
        ready = self.virtual.busy_until <= now + self.profile.overhead
        return ready and self.engine.alive and not self.engine.backlog

    def free_at(self, now: float) -> float:
        """Earliest start of the prefill of a request sent now."""
        busy = self.virtual.busy_until
        return max(self.clear_at, busy) if self.engine.backlog else max(busy, now + self.profile.overhead)

    def tolerates_from(self, stall: float) -> float:
        """Time from which a stall of `stall` seconds makes no answer miss a kept TPOT."""
        i = bisect_left(self._slacks, stall)
        return self._finished_by[i - 1] if i else 0.0

    # ---------------------------------------------------------------- durations

    def prefill(self, tokens: int, hit: int) -> tuple[float, int]:
        """Seconds and steps to compute the uncached part of a prompt beside the current decodes."""
        profile, rest, decoding = self.profile, tokens - hit, len(self.answers)
        whole, last = divmod(rest, profile.max_num_batched_tokens - decoding)
        ms = whole * profile.fixed_ms(profile.max_num_batched_tokens, decoding + 1)
        ms += profile.fixed_ms(last + decoding, decoding + 1) if last else 0.0
        steps = whole + (last > 0)
        ms += profile.attention_ns * 1e-6 * rest * (hit + rest / 2) + steps * profile.context_us * 1e-3 * self.context
        return ms * 1e-3 * self.engine.slowness, steps

    def cost(self, arrival: Arrival, hit: int) -> float:
        """Seconds of engine time that a request takes from all others: prefill, and own context in every step."""
        profile, rest = self.profile, arrival.prompt_tokens - hit
        linear = rest / profile.tokens_per_ms + profile.allreduce_ms * rest
        compute = (linear + profile.attention_ns * 1e-6 * rest * (hit + rest / 2)) * 1e-3
        context = arrival.prompt_tokens + arrival.output_tokens / 2
        return compute + arrival.output_tokens * ((profile.sequence_ms + profile.context_us * 1e-3 * context) * 1e-3)

    def spare(self, tpot: float) -> float:
        """Share of the time left for `cost` while answers keep `tpot`, at normal speed."""
        if not self.engine.alive:
            return 0.0
        return max(1 / self.engine.slowness - self.profile.fixed_ms(0, 0) * 1e-3 / tpot, 0.0)

    def decode_step(self, sequences: int, context: float) -> float:
        """Seconds of a step without prefill."""
        fixed = self.profile.fixed_ms(sequences, sequences)
        return (fixed + self.profile.context_us * 1e-3 * context) * 1e-3 * self.engine.slowness

    def decode_seconds(self, arrival: Arrival) -> float:
        """Seconds from the first token to the last, beside the current decodes."""
        context = self.context + arrival.prompt_tokens + arrival.output_tokens / 2
        return (arrival.output_tokens - 1) * self.decode_step(len(self.answers) + 1, context)

    def first_token(
        self,
        arrival: Arrival,
        hit: int,
        tpot: float,
        now: float,
        loading: float = 0.0,
        whole_by: float = FOREVER,
    ) -> float | None:
        """Time of the first token if the request were sent now. `loading`: s to load its LoRA adapter. `whole_by`:
        deadline of its last token.

        None if the request would wait inside the engine or preempt another, or would make any answer, the own
        included, miss a TPOT or a deadline.
        """
        size = self.profile.block_size
        blocks = (arrival.prompt_tokens + arrival.output_tokens) // size + 1
        if blocks - self.cache.in_use(arrival.hashes[: hit // size]) > self.cache.free:
            return None
        seconds, steps = self.prefill(arrival.prompt_tokens, hit)
        first, left = self.free_at(now) + seconds + loading, arrival.output_tokens - 1
        due = whole_by if tpot == FOREVER else min(first + tpot * left, whole_by)
        own = ExactAnswer(
            arrival.output_tokens, arrival.prompt_tokens, due, left + steps, arrival.prompt_tokens - steps
        )
        joined = list(self._decoding)
        insort(joined, own, key=lambda answer: answer.left)
        if any(finish > answer.due and answer.slack >= 0 for answer, finish in self._finishes(joined, first, steps)):
            return None
        return first

    def _finishes(self, decoding: Sequence[ExactAnswer], at: float, steps: int) -> Iterator[tuple[ExactAnswer, float]]:
        """Each answer's end, if all have `steps` more tokens at `at` and no prefill follows."""
        count = len(decoding)
        context = float(sum(answer.context for answer in decoding) + steps * count)
        done = steps
        for answer in decoding:
            if (more := answer.left - done) > 0:
                at += more * self.decode_step(count, context + count * more / 2)
                context += count * more
                done = answer.left
            yield answer, at
            context -= answer.context + answer.left
            count -= 1
