"""The value of a candidate: what makes one endpoint of a tier worth more than another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.latency.tpot import STALL_GRID
from policies.routing.ranking import ENGINE, SOON
from policies.routing.reasons import reason_of, terms_of
from policies.types import Decision, Load, RankKind
from tests.support.decision_fleet import RATE, DecisionScenario, TpotChance, budget, order

TOKENS = 1000
IDLE = Load()


def decided(sequence: int = 0, hits: Any = None, loads: Any = None, **ttft: float) -> Decision:
    """Of one tier under a budget of 3 s, with median TTFTs (s) by endpoint."""
    return DecisionScenario({"main": ttft}, loads or {}, hits or {}, route=budget(3.0)).decide(sequence=sequence)


def firsts(**asked: Any) -> set[str]:
    """The endpoints that the first choice is drawn from."""
    return {order(decided(sequence, **asked))[0] for sequence in range(40)}


def decoding(answers: float, **load: Any) -> Load:
    """An engine with expected TPOT misses that grow linearly with the stall, up to `answers`."""
    return Load(expected_tpot_misses=tuple(answers * seconds / STALL_GRID[-1] for seconds in STALL_GRID), **load)


def test_the_sooner_first_token_is_worth_more() -> None:
    """Though both are nearly sure to come in time."""
    assert firsts(a=0.3, b=0.2) == {"b"}


def test_endpoints_within_a_few_percent_count_as_equal() -> None:
    """Forecasts are not exact enough to send all requests to an engine that is 3% faster; 30% decides."""
    assert firsts(a=0.100, b=0.103) == {"a", "b"}
    assert firsts(a=0.100, b=0.130) == {"a"}


def test_of_equals_the_longer_hit_comes_first() -> None:
    """Even where the hit saves next to nothing, and the first token comes a little later: not 0.5 s later."""
    assert firsts(a=0.1, b=0.1, hits={"b": 16}) == {"b"}
    assert firsts(a=0.1, b=0.2, hits={"b": 16}) == {"b"}
    assert firsts(a=0.1, b=0.6, hits={"b": 16}) == {"a"}


def test_answers_that_would_miss_their_tpot_are_subtracted() -> None:
    """One good request for one that is expected to be lost."""
    assert firsts(a=0.1, b=0.1, loads={"a": decoding(32), "b": decoding(4)}) == {"b"}
    found = decided(a=0.1, loads={"a": decoding(2 * STALL_GRID[-1])})
    assert terms_of(found, found.ranked[0])["misses"] == pytest.approx(-2 * TOKENS / RATE)


def test_only_the_misses_that_the_prompt_adds_count() -> None:
    """Those of earlier prefills are lost already."""
    assert firsts(a=0.1, b=0.1, loads={"a": decoding(32, stalled=0.5), "b": decoding(32)}) == {"a", "b"}


def test_answers_without_a_tpot_budget_cost_nothing() -> None:
    """At any number of them."""
    assert firsts(a=0.1, b=0.1, loads={"a": Load(running=99)}) == {"a", "b"}


def test_engine_time_is_subtracted() -> None:
    """Others cannot have it: an engine that holds half of the prompt is worth more than one that is sooner by as
    little."""
    assert firsts(a=0.10, b=0.12, hits={"b": TOKENS // 2}) == {"b"}
    found = decided(a=0.10, b=0.12, hits={"b": TOKENS // 2})
    assert terms_of(found, found.ranked[1])["engine"] == pytest.approx(-ENGINE * TOKENS / 2 / RATE)


def test_engine_time_is_no_reason_to_leave_a_tier() -> None:
    """A long prompt stays with idle engines before an API, whose prefill nobody here pays for with time."""
    fleet = {"engines": {"e": 0.6}, "api": {"A": 0.6}}
    found = DecisionScenario(fleet, tokens=10_000, pools={"api": {"local": False}}, route=budget(3.0)).decide()
    assert order(found) == ["e", "A"]


def test_a_slow_engine_of_a_tier_costs_no_more_engine_time_than_a_fast_one() -> None:
    """The time of a slow engine is worth less: an uneven fleet uses all of its engines."""
    uneven = DecisionScenario({"main": {"slow": 0.3, "fast": 0.1, "cached": 0.2}}, hits={"cached": TOKENS})
    uneven.beliefs.rates = {"slow": RATE / 4}
    found = uneven.decide()
    engine = {each.endpoint.id: terms_of(found, each)["engine"] for each in found.ranked}
    assert engine["slow"] == pytest.approx(engine["fast"]) == pytest.approx(-ENGINE * TOKENS / RATE)
    assert engine["cached"] == 0


def test_the_page_on_routing_states_the_constants() -> None:
    """In its formula."""
    page = (Path(__file__).parents[3] / "docs/routing.md").read_text("utf-8")
    assert f"{SOON:g} x (1 - p50 / budget)" in page
    assert f"{ENGINE:g} x more" in page


def test_an_endpoint_after_a_probe_says_so() -> None:
    loads = {"a": Load(last_token_at=-100.0), "b": Load(last_token_at=0.0)}
    probes = [decided(sequence, loads=loads, a=0.2, b=0.1) for sequence in range(400)]
    probed = [found for found in probes if found.ranked[0].ranked_as is RankKind.STALE]
    assert 0 < len(probed) < 20
    assert {order(found)[0] for found in probed} == {"a"}
    assert reason_of(probed[0], probed[0].ranked[0]).startswith("probe, not heard of lately: p50 200 ms")
    assert reason_of(probed[0], probed[0].ranked[1]).endswith("behind a probe")


@given(
    st.dictionaries(st.sampled_from("abcdef"), st.floats(0.01, 4), min_size=1),
    st.dictionaries(st.sampled_from("abcdef"), st.integers(0, TOKENS)),
    st.dictionaries(st.sampled_from("abcdef"), st.floats(0, 1)),
    st.floats(0.5, 0.99),
)
def test_the_terms_of_a_value_are_its_parts(
    ttft: dict[str, float], hits: dict[str, int], paces: dict[str, float], target: float
) -> None:
    """They sum up to it, and the chance of the first choice is no less than the others' by more than these say."""
    half = {"one": {}, "two": {}}
    for name, seconds in ttft.items():
        half["one" if name < "d" else "two"][name] = seconds
    pools = {name: endpoints for name, endpoints in half.items() if endpoints}
    pace = {name: TpotChance(chance, 1.0) for name, chance in paces.items()}
    route = {**budget(3.0, target), "tpot": {"budget": "50ms"}}
    found = DecisionScenario(pools, hits=hits, tpot=pace, route=route).decide()
    for each in found.ranked:
        assert sum(terms_of(found, each).values()) == pytest.approx(each.value)
    if found.in_time:
        assert found.ranked[0].value >= max(each.value for each in found.ranked) - 0.05
