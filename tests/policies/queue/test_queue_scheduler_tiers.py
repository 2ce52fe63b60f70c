"""What waits where another tier could take it: when it leaves, and where it goes once it is late."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.fleet.fleet import AttemptReport
from policies.queue.placement_round import RECHECK_TIERS, TICK
from policies.routing.candidates import QueuedRequest
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
from tests.policies.queue.waiting_room import API, LARGE, ONE, PROMPT, START, TWO, Scene, route

MIXED: dict[str, Any] = {"budget": 3.0, "tiers": ["small", "api"]}
WIDE: dict[str, Any] = {"budget": 3.0, "tiers": ["small", "large"]}


def looked_at(scene: Scene, until: float) -> float:
    """When the first goes, of looks every TICK."""
    while scene.now < until:
        if scene.look(later=TICK):
            return scene.now
    return FOREVER


def sure(scene: Scene, endpoint: Endpoint) -> float:
    """The TTFT under which it stays there in all but half of the cases that the target leaves."""
    return scene.fleet.forecast(endpoint, scene.load(endpoint), PROMPT, 0, scene.now).quantile(0.95)


def limited(scene: Scene) -> None:
    """The API has refused a request: it takes the next in a minute."""
    scene.send("refused", API, 100, scene.now)
    scene.fleet.on_ended("refused", AttemptOutcome.RATE_LIMITED, scene.now, AttemptReport(retry_after=60.0))


# --------------------------------------------------------------------------- it leaves in time


def test_what_waits_too_long_leaves_while_another_tier_still_makes_its_deadline() -> None:
    """Whatever the forecast says of where it waits: it said so all the time."""
    scene = Scene((ONE, API))
    scene.write(token=0.0435)
    assert scene.enter("r", **MIXED) == []
    assert scene.assigned() == ["r"]
    assert looked_at(scene, START + 3.0) == pytest.approx(START + 3.0 - sure(scene, API), abs=2 * TICK)
    assert scene.went("r") == API.id
    assert scene.gone["r"].ranked[0].probability >= 0.9


def test_every_one_that_waits_has_its_last_moment() -> None:
    """Not only the first of a lane: of many that wait for one engine all are in time."""
    scene = Scene((ONE, API))
    scene.write(token=0.0435)
    names = [f"r{number}" for number in range(12)]
    for number, name in enumerate(names):
        assert scene.enter(name, **MIXED | {"budget": 3.0 + number / 10}) == []
    while scene.room.held and scene.now < START + 5:
        scene.look(later=TICK)
    assert {scene.went(name) for name in names} == {API.id}
    assert min(scene.gone[name].ranked[0].probability for name in names) >= 0.9


def test_those_that_leave_together_go_one_at_a_time() -> None:
    """Each is sent, and the room asked anew, before the next: none is forgotten in between."""
    scene = Scene((ONE, API))
    scene.write(token=0.0435)
    names = {"a", "b", "c"}
    for name in names:
        scene.enter(name, **MIXED)
    scene.now += 3.0 - sure(scene, API)
    gone = set[object]()
    for _ in names:
        ticket, decision = next(scene.room.release(scene.fleet, scene.now))
        assert decision.chosen is not None
        assert decision.chosen.endpoint == API
        scene.room.on_dispatched(ticket)
        gone.add(ticket)
    assert (gone, scene.room.held) == (names, 0)


def test_it_stays_where_the_other_tier_would_be_later() -> None:
    """It is asked again, for that may change."""
    scene = Scene((ONE, LARGE))
    answers = scene.write(token=0.0435)
    scene.enter("r", **WIDE)
    scene.send("elsewhere", LARGE, 60_000, scene.now)
    assert looked_at(scene, START + 2.8) == FOREVER
    assert scene.assigned() == ["r"]
    scene.end(*answers)
    assert scene.look() == ["r"]
    assert scene.went("r") == ONE.id


def test_a_tier_that_frees_up_meanwhile_is_a_way_out() -> None:
    """It had no time when the request was bound; that it has now is no reason to leave before the last moment."""
    scene = Scene((ONE, LARGE))
    scene.write(token=0.0435)
    scene.send("elsewhere", LARGE, 60_000, scene.now)
    scene.enter("r", **WIDE)
    assert looked_at(scene, START + 1.0) == FOREVER
    scene.end("elsewhere")
    assert looked_at(scene, START + 3.0) == pytest.approx(START + 3.0 - sure(scene, LARGE), abs=2 * TICK)
    assert scene.went("r") == LARGE.id


def test_what_would_be_late_where_it_waits_leaves_before_its_last_moment() -> None:
    """As soon as the forecasts say so: there is nothing to wait for."""
    scene = Scene((ONE, LARGE))
    scene.fill(ONE)
    scene.enter("r", **WIDE)
    assert scene.assigned() == ["r"]
    scene.send("more", ONE, 60_000, scene.now)
    assert scene.look(later=RECHECK_TIERS + TICK) == ["r"]
    assert scene.went("r") == LARGE.id


def test_what_has_no_other_tier_waits_on() -> None:
    """To its deadline and beyond."""
    scene = Scene()
    scene.write(token=0.0435)
    scene.enter("r", budget=3.0)
    assert looked_at(scene, START + 4.0) == FOREVER


# --------------------------------------------------------------------------- late


def test_what_is_late_takes_another_tier_that_is_idle() -> None:
    """That it would be less late elsewhere helps nobody while that one is busy."""
    scene = Scene((ONE, LARGE))
    scene.fill(ONE)
    scene.send("more", LARGE, 8000, scene.now)
    assert scene.enter("r", tokens=4000, budget=0.15, tiers=["small", "large"]) == []
    assert scene.best_effort == ["r"]
    scene.first_tokens("more")
    assert scene.look() == ["r"]
    assert scene.went("r") == LARGE.id


def test_an_api_at_its_limit_is_not_for_the_late() -> None:
    """What it still takes is for those whom it makes in time; and so it is for a minute after it was full."""
    scene = Scene((ONE, API))
    scene.write()
    limited(scene)
    assert scene.enter("r", tokens=4000, budget=0.15, tiers=["small", "api"]) == []
    assert scene.look(later=119.0) == []
    assert scene.look(later=2.0) == ["r"]
    assert scene.went("r") == API.id


# --------------------------------------------------------------------------- whose fault the wait is


def test_what_would_have_gone_to_an_api_but_for_its_limit_waits_for_that() -> None:
    """All of its time here, as long as the API refuses and for the minute after in which it is spared."""
    scene = Scene((ONE, API))
    scene.write()
    limited(scene)
    scene.enter("first", tokens=4000, budget=0.15, tiers=["small", "api"])
    scene.look(later=1.0)
    scene.enter("second", tokens=4000, budget=0.15, tiers=["small", "api"])
    scene.look(later=119.0)
    assert scene.look(later=1.0) == ["first", "second"]
    assert [scene.gone[name].rate_limited for name in ("first", "second")] == pytest.approx([121.0, 120.0])


def test_what_an_engine_keeps_waiting_does_not_wait_for_a_limit() -> None:
    """Though an API of its route refuses: it prefers the engine, and makes its deadline there."""
    scene = Scene((ONE, API))
    scene.write(token=0.0435)
    limited(scene)
    assert scene.enter("r", **MIXED) == []
    assert scene.assigned() == ["r"]
    scene.look(later=1.0)
    assert scene.room.leave("r", scene.now) == 0.0


def test_what_waits_for_an_engine_because_its_first_choice_refuses_waits_for_that() -> None:
    """And for the engine itself, once the API takes requests again: then it is there that it goes."""
    scene = Scene((ONE, API))
    scene.write(token=0.0435)
    limited(scene)
    assert scene.enter("r", **MIXED | {"tiers": ["api", "small"]}) == []
    assert scene.assigned() == ["r"]
    scene.look(later=0.5)
    assert scene.room.leave("r", scene.now) == pytest.approx(0.5)


def test_batch_waits_for_the_limit_of_no_tier_but_the_one_that_it_prefers() -> None:
    """Without a deadline nothing takes it elsewhere."""
    waited = []
    for tiers in (["small", "api"], ["api", "small"]):
        scene = Scene((ONE, API))
        scene.fill(ONE)
        limited(scene)
        assert scene.enter("r", tokens=4000, budget=None, tiers=tiers) == []
        scene.look(later=0.05)
        waited.append(scene.room.leave("r", scene.now))
    assert waited == pytest.approx([0.0, 0.05])


# --------------------------------------------------------------------------- at once

asked = st.tuples(
    st.sampled_from([100, PROMPT, 4000, 30_000]),
    st.sampled_from([0.05, 0.3, 1.0, 3.0, None]),
    st.sampled_from([["small"], ["small", "api"], ["large", "small"], ["api"]]),
    st.sampled_from(["queue", "best_effort", "shed"]),
    st.sampled_from(["predicted", "lmetric"]),
)


@settings(deadline=None)
@given(asked, st.booleans(), st.booleans(), st.booleans())
def test_to_pass_through_is_to_enter_and_be_released(
    found: tuple[int, float | None, list[str], Any, Any], full: bool, strained: bool, on_the_way: bool
) -> None:
    """Where nobody is held, and whatever else is so."""
    tokens, budget, tiers, on_miss, scorer = found
    ends = []
    for at_once in (False, True):
        scene = Scene((ONE, TWO, LARGE, API))
        if full:
            scene.fill(ONE, LARGE)
        if strained:
            scene.write(TWO)
        if on_the_way:
            scene.room.queues.in_dispatch["other"] = Candidate(ONE, 0, 1000, 0, Forecast(0.1, prefill=0.2), 1.0, 0.0)
        estimate = PromptEstimate({name: PoolEstimate(tokens) for name in tiers})
        promised = route(budget, tiers=tiers, on_miss=on_miss, scorer=scorer)
        queued = QueuedRequest("r", RequestView(scene.now, stream=True), estimate, promised, 7)
        if at_once:
            decision = scene.room.pass_through(queued, scene.fleet, scene.now)
        else:
            scene.room.enter(queued)
            decision = next((one for _, one in scene.room.release(scene.fleet, scene.now)), None)
        queues = scene.room.queues
        places = [
            [str(held.request_key) for held in lane]
            for lane in (queues.new, queues.best_effort, *queues.assigned.values())
        ]
        ends.append((decision, places, sorted(queues.assigned), queues.in_dispatch, scene.room.wake_at))
    assert ends[0] == ends[1]
