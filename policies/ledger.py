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
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

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
        return max(self.tokens - rate * max(now - self.since, 0.0), float(self.remainder))


@dataclass(slots=True)
class _Charge:
    tokens: int
    pairs: int
    remainder: int
    stream: bool


class Ledger:
    """The attempts in flight on one endpoint. Tokens and attention pairs are integers, so sums stay exact."""

    __slots__ = ("_answering", "_pairs", "_remainder", "_since", "_tokens", "_waiting")

    def __init__(self) -> None:
        self._waiting: dict[Hashable, _Charge] = {}  # in the order sent
        self._answering: set[Hashable] = set()
        self._tokens = self._pairs = self._remainder = 0  # sums over the waiting
        self._since = 0.0  # when the engine began with what is first now

    @property
    def in_flight(self) -> int:
        return len(self._waiting) + len(self._answering)

    @property
    def prefilling(self) -> int:
        return len(self._waiting)

    @property
    def queue(self) -> Queue:
        return Queue(self._tokens, self._pairs, self._remainder, self._since)

    def charge(self, key: Hashable, tokens: int, now: float, context: int = 0, stream: bool = True) -> None:
        """`tokens` to be computed on top of `context` cached ones."""
        self.release(key, now)
        if not self._waiting:
            self._since = now
        pairs = tokens * (2 * context + tokens) // 2
        charge = _Charge(tokens, pairs, int(tokens * REMAINDER) if stream else 0, stream)
        self._waiting[key] = charge
        self._add(charge, 1)

    def clear(self, key: Hashable, now: float) -> None:
        """The first token of `key` is here."""
        if key not in self._waiting:
            return
        for earlier in list(takewhile(lambda other: other != key, self._waiting)):
            self._settle(earlier)
        self._answer(key)
        self._since = now

    def expire(self, now: float, rate: float) -> None:
        """Take for answering what shows no first token and had its time, at `rate` tokens/s."""
        while self._waiting:
            key, charge = next(iter(self._waiting.items()))
            over = self._since + charge.tokens / rate
            if charge.stream or over > now:
                return
            self._answer(key)
            self._since = over

    def release(self, key: Hashable, now: float) -> None:
        """`key` ended, however it did."""
        self._answering.discard(key)
        if key not in self._waiting:
            return
        if next(iter(self._waiting)) == key:
            self._since = now
        self._add(self._waiting.pop(key), -1)

    def _settle(self, key: Hashable) -> None:
        """All but done."""
        charge = self._waiting[key]
        if not charge.stream:
            self._answer(key)
            return
        self._add(charge, -1)
        charge.pairs = charge.pairs * charge.remainder // max(charge.tokens, 1)
        charge.tokens = charge.remainder
        self._add(charge, 1)

    def _answer(self, key: Hashable) -> None:
        self._add(self._waiting.pop(key), -1)
        self._answering.add(key)

    def _add(self, charge: _Charge, sign: int) -> None:
        self._tokens += sign * charge.tokens
        self._pairs += sign * charge.pairs
        self._remainder += sign * charge.remainder
