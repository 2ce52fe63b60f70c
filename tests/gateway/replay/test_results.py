"""The figures of a replay, by the definitions of measurement."""

from __future__ import annotations

from math import isnan
from typing import Any

import pytest

from gateway.replay.results import ReplayOutcome, RequestResult, Results, quantile
from policies.types import PromptEstimate
from tests.gateway.builders import candidate, decided
from tests.gateway.replay.builders import route

AGENT = route()  # TTFT 3 s, TPOT 50 ms, total 30 s
BATCH = route("batch", workload="batch")


def result(ttft: float | None = 1.0, tpot: float = 0.02, number: int = 1, **more: Any) -> RequestResult:
    """An answer of 101 tokens."""
    given: dict[str, Any] = {"route": "agent", "arrived": 10.0, "prompt_tokens": 1000, "output_tokens": 101}
    if ttft is not None:
        given |= {"sent_at": 10.0, "first_at": 10.0 + ttft, "ended_at": 10.0 + ttft + 100 * tpot}
        given |= {"end": ReplayOutcome.COMPLETED, "endpoint": "main/0"}
    return RequestResult(number, **{**given, **more})


def results(*results: RequestResult, seconds: float = 10.0, keep: int = 0) -> Results:
    return Results({"agent": AGENT, "batch": BATCH}, seconds, keep, list(results))


def test_attainment_is_of_all_that_were_offered() -> None:
    """Refusing one is missing one."""
    row = results(result(), result(), result(4.0), result(None, end=ReplayOutcome.SHED)).overall()
    assert (row.offered, row.attainment, row.sheds) == (4, 0.5, 1)


def test_good_is_both_budgets_met() -> None:
    """And goodput is the good ones per second offered."""
    row = results(result(), result(tpot=0.06), result(3.5), seconds=4.0).overall()
    assert (row.good, row.goodput) == (pytest.approx(1 / 3), 0.25)


def test_an_answer_of_one_token_has_no_pace_to_miss() -> None:
    """It counts as met."""
    assert results(result(output_tokens=1)).overall().good == 1.0


def test_lost_is_before_the_first_token_and_broken_after_it() -> None:
    """Two different promises: the first is never to be broken by a dying engine."""
    row = results(
        result(None, end=ReplayOutcome.LOST), result(end=ReplayOutcome.BROKEN, ended_at=None), result(None)
    ).overall()
    assert (row.lost, row.broken, row.unfinished, row.good) == (1, 1, 1, 0.0)
    assert row.attainment == pytest.approx(1 / 3)


def test_total_time_is_judged_where_it_is_promised() -> None:
    """Of all offered to such a route; elsewhere there is nothing to meet."""
    slow = result(ended_at=41.0)
    rows = results(result(), slow, result(None, end=ReplayOutcome.LOST), result(route="batch")).rows()
    assert [row.name for row in rows] == ["agent", "batch", "all"]
    assert rows[0].total == pytest.approx(1 / 3)
    assert isnan(rows[1].total)


def test_a_route_without_budgets_has_no_part_in_the_whole() -> None:
    """It is shown by what it completed."""
    batch, overall = results(result(4.0), result(90.0, route="batch")).rows()[1:]
    assert (batch.completed, batch.output_rate, overall.offered, overall.good) == (1, 10.1, 1, 0.0)


def test_without_any_budget_the_whole_is_everything() -> None:
    """Or there would be no row to read."""
    assert results(result(route="batch")).overall().offered == 1


def test_calibration_is_by_pool() -> None:
    """The share within the predicted p90, of what was sent; and by how much the median was off."""
    told = [
        result(1.0, p50=0.8, p90=1.2),
        result(2.0, p50=1.0, p90=1.5),
        result(1.0, p50=1.0, p90=2.0, endpoint="api/0"),
    ]
    found = results(*told).calibration()
    assert [(c.pool, c.samples, c.coverage) for c in found] == [("api", 1, 1.0), ("main", 2, 0.5)]
    assert found[1].error == pytest.approx(1.0)


def test_regret_is_what_the_best_alternative_would_have_saved() -> None:
    """As predicted then, from the sending on; a choice that was the best is not regretted."""
    assert result(2.0, alternative=0.5).regret == 1.5
    assert result(2.0, alternative=3.0).regret == 0.0
    assert result(2.0).regret == 0.0


def test_the_worst_decisions_are_kept() -> None:
    """So many, the worst first; of equals the earlier."""
    found, decision = results(keep=2), decided(candidate())
    for number, regret in enumerate((1.0, 3.0, 3.0, 2.0, 0.0), 1):
        found.answered(result(5.0, number=number, alternative=5.0 - regret), decision, PromptEstimate({}))
    assert [worst.result.number for worst in found.worst()] == [2, 3]


def test_a_stretch_of_time_can_be_looked_at() -> None:
    """By arrival."""
    found = results(result(arrived=1.0), result(arrived=5.0), result(arrived=9.0))
    assert found.between(4.0, 9.0).offered == 1


def test_quantiles_are_values_that_occurred() -> None:
    """Nearest rank; nothing has none."""
    assert (quantile([3.0, 1.0, 2.0], 0.5), quantile(range(100), 0.99)) == (2.0, 99)
    assert isnan(quantile([], 0.5))
