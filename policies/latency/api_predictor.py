"""TTFT of a hosted API: recent latency by prompt length and hour of the day, as an API shows no queue."""

from __future__ import annotations

from collections.abc import Iterator
from math import exp, log
from typing import Self

from policies.latency.hours_of_day import HoursOfDay
from policies.latency.learned_state import LearnedApi, LearnedMean, kept_share
from policies.latency.online_learning import CHANGE_SAMPLES
from policies.latency.ttft_predictor import PrefillWork, TtftPredictor, TtftSample
from policies.types import NEVER, Forecast, Load

API_BASE = 0.4  # s
API_TOKEN = 1 / 20_000  # s per token
API_HALF_LIFE = 3600.0  # s: as long as an hour of the day; a sooner change is a new regime
API_MEMORY = 48.0  # samples which a length's mean remembers at most
API_SHRINK = 3.0  # samples which the mean of all lengths counts for in one length


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

    def move(self, log_factor: float) -> None:
        """The same samples, relative to another reference."""
        self._mean += log_factor

    def learned(self, now: float) -> LearnedMean:
        return LearnedMean(self._mean, self._weight, max(now - self._at, 0.0) if self._weight else 0.0)

    def restore(self, saved: LearnedMean, age: float, now: float) -> None:
        self._mean = saved.mean
        self._weight = saved.weight
        self._at = now - saved.age - age

    def _weight_at(self, now: float) -> float:
        return self._weight * 0.5 ** (max(now - self._at, 0.0) / API_HALF_LIFE) if self._weight else 0.0


class ApiPredictor(TtftPredictor):
    """An API: means by prompt length, in powers of two, each shrunk towards the mean of all; of samples less the factor
    of their hour. `unix_offset`: Unix time less `now`, s."""

    def __init__(self, unix_offset: float = 0.0) -> None:
        super().__init__()
        self._hours = HoursOfDay(unix_offset)
        self.max_prefill_rate = self.drain_rate = 1 / API_TOKEN
        self._overall = _DecayedMean()
        self._by_length: dict[int, _DecayedMean] = {}

    def point_estimate(self, work: PrefillWork, now: float) -> float:
        return self._estimate(work.prompt_tokens, now)

    def _estimate(self, tokens: int, now: float) -> float:
        overall = self._overall.read(now, 0.0, 1.0)
        mean = self._by_length.get(tokens.bit_length())
        found = overall if mean is None else mean.read(now, overall, API_SHRINK)
        return _api_reference(tokens) * exp(found + self._hours.at(now))

    def predict(
        self, load: Load, tokens: int, hit: int, now: float, wait: float = 0.0, load_s: float = 0.0
    ) -> Forecast:
        estimate = load.wait + wait + self._estimate(tokens, now)
        return Forecast(estimate, self._idle_errors.quantiles(now), load.tpot, self.samples)

    def warm_start_from(self, sibling: Self, now: float) -> None:
        known = sibling._overall.read(now, 0.0, 1.0) + sibling._hours.at(now)
        self._overall.add(known - self._hours.at(now), now)
        self._idle_errors.widen_from(sibling._idle_errors, now)

    def _learn(self, sample: TtftSample, ttft: float, now: float) -> None:
        tokens = sample.work.prompt_tokens
        length, log_ratio = tokens.bit_length(), log(ttft / _api_reference(tokens))
        error = log(ttft / self.point_estimate(sample.work, now))
        grown = self._hours.observe(log_ratio, length, now) + self._hours.refuted(error)
        for mean in self._means() if grown else ():
            mean.move(-grown)
        log_ratio -= self._hours.at(now)
        self._overall.add(log_ratio, now)
        self._by_length.setdefault(length, _DecayedMean()).add(log_ratio, now)

    def _means(self) -> Iterator[_DecayedMean]:
        yield self._overall
        yield from self._by_length.values()

    def learned(self, now: float) -> LearnedApi:
        return LearnedApi(
            samples=self.samples,
            changes=self._changes.learned(),
            errors=self._idle_errors.learned(now),
            overall=self._overall.learned(now),
            by_length={bits: mean.learned(now) for bits, mean in self._by_length.items()},
            hours=[*self._hours.factors] if self._hours.days else [],
            days=self._hours.days,
        )

    def restore(self, saved: LearnedApi, age: float, now: float) -> None:
        self._changes.restore(saved.changes)
        self._idle_errors.restore(saved.errors, age, now)
        self._hours.restore(saved.hours, saved.days)
        self._overall.restore(saved.overall, age, now)
        for bits, mean in saved.by_length.items():
            self._by_length.setdefault(bits, _DecayedMean()).restore(mean, age, now)
        self.samples = round(saved.samples * kept_share(age))

    def _start_regime(self, factor: float) -> None:
        for mean in self._means():
            mean.shift(log(factor))


def _api_reference(tokens: int) -> float:
    return API_BASE + tokens * API_TOKEN
