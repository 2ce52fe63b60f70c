"""Learned values that survive a restart."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan
from random import Random
from typing import Any

import pytest

from policies.latency.answer_lengths import OutputLengths
from policies.latency.api_predictor import ApiPredictor
from policies.latency.learned_state import (
    LearnedChanges,
    LearnedErrors,
    LearnedMean,
    LearnedRegression,
)
from policies.latency.token_counts import TokenScale
from policies.latency.tpot import TpotPredictor
from policies.latency.ttft_predictor import EnginePredictor, PrefillWork, TtftPredictor, TtftSample
from policies.types import QUANTILES, TRAINED_SAMPLES

DAY = 86_400.0
NOW = 1_000.0
LATER = 7.0  # on the clock of another process
WORKS = [PrefillWork(tokens, tokens, 0.0, tokens * tokens / 2, 3.0) for tokens in (50, 800, 6_000, 40_000)]
WORKS += [replace(work, queued_tokens=2_000.0) for work in WORKS]


def taught(predictor: TtftPredictor, samples: int = 200, slower: float = 8.0) -> Any:
    random, works = Random(1), WORKS[:4] if isinstance(predictor, ApiPredictor) else WORKS
    for i in range(samples):
        work = works[random.randrange(len(works))]
        ttft = slower * (0.02 + (work.uncached + work.queued_tokens) / 20_000) * random.lognormvariate(0, 0.1)
        predictor.observe(TtftSample(work, predictor.point_estimate(work, NOW), ttft), NOW - samples + i)
    return predictor


def restored(predictor: Any, age: float = 5.0) -> Any:
    again = type(predictor)()
    again.restore(predictor.learned(NOW), age, LATER)
    return again


@pytest.mark.parametrize("kind", [EnginePredictor, ApiPredictor])
def test_a_predictor_predicts_the_same_after_a_restart(kind: type[TtftPredictor]) -> None:
    """Estimate, spread, and how both go on learning."""
    before = taught(kind())
    after = restored(before)
    for work in WORKS:
        assert after.point_estimate(work, LATER) == pytest.approx(before.point_estimate(work, NOW), rel=0.01)
        quantiles = before.quantiles(work.queued_tokens, NOW)
        assert after.quantiles(work.queued_tokens, LATER) == pytest.approx(quantiles, rel=0.01)
    assert after.samples == before.samples
    for predictor, now in ((before, NOW), (after, LATER)):
        predictor.observe(TtftSample(WORKS[1], predictor.point_estimate(WORKS[1], now), 1.0), now)
    assert after.point_estimate(WORKS[1], LATER) == pytest.approx(before.point_estimate(WORKS[1], NOW), rel=0.02)


def test_a_young_predictor_keeps_the_samples_that_siblings_are_compared_by() -> None:
    """A sibling must not take its place with a speed that it has disproved."""
    slow, fast = taught(EnginePredictor(), 10, slower=40.0), taught(EnginePredictor(), 200, slower=1.0)
    after = restored(slow)
    assert after.distance(fast, LATER) == pytest.approx(slow.distance(fast, NOW), rel=0.01)
    after.warm_start_from(fast, LATER)
    assert after.point_estimate(WORKS[2], LATER) > 10 * fast.point_estimate(WORKS[2], LATER)


@pytest.mark.parametrize("kind", [EnginePredictor, ApiPredictor])
def test_old_knowledge_is_wider_and_learns_faster(kind: type[TtftPredictor]) -> None:
    """The spread by the age of the errors, the weight of a new sample by the age of the coefficients."""
    before = taught(kind())
    fresh, old = restored(before), restored(before, age=3 * DAY)

    def width(predictor: TtftPredictor) -> float:
        quantiles = predictor.quantiles(0.0, LATER)
        return quantiles[QUANTILES.index(0.9)] / quantiles[QUANTILES.index(0.1)]

    def step(predictor: TtftPredictor) -> float:
        first = predictor.point_estimate(WORKS[2], LATER)
        predictor.observe(TtftSample(WORKS[2], first, 1.4 * first), LATER)
        return predictor.point_estimate(WORKS[2], LATER) / first

    assert old.samples == before.samples // 8
    assert width(old) > 2 * width(fresh)
    assert step(old) > step(fresh) + 0.03


def test_a_forecast_of_last_week_is_a_guess() -> None:
    """Nothing is refused on the word of an engine of last week."""
    assert restored(taught(EnginePredictor(), 200), age=6.9 * DAY).samples < TRAINED_SAMPLES


def test_token_scales_lengths_and_tpot_survive() -> None:
    """All that takes samples to learn."""
    scale, lengths, tpot = TokenScale(), OutputLengths(), TpotPredictor()
    for i in range(100):
        scale.observe(500 + i, 3, round(1.3 * (500 + i)))
        lengths.observe(900)
        tpot.observe(4.0, 8_000.0, 0.08)
    scale_after, lengths_after, tpot_after = TokenScale(), OutputLengths(), TpotPredictor()
    scale_after.restore(scale.learned(), 60.0)
    lengths_after.restore(lengths.learned(), 60.0)
    tpot_after.restore(tpot.learned(), 60.0)
    assert scale_after.correct(700, 3) == scale.correct(700, 3) > 850
    assert lengths_after.expected() == lengths.expected() > 600
    assert tpot_after.predict(4.0, 8_000.0) == pytest.approx(tpot.predict(4.0, 8_000.0))


UNIT = [[1.0, 0.0], [0.0, 1.0]]
PRIOR = [0.0] * len(QUANTILES)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (LearnedRegression, ([nan, 1.0], UNIT)),
        (LearnedRegression, ([inf, 1.0], UNIT)),
        (LearnedRegression, ([-1.0, 1.0], UNIT)),
        (LearnedRegression, ([1e300, 1.0], UNIT)),
        (LearnedRegression, ([1.0] * 5000, [[1.0] * 5000])),
        (LearnedRegression, ([1.0, 1.0], [[1.0, 0.0]])),
        (LearnedRegression, ([1.0, 1.0], [[1.0], [0.0]])),
        (LearnedRegression, ([1.0, 1.0], [[1.0, nan], [nan, 1.0]])),
        (LearnedRegression, ([1.0, 1.0], [[1.0, 0.5], [0.0, 1.0]])),
        (LearnedRegression, ([1.0, 1.0], [[1.0, 2.0], [2.0, 1.0]])),
        (LearnedRegression, ([1.0, 1.0], [[-1.0, 0.0], [0.0, 1.0]])),
        (LearnedRegression, ([1.0, 1.0], [[0.0, 0.0], [0.0, 1.0]])),
        (LearnedErrors, ([nan], PRIOR)),
        (LearnedErrors, ([0.0] * 1000, PRIOR)),
        (LearnedErrors, ([7.0], PRIOR)),
        (LearnedErrors, ([], PRIOR[1:])),
        (LearnedErrors, ([], [1.0, *PRIOR[1:]])),
        (LearnedErrors, ([], PRIOR, -1.0)),
        (LearnedChanges, (nan, 1)),
        (LearnedChanges, (1.0, -1)),
        (LearnedMean, (0.0, -1.0)),
        (LearnedMean, (nan, 1.0)),
    ],
)
def test_a_value_that_no_learner_may_hold_cannot_be_made(kind: Any, values: tuple[Any, ...]) -> None:
    """Not finite, out of bounds, too many, or no covariance."""
    with pytest.raises(ValueError, match=r"."):
        kind(*values)


def test_every_covariance_that_learning_makes_is_one() -> None:
    """Whatever was observed: rounding must not make a file unreadable."""
    random = Random(3)
    for samples in (0, 1, 3, 40, 3_000):
        predictor = EnginePredictor()
        for _ in range(samples):
            tokens = random.choice([1, 1, 30, 200_000])
            work = PrefillWork(tokens, tokens, 0.0, tokens * tokens / 2, 0.0)
            predicted = predictor.point_estimate(work, NOW)
            predictor.observe(TtftSample(work, predicted, random.choice([1e-4, 0.1, 300.0, predicted])), NOW)
        restored(predictor)
