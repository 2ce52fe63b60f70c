"""Every row of the ablation switches off what it names: the replay calls what is patched, and comes out otherwise."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import cycle
from pathlib import Path

import pytest

from benchmarks import ablation, scenarios
from benchmarks.ablation import BY_NAME, CAPACITIES, IDEAS, ON, Idea, placements, replay_one, tasks, without
from benchmarks.ablation_page import Ablated, page
from benchmarks.capacity import loads_of
from lab.replay.player import play
from lab.replay.sim_fleet import Scenario
from lab.traffic.traces import Agents, Arrival, agents
from policies.queue.placement_round import PlacementRound
from tests.support.replay_builders import arrivals as chats

# The overload of (d) makes late requests, of (c) requests for another tier; hedges need engines that hang. Late
# prefills of seconds need long prompts and engines that are idle at times; a learned TPOT needs answers before it.
TRAFFIC = {
    "holding": "tiers",
    "spilling": "tiers",
    "spill at the last moment": "tiers",
    "chances of tiers": "tiers",
    "TPOT in the choice of a tier": "long tiers",
    "hedging": "hanging",
    "price of TPOT misses": "long sessions",
    "harm of late requests": "batch",
    "calm engine for late prefills": "long sessions",
}


@cache
def busy(traffic: str) -> tuple[Scenario, list[Arrival]]:
    """A scenario with more than its engines can serve, for a few seconds."""
    if traffic == "hanging":
        return replace(scenarios.setting("c"), hung=0.1), chats(150, rate=20.0, route="chat")
    found = scenarios.setting("c" if traffic in ("tiers", "long tiers", "batch") else "d")
    routes = cycle(found.routes)
    shape = Agents(seconds=8.0, sessions=30.0, pause=1.0, task=6_000)
    if traffic == "long sessions":
        shape = Agents(seconds=20.0, sessions=3.0, pause=3.0, task=20_000)
    if traffic == "many sessions":
        shape = Agents(seconds=30.0, sessions=10.0, pause=2.0, task=10_000)
    if traffic == "long tiers":
        shape, routes = Agents(seconds=30.0, sessions=8.0, pause=1.0, task=1_000), cycle(["chat"])
    if traffic == "batch":
        shape, routes = Agents(seconds=30.0, sessions=8.0, pause=1.0, task=6_000), cycle(["agent", "batch"])
    sessions = agents(shape, 1)
    return found, [replace(arrival, route=next(routes)) for arrival in sessions]


@cache
def whole(traffic: str) -> int:
    return placements(play(*busy(traffic)))


@pytest.mark.parametrize("idea", IDEAS[1:], ids=lambda idea: idea.name)
def test_an_idea_off_is_another_outcome(idea: Idea) -> None:
    """And every patched function was called: a row that changes nothing would say that the idea is worth nothing."""
    traffic = TRAFFIC.get(idea.name, "sessions")
    on, before = whole(traffic), busy(traffic)[0]
    assert idea.plays_in(before)
    with without(idea) as calls:
        off = placements(play(idea.change(before) if idea.change else before, busy(traffic)[1]))
    assert [name for name, count in calls.items() if not count] == []
    assert off != on


def test_without_a_patch_the_outcome_is_the_same() -> None:
    """Or any difference would prove nothing."""
    with without(BY_NAME[ON]):
        assert placements(play(*busy("sessions"))) == whole("sessions")


def test_a_patch_of_a_name_that_is_gone_fails() -> None:
    """A renamed function cannot turn a row into a comparison of like with like."""
    gone = Idea("gone", "", ((PlacementRound, "no_such_function", lambda *_: None),))
    with pytest.raises(AttributeError, match="no_such_function"), without(gone):
        pass


def test_an_idea_is_on_again_after_its_replay() -> None:
    """Workers play many replays."""
    before = PlacementRound.move
    with without(BY_NAME["spilling"]):
        assert PlacementRound.move is not before
    assert PlacementRound.move is before


def test_a_replay_tells_what_it_never_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page then says so, in place of a figure."""
    unused = Idea(
        "unused", "", ((PlacementRound, "demote", lambda *_: None), (PlacementRound, "move", lambda *_: None))
    )
    monkeypatch.setitem(BY_NAME, "unused", unused)
    monkeypatch.setattr(scenarios, "SECONDS", 3.0)
    found = [replay_one(("d", 1.0, name, 0, Path())) for name in (ON, "unused", "knowledge of caches")]
    assert found[1].uncalled == ("PlacementRound.move",)
    rows = page({ON: "", "unused": "", "knowledge of caches": "", "hedging": ""}, ON, found).splitlines()
    cells = {row.split(" | ")[0].removeprefix("| "): row.split(" | ")[1] for row in rows if row.startswith("| ")}
    assert cells["unused"] == "not called: `PlacementRound.move` |"
    assert cells["hedging"] == "- |"
    (p50, p90), (p50_off, p90_off) = ([ttft * 1e3 for ttft in found[i].ttft] for i in (0, 2))
    assert cells[ON] == f"{found[0].good:.3f} ({p50:.0f} {p90:.0f}) |"
    points = (found[2].good - found[0].good) * 100
    assert cells["knowledge of caches"] == f"{points:+.1f} ({p50_off - p50:+.0f} {p90_off - p90:+.0f}) |"


def test_the_page_compares_seed_by_seed() -> None:
    """In points, with the standard error of the differences; and says where nothing changed."""
    found = [
        Ablated("d", 1.0, idea, seed, good, checksum)
        for idea, seed, good, checksum in (
            (ON, 0, 0.80, 1),
            (ON, 1, 0.60, 2),
            ("one", 0, 0.79, 3),
            ("one", 1, 0.57, 4),
            ("two", 0, 0.80, 1),
            ("two", 1, 0.60, 2),
        )
    ]
    rows = page({ON: "", "one": "", "two": "", "three": ""}, ON, found).splitlines()
    assert "| nothing | 0.700 |" in rows
    assert "| one | -2.0 ±1.0 |" in rows
    assert "| two | no change |" in rows
    assert "Less than 0.5 points in every scenario that was tried: two." in rows


def test_an_idea_is_tried_where_it_plays_a_part() -> None:
    """Tiers in the scenario that has several; all seeds; the rest everywhere."""
    planned = list(tasks(["c", "d"], [1.0], [ON, "spilling"], 2, Path()))
    assert [(name, idea, seed) for name, _, idea, seed, _ in planned] == [
        ("c", ON, 0),
        ("c", ON, 1),
        ("c", "spilling", 0),
        ("c", "spilling", 1),
        ("d", ON, 0),
        ("d", ON, 1),
    ]
    assert ablation.named("hedging") == [ON, "hedging"]


def test_each_scenario_is_played_at_its_capacity() -> None:
    """As the page of capacities has it."""
    known = loads_of(CAPACITIES.read_text())
    planned = list(tasks(["b", "crowd"], [], [ON], 1, Path()))
    assert [(name, load) for name, load, *_ in planned] == [("b", known["b"]), ("crowd", known["crowd"])]


def test_a_column_of_earlier_rules_is_kept() -> None:
    """Beside a column of today's: differences are to the first row of the same rules."""
    old = [
        Ablated("d", 1.0, idea, 0, good, checksum, (), "0012")
        for idea, good, checksum in ((ON, 0.8, 1), ("one", 0.7, 2))
    ]
    new = [Ablated("d", 1.0, idea, 0, good, 1, (), "0095") for idea, good in ((ON, 0.9), ("one", 0.9))]
    ideas = {ON: "", "one": ""}
    both = page(ideas, ON, new, page(ideas, ON, old))
    assert both == page(ideas, ON, [*old, *new])
    assert "| off | (d) at 1, 0012 | (d) at 1, 0095 |" in both
    assert "| one | -10.0 | no change |" in both
    assert "that was tried: none." in both
