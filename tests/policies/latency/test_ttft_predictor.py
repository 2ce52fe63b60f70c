"""TTFT and TPOT of one endpoint."""

from __future__ import annotations

from collections.abc import Iterator
from math import e
from random import Random
from statistics import median

import pytest

from policies.latency.api_predictor import ApiPredictor
from policies.latency.tpot import TpotPredictor
from policies.latency.ttft_predictor import (
    FADE_AFTER,
    FADE_S,
    QUEUED_SPREAD,
    EnginePredictor,
    PrefillWork,
    TtftPredictor,
    TtftSample,
)
from policies.types import Forecast

# A real vLLM 0.32 on one CPU core, a model of 4 layers: prompt tokens, cached tokens, TTFT (s).
VLLM_ON_CPU = [
    (68, 0, 0.035),
    (68, 64, 0.020),
    (1199, 0, 0.348),
    (1247, 1184, 0.050),
    (4886, 0, 1.953),
    (4904, 4864, 0.104),
    (9760, 0, 6.217),
    (9867, 9728, 0.272),
]


def prompt(tokens: int, cached: int = 0, ahead: float = 0.0, running: float = 0.0) -> PrefillWork:
    own = tokens - cached
    return PrefillWork(tokens, own, ahead, own * (cached + own / 2) + ahead * 500, running)


def engine(work: PrefillWork, slower: float = 1.0) -> float:
    """TTFT (s) of an 8B model on an A100, from a model of its kernels."""
    return slower * (0.02 + (work.uncached + work.queued_tokens) / 14_000 + 3.4e-9 * work.pairs + 0.0004 * work.running)


def prompts(random: Random) -> Iterator[PrefillWork]:
    while True:
        tokens = int(random.lognormvariate(6.8, 1.1)) + 20
        cached = random.choice([0, 0, tokens // 2, tokens * 9 // 10])
        yield prompt(tokens, cached, random.choice([0.0, random.expovariate(1 / 3000)]), random.randrange(30))


def teach(predictor: TtftPredictor, work: PrefillWork, ttft: float, now: float = 0.0) -> float:
    """Predicts, then learns; returns the relative error of the prediction."""
    predicted = predictor.point_estimate(work, now)
    predictor.observe(TtftSample(work, predicted, ttft), now)
    return predicted / ttft - 1


def taught(samples: int = 100, slower: float = 1.0, seed: int = 1) -> EnginePredictor:
    predictor, random = EnginePredictor(), Random(seed)
    for _, work in zip(range(samples), prompts(random), strict=False):
        teach(predictor, work, engine(work, slower) * random.lognormvariate(0, 0.1))
    return predictor


def errors(predictor: TtftPredictor, slower: float = 1.0) -> list[float]:
    works = [work for _, work in zip(range(200), prompts(Random(9)), strict=False)]
    return [abs(predictor.point_estimate(work, 0.0) / engine(work, slower) - 1) for work in works]


def test_without_a_sample_the_prediction_is_that_of_a_small_model_on_a_current_gpu() -> None:
    """Published kernels: 8k tokens take an 8B model 217 ms on an H100 and 655 ms on an A100."""
    assert 0.217 < EnginePredictor().point_estimate(prompt(8192), 0.0) < 0.655


@pytest.mark.parametrize("slower", [0.3, 1.0, 100.0])
def test_after_fifty_samples_the_median_error_is_below_a_tenth(slower: float) -> None:
    """For an engine of any speed."""
    assert median(errors(taught(50, slower), slower)) < 0.1


@pytest.mark.parametrize("slower", [1.0, 100.0])
def test_after_five_samples_the_median_error_is_below_0_4(slower: float) -> None:
    """Enough to rank endpoints."""
    assert median(errors(taught(5, slower), slower)) < 0.4


def test_a_real_vllm_on_a_cpu_is_learned_from_one_request_of_each_kind() -> None:
    """Prefill is seven times slower than the prior's, and attention ten times."""
    predictor = EnginePredictor()
    for tokens, cached, ttft in VLLM_ON_CPU:
        teach(predictor, prompt(tokens, cached), ttft)
    relative_errors = [
        abs(predictor.point_estimate(prompt(tokens, cached), 0.0) / ttft - 1) for tokens, cached, ttft in VLLM_ON_CPU
    ]
    assert median(relative_errors) < 0.25
    assert max(relative_errors) < 0.45


def test_expensive_attention_is_learned_from_a_few_long_prompts() -> None:
    """Among chat and 1k prompts; on that CPU, half the time of a prompt of 4.9k tokens is attention."""
    predictor, random = EnginePredictor(), Random(1)
    for _ in range(10):
        for tokens, cached, ttft in VLLM_ON_CPU[:4] * 2 + VLLM_ON_CPU[4:6]:
            teach(predictor, prompt(tokens, cached), ttft * random.lognormvariate(0, 0.05))
    assert predictor.point_estimate(prompt(4886), 0.0) == pytest.approx(1.953, rel=0.1)


@pytest.mark.parametrize("factor", [30.0, 0.1])
def test_a_misleading_first_sample_is_corrected(factor: float) -> None:
    """The first request can wait for an engine's start-up, or hit an unknown cache."""
    predictor = EnginePredictor()
    for number, work in zip(range(20), prompts(Random(1)), strict=False):
        teach(predictor, work, engine(work) * (1.0 if number else factor))
    assert median(errors(predictor)) < 0.15


def test_quantiles_are_calibrated() -> None:
    """90% under the p90, 50% under the p50; with and without queued tokens."""
    predictor, random = taught(300), Random(2)
    for behind in (False, True):
        works = [
            work for _, work in zip(range(1200), prompts(random), strict=False) if bool(work.queued_tokens) is behind
        ]
        ttfts = [(work, engine(work) * random.lognormvariate(0, 0.1)) for work in works]
        forecasts = [
            Forecast(predictor.point_estimate(work, 0.0), predictor.quantiles(work.queued_tokens, 0.0))
            for work, _ in ttfts
        ]
        shares = [
            sum(ttft <= forecast.quantile(q) for forecast, (_, ttft) in zip(forecasts, ttfts, strict=True)) / len(works)
            for q in (0.5, 0.9, 0.98)
        ]
        assert shares == pytest.approx([0.5, 0.9, 0.98], abs=0.1)


@pytest.mark.parametrize("slower", [5.0, 0.2])
def test_a_change_of_speed_is_learned_within_ten_samples(slower: float) -> None:
    """Five times slower or faster: another tenant came or left."""
    predictor, random = taught(200), Random(3)
    for _, work in zip(range(10), prompts(random), strict=False):
        teach(predictor, work, engine(work, slower) * random.lognormvariate(0, 0.1))
    assert median(errors(predictor, slower)) < 0.2


def test_a_new_speed_drops_the_old_errors() -> None:
    """Otherwise the change itself would widen the forecasts of the next hundred requests."""
    predictor, random = taught(200), Random(3)
    for _, work in zip(range(40), prompts(random), strict=False):
        teach(predictor, work, engine(work, 5.0) * random.lognormvariate(0, 0.1))
    assert Forecast(1.0, predictor.quantiles(0.0, 0.0)).p90 < 1.6


def test_one_outlier_changes_little() -> None:
    """A single request that took a hundred times as long."""
    predictor = taught(200)
    before = predictor.point_estimate(prompt(2000), 0.0)
    teach(predictor, prompt(2000), 100 * before)
    assert predictor.point_estimate(prompt(2000), 0.0) < 1.15 * before


def test_a_lower_bound_of_ttft_teaches_only_above_the_prediction() -> None:
    """A shorter wait says nothing."""
    predictor = taught(200)
    before = predictor.point_estimate(prompt(2000), 0.0)
    predictor.observe_at_least(TtftSample(prompt(2000), before, 0.5 * before), 0.0)
    assert predictor.point_estimate(prompt(2000), 0.0) == before
    for _ in range(4):
        predictor.observe_at_least(TtftSample(prompt(2000), before, 10 * before), 0.0)
    assert predictor.point_estimate(prompt(2000), 0.0) > 5 * before


def test_the_prefill_rate_is_learned() -> None:
    """14,000 tokens/s, and less with a long context to read."""
    predictor = taught(200)
    assert predictor.prefill_rate(0.0) == pytest.approx(14_000, rel=0.15)
    assert predictor.prefill_rate(10_000.0) < 0.85 * predictor.prefill_rate(0.0)


def test_a_warm_start_copies_predictions_and_spread() -> None:
    """Samples of its own replace the copy soon."""
    sibling, new = taught(200, 20.0), EnginePredictor()
    new.warm_start_from(sibling, 0.0)
    assert errors(new, 20.0) == errors(sibling, 20.0)
    assert Forecast(1.0, new.quantiles(0.0, 0.0)).p90 < 1.5
    random = Random(4)
    for _, work in zip(range(10), prompts(random), strict=False):
        teach(new, work, engine(work, 10.0))
    assert median(errors(new, 10.0)) < 0.2


@pytest.mark.parametrize(("seconds", "times"), [(0.0, 10.0), (FADE_S, 1 + 9 / e), (3 * FADE_S, 1 + 9 / e**3)])
def test_an_old_slowness_fades_to_a_siblings_model(seconds: float, times: float) -> None:
    """A third of the difference is left after a time constant, a twentieth after three."""
    slow, fast = taught(100, 10.0), taught(100)
    slow.fade_to(fast, FADE_AFTER + seconds)
    assert slow.is_fading
    assert median(errors(slow, times)) < 0.15


@pytest.mark.parametrize("times", [10.0, 1.0])
def test_the_next_sample_tells_whether_an_engine_is_still_slow(times: float) -> None:
    """One first token: what was learned returns, or is forgotten."""
    slow, fast, work = taught(100, 10.0), taught(100), prompt(3000)
    for now in (40.0, 60.0, 80.0):
        slow.fade_to(fast, now)
    slow.observe(TtftSample(work, slow.point_estimate(work, 90.0), engine(work, times)), 90.0)
    assert not slow.is_fading
    assert median(errors(slow, times)) < 0.15


def test_a_slowness_that_does_not_grow_with_the_prompt_fades_too() -> None:
    """An API server that was short of CPU: two seconds more for every prompt, and no fewer tokens a second."""
    slow, random = EnginePredictor(), Random(6)
    for _, work in zip(range(100), prompts(random), strict=False):
        teach(slow, work, engine(work) + 2.0)
    slow.fade_to(taught(100), FADE_AFTER + 5 * FADE_S)
    assert slow.is_fading
    assert slow.point_estimate(prompt(1000), 0.0) < 1.5 * engine(prompt(1000))


def test_a_slightly_slower_engine_does_not_fade() -> None:
    """Load gives it requests, and so samples."""
    slower = taught(100, 1.3)
    slower.fade_to(taught(100), 1000.0)
    assert not slower.is_fading
    assert median(errors(slower, 1.3)) < 0.1


def api(work: PrefillWork, slower: float = 1.0) -> float:
    """TTFT (s) of a hosted model with its own curve over prompt tokens."""
    return slower * (0.3 + 0.00008 * work.prompt_tokens**1.1)


def test_an_api_is_learned_by_prompt_length() -> None:
    """For any curve; the noise is a third."""
    predictor, random = ApiPredictor(), Random(1)
    for _, work in zip(range(300), prompts(random), strict=False):
        teach(predictor, work, api(work) * random.lognormvariate(0, 0.3))
    relative_errors = [abs(predictor.point_estimate(prompt(n), 0.0) / api(prompt(n)) - 1) for n in (200, 1500, 6000)]
    assert max(relative_errors) < 0.25
    assert Forecast(1.0, predictor.quantiles(0.0, 0.0)).p90 == pytest.approx(1.5, abs=0.25)


def test_an_unseen_prompt_length_is_inferred_from_other_lengths() -> None:
    """An API twice as slow as assumed for short prompts is assumed twice as slow for long prompts."""
    predictor = ApiPredictor()
    before = predictor.point_estimate(prompt(20_000), 0.0)
    for _ in range(50):
        teach(predictor, prompt(300), 2 * (0.4 + 300 / 20_000))
    assert predictor.point_estimate(prompt(20_000), 0.0) == pytest.approx(2 * before, rel=0.05)


def test_an_api_that_slows_down_fivefold_is_learned_within_ten_samples() -> None:
    """With a noise of a fifth."""
    predictor, random = ApiPredictor(), Random(1)
    for number, work in zip(range(210), prompts(random), strict=False):
        slower = 5.0 if number >= 200 else 1.0
        teach(predictor, work, api(work, slower) * random.lognormvariate(0, 0.2), now=float(number))
    relative_errors = [predictor.point_estimate(prompt(n), 210.0) / api(prompt(n), 5.0) - 1 for n in (500, 1500, 3000)]
    assert max(map(abs, relative_errors)) < 0.35


def test_samples_of_an_api_fade_within_half_a_day() -> None:
    """Samples an hour old still count."""
    predictor = ApiPredictor()
    for _ in range(50):
        teach(predictor, prompt(1000), 10.0, now=0.0)
    assert predictor.point_estimate(prompt(1000), 0.0) == pytest.approx(10.0, rel=0.15)
    assert predictor.point_estimate(prompt(1000), 3600.0) > 5.0
    assert predictor.point_estimate(prompt(1000), 12 * 3600.0) < 0.6


def test_tpot_is_learned_by_the_number_of_running_answers() -> None:
    """A step of 8 ms plus 0.25 ms per running answer; a slow-down is followed."""
    pace, random = TpotPredictor(), Random(1)
    for number in range(160):
        running, slower = random.randrange(40), 3.0 if number >= 150 else 1.0
        pace.observe(running, 0.0, slower * (0.008 + 0.00025 * running) * random.lognormvariate(0, 0.1))
        if number == 149:
            assert [pace.predict(n, 0.0) for n in (0, 20)] == pytest.approx([0.008, 0.013], rel=0.1)
    assert pace.predict(20, 0.0) == pytest.approx(0.039, rel=0.2)


def test_tpot_at_rest_follows_what_is_written_between_prefills() -> None:
    """Before the first answer ends, and without counting a slow-down twice once an answer has taught it."""
    pace = TpotPredictor()
    for _ in range(50):
        pace.observe_at_rest(4, 4000.0, 0.8, 8, 0.2)
    assert pace.at_rest(4, 4000.0).now == pytest.approx(0.1, rel=0.05)
    for _ in range(20):
        pace.observe(4, 4000.0, 0.1)
    rest = pace.at_rest(4, 4000.0)
    assert rest.now == pytest.approx(0.1, rel=0.05)
    assert 0.08 < rest.alone < rest.now


def test_tpot_at_rest_is_forgotten_within_seconds_at_rest() -> None:
    """A host that is free again; time spent on prefills, or idle, tells nothing and forgets nothing."""
    pace = TpotPredictor()
    for tpot in (0.2, 0.02):
        for _ in range(200):
            pace.observe_at_rest(1, 0.0, 0.2, 0.2 / tpot, 0.2)
        assert pace.at_rest(1, 0.0).alone == pytest.approx(tpot, rel=0.15)


def test_the_spread_of_a_queued_prompt_follows_that_of_idle_ones_until_it_has_errors_of_its_own() -> None:
    """Wider by QUEUED_SPREAD, in logarithms: it is as precise as its engine is, within minutes of a start."""
    predictor, random = EnginePredictor(), Random(1)
    before = predictor.quantiles(2_000.0, 0.0)
    for _, work in zip(range(200), (work for work in prompts(random) if not work.queued_tokens), strict=False):
        teach(predictor, work, engine(work) * random.lognormvariate(0, 0.1))
    idle, queued = (predictor.quantiles(ahead, 0.0) for ahead in (0.0, 2_000.0))
    assert queued == pytest.approx([ratio**QUEUED_SPREAD for ratio in idle], rel=0.05)
    assert queued[-1] / queued[0] < before[-1] / before[0] / 2
