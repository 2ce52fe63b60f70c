"""The distribution of an answer's TPOT before it begins, by endpoint and TPOT pressure."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from policies.fleet.fleet import AttemptReport, Fleet
from policies.latency.tpot import SPREAD_AGE, SPREAD_ANSWERS, SPREAD_PRIOR, TpotSpread
from policies.types import AttemptOutcome, Candidate, Endpoint, Load
from tests.support.learned_fleet import API, ONE, TWO, fleet, prompt

CALM, BUSY = Load(tpot=0.02, tpot_pressure=0.3), Load(tpot=0.03, tpot_pressure=0.9)
BUDGET = 0.05


def learned(*answers: tuple[Load, float], at: float = 0.0) -> TpotSpread:
    spread = TpotSpread()
    for sent, tpot in answers:
        spread.observe(sent, tpot, at)
    return spread


def test_an_unknown_tpot_counts_as_kept() -> None:
    """Whatever the prediction says: an engine, or an API, is tried before it is judged."""
    assert TpotSpread().probability(BUSY, 1e-6, 0.0) == 1.0
    assert learned((CALM, 1.0)).probability(Load(), BUDGET, 0.0) == 1.0


def test_a_few_answers_are_no_verdict_and_many_are() -> None:
    """One bad answer moves a request nowhere; half of them do."""
    assert learned((BUSY, 0.08)).probability(BUSY, BUDGET, 0.0) > 0.95
    half = [(BUSY, 0.04), (BUSY, 0.08)] * 50
    assert 0.5 < learned(*half).probability(BUSY, BUDGET, 0.0) < 0.6


def test_the_tpot_is_known_by_the_pressure_at_the_sending() -> None:
    """Answers that were sent to a busy engine say nothing of a calm one."""
    spread = learned(*[(BUSY, 0.08)] * 50)
    assert spread.probability(CALM, BUDGET, 0.0) == 1.0
    assert spread.probability(replace(BUSY, tpot_pressure=7.0), BUDGET, 0.0) == 1.0
    assert spread.probability(replace(BUSY, tpot_pressure=0.8), BUDGET, 0.0) < 0.5


def test_one_distribution_serves_every_budget_and_every_prediction() -> None:
    """The answers took 1 to 2 times as long as predicted, evenly."""
    spread = learned(*[(BUSY, 0.03 * (1 + step / 100)) for step in range(100)])
    shares = [spread.probability(BUSY, budget, 0.0) for budget in (0.029, 0.045, 0.061)]
    assert shares[0] < 0.2 < 0.55 < shares[1] < 0.65 < shares[2] == 1.0
    assert spread.probability(replace(BUSY, tpot=0.04), 0.06, 0.0) == shares[1]


def test_answers_are_forgotten_so_that_a_pool_left_for_its_tpot_is_tried_again() -> None:
    spread = learned(*[(BUSY, 0.08)] * 50)
    assert spread.probability(BUSY, BUDGET, SPREAD_AGE - 1) < 0.5
    assert spread.probability(BUSY, BUDGET, SPREAD_AGE + 1) == 1.0


def test_the_latest_answers_count() -> None:
    spread = learned(*[(BUSY, 0.08)] * 50, *[(BUSY, 0.03)] * SPREAD_ANSWERS)
    assert spread.probability(BUSY, BUDGET, 0.0) == 1.0


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0.001, 10))), st.floats(0.001, 10), st.floats(0.001, 10))
def test_a_longer_budget_is_never_kept_by_fewer(
    answers: list[tuple[float, float]], budget: float, longer: float
) -> None:
    """And the share is that of the answers of the last minutes, beside the imagined ones."""
    spread, at = TpotSpread(), 0.0
    for pause, tpot in answers:
        at += pause
        spread.observe(BUSY, tpot, at)
    low, high = (spread.probability(BUSY, seconds, at) for seconds in sorted((budget, longer)))
    assert 0 <= low <= high <= 1
    assert high >= SPREAD_PRIOR / (SPREAD_PRIOR + SPREAD_ANSWERS)


# --------------------------------------------------------------------------- in the fleet


def answer(to: Fleet, endpoint: Endpoint, sent: Load, tpot: float, tokens: int = 100) -> Candidate:
    """An answer of an attempt that was decided on the load `sent`."""
    forecast = to.view.forecast(endpoint, sent, 1000, 0, 0.0)
    chosen = Candidate(endpoint, 0, 1000, 0, forecast, 1.0, 0.0, load=sent)
    to.on_sent("answer", chosen, prompt(), 0.0, True, BUDGET)
    to.on_first_token("answer", 0.1)
    report = AttemptReport(completion_tokens=tokens, mean_itl=tpot)
    to.on_ended("answer", AttemptOutcome.COMPLETED, 0.1 + tpot * tokens, report)
    return chosen


def test_every_answer_teaches_the_fleet_short_ones_too() -> None:
    """Of two tokens, one stall is the whole TPOT. The sibling's answers are its own."""
    known = fleet()
    for _ in range(50):
        chosen = answer(known, ONE, BUSY, 0.08, tokens=2)
    sibling = replace(chosen, endpoint=TWO)
    assert known.view.tpot_chance(chosen, BUDGET, 1.0) < 0.5
    assert known.view.tpot_chance(sibling, BUDGET, 1.0) == 1.0


def test_the_tpot_of_an_api_is_learned_from_its_answers() -> None:
    """Its load is not known: neither to us, nor does it matter."""
    known, seen = fleet(), Load(tpot=0.02)
    for _ in range(50):
        chosen = answer(known, API, seen, 0.08)
    assert known.view.tpot_chance(chosen, BUDGET, 1.0) < 0.5
    assert known.view.tpot_chance(chosen, 0.2, 1.0) == 1.0


def test_a_tpot_below_the_engines_own_at_rest_is_known_as_lost() -> None:
    """Then the load is not to blame."""
    known = fleet()
    chosen = answer(known, ONE, replace(BUSY, running=1), 0.08)
    assert known.view.tpot_chance_at_rest(chosen, 0.001) == 0.0
    assert known.view.tpot_chance_at_rest(chosen, 1.0) == 1.0


def test_an_attempt_that_was_never_decided_teaches_no_spread() -> None:
    """A warm-up's candidate has no load to compare with."""
    known = fleet()
    for _ in range(50):
        chosen = answer(known, ONE, Load(), 9.0)
    assert known.view.tpot_chance(chosen, BUDGET, 1.0) == 1.0
