"""Workload presets, and the ready-made policy files."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from policies import presets
from policies.routes.route import PRESETS, Route, Workload, with_preset
from tests.policies.deciding import preset

WORKLOADS = get_args(Workload)
FILES = Path(presets.__path__[0])


@pytest.mark.parametrize(
    ("workload", "ttft", "total"),
    [
        ("autocomplete", 0.3, 0.5),
        ("chat", 1.0, None),
        ("task", 2.0, 5.0),
        ("agent", 3.0, 30.0),
        ("batch", None, None),
    ],
)
def test_a_workload_sets_its_budgets(workload: Workload, ttft: float | None, total: float | None) -> None:
    """The documented table."""
    route = preset(workload, {"tiers": ["small"]})
    assert (route.ttft and route.ttft.budget, route.total and route.total.budget) == (ttft, total)


def test_operator_settings_override_the_preset_key_by_key() -> None:
    """Missing keys come from the preset, inside a section too."""
    route = preset("chat", {"tiers": ["small"], "ttft": {"target": 0.99}, "tpot": {"budget": "20ms"}})
    assert route.ttft is not None
    assert (route.ttft.budget, route.ttft.target) == (1.0, 0.99)
    assert route.tpot is not None
    assert route.tpot.budget == pytest.approx(0.02)


@pytest.mark.parametrize("off", [None, "off"])
def test_an_operator_can_switch_a_budget_off(off: Any) -> None:
    """An explicit null overrides the preset."""
    assert preset("chat", {"tiers": ["small"], "ttft": off}).ttft is None
    assert preset("chat", {"tiers": ["small"], "hedge": "off"}).hedge == "off"


def test_applying_a_preset_changes_neither_side() -> None:
    """The preset serves every route, and the raw route is still the operator's."""
    before, raw = repr(PRESETS), {"tiers": ["small"], "ttft": {"target": 0.5}}
    with_preset("chat", raw)["ttft"]["budget"] = "9s"
    assert repr(PRESETS) == before
    assert raw == {"tiers": ["small"], "ttft": {"target": 0.5}}


def ready_made(workload: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((FILES / f"{workload}.yaml").read_text())
    return loaded


def test_every_workload_has_a_ready_made_policy() -> None:
    """One file each, and no others."""
    assert sorted(file.stem for file in FILES.glob("*.yaml")) == sorted(WORKLOADS)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_ready_made_policy_is_one_route_over_known_pools(workload: Workload) -> None:
    """A policy file holds routes alone, for use with any fleet with these pool names."""
    document = ready_made(workload)
    assert list(document) == ["routes"]
    assert list(document["routes"]) == [workload]
    route = preset(workload, document["routes"][workload])
    assert {tier.pool for tier in route.tiers} <= {"small", "large", "openai"}


@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_ready_made_policy_equals_its_preset(workload: Workload) -> None:
    """Except for tiers, limits and growth. Every value is written out, none is left to the preset."""
    raw = ready_made(workload)["routes"][workload]
    own = {key: raw[key] for key in ("tiers", "limits")}
    if growth := raw.get("ttft", {}).get("per_1k_tokens"):
        own["ttft"] = {"per_1k_tokens": growth}
    assert Route.model_validate(raw) == preset(workload, own)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_budget_is_fixed_unless_the_route_says_that_it_grows(workload: Workload) -> None:
    """A workload's name alone does not: where people wait longer for a long prompt, the ready-made policy says so."""
    assert not preset(workload, {"tiers": ["small"]}).budget_grows
    ready = Route.model_validate(ready_made(workload)["routes"][workload])
    assert ready.budget_grows == (workload in ("chat", "agent"))
    if ready.budget_grows:  # Llama-3.3-70B on four H100 takes 14.5 s for 100,000 tokens
        assert ready.ttft_budget(None, 100_000) >= 14.5 * 1.1


@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_ready_made_policy_begins_with_its_purpose(workload: Workload) -> None:
    """In the head comment."""
    assert (FILES / f"{workload}.yaml").read_text().startswith(f"# {workload}: ")
