"""Where a request's time went, and whether it kept what was promised."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from time import monotonic

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.observe.looplag import LoopLag
from gateway.observe.record import UNSPENT, AttemptRecord, End, Life, Record, Stage
from gateway.strictjson import encode
from policies.facts import FOREVER, QUANTILES, AttemptKind, Decision, Ending, Forecast, Outcome
from tests.gateway.builders import candidate, decided, record

BEFORE_FIRST_TOKEN = [stage for stage in Stage if stage is not Stage.STREAM]

# --------------------------------------------------------------------------- the verdict


@pytest.mark.parametrize(
    ("known", "met"),
    [
        ({"ttft": 0.8}, True),
        ({"ttft": 0.800001}, False),
        ({"ttft": 0.1, "ttft_budget": None}, None),
        ({"end": End.SHED, "ttft": None}, False),
        ({"end": End.UNAVAILABLE, "ttft": None}, False),
        ({"end": End.FAILED, "ttft": None}, False),
        ({"end": End.INTERNAL, "ttft": None}, False),
        ({"end": End.REFUSED, "ttft": None}, None),
        ({"end": End.CLIENT_GONE, "ttft": None, "total": 0.8}, None),
        ({"end": End.CLIENT_GONE, "ttft": None, "total": 0.81}, False),
        ({"end": End.CLIENT_GONE, "ttft": 0.2}, True),
        ({"end": End.CLIENT_GONE, "ttft": 0.9}, False),
        ({"end": End.UPSTREAM_BROKE, "ttft": 0.2}, True),
        ({"stream": False, "ttft": 0.2}, None),
        ({"stream": False, "ttft": 0.9}, None),
        ({"stream": False, "end": End.SHED, "ttft": None}, False),
        ({"stream": False, "end": End.REFUSED, "ttft": None}, None),
    ],
)
def test_ttft_is_met_by_a_first_token_within_the_budget(known: dict[str, object], met: bool | None) -> None:
    """All offered requests count: shed, failed and given up after the deadline are misses; at fault themselves, or
    given up before it, are neither. An answer that comes whole has no first token."""
    assert record(**known).ttft_met is met


@pytest.mark.parametrize(
    ("known", "met"),
    [
        ({"tpot": 0.05}, True),
        ({"tpot": 0.051}, False),
        ({"tpot": None}, True),
        ({"tpot": 0.01, "tpot_budget": None}, None),
        ({"tpot": 0.01, "stream": False}, None),
        ({"tpot": None, "ttft": None, "end": End.FAILED}, None),
        ({"tpot": 0.06, "end": End.UPSTREAM_BROKE}, False),
    ],
)
def test_tpot_is_met_within_its_budget_or_by_fewer_than_two_tokens(known: dict[str, object], met: bool | None) -> None:
    """Under two tokens there is no gap to judge, which counts as met; without a token there is nothing to judge."""
    assert record(**{"tpot_budget": 0.05, **known}).tpot_met is met


@pytest.mark.parametrize(
    ("known", "met"),
    [
        ({"total": 5.0}, True),
        ({"total": 5.1}, False),
        ({"total": 1.0, "stream": False}, True),
        ({"total": 1.0, "total_budget": None}, None),
        ({"total": 1.0, "end": End.UPSTREAM_BROKE}, False),
        ({"total": 1.0, "end": End.FAILED, "ttft": None}, False),
        ({"total": 0.1, "end": End.SHED, "ttft": None}, False),
        ({"total": 0.1, "end": End.UNAVAILABLE, "ttft": None}, False),
        ({"total": 0.1, "end": End.INTERNAL, "ttft": None}, False),
        ({"total": 0.1, "end": End.REFUSED, "ttft": None}, None),
        ({"total": 9.0, "end": End.CLIENT_GONE}, None),
    ],
)
def test_total_is_met_by_a_complete_answer_within_the_budget(known: dict[str, object], met: bool | None) -> None:
    """Streamed or whole; a caller that left says nothing about it."""
    assert record(**{"total_budget": 5.0, **known}).total_met is met


# --------------------------------------------------------------------------- stages


@given(
    st.lists(st.tuples(st.sampled_from(BEFORE_FIRST_TOKEN), st.floats(-0.5, 0.5)), max_size=12),
    st.floats(-0.1, 1.0),
    st.floats(-0.1, 1.0),
)
def test_stages_sum_to_ttft_and_total(steps: list[tuple[Stage, float]], relay: float, stream: float) -> None:
    """By construction: each begins where the one before it ended, however late or early its end was taken."""
    life, at = Life(Record(arrival=100.0)), 100.0
    latest = at
    for stage, step in steps:
        at += step
        latest = max(latest, at)
        life.close(stage, at)
    life.first_token_out(latest + max(relay, 0))
    life.finished(End.COMPLETED, latest + max(relay, 0) + max(stream, 0))
    stages = life.record.stages
    assert all(seconds >= 0 for seconds in stages.values())
    assert life.record.ttft == pytest.approx(sum(s for stage, s in stages.items() if stage is not Stage.STREAM))
    assert life.record.total == pytest.approx(sum(stages.values()))


def test_a_time_before_the_last_stage_counts_as_none() -> None:
    """A connection may have been opened before the decision was noted; time is never taken back."""
    life = Life(Record(arrival=100.0))
    life.close(Stage.READ, 100.5)
    life.close(Stage.CONNECT, 100.2)
    life.close(Stage.SEND, 100.6)
    assert life.record.stages == {Stage.READ: 0.5, Stage.CONNECT: 0.0, Stage.SEND: pytest.approx(0.1)}


def test_a_stage_that_is_closed_twice_adds_up() -> None:
    """A request may wait, try and wait again."""
    life = Life(Record(arrival=100.0))
    for stage, at in ((Stage.QUEUE, 101.0), (Stage.DECIDE, 101.5), (Stage.QUEUE, 103.0)):
        life.close(stage, at)
    assert life.record.stages == {Stage.QUEUE: 2.5, Stage.DECIDE: 0.5}


def test_note_closes_a_stage_now_and_passes_the_value_on() -> None:
    """So that the straight line stays one."""
    life = Life(Record(arrival=monotonic()))
    body = b"x"
    assert life.note(Stage.READ, body) is body
    assert 0 <= life.record.stages[Stage.READ] < 5


def test_a_request_without_a_first_token_has_no_stream_stage() -> None:
    """What followed its last stage is in the total alone."""
    life = Life(Record(arrival=100.0))
    life.close(Stage.READ, 100.1)
    life.finished(End.SHED, 100.4, "too late")
    assert life.record.stages == {Stage.READ: pytest.approx(0.1)}
    assert (life.record.end, life.record.error) == (End.SHED, "too late")
    assert life.record.total == pytest.approx(0.4)


def test_an_end_without_an_error_keeps_what_was_said_before() -> None:
    """A reader that was cut off for reading nothing is a client that has gone, and the reason stands."""
    life = Life(Record(arrival=100.0, error="the client read nothing for 60 s"))
    life.finished(End.CLIENT_GONE, 101.0)
    assert life.record.error == "the client read nothing for 60 s"


# --------------------------------------------------------------------------- our own stalls


def test_a_stall_of_the_loop_is_told_and_is_part_of_the_stages() -> None:
    """The longest one before the first token; what comes later is not this request's to wait for."""
    lag = LoopLag()
    life = Life(Record(arrival=100.0), lag)
    lag.saw(0.02, 100.1)
    life.close(Stage.UPSTREAM, 100.2)
    assert life.stalled(100.2) == life.record.loop_lag == 0.02
    lag.saw(0.04, 100.25)
    life.first_token_out(100.3)
    lag.saw(0.9, 101.5)
    life.finished(End.COMPLETED, 102.0)
    assert life.record.loop_lag == 0.04
    assert sum(life.record.stages.values()) == pytest.approx(life.record.total)


def test_a_request_without_a_first_token_is_told_of_stalls_until_its_end() -> None:
    """A refusal waits for the loop too."""
    lag = LoopLag()
    life = Life(Record(arrival=100.0), lag)
    lag.saw(0.02, 100.1)
    life.finished(End.SHED, 100.2)
    assert life.record.loop_lag == 0.02


# --------------------------------------------------------------------------- what was believed


def test_a_decision_sets_the_budget_and_what_is_believed_of_its_first_choice() -> None:
    """Both count from arrival: the time that the gateway itself took is in them."""
    life = Life(Record(arrival=100.0))
    chosen = candidate("small/b", 0.2, tokens=90, hit=32, tier=1, chance=0.97)
    assert life.decided(decided(chosen, candidate(), deadline=100.8, at=100.01)).chosen is chosen
    found = life.record
    assert found.ttft_budget == pytest.approx(0.8)
    assert found.scorer == "predicted"
    assert (found.pool, found.endpoint, found.tier, found.chance) == ("small", "small/b", 1, 0.97)
    assert (found.prompt_tokens_estimated, found.cached_tokens_predicted) == (90, 32)
    assert found.ttft_predicted_p50 == pytest.approx(0.01 + 0.2)
    assert found.ttft_predicted_p90 == pytest.approx(0.01 + 0.2)


def test_a_decision_that_places_nothing_believes_nothing() -> None:
    """Its budget still counts: a shed request is a miss."""
    life = Life(Record(arrival=100.0))
    life.decided(Decision(Outcome.SHED, 100.0, 100.5, (candidate(),)))
    assert (life.record.ttft_budget, life.record.pool, life.record.ttft_predicted_p50) == (0.5, "-", None)


def test_a_route_without_a_budget_has_none_in_its_record() -> None:
    """FOREVER is no number to show."""
    life = Life(Record(arrival=100.0))
    life.decided(decided(deadline=FOREVER))
    assert life.record.ttft_budget is None


def test_the_attempt_that_won_owns_the_prediction() -> None:
    """A fallback is predicted from the moment it was sent; what was lost before is the failover stage, and before the
    decision was made the request waited."""
    life = Life(Record(arrival=100.0))
    life.decided(decided(candidate("small/a"), at=100.1))
    life.close(Stage.DECIDE, 100.12)
    life.record.attempts.append(AttemptRecord(1, AttemptKind.PRIMARY, "small/a", "small", 0.1, 0.5, Ending.SILENT))
    other = candidate("large/c", 0.3, tier=1)
    life.won(other, opened=100.5, connected=100.52, sent=100.53, first_in=100.9)
    found = life.record
    assert (found.pool, found.endpoint, found.tier) == ("large", "large/c", 1)
    assert found.ttft_predicted_p50 == pytest.approx(0.5 + 0.3)
    assert found.stages == {
        Stage.QUEUE: pytest.approx(0.1), Stage.DECIDE: pytest.approx(0.02), Stage.FAILOVER: pytest.approx(0.38),
        Stage.CONNECT: pytest.approx(0.02), Stage.SEND: pytest.approx(0.01), Stage.UPSTREAM: pytest.approx(0.37),
    }  # fmt: skip


def test_what_a_rate_limit_kept_back_is_no_queue_of_ours() -> None:
    """Of the time before the decision that part is its own stage; the sum stays what it was."""
    life = Life(Record(arrival=100.0))
    life.decided(replace(decided(candidate("small/a"), at=100.9), limited=0.5))
    assert life.record.stages == {Stage.QUEUE: pytest.approx(0.4), Stage.RATE_LIMIT: pytest.approx(0.5)}


@pytest.mark.parametrize(
    ("ending", "endpoint", "limited"),
    [
        (Ending.RATE_LIMITED, "api/a", 0.4),
        (Ending.RATE_LIMITED, "api/other", None),
        (Ending.SILENT, "api/a", None),
    ],
)
def test_the_wait_for_an_endpoint_that_refused_is_the_rate_limits(
    ending: Ending, endpoint: str, limited: float | None
) -> None:
    """It had said for how long; what the refused attempt itself took is failover, as any other that was lost."""
    life = Life(Record(arrival=100.0))
    life.decided(decided(candidate("api/a"), at=100.0))
    life.record.attempts.append(AttemptRecord(1, AttemptKind.PRIMARY, endpoint, "api", 0.0, 0.1, ending))
    life.won(candidate("api/a"), opened=100.5, connected=100.5, sent=100.5, first_in=100.9)
    stages = life.record.stages
    assert stages.get(Stage.RATE_LIMIT) == (limited and pytest.approx(limited))
    assert stages[Stage.FAILOVER] + stages.get(Stage.RATE_LIMIT, 0.0) == pytest.approx(0.5)


def test_the_first_choice_keeps_its_first_prediction() -> None:
    """It was believed when it was decided, not when it had connected."""
    life = Life(Record(arrival=100.0))
    chosen = candidate("small/a", 0.2)
    life.decided(decided(chosen, at=100.1))
    life.won(chosen, 100.4, 100.4, 100.4, 100.5)
    assert life.record.ttft_predicted_p50 == pytest.approx(0.3)
    assert Stage.FAILOVER not in life.record.stages


# --------------------------------------------------------------------------- as it is shown


def test_a_record_is_shown_flat_and_in_milliseconds() -> None:
    """What an operator greps for: no nesting but for stages and attempts."""
    attempt = AttemptRecord(2, AttemptKind.HEDGE, "small/b", "small", 0.1, 0.25, Ending.CANCELLED)
    shown = record(spent=[0.00125, *UNSPENT[1:]], attempts=[attempt], tpot=0.0125, tpot_budget=0.05).as_json()
    names = ("request_id", "end", "status", "ttft_ms", "ttft_budget_ms", "total_ms", "tpot_ms")
    assert {name: shown[name] for name in names} == {
        "request_id": "req-1", "end": "completed", "status": 200, "ttft_ms": 200.0, "ttft_budget_ms": 800.0,
        "total_ms": 1000.0, "tpot_ms": 12.5,
    }  # fmt: skip
    assert shown["stages_ms"] == {"read": 1.25}
    assert shown["attempts"] == [
        {"number": 2, "kind": "hedge", "endpoint": "small/b", "opened_ms": 100.0, "ended_ms": 250.0,
         "ending": "cancelled"}
    ]  # fmt: skip
    assert (shown["ttft_met"], shown["tpot_met"], shown["total_met"]) == (True, True, None)


def test_every_fact_of_a_record_is_shown_but_for_the_decision() -> None:
    """Which is for /explain; of times, only those that mean something outside this process."""
    shown = set(record().as_json())
    left_out = {"arrival", "decision", "tpot_budget", "total_budget", "spent", "trace", "quota"}
    for name in {f.name for f in fields(Record)} - left_out:
        assert name in shown or f"{name}_ms" in shown, name


def test_what_was_never_known_is_null() -> None:
    """Not zero, which would be a time."""
    shown = json.loads(encode(Record().as_json()))
    assert (shown["ttft_ms"], shown["route"], shown["ttft_met"]) == (None, "-", None)


def test_a_forecast_is_kept_at_both_quantiles() -> None:
    """p50 and p90, on which calibration is measured."""
    life = Life(Record(arrival=100.0))
    ratios = tuple(1.0 + i / 10 for i in range(len(QUANTILES)))
    life.decided(decided(replace(candidate(), forecast=Forecast(0.1, ratios)), at=100.0))
    assert life.record.ttft_predicted_p50 == pytest.approx(0.16)
    assert life.record.ttft_predicted_p90 == pytest.approx(0.20)
