"""The suite's results as a page."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.figures.figure import Engines, Figure, Measured, Scenario
from benchmarks.page import Results, table
from benchmarks.peers import DIRECT, Proxy
from benchmarks.suite import SCENARIOS, Values, note

COST, CHUNK = Figure("cost", "request, us", 90), Figure("chunk", "chunk, us", 1.15, times_nginx=True, digits=1)
ADDED = Figure("added", "TTFT added, ms", added=True, digits=2)


def results(**values: Mapping[str, Sequence[float]]) -> Results:
    return Results.of(values, [], 3, 0.0)


def cells(figure: Figure, found: Results, last: Results | None = None) -> list[str]:
    """Cells of the figure's row, after its title."""
    return [cell.strip() for cell in table([figure], found, last).splitlines()[2].split("|")[2:-1]]


async def _unplayed(_proxy: Proxy, _engines: Engines) -> Measured:
    return {}


def noted(figure: Figure, found: dict[str, Measured]) -> dict[str, list[float]]:
    values: Values = defaultdict(lambda: defaultdict(list))
    note(Scenario("x", [figure], _unplayed), found, values)
    return {name: list(each) for name, each in values[figure.key].items()}


def test_a_figure_is_the_median_of_its_rounds() -> None:
    """Beside the goal, nginx, and the last committed result; a peer without results has no column."""
    found, last = results(cost={"ours": [80, 70, 900], "nginx": [20, 16, 18]}), results(cost={"ours": [100]})
    assert cells(COST, found, last) == ["90", "**80**", "4.44", "18", "100"]
    assert cells(COST, results(cost={"ours": [80]})) == ["90", "**80**", "", ""]


def test_a_missed_goal_is_marked() -> None:
    """In absolute figures, or relative to nginx; without nginx a relative goal cannot be missed."""
    assert cells(COST, results(cost={"ours": [90.4]}))[1] == "**90**"
    assert cells(COST, results(cost={"ours": [91]}))[1] == "**91** (missed)"
    assert cells(CHUNK, results(chunk={"ours": [11.5], "nginx": [10]}))[:2] == ["1.15 x nginx", "**11.5**"]
    assert cells(CHUNK, results(chunk={"ours": [11.6], "nginx": [10]}))[1] == "**11.6** (missed)"
    assert cells(CHUNK, results(chunk={"ours": [99]}))[1] == "**99.0**"


def test_a_peer_that_did_not_stand_it_has_an_empty_cell() -> None:
    """Ours too."""
    assert cells(COST, results(cost={"nginx": [18]}, chunk={"ours": [1]})) == ["90", "****", "", "18", ""]


def test_what_a_proxy_adds_is_what_there_is_without_it_taken_off() -> None:
    """Round by round; a round without one peer says nothing of another."""
    assert noted(ADDED, {DIRECT: {"added": 0.2}, "ours": {"added": 0.5}}) == {DIRECT: [0.2], "ours": [0.3]}
    assert noted(ADDED, {DIRECT: {}, "ours": {"added": 0.5}}) == {}
    assert noted(COST, {"ours": {"cost": 80.0}, "nginx": {}}) == {"ours": [80.0]}


def test_every_figure_of_the_suite_is_told_from_the_others() -> None:
    """By key, in the stored results, and by title."""
    figures: list[Any] = [figure for scenario in SCENARIOS for figure in scenario.figures]
    for names in ([figure.key for figure in figures], [figure.title for figure in figures]):
        assert len(set(names)) == len(names)
