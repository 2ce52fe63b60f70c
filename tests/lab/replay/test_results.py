"""Statistics of a replay."""

from __future__ import annotations

from dataclasses import replace
from math import isnan
from typing import Any

import pytest

from lab.replay.results import ReplayOutcome, RequestResult, Results, quantile
from lab.traffic.traces import BLOCK, Arrival
from policies.types import PromptEstimate
from tests.support.builders import candidate, decided
from tests.support.replay_builders import route, scenario

AGENT = route()  # TTFT 3 s, TPOT 50 ms, total 30 s
BATCH = route("batch", workload="batch")


def result(ttft: float | None = 1.0, tpot: float = 0.02, number: int = 1, **more: Any) -> RequestResult:
    """An answer of 101 tokens."""
    given: dict[str, Any] = {"route": "agent", "arrived": 10.0, "prompt_tokens": 1000, "output_tokens": 101}
    if ttft is not None:
        given |= {"sent_at": 10.0, "first_at": 10.0 + ttft, "ended_at": 10.0 + ttft + 100 * tpot}
        given |= {"end": ReplayOutcome.COMPLETED, "endpoint": "main/0", "pool": "main"}
    return RequestResult(number, **{**given, **more})


def results(*results: RequestResult, seconds: float = 10.0, keep: int = 0) -> Results:
    return Results({"agent": AGENT, "batch": BATCH}, seconds, keep, list(results))


def test_attainment_is_of_all_that_were_offered() -> None:
    """A shed request counts as missed."""
    row = results(result(), result(), result(4.0), result(None, end=ReplayOutcome.SHED)).overall()
    assert (row.offered, row.attainment, row.sheds) == (4, 0.5, 1)


def test_good_is_both_budgets_met() -> None:
    """Goodput is good requests per second of offered traffic."""
    row = results(result(), result(tpot=0.06), result(3.5), seconds=4.0).overall()
    assert (row.good, row.goodput) == (pytest.approx(1 / 3), 0.25)


def test_an_answer_of_one_token_has_no_pace_to_miss() -> None:
    """An answer of fewer than two tokens counts as met."""
    assert results(result(output_tokens=1)).overall().good == 1.0


def test_lost_is_before_the_first_token_and_broken_after_it() -> None:
    """TTFT is met by an answer that breaks later; a broken answer is not good."""
    row = results(
        result(None, end=ReplayOutcome.LOST), result(end=ReplayOutcome.BROKEN, ended_at=None), result(None)
    ).overall()
    assert (row.lost, row.broken, row.unfinished, row.good) == (1, 1, 1, 0.0)
    assert row.attainment == pytest.approx(1 / 3)


def test_total_time_is_judged_where_it_is_promised() -> None:
    """A share of all requests offered to routes with a total budget; NaN for other routes."""
    slow = result(ended_at=41.0)
    rows = results(result(), slow, result(None, end=ReplayOutcome.LOST), result(route="batch")).rows()
    assert [row.name for row in rows] == ["agent", "batch", "all"]
    assert rows[0].total == pytest.approx(1 / 3)
    assert isnan(rows[1].total)


def test_a_route_without_budgets_has_no_part_in_the_whole() -> None:
    """A route without budgets is described by completed requests."""
    batch, overall = results(result(4.0), result(90.0, route="batch")).rows()[1:]
    assert (batch.completed, batch.output_rate, overall.offered, overall.good) == (1, 10.1, 1, 0.0)


def test_without_any_budget_the_whole_is_everything() -> None:
    """Without any budgeted route the row `all` covers all requests."""
    assert results(result(route="batch")).overall().offered == 1


def test_calibration_is_by_pool() -> None:
    """Share of TTFTs under the predicted p90, and median relative error of p50, from sending."""
    told = [
        result(1.0, p50=0.8, p90=1.2),
        result(2.0, p50=1.0, p90=1.5),
        result(1.0, p50=1.0, p90=2.0, endpoint="0", pool="api"),
    ]
    found = results(*told).calibration()
    assert [(c.pool, c.samples, c.coverage) for c in found] == [("api", 1, 1.0), ("main", 2, 0.5)]
    assert found[1].error == pytest.approx(1.0)


def test_regret_is_the_ttft_above_the_best_other_prediction() -> None:
    """Regret is TTFT from sending minus the best prediction of another candidate, at least 0."""
    assert result(2.0, alternative=0.5).regret == 1.5
    assert result(2.0, alternative=3.0).regret == 0.0
    assert result(2.0).regret == 0.0


def test_the_worst_decisions_are_kept() -> None:
    """The given number of decisions, the most regret first; of equal regret the earlier request."""
    found, decision = results(keep=2), decided(candidate())
    for number, regret in enumerate((1.0, 3.0, 3.0, 2.0, 0.0), 1):
        found.answered(result(5.0, number=number, alternative=5.0 - regret), decision, PromptEstimate({}))
    assert [worst.result.number for worst in found.worst()] == [2, 3]


def test_a_stretch_of_time_can_be_looked_at() -> None:
    """Requests are selected by arrival time."""
    found = results(result(arrived=1.0), result(arrived=5.0), result(arrived=9.0))
    assert found.between(4.0, 9.0).offered == 1


def test_quantiles_are_values_that_occurred() -> None:
    """Nearest rank; NaN without values."""
    assert (quantile([3.0, 1.0, 2.0], 0.5), quantile(range(100), 0.99)) == (2.0, 99)
    assert isnan(quantile([], 0.5))


def test_a_growing_budget_is_scored_by_the_tokens_that_are_new_in_the_trace() -> None:
    """Whatever a policy has cached: one that loses caches gets no more time."""
    growing = route(ttft={"budget": "1s", "per_1k_tokens": "100ms"})
    found = Results({"agent": growing}, 10.0)
    first, longer = (Arrival(0.0, tokens, 10, range(tokens // BLOCK), "agent") for tokens in (10_240, 20_480))
    new = [found.new_tokens(arrival) for arrival in (first, longer, longer)]
    assert new == [10_240, 10_240, BLOCK]
    assert found.met_ttft(result(2.0, new_tokens=new[0]))
    assert not found.met_ttft(result(2.1, new_tokens=new[0]))
    assert not found.met_ttft(result(2.0, new_tokens=new[2]))


@pytest.mark.parametrize(("per_1k", "met"), [(None, True), (0.0, False), (0.05, False), (0.2, True)])
def test_policies_can_be_scored_by_other_budgets_than_their_own(per_1k: float | None, met: bool) -> None:
    """Fixed ones, or growth that is the same for all; decisions stay those of the routes."""
    routes = {"agent": route(ttft={"budget": "1s", "per_1k_tokens": "100ms"})}
    compared = replace(scenario(), routes=routes, score_per_1k=per_1k)
    scored = Results(compared.scored_routes, 10.0)
    assert scored.met_ttft(result(2.0, new_tokens=10_000)) == met
    assert compared.with_scorer("ours").routes == routes
    assert compared.with_scorer("reference").routes == compared.scored_routes
