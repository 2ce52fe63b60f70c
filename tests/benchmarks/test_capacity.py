"""The search for the load at which nine of ten requests are good."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import scenarios
from benchmarks.capacity import (
    GOAL,
    LEAST,
    MOST,
    NEAR,
    STEP,
    Capacity,
    Replays,
    highest,
    loads_of,
    measured,
    page,
    verdict,
)


def falling(at: float, looked: list[float]) -> Callable[[float], float]:
    """A share of GOAL at the load `at`, less above."""

    def share(load: float) -> float:
        looked.append(load)
        return min(GOAL * at / load, 1.0)

    return share


@pytest.mark.parametrize("at", [0.2, 0.25, 0.7, 0.999, 1.0, 1.37, 2.9, 4.4])
def test_the_highest_load_is_found_within_three_percent(at: float) -> None:
    """Never above it, and in at most a dozen replays."""
    looked: list[float] = []
    found = highest(falling(at, looked))
    assert found <= at < found * NEAR
    assert len(looked) <= 12


def test_a_scorer_without_capacity_ends_the_search() -> None:
    """As does one beyond the loads that are tried."""
    looked: list[float] = []
    assert highest(falling(LEAST / 2, looked)) == 0.0
    assert highest(falling(100.0, looked)) == MOST
    assert min(looked) >= LEAST
    assert max(looked) <= MOST


def test_the_capacity_is_of_real_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Good at the load that is found, not good well above; both seeds count; requests/s as offered."""
    monkeypatch.setattr(scenarios, "SECONDS", 12.0)
    found = measured(("d", "least_request", "attainment", 2, Path()))
    replays = Replays("d", "least_request", 2, Path())
    assert replays.at(found.load)["attainment"] >= GOAL > replays.at(found.load * STEP)["attainment"]
    assert found.met == replays.at(1.0)["attainment"]
    offered = [len(scenarios.arrivals("d", found.load, Path(), seed)) for seed in range(2)]
    assert found.rate == pytest.approx(sum(offered) / 2 / 12.0, rel=0.1)


def test_the_page_keeps_the_sections_of_scenarios_that_are_not_measured_again() -> None:
    """And replaces the others: a scenario takes minutes, and the results of one machine are not on another."""
    old, other = (
        Capacity("d", "old", "good", 1, 0.5, 2.0, 0.6, 0.7),
        Capacity("a", "one", "good", 1, 0.8, 4.0, 0.5, 0.6),
    )
    before = page([old, other])
    assert page([], before) == before
    assert page([replace(old, load=1.5)], before) == page([replace(old, load=1.5), other])


def test_a_scorer_that_is_not_measured_again_keeps_its_row() -> None:
    """With the rules that it was measured with, also where its capacity is unknown; the verdict is of all rows."""
    ours = Capacity("d", "ours", "good", 1, 1.2, 4.8, 0.91, 0.92, "0012")
    peers = [
        Capacity("d", "lpwl", "good", 3, 1.0, 4.0, 0.9, 0.91, "0012"),
        Capacity("d", "lmetric", "good", 1, 0.0, 0.0, 0.5, 0.6, "0012"),
    ]
    again = replace(ours, load=1.5, rules="0095")
    assert page([again], page([ours, *peers])) == page([again, *peers])
    assert "1.50 times the load of the best peer, lpwl" in page([again], page([ours, *peers]))


def test_the_capacity_of_ours_is_read_from_the_page() -> None:
    """Of good requests, for the ablation; LEAST where it is less, nothing where ours was not measured."""
    rows = [
        Capacity("d", "ours", "good", 1, 1.541, 8.0, 0.9, 0.9),
        Capacity("d", "ours", "attainment", 1, 2.0, 8.0, 0.9, 0.9),
        Capacity("e", "ours", "good", 1, 0.0, 0.0, 0.1, 0.2),
        Capacity("b", "lpwl", "good", 1, 0.8, 4.0, 0.5, 0.6),
    ]
    assert loads_of(page(rows)) == {"d": 1.54, "e": LEAST}


def test_the_page_orders_scorers_by_capacity() -> None:
    """One without a capacity comes last, and is named as such."""
    rows = [
        Capacity("d", "slow", "good", 2, 0.0, 0.0, 0.1, 0.2),
        Capacity("d", "mid", "good", 2, 0.8, 4.0, 0.5, 0.6),
        Capacity("d", "top", "good", 2, 1.5, 7.5, 0.99, 1.0),
    ]
    lines = [line for line in page(rows).splitlines() if line.startswith("| ")]
    assert [line.split()[1] for line in lines] == ["scorer", "top", "mid", "slow"]
    assert lines[1] == "| top | 1.50 | 7.5 | 0.990 | 1.000 | 2 | - |"
    assert lines[3].startswith("| slow | < 0.2 |")


@pytest.mark.parametrize(
    ("loads", "said"),
    [
        (
            {"ours": 1.5, "lpwl": 1.0, "lmetric": 1.2, "reference": 2.0},
            "1.25 times the load of the best peer, lmetric, and 0.75",
        ),
        ({"ours": 1.5, "lpwl": 0.0}, "more than 7.50 times the load of the best peer, lpwl."),
        ({"ours": 0.0, "lpwl": 0.5}, "at most 0.40 times"),
        ({"ours": 0.0, "lpwl": 0.0}, "an unknown number of times"),
        ({"lpwl": 0.5}, ""),
        ({"ours": 0.5, "reference": 1.0}, ""),
    ],
)
def test_the_page_compares_ours_with_the_best_peer(loads: dict[str, float], said: str) -> None:
    """A load that is not known is a bound; the references are no peers."""
    found = verdict([Capacity("d", scorer, "good", 1, load, 1.0, 0.9, 0.9) for scorer, load in loads.items()])
    assert (said in found) if said else not found
