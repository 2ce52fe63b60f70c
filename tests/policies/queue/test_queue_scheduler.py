"""The waiting room: what is sent now, what is held back, and for which engine."""

from __future__ import annotations

from typing import Literal, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.queue import placement_round as turn
from policies.queue import queue_scheduler as waiting
from policies.routes.route import ScorerName
from policies.types import FOREVER, Placement
from tests.policies.queue.waiting_room import API, LARGE, ONE, PROMPT, START, TWO, Scene, pool

# --------------------------------------------------------------------------- room


@pytest.mark.parametrize("budget", [1.0, 0.01, None])
def test_a_request_that_finds_room_is_sent_at_once(budget: float | None) -> None:
    """Nothing is held while there is room: neither what is too late for its budget nor what has none."""
    scene = Scene()
    assert scene.enter("r", budget=budget) == ["r"]
    assert (scene.went("r"), scene.room.held, scene.room.wake_at) == (ONE.id, 0, FOREVER)


def test_an_engine_has_room_for_what_keeps_it_busy_and_no_more() -> None:
    """A tenth of a second of prefill: its own queue takes requests as they come, and the rest can be ordered here."""
    scene = Scene()
    assert [scene.enter(name) for name in "abcd"] == [["a"], ["b"], [], []]
    assert (scene.assigned(), scene.room.held) == (["c", "d"], 2)


def test_what_waits_goes_when_a_first_token_makes_room() -> None:
    """One for one."""
    scene = Scene()
    for name in "abcd":
        scene.enter(name)
    scene.first_tokens("a")
    assert scene.look() == ["c"]
    assert scene.look() == []
    scene.first_tokens("b")
    assert scene.look() == ["d"]


def test_an_engine_whose_answers_must_catch_up_has_no_room() -> None:
    """Idle as it is: a prefill would stall them again. It has room once they are done."""
    scene = Scene()
    answers = scene.write(token=0.0435)
    assert scene.load().backlog_s == 0
    assert scene.enter("r", budget=2.0) == []
    assert scene.assigned() == ["r"]
    scene.end(*answers)
    assert scene.look() == ["r"]


def test_an_api_always_has_room() -> None:
    """Whatever waits there already."""
    scene = Scene((API,))
    names = [f"{budget} {number}" for budget in (None, 0.01, 1.0, 20.0) for number in range(50)]
    assert [
        scene.enter(name, budget=float(b) if (b := name.split()[0]) != "None" else None, tiers=["api"])
        for name in names
    ] == [[name] for name in names]


@pytest.mark.parametrize("scorer", [name for name in get_args(ScorerName) if name != "predicted"])
def test_a_yardstick_is_not_held(scorer: ScorerName) -> None:
    """It stands for a router without a queue of its own."""
    scene = Scene()
    names = [str(number) for number in range(20)]
    assert [scene.enter(name, budget=0.01, scorer=scorer) for name in names] == [[name] for name in names]


def test_what_can_go_nowhere_is_told_at_once() -> None:
    """Nobody waits for an answer that is known."""
    scene = Scene()
    scene.fill(ONE)
    scene.enter("late", budget=0.1, on_miss="shed")
    scene.enter("unfit", tiers=[{"pool": "small", "when": {"tools": True}}])
    for _ in range(3):
        scene.fleet.on_probe_failed(ONE.id, scene.now)
    scene.enter("alone")
    outcomes = [scene.gone[name].outcome for name in ("late", "unfit", "alone")]
    assert outcomes == [Placement.SHED, Placement.UNFIT, Placement.UNAVAILABLE]
    assert scene.room.held == 0


# --------------------------------------------------------------------------- order


def test_what_waits_for_an_engine_goes_earliest_deadline_first() -> None:
    """Whoever came first."""
    scene = Scene()
    keys = scene.fill(ONE)
    for name, budget in (("c", 3.0), ("a", 1.0), ("b", 2.0)):
        scene.enter(name, budget=budget)
    assert scene.assigned() == ["a", "b", "c"]
    scene.first_tokens(*keys)
    assert scene.look() == ["a", "b"]


def test_a_tight_deadline_overtakes_at_once() -> None:
    """It makes its budget only because a queue of a second, which can bear to wait, waits here."""
    scene = Scene()
    keys = scene.fill(ONE)
    for number in range(10):
        scene.enter(f"loose {number}", budget=5.0)
    scene.enter("tight", budget=0.5)
    scene.first_tokens(*keys)
    assert scene.look()[0] == "tight"
    assert scene.gone["tight"].ranked[0].probability > 0.9


def test_what_is_due_no_later_counts_as_ahead() -> None:
    """So that what comes next goes where less waits: two engines get equal queues."""
    scene = Scene((ONE, TWO))
    scene.fill(ONE, TWO)
    for name in "abcdef":
        scene.enter(name, budget=3.0)
    assert (len(scene.assigned(ONE)), len(scene.assigned(TWO))) == (3, 3)


def test_what_is_due_later_is_not_in_its_way() -> None:
    """The engine that more waits for is the better one for who overtakes it all."""
    scene = Scene((ONE, TWO))
    scene.fill(ONE, TWO)
    scene.send("more", TWO, PROMPT, scene.now)
    scene.enter("loose", tokens=3000, budget=9.0)
    assert scene.assigned(ONE) == ["loose"]
    scene.enter("tight", budget=1.0)
    assert scene.assigned(ONE) == ["tight", "loose"]


# --------------------------------------------------------------------------- it is decided again


def test_a_request_whose_turn_comes_too_late_gives_way() -> None:
    """The engine was slower than expected: who can still make it goes first, though due later."""
    scene = Scene()
    scene.fill(ONE)
    scene.enter("tight", tokens=4000, budget=0.6)
    scene.enter("loose", budget=5.0)
    assert scene.assigned() == ["tight", "loose"]
    assert scene.look(later=0.5) == ["loose"]
    assert scene.best_effort == ["tight"]


def test_what_was_bound_to_a_dead_endpoint_goes_elsewhere() -> None:
    """As soon as that is known."""
    scene = Scene((ONE, TWO))
    scene.fill(ONE, TWO)
    scene.enter("r", budget=2.0)
    bound, other = (ONE, TWO) if scene.assigned(ONE) else (TWO, ONE)
    for _ in range(3):
        scene.fleet.on_probe_failed(bound.id, scene.now)
    assert scene.look() == []
    assert (scene.assigned(bound), scene.assigned(other)) == ([], ["r"])


def test_what_was_bound_to_an_endpoint_that_was_taken_out_of_the_fleet_goes_elsewhere() -> None:
    """A reload says so."""
    scene = Scene((ONE, TWO))
    scene.fill(ONE, TWO)
    scene.enter("r", budget=2.0)
    bound, other = (ONE, TWO) if scene.assigned(ONE) else (TWO, ONE)
    scene.fleet.reload([pool("small", [other])])
    assert scene.look() == []
    assert (scene.assigned(bound), scene.assigned(other)) == ([], ["r"])


def test_an_idle_engine_takes_what_waits_for_another() -> None:
    """Which engine is free first was a guess; one is enough at a time, for the next look knows of it."""
    scene = Scene((ONE, TWO))
    keys = scene.fill(ONE, TWO)
    for name in "abcd":
        scene.enter(name, budget=3.0)
    waiting = scene.assigned(ONE)
    scene.first_tokens(*keys[2:])
    mine = scene.assigned(TWO)
    assert scene.look() == mine
    scene.first_tokens(*mine)
    assert scene.look() == waiting[:1]
    assert scene.went(waiting[0]) == TWO.id


def test_an_idle_engine_leaves_what_is_better_served_where_it_waits() -> None:
    """What waits there is not counted as ahead of itself."""
    scene = Scene((ONE, TWO))
    scene.fill(ONE)
    answers = scene.write(TWO, since=0.2, token=0.02, pace=0.03, answers=20)
    scene.enter("r", tokens=4000, budget=3.0)
    assert (scene.load(TWO).backlog_s, scene.load(TWO).reopens_in) == (0.0, 0.0)
    assert scene.assigned(ONE) == ["r"]
    assert scene.look() == []
    scene.end(*answers)
    assert scene.look() == ["r"]
    assert scene.went("r") == TWO.id


# --------------------------------------------------------------------------- the room


def test_the_room_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond HELD the latest of the tenant that holds most is refused, whoever came."""
    monkeypatch.setattr(waiting, "MAX_HELD", 3)
    scene = Scene()
    scene.fill(ONE)
    for name, tenant in (("a", "x"), ("b", "x"), ("c", "y")):
        assert scene.enter(name, tenant=tenant, budget=9.0) == []
    assert scene.enter("d", tenant="z", budget=None) == ["b"]
    refused = scene.gone["b"]
    assert (refused.outcome, refused.retry_after, refused.reason) == (Placement.SHED, 5.0, "3 requests wait already")
    assert scene.room.held == 3


def test_the_room_is_bounded_however_many_come_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also before the first of them has found its place."""
    monkeypatch.setattr(waiting, "MAX_HELD", 3)
    scene = Scene()
    for number in range(20):
        scene.arrive(str(number), budget=9.0)
    gone = scene.look()
    assert scene.room.held == 3
    assert [name for name in gone if scene.went(name)] == ["0", "1"]


def test_it_wants_to_be_asked_again_as_long_as_somebody_waits() -> None:
    """Time alone may make room."""
    scene = Scene()
    keys = scene.fill(ONE)
    scene.enter("r", budget=2.0)
    assert START < scene.room.wake_at <= START + 0.1
    scene.first_tokens(*keys)
    scene.look()
    assert scene.room.wake_at == FOREVER


@pytest.mark.parametrize("budget", [2.0, 0.1, None])
def test_a_caller_that_left_leaves_nothing_behind(budget: float | None) -> None:
    """Wherever its request waited."""
    scene = Scene()
    keys = scene.fill(ONE)
    scene.enter("r", budget=budget)
    scene.room.leave("r")
    assert (scene.room.held, scene.room.wake_at) == (0, FOREVER)
    scene.first_tokens(*keys)
    assert scene.look() == []


def test_what_was_let_go_counts_until_the_fleet_knows_of_it() -> None:
    """A second decision in between must not take the same engine for idle; an unknown ticket changes nothing."""
    scene = Scene((ONE, TWO))
    scene.arrive("a", tokens=9000)
    [(_, first)] = scene.room.release(scene.fleet, scene.now)
    scene.arrive("b", tokens=9000)
    [(_, second)] = scene.room.release(scene.fleet, scene.now)
    assert first.chosen is not None
    assert second.chosen is not None
    assert first.chosen.endpoint != second.chosen.endpoint
    for ticket in ("a", "b", "nobody"):
        scene.room.on_dispatched(ticket)
        scene.room.leave(ticket)
    assert (scene.room.held, scene.room.queues.in_dispatch) == (0, {})


# --------------------------------------------------------------------------- always

steps = st.tuples(
    st.sampled_from(["enter", "enter", "look", "first token", "end", "leave", "wait", "lost", "found"]),
    st.integers(0, 9),
    st.sampled_from([0.05, 0.2, 1.0, None]),
    st.sampled_from(["x", "y"]),
    st.sampled_from(["queue", "best_effort", "shed"]),
    st.sampled_from([["small"], ["small", "api"], ["large", "small"]]),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(steps, max_size=40))
def test_a_request_goes_once_or_waits_in_one_place(
    found: list[tuple[str, int, float | None, str, Literal["queue", "best_effort", "shed"], list[str]]],
) -> None:
    """Whatever happens: none is lost, and none goes twice."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(waiting, "MAX_HELD", 6)
        scene, inside = Scene((ONE, TWO, LARGE, API)), set[str]()
        for number, (step, which, budget, tenant, on_miss, tiers) in enumerate(found):
            match step:
                case "enter":
                    scene.arrive(str(number), 900 * (which + 1), budget, tenant, on_miss=on_miss, tiers=tiers)
                    inside.add(str(number))
                case "leave" if inside:
                    gone = sorted(inside)[which % len(inside)]
                    scene.room.leave(gone)
                    inside.remove(gone)
                case "first token" | "end" if scene.gone:
                    name = list(scene.gone)[which % len(scene.gone)]
                    scene.first_tokens(name) if step == "first token" else scene.end(name)
                case "lost":
                    scene.fleet.on_probe_failed((ONE, TWO)[which % 2].id, scene.now)
                case "found":
                    scene.fleet.on_probe_answered((ONE, TWO)[which % 2].id, scene.now)
                case "wait":
                    scene.now += which / 10
            if step != "enter" or which % 2:
                inside -= set(scene.look())
                queues = scene.room.queues
                assert sorted(str(held.request_key) for held in queues.settled()) == sorted(inside)
                assert all(lane == sorted(lane) for lane in queues.assigned.values())
                assert (queues.new, queues.in_dispatch, scene.room.held <= 6) == ([], {}, True)
                assert scene.room.wake_at == (scene.now + turn.TICK if inside else FOREVER)
