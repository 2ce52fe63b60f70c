"""The suite's results as a page."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.figures.figure import Block, Engines, Figure, Goal, Measured, Scenario
from benchmarks.page import Results, table, tables
from benchmarks.peers import DIRECT, NGINX, SMG, Proxy
from benchmarks.suite import SCENARIOS, Values, note

COST = Figure("cost", "request, us", [Goal(90)])
CHUNK = Figure("chunk", "chunk, us", [Goal(1.15, NGINX), Goal(1, SMG)], digits=1)
KEPT = Figure("kept", "throughput of most callers / best", [Goal(0.95, least=True)], digits=2)
TTFT = Figure("8k-200-p50", "8 KB: p50, ms", digits=2, rate=200)
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
    """After the goal and the ratios, beside the peers and the last committed result."""
    found, last = results(cost={"ours": [80, 70, 900], "nginx": [20, 16, 18]}), results(cost={"ours": [100]})
    assert cells(COST, found, last) == ["≤ 90", "4.44", "**80**", "18", "100"]
    assert cells(COST, results(cost={"ours": [80]})) == ["≤ 90", "**80**", ""]


def test_the_ratios_to_nginx_and_to_smg_come_first() -> None:
    """Without one for values of noise; a peer without results has no column."""
    found = results(cost={"ours": [80], "nginx": [20], "smg": [160], "vllm": [40]})
    assert cells(COST, found) == ["≤ 90", "4.00", "0.50", "**80**", "20", "160", "40", ""]
    assert cells(ADDED, results(added={"ours": [0.5], "nginx": [-0.1]}))[1] == ""


def test_a_missed_goal_is_marked() -> None:
    """In absolute figures, or relative to a peer; without the peer a relative goal cannot be missed."""
    assert cells(COST, results(cost={"ours": [90.4]}))[1] == "**90**"
    assert cells(COST, results(cost={"ours": [91]}))[1] == "**91** (missed)"
    assert cells(CHUNK, results(chunk={"ours": [11.5], "nginx": [10]}))[::2] == [
        "≤ 1.15 x nginx, ≤ 1 x smg",
        "**11.5**",
        "",
    ]
    assert cells(CHUNK, results(chunk={"ours": [11.6], "nginx": [10]}))[2] == "**11.6** (missed)"
    assert cells(CHUNK, results(chunk={"ours": [11.5], "nginx": [10], "smg": [11.4]}))[3] == "**11.5** (missed)"
    assert cells(CHUNK, results(chunk={"ours": [99]}))[1] == "**99.0**"
    assert cells(CHUNK, results(chunk={"ours": [99]}))[0] == "≤ 1.15 x nginx, ≤ 1 x smg"


def test_a_goal_can_be_a_least_value() -> None:
    """Of throughput."""
    assert cells(KEPT, results(kept={"ours": [0.95]}))[:2] == ["≥ 0.95", "**0.95**"]
    assert cells(KEPT, results(kept={"ours": [0.94]}))[1] == "**0.94** (missed)"


def test_a_proxy_that_does_not_keep_up_shows_the_rate_that_it_achieves() -> None:
    """Even where it answered all in the end."""
    values = {"8k-200-p50": {"ours": [1.25], "nginx": [0.2], "smg": [900.0]}}
    rates = {"8k-200-rate": {"ours": [199.0], "nginx": [200.0], "smg": [150.0], "litellm": [7.0]}}
    assert cells(TTFT, results(**values, **rates))[3:-1] == ["**1.25**", "0.20", "only 150/s", "only 7/s"]


def test_a_peer_that_did_not_stand_it_has_an_empty_cell() -> None:
    """Ours too."""
    assert cells(COST, results(cost={"nginx": [18]})) == ["≤ 90", "", "****", "18", ""]


def test_a_part_of_the_suite_replaces_its_figures_alone() -> None:
    """So that the suite can be measured in parts."""
    before = results(cost={"ours": [80], "nginx": [20]}, chunk={"ours": [12]})
    merged = results(chunk={"ours": [11]}, cost={"smg": [30]}).on_top_of(before)
    assert merged.figures == {"cost": {"ours": 80, "nginx": 20, "smg": 30}, "chunk": {"ours": 11}}


def test_blocks_without_measurements_are_left_out() -> None:
    """And figures."""
    shown = [
        Block(name, "About it.", [Scenario(name, figures, _unplayed)])
        for name, figures in (("Cost", [COST, KEPT]), ("Chunks", [CHUNK]))
    ]
    page = tables(shown, results(cost={"ours": [80]}), None)
    assert "## Cost" in page
    assert "Chunks" not in page
    assert KEPT.title not in page


def test_what_a_proxy_adds_is_what_there_is_without_it_taken_off() -> None:
    """Round by round; a round without one peer says nothing of another."""
    assert noted(ADDED, {DIRECT: {"added": 0.2}, "ours": {"added": 0.5}}) == {DIRECT: [0.2], "ours": [0.3]}
    assert noted(ADDED, {DIRECT: {}, "ours": {"added": 0.5}}) == {}
    assert noted(COST, {"ours": {"cost": 80.0}, "nginx": {}}) == {"ours": [80.0]}


def test_the_rate_that_was_achieved_is_kept_once() -> None:
    """Though several figures of a scenario refer to it."""
    values: Values = defaultdict(lambda: defaultdict(list))
    scenario = Scenario("x", [TTFT, replace(TTFT, key="8k-200-p99")], _unplayed)
    note(scenario, {"ours": {"8k-200-rate": 199.0}}, values)
    assert values == {"8k-200-rate": {"ours": [199.0]}}


def test_every_figure_of_the_suite_is_told_from_the_others() -> None:
    """By key, in the stored results, and by title."""
    figures: list[Any] = [figure for scenario in SCENARIOS for figure in scenario.figures]
    for names in ([figure.key for figure in figures], [figure.title for figure in figures]):
        assert len(set(names)) == len(names)
