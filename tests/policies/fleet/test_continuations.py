"""Knowledge of an endpoint that could continue an answer: its forecast, its recent pace, streams left there."""

from __future__ import annotations

import pytest

from policies.fleet.caller_evidence import SLOW_FOR
from policies.fleet.fleet import Fleet
from policies.latency.answer_pace import AnswerPace
from policies.types import AttemptOutcome, Forecast, Health
from tests.support.learned_fleet import ONE, TWO, fleet, load, prompt, send


def continuation(to: Fleet, now: float, caller: str = "me", written: int = 100) -> tuple[Forecast, AnswerPace]:
    found = to.view.continuation(ONE.id, load(to, now), prompt(), written, caller, now)
    assert found is not None
    return found


def decode(to: Fleet, caller: str, pace: float = 0.02, seconds: float = 3.0) -> int:
    """An answer of the caller at ONE, in progress; returns its key."""
    to.watches_pace = True
    key = send(to, caller=caller)
    to.on_first_token(key, 0.1)
    for step in range(1, round(seconds / 0.2) + 1):
        to.on_progress([(key, 1 + int(step * 0.2 / pace))], 0.1 + step * 0.2)
    return key


def test_the_text_so_far_is_a_part_of_the_prompt() -> None:
    """And not in the cache."""
    to = fleet()
    short, long = (continuation(to, 0.0, written=tokens)[0].p50 for tokens in (0, 5_000))
    assert short == pytest.approx(to.view.forecast(ONE, load(to), 1_000, 0, 0.0).p50)
    assert long > 2 * short


def test_the_pace_of_answers_in_progress_is_known_by_the_caller_itself() -> None:
    to = fleet()
    decode(to, "me", pace=0.2)
    pace = continuation(to, 3.1)[1]
    assert pace.tpot == pytest.approx(0.2, rel=0.2)
    assert pace.silent < 0.3


def test_one_other_caller_is_no_witness_of_a_slow_endpoint_and_two_are() -> None:
    """Its answer may be slow because it does not read."""
    to = fleet()
    decode(to, "other", pace=0.2)
    assert continuation(to, 9.0)[1] == AnswerPace()
    decode(to, "third", pace=0.2)
    assert continuation(to, 9.0)[1].silent == pytest.approx(5.9)


def test_a_slow_engine_is_forecast_as_slow_once_its_answers_have_ended() -> None:
    """By what was measured at rest."""
    to = fleet()
    before = continuation(to, 0.0)[0].tpot
    to.on_ended(decode(to, "me", pace=0.4, seconds=6.0), AttemptOutcome.COMPLETED, 6.2)
    assert continuation(to, 6.2)[0].tpot > 5 * before


@pytest.mark.parametrize(("callers", "known"), [(["me"], False), (["other"], True), (["other", "third"], False)])
def test_a_stream_left_as_too_slow_keeps_others_from_moving_there(callers: list[str], known: bool) -> None:
    """Those of its caller, or of all after two callers; for a while."""
    to = fleet()
    for caller in callers:
        to.on_ended(decode(to, caller), AttemptOutcome.OUTPACED, 3.2)
    assert (to.view.continuation(ONE.id, load(to, 3.3), prompt(), 0, "me", 3.3) is not None) == known
    assert to.view.continuation(TWO.id, load(to, 3.3, TWO), prompt(), 0, "me", 3.3) is not None
    assert to.view.continuation(ONE.id, load(to, 3.3), prompt(), 0, "me", 3.3 + SLOW_FOR) is not None


def test_a_stream_left_as_too_slow_is_no_failure_of_the_endpoint() -> None:
    """No breaker opens, however many are left."""
    to = fleet()
    for caller in "abcdefgh":
        to.on_ended(decode(to, caller), AttemptOutcome.OUTPACED, 3.2)
    assert to.snapshot_for("a", 3.3).loads[ONE.id].health is Health.UP
    assert not to.view.beliefs(to.snapshot(3.3).loads, 3.3)
