"""An engine as one sees it who knows everything but the noise of its next steps (gateway.replay.clairvoyant)."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from backends.simulated.events import RequestId
from backends.simulated.kv_cache import PrefixCache
from backends.simulated.virtual_engine import VirtualEngine
from gateway.replay.traces import Arrival
from policies.types import FOREVER, Endpoint


class SharedCache(PrefixCache):
    """The cache of an engine to which every block that its pool ever computed is at hand."""

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
        """How many of these blocks cost no room, since running requests hold them."""
        return sum(block in self._used for block in chain)


@dataclass(slots=True, eq=False)
class ExactAnswer:
    """One that is being written. `finish`: when it ends if nothing is prefilled; `slack`: s of it that are to spare."""

    tokens: int
    context: int
    due: float
    slack: float = 0.0
    finish: float = 0.0


Written = tuple[int, int, int, ExactAnswer]  # tokens left, a number to order by, tokens in the KV cache


class Machine:
    """One engine. `look` before asking anything; `touch` when its answers have changed."""

    def __init__(self, endpoint: Endpoint, virtual: VirtualEngine, known: set[Hashable]) -> None:
        self.endpoint, self.virtual, self.engine = endpoint, virtual, virtual.engine
        self.profile = self.engine.profile
        self.cache = SharedCache(self.engine.cache.capacity, known)
        self.engine.cache = self.cache
        self.answers: dict[RequestId, ExactAnswer] = {}
        self.clear_at = 0.0  # where all that it was sent is computed
        self.context = 0  # tokens that its answers attend to
        self.version = 0  # of what was seen
        self._written: list[Written] = []  # fewest left first
        self._slacks: list[float] = []  # of the answers that keep their pace, ascending ...
        self._freed: list[float] = []  # ... and when those up to there have all ended
        self._steps: dict[int, float] = {}  # fixed ms of a step, by sequences
        self._stale = True

    def touch(self) -> None:
        self._stale = True

    def look(self) -> None:
        """When every answer would end if nothing came, and what it can bear until then."""
        if not self._stale:
            return
        self._stale = False
        self.version += 1
        got = dict(self.engine.progress())
        self._written = sorted(
            (answer.tokens - got.get(key, answer.tokens), i, answer.context + got.get(key, 0), answer)
            for i, (key, answer) in enumerate(self.answers.items())
        )
        self.context = sum(written[2] for written in self._written)
        for answer, finish in self._course(self._written, self.virtual.busy_until, 0):
            answer.finish, answer.slack = finish, answer.due - finish
        kept = sorted((answer.slack, answer.finish) for *_, answer in self._written if answer.slack >= 0)
        self._slacks, self._freed = [slack for slack, _ in kept], []
        for _, finish in kept:
            self._freed.append(max(finish, self._freed[-1] if self._freed else 0.0))

    # ---------------------------------------------------------------- when

    def wants(self, now: float) -> bool:
        """Nothing is left to prefill behind the step under way, and what is sent now just makes the next one."""
        ready = self.virtual.busy_until <= now + self.profile.overhead
        return ready and self.engine.alive and not self.engine.backlog

    def free_at(self, now: float) -> float:
        """When it could begin with what is sent now."""
        busy = self.virtual.busy_until
        return max(self.clear_at, busy) if self.engine.backlog else max(busy, now + self.profile.overhead)

    def opens_at(self, seconds: float) -> float:
        """From when on no answer that keeps its pace would lose it to a stall of `seconds`."""
        i = bisect_left(self._slacks, seconds)
        return self._freed[i - 1] if i else 0.0

    # ---------------------------------------------------------------- how long

    def prefill(self, tokens: int, hit: int) -> tuple[float, int]:
        """Seconds and steps to compute the rest of a prompt beside what decodes now."""
        profile, rest, decoding = self.profile, tokens - hit, len(self.answers)
        whole, last = divmod(rest, profile.max_num_batched_tokens - decoding)
        ms = whole * profile.fixed_ms(profile.max_num_batched_tokens, decoding + 1)
        ms += profile.fixed_ms(last + decoding, decoding + 1) if last else 0.0
        steps = whole + (last > 0)
        ms += profile.attention_ns * 1e-6 * rest * (hit + rest / 2) + steps * profile.context_us * 1e-3 * self.context
        return ms * 1e-3 * self.engine.slowness, steps

    def compute(self, tokens: int, hit: int) -> float:
        """Seconds that the rest of a prompt adds to the steps that compute it."""
        profile, rest = self.profile, tokens - hit
        linear = rest / profile.tokens_per_ms + profile.allreduce_ms * rest
        return (linear + profile.attention_ns * 1e-6 * rest * (hit + rest / 2)) * 1e-3

    def attention(self, context: float) -> float:
        """Seconds that an answer with so much context adds to a step."""
        return (self.profile.sequence_ms + self.profile.context_us * 1e-3 * context) * 1e-3

    def spare(self, pace: float) -> float:
        """Share of its time that is left for these two while answers keep their pace, in seconds of a well one."""
        if not self.engine.alive:
            return 0.0
        return max(1 / self.engine.slowness - self.profile.fixed_ms(0, 0) * 1e-3 / pace, 0.0)

    def pace(self, sequences: int, context: float) -> float:
        """Seconds of a step that only decodes."""
        fixed = self._steps.get(sequences)
        if fixed is None:
            fixed = self._steps[sequences] = self.profile.fixed_ms(sequences, sequences)
        return (fixed + self.profile.context_us * 1e-3 * context) * 1e-3 * self.engine.slowness

    def first_token(self, arrival: Arrival, hit: int, pace: float, now: float) -> float | None:
        """When it would come, were the request sent now; None if an answer, its own too, would lose its pace by it."""
        if not self._has_room(arrival, hit):
            return None
        seconds, steps = self.prefill(arrival.prompt_tokens, hit)
        first, left = self.free_at(now) + seconds, arrival.output_tokens - 1
        own = ExactAnswer(
            arrival.output_tokens, arrival.prompt_tokens, FOREVER if pace == FOREVER else first + pace * left
        )
        joined = list(self._written)
        insort(joined, (left + steps, len(joined), arrival.prompt_tokens - steps, own))
        if any(finish > answer.due and answer.slack >= 0 for answer, finish in self._course(joined, first, steps)):
            return None
        return first

    def _has_room(self, arrival: Arrival, hit: int) -> bool:
        """Or it would wait inside, or have another one preempted."""
        size = self.profile.block_size
        needed = (arrival.prompt_tokens + arrival.output_tokens) // size + 1
        return needed - self.cache.in_use(arrival.hashes[: hit // size]) <= self.cache.free

    def _course(self, answers: Sequence[Written], at: float, steps: int) -> Iterator[tuple[ExactAnswer, float]]:
        """When each ends, if all have had `steps` more tokens by `at` and nothing is prefilled from then on."""
        count = len(answers)
        context = float(sum(written[2] for written in answers) + steps * count)
        past = steps
        for left, _, own, answer in answers:
            if (more := left - past) > 0:
                at += more * self.pace(count, context + count * more / 2)
                context += count * more
                past = left
            yield answer, at
            context -= own + left
            count -= 1
