"""Candidates in order of preference, computed on demand."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from policies.routing.candidates import RankedInput, Ranking, p50_of
from policies.scorers.scorers import CandidateInput, tie_break
from policies.types import Endpoint, Forecast, Load, PoolEstimate
from tests.policies.deciding import RATIOS

SEED, LEFT = 7, 1.0
NUMBERS = "p50 %.0f ms, chance %.3f"


def candidate(name: str, ttft: float) -> CandidateInput:
    load = Load(tpot=0.02)
    forecast = Forecast(ttft, RATIOS, load.tpot, samples=9, prefill=0.05)
    return CandidateInput(Endpoint(name, "main"), 0, load, PoolEstimate(1000), 0.1, 64, forecast)


def group(size: int) -> list[CandidateInput]:
    return [candidate(f"main/{number}", 0.1 * (number + 1)) for number in range(size)]


def later() -> list[RankedInput]:
    return [RankedInput(candidate("other/0", 0.3), 0.3, NUMBERS)]


SCORES = st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=6)


@given(SCORES, st.lists(st.integers(0, 6), max_size=4))
def test_whatever_is_asked_for_first_the_order_is_the_same(scores: list[float], asked: list[int]) -> None:
    """By score, ties by the luck of the request, and then what was put behind."""
    members = group(len(scores))
    ranked = Ranking(SEED, LEFT, members, scores, NUMBERS, later, 1)
    for at in asked:
        if at < len(ranked):
            assert p50_of(ranked, at) == ranked[at].forecast.p50
    ties = [(score, tie_break(SEED, p.endpoint.id), p.endpoint.id) for score, p in zip(scores, members, strict=True)]
    assert [candidate.endpoint.id for candidate in ranked] == [name for _, _, name in sorted(ties)] + ["other/0"]
    assert [candidate.score for candidate in ranked] == [*sorted(scores), 0.3]
    assert p50_of(tuple(ranked), 0) == ranked[0].forecast.p50


def test_a_candidate_says_all_that_is_known_of_it() -> None:
    """And why it stands where it stands."""
    (made,) = Ranking(SEED, LEFT, [candidate("main/0", 0.2)], [0.5], NUMBERS)
    assert (made.endpoint.id, made.prompt_tokens, made.hit, made.uncached, made.price) == ("main/0", 1000, 64, 936, 0.1)
    assert (made.forecast.p50, made.forecast.tpot, made.forecast.prefill, made.forecast.samples) == (0.2, 0.02, 0.05, 9)
    assert made.probability == made.forecast.probability(LEFT)
    assert made.reason == f"p50 200 ms, chance {made.probability:.3f}"


def test_rows_that_are_in_order_stay_so() -> None:
    """And two rankings are equal where their candidates are."""
    rows = [RankedInput(p, 0.0, NUMBERS) for p in reversed(group(3))]
    ranked = Ranking.of(rows, LEFT)
    assert [candidate.endpoint.id for candidate in ranked] == ["main/2", "main/1", "main/0"]
    assert ranked[-1].endpoint.id == "main/0"
    assert ranked == tuple(ranked) == ranked[:] == Ranking.of(rows, LEFT)
    assert ranked != Ranking.of(rows[:2], LEFT)


def test_who_stands_behind_the_first_is_told_why() -> None:
    """What separates them in the scorer's eyes; equals by what they hold of the prompt, or by luck."""
    members = group(4)
    members[3] = replace(members[3], hit=16)
    ranked = Ranking(SEED, LEFT, members, [0.18, 0.18, 0.25, 0.18 + 48e-9], NUMBERS, later, 1)
    behind = {candidate.endpoint.id: candidate.reason.partition("; ")[2] for candidate in ranked}
    drawn = ranked[0].endpoint.id
    assert behind == {
        drawn: "",
        ({"main/0", "main/1"} - {drawn}).pop(): "as good as the first of its tier, which luck drew",
        "main/3": "as good as the first of its tier, which holds 48 more tokens of the prompt",
        "main/2": "score 0.25, the first of its tier has 0.18",
        "other/0": "",
    }
    told = Ranking.of(
        Ranking(SEED, LEFT, members, [0.18, 0.18, 0.25, 0.18 + 48e-9], NUMBERS, later, 1).explained(), LEFT
    )
    assert told == ranked


def test_a_candidate_tells_what_was_ahead_of_it() -> None:
    """The load that it was weighed with, not one that is looked up later."""
    loaded = replace(candidate("main/0", 0.2), load=Load(queued_tokens=1234.0, running=3, waiting=2))
    (made,) = Ranking(SEED, LEFT, [loaded], [0.5], NUMBERS)
    assert (made.load.queued_tokens, made.load.running, made.load.waiting) == (1234.0, 3, 2)
