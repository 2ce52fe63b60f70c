"""Token counts of prompts: in flight to an engine, and by pool.

Prompt tokens in flight, without a first token yet, are exact, and known at once. Rules:
- An attempt is charged its uncached prompt tokens when sent; the first token, or any end, clears the charge. Counts are
  sizes of dictionaries: counts cannot leak or go below zero, and an unknown or repeated key has no effect.
- Engines prefill first come, first served (vLLM's default): a first token proves that earlier attempts are almost
  done, and that the later ones begin now.
- An engine step may also prefill later prompts: first tokens of a step arrive together.
- Time drains the queue at the learned prefill rate. A streamed attempt without a first token proves that some prefill
  is left, and keeps a remainder. An attempt without streaming shows no first token: it counts as decoding once its
  prefill time is over.

The counts by pool are learned from what engines report.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from policies.latency.learned_state import LearnedRegression
from policies.latency.online_learning import Regression
from policies.types import NEVER

STEP = 8192  # tokens that an engine reads in a step: vLLM's default on current GPUs
REMAINDER = 0.1  # of the charge: about the share by which a prefill exceeds its predicted time

PER_MESSAGE = 4.0  # tokens of a chat template (OpenAI's; ChatML and Llama 3 differ by about one)
PER_PROMPT = 3.0  # tokens which open the answer
CLIP = 0.5  # largest relative error a report may teach: an image is not a template
SCALE_VARIANCE = 0.01
VARIANCES = (0.02, 1.0, 100.0)  # of text (another tokenizer), messages (template), prompt (default system text)
REPORT_NOISE = 0.03  # a report's relative error: texts of equal count here differ by this much at the engine
MIN_SCALE = 0.05
# Upper limits of learned scales: tokens per counted token of text, per message, per prompt. A false report above the
# limits would make every prompt too long for the context window.
MAX_SCALES = (8.0, 1024 / PER_MESSAGE, 8192 / PER_PROMPT)
ERRORS = 2.0  # standard deviations


@dataclass(slots=True)
class PrefillQueue:
    """Tokens ahead of a new prompt, before time drains them."""

    tokens: int
    pairs: int  # attention pairs: new token times token in its context
    remainder: int  # tokens which time does not drain
    started_at: float  # start of the prefill in progress

    @property
    def context_per_token(self) -> float:
        """Attention pairs per token."""
        return self.pairs / self.tokens if self.tokens else 0.0

    def tokens_left(self, now: float, rate: float) -> float:
        """Tokens ahead of a prompt sent at `now`, drained at `rate` tokens/s."""
        return max(self.tokens - rate * max(now - self.started_at, 0.0), float(self.remainder)) if self.tokens else 0.0

    def as_of_now(self) -> PrefillQueue:
        """A copy, for the queue goes on."""
        return PrefillQueue(self.tokens, self.pairs, self.remainder, self.started_at)


NO_QUEUE = PrefillQueue(0, 0, 0, NEVER)


class PrefillTokens(NamedTuple):
    """Tokens to compute, and their attention pairs."""

    tokens: float
    pairs: float


@dataclass(slots=True)
class PrefillCharge:
    """The prefill of an attempt without a first token."""

    tokens: int
    context: int  # cached tokens, which these are computed on top of
    pairs: int
    remainder: int
    stream: bool
    sent_at: float


class InflightTokens:
    """The attempts in flight on one endpoint. Tokens and attention pairs are integers, so sums stay exact. `queue`: the
    sums of all charges."""

    def __init__(self) -> None:
        self.prefilling: dict[Hashable, PrefillCharge] = {}  # in the order sent
        self.decoding: set[Hashable] = set()
        self.queue = PrefillQueue(0, 0, 0, NEVER)

    @property
    def in_flight(self) -> int:
        return len(self.prefilling) + len(self.decoding)

    def on_sent(self, key: Hashable, tokens: int, now: float, context: int = 0, stream: bool = True) -> None:
        """Charges `tokens`, to be computed on top of `context` cached ones."""
        if key in self.prefilling or key in self.decoding:
            self.on_ended(key, now)
        if not self.prefilling:
            self.queue.started_at = now
        pairs = tokens * (2 * context + tokens) // 2
        charge = PrefillCharge(tokens, context, pairs, int(tokens * REMAINDER) if stream else 0, stream, now)
        self.prefilling[key] = charge
        self._add(charge, 1)

    def on_first_token(self, key: Hashable, now: float) -> None:
        if key not in self.prefilling:
            return
        for earlier in tuple(self.prefilling):
            if earlier == key:
                break
            self._reduce_to_remainder(earlier)
        self._add(self.prefilling.pop(key), -1)
        self.decoding.add(key)
        ahead = next(iter(self.prefilling.values()), None)
        self.queue.started_at = now if ahead is None else max(now, ahead.sent_at)

    def prefills_of(self, key: Hashable) -> tuple[PrefillTokens, PrefillTokens]:
        """Prefills until the first token of `key`, and the same with nothing cached."""
        charged: list[PrefillCharge] = []
        later = later_pairs = 0
        for sent, charge in reversed(self.prefilling.items()):
            if charged or sent == key:
                charged.append(charge)
            else:
                later, later_pairs = later + charge.tokens, later_pairs + charge.pairs
        share = min(STEP / later, 1.0) if later else 0.0
        tokens, pairs = share * later, share * later_pairs
        whole = [charge.tokens + charge.context for charge in charged]
        cached = tokens + sum(each.tokens for each in charged), pairs + sum(each.pairs for each in charged)
        lost = tokens + sum(whole), pairs + sum(each * each / 2 for each in whole)
        return PrefillTokens(*cached), PrefillTokens(*lost)

    def expire(self, now: float, rate: float) -> None:
        """Moves attempts which are not streamed to decoding when their prefill, at `rate` tokens/s, is over."""
        while self.prefilling:
            key, charge = next(iter(self.prefilling.items()))
            finished_at = self.queue.started_at + charge.tokens / rate
            if charge.stream or finished_at > now:
                return
            self._start_decoding(key)
            self.queue.started_at = finished_at

    def on_ended(self, key: Hashable, now: float) -> None:
        """Releases the attempt after any outcome."""
        self.decoding.discard(key)
        if key in self.prefilling:
            if next(iter(self.prefilling)) == key:
                self.queue.started_at = now
            self._add(self.prefilling.pop(key), -1)

    def _reduce_to_remainder(self, key: Hashable) -> None:
        charge = self.prefilling[key]
        if not charge.stream:
            self._start_decoding(key)
            return
        self._add(charge, -1)
        charge.pairs = charge.pairs * charge.remainder // max(charge.tokens, 1)
        charge.tokens, charge.context = charge.remainder, 0
        self._add(charge, 1)

    def _start_decoding(self, key: Hashable) -> None:
        self._add(self.prefilling.pop(key), -1)
        self.decoding.add(key)

    def _add(self, charge: PrefillCharge, times: int) -> None:
        self.queue.tokens += times * charge.tokens
        self.queue.pairs += times * charge.pairs
        self.queue.remainder += times * charge.remainder


class TokenScale:
    """Correction of one pool's prompt counts: `reported = a * text + b * messages + c`.

    A count of text cannot see the chat template, tool definitions or images.
    """

    def __init__(self) -> None:
        self._regression = Regression(VARIANCES, SCALE_VARIANCE, REPORT_NOISE, MIN_SCALE)

    @property
    def scale(self) -> float:
        """The engine's tokens per counted token of text."""
        return self._regression.coefficients[0]

    def correct(self, text_tokens: float, messages: int) -> int:
        return max(1, round(self._regression.predict((text_tokens, PER_MESSAGE * messages, PER_PROMPT))))

    def error(self, text_tokens: float, messages: int) -> int:
        """Tokens by which a report may differ from the corrected count, nearly always; before any report, by a third:
        the engine may have another tokenizer."""
        features = text_tokens, PER_MESSAGE * messages, PER_PROMPT
        return ceil(ERRORS * self._regression.predict(features) * self._regression.relative_error(features))

    def learned(self) -> LearnedRegression:
        return self._regression.learned()

    def restore(self, saved: LearnedRegression, age: float) -> None:
        """Raises ValueError where other terms were saved."""
        self._regression.restore(saved, age)
        self._bound()

    def observe(self, text_tokens: int, messages: int, reported: int) -> None:
        if reported > 0:
            self._regression.update((text_tokens, PER_MESSAGE * messages, PER_PROMPT), reported, CLIP)
            self._bound()

    def _bound(self) -> None:
        self._regression.coefficients = [*map(min, self._regression.coefficients, MAX_SCALES)]
