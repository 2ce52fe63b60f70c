"""Answers whose callers do not read: the gateway reads nothing of them meanwhile, so they tell nothing of engines."""

from __future__ import annotations

import pytest

from policies.fleet.fleet import AttemptReport, Fleet
from policies.types import AttemptOutcome, Load
from tests.support.learned_fleet import ONE, answer, candidate_of, fleet, load, prompt, send

QUICK = AttemptReport(completion_tokens=100, mean_itl=0.01)
SLOW = AttemptReport(completion_tokens=100, mean_itl=2.0)
LENGTHS = (100.0,) * 13


def trained() -> Fleet:
    """Answers of 10 ms a token, from 0 s to 20 s."""
    to = fleet()
    for number in range(20):
        answer(to, now=float(number), reported=QUICK)
    return to


def pace(of: Fleet, now: float) -> tuple[float, float | None]:
    """TPOT of an answer there now, and the p90 of the whole answer."""
    found = of.view.completion(candidate_of(of, ONE, now), LENGTHS, now)
    return load(of, now).tpot, None if found is None else found.p90


def test_slow_readers_make_no_engine_look_slow() -> None:
    """One caller with many streams would send everybody else's answers to other tiers."""
    to, unread = trained(), trained()
    for number in range(10):
        key = send(unread, now=30.0 + number)
        unread.on_first_token(key, 30.1 + number)
        unread.on_unread(key)
        unread.on_ended(key, AttemptOutcome.COMPLETED, 39.9 + number, SLOW)
    assert pace(unread, 50.0) == pytest.approx(pace(to, 50.0), rel=0.05)


@pytest.mark.parametrize("is_unread_before", [True, False])
def test_an_answer_that_nobody_reads_closes_no_engine(is_unread_before: bool) -> None:
    """Its tokens do not come, and that is not for want of pace; a caller may stop before the first one too."""
    to = trained()
    key = send(to, now=30.0, tpot_budget=0.05)
    if is_unread_before:
        to.on_unread(key)
    to.on_first_token(key, 30.1)
    to.on_unread(key)
    for number in range(150):
        to.on_progress([(key, 1)], 30.2 + number / 5)
    found: Load = load(to, 60.0)
    assert (found.tpot_pressure, found.in_flight) == (0.0, 1)


def test_the_end_of_an_unread_answer_frees_its_place() -> None:
    to = trained()
    key = send(to, prompt(500), now=30.0)
    to.on_first_token(key, 30.1)
    to.on_unread(key)
    to.on_ended(key, AttemptOutcome.CANCELLED, 31.0)
    to.on_unread(key)
    assert (load(to, 31.0).in_flight, load(to, 31.0).context) == (0, 0)
