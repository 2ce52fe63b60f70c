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

The hour of the day is a factor of an API's TTFT: what that hour (UTC) was, relative to its day, on earlier days.

Rules:
- A day counts once it is over, where LEAST_HOURS of it had answers; from KNOWN_DAYS on the factors are used.
- Logarithms of a day are fitted as hour + kind of request (length of the prompt, effort), in turns (backfitting,
  Breiman and Friedman 1985): long prompts by night are no slow nights. The turns begin with the factors known, so that
  a gap in a day shifts no other hour.
- A factor is the exponential average of its days: after MEMORY_DAYS days of another shape, most of the old one is gone.
  An hour with few answers moves its factor little.
- Within a day no factor is learned: the predictor's own means, of an hour's memory, hold what remains. A step of the
  factor that did not happen today is refuted by the first answers after it (cumulative sum of likelihood ratios; Page
  1954). The likelihood is Laplace's with the spread of the class of effort: a long reasoning is no other hour.
- The state that survives a restart is a number for each hour. The day in progress is lost.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import exp, log
from typing import TypeVar

from policies.latency.learned_state import LearnedApi, LearnedMean, kept_share
from policies.latency.online_learning import CHANGE_SAMPLES, KNOWN_AGE, KNOWN_SAMPLES
from policies.latency.ttft_predictor import PrefillWork, TtftPredictor, TtftSample
from policies.types import MEDIAN, NEVER, NINETIETH, UNKNOWN_TTFT, Forecast, Load

HOURS, HOUR, DAY = 24, 3600.0, 86_400.0  # s
KNOWN_DAYS = 3  # before which an hour is not told from chance
MEMORY_DAYS = 4
LEAST_HOURS = 6  # of a day, which show its level
SHRINK = 3.0  # answers, as weight of "as before" in an hour
REFUTED = 7.5  # logarithm of the ratio of likelihoods: 1.5 in logarithms of the TTFT, where the spread is the least
LEAST_SPREAD = 0.2  # of logarithms: two answers with a ratio of 3 may be chance
TURNS = 5  # of the fit: the rest of a balanced day is gone after one

Cell = tuple[int, Hashable]  # hour, kind of request
Name = TypeVar("Name", bound=Hashable)


class HoursOfDay:
    """`unix_offset`: Unix time less the time `now` of the callers, s."""

    def __init__(self, unix_offset: float = 0.0) -> None:
        self.days = 0  # learned from, up to MEMORY_DAYS
        self.factors = [0.0] * HOURS  # logarithms
        self._offset = unix_offset
        self._day = self._hour = -1  # of the latest answer; -1: there was none
        self._today: dict[Cell, tuple[float, int]] = {}  # sum of logarithms, and answers
        self._step = self._against = 0.0  # of the factor at the beginning of the latest hour; evidence against it

    def at(self, now: float) -> float:
        """Logarithm of the factor of this hour; 0 while too few days are known."""
        return self._factor(self._hour_at(now))

    def observe(self, log_ratio: float, kind: Hashable, now: float) -> float:
        """An answer to a request of a kind. Returns by how much the logarithm of the latest hour's factor has
        grown: not 0 where another day has begun."""
        day, grown = int((now + self._offset) // DAY), 0.0
        if day != self._day:
            before = self._factor(self._hour)
            self._end_day()
            self._day, grown = day, self._factor(self._hour) - before
        hour = self._hour_at(now)
        if hour != self._hour >= 0:
            self._step, self._against = self._factor(hour) - self._factor(self._hour), 0.0
        self._hour = hour
        total, count = self._today.get((self._hour, kind), (0.0, 0))
        self._today[self._hour, kind] = total + log_ratio, count + 1
        return grown

    def refuted(self, error: float, spread: float) -> float:
        """`error`: logarithm of actual / predicted of the answer just observed; `spread`: mean deviation of such errors
        from their median. Returns the step of the factor at the beginning of this hour, once, where answers show that
        it did not happen; else 0."""
        if not self._step:
            return 0.0
        nearer = (abs(error) - abs(error + self._step)) / max(spread, LEAST_SPREAD)
        self._against = max(self._against + nearer, 0.0)
        if self._against < REFUTED:
            return 0.0
        step, self._step = self._step, 0.0
        return step

    def restore(self, factors: Sequence[float], days: int) -> None:
        if len(factors) == HOURS:
            self.factors, self.days = [*factors], min(days, MEMORY_DAYS)

    def _factor(self, hour: int) -> float:
        return self.factors[hour] if self.days >= KNOWN_DAYS else 0.0

    def _hour_at(self, now: float) -> int:
        return int((now + self._offset) % DAY // HOUR)

    def _end_day(self) -> None:
        """Moves the factors of the hours of the day that is over."""
        answers = defaultdict[int, int](int)
        for (hour, _), (_, count) in self._today.items():
            answers[hour] += count
        if len(answers) >= LEAST_HOURS:
            found = self._fitted()
            level = sum(found[hour] - self.factors[hour] for hour in answers) / len(answers)
            self.days = min(self.days + 1, MEMORY_DAYS)
            for hour, count in answers.items():
                shown = (found[hour] - level - self.factors[hour]) * count / (count + SHRINK)
                self.factors[hour] += shown / self.days
        self._today = {}

    def _fitted(self) -> dict[int, float]:
        """Of the day in progress, the hours' part of the logarithms."""
        hours: dict[int, float] = dict(enumerate(self.factors))
        for _ in range(TURNS):
            kinds = _means((kind, total - count * hours[hour], count) for (hour, kind), total, count in self._cells)
            hours = _means((hour, total - count * kinds[kind], count) for (hour, kind), total, count in self._cells)
        return hours

    @property
    def _cells(self) -> Iterable[tuple[Cell, float, int]]:
        return ((cell, total, count) for cell, (total, count) in self._today.items())


def _means(sums: Iterable[tuple[Name, float, int]]) -> dict[Name, float]:
    """Of (name, sum, count), by name."""
    totals = defaultdict[Name, list[float]](lambda: [0.0, 0.0])
    for name, total, count in sums:
        totals[name][0] += total
        totals[name][1] += count
    return {name: total / count for name, (total, count) in totals.items()}


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
