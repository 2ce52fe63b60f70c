"""TTFT of an endpoint, as a distribution, learned online.

An engine is predicted from physics:
`TTFT = base + prompt tokens * length + (uncached + queued tokens) * token + pairs * attention + running * step`,
with attention pairs of the uncached and queued tokens. The prompt's length counts even where cached: 10k cached tokens
cost a vLLM on a CPU 0.1 s. An API shows no queue: recent latency by prompt length is learned.

Rules:
- The terms start as those of a small model on a current GPU and adapt within a few samples to engines a hundred times
  slower. A slow first sample scales all terms and their variances. Attention varies most.
- The spread is that of recent errors (`ErrorQuantiles`), never of an assumed shape.
- An outlier is clipped; several in a row start a new regime, which drops old confidence and old errors.
- An attempt cancelled without a token after t seconds took longer: a sample, if t exceeds the prediction.
- An endpoint with few samples takes over the model of the most similar sibling, scaled by the relative speed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection
from dataclasses import astuple, dataclass, replace
from itertools import islice
from math import exp, log
from statistics import median
from typing import Self

from policies.latency.learned_state import LearnedApi, LearnedEngine, LearnedMean, kept_share
from policies.latency.online_learning import CHANGE_SAMPLES, ChangeDetector, ErrorQuantiles, Regression
from policies.latency.token_counts import REMAINDER
from policies.types import NEVER, Forecast, Load, Quantiles

# The reference engine: the regression learns multiples of these.
BASE = 0.015  # s: HTTP, tokenizing, a step
LENGTH = 2e-6  # s per token of the prompt: tokenizing, hashing, reading the cache
TOKEN = 1 / 20_000  # s per uncached token
PAIR = 2e-9  # s per attention pair
RUNNING = 0.0005  # s per decoding request
CONTEXT_WEIGHT = 5e-4  # decoding requests: a token of their context slows a step by as much
MIN_TOKEN = 1e-6  # s: no engine prefills more than a million tokens a second
MIN_TTFT = 1e-4  # s
ENGINE_VARIANCES = (4.0, 4.0, 4.0, 16.0, 4.0)  # of each term beside the common factor, (times the reference) squared

API_BASE = 0.4  # s
API_TOKEN = 1 / 20_000  # s per token
API_HALF_LIFE = 3600.0  # s: load follows the hour of the day; a sooner change is a new regime
API_MEMORY = 48.0  # samples which a length's mean remembers at most
API_SHRINK = 3.0  # samples which the mean of all lengths counts for in one length

QUEUED_SPREAD = 1.5  # of a queued prompt, in logarithms, until its own errors tell
MATURE_SAMPLES = 32  # from which an endpoint's own samples outweigh its siblings'
SPEED_SHRINK = 1.0  # samples, as weight of the prior "as fast as the sibling"


@dataclass(slots=True)
class PrefillWork:
    """Prefill work of a prompt, and of the queue ahead."""

    prompt_tokens: int
    uncached: int  # of these
    queued_tokens: float  # uncached, sent before and without a first token
    pairs: float  # attention pairs of uncached and queued tokens
    running: float  # requests which decode meanwhile

    def with_more(self, tokens: int) -> PrefillWork:
        """The same with so many uncached tokens more."""
        pairs = self.pairs + tokens * (self.prompt_tokens + 0.5 * tokens)
        return replace(self, prompt_tokens=self.prompt_tokens + tokens, uncached=self.uncached + tokens, pairs=pairs)


@dataclass(slots=True)
class TtftSample:
    """A first token. `predicted` at sending; `work` as known now."""

    work: PrefillWork
    predicted: float  # s
    ttft: float  # s


class TtftPredictor(ABC):
    """Learns the TTFT of an endpoint. Defaults are those of an API: no queue is modelled."""

    max_prefill_rate: float  # tokens/s, without context
    drain_rate: float  # tokens/s, of the present queue

    def __init__(self) -> None:
        self.samples = 0
        self.context_per_token = 0.0  # attention pairs per token of the present queue
        self._changes = ChangeDetector()
        self._idle_errors = self._queued_errors = ErrorQuantiles()
        self._regime_since = NEVER  # when the present regime was noticed

    @abstractmethod
    def point_estimate(self, work: PrefillWork, now: float) -> float:
        """Predicted seconds, before the spread."""

    @abstractmethod
    def predict(
        self, load: Load, tokens: int, hit: int, now: float, adapter_wait: float = 0.0, load_s: float = 0.0
    ) -> Forecast:
        """TTFT and TPOT of a prompt sent now with `hit` of `tokens` cached, at an endpoint with the latest `load`.
        `adapter_wait`: s until the engine has the LoRA adapter; `load_s`: s of engine time for its load."""

    @abstractmethod
    def warm_start_from(self, sibling: Self, now: float) -> None:
        """Begins with what another endpoint of the pool learned."""

    def prefill_rate(self, context_per_token: float) -> float:
        """Tokens/s at which the queue drains."""
        return self.max_prefill_rate

    def prefill_seconds(self, tokens: float, pairs: float) -> float:
        """Engine time of a prefill, s; 0 for an API."""
        return 0.0

    def distance(self, sibling: Self, now: float) -> float:
        """Absolute log ratio of both speeds, judged by own samples."""
        return 0.0

    def observe(self, sample: TtftSample, now: float) -> None:
        self.samples += 1
        ttft = max(sample.ttft, MIN_TTFT)
        predicted = self.point_estimate(sample.work, now)
        factor = self._changes.observe(log(ttft / predicted))
        if factor != 1.0:
            self._start_regime(factor)
            self._clear_errors(now)
            return
        # A prompt sent before the present regime is compared with what is predicted now.
        reference = predicted if now - sample.ttft < self._regime_since else sample.predicted
        self._errors_of(sample.work.queued_tokens).observe(sample.ttft / reference, now)
        if not sample.work.queued_tokens and self._queued_errors is not self._idle_errors:
            self._queued_errors.widen_from(self._idle_errors, QUEUED_SPREAD, now)
        self._learn(sample, ttft, now)

    def observe_at_least(self, sample: TtftSample, now: float) -> None:
        """Learns a right-censored sample: no token came within its `ttft`.

        Counts as the median of the predicted distribution beyond `ttft` (as Kaplan and Meier redistribute censored
        samples). Counted as `ttft` itself, the quantile at which attempts are cancelled would hold itself down.
        """
        if sample.ttft <= self.point_estimate(sample.work, now):
            return
        forecast = Forecast(sample.predicted, self.quantiles(sample.work.queued_tokens, now))
        beyond = forecast.quantile((1 + forecast.probability(sample.ttft)) / 2)
        self.observe(replace(sample, ttft=max(beyond, sample.ttft)), now)

    def quantiles(self, queued_tokens: float, now: float) -> Quantiles:
        """Of actual / predicted."""
        return self._errors_of(queued_tokens).quantiles(now)

    def _errors_of(self, queued_tokens: float) -> ErrorQuantiles:
        return self._queued_errors if queued_tokens else self._idle_errors

    def _clear_errors(self, now: float) -> None:
        self._idle_errors.clear()
        self._queued_errors.clear()
        self._regime_since = now

    @abstractmethod
    def _learn(self, sample: TtftSample, ttft: float, now: float) -> None: ...

    @abstractmethod
    def _start_regime(self, factor: float) -> None:
        """Everything takes `factor` times as long since a moment ago."""


class EnginePredictor(TtftPredictor):
    """An engine whose queue and prefix cache are modelled."""

    def __init__(self) -> None:
        super().__init__()
        self._regression = Regression(ENGINE_VARIANCES)
        self._own_samples: deque[TtftSample] = deque()  # while a sibling may still teach
        self._queued_errors = ErrorQuantiles()
        self._update_costs()
        self.drain_rate = self.max_prefill_rate

    def point_estimate(self, work: PrefillWork, now: float) -> float:
        return (
            self._base_s
            + self._length_s * work.prompt_tokens
            + self._token_s * (work.uncached + work.queued_tokens)
            + self._pair_s * work.pairs
            + self._running_s * work.running
        )

    def predict(
        self, load: Load, tokens: int, hit: int, now: float, adapter_wait: float = 0.0, load_s: float = 0.0
    ) -> Forecast:
        uncached, queued = tokens - hit, 0.0
        pairs = uncached * (hit + 0.5 * uncached)
        prefill_s = self._token_s * uncached + self._pair_s * pairs
        if load.queued_tokens:
            queued = max(load.queued_tokens - self.drain_rate * (now - load.at), load.queued_tokens * REMAINDER)
            pairs += queued * self.context_per_token
        estimate = (
            self._base_s
            + self._length_s * tokens
            + self._token_s * (uncached + queued)
            + self._pair_s * pairs
            + self._running_s * (load.running + load.context * CONTEXT_WEIGHT)
        )
        wait = load.wait + adapter_wait
        return Forecast(wait + estimate, self.quantiles(queued, now), load.tpot, self.samples, prefill_s + load_s)

    def prefill_rate(self, context_per_token: float) -> float:
        return 1 / (max(self._token_s, MIN_TOKEN) + self._pair_s * context_per_token)

    def prefill_seconds(self, tokens: float, pairs: float) -> float:
        return self._token_s * tokens + self._pair_s * pairs

    def warm_start_from(self, sibling: Self, now: float) -> None:
        own = tuple(islice(self._own_samples, 1, None))  # engines begin cold: the first sample does not show the speed
        speed = sibling._relative_time(own, now)
        self._regression.warm_start_from(sibling._regression)
        self._regression.coefficients = [speed * value for value in self._regression.coefficients]
        self._update_costs()
        self._idle_errors.warm_start_from(sibling._idle_errors, now)
        self._queued_errors.warm_start_from(sibling._queued_errors, now)
        self._clear_errors(now)
        for sample in own:
            error = sample.ttft / self.point_estimate(sample.work, now)
            self._errors_of(sample.work.queued_tokens).observe(error, now)
            self._fit(sample.work, sample.ttft)

    def distance(self, sibling: Self, now: float) -> float:
        return abs(log(sibling._relative_time(self._own_samples, now)))

    def _relative_time(self, samples: Collection[TtftSample], now: float) -> float:
        """Actual time of another endpoint's samples over the time predicted here; 1 without samples."""
        if not samples:
            return 1.0
        middle = median(log(max(one.ttft, MIN_TTFT) / self.point_estimate(one.work, now)) for one in samples)
        return exp(middle * len(samples) / (len(samples) + SPEED_SHRINK))

    def _learn(self, sample: TtftSample, ttft: float, now: float) -> None:
        if self.samples <= MATURE_SAMPLES:
            self._own_samples.append(sample)
        else:
            self._own_samples.clear()
        if self.samples == 1 and ttft > (predicted := self.point_estimate(sample.work, now)):
            self._regression.scale(ttft / predicted)
        self._fit(sample.work, ttft)

    def learned(self, now: float) -> LearnedEngine:
        return LearnedEngine(
            samples=self.samples,
            regression=self._regression.learned(),
            changes=self._changes.learned(),
            idle_errors=self._idle_errors.learned(now),
            queued_errors=self._queued_errors.learned(now),
            own=[(*astuple(sample.work), sample.predicted, sample.ttft) for sample in self._own_samples],
        )

    def restore(self, saved: LearnedEngine, age: float, now: float) -> None:
        """Raises ValueError where this predictor learns other terms."""
        self._regression.restore(saved.regression, age)
        self._changes.restore(saved.changes)
        self._idle_errors.restore(saved.idle_errors, age, now)
        self._queued_errors.restore(saved.queued_errors, age, now)
        self._own_samples = deque(
            TtftSample(PrefillWork(int(prompt_tokens), int(uncached), *rest), predicted, ttft)
            for prompt_tokens, uncached, *rest, predicted, ttft in saved.own
        )
        self.samples = round(saved.samples * kept_share(age))
        self._update_costs()
        self.drain_rate = self.max_prefill_rate

    def _fit(self, work: PrefillWork, ttft: float) -> None:
        tokens = work.uncached + work.queued_tokens
        terms = (BASE, work.prompt_tokens * LENGTH, tokens * TOKEN, work.pairs * PAIR, work.running * RUNNING)
        self._regression.update(terms, ttft, self._changes.clip)
        self._update_costs()

    def _start_regime(self, factor: float) -> None:
        self._own_samples.clear()
        self._regression.scale(factor)
        self._update_costs()

    def _update_costs(self) -> None:
        """Seconds per unit of each term."""
        base, length, token, pair, running = self._regression.coefficients
        self._base_s = max(base * BASE, MIN_TTFT)
        self._length_s = length * LENGTH
        self._token_s = token * TOKEN
        self._pair_s = pair * PAIR
        self._running_s = running * RUNNING
        self.max_prefill_rate = self.prefill_rate(0.0)


class _DecayedMean:
    """A mean of log ratios to the reference, in which old samples fade."""

    def __init__(self) -> None:
        self._mean = self._weight = 0.0
        self._at = NEVER

    def read(self, now: float, prior: float, prior_weight: float) -> float:
        weight = self._weight_at(now)
        return (weight * self._mean + prior_weight * prior) / (weight + prior_weight)

    def add(self, log_ratio: float, now: float) -> None:
        self._weight = min(self._weight_at(now), API_MEMORY) + 1
        self._mean += (log_ratio - self._mean) / self._weight
        self._at = now

    def shift(self, log_factor: float) -> None:
        """Moves all samples, with a total weight of CHANGE_SAMPLES at most."""
        self._mean += log_factor
        self._weight = min(self._weight, CHANGE_SAMPLES)

    def learned(self, now: float) -> LearnedMean:
        return LearnedMean(self._mean, self._weight, max(now - self._at, 0.0) if self._weight else 0.0)

    def restore(self, saved: LearnedMean, age: float, now: float) -> None:
        self._mean = saved.mean
        self._weight = saved.weight
        self._at = now - saved.age - age

    def _weight_at(self, now: float) -> float:
        return self._weight * 0.5 ** (max(now - self._at, 0.0) / API_HALF_LIFE) if self._weight else 0.0


class ApiPredictor(TtftPredictor):
    """An API: means by prompt length, in powers of two, each shrunk towards the mean of all."""

    def __init__(self) -> None:
        super().__init__()
        self.max_prefill_rate = self.drain_rate = 1 / API_TOKEN
        self._overall = _DecayedMean()
        self._by_length: dict[int, _DecayedMean] = {}

    def point_estimate(self, work: PrefillWork, now: float) -> float:
        return self._estimate(work.prompt_tokens, now)

    def _estimate(self, tokens: int, now: float) -> float:
        overall = self._overall.read(now, 0.0, 1.0)
        mean = self._by_length.get(tokens.bit_length())
        return _api_reference(tokens) * exp(overall if mean is None else mean.read(now, overall, API_SHRINK))

    def predict(
        self, load: Load, tokens: int, hit: int, now: float, adapter_wait: float = 0.0, load_s: float = 0.0
    ) -> Forecast:
        estimate = load.wait + self._estimate(tokens, now)
        return Forecast(estimate, self._idle_errors.quantiles(now), load.tpot, self.samples)

    def warm_start_from(self, sibling: Self, now: float) -> None:
        self._overall.add(sibling._overall.read(now, 0.0, 1.0), now)
        self._idle_errors.warm_start_from(sibling._idle_errors, now)

    def _learn(self, sample: TtftSample, ttft: float, now: float) -> None:
        tokens = sample.work.prompt_tokens
        log_ratio = log(ttft / _api_reference(tokens))
        self._overall.add(log_ratio, now)
        self._by_length.setdefault(tokens.bit_length(), _DecayedMean()).add(log_ratio, now)

    def learned(self, now: float) -> LearnedApi:
        return LearnedApi(
            samples=self.samples,
            changes=self._changes.learned(),
            errors=self._idle_errors.learned(now),
            overall=self._overall.learned(now),
            by_length={bits: mean.learned(now) for bits, mean in self._by_length.items()},
        )

    def restore(self, saved: LearnedApi, age: float, now: float) -> None:
        self._changes.restore(saved.changes)
        self._idle_errors.restore(saved.errors, age, now)
        self._overall.restore(saved.overall, age, now)
        for bits, mean in saved.by_length.items():
            self._by_length.setdefault(bits, _DecayedMean()).restore(mean, age, now)
        self.samples = round(saved.samples * kept_share(age))

    def _start_regime(self, factor: float) -> None:
        for mean in (self._overall, *self._by_length.values()):
            mean.shift(log(factor))


def _api_reference(tokens: int) -> float:
    return API_BASE + tokens * API_TOKEN
