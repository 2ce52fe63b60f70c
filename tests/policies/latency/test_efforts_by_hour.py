"""Efforts of reasoning and hours of the day of one API: the hour is a factor of all efforts, and an effort of none."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from math import log
from random import Random

import pytest

from policies.latency.api_predictor import DAY, KNOWN_DAYS, ApiPredictor
from policies.latency.ttft_predictor import PrefillWork, TtftSample
from policies.types import Load

SLOW, TIMES = (14, 15), 3.0  # hours, and how much slower they are
EVERY = 60.0  # s between two requests
EFFORTS = {"": (1.0, 0.25), "low": (2.0, 0.5), "high": (10.0, 0.8)}  # times the shortest, spread of the logarithm
SHARES = (0.3, 0.5, 0.3)  # of the requests


@dataclass(frozen=True)
class Seen:
    """A forecast before an answer. `error`: of the median, as a factor."""

    effort: str
    hour: int
    error: float
    is_within_p90: bool


@dataclass
class Api:
    """A synthetic API that hides its reasoning."""

    seed: int = 1
    now: float = 0.0
    predictor: ApiPredictor = field(default_factory=ApiPredictor)

    def __post_init__(self) -> None:
        self.random = Random(self.seed)

    def day(self, slow: Collection[int] = SLOW) -> Iterator[Seen]:
        """Serves until the next midnight."""
        ends = self.now + DAY - self.now % DAY
        while self.now < ends:
            yield self._one(slow)
            self.now += self.random.expovariate(1 / EVERY)

    def days(self, count: int) -> list[Seen]:
        return [each for _ in range(count) for each in self.day()]

    def _one(self, slow: Collection[int]) -> Seen:
        effort, hour = self.random.choices([*EFFORTS], SHARES)[0], int(self.now % DAY // 3600)
        level, spread = EFFORTS[effort]
        tokens = int(self.random.lognormvariate(7, 1)) + 20
        median = (0.3 + tokens * 1e-5) * level * (TIMES if hour in slow else 1.0)
        forecast = self.predictor.of(effort).predict(Load(), tokens, 0, self.now)
        learner, work = self.predictor.learner_of(effort, self.now), PrefillWork(tokens, tokens, 0.0, 0.0, 0.0)
        ttft = median * self.random.lognormvariate(0.0, spread)
        learner.observe(TtftSample(work, learner.point_estimate(work, self.now), ttft), self.now)
        return Seen(effort, hour, forecast.p50 / median, ttft <= forecast.p90)


@pytest.mark.parametrize("seed", range(3))
def test_long_reasoning_refutes_no_slow_hour(seed: int) -> None:
    """Of two long times of reasoning in a row, by chance, the other efforts get no forecasts of another hour: the p90
    covers 87 to 93% of each effort's answers, and in the slow hours few of the quick ones are off by more than half."""
    api = Api(seed)
    api.days(KNOWN_DAYS)
    later = api.days(4)
    for effort in EFFORTS:
        own = [each for each in later if each.effort == effort]
        assert 0.87 <= sum(each.is_within_p90 for each in own) / len(own) <= 0.93
    quick = [abs(log(each.error)) for each in later if each.effort == "" and each.hour in SLOW]
    assert sum(error > log(1.5) for error in quick) <= 0.05 * len(quick)


def test_a_day_without_slow_hours_is_noticed_by_all_efforts() -> None:
    api = Api()
    api.days(KNOWN_DAYS + 1)
    at_two = [each for each in api.day(slow=()) if each.hour in SLOW]
    assert at_two[0].error > 2.0
    quick = [abs(log(each.error)) for each in at_two if each.effort == ""]
    assert sum(error > log(1.5) for error in quick) <= 5


def test_efforts_and_hours_survive_a_restart_together() -> None:
    """The forecasts of the next hours are the same after it. A prior of an effort is not saved."""
    api, again = Api(), ApiPredictor()
    api.days(KNOWN_DAYS + 1)
    again.restore(api.predictor.learned(api.now), 0.0, api.now)
    assert again.learned(api.now).hours == api.predictor.learned(api.now).hours
    for hour in range(3):
        now = api.now + hour * 3600.0
        for effort in (*EFFORTS, "never seen"):
            before, after = (each.of(effort).predict(Load(), 500, 0, now) for each in (api.predictor, again))
            assert (after.p50, after.p90) == pytest.approx((before.p50, before.p90), rel=0.1)
