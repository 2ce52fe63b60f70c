"""What was sent to one engine and has produced no first token yet, known at once and exactly.

Rules:
- An attempt is charged its uncached prompt tokens when it is sent, cleared at its first token and
  released at any end. Counts are sizes of dictionaries: nothing can leak, nothing can go below zero,
  and an unknown or repeated key changes nothing.
- Engines prefill first come, first served (vLLM's default): a first token proves that what was sent
  before it is all but done, and that the rest begins now.
- Time drains what is ahead at the learned prefill rate, but a streamed attempt without a first token
  is evidence that it is not done: it keeps a remainder. One that is not streamed shows no first token:
  it is taken for answering once its turn and its time are over.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from policies.types import NEVER

_new = tuple.__new__  # half of what a named tuple's own constructor takes
REMAINDER = 0.1  # of the charge: about what a prefill exceeds its predicted time by


class Queue(NamedTuple):
    """What is ahead of a prompt, before time drains it."""

    tokens: int
    pairs: int
    remainder: int
    since: float  # when the engine began with what is first

    @property
    def context(self) -> float:
        """Attention pairs per token: how much context what is ahead must read."""
        return self.pairs / self.tokens if self.tokens else 0.0

    def ahead(self, now: float, rate: float) -> float:
        """Tokens that a prompt sent at `now` waits for, at `rate` tokens/s."""
        return max(self.tokens - rate * max(now - self.since, 0.0), float(self.remainder)) if self.tokens else 0.0


EMPTY = Queue(0, 0, 0, NEVER)


class Charge(NamedTuple):
    """One attempt without a first token."""

    tokens: int
    pairs: int
    remainder: int
    stream: bool = True


class InflightTokens:
    """The attempts in flight on one endpoint. Tokens and attention pairs are integers, so sums stay exact."""

    __slots__ = ("_pairs", "_remainder", "_since", "_tokens", "answering", "waiting")

    def __init__(self) -> None:
        self.waiting: dict[Hashable, Charge] = {}  # in the order sent
        self.answering: set[Hashable] = set()
        self._tokens = self._pairs = self._remainder = 0  # sums over the waiting
        self._since = 0.0  # when the engine began with what is first now

    @property
    def in_flight(self) -> int:
        return len(self.waiting) + len(self.answering)

    @property
    def prefilling(self) -> int:
        return len(self.waiting)

    @property
    def queue(self) -> Queue:
        return Queue(self._tokens, self._pairs, self._remainder, self._since) if self.waiting else EMPTY

    def charge(self, key: Hashable, tokens: int, now: float, context: int = 0, stream: bool = True) -> None:
        """`tokens` to be computed on top of `context` cached ones."""
        if key in self.waiting or key in self.answering:
            self.release(key, now)
        if not self.waiting:
            self._since = now
        pairs, remainder = tokens * (2 * context + tokens) // 2, int(tokens * REMAINDER) if stream else 0
        self.waiting[key] = _new(Charge, (tokens, pairs, remainder, stream))
        self._tokens += tokens
        self._pairs += pairs
        self._remainder += remainder

    def clear(self, key: Hashable, now: float) -> None:
        """The first token of `key` is here."""
        if key not in self.waiting:
            return
        for earlier in tuple(self.waiting):
            if earlier == key:
                break
            self._settle(earlier)
        self._answer(key)
        self._since = now

    def expire(self, now: float, rate: float) -> None:
        """Take for answering what shows no first token and had its time, at `rate` tokens/s."""
        while self.waiting:
            key, charge = next(iter(self.waiting.items()))
            over = self._since + charge.tokens / rate
            if charge.stream or over > now:
                return
            self._answer(key)
            self._since = over

    def release(self, key: Hashable, now: float) -> None:
        """`key` ended, however it did."""
        self.answering.discard(key)
        if key not in self.waiting:
            return
        if next(iter(self.waiting)) == key:
            self._since = now
        self._take_out(key)

    def _settle(self, key: Hashable) -> None:
        """All but done."""
        charge = self.waiting[key]
        if not charge.stream:
            self._answer(key)
            return
        left = Charge(charge.remainder, charge.pairs * charge.remainder // max(charge.tokens, 1), charge.remainder)
        self._tokens += left.tokens - charge.tokens
        self._pairs += left.pairs - charge.pairs
        self.waiting[key] = left

    def _answer(self, key: Hashable) -> None:
        self._take_out(key)
        self.answering.add(key)

    def _take_out(self, key: Hashable) -> None:
        tokens, pairs, remainder, _ = self.waiting.pop(key)
        self._tokens -= tokens
        self._pairs -= pairs
        self._remainder -= remainder
