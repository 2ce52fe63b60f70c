"""TTFT of a hosted API, which shows no queue: recent latency by prompt length, effort of reasoning and hour of the day.

Rules:
- Some APIs hide their reasoning: the first token comes after all of it. So each class of effort that was asked for has
  means and errors of its own, and starts from those of all requests.
- Requests that name no effort are a class too, with all that was learned before the first request named one: no caller
  makes the forecast of others a guess again.
- Before the first token an API takes the time of its kind and model (`Pool.prior_ttft`).
- A trial that ends in silence shows no time, but that the API does not make such a budget: after KNOWN_SAMPLES of them
  within KNOWN_AGE, budgets up to the least of these are not tried again (`Forecast.silent_s`).
- Means are of samples less the factor of their hour, which all efforts share.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import replace
from math import exp, log

from policies.latency.hours_of_day import HoursOfDay
from policies.latency.learned_state import LearnedApi, LearnedMean, kept_share
from policies.latency.online_learning import CHANGE_SAMPLES, KNOWN_AGE, KNOWN_SAMPLES
from policies.latency.ttft_predictor import PrefillWork, TtftPredictor, TtftSample
from policies.types import MEDIAN, NEVER, NINETIETH, UNKNOWN_TTFT, Forecast, Load

API_BASE = 0.4  # s: the means are of ratios to this reference
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
    """An API: means by prompt length, in powers of two, each shrunk towards the mean of all."""

    def __init__(
        self,
        unix_offset: float = 0.0,
        prior: Mapping[str, float] = UNKNOWN_TTFT,
        wider: ApiPredictor | None = None,
    ) -> None:
        """`unix_offset`: Unix time less `now`, s; `prior`: s to the first token of a short prompt, by class of effort;
        `wider`: of all efforts."""
        super().__init__()
        self._hours: HoursOfDay = HoursOfDay(unix_offset) if wider is None else wider._hours
        self.max_prefill_rate = self.drain_rate = 1 / API_TOKEN
        self._wider = wider
        self._prior = log(prior[""] / API_BASE)
        self._overall = _DecayedMean()
        self._by_length: dict[int, _DecayedMean] = {}
        several = prior.items() if len(prior) > 1 else ()
        self._silent: list[tuple[float, float]] = []  # s that a silent trial had, and its end; KNOWN_SAMPLES at most
        self._by_effort = {effort: ApiPredictor(0.0, {"": seconds}, self) for effort, seconds in several}

    def of(self, effort: str) -> ApiPredictor:
        return self._by_effort.get(effort, self)

    def learner_of(self, effort: str, now: float) -> ApiPredictor:
        if effort and not self._by_effort:
            unnamed = self._narrower(now)
            unnamed.restore(self.learned(now), 0.0, now)
            self._by_effort[""] = unnamed
        if self._by_effort and effort not in self._by_effort:
            self._by_effort[effort] = self._narrower(now)
        return self.of(effort)

    def _narrower(self, now: float) -> ApiPredictor:
        """A new class, which starts from all efforts."""
        found = ApiPredictor(wider=self)
        found.warm_start_from(self, now)
        return found

    def point_estimate(self, work: PrefillWork, now: float) -> float:
        return self._estimate(work.prompt_tokens, now)

    def _estimate(self, tokens: int, now: float) -> float:
        overall = self._overall.read(now, self._prior, 1.0)
        mean = self._by_length.get(tokens.bit_length())
        found = overall if mean is None else mean.read(now, overall, API_SHRINK)
        return _api_reference(tokens) * exp(found + self._hours.at(now))

    def predict(
        self, load: Load, tokens: int, hit: int, now: float, wait: float = 0.0, load_s: float = 0.0
    ) -> Forecast:
        estimate = load.wait + wait + self._estimate(tokens, now)
        silent_s = self._silent_s(now) if self._silent else 0.0
        return Forecast(estimate, self._idle_errors.quantiles(now), load.tpot, self.samples, silent_s=silent_s)

    def _silent_s(self, now: float) -> float:
        recent = [within for within, at in self._silent if now - at < KNOWN_AGE]
        return min(recent) if len(recent) >= KNOWN_SAMPLES else 0.0

    def observe_silent_trial(self, within: float, now: float) -> None:
        """Of several, those with most time count."""
        recent = [(seconds, at) for seconds, at in self._silent if now - at < KNOWN_AGE]
        self._silent = sorted([*recent, (within, now)])[-KNOWN_SAMPLES:]

    def warm_start_from(self, sibling: ApiPredictor, now: float) -> None:
        known = sibling._overall.read(now, sibling._prior, 1.0) + sibling._hours.at(now)
        self._prior = known - self._hours.at(now)
        self._idle_errors.widen_from(sibling._idle_errors, now)
        for effort, times in sibling._by_effort.items() if sibling is not self._wider else ():
            self._by_effort.setdefault(effort, self._narrower(now)).warm_start_from(times, now)

    def observe(self, sample: TtftSample, now: float) -> None:
        super().observe(sample, now)
        if (wider := self._wider) is not None:
            wider.observe(replace(sample, predicted=wider.point_estimate(sample.work, now)), now)

    def _learn(self, sample: TtftSample, ttft: float, now: float) -> None:
        tokens = sample.work.prompt_tokens
        length, log_ratio = tokens.bit_length(), log(ttft / _api_reference(tokens))
        error = log(ttft / self.point_estimate(sample.work, now))
        if not self._by_effort:  # else the class of the sample has learned the hour
            self._learn_hour(log_ratio, (self, length), error, now)
        log_ratio -= self._hours.at(now)
        self._overall.add(log_ratio, now)
        self._by_length.setdefault(length, _DecayedMean()).add(log_ratio, now)

    def _learn_hour(self, log_ratio: float, kind: Hashable, error: float, now: float) -> None:
        ratios, wider = self._idle_errors.quantiles(now), self._wider or self
        spread = log(ratios[NINETIETH] / ratios[MEDIAN]) / log(5)  # of a Laplace distribution with these quantiles
        grown = self._hours.observe(log_ratio, kind, now) + self._hours.refuted(error, spread)
        for each in (wider, *wider._by_effort.values()) if grown else ():
            for mean in each._means():
                mean.move(-grown)

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
            by_effort={effort: times.learned(now) for effort, times in self._by_effort.items()},
            hours=[*self._hours.factors] if self._hours.days and self._wider is None else [],
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
        for effort, times in saved.by_effort.items():
            self._by_effort.setdefault(effort, self._narrower(now)).restore(times, age, now)

    def _start_regime(self, factor: float) -> None:
        for mean in self._means():
            mean.shift(log(factor))


def _api_reference(tokens: int) -> float:
    return API_BASE + tokens * API_TOKEN
