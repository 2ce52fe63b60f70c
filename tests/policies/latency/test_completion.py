"""The whole answer as a distribution: its length by class, its pace, and the calibration of the sum."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.fleet.fleet import AttemptReport, Fleet
from policies.latency.answer_lengths import KNOWN_ANSWERS, NARROWER, AnswerLengths
from policies.latency.online_learning import KNOWN_AGE, KNOWN_SAMPLES
from policies.routes.when import class_of
from policies.types import (
    MEDIAN,
    NINETIETH,
    QUANTILES,
    AttemptOutcome,
    Candidate,
    Completion,
    Endpoint,
    Forecast,
    Load,
    Pool,
    PoolEstimate,
)
from tests.support.decision_fleet import PACES, RATIOS, answers

ENDPOINT = Endpoint("main/a", "main")


def lengths(*tokens: int) -> AnswerLengths:
    found = AnswerLengths()
    for count in tokens:
        found.observe_output("r", count)
    return found


# --------------------------------------------------------------------------- lengths


def test_lengths_are_known_from_a_few_answers_on() -> None:
    """Before, the route's `total` decides nothing."""
    assert lengths(*[100] * (KNOWN_ANSWERS - 1)).quantiles("r", None) == ()
    assert lengths(*[100] * KNOWN_ANSWERS).quantiles("other", None) == ()
    assert len(lengths(*[100] * KNOWN_ANSWERS).quantiles("r", None)) == len(QUANTILES)


def test_lengths_are_those_of_the_latest_answers_up_to_max_tokens() -> None:
    """Of 128 answers from 10 to 1,280 tokens."""
    found = lengths(*range(10, 1290, 10))
    assert found.quantiles("r", None)[MEDIAN] == pytest.approx(645, rel=0.05)
    assert found.quantiles("r", None)[NINETIETH] == pytest.approx(1160, rel=0.05)
    assert found.quantiles("r", 700)[NINETIETH] == 700
    assert found.quantiles("r", 0)[MEDIAN] == 1  # a caller's 0 is no answer of nothing


def test_an_effort_of_reasoning_is_a_class_of_its_own() -> None:
    """Budgets of about the same size are one class."""
    found = AnswerLengths()
    for _ in range(30):
        found.observe_output("r", 100, "low", "t", 0)
        found.observe_output("r", 9000, class_of("8192 tokens"), "t", 0)
    assert found.quantiles("r", None, "low", "t", 0)[NINETIETH] < 200
    assert found.quantiles("r", None, class_of("9000 tokens"), "t", 0)[MEDIAN] > 5000
    assert 100 < found.quantiles("r", None, "unheard-of", "t", 0)[MEDIAN] < 9100


def test_the_narrowest_known_class_tells() -> None:
    """Prompts that begin alike, then the caller, then the route."""
    found = AnswerLengths()
    for _ in range(KNOWN_ANSWERS):
        found.observe_output("r", 50, "", "ann", 1)
        found.observe_output("r", 800, "", "ann", 2)
        found.observe_output("r", 3000, "", "bob", 1)
    assert found.quantiles("r", None, "", "ann", 1)[MEDIAN] < found.quantiles("r", None, "", "ann", 3)[MEDIAN]
    assert found.quantiles("r", None, "", "ann", 3)[MEDIAN] < found.quantiles("r", None, "", "bob", 1)[MEDIAN]


def test_the_answers_of_one_caller_teach_nothing_about_a_known_other() -> None:
    """Ann's class is her own, however long the answers and however many the prompts that Mallory brings."""
    found = AnswerLengths()
    for _ in range(50):
        found.observe_output("r", 100, "", "ann", 7)
    before = found.quantiles("r", 4000, "", "ann", 7)
    for number in range(20 * NARROWER):
        found.observe_output("r", 100_000, f"{number % 32} bits", "mallory", number, under_p90=False)
        found.observe_output("r", 100_000, "", "mallory", number, under_p90=False)
    assert found.quantiles("r", 4000, "", "ann", 7) == before


def test_lengths_survive_a_restart() -> None:
    """Of the routes; the narrower classes are learned again."""
    found, again = lengths(*range(10, 1290, 10)), AnswerLengths()
    again.restore(found.learned(), 3600.0)
    assert again.quantiles("r", None) == pytest.approx(found.quantiles("r", None), rel=1e-3)


# --------------------------------------------------------------------------- the sum


@given(
    ttft=st.floats(1e-3, 100),
    tpot=st.floats(1e-5, 1),
    median=st.floats(1, 10_000),
    wide=st.floats(1.001, 20),
    within=st.floats(0, 1e4),
)
def test_chances_and_quantiles_agree(ttft: float, tpot: float, median: float, wide: float, within: float) -> None:
    """Quantiles ascend, and a quantile is met by its share."""
    found = Completion(Forecast(ttft, RATIOS), answers(median, median * wide), PACES, tpot)
    seconds = [found.at(i) for i in range(len(QUANTILES))]
    assert seconds == sorted(seconds)
    assert seconds[0] >= 0
    for q, at in zip(QUANTILES, seconds, strict=True):
        assert found.probability(at) == pytest.approx(q, abs=0.02)
    assert 0 <= found.probability(within) <= 1


def test_max_tokens_bounds_the_forecast() -> None:
    """An answer that is always cut has no spread of its own."""
    found = Completion(Forecast(1.0), (100.0,) * len(QUANTILES), PACES, 0.01)
    assert (found.p50, found.p90) == (pytest.approx(2.0), pytest.approx(2.0))


def whole_answers(count: int, seed: int) -> Iterator[tuple[float, float]]:
    """Actual seconds and forecast p90, of answers that become four times as long half-way."""
    random, found = Random(seed), AnswerLengths()
    for number in range(count):
        tokens = max(round(random.lognormvariate(5.0 + 1.4 * (number > count / 2), 0.7)), 1)
        took = 0.2 * random.lognormvariate(0, 0.3) + tokens * 0.01 * random.lognormvariate(0.2, 0.2)
        known = found.quantiles("r", None)
        p90 = Completion(Forecast(0.2), known, PACES, 0.01).p90 if known else None
        found.observe_output("r", tokens, under_p90=None if p90 is None else took <= p90)
        if p90 is not None:
            yield took, p90


@pytest.mark.parametrize("seed", range(4))
def test_nine_of_ten_answers_are_under_their_p90(seed: int) -> None:
    """Though the pace is a fifth slower than believed, and the lengths change: the spread follows its own misses."""
    covered = [took <= p90 for took, p90 in whole_answers(2000, seed)]
    assert 0.87 <= sum(covered) / len(covered) <= 0.93


# --------------------------------------------------------------------------- the pace


def answered(fleet: Fleet, now: float, tpot: float, tokens: int = 100, stream: bool = True) -> None:
    """One answer from now on."""
    prompt = PoolEstimate(100)
    load = fleet.snapshot(now).loads[ENDPOINT.id]
    sent = Candidate(ENDPOINT, 0, 100, 0, fleet.view.forecast(ENDPOINT, load, 100, 0, now), 1.0, 0.0, load=load)
    fleet.on_sent("k", sent, prompt, now, stream)
    ended = now + 0.05 + tpot * (tokens - 1)
    if stream:
        fleet.on_first_token("k", now + 0.05)
    report = AttemptReport(100, 0, tokens, tpot if stream else None, None if stream else 0.05)
    fleet.on_ended("k", AttemptOutcome.COMPLETED, ended, report)


def known_fleet(**how: bool) -> Fleet:
    fleet = Fleet([Pool("main", "m", (ENDPOINT,))])
    for number in range(20):
        answered(fleet, 10.0 * number, 0.05, **how)
    return fleet


def p50(fleet: Fleet, now: float, load: Load | None = None) -> float | None:
    load = load or fleet.snapshot(now).loads[ENDPOINT.id]
    asked = Candidate(ENDPOINT, 0, 100, 0, Forecast(0.1), 1.0, 0.0, load=load)
    found = fleet.view.completion(asked, (100.0,) * len(QUANTILES), now)
    return None if found is None else found.p50


@pytest.mark.parametrize("stream", [True, False])
def test_the_pace_of_an_endpoint_is_learned_from_its_answers(stream: bool) -> None:
    """Streamed, or whole, as far as the time before the first token is known."""
    assert p50(known_fleet(stream=stream), 201.0) == pytest.approx(0.1 + 100 * 0.05, rel=0.1)


def test_the_pace_is_unknown_before_a_few_answers_and_long_after_the_last() -> None:
    """So an endpoint that was left for its pace is tried again."""
    fleet = Fleet([Pool("main", "m", (ENDPOINT,))])
    for number in range(KNOWN_SAMPLES):
        assert p50(fleet, 10.0 * number) is None
        answered(fleet, 10.0 * number, 0.05)
    assert p50(fleet, 30.0) is not None
    assert p50(fleet, 30.0 + KNOWN_AGE) is None


def test_the_pace_is_that_of_the_load_the_endpoint_would_have() -> None:
    """Beside thirty answers, those that wait for their first token among them, a token takes longer."""
    fleet = known_fleet()
    paces = [p50(fleet, 201.0, load) or 0.0 for load in (Load(), Load(running=15), Load(running=15, waiting=15))]
    assert paces == sorted({*paces})


@pytest.mark.parametrize("target", [0.55, 0.75, 0.85, 0.9, 0.97])
def test_a_share_of_a_wanted_chance_is_one_at_most_and_never_grows_with_the_ttft(target: float) -> None:
    """Wherever the target lies between two quantiles."""
    ratios = tuple(0.5 + q for q in QUANTILES)
    wholes = [
        Completion(Forecast(0.1 * i, ratios), (200.0,) * 3 + (300.0,) * (len(QUANTILES) - 3), ratios, 0.02)
        for i in range(1, 60)
    ]
    shares = [whole.share_of(target, 7.4) for whole in wholes]
    assert max(shares) <= 1.0
    assert shares == sorted(shares, reverse=True)
    exact = [min(whole.probability(7.4) / target, 1.0) for whole in wholes]
    assert shares == pytest.approx(exact, abs=0.02)
