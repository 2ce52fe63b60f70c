"""The hour of the day as a factor of an API's TTFT: what that hour (UTC) was, relative to its day, on earlier days.

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
from collections.abc import Hashable, Iterable, Sequence
from typing import TypeVar

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
