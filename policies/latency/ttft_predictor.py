"""TTFT of one endpoint, as a distribution, learned online.

An engine is predicted from its physics:
`TTFT = base + length * reading + tokens / rate + pairs * attention + running * step`, where length is the
prompt's, cached or not, tokens are the uncached ones of the prompt and of everything ahead, and pairs is
what attention must read for them. (A real vLLM needs the length: 10k cached tokens cost it 0.1 s on a CPU.)
An API shows no queue: only how long prompts of about this length took lately.

Rules:
- The terms start as those of a small model on a current GPU, and adapt within a few samples to a hundred
  times slower ones. A slow first sample scales them all, and with them what is uncertain of each: a machine
  five times slower has proportions of its own. Attention's share varies most (on a CPU seven times a GPU's).
- The spread comes from recent errors (`ratios`), never from an assumed shape.
- One outlier is clipped; several in a row are a new regime: old trust and old errors are dropped.
- An attempt left without a token after t seconds took longer: that teaches if t exceeds the prediction.
- Of a pool's endpoints one that is little known is taken for its most similar sibling at its own speed: what the
  sibling learned, times how much slower this one's few samples were, and these learned on top of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from itertools import islice
from math import exp, log
from statistics import median
from typing import NamedTuple, Protocol, Self

from policies.fleet.inflight_tokens import REMAINDER
from policies.latency.change_detector import SURPRISES, ChangeDetector
from policies.latency.error_quantiles import ErrorQuantiles
from policies.latency.regression import Regression
from policies.types import NEVER, Forecast, Load, Quantiles

# The reference engine: its coefficients are what the regression multiplies.
BASE = 0.015  # s: HTTP, tokenizing, one step
LENGTH = 2e-6  # s per token of the prompt: tokenizing and hashing it, reading its cache
TOKEN = 1 / 20_000  # s per uncached token
PAIR = 2e-9  # s per pair of new token and token in its context
RUNNING = 0.0005  # s per request that is decoding
READ = 5e-4  # requests that decode: a token of context that must be read for one slows a step by as much
LEAST_TOKEN = 1e-6  # s: no engine prefills more than a million tokens a second
LEAST_TTFT = 1e-4  # s

ENGINE_VARIANCES = (4.0, 4.0, 4.0, 16.0, 4.0)  # of each term beside the common factor, (times the reference) squared

API_BASE = 0.4  # s
API_TOKEN = 1 / 20_000  # s per token
API_HALF_LIFE = 3600.0  # s: its load follows the hour of the day; what changes sooner is a new regime
API_MEMORY = 48.0  # samples that a length's level remembers at most
API_SHRINK = 3.0  # samples that all lengths together count for in one length


TAUGHT = 32  # samples from which an endpoint is believed before its siblings
SPEED_SHRINK = 1.0  # samples that "as fast as its sibling" counts for


class Work(NamedTuple):
    """What one prompt makes an endpoint do, and behind what."""

    prompt: int  # tokens
    uncached: int  # of these
    ahead: float  # uncached tokens of what was sent before and has no first token
    pairs: float  # attention pairs, of uncached and ahead
    running: float  # requests that decode meanwhile


class Sample(NamedTuple):
    """One first token. `told` is what was predicted when it was sent; `work` what is known of it by now."""

    work: Work
    predicted: float  # s
    ttft: float  # s


Expected = tuple[float, Quantiles, float]  # TTFT before its spread, s; its spread; engine time of the prefill, s


class Predictor(Protocol):
    """Learns one endpoint's TTFT."""

    samples: int
    top_rate: float  # tokens/s, where a token reads no others

    def point_estimate(
        self, prompt: int, uncached: int, ahead: float, pairs: float, running: float, now: float
    ) -> float:
        """Predicted seconds, before the spread, for the fields of a `Work` (which costs as much as the answer)."""
        ...

    def expect(self, load: Load, context: float, rate: float, tokens: int, hit: int, now: float) -> Expected:
        """Of a prompt sent now, `hit` tokens of which are cached, to where `load` is: one call for each endpoint of
        each decision. What is ahead drains at `rate` tokens/s, and each of its tokens reads `context` others."""
        ...

    def quantiles(self, ahead: float, now: float) -> Quantiles: ...

    def rate(self, context: float) -> float:
        """Tokens/s at which what is ahead drains, where a token reads `context` others."""
        ...

    def seconds(self, tokens: float, pairs: float) -> float:
        """Engine time of a prefill, s; 0 where no engine can be seen."""
        ...

    def observe(self, sample: Sample, now: float) -> None: ...

    def warm_start_from(self, sibling: Self, now: float) -> None:
        """Begin with what another endpoint of the pool learned."""
        ...

    def distance(self, sibling: Self, now: float) -> float:
        """How different its own samples say it is: the logarithm of the ratio of their speeds, without its sign."""
        ...


def learn_at_least(predictor: Predictor, sample: Sample, now: float) -> None:
    """A right-censored sample: no token came within its `ttft`.

    It is taken for the median of what is left beyond (as Kaplan and Meier redistribute it): were it taken for what it
    was waited for, the quantile at which one leaves would hold itself down, however low it is.
    """
    if sample.ttft <= predictor.point_estimate(*sample.work, now):
        return
    told = Forecast(sample.predicted, predictor.quantiles(sample.work.ahead, now))
    beyond = told.quantile((1 + told.probability(sample.ttft)) / 2)
    predictor.observe(sample._replace(ttft=max(beyond, sample.ttft)), now)


def _drained(load: Load, rate: float, now: float) -> float:
    """What is ahead by now."""
    ahead, least = load.queued_tokens - rate * (now - load.at), load.queued_tokens * REMAINDER
    return ahead if ahead > least else least


class EnginePredictor:
    """An engine whose queue and prefix cache are modelled."""

    __slots__ = ("_behind", "_fit", "_idle", "_own", "_since", "_surprise", "prices", "samples", "top_rate")

    prices: tuple[float, float, float, float, float]  # s per unit of each term

    def __init__(self) -> None:
        self.samples = 0
        self._fit = Regression(ENGINE_VARIANCES)
        self._own: deque[Sample] = deque()  # while it may still follow a sibling
        self._idle, self._behind = ErrorQuantiles(), ErrorQuantiles()  # errors with nothing ahead, and behind others
        self._surprise = ChangeDetector()
        self._since = NEVER  # when the present regime was noticed
        self._price()

    def point_estimate(
        self, prompt: int, uncached: int, ahead: float, pairs: float, running: float, now: float
    ) -> float:
        base, length, token, pair, step = self.prices
        return base + length * prompt + token * (uncached + ahead) + pair * pairs + step * running

    def expect(self, load: Load, context: float, rate: float, tokens: int, hit: int, now: float) -> Expected:
        base, length, token, pair, step = self.prices
        uncached = tokens - hit
        pairs = uncached * (hit + 0.5 * uncached)
        own, running = token * uncached + pair * pairs, load.running + load.context * READ
        if load.queued_tokens:
            ahead, errors = _drained(load, rate, now), self._behind
            pairs += ahead * context
            center = base + length * tokens + token * (uncached + ahead) + pair * pairs + step * running
        else:
            errors = self._idle
            center = base + length * tokens + own + step * running
        wait = load.blocked_until - now
        return (wait if wait > load.wait else load.wait) + center, errors.quantiles(now), own

    def quantiles(self, ahead: float, now: float) -> Quantiles:
        return (self._behind if ahead else self._idle).quantiles(now)

    def rate(self, context: float) -> float:
        _, _, token, pair, _ = self.prices
        return 1 / ((token if token > LEAST_TOKEN else LEAST_TOKEN) + pair * context)

    def seconds(self, tokens: float, pairs: float) -> float:
        """Engine time of a prefill, s."""
        return self.prices[2] * tokens + self.prices[3] * pairs

    def observe(self, sample: Sample, now: float) -> None:
        work, told, took = sample
        ttft = took if took > LEAST_TTFT else LEAST_TTFT
        self.samples += 1
        if self.samples <= TAUGHT:
            self._own.append(sample)
        elif self._own:
            self._own.clear()
        prompt, uncached, ahead, pairs, running = work
        predicted = self.point_estimate(prompt, uncached, ahead, pairs, running, now)
        factor = self._surprise.judge(log(ttft / predicted))
        if factor != 1.0:
            self._begin_regime(factor, now)
            return
        if self.samples == 1 and ttft > predicted:
            self._fit.scale(ttft / predicted)
        # What was sent before the present regime is held against what is predicted now.
        self._take(work, ttft, took / (predicted if now - took < self._since else told), now)

    def _take(self, work: Work, ttft: float, error: float, now: float) -> None:
        prompt, uncached, ahead, pairs, running = work
        (self._behind if ahead else self._idle).add(error, now)
        terms = BASE, prompt * LENGTH, (uncached + ahead) * TOKEN, pairs * PAIR, running * RUNNING
        self._fit.learn(terms, ttft, self._surprise.clip)
        self._price()

    def _begin_regime(self, factor: float, now: float) -> None:
        self._own.clear()
        self._fit.scale(factor)
        self._price()
        self._forget_errors(now)

    def _forget_errors(self, now: float) -> None:
        self._idle.forget()
        self._behind.forget()
        self._since = now

    def warm_start_from(self, sibling: Self, now: float) -> None:
        own = tuple(islice(self._own, 1, None))  # engines begin cold: the first tells its kind, not its speed
        speed = sibling._speed_of(own, now)
        self._fit.warm_start_from(sibling._fit)
        self._fit.coefficients = [speed * value for value in self._fit.coefficients]
        self._price()
        self._idle.warm_start_from(sibling._idle, now)
        self._behind.warm_start_from(sibling._behind, now)
        self._forget_errors(now)
        for sample in own:
            self._take(sample.work, sample.ttft, sample.ttft / self.point_estimate(*sample.work, now), now)

    def distance(self, sibling: Self, now: float) -> float:
        return abs(log(sibling._speed_of(self._own, now)))

    def _speed_of(self, samples: Collection[Sample], now: float) -> float:
        """How many times as long they took as they would here; 1 of none."""
        if not samples:
            return 1.0
        middle = median(
            log(max(sample.ttft, LEAST_TTFT) / self.point_estimate(*sample.work, now)) for sample in samples
        )
        return exp(middle * len(samples) / (len(samples) + SPEED_SHRINK))

    def _price(self) -> None:
        base, length, token, pair, step = self._fit.coefficients
        base, token = base * BASE, token * TOKEN
        least = base if base > LEAST_TTFT else LEAST_TTFT
        self.prices = (least, length * LENGTH, token, pair * PAIR, step * RUNNING)
        self.top_rate = 1 / (token if token > LEAST_TOKEN else LEAST_TOKEN)


class _Level:
    """A decayed mean of log ratios to the reference."""

    __slots__ = ("_at", "_mean", "_weight")

    def __init__(self) -> None:
        self._mean = self._weight = 0.0
        self._at = NEVER

    def read(self, now: float, prior: float, prior_weight: float) -> float:
        weight = self._weight_at(now)
        return (weight * self._mean + prior_weight * prior) / (weight + prior_weight)

    def add(self, value: float, now: float) -> None:
        self._weight = min(self._weight_at(now), API_MEMORY) + 1
        self._mean += (value - self._mean) / self._weight
        self._at = now

    def shift(self, deviation: float) -> None:
        """All has become so much more, as a few samples say."""
        self._mean += deviation
        self._weight = min(self._weight, SURPRISES)

    def _weight_at(self, now: float) -> float:
        return self._weight * 0.5 ** (max(now - self._at, 0.0) / API_HALF_LIFE) if self._weight else 0.0


class ApiPredictor:
    """An API: levels by the prompt's length, in powers of two, each leaning on all together."""

    __slots__ = ("_all", "_levels", "_ratios", "_since", "_surprise", "samples", "top_rate")

    def __init__(self) -> None:
        self.samples = 0
        self.top_rate = self.rate(0.0)
        self._all = _Level()
        self._levels: dict[int, _Level] = {}
        self._ratios = ErrorQuantiles()
        self._surprise = ChangeDetector()
        self._since = NEVER  # when the present regime was noticed

    def point_estimate(
        self, prompt: int, uncached: int, ahead: float, pairs: float, running: float, now: float
    ) -> float:
        overall = self._all.read(now, 0.0, 1.0)
        level = self._levels.get(prompt.bit_length())
        return _api_reference(prompt) * exp(overall if level is None else level.read(now, overall, API_SHRINK))

    def expect(self, load: Load, context: float, rate: float, tokens: int, hit: int, now: float) -> Expected:
        wait = max(load.wait, load.blocked_until - now)
        return wait + self.point_estimate(tokens, tokens, 0.0, 0.0, 0.0, now), self._ratios.quantiles(now), 0.0

    def quantiles(self, ahead: float, now: float) -> Quantiles:
        return self._ratios.quantiles(now)

    def rate(self, context: float) -> float:
        return 1 / API_TOKEN

    def seconds(self, tokens: float, pairs: float) -> float:
        return 0.0

    def observe(self, sample: Sample, now: float) -> None:
        work, told, took = sample
        prompt, ttft = work.prompt, max(took, LEAST_TTFT)
        self.samples += 1
        predicted = self.point_estimate(*work, now)
        factor = self._surprise.judge(log(ttft / predicted))
        if factor != 1.0:
            self._begin_regime(log(factor), now)
            return
        self._ratios.add(took / (predicted if now - took < self._since else told), now)
        value = log(ttft / _api_reference(prompt))
        self._all.add(value, now)
        self._levels.setdefault(prompt.bit_length(), _Level()).add(value, now)

    def _begin_regime(self, deviation: float, now: float) -> None:
        for level in (self._all, *self._levels.values()):
            level.shift(deviation)
        self._ratios.forget()
        self._since = now

    def warm_start_from(self, sibling: Self, now: float) -> None:
        self._all.add(sibling._all.read(now, 0.0, 1.0), now)
        self._ratios.warm_start_from(sibling._ratios, now)

    def distance(self, sibling: Self, now: float) -> float:
        return 0.0


def _api_reference(prompt: int) -> float:
    return API_BASE + prompt * API_TOKEN
