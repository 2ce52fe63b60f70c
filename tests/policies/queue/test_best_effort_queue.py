"""The best-effort queue: requests that can no longer meet their deadline, and requests without a deadline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from policies.queue import best_effort_queue, hold_rules, queue_scheduler
from policies.queue.late_work import LONG as LONGEST_SHORT
from policies.queue.queued_request import HoldRule, QueuedRequest
from policies.types import Candidate, Endpoint, Forecast, Placement, PoolEstimate, PrefixBlocks
from tests.support.counted_calls import counted_calls
from tests.support.queue_fixture import API, LARGE, ONE, PROMPT, START, TWO, QueueFixture, count_decisions

pytestmark = pytest.mark.virtual_time

LATE: dict[str, Any] = {"tokens": 4000, "budget": 0.15}  # the prefill takes 0.22 s
BATCH: dict[str, Any] = {"tokens": 4000, "budget": None}


def fill_engines(queue: QueueFixture) -> list[str]:
    """Leaves no engine with room; returns the request keys."""
    return queue.fill(*(endpoint for endpoint in queue.endpoints if endpoint is not API))


@pytest.mark.parametrize("request_", [LATE, BATCH], ids=["late", "batch"])
def test_a_best_effort_request_waits_for_an_engine_without_backlog(request_: dict[str, Any]) -> None:
    """An engine with room and a backlog is for requests that can still meet their deadline."""
    queue = QueueFixture()
    keys = fill_engines(queue)
    assert queue.enter("r", **request_) == []
    assert queue.best_effort == ["r"]
    queue.first_tokens(keys[0])
    assert queue.release() == []
    queue.first_tokens(keys[1])
    assert queue.release() == ["r"]


@pytest.mark.parametrize("request_", [LATE, BATCH], ids=["late", "batch"])
def test_requests_in_time_go_before_best_effort_requests(request_: dict[str, Any]) -> None:
    """Later arrivals included."""
    queue = QueueFixture()
    keys = fill_engines(queue)
    queue.enter("r", **request_)
    queue.enter("hopeful", tokens=4000, budget=2.0)
    queue.first_tokens(*keys)
    assert queue.release() == ["hopeful"]
    queue.first_tokens("hopeful")
    assert queue.release() == ["r"]


@pytest.mark.parametrize("request_", [LATE, BATCH], ids=["late", "batch"])
def test_a_best_effort_prefill_waits_while_it_would_cost_answers_their_tpot_budget(request_: dict[str, Any]) -> None:
    """A late request must not make other requests miss."""
    queue = QueueFixture()
    answers = queue.decode(since=0.2, token=0.02, pace=0.03, answers=20)
    assert queue.load().backlog_s == 0
    assert queue.enter("r", **request_) == []
    queue.end(*answers)
    assert queue.release() == ["r"]


@pytest.mark.parametrize("request_", [LATE, BATCH], ids=["late", "batch"])
def test_a_request_that_waits_for_the_endpoint_with_its_state_holds_up_no_other(request_: dict[str, Any]) -> None:
    """A chain of responses goes on at one endpoint alone."""
    queue = QueueFixture(endpoints=(ONE, TWO))
    on_one, on_two = fill_engines(queue)[:2], fill_engines(queue)[2:]
    assert queue.enter("chain", pinned=ONE.id, **request_) == []
    assert queue.enter("free", **request_) == []
    queue.first_tokens(*on_two)
    assert queue.release() == ["free"]
    queue.first_tokens(*on_one)
    assert queue.release() == ["chain"]
    assert queue.destination("chain") == ONE.id


def test_late_requests_go_before_requests_without_a_deadline() -> None:
    """A caller is waiting for a late request."""
    queue = QueueFixture()
    keys = fill_engines(queue)
    queue.enter("batch", **BATCH, name="nightly")
    queue.enter("late", **LATE)
    queue.first_tokens(*keys)
    assert queue.release() == ["late"]


def test_tenants_take_turns() -> None:
    """A tenant with many requests delays only itself."""
    queue = QueueFixture()
    keys = fill_engines(queue)
    for name in ("x1", "x2", "x3", "y1", "z1"):
        queue.enter(name, tenant=name[0], **LATE)
    queue.first_tokens(*keys)
    order = [served := queue.release()]
    while queue.best_effort:
        queue.first_tokens(*served)
        order.append(served := queue.release())
    assert order == [["x1"], ["y1"], ["z1"], ["x2"], ["x3"]]


def test_a_new_tenant_starts_at_the_current_turn() -> None:
    """Turns that other tenants had earlier do not count against the other tenants."""
    queue = QueueFixture()
    keys = fill_engines(queue)
    for number in range(9):
        queue.enter(f"x{number}", tenant="x", **LATE)
    for number in range(5):
        queue.first_tokens(*keys)
        keys = queue.release()
        assert keys == [f"x{number}"]
    for number in range(3):
        queue.enter(f"y{number}", tenant="y", **LATE)
    order = []
    while queue.best_effort:
        queue.first_tokens(*keys)
        keys = queue.release()
        order += keys
    assert order[0] == "y0"
    assert [name[0] for name in order[:6]].count("y") == 3


def test_an_arrival_at_an_idle_engine_does_not_overtake_queued_requests() -> None:
    """Best-effort requests of one tenant are released in order of arrival."""
    queue = QueueFixture()
    keys = fill_engines(queue)
    queue.enter("first", **LATE)
    queue.first_tokens(*keys)
    assert queue.enter("second", **LATE) == ["first"]


# --------------------------------------------------------------------------- prompts in a cache

LONG: dict[str, Any] = {"tokens": 60_000, "budget": 0.15}  # of seconds; 3,750 blocks
BLOCKS = tuple(range(3750))


def cache(queue: QueueFixture, endpoint: Endpoint, blocks: tuple[int, ...]) -> None:
    """The engine has prefilled, and answered, a prompt of these blocks."""
    prompt = PoolEstimate(len(blocks) * 16, PrefixBlocks(blocks))
    candidate = Candidate(endpoint, 0, prompt.tokens, 0, Forecast(0.0), 1.0, 0.0)
    queue.fleet.on_sent("earlier", candidate, prompt, queue.now, False)
    queue.first_tokens("earlier")
    queue.end("earlier")


def test_a_late_request_whose_prompt_comes_into_a_cache_meanwhile_is_decided_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Behind long ones that wait for calm answers: the answer of another turn of its session leaves it little to do.
    Its patience counts from its entry."""
    monkeypatch.setattr(hold_rules, "CALM", -1.0)
    queue = QueueFixture()
    for number in range(4):
        queue.enter(f"long {number}", **LONG, on_miss="best_effort")
    queue.enter("turn", **LONG, on_miss="best_effort", blocks=BLOCKS)
    assert [queue.hold(f"long {number}") for number in range(4)] == ["calm", "turn", "turn", "turn"]
    queue.release(later=1.0)
    cache(queue, ONE, BLOCKS[:-8])
    busy = queue.fill(ONE)
    for _ in range(4):
        assert queue.release(later=0.01) == []
    assert (queue.held("turn").prefill_s < 0.1, queue.held("turn").late_since) == (True, START)
    queue.first_tokens(*busy)
    assert queue.release(later=0.01) == ["turn"]


def test_a_late_request_whose_prompt_has_left_the_cache_holds_up_no_short_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is among the long ones from then on."""
    monkeypatch.setattr(hold_rules, "CALM", -1.0)
    queue = QueueFixture()
    cache(queue, ONE, BLOCKS)
    busy = queue.fill(ONE)
    queue.enter("turn", **LONG, on_miss="best_effort", blocks=BLOCKS)
    queue.enter("short", **LATE, on_miss="best_effort")
    assert [queue.hold(name) for name in ("turn", "short")] == ["prefill", "turn"]
    queue.fleet.on_cache_cleared(ONE.id)
    queue.first_tokens(*busy)
    assert queue.release(later=0.01) == ["short"]
    assert queue.held("turn").prefill_s > LONGEST_SHORT


def test_a_short_late_request_holds_up_none_that_waits_for_another_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits for the endpoint with its prompt in the cache."""
    monkeypatch.setattr(best_effort_queue, "CHECKED", 0)
    monkeypatch.setattr(hold_rules, "CALM", -1.0)
    queue = QueueFixture((ONE, TWO))
    other = tuple(range(10_000, 13_750))
    cache(queue, ONE, BLOCKS)
    cache(queue, TWO, other)
    busy = queue.fill(ONE, TWO)
    queue.enter("first", tokens=60_500, budget=0.15, on_miss="best_effort", blocks=BLOCKS)
    queue.enter("second", tokens=60_500, budget=0.15, on_miss="best_effort", blocks=other)
    assert [queue.hold(name) for name in ("first", "second")] == ["prefill", "prefill"]
    queue.first_tokens(*busy[2:])
    assert queue.release(later=0.01) == ["second"]


# --------------------------------------------------------------------------- cost


def test_the_only_late_request_asks_no_endpoint_behind_the_first_that_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all are alike, one question is enough: with 256 endpoints, all of them took 1 ms of every request without a
    deadline."""
    queue = QueueFixture([Endpoint(f"small/{number}", "small") for number in range(8)])
    asked, late_rule = list[str](), hold_rules.HoldRules.late_rule

    def asking(self: hold_rules.HoldRules, queued: QueuedRequest, endpoint: str, *given: Any) -> HoldRule | None:
        asked.append(endpoint)
        return late_rule(self, queued, endpoint, *given)

    monkeypatch.setattr(hold_rules.HoldRules, "late_rule", asking)
    assert queue.enter("r", **BATCH) == ["r"]
    assert asked == [queue.destination("r")]


def calls(act: Callable[[], object]) -> int:
    return counted_calls(act).total()


@pytest.mark.parametrize("bound", [60, 2000])
def test_no_event_looks_at_every_held_request(bound: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrivals, departures, checks, and refusals at the bound of the queue."""
    monkeypatch.setattr(queue_scheduler, "MAX_HELD", bound)
    queue = QueueFixture()
    fill_engines(queue)
    for number in range(bound):
        queue.arrive(f"r{number}", **LATE, tenant=f"key {number % 2}", on_miss="best_effort")
        queue.release()
    assert calls(lambda: queue.enter("above the bound", **LATE, tenant="key 0", on_miss="best_effort")) < 1000
    assert calls(queue.release) < 400
    assert calls(lambda: queue.scheduler.leave(f"r{bound // 2}", queue.now)) < 100
    assert queue.scheduler.held == bound - 1


def late_of_each(tenants: int) -> QueueFixture:
    """A late request of each tenant, before engines without time."""
    queue = QueueFixture((ONE, TWO))
    queue.fill(ONE, TWO)
    for number in range(tenants):
        queue.arrive(f"r{number}", **LATE, tenant=f"key {number}", on_miss="best_effort")
    assert queue.release() == []
    return queue


def test_an_event_decides_as_few_requests_with_many_tenants(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decisions are most of what an event costs: with a thousand tenants they were 60 ms."""
    queue = late_of_each(200)
    decided = count_decisions(monkeypatch)
    queue.release(later=0.01)
    assert 0 < len(decided) <= 2 * queue_scheduler.MANY


def test_a_request_that_can_begin_is_found_at_once_among_many_that_cannot() -> None:
    """The others have long prefills, and wait for calm answers; the one that can begin was decided last."""
    queue = QueueFixture()
    queue.decode(token=0.019, pace=0.05, since=20.0)
    for number in range(40):
        queue.arrive(f"long {number}", tokens=60_000, budget=0.15, tenant=f"t{number}", on_miss="best_effort")
    queue.release()
    busy = queue.fill(ONE)
    assert queue.enter("short", tokens=4000, budget=0.15, tenant="other", on_miss="best_effort") == []
    queue.first_tokens(*busy)
    queue.end(*busy)
    assert queue.release(later=0.01) == ["short"]


def test_no_request_of_many_tenants_is_forgotten() -> None:
    """Engines that become idle take all; where none is left, all are told within some rounds."""
    queue = late_of_each(60)
    queue.first_tokens(*queue.fill(ONE, TWO))
    while queue.best_effort:
        for name in queue.release(later=0.5):
            queue.complete(name)
    assert {decision.outcome for decision in queue.released.values()} == {Placement.PLACE}
    queue = late_of_each(60)
    for endpoint in (ONE, TWO) * 2:
        queue.fleet.on_probe_failed(endpoint.id, queue.now)
    for _ in range(60 // queue_scheduler.MANY + 1):
        queue.release(later=0.05)
    assert not queue.best_effort
    assert {decision.outcome for decision in queue.released.values()} == {Placement.UNAVAILABLE}


# --------------------------------------------------------------------------- on_miss


def test_on_miss_best_effort_is_dispatched_after_30_s_at_any_load() -> None:
    """`best_effort` promises a late answer; a request with `queue` is refused before."""
    queue = QueueFixture()
    queue.decode()
    queue.enter("best effort", **LATE, on_miss="best_effort")
    queue.enter("queue", **LATE, name="other")
    assert queue.release(later=29.9) == ["queue"]
    assert queue.released["queue"].outcome is Placement.OVERLOADED
    assert queue.release(later=0.2) == ["best effort"]


def test_a_request_without_a_deadline_is_never_forced() -> None:
    """No caller waits for the answer, whatever `on_miss` says."""
    queue = QueueFixture()
    queue.decode()
    queue.enter("r", **BATCH, on_miss="best_effort")
    assert queue.release(later=31) == []


def test_on_miss_shed_is_refused_instead_of_queued() -> None:
    """With a Retry-After time."""
    queue = QueueFixture()
    fill_engines(queue)
    assert queue.enter("r", tokens=PROMPT, budget=0.25, on_miss="shed") == ["r"]
    assert queue.released["r"].outcome is Placement.SHED
    assert queue.released["r"].retry_after > 0


# --------------------------------------------------------------------------- choice of the endpoint


def test_a_late_request_takes_an_api_rather_than_the_queue() -> None:
    """An API is always idle, so a late request of a route with an API is not queued."""
    queue = QueueFixture((ONE, API))
    answers = queue.decode()
    queue.send("other", API, 9000, queue.now)
    queue.enter("r", tokens=4000, budget=0.15, tiers=["small", "api"])
    assert (queue.destination("r"), queue.best_effort) == (API.id, [])
    queue.end(*answers)


def test_a_request_without_a_deadline_waits_for_the_preferred_tier() -> None:
    """Busy cheap engines are no reason to pay for an expensive tier."""
    queue = QueueFixture((ONE, TWO, LARGE, API))
    keys = queue.fill(ONE, TWO)
    queue.enter("r", **BATCH, tiers=["api", "large", "small"], prefer="cost")
    assert queue.best_effort == ["r"]
    queue.first_tokens(*keys[2:])
    assert queue.release() == ["r"]
    assert queue.destination("r") == TWO.id


def test_a_queued_request_is_refused_at_once_when_its_last_endpoint_dies() -> None:
    """The caller can ask elsewhere."""
    queue = QueueFixture()
    fill_engines(queue)
    queue.enter("r", **LATE)
    for _ in range(3):
        queue.fleet.on_probe_failed(ONE.id, queue.now)
    assert queue.release() == ["r"]
    assert queue.released["r"].outcome is Placement.UNAVAILABLE
