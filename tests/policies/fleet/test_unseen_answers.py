"""Answers that nobody shows, inferred from an engine's reports."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policies.fleet.engine_load import EngineLoad
from policies.fleet.unseen_answers import RECENT, AnswerStep, UnseenAnswers

FIRST, END = AnswerStep.FIRST_TOKEN, AnswerStep.END


def report(
    first: tuple[int, float] = (0, 0.0),
    gaps: tuple[int, float] = (0, 0.0),
    ended: tuple[int, float] = (0, 0.0),
    running: int = 9,
) -> EngineLoad:
    """Counts and sums since the engine's start."""
    (ttfts, ttft), (itls, itl), (ends, e2e) = first, gaps, ended
    return EngineLoad(
        running=running,
        waiting=0,
        ttft_count=ttfts,
        ttft_sum=ttft,
        itl_count=itls,
        itl_sum=itl,
        e2e_count=ends,
        e2e_sum=e2e,
    )


def followed(*sent_at: float, ttft: float = 0.3, shows_end: bool = False) -> UnseenAnswers:
    """Answers 0, 1, ... at an engine that has reported at 0 s."""
    found = UnseenAnswers()
    found.on_report("e", report(), 0.0)
    for key, at in enumerate(sent_at):
        assert found.on_sent(key, "e", at, ttft=ttft, shows_end=shows_end)
    return found


def inferred(of: UnseenAnswers, load: EngineLoad, now: float) -> list[tuple[object, AnswerStep, float]]:
    events = [(one.key, one.step, round(one.at, 3)) for one in of.on_report("e", load, now)]
    for key, step, _ in events:
        if step is END:
            of.on_ended(key, now)
    return events


def test_one_ttft_names_its_answer_and_its_time() -> None:
    """Not the first of those that wait: 0.1 + 0.3 s is before the report at 1 s, 0.9 + 0.3 s behind it."""
    of = followed(0.1, 0.9)
    assert inferred(of, report(), 1.0) == []
    assert inferred(of, report(first=(1, 0.3)), 1.5) == [(1, FIRST, 1.2)]


def test_a_ttft_that_fits_no_answer_is_of_other_traffic() -> None:
    assert inferred(followed(0.1), report(first=(1, 5.0)), 1.0) == []


def test_several_ttfts_are_of_the_earliest_and_add_up_to_the_sum_of_the_engine() -> None:
    (first, _, one), (second, _, other) = inferred(followed(0.1, 0.2, 0.4), report(first=(2, 1.0)), 1.0)
    assert (first, second) == (0, 1)
    assert (one - 0.1) + (other - 0.2) == pytest.approx(1.0)


def test_a_sum_that_cannot_be_theirs_is_of_other_traffic() -> None:
    assert inferred(followed(0.1, 0.2), report(first=(2, 9.0)), 1.0) == []


def test_an_answer_that_ended_before_the_report_takes_its_first_token_with_it() -> None:
    """Its first token is not taken for that of the one behind it."""
    of = followed(0.1, 0.15, shows_end=True)
    assert of.on_ended(0, 0.6) is None
    assert inferred(of, report(first=(1, 0.3)), 1.0) == []


def test_tokens_follow_from_the_mean_gap_and_go_on_between_reports() -> None:
    of = followed(0.0, shows_end=True)
    inferred(of, report(first=(1, 0.5), gaps=(25, 0.5)), 1.0)
    assert of.tokens(0, 1.0) == 26
    assert of.tokens(0, 1.2) == 36
    ended = of.on_ended(0, 1.5)
    assert ended is not None
    assert (ended.tokens, ended.itl) == (51, pytest.approx(0.02))


@pytest.mark.parametrize("gaps", [(1, 1e-300), (1, 1e300), (1, -5.0)])
def test_an_absurd_gap_breaks_nothing(gaps: tuple[int, float]) -> None:
    of = followed(0.0, shows_end=True)
    inferred(of, report(first=(1, 0.5), gaps=gaps), 1.0)
    assert of.tokens(0, 1e6) >= 1


def test_an_end_is_of_the_answer_with_the_age() -> None:
    of = followed(0.0, 2.0)
    inferred(of, report(first=(2, 0.8)), 3.0)
    assert inferred(of, report(first=(2, 0.8), ended=(1, 1.9)), 4.0) == [(1, END, 3.9)]
    assert inferred(of, report(first=(2, 0.8), ended=(2, 6.2)), 4.5) == [(0, END, 4.3)]


def test_an_end_that_fits_no_answer_is_of_other_traffic() -> None:
    of = followed(0.0)
    assert inferred(of, report(ended=(1, 50.0)), 1.0) == []


def test_an_end_that_the_data_plane_shows_is_not_inferred() -> None:
    of = followed(0.0, shows_end=True)
    assert inferred(of, report(first=(1, 0.3), ended=(1, 0.8), running=0), 1.0) == [(0, FIRST, 0.3)]
    assert inferred(of, report(first=(1, 0.3), ended=(1, 0.8), running=0), 1.5) == []


def test_what_the_engine_does_not_hold_in_two_reports_is_over() -> None:
    """A caller who left: one report may be older than the request."""
    of = followed(0.0)
    assert inferred(of, report(running=0), 1.0) == []
    assert inferred(of, report(running=0), 1.5) == [(0, END, 1.5)]


def test_all_are_over_once_the_engine_has_restarted() -> None:
    of = followed(0.0, 0.1)
    inferred(of, report(first=(1, 0.3)), 0.5)
    assert {key for key, step, _ in inferred(of, report(), 1.0) if step is END} == {0, 1}


def test_a_part_of_an_engine_that_begins_anew_ends_no_answer() -> None:
    """A rank, or an API server, of several behind one page: the sums fall, and the process is the same."""
    of = followed(0.0, 0.1)
    inferred(of, replace(report(first=(9, 3.0), ended=(5, 30.0)), started_at=1e9), 0.5)
    assert inferred(of, replace(report(first=(4, 1.0), ended=(2, 9.0)), started_at=1e9), 1.0) == []
    assert {key for key, _, _ in inferred(of, replace(report(), started_at=1e9 + 60), 1.5)} == {0, 1}


def test_an_end_that_was_found_does_not_count_as_not_held() -> None:
    """Before the report that tells of an end, the engine holds one answer less than are followed."""
    of = followed(0.0, 0.1)
    inferred(of, report(first=(2, 0.6), running=2), 0.6)
    assert inferred(of, report(first=(2, 0.6), ended=(1, 0.8), running=1), 1.0) == [(0, END, 0.8)]
    of.on_sent(2, "e", 1.05, ttft=0.3, shows_end=False)  # is tokenized, and counts nowhere yet
    assert inferred(of, report(first=(2, 0.6), ended=(1, 0.8), running=1), 1.25) == []


def test_no_answer_has_its_first_token_before_it_is_sent() -> None:
    """A short prompt behind a long one, and both faster than forecast."""
    of = followed(0.1, ttft=1.0)
    of.on_sent(1, "e", 0.2, ttft=0.05, shows_end=True)
    (_, _, one), (_, _, other) = inferred(of, report(first=(2, 0.5)), 0.6)
    assert (one - 0.1) + (other - 0.2) == pytest.approx(0.5, abs=0.01)
    assert (one > 0.1, other > 0.2) == (True, True)


@pytest.mark.parametrize("seconds", [-0.2, -1e300, 1e300])
def test_a_sum_that_falls_names_no_answer(seconds: float) -> None:
    """Of one TTFT, and of several."""
    for count in (1, 2):
        assert inferred(followed(0.3, 0.35), report(first=(count, seconds), ended=(count, seconds)), 0.6) == []


@pytest.mark.parametrize("count", [-1e308, 1e308])
def test_a_count_without_bounds_breaks_nothing(count: int) -> None:
    of = followed(0.0)
    of.on_report("e", replace(report(), started_at=1.0), 0.1)
    for first in (count, -count, count):
        absurd = report(first=(first, 1.0), gaps=(first, 1.0), ended=(first, 1.0))
        assert inferred(of, replace(absurd, started_at=1.0), 0.5) == []


def test_an_engine_that_stops_to_report_is_not_relied_on() -> None:
    """Its page is gone, and requests are still served."""
    of = followed(0.0)
    assert of.on_sent("soon", "e", RECENT, ttft=0.3, shows_end=True)
    assert not of.on_sent("late", "e", RECENT + 0.1, ttft=0.3, shows_end=True)


def test_answers_of_engines_that_report_no_more_take_no_memory() -> None:
    """Neither answers that end, nor endpoints that a reload has removed."""
    of = followed(*(0.001 * number for number in range(1000)), shows_end=True)
    for key in range(1000):
        of.on_ended(key, RECENT + 1.0)
    assert not of._engines["e"]._ended
    for number in range(100):
        of.on_report(f"e{number}", report(), 100.0 * number)
    assert len(of._engines) == 1


def test_nothing_is_followed_at_an_engine_that_reports_no_times() -> None:
    of = UnseenAnswers()
    assert not of.on_sent(1, "e", 0.0, ttft=0.3, shows_end=True)
    of.on_report("e", EngineLoad(running=1), 0.5)
    assert not of.on_sent(1, "e", 1.0, ttft=0.3, shows_end=True)
    assert (of.tokens(1, 2.0), of.on_ended(1, 2.0)) == (0, None)


def test_a_thousand_ends_at_once_cost_no_more_than_a_sort() -> None:
    """An engine that reports more ends than there are answers ends those that there are, as its gauges agree."""
    of = followed(*(0.001 * number for number in range(1000)))
    assert len(inferred(of, report(ended=(10**9, 1e9), running=0), 2.0)) == 1000
