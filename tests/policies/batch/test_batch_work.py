"""Batch work: requests with hours until their answer is due, which run in valleys while they have time."""

from __future__ import annotations

from typing import Any

import pytest

from policies.batch.batch_work import (
    ANSWERS,
    ARRIVALS_S,
    DEEP,
    HORIZONS,
    HURRY_FROM,
    PACED_S,
    PRIOR_RATE,
    PRIOR_S,
    RECHECK,
    SHALLOW,
    SHORT,
    Batch,
    BatchWork,
)
from policies.fair_share.fair_share import FairShare
from policies.latency.tpot import STALL_GRID
from policies.queue.queue_scheduler import QueueScheduler
from policies.queue.queued_request import QueuedRequest
from policies.types import Candidate, Forecast, Load, PoolEstimate, PromptEstimate, RequestView
from tests.support.queue_fixture import API, LARGE, ONE, PROMPT, START, TWO, QueueFixture, route

pytestmark = pytest.mark.virtual_time

NIGHTLY: dict[str, Any] = {"budget": None, "by": "6h", "name": "nightly"}
BUSY: dict[str, Any] = {"since": 10.0, "token": 0.025, "pace": 0.05}  # 0.6 of the pace that the engine may take


def waiting(number: int, due: float, prefill_s: float = 1.0, answer_s: float = 0.0) -> QueuedRequest:
    view, estimate = RequestView(START), PromptEstimate({"small": PoolEstimate(100)})
    queued = QueuedRequest(number, view, estimate, route(None, by=f"{due:g}s"), number)
    queued.prefill_s, queued.answer_s = prefill_s, answer_s
    return queued


# ---------------------------------------------------------------- in a valley


def test_batch_work_begins_at_once_on_an_idle_fleet() -> None:
    """Waiting would gain nothing."""
    assert QueueFixture().enter("batch", **NIGHTLY) == ["batch"]


@pytest.mark.parametrize("one_route", [True, False])
def test_the_earliest_deadline_begins_first_whenever_it_came(one_route: bool) -> None:
    """Of one tenant, on one route or several."""
    queue = QueueFixture()
    [*keys] = queue.fill(ONE)
    for name, by in (("late", "6h"), ("early", "1h"), ("middle", "2h")):
        queue.enter(name, budget=None, by=by, name="nightly" if one_route else by)
    queue.first_tokens(*keys)
    order = [served := queue.release()]
    while queue.best_effort:
        queue.first_tokens(*served)
        order.append(served := queue.release(0.05))
    assert order == [["early"], ["middle"], ["late"]]


def test_batch_work_waits_where_the_pace_of_answers_leaves_room_for_requests_without_a_deadline() -> None:
    """Answers at 0.6 of their pace: another would not miss by it, and the next requests in time might."""
    queue = QueueFixture()
    answers = queue.decode(**BUSY)
    assert queue.enter("batch", **NIGHTLY) == []
    assert queue.hold("batch") == "valley"
    assert queue.enter("patient", budget=None) == ["patient"]
    queue.end(*answers)
    assert queue.release(20.0) == ["batch"]


def test_batch_work_takes_any_engine_of_its_tier_that_is_in_a_valley() -> None:
    """The fastest one, with its prompt in the cache, is not."""
    queue, blocks = QueueFixture(endpoints=(ONE, TWO)), tuple(range(PROMPT // 16))
    queue.enter("before", pinned=ONE.id, blocks=blocks)
    queue.complete("before")
    queue.decode(ONE, **BUSY)
    assert queue.enter("batch", blocks=blocks, **NIGHTLY) == ["batch"]
    assert queue.destination("batch") == TWO.id


@pytest.mark.parametrize("by", ["6h", "60s"])
def test_a_pace_that_an_engine_never_keeps_holds_no_batch_work_where_nothing_runs(by: str) -> None:
    """20 ms per token, and a route that promises 5 ms: no answer there keeps it, with batch work or without."""
    queue = QueueFixture()
    queue.enter("chat", tpot={"budget": "5ms"})
    queue.complete("chat")
    queue.now += 20.0
    assert queue.enter("batch", budget=None, by=by) == ["batch"]


def test_batch_work_in_a_hurry_runs_beside_answers_of_an_engine_that_never_keeps_their_pace() -> None:
    """It has the turn of a late request."""
    queue = QueueFixture()
    queue.enter("chat", tpot={"budget": "5ms"})
    queue.first_tokens("chat")
    queue.now += 20.0
    assert queue.enter("batch", budget=None, by="60s") == []
    queue.now += 60.0 - queue.held("batch").answer_s * 1.5
    assert queue.release() == ["batch"]


def test_batch_work_does_not_leave_the_preferred_tier_while_it_has_time() -> None:
    """An API behind would always take it, and is paid for."""
    queue = QueueFixture(endpoints=(ONE, API))
    queue.fill(ONE)
    assert queue.enter("batch", tiers=["small", "api"], prefer="cost", **NIGHTLY) == []


def test_batch_work_with_time_comes_after_requests_without_a_deadline() -> None:
    """Its tenant has used less than theirs, and it came first."""
    queue = QueueFixture()
    queue.enter("before", tenant="web")
    queue.fill(ONE)
    queue.enter("batch", tenant="jobs", **NIGHTLY)
    queue.enter("patient", budget=None, tenant="web")
    queue.first_tokens("before", "small/1 a", "small/1 b")
    assert queue.release() == ["patient"]


def test_batch_work_does_not_begin_while_a_late_request_waits() -> None:
    """It waits for another engine; the next one may not."""
    queue = QueueFixture(endpoints=(ONE, TWO))
    keys = queue.fill(ONE)
    assert queue.enter("late", pinned=ONE.id, tokens=4000, budget=0.15) == []
    assert queue.enter("batch", **NIGHTLY) == []
    assert queue.hold("batch") == "valley"
    queue.first_tokens(*keys)
    assert queue.release() == ["late", "batch"]


# ---------------------------------------------------------------- as time runs out


def test_batch_work_no_longer_waits_for_a_valley_once_its_time_is_short() -> None:
    """It goes where an engine has room."""
    queue = QueueFixture()
    queue.decode(**BUSY)
    assert queue.enter("batch", budget=None, by="60s") == []
    queue.now += 60.0 - queue.held("batch").answer_s * 1.5
    queue.decode(**BUSY)
    assert queue.release() == ["batch"]


def test_batch_work_in_a_hurry_takes_another_tier() -> None:
    """At the price of the route's other tiers."""
    queue = QueueFixture(endpoints=(ONE, LARGE))
    queue.fill(ONE)
    assert queue.enter("batch", budget=None, by="60s", tiers=["small", "large"], prefer="cost") == []
    queue.fill(ONE)
    queue.now += 60.0 - queue.held("batch").answer_s * 1.2
    queue.send("again", ONE, PROMPT * 4, queue.now)
    assert queue.release() == ["batch"]
    assert queue.destination("batch") == LARGE.id


def test_batch_work_uses_up_nobody_s_share() -> None:
    """Otherwise its tenant would be an active one, beside which the tenant of the chats is above its share: what comes
    from that is treated as late."""
    queue, share = QueueFixture(), FairShare()
    queue.scheduler = QueueScheduler((Batch(), share))
    for name, more in (("batch", NIGHTLY), ("patient", {"budget": None})):
        queue.enter(name, tenant="jobs", **more)
        queue.complete(name)
        assert (share.use.of("jobs") > 0) is (name == "patient")


def test_tenants_of_batch_work_take_turns() -> None:
    """By what each has lately used for such work: early deadlines of one hold up no other."""
    queue = QueueFixture()
    [*keys] = queue.fill(ONE)
    for name in ("x1", "x2", "y1"):
        queue.enter(name, tenant=name[0], budget=None, by="1h" if name[0] == "x" else "6h", name="nightly")
    queue.first_tokens(*keys)
    order = [served := queue.release()]
    while queue.best_effort:
        queue.first_tokens(*served)
        order.append(served := queue.release(0.05))
    assert order == [["x1"], ["y1"], ["x2"]]


def test_work_that_leaves_the_queue_makes_no_other_hurry() -> None:
    """It is not begun, and no longer work to be done by its deadline."""
    queue, batch = QueueFixture(), Batch()
    queue.scheduler = QueueScheduler((batch, FairShare()))
    queue.fill(ONE)
    queue.enter("batch", budget=None, by="6h")
    assert len(batch.work) == 1
    queue.leave("batch")
    assert len(batch.work) == 0


def test_work_hurries_where_the_measured_rate_leaves_it_little_time() -> None:
    """By PRIOR_RATE, 100 s of work take 50 s; nothing begins, so the rate falls, and the time left too."""
    work = BatchWork()
    queue = [waiting(number, 100.0, prefill_s=5.0) for number in range(20)]
    for queued in queue:
        work.add(queued, START)
    found = [work.hurry(queue[0], START + passed) for passed in (0.0, 8.0, 30.0)]
    assert 100.0 / PRIOR_RATE == 50.0 < HURRY_FROM * 100.0
    assert found[0] == 0.0 < found[1] < 1.0 == found[2]


def test_work_before_a_deadline_in_danger_hurries_and_later_work_does_not() -> None:
    """What is due later waits for a valley."""
    work = BatchWork()
    before, endangered, later = waiting(0, 19.0), waiting(1, 20.0, prefill_s=50.0), waiting(2, 20_000.0)
    for queued in (later, before, endangered):
        work.add(queued, START)
    assert [work.hurry(queued, START) for queued in (before, endangered, later)] == [1.0, 1.0, 0.0]


def test_an_answer_that_cannot_end_in_time_makes_no_other_hurry() -> None:
    """It would take the place of those that can, and miss all the same."""
    work, hopeless, later = BatchWork(), waiting(1, 20.0, prefill_s=100.0, answer_s=30.0), waiting(2, 100.0)
    for queued in (hopeless, later):
        work.add(queued, START)
    assert [work.hurry(queued, START) for queued in (hopeless, later)] == [0.0, 0.0]


def test_time_for_the_answer_is_left() -> None:
    """ANSWERS times its expected length."""
    for answer_s, hurry in ((0.0, 0.0), (99.9 / ANSWERS, 1.0)):
        work, queued = BatchWork(), waiting(1, 100.0, answer_s=answer_s)
        work.add(queued, START)
        assert work.hurry(queued, START) == hurry


@pytest.mark.parametrize("hurry", [0.0, 0.5])
def test_a_valley_is_ever_less_deep_for_work_in_a_hurry(hurry: float) -> None:
    """Every limit moves from the deep valley to the shallow one."""
    work, limit = BatchWork(), DEEP.pressure + hurry * (SHALLOW.pressure - DEEP.pressure)
    found = [work.is_valley("small", 1, Load(tpot_pressure=limit + by), 0.05, hurry, START) for by in (-0.01, 0.01)]
    assert found == [True, False]


@pytest.mark.parametrize(
    "busy",
    [
        {"tpot_pressure": 0.5},
        {"kv_usage": 0.6},
        {"tpot": 0.03, "running": 1},
        {"expected_tpot_misses": (0.02,) * len(STALL_GRID)},
    ],
    ids=lambda busy: next(iter(busy)),
)
def test_whatever_others_may_need_soon_ends_a_valley(busy: dict[str, Any]) -> None:
    """The pace of answers, room in the KV cache, and the pace that requests in time have been promised there."""
    work, request = BatchWork(), waiting(1, 100.0)
    request.deadline, request.route = START, route(1.0, tpot={"budget": "50ms"})
    forecast = Forecast(0.1)
    work.on_arrival(request, Candidate(ONE, 0, 100, 0, forecast, 1.0, 0.0), START)
    assert work.is_valley("small", 1, Load(), 0.05, 0.0, START)
    assert not work.is_valley("small", 1, Load(**busy), 0.05, 0.0, START)


def test_a_pace_that_no_request_wanted_for_an_hour_is_forgotten() -> None:
    """Its route may be gone. One with a looser budget does not keep it."""
    work, paced = BatchWork(), Load(tpot=0.03, running=1)
    for at, budget in ((START, "50ms"), (START + PACED_S / 2, "80ms"), (START + PACED_S, "80ms")):
        request = waiting(1, 100.0)
        request.deadline, request.route = at, route(1.0, tpot={"budget": budget})
        work.on_arrival(request, Candidate(ONE, 0, 100, 0, Forecast(0.1), 1.0, 0.0), at)
        assert work.is_valley("small", 1, paced, 0.05, 0.0, at) is (at == START + PACED_S)
    assert not work.is_valley("small", 1, Load(tpot=0.05, running=1), 0.05, 0.0, at)


def test_a_long_prefill_waits_where_requests_in_time_come_often() -> None:
    """One of them would wait behind it. Those of the last minute count, and a short prefill stalls nobody."""
    work, request = BatchWork(), waiting(1, 100.0)
    request.deadline = START
    for second in range(60):
        work.on_arrival(request, Candidate(ONE, 0, 100, 0, Forecast(0.1), 1.0, 0.0), START + second)

    def is_valley(engines: int, prefill_s: float, later: float) -> bool:
        return work.is_valley("small", engines, Load(), prefill_s, 0.0, START + 60.0 + later)

    assert not is_valley(1, 1.0, later=0.0)
    assert is_valley(1, SHORT, later=0.0)
    assert is_valley(50, 1.0, later=0.0)
    assert is_valley(1, 1.0, later=4 * ARRIVALS_S)


def test_the_rate_is_that_of_as_long_a_past_as_time_is_left() -> None:
    """An hour in which engines took all work, and a minute in which they took none."""
    work, rest = BatchWork(), waiting(0, 100_000.0)
    work.add(rest, START)
    for number in range(1, 3601):
        queued = waiting(number, 50_000.0)
        work.add(queued, START + number)
        work.begin(queued, START + number)
    work.hurry(rest, START + 3900.0)
    assert work.wait(1.0, 3600.0) < 2.0
    assert work.wait(1.0, 60.0) > 60.0


def test_time_without_batch_work_says_nothing_of_the_rate() -> None:
    """A weekend without any leaves the rate of Friday."""
    work, queued = BatchWork(), waiting(1, 1000.0)
    before = work.wait(1.0, HORIZONS[0])
    work.add(queued, START + 200_000.0)
    assert work.wait(1.0, HORIZONS[0]) == before == pytest.approx(PRIOR_S / (PRIOR_S * PRIOR_RATE))


def test_all_work_is_weighed_once_a_second_however_many_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands may wait, and every event of the gateway asks for some."""
    weighed, weigh = list[float](), BatchWork._weigh

    def counted(self: BatchWork, now: float) -> None:
        weighed.append(now)
        weigh(self, now)

    monkeypatch.setattr(BatchWork, "_weigh", counted)
    work, queued = BatchWork(), waiting(1, 1000.0)
    work.add(queued, START)
    for _ in range(100):
        work.hurry(queued, START)
    work.hurry(queued, START + RECHECK)
    assert weighed == [START, START + RECHECK]
