"""TTFT of an API that hides its reasoning: learned by class of effort, from priors by effort, over a restart."""

from __future__ import annotations

from random import Random

import pytest

from policies.fleet.fleet import Fleet
from policies.latency.api_predictor import ApiPredictor
from policies.latency.learned_state import LearnedApi
from policies.latency.ttft_predictor import PrefillWork, TtftSample
from policies.types import TRAINED_SAMPLES, AttemptOutcome, Endpoint, Forecast, Load, Pool, PoolEstimate

TOKENS = 500
WORK = PrefillWork(TOKENS, TOKENS, 0.0, 0.0, 0.0)
MEDIANS = {"": 0.7, "low": 2.0, "medium": 6.0, "high": 20.0}  # s
IDLE = Load()


def forecast(predictor: ApiPredictor, effort: str, now: float) -> Forecast:
    return predictor.of(effort).predict(IDLE, TOKENS, 0, now)


def observe(predictor: ApiPredictor, effort: str, ttft: float, now: float) -> None:
    predicted = predictor.of(effort).point_estimate(WORK, now)
    predictor.learner_of(effort, now).observe(TtftSample(WORK, predicted, ttft), now)


def taught(*efforts: str, samples: int = 20) -> ApiPredictor:
    predictor = ApiPredictor()
    for effort in efforts:
        for number in range(samples):
            observe(predictor, effort, MEDIANS[effort], float(number))
    return predictor


@pytest.mark.parametrize("seed", range(3))
def test_nine_of_ten_first_tokens_come_before_their_p90_at_every_effort(seed: int) -> None:
    """A model whose first token comes after reasoning of 0.7 to 20 s, more spread with more effort."""
    predictor, random = ApiPredictor(), Random(seed)
    kept: dict[str, list[bool]] = {effort: [] for effort in MEDIANS}
    for number in range(2400):
        effort, now = random.choice(list(MEDIANS)), 3.0 * number
        ttft = MEDIANS[effort] * random.lognormvariate(0.0, 0.3 if effort == "" else 0.6)
        kept[effort].append(ttft <= forecast(predictor, effort, now).p90)
        observe(predictor, effort, ttft, now)
    assert all(0.87 <= sum(each) / len(each) <= 0.93 for each in kept.values())


def test_a_new_effort_starts_from_all() -> None:
    """Its own first token moves the forecast, and it is a guess again."""
    predictor = taught("low")
    start = forecast(predictor, "high", 20.0)
    assert start.p50 == pytest.approx(2.0, rel=0.1)
    observe(predictor, "high", 20.0, 20.0)
    assert 4.0 < forecast(predictor, "high", 20.0).p50 < 20.0
    assert forecast(predictor, "high", 20.0).samples == 1
    assert forecast(predictor, "low", 20.0).p50 == pytest.approx(2.0, rel=0.1)


def test_a_named_effort_takes_nothing_from_requests_without_one() -> None:
    """No caller makes a forecast of others a guess, or moves it: before an effort is named there is one class."""
    predictor = taught("")
    assert predictor.of("high") is predictor
    before = forecast(predictor, "", 20.0)
    for _ in range(30):
        observe(predictor, "high", 20.0, 20.0)
    after = forecast(predictor, "", 20.0)
    assert after.samples == before.samples >= TRAINED_SAMPLES
    assert (after.p50, after.p90) == pytest.approx((before.p50, before.p90), rel=0.03)


def test_priors_by_effort_hold_until_samples() -> None:
    """Each effort of a model that hides its reasoning starts from its own."""
    predictor = ApiPredictor(0.0, {"": 4.0, "low": 2.0, "high": 12.0})
    found = [forecast(predictor, effort, 0.0).p50 for effort in ("", "low", "high")]
    assert found == pytest.approx([4.0 * 17 / 16, 2.0 * 17 / 16, 12.0 * 17 / 16])  # and 500 tokens
    observe(predictor, "low", 0.5, 0.0)
    assert forecast(predictor, "low", 0.0).p50 < 1.6
    assert forecast(predictor, "high", 0.0).p50 == found[2]


def test_efforts_survive_a_restart() -> None:
    """As the other learned times."""
    predictor, fresh = taught("", "low", "high"), ApiPredictor()
    fresh.restore(predictor.learned(20.0), 0.0, 20.0)
    for effort in ("", "low", "high"):
        before, after = forecast(predictor, effort, 20.0), forecast(fresh, effort, 20.0)
        assert (after.p50, after.p90, after.samples) == pytest.approx(
            (before.p50, before.p90, before.samples), rel=0.05
        )


def test_saved_efforts_are_bounded() -> None:
    """No file makes a tree of classes."""
    saved = taught("low").learned(20.0)
    with pytest.raises(ValueError, match="efforts within an effort"):
        LearnedApi(saved.samples, saved.changes, saved.errors, saved.overall, by_effort={"low": saved})
    with pytest.raises(ValueError, match="efforts of more than"):
        LearnedApi(0, saved.changes, saved.errors, saved.overall, by_effort=dict.fromkeys(map(str, range(99)), saved))


def test_another_key_of_the_pool_takes_over_all_efforts() -> None:
    """A new endpoint learns from its sibling."""
    fresh = ApiPredictor()
    fresh.warm_start_from(taught("", "high"), 20.0)
    for effort in ("", "high"):
        assert forecast(fresh, effort, 20.0).p50 == pytest.approx(MEDIANS[effort], rel=0.1)


def test_attempts_teach_the_effort_of_their_prompt() -> None:
    """From the estimate to the forecast of the next request of the same effort; silence too."""
    endpoint = Endpoint("api/a", "api")
    fleet = Fleet([Pool("api", "o3", (endpoint,), local=False)])

    def expected(effort: str, now: float) -> float:
        loads = fleet.snapshot(now).loads
        [candidate] = fleet.view.candidates(loads, PoolEstimate(TOKENS, job_class=effort), 0, 0.0, now, 60.0)
        return candidate.forecast.p50

    for number in range(10):
        for effort, ttft in (("low", 1.0), ("high", 9.0)):
            prompt, at = PoolEstimate(TOKENS, job_class=effort), 20.0 * number
            [candidate] = fleet.view.candidates(fleet.snapshot(at).loads, prompt, 0, 0.0, at, 60.0)
            fleet.on_sent(number, candidate, prompt, at, stream=True)
            fleet.on_first_token(number, at + ttft)
            fleet.on_ended(number, AttemptOutcome.COMPLETED, at + ttft)
    assert (expected("low", 200.0), expected("high", 200.0)) == pytest.approx((1.0, 9.0), rel=0.2)
    prompt = PoolEstimate(TOKENS, job_class="low")
    [candidate] = fleet.view.candidates(fleet.snapshot(200.0).loads, prompt, 0, 0.0, 200.0, 60.0)
    fleet.on_sent("silent", candidate, prompt, 200.0, stream=True)
    known = expected("low", 200.0)
    fleet.on_ended("silent", AttemptOutcome.SILENT, 208.0)
    assert expected("low", 208.0) > 1.02 * known
