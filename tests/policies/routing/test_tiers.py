"""The tier walk."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.types import FOREVER, Health, Load, Placement, RequestView
from tests.policies.deciding import P90, PRICES, RATE, DecisionScenario, budget, order

FLEET = {"large": {"L": 0.5}, "small": {"s": 0.2}, "api": {"A": 0.3}}  # chance 0.9 at 1.4 times: 700, 280, 420 ms


def world(seconds: float | None = None, **route: Any) -> DecisionScenario:
    return DecisionScenario(FLEET, route={**(budget(seconds) if seconds else {}), **route})


# --------------------------------------------------------------------------- which tier


@pytest.mark.parametrize(("seconds", "chosen"), [(0.71, "L"), (0.69, "s"), (0.29, "s")])
def test_the_first_tier_that_can_still_make_the_deadline_is_taken(seconds: float, chosen: str) -> None:
    """The most wanted of those that offer the target chance."""
    assert order(world(seconds).decide())[0] == chosen


def test_what_the_gateway_spent_counts() -> None:
    """The budget runs from the request's arrival, not from the decision."""
    ask = RequestView(arrival=0.0)
    assert order(world(0.8).decide(ask, now=0.09))[0] == "L"
    assert order(world(0.8).decide(ask, now=0.11))[0] == "s"


def test_the_target_says_how_sure_a_tier_must_be() -> None:
    """At 0.5 the median is enough, at 0.98 twice the median is needed."""
    assert order(DecisionScenario(FLEET, route=budget(0.51, target=0.5)).decide())[0] == "L"
    assert order(DecisionScenario(FLEET, route=budget(0.71, target=0.98)).decide())[0] == "s"


def test_a_caller_may_tighten_its_budget() -> None:
    """`x-slo-ttft-ms` moves the deadline, and with it the tier."""
    decision = world(0.8).decide(RequestView(5.0, ttft_budget=0.3), now=5.0)
    assert (order(decision)[0], decision.deadline) == ("s", 5.3)


def test_without_a_budget_every_tier_qualifies() -> None:
    """Then preference alone decides, and chances are certain."""
    decision = world().decide()
    assert order(decision) == ["L", "s", "A"]
    assert decision.deadline == FOREVER
    assert {candidate.probability for candidate in decision.ranked} == {1.0}
    assert decision.ranked[0].reason == "p50 500 ms, chance 1.000 (no TTFT budget)"


def test_a_tier_qualifies_with_one_endpoint_of_it() -> None:
    """The slow endpoint of the good tier does not spoil it, and does not go first."""
    decision = DecisionScenario({"large": {"slow": 2.0, "fast": 0.2}, "small": {"s": 0.1}}, route=budget(0.5)).decide()
    assert order(decision) == ["fast", "s", "slow"]


@pytest.mark.parametrize(
    ("prefer", "ranking"),
    [("quality", ["d", "c", "f"]), ("cost", ["c", "f", "d"]), ("latency", ["f", "c", "d"])],
)
def test_preference_chooses_among_the_tiers_that_qualify(prefer: str, ranking: list[str]) -> None:
    """Quality is the tier order, cost the expected price (equal ones in tier order), latency the median."""
    fleet = {"dear": {"d": 0.3}, "cheap": {"c": 0.2}, "fast": {"f": 0.1}}
    pools = {"dear": {"price": PRICES["dear"]}, "cheap": {"price": PRICES["cheap"]}, "fast": {"price": PRICES["cheap"]}}
    decision = DecisionScenario(fleet, pools=pools, route={**budget(1.0), "prefer": prefer}).decide()
    assert order(decision) == ranking


def test_preference_does_not_bring_back_a_tier_that_would_be_late() -> None:
    """The cheapest of those that make it."""
    pools = {"large": {"price": PRICES["dear"]}, "small": {"price": PRICES["dear"]}, "api": {"price": PRICES["cheap"]}}
    assert order(DecisionScenario(FLEET, pools=pools, route={**budget(0.3), "prefer": "cost"}).decide())[0] == "s"


def test_the_price_is_of_the_prompt_and_the_expected_answer() -> None:
    """1000 tokens in at 10 USD per million, 200 out at 30; an answer that is cut short costs less."""
    dear = DecisionScenario({"dear": {"d": 0.1}}, pools={"dear": {"price": PRICES["dear"]}})
    assert dear.decide().ranked[0].price == pytest.approx(0.01 + 0.006)
    assert dear.decide(RequestView(0.0, max_tokens=100)).ranked[0].price == pytest.approx(0.01 + 0.003)


# --------------------------------------------------------------------------- the ranking


def test_failover_finds_those_that_make_it_before_those_that_do_not() -> None:
    """The chosen tier, the other qualifying tiers, then the rest by their chance."""
    fleet = {"one": {"1": 0.2, "1late": 0.6}, "two": {"2late": 0.5}, "three": {"3": 0.3}}
    decision = DecisionScenario(fleet, route=budget(0.45)).decide()
    assert order(decision) == ["1", "3", "2late", "1late"]
    assert [candidate.tier for candidate in decision.ranked] == [0, 2, 1, 0]


def test_every_candidate_says_why_it_stands_where_it_stands() -> None:
    """In milliseconds and chances; tiers are counted from one."""
    reasons = {c.endpoint.id: c.reason for c in world(0.44).decide().ranked}
    assert reasons == {
        "s": "p50 200 ms, chance 0.983 >= 0.9",
        "A": "qualifies in tier 3; tier 2 preferred: p50 300 ms, chance 0.917 >= 0.9",
        "L": "p50 500 ms, chance 0.220 < 0.9 for 440 ms",
    }


def test_a_preference_is_part_of_the_reason() -> None:
    """Why the first tier was not taken although it qualifies."""
    ranked = world(2.0, prefer="latency").decide().ranked
    assert ranked[1].reason.startswith("qualifies in tier 3; tier 2 preferred by latency: p50 300 ms")


def test_idle_equal_endpoints_share_the_load() -> None:
    """Ties go by the luck of the request, not by the order of the configuration."""
    same = DecisionScenario({"small": dict.fromkeys("abcd", 0.1)}, route=budget(1.0))
    first = Counter(order(same.decide(sequence=seed))[0] for seed in range(1000))
    assert all(200 < first[name] < 300 for name in "abcd")


def test_a_decision_does_not_depend_on_the_order_of_the_endpoints() -> None:
    """Two gateways with differently sorted files decide alike."""
    names = "abcdefgh"
    forth = DecisionScenario({"small": dict.fromkeys(names, 0.1)}, route=budget(1.0))
    back = DecisionScenario({"small": dict.fromkeys(reversed(names), 0.1)}, route=budget(1.0))
    assert [order(forth.decide(sequence=s)) for s in range(20)] == [order(back.decide(sequence=s)) for s in range(20)]


def test_the_same_question_has_the_same_answer() -> None:
    """Nothing is remembered and nothing is random: a replay decides as the gateway did."""
    asked = world(0.5)
    assert asked.decide(sequence=3) == asked.decide(sequence=3)


# --------------------------------------------------------------------------- nobody makes it


def test_best_effort_sends_to_the_best_chance() -> None:
    """A late answer is better than none."""
    decision = world(0.16).decide()
    assert decision.outcome is Placement.PLACE
    assert order(decision) == ["s", "A", "L"]
    assert decision.reason == "the best chance is 0.100 < 0.9 for 160 ms; best effort"


def test_with_the_budget_gone_the_least_delay_is_best() -> None:
    """All chances are nothing then."""
    decision = world(0.8).decide(now=2.0)
    assert order(decision) == ["s", "A", "L"]
    assert {candidate.probability for candidate in decision.ranked} == {0.0}


def test_queue_says_whom_the_request_waits_for() -> None:
    """The decision is the same; when it is carried out the waiting room says."""
    decision = world(0.1, on_miss="queue").decide()
    assert (decision.outcome, order(decision)[0]) == (Placement.PLACE, "s")
    assert decision.reason.endswith("; behind all that can still make theirs")


def test_shedding_keeps_the_candidates_for_the_explanation() -> None:
    """But none of them is chosen."""
    decision = world(0.1, on_miss="shed").decide()
    assert (decision.outcome, decision.chosen) == (Placement.SHED, None)
    assert order(decision) == ["s", "A", "L"]


def crowded(ahead: float, seconds: float) -> DecisionScenario:
    """Two engines that could make the budget, but for the tokens ahead."""
    loads = {"a": Load(queued_tokens=ahead), "b": Load(queued_tokens=2 * ahead)}
    return DecisionScenario({"small": {"a": 0.1, "b": 0.1}}, loads=loads, route={**budget(seconds), "on_miss": "shed"})


@pytest.mark.parametrize("ahead", [10_000.0, 40_000.0, 200_000.0])
def test_a_shed_request_is_told_when_it_would_be_taken(ahead: float) -> None:
    """Retry-After is honest: after it, less a tenth, the best endpoint does not make it; after it, it does."""
    shed = crowded(ahead, 0.5).decide()
    assert shed.outcome is Placement.SHED
    assert shed.retry_after == pytest.approx(0.1 + ahead / RATE - 0.5 / P90)

    def after(wait: float) -> Placement:
        return crowded(ahead - wait * RATE, 0.5).decide().outcome

    assert after(0.9 * shed.retry_after) is Placement.SHED
    assert after(shed.retry_after + 1e-9) is Placement.PLACE


@pytest.mark.parametrize(("ahead", "wait"), [(6_000.0, 0.1), (10_000_000.0, 30.0)])
def test_retry_after_is_bounded(ahead: float, wait: float) -> None:
    """Not sooner than a tenth of a second, not later than anybody can predict."""
    assert crowded(ahead, 0.5).decide().retry_after == wait


def test_a_request_that_came_late_is_told_to_come_again_at_once() -> None:
    """Another try has its whole budget before it."""
    assert crowded(0.0, 0.5).decide(now=0.45).retry_after == 0.1


def test_a_prompt_that_cannot_make_it_anywhere_is_told_so() -> None:
    """No waiting helps if even an idle endpoint is too slow."""
    decision = crowded(10_000.0, 0.13).decide()
    assert decision.outcome is Placement.SHED
    assert decision.reason == "a prompt of this length cannot make 130 ms anywhere, even on an idle endpoint"
    assert decision.retry_after == 30.0


# --------------------------------------------------------------------------- nothing to send to


def test_nothing_alive_is_unavailable() -> None:
    """Worth another look about when a probe may have found one."""
    down = {name: Load(health=Health.DOWN) for name in ("L", "s", "A")}
    decision = DecisionScenario(FLEET, loads=down).decide()
    assert (decision.outcome, decision.ranked, decision.retry_after) == (Placement.UNAVAILABLE, (), 1.0)
    assert decision.reason == "every endpoint that could take it is down, on trial or rate limited"


def test_rate_limited_everywhere_is_unavailable_until_the_first_limit_ends() -> None:
    """The providers said when."""
    limited = {"L": Load(blocked_until=14.0), "s": Load(blocked_until=12.5), "A": Load(blocked_until=99.0)}
    decision = DecisionScenario(FLEET, loads=limited).decide(now=10.0)
    assert (decision.outcome, decision.retry_after) == (Placement.UNAVAILABLE, 2.5)


def test_one_tier_that_is_only_down_makes_it_unavailable_and_not_unfit() -> None:
    """It may be back; the request is not at fault."""
    pools = {"large": {"context_window": 100}, "small": {"context_window": 100}}
    decision = DecisionScenario(FLEET, loads={"A": Load(health=Health.DOWN)}, pools=pools).decide()
    assert decision.outcome is Placement.UNAVAILABLE


def test_a_prompt_longer_than_every_context_window_is_unfit() -> None:
    """The reason names the largest, so that the caller knows what would fit."""
    pools = {"large": {"context_window": 32768}, "small": {"context_window": 8192}, "api": {"context_window": 16384}}
    decision = DecisionScenario(FLEET, pools=pools, tokens=40_000).decide(RequestView(0.0, max_tokens=256))
    assert decision.outcome is Placement.UNFIT
    assert decision.reason == (
        "prompt of 40000 tokens + 256 output exceeds the context window of every tier (largest: 32768, pool large)"
    )


def test_an_unfit_request_is_told_what_every_tier_lacks() -> None:
    """One reason for each."""
    pools: dict[str, Any] = {"small": {"context_window": 1024}, "api": {"capabilities": frozenset({"tools"})}}
    tiers = [{"pool": "large", "when": {"images": False}}, "small", "api"]
    decision = DecisionScenario(FLEET, pools=pools, route={"tiers": tiers}).decide(
        RequestView(0.0, images=True, max_tokens=100)
    )
    assert decision.outcome is Placement.UNFIT
    assert decision.reason == (
        "large: images is true; small: 1000 tokens + 100 output exceed its context window of 1024; api: it lacks images"
    )


# --------------------------------------------------------------------------- yardsticks


def test_a_yardstick_does_not_see_the_budget() -> None:
    """It takes the first tier whole, as the routers it stands for would, and sheds nothing."""
    fleet = {"large": {"L1": 0.5, "L2": 5.0}, "small": {"s": 0.01}}
    route = {**budget(0.1), "scorer": "round_robin", "on_miss": "shed", "prefer": "latency"}
    decisions = [DecisionScenario(fleet, route=route).decide(sequence=seed) for seed in range(4)]
    assert [order(decision) for decision in decisions] == [["L1", "L2", "s"], ["L2", "L1", "s"]] * 2
    assert {decision.outcome for decision in decisions} == {Placement.PLACE}


def test_a_yardstick_leaves_a_tier_only_when_nothing_in_it_lives() -> None:
    """The filters hold for all scorers."""
    down = {"L": Load(health=Health.DOWN)}
    decision = DecisionScenario(FLEET, loads=down, route={**budget(0.1), "scorer": "least_request"}).decide()
    assert order(decision) == ["s", "A"]
    assert decision.scorer == "least_request"
    assert decision.reason == "least_request in tier 2; not weighed: p50 200 ms, chance 0.014"


# --------------------------------------------------------------------------- always

LOADS = st.builds(
    Load,
    health=st.sampled_from(Health),
    in_flight=st.integers(0, 3),
    queued_tokens=st.floats(0, 1e5),
    blocked_until=st.sampled_from([0.0, 3.0]),
)


@given(
    st.dictionaries(st.sampled_from("abcdefgh"), st.tuples(st.floats(0.001, 10), LOADS), min_size=1),
    st.sampled_from(["predicted", "lmetric", "prefix_hash", "token_load"]),
    st.sampled_from(["best_effort", "queue", "shed"]),
    st.sampled_from(["quality", "cost", "latency"]),
    st.floats(0.01, 5),
    st.integers(0, 2**32),
)
def test_every_endpoint_is_ranked_or_rejected_once(
    endpoints: dict[str, tuple[float, Load]], scorer: str, on_miss: str, prefer: str, seconds: float, seed: int
) -> None:
    """Whatever the fleet: nothing is lost, nothing is considered twice, and the best is what is chosen."""
    half: dict[str, dict[str, float]] = {"one": {}, "two": {}}
    for name, (ttft, _) in endpoints.items():
        half["one" if name < "e" else "two"][name] = ttft
    route = {**budget(seconds), "scorer": scorer, "on_miss": on_miss, "prefer": prefer}
    asked = DecisionScenario(half, loads={name: load for name, (_, load) in endpoints.items()}, route=route)
    decision = asked.decide(now=1.0, request=RequestView(1.0), sequence=seed)
    considered = order(decision) + [rejection.endpoint for rejection in decision.rejected]
    assert sorted(considered) == sorted(endpoints)
    qualifying = [candidate.probability >= 0.9 for candidate in decision.ranked]
    if scorer == "predicted":
        assert qualifying == sorted(qualifying, reverse=True)
        assert (decision.outcome is Placement.SHED) == (on_miss == "shed" and bool(qualifying) and not any(qualifying))
    assert (decision.outcome is Placement.UNAVAILABLE) == (not decision.ranked)
