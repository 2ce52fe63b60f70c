"""Tier choice: the place of a tier against the chance of another, preference, and refusals."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.rate_limit.send_limits import UNLIMITED, SendLimits
from policies.routing.reasons import reason_of
from policies.types import FOREVER, Health, Load, Placement, RequestView
from tests.support.decision_fleet import P90, PRICES, RATE, DecisionScenario, budget, order

FLEET = {
    "large": {"L": 0.5},
    "small": {"s": 0.2},
    "api": {"A": 0.3},
}  # probability 0.9 at 1.4 times the median: 700, 280, 420 ms


def scenario(seconds: float | None = None, **route: Any) -> DecisionScenario:
    return DecisionScenario(FLEET, route={**(budget(seconds) if seconds else {}), **route})


# --------------------------------------------------------------------------- choice of the tier


@pytest.mark.parametrize(("seconds", "chosen"), [(0.80, "L"), (0.75, "s"), (0.29, "s")])
def test_a_tier_is_left_where_another_adds_more_than_the_place_is_worth(seconds: float, chosen: str) -> None:
    """The place is worth 1 - target = 0.1. Of L 0.95 come within 800 ms, 0.925 within 750; of s all."""
    assert order(scenario(seconds).decide())[0] == chosen


def test_time_spent_in_the_gateway_uses_up_the_ttft_budget() -> None:
    """The budget runs from the request's arrival, not from the decision."""
    ask = RequestView(arrival=0.0)
    assert order(scenario(0.9).decide(ask, now=0.1))[0] == "L"
    assert order(scenario(0.9).decide(ask, now=0.2))[0] == "s"


def test_the_target_says_what_the_place_of_a_tier_is_worth() -> None:
    """At 0.5 the median is nearly enough, at 0.98 nearly all first tokens must be in time."""
    assert order(DecisionScenario(FLEET, route=budget(0.55, target=0.5)).decide())[0] == "L"
    assert order(DecisionScenario(FLEET, route=budget(0.90, target=0.98)).decide())[0] == "s"
    assert order(DecisionScenario(FLEET, route=budget(2.00, target=0.98)).decide())[0] == "L"


def test_a_caller_can_tighten_the_ttft_budget() -> None:
    """`x-slo-ttft-ms` moves the deadline, and can change the tier."""
    decision = scenario(0.8).decide(RequestView(5.0, ttft_budget=0.3), now=5.0)
    assert (order(decision)[0], decision.deadline) == ("s", 5.3)


def test_without_a_budget_every_tier_qualifies() -> None:
    """Preference alone decides, and every probability is 1."""
    decision = scenario().decide()
    assert order(decision) == ["L", "s", "A"]
    assert decision.deadline == FOREVER
    assert {candidate.probability for candidate in decision.ranked} == {1.0}
    assert reason_of(decision, decision.ranked[0]) == "p50 500 ms, chance 1.000 (no TTFT budget)"


def test_one_endpoint_in_time_qualifies_its_tier() -> None:
    """A slow endpoint of the same tier does not disqualify the tier, and is ranked last."""
    decision = DecisionScenario({"large": {"slow": 2.0, "fast": 0.2}, "small": {"s": 0.1}}, route=budget(0.5)).decide()
    assert order(decision) == ["fast", "s", "slow"]


@pytest.mark.parametrize(
    ("prefer", "ranking"),
    [("quality", ["d", "c", "f"]), ("cost", ["c", "f", "d"]), ("latency", ["f", "c", "d"])],
)
def test_prefer_chooses_among_qualifying_tiers(prefer: str, ranking: list[str]) -> None:
    """`quality` is the order of tiers, `cost` the expected price (equal prices in order of tiers), `latency` the
    median."""
    fleet = {"dear": {"d": 0.3}, "cheap": {"c": 0.2}, "fast": {"f": 0.1}}
    pools = {"dear": {"price": PRICES["dear"]}, "cheap": {"price": PRICES["cheap"]}, "fast": {"price": PRICES["cheap"]}}
    decision = DecisionScenario(fleet, pools=pools, route={**budget(1.0), "prefer": prefer}).decide()
    assert order(decision) == ranking


def test_prefer_never_chooses_a_tier_that_would_be_late() -> None:
    """`cost` takes the cheapest of the qualifying tiers."""
    pools = {"large": {"price": PRICES["dear"]}, "small": {"price": PRICES["dear"]}, "api": {"price": PRICES["cheap"]}}
    assert order(DecisionScenario(FLEET, pools=pools, route={**budget(0.3), "prefer": "cost"}).decide())[0] == "s"


def test_the_price_counts_the_prompt_and_the_expected_output() -> None:
    """1000 input tokens at 10 USD per million and 200 output tokens at 30. A smaller max_tokens costs less."""
    dear = DecisionScenario({"dear": {"d": 0.1}}, pools={"dear": {"price": PRICES["dear"]}})
    assert dear.decide().ranked[0].price == pytest.approx(0.01 + 0.006)
    assert dear.decide(RequestView(0.0, max_tokens=100)).ranked[0].price == pytest.approx(0.01 + 0.003)


# --------------------------------------------------------------------------- the ranking


def test_fallbacks_in_time_are_ranked_before_late_ones() -> None:
    """The chosen tier, the other qualifying tiers, then the rest by probability."""
    fleet = {"one": {"1": 0.2, "1late": 0.6}, "two": {"2late": 0.5}, "three": {"3": 0.3}}
    decision = DecisionScenario(fleet, route=budget(0.45)).decide()
    assert order(decision) == ["1", "3", "2late", "1late"]
    assert [candidate.tier for candidate in decision.ranked] == [0, 2, 1, 0]


def test_every_candidate_has_the_reason_of_its_rank() -> None:
    """In milliseconds and chances; those behind say by what they are worth less."""
    decision = scenario(0.44).decide()
    assert {each.endpoint.id: reason_of(decision, each) for each in decision.ranked} == {
        "s": "p50 200 ms, chance 0.983 >= 0.9 for 440 ms",
        "A": "p50 300 ms, chance 0.917 >= 0.9 for 440 ms; worth 0.189 less than the first, most of it by the place of "
        "its tier or part of a tier (0.100)",
        "L": "p50 500 ms, chance 0.220 < 0.9 for 440 ms; worth 0.731 less than the first, most of it by its chances "
        "(0.763)",
    }


def test_idle_equal_endpoints_share_the_load() -> None:
    """Ties are broken by the request's sequence number, not by the order of the configuration."""
    same = DecisionScenario({"small": dict.fromkeys("abcd", 0.1)}, route=budget(1.0))
    first = Counter(order(same.decide(sequence=seed))[0] for seed in range(1000))
    assert all(200 < first[name] < 300 for name in "abcd")


def test_a_decision_does_not_depend_on_the_order_of_the_endpoints() -> None:
    """Two gateways with differently sorted files decide alike."""
    names = "abcdefgh"
    forth = DecisionScenario({"small": dict.fromkeys(names, 0.1)}, route=budget(1.0))
    back = DecisionScenario({"small": dict.fromkeys(reversed(names), 0.1)}, route=budget(1.0))
    assert [order(forth.decide(sequence=s)) for s in range(20)] == [order(back.decide(sequence=s)) for s in range(20)]


def test_equal_inputs_give_equal_decisions() -> None:
    """No memory and no randomness: a replay decides as the gateway did."""
    asked = scenario(0.5)
    assert asked.decide(sequence=3) == asked.decide(sequence=3)


# --------------------------------------------------------------------------- no tier in time


def test_on_miss_best_effort_chooses_the_highest_probability() -> None:
    """A late answer is better than none."""
    decision = scenario(0.16).decide()
    assert decision.outcome is Placement.PLACE
    assert order(decision) == ["s", "A", "L"]
    assert decision.reason == "the best chance is 0.100 < 0.9 for 160 ms; best effort"


def test_after_the_deadline_the_fastest_endpoint_is_first() -> None:
    """Every probability is 0 then."""
    decision = scenario(0.8).decide(now=2.0)
    assert order(decision) == ["s", "A", "L"]
    assert {candidate.probability for candidate in decision.ranked} == {0.0}


def test_on_miss_queue_names_the_requests_ahead() -> None:
    """The decision equals best effort; the reason says that the request waits behind requests in time."""
    decision = scenario(0.1, on_miss="queue").decide()
    assert (decision.outcome, order(decision)[0]) == (Placement.PLACE, "s")
    assert decision.reason.endswith("; behind all that can still make theirs")


def test_a_shed_decision_keeps_its_candidates() -> None:
    """For the explanation; none of the candidates is chosen."""
    decision = scenario(0.1, on_miss="shed").decide()
    assert (decision.outcome, decision.chosen) == (Placement.SHED, None)
    assert order(decision) == ["s", "A", "L"]


def congested(ahead: float, seconds: float) -> DecisionScenario:
    """Two engines that could meet the budget, but for the tokens ahead."""
    loads = {"a": Load(queued_tokens=ahead), "b": Load(queued_tokens=2 * ahead)}
    return DecisionScenario({"small": {"a": 0.1, "b": 0.1}}, loads=loads, route={**budget(seconds), "on_miss": "shed"})


@pytest.mark.parametrize("ahead", [10_000.0, 40_000.0, 200_000.0])
def test_retry_after_is_the_time_until_the_request_would_be_accepted(ahead: float) -> None:
    """A tenth before Retry-After no endpoint makes the budget; at Retry-After the best endpoint does."""
    shed = congested(ahead, 0.5).decide()
    assert shed.outcome is Placement.SHED
    assert shed.retry_after == pytest.approx(0.1 + ahead / RATE - 0.5 / P90)

    def after(wait: float) -> Placement:
        return congested(ahead - wait * RATE, 0.5).decide().outcome

    assert after(0.9 * shed.retry_after) is Placement.SHED
    assert after(shed.retry_after + 1e-9) is Placement.PLACE


@pytest.mark.parametrize(("ahead", "wait"), [(6_000.0, 0.1), (10_000_000.0, 30.0)])
def test_retry_after_is_bounded(ahead: float, wait: float) -> None:
    """At least 0.1 s, and at most 30 s: the limit of a useful prediction."""
    assert congested(ahead, 0.5).decide().retry_after == wait


def test_a_request_shed_for_time_already_spent_may_retry_at_once() -> None:
    """A retry has the whole budget."""
    assert congested(0.0, 0.5).decide(now=0.45).retry_after == 0.1


def test_a_prompt_too_long_for_the_budget_is_shed_with_that_reason() -> None:
    """Waiting cannot help if an idle endpoint is too slow."""
    decision = congested(10_000.0, 0.13).decide()
    assert decision.outcome is Placement.SHED
    assert decision.reason == "a prompt of this length cannot make 130 ms anywhere, even on an idle endpoint"
    assert decision.retry_after == 30.0


# --------------------------------------------------------------------------- no endpoint


def test_a_fleet_that_is_down_is_unavailable() -> None:
    """Retry-After is 1 s, about the time at which a probe can find an endpoint up."""
    down = {name: Load(health=Health.DOWN) for name in ("L", "s", "A")}
    decision = DecisionScenario(FLEET, loads=down).decide()
    assert (decision.outcome, decision.ranked, decision.retry_after) == (Placement.UNAVAILABLE, (), 1.0)
    assert decision.reason == "every endpoint that could take it is down, on trial or rate limited"


def test_a_rate_limited_fleet_is_unavailable_until_the_first_limit_ends() -> None:
    """Retry-After is the earliest end that a provider has announced, where all are later than the deadline."""
    limited = {
        "L": Load(limits=SendLimits(blocked_until=14.0)),
        "s": Load(limits=SendLimits(blocked_until=12.5)),
        "A": Load(limits=SendLimits(blocked_until=99.0)),
    }
    request = RequestView(10.0, stream=True)
    decision = DecisionScenario(FLEET, loads=limited, route=budget(2.0)).decide(request, now=10.0)
    assert (decision.outcome, decision.retry_after) == (Placement.UNAVAILABLE, 2.5)
    apis = {pool: {"local": False} for pool in FLEET}
    decision = DecisionScenario(FLEET, loads=limited, route=budget(2.0), pools=apis).decide(request, now=10.0)
    assert (decision.outcome, decision.retry_after) == (Placement.RATE_LIMITED, 2.5)


def test_a_rate_limit_is_waited_for_only_where_no_other_tier_makes_the_deadline() -> None:
    """Its wait included. Of two tiers at their limits the preferred one is waited for."""
    waits = SendLimits(blocked_until=0.5)
    for a, b, other_ttft, chosen in (
        (waits, UNLIMITED, 0.1, "b"),
        (waits, UNLIMITED, 2.0, "a"),
        (SendLimits(blocked_until=1.5), UNLIMITED, 2.0, "b"),
        (waits, waits, 0.1, "a"),
    ):
        fleet = {"api": {"a": 0.1}, "other": {"b": other_ttft}}
        scenario = DecisionScenario(fleet, loads={"a": Load(limits=a), "b": Load(limits=b)}, route=budget(1.0))
        assert scenario.decide().ranked[0].endpoint.id == chosen


def test_without_a_deadline_a_rate_limit_is_waited_for_only_where_nothing_else_is_usable() -> None:
    fleet = {"api": {"a": 0.1}, "other": {"b": 0.1}}
    limited = {"a": Load(limits=SendLimits(blocked_until=4.0)), "b": Load()}
    assert DecisionScenario(fleet, loads=limited).decide().ranked[0].endpoint.id == "b"
    chosen = DecisionScenario(fleet, loads={**limited, "b": Load(health=Health.DOWN)}).decide().chosen
    assert chosen is not None
    assert (chosen.endpoint.id, chosen.load.wait) == ("a", 4.0)


def test_an_endpoint_at_its_cap_is_taken_only_where_nothing_else_is_usable() -> None:
    """There it is waited for; a tier that is late all the same comes first."""
    fleet = {"api": {"a": 0.1}, "other": {"b": 5.0}}
    full = {"a": Load(full=True), "b": Load()}
    assert DecisionScenario(fleet, loads=full, route=budget(1.0)).decide().ranked[0].endpoint.id == "b"
    down = {"a": Load(full=True), "b": Load(health=Health.DOWN)}
    assert DecisionScenario(fleet, loads=down, route=budget(1.0)).decide().ranked[0].endpoint.id == "a"


def test_a_fitting_tier_that_is_down_makes_a_request_unavailable_not_unfit() -> None:
    """The tier may come back; the request is not at fault."""
    pools = {"large": {"context_window": 100}, "small": {"context_window": 100}}
    decision = DecisionScenario(FLEET, loads={"A": Load(health=Health.DOWN)}, pools=pools).decide()
    assert decision.outcome is Placement.UNAVAILABLE


def test_a_prompt_longer_than_every_context_window_is_unfit() -> None:
    """The reason names the largest context window, so that the caller knows the limit."""
    pools = {"large": {"context_window": 32768}, "small": {"context_window": 8192}, "api": {"context_window": 16384}}
    decision = DecisionScenario(FLEET, pools=pools, tokens=40_000).decide(RequestView(0.0, max_tokens=256))
    assert decision.outcome is Placement.UNFIT
    assert decision.reason == (
        "prompt is too long: 40000 tokens > 32512 maximum, with 256 output it exceeds the context window of every tier "
        "(largest: 32768, pool large)"
    )


def test_an_unfit_request_gets_one_reason_per_tier() -> None:
    """A condition, a context window or a capability."""
    pools: dict[str, Any] = {"small": {"context_window": 1024}, "api": {"capabilities": frozenset({"tools"})}}
    tiers = [{"pool": "large", "when": {"images": False}}, "small", "api"]
    decision = DecisionScenario(FLEET, pools=pools, route={"tiers": tiers}).decide(
        RequestView(0.0, images=True, max_tokens=100)
    )
    assert decision.outcome is Placement.UNFIT
    assert decision.reason == (
        "large: images is true; small: 1000 tokens + 100 output exceed its context window of 1024; api: it lacks images"
    )


# --------------------------------------------------------------------------- baselines


def test_a_baseline_scorer_ignores_the_budget() -> None:
    """A baseline takes the first tier whole and sheds nothing, like the routers under comparison."""
    fleet = {"large": {"L1": 0.5, "L2": 5.0}, "small": {"s": 0.01}}
    route = {**budget(0.1), "scorer": "round_robin", "on_miss": "shed", "prefer": "latency"}
    decisions = [DecisionScenario(fleet, route=route).decide(sequence=seed) for seed in range(4)]
    assert [order(decision) for decision in decisions] == [["L1", "L2", "s"], ["L2", "L1", "s"]] * 2
    assert {decision.outcome for decision in decisions} == {Placement.PLACE}


def test_a_baseline_scorer_leaves_a_tier_only_if_all_its_endpoints_are_down() -> None:
    """Filters apply to all scorers."""
    down = {"L": Load(health=Health.DOWN)}
    decision = DecisionScenario(FLEET, loads=down, route={**budget(0.1), "scorer": "least_request"}).decide()
    assert order(decision) == ["s", "A"]
    assert decision.scorer == "least_request"
    told = reason_of(decision, decision.ranked[0])
    assert told == "least_request in tier 2; not weighed: p50 200 ms, chance 0.014"


# --------------------------------------------------------------------------- invariants

LOADS = st.builds(
    Load,
    health=st.sampled_from(Health),
    in_flight=st.integers(0, 3),
    queued_tokens=st.floats(0, 1e5),
    limits=st.builds(SendLimits, blocked_until=st.sampled_from([0.0, 3.0])),
)


@given(
    st.dictionaries(st.sampled_from("abcdefgh"), st.tuples(st.floats(0.001, 10), LOADS), min_size=1),
    st.sampled_from(["predicted", "round_robin", "least_request", "prefix_hash"]),
    st.sampled_from(["best_effort", "queue", "shed"]),
    st.sampled_from(["quality", "cost", "latency"]),
    st.floats(0.01, 5),
    st.integers(0, 2**32),
)
def test_every_endpoint_is_ranked_or_rejected_once(
    endpoints: dict[str, tuple[float, Load]], scorer: str, on_miss: str, prefer: str, seconds: float, seed: int
) -> None:
    """For any fleet: no endpoint is lost or considered twice; of those in time, one is the first."""
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
        chances = [each.probability for each in decision.ranked]
        assert any(qualifying) or chances == sorted(chances, reverse=True)
        assert (decision.outcome is Placement.SHED) == (on_miss == "shed" and bool(qualifying) and not any(qualifying))
    assert (decision.outcome is Placement.UNAVAILABLE) == (not decision.ranked)
