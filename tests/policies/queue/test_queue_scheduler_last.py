"""What waits last: requests that can no longer make it, and those that nobody waits for."""

from __future__ import annotations

from typing import Any

import pytest

from policies.types import Placement
from tests.policies.queue.waiting_room import API, LARGE, ONE, PROMPT, TWO, Scene

LATE: dict[str, Any] = {"tokens": 4000, "budget": 0.15}  # 0.22 s, and no engine is that fast
BATCH: dict[str, Any] = {"tokens": 4000, "budget": None}


def busy(scene: Scene) -> list[str]:
    """More than an engine has room for; the keys of what is there."""
    return scene.fill(*(endpoint for endpoint in scene.endpoints if endpoint is not API))


@pytest.mark.parametrize("request_", [LATE, BATCH], ids=["late", "batch"])
def test_it_waits_until_an_engine_has_nothing_to_prefill(request_: dict[str, Any]) -> None:
    """Room is not enough: that is for those who can still make it."""
    scene = Scene()
    keys = busy(scene)
    assert scene.enter("r", **request_) == []
    assert scene.best_effort == ["r"]
    scene.first_tokens(keys[0])
    assert scene.look() == []
    scene.first_tokens(keys[1])
    assert scene.look() == ["r"]


@pytest.mark.parametrize("request_", [LATE, BATCH], ids=["late", "batch"])
def test_it_goes_behind_all_that_can_still_make_theirs(request_: dict[str, Any]) -> None:
    """Though they came later."""
    scene = Scene()
    keys = busy(scene)
    scene.enter("r", **request_)
    scene.enter("hopeful", tokens=4000, budget=2.0)
    scene.first_tokens(*keys)
    assert scene.look() == ["hopeful"]
    scene.first_tokens("hopeful")
    assert scene.look() == ["r"]


@pytest.mark.parametrize("request_", [LATE, BATCH], ids=["late", "batch"])
def test_it_waits_for_answers_that_it_would_cost_their_pace(request_: dict[str, Any]) -> None:
    """It must not make others miss what it cannot make itself."""
    scene = Scene()
    answers = scene.write(since=0.2, token=0.02, pace=0.03, answers=20)
    assert scene.load().backlog_s == 0
    assert scene.enter("r", **request_) == []
    scene.end(*answers)
    assert scene.look() == ["r"]


def test_what_has_a_deadline_goes_before_what_has_none() -> None:
    """Somebody waits for it."""
    scene = Scene()
    keys = busy(scene)
    scene.enter("batch", **BATCH, name="nightly")
    scene.enter("late", **LATE)
    scene.first_tokens(*keys)
    assert scene.look() == ["late"]


def test_tenants_take_turns() -> None:
    """Whoever floods waits for itself."""
    scene = Scene()
    keys = busy(scene)
    for name in ("x1", "x2", "x3", "y1", "z1"):
        scene.enter(name, tenant=name[0], **LATE)
    scene.first_tokens(*keys)
    order = [served := scene.look()]
    while scene.best_effort:
        scene.first_tokens(*served)
        order.append(served := scene.look())
    assert order == [["x1"], ["y1"], ["z1"], ["x2"], ["x3"]]


def test_a_tenant_that_comes_anew_has_nothing_to_make_up_for() -> None:
    """The turns of those that were here before it are not held against them."""
    scene = Scene()
    keys = busy(scene)
    for number in range(9):
        scene.enter(f"x{number}", tenant="x", **LATE)
    for number in range(5):
        scene.first_tokens(*keys)
        keys = scene.look()
        assert keys == [f"x{number}"]
    for number in range(3):
        scene.enter(f"y{number}", tenant="y", **LATE)
    order = []
    while scene.best_effort:
        scene.first_tokens(*keys)
        keys = scene.look()
        order += keys
    assert order == ["y0", "x5", "y1", "x6", "y2", "x7", "x8"]


def test_who_comes_as_an_engine_becomes_idle_does_not_go_before_those_that_waited() -> None:
    """They were there first."""
    scene = Scene()
    keys = busy(scene)
    scene.enter("first", **LATE)
    scene.first_tokens(*keys)
    assert scene.enter("second", **LATE) == ["first"]


# --------------------------------------------------------------------------- what on_miss says


def test_best_effort_goes_after_half_a_minute_whatever_it_costs() -> None:
    """A late answer was promised; with `queue` it waits on."""
    scene = Scene()
    scene.write()
    scene.enter("best effort", **LATE, on_miss="best_effort")
    scene.enter("queue", **LATE)
    assert scene.look(later=29.9) == []
    assert scene.look(later=0.2) == ["best effort"]
    assert scene.best_effort == ["queue"]


def test_batch_is_not_forced() -> None:
    """Nobody waits for it, whatever its route says."""
    scene = Scene()
    scene.write()
    scene.enter("r", **BATCH, on_miss="best_effort")
    assert scene.look(later=31) == []


def test_shed_is_refused_and_not_kept() -> None:
    """With a time at which it is worth another try."""
    scene = Scene()
    busy(scene)
    assert scene.enter("r", tokens=PROMPT, budget=0.25, on_miss="shed") == ["r"]
    assert scene.gone["r"].outcome is Placement.SHED
    assert scene.gone["r"].retry_after > 0


# --------------------------------------------------------------------------- where it goes


def test_late_it_goes_wherever_it_is_least_late() -> None:
    """An API is always free: what would wait here for long is not kept from it."""
    scene = Scene((ONE, API))
    answers = scene.write()
    scene.send("other", API, 9000, scene.now)
    scene.enter("r", tokens=4000, budget=0.15, tiers=["small", "api"])
    assert (scene.went("r"), scene.best_effort) == (API.id, [])
    scene.end(*answers)


def test_what_nobody_waits_for_stays_with_the_tier_that_is_preferred() -> None:
    """That the cheap engines are busy is no reason to pay for a dear one."""
    scene = Scene((ONE, TWO, LARGE, API))
    keys = scene.fill(ONE, TWO)
    scene.enter("r", **BATCH, tiers=["api", "large", "small"], prefer="cost")
    assert scene.best_effort == ["r"]
    scene.first_tokens(*keys[2:])
    assert scene.look() == ["r"]
    assert scene.went("r") == TWO.id


def test_nothing_to_go_to_is_told_at_once() -> None:
    """Its last engine died: its caller may ask elsewhere."""
    scene = Scene()
    busy(scene)
    scene.enter("r", **LATE)
    for _ in range(3):
        scene.fleet.on_probe_failed(ONE.id, scene.now)
    assert scene.look() == ["r"]
    assert scene.gone["r"].outcome is Placement.UNAVAILABLE
