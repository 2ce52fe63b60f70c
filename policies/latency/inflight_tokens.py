"""Prompt tokens in flight to an engine, without a first token yet: exact, and known at once.

Rules:
- An attempt is charged its uncached prompt tokens when it is sent; its first token clears the charge, any end
  releases it. Counts are sizes of dictionaries: they cannot leak or go below zero, and an unknown or repeated key
  changes nothing.
- Engines prefill first come, first served (vLLM's default): a first token proves that earlier attempts are almost
  done, and that the later ones begin now.
- Time drains the queue at the learned prefill rate. A streamed attempt without a first token proves that some of its
  prefill is left, and keeps a remainder. An attempt without streaming shows no first token: it counts as decoding
  once its prefill time is over.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from policies.types import NEVER

REMAINDER = 0.1  # of the charge: about the share by which a prefill exceeds its predicted time


@dataclass(slots=True)
class PrefillQueue:
    """Tokens ahead of a new prompt, before time drains them."""

    tokens: int
    pairs: int  # attention pairs: new token times token in its context
    remainder: int  # tokens which time does not drain
    started_at: float  # when the engine began with the first token

    @property
    def context_per_token(self) -> float:
        """Attention pairs per token."""
        return self.pairs / self.tokens if self.tokens else 0.0

    def tokens_left(self, now: float, rate: float) -> float:
        """Tokens ahead of a prompt sent at `now`, drained at `rate` tokens/s."""
        return max(self.tokens - rate * max(now - self.started_at, 0.0), float(self.remainder)) if self.tokens else 0.0


EMPTY_QUEUE = PrefillQueue(0, 0, 0, NEVER)


@dataclass(slots=True)
class PrefillCharge:
    """The prefill of an attempt without a first token."""

    tokens: int
    pairs: int
    remainder: int
    stream: bool


class InflightTokens:
    """The attempts in flight on one endpoint. Tokens and attention pairs are integers, so sums stay exact."""

    def __init__(self) -> None:
        self.prefilling: dict[Hashable, PrefillCharge] = {}  # in the order sent
        self.decoding: set[Hashable] = set()
        self._tokens = self._pairs = self._remainder = 0  # sums over `prefilling`
        self._started_at = 0.0  # when the engine began with the first charge

    @property
    def in_flight(self) -> int:
        return len(self.prefilling) + len(self.decoding)

    @property
    def queue(self) -> PrefillQueue:
        if not self.prefilling:
            return EMPTY_QUEUE
        return PrefillQueue(self._tokens, self._pairs, self._remainder, self._started_at)

    def on_sent(self, key: Hashable, tokens: int, now: float, context: int = 0, stream: bool = True) -> None:
        """Charges `tokens`, to be computed on top of `context` cached ones."""
        if key in self.prefilling or key in self.decoding:
            self.on_ended(key, now)
        if not self.prefilling:
            self._started_at = now
        pairs = tokens * (2 * context + tokens) // 2
        self._add(key, PrefillCharge(tokens, pairs, int(tokens * REMAINDER) if stream else 0, stream))

    def on_first_token(self, key: Hashable, now: float) -> None:
        if key not in self.prefilling:
            return
        for earlier in tuple(self.prefilling):
            if earlier == key:
                break
            self._reduce_to_remainder(earlier)
        self._start_decoding(key)
        self._started_at = now

    def expire(self, now: float, rate: float) -> None:
        """Moves attempts which are not streamed to decoding when their prefill, at `rate` tokens/s, is over."""
        while self.prefilling:
            key, charge = next(iter(self.prefilling.items()))
            finished_at = self._started_at + charge.tokens / rate
            if charge.stream or finished_at > now:
                return
            self._start_decoding(key)
            self._started_at = finished_at

    def on_ended(self, key: Hashable, now: float) -> None:
        """Releases the attempt after any outcome."""
        self.decoding.discard(key)
        if key not in self.prefilling:
            return
        if next(iter(self.prefilling)) == key:
            self._started_at = now
        self._subtract(self.prefilling.pop(key))

    def _reduce_to_remainder(self, key: Hashable) -> None:
        charge = self.prefilling[key]
        if not charge.stream:
            self._start_decoding(key)
            return
        pairs = charge.pairs * charge.remainder // max(charge.tokens, 1)
        self._subtract(charge)
        self._add(key, PrefillCharge(charge.remainder, pairs, charge.remainder, True))

    def _start_decoding(self, key: Hashable) -> None:
        self._subtract(self.prefilling.pop(key))
        self.decoding.add(key)

    def _add(self, key: Hashable, charge: PrefillCharge) -> None:
        self.prefilling[key] = charge
        self._tokens += charge.tokens
        self._pairs += charge.pairs
        self._remainder += charge.remainder

    def _subtract(self, charge: PrefillCharge) -> None:
        self._tokens -= charge.tokens
        self._pairs -= charge.pairs
        self._remainder -= charge.remainder
