"""TTFT and TPOT of one endpoint, as distributions, learned online.

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
- An attempt left without a token after t seconds took at least t: that teaches if t exceeds the prediction.
"""

from __future__ import annotations

from math import exp, log
from statistics import median
from typing import NamedTuple, Protocol, Self

from policies.facts import NEVER
from policies.ratios import Ratios
from policies.regression import Regression

# The reference engine: its coefficients are what the regression multiplies.
BASE = 0.015  # s: HTTP, tokenizing, one step
LENGTH = 2e-6  # s per token of the prompt: tokenizing and hashing it, reading its cache
TOKEN = 1 / 20_000  # s per uncached token
PAIR = 2e-9  # s per pair of new token and token in its context
RUNNING = 0.0005  # s per request that is decoding
DECODE_BASE = 0.02  # s per output token
DECODE_RUNNING = 0.0002  # s per output token and request that is decoding
DECODE_CONTEXT = 1e-7  # s per output token and token of context of all that decode
LEAST_TOKEN = 1e-6  # s: no engine prefills more than a million tokens a second
LEAST_TTFT = 1e-4  # s
LEAST_TPOT = 1e-5  # s

ENGINE_VARIANCES = (4.0, 4.0, 4.0, 16.0, 4.0)  # of each term beside the common factor, (times the reference) squared
PACE_VARIANCES = (4.0,) * 3

API_BASE = 0.4  # s
API_TOKEN = 1 / 20_000  # s per token
API_HALF_LIFE = 600.0  # s
API_MEMORY = 48.0  # samples that a length's level remembers at most
API_SHRINK = 3.0  # samples that all lengths together count for in one length

USUAL = 4.0  # times the usual error: beyond it a sample is a surprise
LEAST_SURPRISE = 0.5  # of the ratio's logarithm: a factor of 1.65
SURPRISES = 3  # in a row, of one sign: a new regime
USUAL_MEMORY = 1 / 16  # weight of the latest error in the usual one
UNTAUGHT = 1.0  # the usual error before any sample: a factor of 2.7
REGIME = 0.3  # and at the beginning of a new regime


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
    told: float  # s
    ttft: float  # s


class Predictor(Protocol):
    """Learns one endpoint's TTFT."""

    samples: int

    def center(self, prompt: int, uncached: int, ahead: float, pairs: float, running: float, now: float) -> float:
        """Predicted seconds, before the spread, for the fields of a `Work` (which costs as much as the answer)."""
        ...

    def quantiles(self, ahead: float, now: float) -> tuple[float, ...]:
        """Of actual / predicted, at QUANTILES."""
        ...

    def rate(self, context: float) -> float:
        """Tokens/s at which what is ahead drains, where a token reads `context` others."""
        ...

    def seconds(self, tokens: float, pairs: float) -> float:
        """Engine time of a prefill, s; 0 where no engine can be seen."""
        ...

    def observe(self, sample: Sample, now: float) -> None: ...

    def follow(self, sibling: Self, now: float) -> None:
        """Begin with what another endpoint of the pool learned."""
        ...


def _error(sample: Sample, predicted: float, now: float, since: float) -> float:
    """Actual / what was told; / what is `predicted` now if it was sent before the regime that began at `since`."""
    return sample.ttft / (predicted if now - sample.ttft < since else sample.told)


def learn_at_least(predictor: Predictor, sample: Sample, now: float) -> None:
    """A right-censored sample: no token came within its `ttft`."""
    if sample.ttft > predictor.center(*sample.work, now):
        predictor.observe(sample, now)


class Surprise:
    """Tells an outlier from a new regime."""

    __slots__ = ("_samples", "_streak", "_usual")

    def __init__(self) -> None:
        self._usual, self._samples = UNTAUGHT, 0  # decayed mean of |deviation|
        self._streak: list[float] = []  # the latest surprises, of one sign

    @property
    def limit(self) -> float:
        """Of a ratio's logarithm: what is beyond is a surprise."""
        return max(USUAL * self._usual, LEAST_SURPRISE)

    @property
    def clip(self) -> float:
        """The relative error that one sample may teach."""
        return exp(self.limit) - 1

    def judge(self, deviation: float) -> float:
        """By which factor all has changed: that of the middle surprise, once there are enough; 1 mostly."""
        limit, streak = self.limit, self._streak
        if abs(deviation) <= limit or (streak and streak[0] * deviation < 0):
            streak.clear()
        if abs(deviation) > limit:
            streak.append(deviation)
        self._samples += 1
        self._usual += (min(abs(deviation), limit) - self._usual) * max(USUAL_MEMORY, 1 / (self._samples + 1))
        if len(streak) < SURPRISES:
            return 1.0
        factor = exp(median(streak))
        self._usual, self._samples = REGIME, round(1 / USUAL_MEMORY)
        streak.clear()
        return factor


class EnginePredictor:
    """An engine whose queue and prefix cache are modelled."""

    __slots__ = ("_behind", "_fit", "_idle", "_seconds", "_since", "_surprise", "samples")

    def __init__(self) -> None:
        self.samples = 0
        self._fit = Regression(ENGINE_VARIANCES)
        self._idle, self._behind = Ratios(), Ratios()  # errors with nothing ahead, and behind others
        self._surprise = Surprise()
        self._since = NEVER  # when the present regime was noticed
        self._price()

    def center(self, prompt: int, uncached: int, ahead: float, pairs: float, running: float, now: float) -> float:
        base, length, token, pair, step = self._seconds
        return base + length * prompt + token * (uncached + ahead) + pair * pairs + step * running

    def quantiles(self, ahead: float, now: float) -> tuple[float, ...]:
        return (self._behind if ahead else self._idle).quantiles(now)

    def rate(self, context: float) -> float:
        _, _, token, pair, _ = self._seconds
        return 1 / (max(token, LEAST_TOKEN) + pair * context)

    def seconds(self, tokens: float, pairs: float) -> float:
        """Engine time of a prefill, s."""
        return self._seconds[2] * tokens + self._seconds[3] * pairs

    def observe(self, sample: Sample, now: float) -> None:
        work, ttft = sample.work, max(sample.ttft, LEAST_TTFT)
        self.samples += 1
        predicted = self.center(*work, now)
        factor = self._surprise.judge(log(ttft / predicted))
        if factor != 1.0:
            self._begin_regime(factor, now)
            return
        (self._behind if work.ahead else self._idle).add(_error(sample, predicted, now, self._since), now)
        if self.samples == 1 and ttft > predicted:
            self._fit.scale(ttft / predicted)
        tokens = work.uncached + work.ahead
        terms = BASE, work.prompt * LENGTH, tokens * TOKEN, work.pairs * PAIR, work.running * RUNNING
        self._fit.learn(terms, ttft, self._surprise.clip)
        self._price()

    def _begin_regime(self, factor: float, now: float) -> None:
        self._fit.scale(factor)
        self._price()
        self._idle.forget()
        self._behind.forget()
        self._since = now

    def follow(self, sibling: Self, now: float) -> None:
        self._fit.follow(sibling._fit)
        self._price()
        self._idle.follow(sibling._idle, now)
        self._behind.follow(sibling._behind, now)

    def _price(self) -> None:
        """Seconds per unit of each term."""
        base, length, token, pair, step = self._fit.coefficients
        self._seconds = (max(base * BASE, LEAST_TTFT), length * LENGTH, token * TOKEN, pair * PAIR, step * RUNNING)


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

    __slots__ = ("_all", "_levels", "_ratios", "_since", "_surprise", "samples")

    def __init__(self) -> None:
        self.samples = 0
        self._all = _Level()
        self._levels: dict[int, _Level] = {}
        self._ratios = Ratios()
        self._surprise = Surprise()
        self._since = NEVER  # when the present regime was noticed

    def center(self, prompt: int, uncached: int, ahead: float, pairs: float, running: float, now: float) -> float:
        overall = self._all.read(now, 0.0, 1.0)
        level = self._levels.get(prompt.bit_length())
        return _api_reference(prompt) * exp(overall if level is None else level.read(now, overall, API_SHRINK))

    def quantiles(self, ahead: float, now: float) -> tuple[float, ...]:
        return self._ratios.quantiles(now)

    def rate(self, context: float) -> float:
        return 1 / API_TOKEN

    def seconds(self, tokens: float, pairs: float) -> float:
        return 0.0

    def observe(self, sample: Sample, now: float) -> None:
        prompt, ttft = sample.work.prompt, max(sample.ttft, LEAST_TTFT)
        self.samples += 1
        predicted = self.center(*sample.work, now)
        factor = self._surprise.judge(log(ttft / predicted))
        if factor != 1.0:
            self._begin_regime(log(factor), now)
            return
        self._ratios.add(_error(sample, predicted, now, self._since), now)
        value = log(ttft / _api_reference(prompt))
        self._all.add(value, now)
        self._levels.setdefault(prompt.bit_length(), _Level()).add(value, now)

    def _begin_regime(self, deviation: float, now: float) -> None:
        for level in (self._all, *self._levels.values()):
            level.shift(deviation)
        self._ratios.forget()
        self._since = now

    def follow(self, sibling: Self, now: float) -> None:
        self._all.add(sibling._all.read(now, 0.0, 1.0), now)
        self._ratios.follow(sibling._ratios, now)


def _api_reference(prompt: int) -> float:
    return API_BASE + prompt * API_TOKEN


class Pace:
    """TPOT: a step's time grows with how many requests share it."""

    __slots__ = ("_fit", "_surprise")

    def __init__(self) -> None:
        self._fit = Regression(PACE_VARIANCES)
        self._surprise = Surprise()

    def predict(self, running: float, context: float) -> float:
        base, step, read = self._fit.coefficients
        return base * DECODE_BASE + step * DECODE_RUNNING * running + read * DECODE_CONTEXT * context

    def observe(self, running: float, context: float, tpot: float) -> None:
        tpot = max(tpot, LEAST_TPOT)
        factor = self._surprise.judge(log(tpot / max(self.predict(running, context), LEAST_TPOT)))
        if factor != 1.0:
            self._fit.scale(factor)
        else:
            self._fit.learn(
                (DECODE_BASE, DECODE_RUNNING * running, DECODE_CONTEXT * context), tpot, self._surprise.clip
            )

    def follow(self, sibling: Self) -> None:
        self._fit.follow(sibling._fit)
