"""Candidates in order of preference, described on demand."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from policies.routing.ranking import Ranking, p50_of, ranked
from policies.scorers.scorers import tie_break
from policies.types import Candidate, Endpoint, Forecast, Load
from tests.support.decision_fleet import RATIOS

SEED, LEFT = 7, 1.0
NUMBERS = "p50 %.0f ms, chance %.3f"


def candidate(name: str, ttft: float) -> Candidate:
    load = Load(tpot=0.02)
    forecast = Forecast(ttft, RATIOS, load.tpot, samples=9, prefill=0.05)
    return Candidate(
        endpoint=Endpoint(name, "main"),
        tier=0,
        prompt_tokens=1000,
        hit=64,
        forecast=forecast,
        probability=forecast.probability(LEFT),
        price=0.1,
        load=load,
    )


def group(size: int) -> list[Candidate]:
    return [candidate(f"main/{number}", 0.1 * (number + 1)) for number in range(size)]


def later() -> list[Candidate]:
    return [ranked(candidate("other/0", 0.3), 0.3, NUMBERS)]


SCORES = st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=6)


@given(SCORES, st.lists(st.integers(0, 6), max_size=4))
def test_the_order_does_not_depend_on_which_rank_is_read_first(scores: list[float], asked: list[int]) -> None:
    """By score, ties by the sequence number of the request, then fallbacks."""
    members = group(len(scores))
    ranking = Ranking(members, scores, SEED, NUMBERS, later, 1)
    for at in asked:
        if at < len(ranking):
            assert p50_of(ranking, at) == ranking[at].forecast.p50
    ties = [(score, tie_break(SEED, p.endpoint.id), p.endpoint.id) for score, p in zip(scores, members, strict=True)]
    assert [candidate.endpoint.id for candidate in ranking] == [name for _, _, name in sorted(ties)] + ["other/0"]
    assert [candidate.score for candidate in ranking] == [*sorted(scores), 0.3]
    assert p50_of(tuple(ranking), 0) == ranking[0].forecast.p50


def test_a_ranked_candidate_keeps_its_inputs() -> None:
    """Tokens, hit, price, forecast and probability, with the reason of the rank."""
    (made,) = Ranking([candidate("main/0", 0.2)], [0.5], SEED, NUMBERS)
    assert (made.endpoint.id, made.prompt_tokens, made.hit, made.uncached, made.price) == ("main/0", 1000, 64, 936, 0.1)
    assert (made.forecast.p50, made.forecast.tpot, made.forecast.prefill, made.forecast.samples) == (0.2, 0.02, 0.05, 9)
    assert made.probability == made.forecast.probability(LEFT)
    assert made.reason == f"p50 200 ms, chance {made.probability:.3f}"


def test_fallbacks_keep_their_order() -> None:
    """Rankings with equal candidates are equal."""
    rows = [ranked(p, 0.0, NUMBERS) for p in reversed(group(3))]
    ranking = Ranking([], [], SEED, NUMBERS, lambda: rows, len(rows))
    assert [candidate.endpoint.id for candidate in ranking] == ["main/2", "main/1", "main/0"]
    assert ranking[-1].endpoint.id == "main/0"
    assert ranking == tuple(ranking) == tuple(rows)
    assert ranking == Ranking([], [], SEED, NUMBERS, lambda: rows, len(rows))
    assert ranking != Ranking([], [], SEED, NUMBERS, lambda: rows[:2], 2)


def test_a_lower_rank_names_its_difference_to_the_first() -> None:
    """The difference in score; for equal scores, the cached tokens or the random tie-break."""
    members = group(4)
    members[3] = replace(members[3], hit=16)
    ranking = Ranking(members, [0.18, 0.18, 0.25, 0.18 + 48e-9], SEED, NUMBERS, later, 1)
    behind = {candidate.endpoint.id: candidate.reason.partition("; ")[2] for candidate in ranking}
    drawn = ranking[0].endpoint.id
    assert behind == {
        drawn: "",
        ({"main/0", "main/1"} - {drawn}).pop(): "as good as the first of its tier, which luck drew",
        "main/3": "as good as the first of its tier, which holds 48 more tokens of the prompt",
        "main/2": "score 0.25, the first of its tier has 0.18",
        "other/0": "",
    }


def test_a_ranked_candidate_keeps_the_load_of_its_decision() -> None:
    """Not a load that is looked up later."""
    loaded = replace(candidate("main/0", 0.2), load=Load(queued_tokens=1234.0, running=3, waiting=2))
    (made,) = Ranking([loaded], [0.5], SEED, NUMBERS)
    assert (made.load.queued_tokens, made.load.running, made.load.waiting) == (1234.0, 3, 2)
