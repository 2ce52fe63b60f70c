"""Spilling: a queued request moves to another tier in time, and late requests take any idle tier."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.fleet.fleet import AttemptReport
from policies.queue import late_work
from policies.queue.hold_rules import TICK
from policies.queue.placement_round import RECHECK
from policies.queue.queue_scheduler import MANY
from policies.queue.queued_request import QueuedRequest
from policies.types import (
    FOREVER,
    AttemptOutcome,
    Candidate,
    Endpoint,
    Forecast,
    PoolEstimate,
    PromptEstimate,
    RequestView,
)
from tests.support.queue_fixture import (
    API,
    LARGE,
    ONE,
    PROMPT,
    START,
    TWO,
    QueueFixture,
    count_decisions,
    pool,
    route,
)

MIXED: dict[str, Any] = {"budget": 3.0, "tiers": ["small", "api"]}
WIDE: dict[str, Any] = {"budget": 3.0, "tiers": ["small", "large"]}


def first_release(queue: QueueFixture, until: float) -> float:
    """The time of the first release, with a release every TICK seconds; FOREVER if none until `until`."""
    while queue.now < until:
        if queue.release(later=TICK):
            return queue.now
    return FOREVER


def sure_ttft(queue: QueueFixture, endpoint: Endpoint) -> float:
    """The TTFT (s) that the endpoint keeps with probability 0.95: half of the usual risk of a miss."""
    return queue.fleet.view.forecast(endpoint, queue.load(endpoint), PROMPT, 0, queue.now).quantile(0.95)


def rate_limit(queue: QueueFixture) -> None:
    """The API refuses a request with 429 and Retry-After 60 s."""
    queue.send("refused", API, 100, queue.now)
    queue.fleet.on_ended("refused", AttemptOutcome.RATE_LIMITED, queue.now, AttemptReport(retry_after=60.0))


# --------------------------------------------------------------------------- in time


def test_a_queued_request_spills_at_the_last_moment_for_another_tier() -> None:
    """Even if the forecast of the assigned endpoint promises the deadline: that forecast was wrong all the time."""
    queue = QueueFixture((ONE, API))
    queue.decode(token=0.0435)
    assert queue.enter("r", **MIXED) == []
    assert queue.assigned() == ["r"]
    at = pytest.approx(START + 3.0 - sure_ttft(queue, API), abs=RECHECK + TICK)
    assert first_release(queue, START + 3.0) == at
    assert queue.destination("r") == API.id
    assert queue.released["r"].ranked[0].probability >= 0.9


def test_every_request_of_a_queue_spills_in_time() -> None:
    """Not only the head of the queue."""
    queue = QueueFixture((ONE, API))
    queue.decode(token=0.0435)
    names = [f"r{number}" for number in range(12)]
    for number, name in enumerate(names):
        assert queue.enter(name, **MIXED | {"budget": 3.0 + number / 10}) == []
    while queue.scheduler.held and queue.now < START + 5:
        queue.release(later=TICK)
    assert {queue.destination(name) for name in names} == {API.id}
    assert min(queue.released[name].ranked[0].probability for name in names) >= 0.9


def test_a_request_without_a_deadline_has_no_last_moment() -> None:
    """Behind a cap, beside a tier that is down, and unfit after a reload: it is refused, and the queue goes on."""
    queue = QueueFixture((API, LARGE))
    capped = [replace(pool(each.pool, (each,)), concurrent_requests=1) for each in (API, LARGE)]
    queue.fleet.reload(capped)
    queue.send("busy", API, 100, queue.now)
    for _ in range(2):
        queue.fleet.on_probe_failed(LARGE.id, queue.now)
    for name in ("first", "second"):
        assert queue.enter(name, budget=None, tiers=["api", "large"]) == []
    assert queue.release(later=RECHECK) == []
    queue.leave("first")
    assert queue.release(later=RECHECK / 4) == []
    queue.fleet.reload([replace(each, context_window=10) for each in capped])
    assert queue.release(later=0.6 * RECHECK) == []
    assert queue.release(later=RECHECK) == ["second"]
    assert queue.released["second"].chosen is None


def test_an_event_compares_as_few_requests_with_an_api_at_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without another tier every request is at its last moment, again and again: each is looked at in its turn."""
    queue = QueueFixture((ONE, API))
    queue.decode(token=0.0435)
    rate_limit(queue)
    names = {f"r{number}" for number in range(100)}
    for name in names:
        assert queue.enter(name, tokens=10, budget=30.0, tiers=["small", "api"]) == []
    queue.now += 2 * RECHECK
    decided = count_decisions(monkeypatch)
    queue.release(later=TICK)
    assert 0 < len(decided) <= 2 * MANY
    for _ in range(len(names) // MANY + 1):
        queue.release(later=TICK)
    assert names <= {*decided}


def test_requests_that_spill_together_are_released_one_by_one() -> None:
    """Each is dispatched, and `release` called again, before the next; none is forgotten."""
    queue = QueueFixture((ONE, API))
    queue.decode(token=0.0435)
    names = {"a", "b", "c"}
    for name in names:
        queue.enter(name, **MIXED)
    queue.now += 3.0 - sure_ttft(queue, API)
    spilled = set[object]()
    for _ in names:
        request_key, decision = next(queue.scheduler.release(queue.fleet, queue.now))
        assert decision.chosen is not None
        assert decision.chosen.endpoint == API
        queue.scheduler.on_dispatched(request_key)
        spilled.add(request_key)
    assert (spilled, queue.scheduler.held) == (names, 0)


def test_a_request_stays_queued_while_the_other_tier_is_slower() -> None:
    """The tiers are compared again later, since loads change."""
    queue = QueueFixture((ONE, LARGE))
    answers = queue.decode(token=0.0435)
    queue.enter("r", **WIDE)
    queue.send("elsewhere", LARGE, 60_000, queue.now)
    assert first_release(queue, START + 2.8) == FOREVER
    assert queue.assigned() == ["r"]
    queue.end(*answers)
    assert queue.release() == ["r"]
    assert queue.destination("r") == ONE.id


def test_a_request_spills_to_a_tier_that_was_too_slow_when_it_was_queued() -> None:
    """But not before the last moment for that tier."""
    queue = QueueFixture((ONE, LARGE))
    queue.decode(token=0.0435)
    queue.send("elsewhere", LARGE, 60_000, queue.now)
    queue.enter("r", **WIDE)
    assert first_release(queue, START + 1.0) == FOREVER
    queue.end("elsewhere")
    assert first_release(queue, START + 3.0) == pytest.approx(START + 3.0 - sure_ttft(queue, LARGE), abs=2 * TICK)
    assert queue.destination("r") == LARGE.id


def test_a_request_spills_early_when_its_own_tier_is_predicted_late() -> None:
    """At the next comparison of tiers: waiting gains nothing."""
    queue = QueueFixture((ONE, LARGE))
    queue.fill(ONE)
    queue.enter("r", **WIDE)
    assert queue.assigned() == ["r"]
    queue.send("more", ONE, 60_000, queue.now)
    assert queue.release(later=RECHECK + TICK) == ["r"]
    assert queue.destination("r") == LARGE.id


def stalled_answers(queue: QueueFixture, endpoint: Endpoint, tpot: float, count: int = 40) -> None:
    """Short answers that began at the present load, and took `tpot` s per token because of a prefill."""
    chosen = Candidate(endpoint, 0, 1, 0, Forecast(0.1), 1.0, 0.0, load=queue.load(endpoint))
    for number in range(count):
        queue.fleet.on_sent(number, chosen, PoolEstimate(1), queue.now, True)
        queue.fleet.on_first_token(number, queue.now)
    queue.send("stall", endpoint, 400_000, queue.now)
    queue.end("stall")
    for number in range(count):
        report = AttemptReport(completion_tokens=8, mean_itl=tpot)
        queue.fleet.on_ended(number, AttemptOutcome.COMPLETED, queue.now, report)


@pytest.mark.parametrize("tpot", [0.045, 0.08])
def test_a_request_spills_when_answers_lose_their_tpot_in_its_own_tier(tpot: float) -> None:
    """At the next comparison of tiers, though the first token would still come in time. Not while answers keep it."""
    queue = QueueFixture((ONE, API))
    queue.decode(token=0.0435)
    queue.enter("r", **MIXED, tpot={"budget": "50ms"})
    queue.release(later=RECHECK + TICK)
    assert queue.assigned() == ["r"]
    stalled_answers(queue, ONE, tpot)
    released = queue.release(later=RECHECK + TICK)
    assert (released, queue.assigned()) == ((["r"], []) if tpot > 0.05 else ([], ["r"]))


def test_a_request_stays_queued_where_no_tier_keeps_its_tpot() -> None:
    """Leaving would cost the other tier, and help nobody."""
    queue = QueueFixture((ONE, API))
    queue.decode(token=0.0435)
    queue.enter("r", **MIXED, tpot={"budget": "50ms"})
    stalled_answers(queue, ONE, 0.08)
    stalled_answers(queue, API, 0.2)
    assert queue.release(later=RECHECK + TICK) == []
    assert queue.assigned() == ["r"]


def test_a_request_with_a_single_tier_stays_queued() -> None:
    """Up to the deadline and beyond."""
    queue = QueueFixture()
    queue.decode(token=0.0435)
    queue.enter("r", budget=3.0)
    assert first_release(queue, START + 4.0) == FOREVER


# --------------------------------------------------------------------------- late


def test_a_late_request_takes_any_idle_tier() -> None:
    """A busy tier with a better forecast is no reason to wait."""
    queue = QueueFixture((ONE, LARGE))
    queue.fill(ONE)
    queue.send("more", LARGE, 8000, queue.now)
    assert queue.enter("r", tokens=4000, budget=0.15, tiers=["small", "large"]) == []
    assert queue.best_effort == ["r"]
    queue.first_tokens("more")
    assert queue.release() == ["r"]
    assert queue.destination("r") == LARGE.id


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Late requests are not refused for their wait."""
    monkeypatch.setattr(late_work, "PATIENCE", 1000.0)


@pytest.mark.usefixtures("patient")
def test_a_rate_limited_api_takes_no_late_requests() -> None:
    """The rest of the API's rate is for requests in time, until 60 s after the last refusal ends."""
    queue = QueueFixture((ONE, API))
    queue.decode()
    rate_limit(queue)
    assert queue.enter("r", tokens=4000, budget=0.15, tiers=["small", "api"]) == []
    assert queue.release(later=119.0) == []
    assert queue.release(later=2.0) == ["r"]
    assert queue.destination("r") == API.id


# --------------------------------------------------------------------------- time held by a rate limit


@pytest.mark.usefixtures("patient")
def test_queue_time_counts_as_rate_limited_while_an_api_would_take_the_request() -> None:
    """All queue time while the API refuses, and in the 60 s after in which late requests avoid the API."""
    queue = QueueFixture((ONE, API))
    queue.decode()
    rate_limit(queue)
    queue.enter("first", tokens=4000, budget=0.15, tiers=["small", "api"])
    queue.release(later=1.0)
    queue.enter("second", tokens=4000, budget=0.15, tiers=["small", "api"])
    queue.release(later=119.0)
    assert queue.release(later=1.0) == ["first", "second"]
    assert [queue.held_s(name) for name in ("first", "second")] == [{"rate_limit": 121.0}, {"rate_limit": 120.0}]


def test_queue_time_for_a_preferred_engine_is_not_rate_limited() -> None:
    """A refusing API of the route does not count: the route prefers the engine, and the engine makes the deadline."""
    queue = QueueFixture((ONE, API))
    queue.decode(token=0.0435)
    rate_limit(queue)
    assert queue.enter("r", **MIXED) == []
    assert queue.assigned() == ["r"]
    queue.release(later=1.0)
    assert queue.leave("r") == {"pace": 1.0}


def test_queue_time_behind_a_refusing_first_tier_is_rate_limited() -> None:
    """Even though the request is assigned to an engine of the second tier."""
    queue = QueueFixture((ONE, API))
    queue.decode(token=0.0435)
    rate_limit(queue)
    assert queue.enter("r", **MIXED | {"tiers": ["api", "small"]}) == []
    assert queue.assigned() == ["r"]
    queue.release(later=0.5)
    assert queue.leave("r") == {"rate_limit": 0.5}


def test_without_a_deadline_only_the_preferred_tier_can_be_rate_limited() -> None:
    """A request without a deadline takes no other tier."""
    waited = []
    for tiers in (["small", "api"], ["api", "small"]):
        queue = QueueFixture((ONE, API))
        queue.fill(ONE)
        rate_limit(queue)
        assert queue.enter("r", tokens=4000, budget=None, tiers=tiers) == []
        queue.release(later=0.05)
        waited.append([*queue.leave("r")])
    assert waited == [["prefill"], ["rate_limit"]]


# --------------------------------------------------------------------------- pass-through

asked = st.tuples(
    st.sampled_from([100, PROMPT, 4000, 30_000]),
    st.sampled_from([0.05, 0.3, 1.0, 3.0, None]),
    st.sampled_from([["small"], ["small", "api"], ["large", "small"], ["api"]]),
    st.sampled_from(["queue", "best_effort", "shed"]),
    st.sampled_from(["predicted", "least_request"]),
)


@settings(deadline=None, max_examples=50)
@given(asked, st.booleans(), st.booleans(), st.booleans())
def test_pass_through_equals_enter_and_release(
    found: tuple[int, float | None, list[str], Any, Any], full: bool, behind_budget: bool, dispatching: bool
) -> None:
    """With no other request queued, at any load."""
    tokens, budget, tiers, on_miss, scorer = found
    ends = []
    for at_once in (False, True):
        queue = QueueFixture((ONE, TWO, LARGE, API))
        if full:
            queue.fill(ONE, LARGE)
        if behind_budget:
            queue.decode(TWO)
        if dispatching:
            queue.scheduler.queues.in_dispatch["other"] = Candidate(
                ONE, 0, 1000, 0, Forecast(0.1, prefill=0.2), 1.0, 0.0
            )
        estimate = PromptEstimate({name: PoolEstimate(tokens) for name in tiers})
        promised = route(budget, tiers=tiers, on_miss=on_miss, scorer=scorer)
        queued = QueuedRequest("r", RequestView(queue.now, stream=True), estimate, promised, 7)
        if at_once:
            decision = queue.scheduler.pass_through(queued, queue.fleet, queue.now)
        else:
            queue.scheduler.enter(queued)
            decision = next((one for _, one in queue.scheduler.release(queue.fleet, queue.now)), None)
        queues = queue.scheduler.queues
        places = [
            [str(held.request_key) for held in held_requests]
            for held_requests in (queues.new, queues.best_effort, *queues.assigned.values())
        ]
        ends.append((decision, places, sorted(queues.assigned), queues.in_dispatch, queue.scheduler.wake_at))
    assert ends[0] == ends[1]
