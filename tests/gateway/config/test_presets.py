"""Workload presets, and the ready-made policy files."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import yaml

from gateway.config.yaml_source import FOLDER, preset, with_preset
from policies.routes.route import Limits, Route, Workload

WORKLOADS = get_args(Workload)


def completed(workload: Workload, raw: dict[str, Any]) -> Route:
    return Route.model_validate(with_preset(workload, raw))


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
    route = completed(workload, {"tiers": ["small"]})
    assert (route.ttft and route.ttft.budget, route.total and route.total.budget) == (ttft, total)


def test_operator_settings_override_the_preset_key_by_key() -> None:
    """Missing keys come from the preset, inside a section too."""
    route = completed("chat", {"tiers": ["small"], "ttft": {"target": 0.99}, "tpot": {"budget": "20ms"}})
    assert route.ttft is not None
    assert (route.ttft.budget, route.ttft.target) == (1.0, 0.99)
    assert route.tpot is not None
    assert route.tpot.budget == pytest.approx(0.02)


@pytest.mark.parametrize("off", [None, "off"])
def test_an_operator_can_switch_a_budget_off(off: Any) -> None:
    """An explicit null overrides the preset."""
    assert completed("chat", {"tiers": ["small"], "ttft": off}).ttft is None
    assert completed("chat", {"tiers": ["small"], "hedge": "off"}).hedge == "off"


def test_applying_a_preset_changes_neither_side() -> None:
    """The preset serves every route, and the raw route is still the operator's."""
    before, raw = repr(preset("chat")), {"tiers": ["small"], "ttft": {"target": 0.5}}
    with_preset("chat", raw)["ttft"]["budget"] = "9s"
    assert repr(preset("chat")) == before
    assert raw == {"tiers": ["small"], "ttft": {"target": 0.5}}


def ready_made(workload: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((FOLDER / f"{workload}.yaml").read_text())
    return loaded


def test_every_workload_has_a_ready_made_policy() -> None:
    """One file each, and no others."""
    assert sorted(file.stem for file in FOLDER.glob("*.yaml")) == sorted(WORKLOADS)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_ready_made_policy_is_one_route_over_known_pools(workload: Workload) -> None:
    """A policy file holds routes alone, for use with any fleet with these pool names."""
    document = ready_made(workload)
    assert list(document) == ["routes"]
    assert list(document["routes"]) == [workload]
    route = completed(workload, document["routes"][workload])
    assert {tier.pool for tier in route.tiers} <= {"small", "large", "openai"}


@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_route_of_a_workload_is_the_ready_made_one_but_for_tiers_limits_and_growth(workload: Workload) -> None:
    """Read from the file of the workload; no other key of it is lost."""
    raw = ready_made(workload)["routes"][workload]
    own = {key: raw[key] for key in ("tiers", "limits")}
    if growth := raw.get("ttft", {}).get("per_1k_tokens"):
        own["ttft"] = {"per_1k_tokens": growth}
    assert Route.model_validate(raw) == completed(workload, own)
    assert completed(workload, {"tiers": ["small"]}).limits == Limits()


@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_budget_is_fixed_unless_the_route_says_that_it_grows(workload: Workload) -> None:
    """A workload's name alone does not: where people wait longer for a long prompt, the ready-made policy says so."""
    assert not completed(workload, {"tiers": ["small"]}).budget_grows
    ready = Route.model_validate(ready_made(workload)["routes"][workload])
    assert ready.budget_grows == (workload in ("chat", "agent"))
    if ready.budget_grows:  # Llama-3.3-70B on four H100 takes 14.5 s for 100,000 tokens
        assert ready.ttft_budget(None, 100_000) >= 14.5 * 1.1


@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_ready_made_policy_begins_with_its_purpose(workload: Workload) -> None:
    """In the head comment."""
    assert (FOLDER / f"{workload}.yaml").read_text().startswith(f"# {workload}: ")
