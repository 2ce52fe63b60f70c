"""An engine with exact service times, unknown only in the noise of its next steps (for gateway.replay.clairvoyant)."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from backends.simulated.kv_cache import PrefixCache
from backends.simulated.profiles import RequestId
from backends.simulated.virtual_engine import VirtualEngine
from gateway.replay.traces import Arrival
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

    def commit(self, blocks: Sequence[Hashable]) -> None:
        super().commit(blocks)
        self._known.update(blocks)

    def in_use(self, chain: Sequence[Hashable]) -> int:
        """Number of these blocks held by running requests, which need no further room."""
        return sum(block in self._used for block in chain)


@dataclass(slots=True, eq=False)
class ExactAnswer:
    """An answer in progress. `finish`: its end if no prefill intervenes; `slack`: s from there until `due`."""

    tokens: int
    context: int
    due: float
    slack: float = 0.0
    finish: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class DecodeState:
    """The decoding of an answer: output tokens left, and tokens in the KV cache."""

    left: int
    context: int
    answer: ExactAnswer


class ExactEngine:
    """Call `refresh` before asking anything, and `invalidate` when `answers` have changed."""

    def __init__(self, endpoint: Endpoint, virtual: VirtualEngine, known: set[Hashable]) -> None:
        self.endpoint = endpoint
        self.virtual = virtual
        self.engine = virtual.engine
        self.profile = self.engine.profile
        self.cache = SharedCache(self.engine.cache.capacity, known)
        self.engine.cache = self.cache
        self.answers: dict[RequestId, ExactAnswer] = {}
        self.clear_at = 0.0  # all prompts sent are computed by then
        self.context = 0  # tokens that its answers attend to
        self._decoding: list[DecodeState] = []  # fewest tokens left first
        self._slacks: list[float] = []  # of the answers that keep their TPOT, ascending
        self._finished_by: list[float] = []  # latest finish of the answers up to the same index of `_slacks`
        self._stale = True

    def invalidate(self) -> None:
        self._stale = True

    def refresh(self) -> None:
        """Computes each answer's end without further prefills, and the stall that the answers tolerate until then."""
        if not self._stale:
            return
        self._stale = False
        generated = dict(self.engine.progress())
        self._decoding = [
            DecodeState(
                answer.tokens - generated.get(key, answer.tokens), answer.context + generated.get(key, 0), answer
            )
            for key, answer in self.answers.items()
        ]
        self._decoding.sort(key=lambda state: state.left)
        self.context = sum(state.context for state in self._decoding)
        for answer, finish in self._finishes(self._decoding, self.virtual.busy_until, 0):
            answer.finish = finish
            answer.slack = answer.due - finish
        kept = sorted((state.answer.slack, state.answer.finish) for state in self._decoding if state.answer.slack >= 0)
        self._slacks = [slack for slack, _ in kept]
        self._finished_by = list(accumulate((finish for _, finish in kept), max))

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
        """From then on, no answer that keeps its TPOT would lose it to a stall of `stall` seconds."""
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

    def compute(self, tokens: int, hit: int) -> float:
        """Seconds that the uncached part of a prompt adds to the steps that compute it."""
        profile, rest = self.profile, tokens - hit
        linear = rest / profile.tokens_per_ms + profile.allreduce_ms * rest
        return (linear + profile.attention_ns * 1e-6 * rest * (hit + rest / 2)) * 1e-3

    def attention(self, context: float) -> float:
        """Seconds that one answer with `context` tokens adds to a step."""
        return (self.profile.sequence_ms + self.profile.context_us * 1e-3 * context) * 1e-3

    def spare(self, tpot: float) -> float:
        """Share of the time left for `compute` and `attention` while answers keep `tpot`, at normal speed."""
        if not self.engine.alive:
            return 0.0
        return max(1 / self.engine.slowness - self.profile.fixed_ms(0, 0) * 1e-3 / tpot, 0.0)

    def decode_step(self, sequences: int, context: float) -> float:
        """Seconds of a step without prefill."""
        fixed = self.profile.fixed_ms(sequences, sequences)
        return (fixed + self.profile.context_us * 1e-3 * context) * 1e-3 * self.engine.slowness

    def first_token(self, arrival: Arrival, hit: int, tpot: float, now: float) -> float | None:
        """Time of the first token if the request were sent now; None if any answer, its own included, would miss
        its TPOT because of it."""
        if not self._has_room(arrival, hit):
            return None
        seconds, steps = self.prefill(arrival.prompt_tokens, hit)
        first, left = self.free_at(now) + seconds, arrival.output_tokens - 1
        due = FOREVER if tpot == FOREVER else first + tpot * left
        joined = list(self._decoding)
        own = ExactAnswer(arrival.output_tokens, arrival.prompt_tokens, due)
        insort(joined, DecodeState(left + steps, arrival.prompt_tokens - steps, own), key=lambda state: state.left)
        if any(finish > answer.due and answer.slack >= 0 for answer, finish in self._finishes(joined, first, steps)):
            return None
        return first

    def _has_room(self, arrival: Arrival, hit: int) -> bool:
        """The request would neither wait inside the engine nor preempt another."""
        size = self.profile.block_size
        needed = (arrival.prompt_tokens + arrival.output_tokens) // size + 1
        return needed - self.cache.in_use(arrival.hashes[: hit // size]) <= self.cache.free

    def _finishes(self, decoding: Sequence[DecodeState], at: float, steps: int) -> Iterator[tuple[ExactAnswer, float]]:
        """Each answer's end, if all have `steps` more tokens at `at` and no prefill follows."""
        count = len(decoding)
        context = float(sum(state.context for state in decoding) + steps * count)
        done = steps
        for state in decoding:
            if (more := state.left - done) > 0:
                at += more * self.decode_step(count, context + count * more / 2)
                context += count * more
                done = state.left
            yield state.answer, at
            context -= state.context + state.left
            count -= 1
