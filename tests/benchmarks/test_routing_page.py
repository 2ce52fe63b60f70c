"""The page of routing: ours less the best peer, by scenario and load, in points."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import routing, scenarios
from benchmarks.routing_page import IN_MILLISECONDS, Result, differences, page, rows_of, shared, table
from lab.replay.sim_fleet import OURS, REFERENCE


def shares(load: float, scorer: str, *good: float, p50: float = 0.1) -> list[Result]:
    """A seed each."""
    rows = [{"all": {"good": each, "ttft": (p50, 1.0, 2.0)}} for each in good]
    return [
        {"scenario": "d", "load": load, "scorer": scorer, "seed": seed, "rows": row} for seed, row in enumerate(rows)
    ]


def cells(page: str, scenario: str) -> list[str]:
    row = next(line for line in page.splitlines() if line.startswith(f"| ({scenario}) |"))
    return [cell.strip() for cell in row.split("|")[2:-1]]


def test_the_difference_is_to_the_best_peer_at_that_load() -> None:
    """Another one at another load, the reference never; a dash where ours or every peer is missing."""
    found = [*shares(0.2, OURS, 0.9), *shares(0.2, "lpwl", 0.8), *shares(0.2, "lmetric", 0.7)]
    found += [*shares(0.4, OURS, 0.9), *shares(0.4, "lpwl", 0.8), *shares(0.4, "lmetric", 0.95)]
    found += [*shares(0.7, OURS, 0.9), *shares(0.7, REFERENCE, 1.0), *shares(1.0, "lpwl", 0.5)]
    assert cells(differences(found, ""), "d") == ["+10.0 lpwl", "**-5.0 lmetric**", "-", "-", "-", "-"]


def test_medians_are_compared_with_the_same_peer() -> None:
    """The one with the most good requests, not the fastest; slower is bold, and equal is not; NaN: nobody answered."""
    found = [*shares(0.2, OURS, 0.9, 0.9, p50=0.35), *shares(0.2, "lpwl", 0.8, 0.8, p50=0.3)]
    found += [*shares(0.2, "lmetric", 0.7, 0.7, p50=0.1), *shares(0.4, OURS, 0.9), *shares(0.4, "lpwl", 0.8)]
    found += [*shares(0.7, OURS, 0.9, p50=0.1), *shares(0.7, "lpwl", 0.8, p50=float("nan"))]
    found += [*shares(1.0, OURS, 0.9, p50=0.1), *shares(1.0, "lpwl", 0.8, p50=0.2)]
    medians = cells(differences(found, "", IN_MILLISECONDS), "d")
    assert medians == ["**+50 ±0 ms lpwl (2)**", "+0 ms lpwl", "-", "-100 ms lpwl", "-", "-"]


def test_both_tables_of_differences_keep_their_rows() -> None:
    """The rows of two tables have the same names."""
    found = [*shares(0.2, OURS, 0.9, p50=0.2), *shares(0.2, "lpwl", 0.8)]
    before = "\n\n".join(
        ["# Routing", differences(found, ""), differences(found, "", IN_MILLISECONDS), "## (d) agents"]
    )
    assert cells(differences([], before), "d")[0] == "+10.0 lpwl"
    assert cells(differences([], before, IN_MILLISECONDS), "d")[0] == "**+100 ms lpwl**"


def test_seeds_are_compared_one_by_one() -> None:
    """The error is that of the differences. A seed of one side alone is left out, and so is a peer with fewer seeds."""
    found = [*shares(0.2, OURS, 0.5, 0.9), *shares(0.2, "lpwl", 0.4, 0.7, 0.9)]
    assert cells(differences(found, ""), "d")[0] == "+15.0 ±5.0 lpwl (2)"
    lucky = shares(0.2, "lmetric", 1.0)
    assert cells(differences([*found, *lucky], ""), "d")[0] == "+15.0 ±5.0 lpwl (2)"


def test_a_difference_of_more_seeds_is_kept() -> None:
    """One further seed of later rules says less than three of earlier ones."""
    before = differences([*shares(0.2, OURS, 0.5, 0.9), *shares(0.2, "lpwl", 0.4, 0.7)], "")
    once = [*shares(0.2, OURS, 0.5), *shares(0.2, "lpwl", 0.7)]
    assert differences(once, before) == before
    assert differences([*shares(0.2, OURS, 0.5, 0.5), *shares(0.2, "lpwl", 0.7, 0.7)], before) != before


def test_a_table_is_of_the_seeds_that_all_have_played() -> None:
    """A further seed of some would be compared with the first seed of others."""
    first = [*shares(0.2, OURS, 0.5), *shares(0.2, REFERENCE, 0.6)]
    assert shared([*first, *shares(0.2, OURS, 0.5, 0.9)[1:], *shares(0.4, OURS, 0.5, 0.9)]) == [
        *first,
        *shares(0.4, OURS, 0.5, 0.9),
    ]


def test_a_row_without_results_is_kept() -> None:
    """One machine has the results of some scenarios."""
    before = differences([{**one, "scenario": "a"} for one in [*shares(0.2, OURS, 0.9), *shares(0.2, "lpwl", 0.8)]], "")
    after = differences([*shares(0.4, OURS, 0.9), *shares(0.4, "lpwl", 0.8)], before)
    assert cells(after, "a") == cells(before, "a")
    assert cells(after, "d")[1] == "+10.0 lpwl"
    later = differences([*shares(0.7, OURS, 0.9), *shares(0.7, "lpwl", 0.95)], after)
    assert cells(later, "d")[1:3] == ["+10.0 lpwl", "**-5.0 lpwl**"]


def test_a_load_without_results_keeps_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of the loads, with dashes under columns that it has not; another replay of the load replaces it."""
    monkeypatch.setattr(scenarios, "SECONDS", 3.0)
    before = "| load | ours | rules |\n|---|---|---|\n| 0.20 | 0.123 | 0012 |\n| 1.00 | 0.456 | 0012 |"
    found = [routing.replay_one(("d", 1.0, scorer, 0, Path())) for scorer in (OURS, "lpwl")]
    rows = rows_of("\n".join(table("d", found, before)))
    assert list(rows) == ["0.20", "1.00"]
    assert (rows["0.20"]["ours"], rows["0.20"]["rules"], rows["0.20"]["best baseline"]) == ("0.123", "0012", "-")
    assert rows["1.00"]["rules"] == found[0]["rules"] > "0012"


def test_a_scenario_needs_no_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its columns are dashes then; the section is played again on a page that has both tables."""
    monkeypatch.setattr(scenarios, "SECONDS", 3.0)
    found = [routing.replay_one(("d", 1.0, scorer, 0, Path())) for scorer in (OURS, "lpwl")]
    heading, _, row = ([cell.strip() for cell in line.split("|")] for line in table("d", found))
    shown = dict(zip(heading, row, strict=True))
    assert shown["reference"] == "-"
    ttft = found[0]["rows"]["all"]["ttft"]
    assert [float(shown[f"{name} ours"].removesuffix(" s")) for name in ("p50", "p90", "p99")] == [
        pytest.approx(each, abs=0.005) for each in ttft
    ]
    assert page(found, page(found)) == page(found)
