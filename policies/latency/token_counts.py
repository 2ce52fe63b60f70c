"""Token counts: in flight to an engine, of prompts by pool, and of answers by route, with the times of reasoning.

Prompt tokens in flight, without a first token yet, are exact, and known at once. Rules:
- An attempt is charged its uncached prompt tokens when it is sent; its first token clears the charge, any end
  releases it. Counts are sizes of dictionaries: they cannot leak or go below zero, and an unknown or repeated key
  changes nothing.
- Engines prefill first come, first served (vLLM's default): a first token proves that earlier attempts are almost
  done, and that the later ones begin now.
- Time drains the queue at the learned prefill rate. A streamed attempt without a first token proves that some prefill
  is left, and keeps a remainder. An attempt without streaming shows no first token: it counts as decoding once its
  prefill time is over.

The counts of prompts and answers are learned from what engines report.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from math import ceil

from policies.latency.learned_state import LearnedLengths, LearnedRegression, kept_share
from policies.latency.online_learning import Regression
from policies.routes.route import Route
from policies.types import NEVER

REMAINDER = 0.1  # of the charge: about the share by which a prefill exceeds its predicted time

PER_MESSAGE = 4.0  # tokens of a chat template (OpenAI's; ChatML and Llama 3 differ by about one)
PER_PROMPT = 3.0  # tokens which open the answer
CLIP = 0.5  # largest relative error a report may teach: an image is not a template
SCALE_VARIANCE = 0.01
VARIANCES = (0.02, 1.0, 100.0)  # of text (another tokenizer), messages (template), prompt (default system text)
REPORT_NOISE = 0.03  # a report's relative error: texts of equal count here differ by this much at the engine
MIN_SCALE = 0.05
ERRORS = 2.0  # standard deviations

PRIOR_LENGTH = 256  # tokens of an answer, before any
PRIOR_ANSWERS = 8  # answers which the prior counts for
LENGTH_WEIGHT = 1 / 64  # of the latest answer in the mean
MAX_LENGTH = 131_072  # tokens: a longer answer is a wrong report


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

    def as_of_now(self) -> PrefillQueue:
        """A copy, for the queue goes on."""
        return PrefillQueue(self.tokens, self.pairs, self.remainder, self.started_at)


@dataclass(slots=True)
class PrefillCharge:
    """The prefill of an attempt without a first token."""

    tokens: int
    pairs: int
    remainder: int
    stream: bool


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
        charge = PrefillCharge(tokens, pairs, int(tokens * REMAINDER) if stream else 0, stream)
        self.prefilling[key] = charge
        self._add(charge, 1)

    def on_first_token(self, key: Hashable, now: float) -> None:
        if key not in self.prefilling:
            return
        for earlier in tuple(self.prefilling):
            if earlier == key:
                break
            self._reduce_to_remainder(earlier)
        self._start_decoding(key)
        self.queue.started_at = now

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
        charge.tokens = charge.remainder
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

    def observe(self, text_tokens: int, messages: int, reported: int) -> None:
        if reported > 0:
            self._regression.update((text_tokens, PER_MESSAGE * messages, PER_PROMPT), reported, CLIP)


REASONING_SAMPLES = 64  # latest answers of a route at a pool
REASONING_AGE = 600.0  # s; older answers are forgotten, so a pool left for its reasoning is tried again


class ReasoningTimes:
    """Seconds from the first token to the first token of the answer, of a route's latest answers at a pool."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque(maxlen=REASONING_SAMPLES)  # (time, s)

    def observe(self, seconds: float, now: float) -> None:
        self._samples.append((now, seconds))

    def quantile(self, share: float, now: float) -> float:
        """The time that `share` of the answers kept to; 0 where nothing is known."""
        known = sorted(seconds for at, seconds in self._samples if now - at < REASONING_AGE)
        return known[min(int(share * len(known)), len(known) - 1)] if known else 0.0


class OutputLengths:
    """Answer lengths of a route, learned from completed answers."""

    def __init__(self) -> None:
        self._mean = float(PRIOR_LENGTH)
        self._answers = PRIOR_ANSWERS

    def observe(self, tokens: int) -> None:
        self._answers += 1
        self._mean += (min(tokens, MAX_LENGTH) - self._mean) * max(1 / self._answers, LENGTH_WEIGHT)

    def learned(self) -> LearnedLengths:
        return LearnedLengths(self._mean, self._answers)

    def restore(self, saved: LearnedLengths, age: float) -> None:
        self._mean = min(saved.mean, MAX_LENGTH)
        self._answers = max(int(saved.answers * kept_share(age)), PRIOR_ANSWERS)

    def expected(self, max_tokens: int | None = None) -> int:
        """Expected tokens of an answer which may have at most `max_tokens`."""
        expected = round(self._mean)
        return max(1, expected if max_tokens is None else min(expected, max_tokens))


class AnswerLengths:
    """Learned lengths of answers: output tokens by route, and seconds of reasoning by route and pool."""

    def __init__(self) -> None:
        self._outputs: dict[str, OutputLengths] = {}  # by route
        self._reasoning = defaultdict[tuple[str, str], ReasoningTimes](ReasoningTimes)  # by route and pool

    def expected_output(self, route: str, max_tokens: int | None = None) -> int:
        """Expected tokens of an answer which may have at most `max_tokens`."""
        return (self._outputs.get(route) or OutputLengths()).expected(max_tokens)

    def observe_output(self, route: str, tokens: int) -> None:
        """An answer of this route completed with `tokens` tokens."""
        if route not in self._outputs:
            self._outputs[route] = OutputLengths()
        self._outputs[route].observe(tokens)

    def expected_reasoning(self, route: Route, now: float) -> Mapping[str, float] | None:
        """Seconds of reasoning before the answer, by pool, that the route's target share of answers kept to; None: the
        route's budget is not of the answer."""
        if not route.promises_answer:
            return None
        return {pool: self._reasoning[route.name, pool].quantile(route.target, now) for pool in route.pools}

    def observe_reasoning(self, route: str, pool: str, seconds: float, now: float) -> None:
        """The answer began `seconds` after the first token."""
        self._reasoning[route, pool].observe(seconds, now)

    def learned(self) -> Mapping[str, LearnedLengths]:
        """Output tokens by route: the state that survives a restart."""
        return {route: lengths.learned() for route, lengths in self._outputs.items()}

    def restore(self, saved: Mapping[str, LearnedLengths], age: float) -> None:
        """Brings back what was saved `age` seconds ago, of routes without an answer since the start."""
        for route, lengths in saved.items():
            if route not in self._outputs:
                self._outputs[route] = OutputLengths()
                self._outputs[route].restore(lengths, age)
