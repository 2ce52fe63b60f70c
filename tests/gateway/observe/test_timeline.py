"""Notes about a request in progress (stages, stalls, predictions); exactly one Record per request, on every path."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from time import monotonic

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.observe.metrics.loop_lag import LoopLag
from gateway.observe.record import AttemptRecord, Budgets, Record, RequestOutcome, Stage
from gateway.observe.record_columns import RECORD
from gateway.observe.timeline import RequestTimeline
from policies.types import FOREVER, QUANTILES, AttemptKind, AttemptOutcome, Completion, Decision, Forecast, Placement
from tests.support.builders import candidate, decided, request, route

pytestmark = pytest.mark.virtual_time


def stages(life: RequestTimeline) -> Mapping[Stage, float]:
    """Seconds so far."""
    life.add_up()
    return life.record.stages


BEFORE_FIRST_TOKEN = [stage for stage in Stage if stage is not Stage.STREAM]

# --------------------------------------------------------------------------- stages


@given(
    st.lists(st.tuples(st.sampled_from(BEFORE_FIRST_TOKEN), st.floats(-0.5, 0.5)), max_size=12),
    st.floats(-0.1, 1.0),
    st.floats(-0.1, 1.0),
)
def test_stages_sum_to_ttft_and_total(steps: list[tuple[Stage, float]], relay: float, stream: float) -> None:
    """By construction: each stage begins at the end of the one before, with any order of measured times."""
    life, at = RequestTimeline(Record(arrival=100.0)), 100.0
    latest = at
    for stage, step in steps:
        at += step
        latest = max(latest, at)
        life.close((stage, at))
    life.first_token_out(latest + max(relay, 0), 200)
    life.finished(RequestOutcome.COMPLETED, latest + max(relay, 0) + max(stream, 0))
    spent = stages(life)
    assert all(seconds >= 0 for seconds in spent.values())
    assert life.record.ttft == pytest.approx(sum(s for stage, s in spent.items() if stage is not Stage.STREAM))
    assert life.record.total == pytest.approx(sum(spent.values()))


def test_a_time_before_the_last_stage_counts_as_none() -> None:
    """A connection may have been opened before the decision was noted; time is never taken back."""
    life = RequestTimeline(Record(arrival=100.0))
    life.close((Stage.READ, 100.5))
    life.close((Stage.CONNECT, 100.2))
    life.close((Stage.SEND, 100.6))
    assert stages(life) == {Stage.READ: 0.5, Stage.CONNECT: 0.0, Stage.SEND: pytest.approx(0.1)}


def test_a_stage_that_is_closed_twice_adds_up() -> None:
    """A request may wait, try and wait again."""
    life = RequestTimeline(Record(arrival=100.0))
    for stage, at in ((Stage.QUEUE, 101.0), (Stage.DECIDE, 101.5), (Stage.QUEUE, 103.0)):
        life.close((stage, at))
    assert stages(life) == {Stage.QUEUE: 2.5, Stage.DECIDE: 0.5}


def test_end_stage_closes_a_stage_now() -> None:
    """Measured from the arrival."""
    life = RequestTimeline(Record(arrival=monotonic()))
    life.end_stage(Stage.READ)
    assert 0 <= stages(life)[Stage.READ] < 5


def test_a_request_without_a_first_token_has_no_stream_stage() -> None:
    """Time after the last stage is in the total alone."""
    life = RequestTimeline(Record(arrival=100.0))
    life.close((Stage.READ, 100.1))
    life.finished(RequestOutcome.SHED, 100.4, "too late")
    assert stages(life) == {Stage.READ: pytest.approx(0.1)}
    assert (life.record.end, life.record.error) == (RequestOutcome.SHED, "too late")
    assert life.record.total == pytest.approx(0.4)


def test_an_end_without_an_error_keeps_the_noted_error() -> None:
    """A reader aborted for not reading is recorded as client gone, with the reason."""
    life = RequestTimeline(Record(arrival=100.0, error="the client read nothing for 60 s"))
    life.finished(RequestOutcome.CLIENT_GONE, 101.0)
    assert life.record.error == "the client read nothing for 60 s"


# --------------------------------------------------------------------------- our own stalls


def test_a_stall_of_the_loop_is_noted_and_is_part_of_the_stages() -> None:
    """The longest stall before the first token; later stalls do not delay the request."""
    lag = LoopLag()
    life = RequestTimeline(Record(arrival=100.0), lag)
    lag.saw(0.02, 100.1)
    life.close((Stage.UPSTREAM, 100.2))
    assert life.stalled(100.2) == life.record.loop_lag == 0.02
    lag.saw(0.04, 100.25)
    life.first_token_out(100.3, 200)
    lag.saw(0.9, 101.5)
    life.finished(RequestOutcome.COMPLETED, 102.0)
    assert life.record.loop_lag == 0.04
    assert sum(stages(life).values()) == pytest.approx(life.record.total)


def test_a_request_without_a_first_token_notes_stalls_until_its_end() -> None:
    """A refusal waits for the loop too."""
    lag = LoopLag()
    life = RequestTimeline(Record(arrival=100.0), lag)
    lag.saw(0.02, 100.1)
    life.finished(RequestOutcome.SHED, 100.2)
    assert life.record.loop_lag == 0.02


# --------------------------------------------------------------------------- predictions


def test_a_decision_sets_the_budget_and_the_prediction_of_its_first_choice() -> None:
    """Both count from arrival, the gateway's own time included."""
    life = RequestTimeline(Record(arrival=100.0))
    chosen = candidate("small/b", 0.2, tokens=90, hit=32, to_load=(16, 0, 0), tier=1, probability=0.97)
    assert life.decided(decided(chosen, candidate(), deadline=100.8, at=100.01)).chosen is chosen
    found = life.record
    assert found.budgets.ttft == pytest.approx(0.8)
    assert found.placed.scorer == "predicted"
    assert (found.endpoint.pool, found.endpoint.id, found.placed.tier, found.placed.chance) == (
        "small",
        "small/b",
        1,
        0.97,
    )
    assert (found.placed.prompt_tokens, found.placed.cached_tokens) == (90, 32)
    assert RECORD.view(found)["cached_tokens_to_load"] == {"cpu": 16}
    assert found.placed.ttft_p50 == pytest.approx(0.01 + 0.2)
    assert found.placed.ttft_p90 == pytest.approx(0.01 + 0.2)


def test_a_decision_without_a_placement_has_no_prediction() -> None:
    """The budget still counts: a shed request is a miss."""
    life = RequestTimeline(Record(arrival=100.0))
    life.decided(Decision(Placement.SHED, 100.0, 100.5, (candidate(),)))
    assert (life.record.budgets.ttft, life.record.endpoint.pool, life.record.placed.ttft_p50) == (0.5, "-", None)


def test_a_route_without_a_budget_has_none_in_its_record() -> None:
    """FOREVER is no number to show."""
    life = RequestTimeline(Record(arrival=100.0))
    life.decided(decided(deadline=FOREVER))
    assert life.record.budgets.ttft is None


def test_the_attempt_that_won_owns_the_prediction() -> None:
    """A fallback is predicted from its start; time lost before is the failover stage, and time before the decision is
    queue."""
    life = RequestTimeline(Record(arrival=100.0))
    life.decided(decided(candidate("small/a"), at=100.1))
    life.close((Stage.DECIDE, 100.12))
    life.attempt_ended(AttemptRecord(1, AttemptKind.PRIMARY, "small/a", "small", 0.1, 0.5, AttemptOutcome.SILENT))
    other = candidate("large/c", 0.3, tier=1)
    life.won(other, "m", opened=100.5, connected=100.52, sent=100.53, first_in=100.9)
    found = life.record
    assert (found.endpoint.pool, found.endpoint.id, found.placed.tier) == ("large", "large/c", 1)
    assert found.placed.ttft_p50 == pytest.approx(0.5 + 0.3)
    assert stages(life) == {
        Stage.QUEUE: pytest.approx(0.1),
        Stage.DECIDE: pytest.approx(0.02),
        Stage.FAILOVER: pytest.approx(0.38),
        Stage.CONNECT: pytest.approx(0.02),
        Stage.SEND: pytest.approx(0.01),
        Stage.UPSTREAM: pytest.approx(0.37),
    }


def test_time_held_by_a_rate_limit_is_not_queue_time() -> None:
    """A stage of the time before the decision; the sum stays the same."""
    life = RequestTimeline(Record(arrival=100.0))
    life.held(100.9, {"prefill": 0.3, "rate_limit": 0.5})
    assert stages(life) == {Stage.QUEUE: pytest.approx(0.4), Stage.RATE_LIMIT: pytest.approx(0.5)}
    assert RECORD.view(life.record)["held_ms"] == {"prefill": 300.0, "rate_limit": 500.0}


def test_time_in_the_queue_adds_up_over_a_reload() -> None:
    """By rule, and in both stages."""
    life = RequestTimeline(Record(arrival=100.0))
    life.held(100.4, {"prefill": 0.1, "rate_limit": 0.2})
    life.close((Stage.ESTIMATE, 100.5))
    life.held(100.9, {"rate_limit": 0.3})
    assert life.record.held == {"prefill": pytest.approx(0.1), "rate_limit": pytest.approx(0.5)}
    spent = {Stage.QUEUE: 0.3, Stage.RATE_LIMIT: 0.5, Stage.ESTIMATE: 0.1}
    assert stages(life) == {stage: pytest.approx(seconds) for stage, seconds in spent.items()}


@pytest.mark.parametrize(
    ("ending", "endpoint", "limited"),
    [
        (AttemptOutcome.RATE_LIMITED, "api/a", 0.4),
        (AttemptOutcome.RATE_LIMITED, "api/other", None),
        (AttemptOutcome.SILENT, "api/a", None),
    ],
)
def test_the_wait_for_an_endpoint_that_refused_is_the_rate_limits(
    ending: AttemptOutcome, endpoint: str, limited: float | None
) -> None:
    """The refusal named the wait; the refused attempt itself is failover, as any lost attempt."""
    life = RequestTimeline(Record(arrival=100.0))
    life.decided(decided(candidate("api/a"), at=100.0))
    life.attempt_ended(AttemptRecord(1, AttemptKind.PRIMARY, endpoint, "api", 0.0, 0.1, ending))
    life.won(candidate("api/a"), "m", opened=100.5, connected=100.5, sent=100.5, first_in=100.9)
    spent = stages(life)
    assert spent.get(Stage.RATE_LIMIT) == (limited and pytest.approx(limited))
    assert spent[Stage.FAILOVER] + spent.get(Stage.RATE_LIMIT, 0.0) == pytest.approx(0.5)


def test_the_first_choice_keeps_its_first_prediction() -> None:
    """The prediction dates from the decision, not from the connection."""
    life = RequestTimeline(Record(arrival=100.0))
    chosen = candidate("small/a", 0.2)
    life.decided(decided(chosen, at=100.1))
    life.won(chosen, "m", opened=100.4, connected=100.4, sent=100.4, first_in=100.5)
    assert life.record.placed.ttft_p50 == pytest.approx(0.3)
    assert Stage.FAILOVER not in stages(life)


def test_a_forecast_is_kept_at_both_quantiles() -> None:
    """p50 and p90, on which calibration is measured."""
    life = RequestTimeline(Record(arrival=100.0))
    ratios = tuple(1.0 + i / 10 for i in range(len(QUANTILES)))
    life.decided(decided(replace(candidate(), forecast=Forecast(0.1, ratios)), at=100.0))
    assert life.record.placed.ttft_p50 == pytest.approx(0.16)
    assert life.record.placed.ttft_p90 == pytest.approx(0.20)


def test_the_whole_answer_is_forecast_from_arrival() -> None:
    """Of the attempt that answers, its end counted like `total`; and the first token of such a route has no budget of
    its own, though its queue gives it a deadline."""
    ones = (1.0,) * len(QUANTILES)
    life = RequestTimeline(Record(arrival=100.0))
    life.record.budgets = Budgets(total=60.0)
    tpots = {"small/a": 0.01, "small/b": 0.02}
    made = replace(
        decided(candidate("small/a", 0.5), deadline=150.0, at=100.25),
        completion=lambda each: Completion(Forecast(0.5), tuple(100 * x for x in ones), ones, tpots[each.endpoint.id]),
    )
    life.decided(made)
    assert (life.record.placed.total_p50, life.record.placed.total_p90) == (1.75, 1.75)
    assert life.record.budgets.ttft is None
    life.won(candidate("small/b"), "m", opened=101.0, connected=101.0, sent=101.0, first_in=101.5)
    assert life.record.placed.total_p90 == pytest.approx(3.5)


def test_labels_and_budgets_come_from_the_configuration() -> None:
    """None of the caller's own words becomes a label."""
    own = route("passthrough", workload="agent", tpot={"budget": "50ms"}, gap={"budget": "1s"}, total={"budget": "30s"})
    life = RequestTimeline(Record())
    found = life.record
    life.record.tenant = "web"
    life.routed(request(model="whatever", stream=True), own)
    assert (found.route.name, found.route.workload, found.tenant, found.asked.stream) == (
        "passthrough",
        "agent",
        "web",
        True,
    )
    assert (found.budgets.tpot, found.budgets.gap, found.budgets.total) == (0.05, 1.0, 30.0)
    life.routed(request({"x-slo-tpot-ms": "20"}), own)
    assert found.budgets.tpot == 0.02
    life.routed(request(), route())
    assert (found.budgets.tpot, found.budgets.gap, found.budgets.total) == (None, None, None)


def test_the_time_to_be_done_by_is_the_budget_of_the_whole_answer() -> None:
    """Of a request without a TTFT budget; a caller's own time counts."""
    life, soon = RequestTimeline(Record()), request()
    soon.by = 60.0
    for asked, on, budget in (
        (request(), route("nightly", by="6h"), 21600.0),
        (soon, route("nightly", by="6h"), 60.0),
        (soon, route(ttft={"budget": "1s"}), None),
    ):
        life.routed(asked, on)
        assert life.record.budgets.total == budget
