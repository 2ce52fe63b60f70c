"""Candidates of a request, and reasons for the rejection of other endpoints."""

from __future__ import annotations

from typing import Any

import pytest

from policies.adapters.known_adapters import UNKNOWN_ADAPTER
from policies.latency.tpot import STALL_GRID
from policies.rate_limit.send_limits import SendLimits
from policies.types import Decision, Health, Load, Placement, RejectionKind, RequestView
from tests.support.decision_fleet import DecisionScenario, budget, order

TWO = {"small": {"a": 0.1, "b": 0.1}}


def rejections(decision: Decision) -> dict[str, str]:
    """Reasons, by endpoint or (for a whole tier) by pool."""
    return {rejection.endpoint or rejection.pool: rejection.reason for rejection in decision.rejected}


@pytest.mark.parametrize(
    ("load", "reason"),
    [
        (Load(health=Health.DOWN), "down"),
        (Load(limits=SendLimits(blocked_until=12.5)), "rate limited for 2.5 s more"),
    ],
)
def test_a_down_or_rate_limited_endpoint_is_rejected(load: Load, reason: str) -> None:
    """With the reason that /explain shows."""
    decision = DecisionScenario(TWO, loads={"a": load}).decide(now=10.0)
    assert order(decision) == ["b"]
    assert rejections(decision) == {"a": reason}


DOWN = Load(health=Health.DOWN)


@pytest.mark.parametrize(
    "load", [Load(health=Health.PROBING), Load(limits=SendLimits(blocked_until=10.0)), Load(in_flight=99)]
)
def test_a_busy_or_probing_endpoint_is_a_candidate(load: Load) -> None:
    """A half-open breaker admits one request; an expired rate limit blocks nothing."""
    assert sorted(order(DecisionScenario(TWO, loads={"a": load}).decide(now=10.0))) == ["a", "b"]


def test_failing_endpoints_are_the_last_resort() -> None:
    """Some answers of servers that fail half of their requests are better than none; a lost server is no resort."""
    failing, lost = Load(health=Health.DOWN, failing=True), Load(health=Health.DOWN)
    assert order(DecisionScenario(TWO, loads={"a": failing}).decide()) == ["b"]
    assert order(DecisionScenario(TWO, loads={"a": failing, "b": lost}).decide()) == ["a"]
    assert sorted(order(DecisionScenario(TWO, loads={"a": failing, "b": failing}).decide())) == ["a", "b"]
    assert DecisionScenario(TWO, loads={"a": lost, "b": lost}).decide().outcome is Placement.UNAVAILABLE


def test_a_time_that_the_provider_has_named_to_this_caller_is_kept() -> None:
    """Like one that counts for all callers: where no other endpoint is left, the caller hears it."""
    own, limited = Load(limits=SendLimits(refused_until=40.0)), Load(limits=SendLimits(blocked_until=40.0))
    assert order(DecisionScenario(TWO, loads={"a": own}, route=budget(1.0)).decide()) == ["b"]
    decision = DecisionScenario(TWO, loads={"a": own, "b": limited}, route=budget(1.0)).decide()
    assert decision.outcome is not Placement.PLACE


def test_a_short_refusal_of_this_caller_is_waited_for() -> None:
    """Within the TTFT budget it is a wait like any limit's."""
    decision = DecisionScenario(
        TWO, loads={"a": Load(limits=SendLimits(refused_until=0.3)), "b": DOWN}, route=budget(2.0)
    ).decide()
    assert (order(decision), decision.ranked[0].load.wait) == (["a"], 0.3)


KINDS: list[tuple[Load, RejectionKind]] = [
    (Load(health=Health.DOWN), RejectionKind.DOWN),
    (Load(health=Health.DOWN, on_trial=True), RejectionKind.ON_TRIAL),
    (Load(full=True), RejectionKind.AT_CAP),
    (Load(limits=SendLimits(blocked_until=50.0)), RejectionKind.RATE_LIMITED),
    (Load(warming=True), RejectionKind.WARMING),
]


@pytest.mark.parametrize(("load", "kind"), KINDS)
def test_every_rejection_of_an_endpoint_has_a_kind(load: Load, kind: RejectionKind) -> None:
    """Code reads the kind; the reason may be worded anew."""
    decision = DecisionScenario(TWO, loads={"a": load}, route=budget(1.0)).decide()
    assert [(each.endpoint, each.kind) for each in decision.rejected] == [("a", kind)]


def test_an_endpoint_that_has_refused_an_adapter_is_no_candidate_for_a_while() -> None:
    """Of a route with an adapter; other routes go there."""
    loads, tuned = {"a": Load(unknown_variants={"law": 50.0})}, {"tiers": [{"pool": "small", "adapter": "law"}]}
    asked = DecisionScenario(TWO, loads, route=budget(1.0) | tuned, adapter="law")
    [rejected] = asked.decide(now=0.5).rejected
    assert (rejected.endpoint, rejected.kind) == ("a", UNKNOWN_ADAPTER)
    assert asked.decide(now=51.0).rejected == ()
    assert DecisionScenario(TWO, loads, route=budget(1.0)).decide(now=0.5).rejected == ()


@pytest.mark.parametrize(
    ("facts", "request_view", "kind"),
    [
        ({"context_window": 100}, RequestView(0.0), RejectionKind.CONTEXT_WINDOW),
        ({"capabilities": frozenset[str]()}, RequestView(0.0, tools=True), RejectionKind.CAPABILITY),
        ({}, RequestView(0.0, unfit={"p": "it cannot carry this"}), RejectionKind.UNTRANSLATABLE),
    ],
)
def test_an_unfit_request_is_told_apart_by_kind(
    facts: dict[str, Any], request_view: RequestView, kind: RejectionKind
) -> None:
    """A caller's error code depends on it."""
    decision = DecisionScenario({"p": {"a": 0.1}}, pools={"p": facts}).decide(request_view)
    assert (decision.outcome, decision.cause) == (Placement.UNFIT, kind)


def test_a_refusal_for_now_has_a_cause_too() -> None:
    """Down, or limited; a placed request has none."""
    down = DecisionScenario(TWO, loads={"a": DOWN, "b": DOWN}).decide()
    assert (down.outcome, down.cause) == (Placement.UNAVAILABLE, RejectionKind.DOWN)
    assert DecisionScenario(TWO).decide().cause is None


def test_a_request_with_state_at_an_endpoint_goes_nowhere_else() -> None:
    """Whatever the other endpoints and tiers could do; it waits for nothing if its own endpoint is lost."""
    pinned = RequestView(0.0, stream=True, pinned="b")
    pools = {**TWO, "large": {"c": 0.01}}
    decision = DecisionScenario(pools, route=budget(0.05)).decide(pinned)
    assert order(decision) == ["b"]
    assert rejections(decision) == dict.fromkeys("ac", "the state of the request is at another endpoint")
    lost = DecisionScenario(pools, loads={"b": Load(health=Health.DOWN)}).decide(pinned)
    assert lost.outcome is Placement.UNAVAILABLE


def test_a_warming_endpoint_is_a_candidate_only_without_other_endpoints() -> None:
    """A warming endpoint takes requests only if all usable endpoints of the pool are warming."""
    warming, down = Load(warming=True), Load(health=Health.DOWN)
    assert order(DecisionScenario(TWO, loads={"a": warming, "b": Load(queued_tokens=1e6)}).decide()) == ["b"]
    assert order(DecisionScenario(TWO, loads={"a": warming, "b": down}).decide()) == ["a"]
    assert sorted(order(DecisionScenario(TWO, loads={"a": warming, "b": warming}).decide())) == ["a", "b"]


def test_the_prefill_of_cached_tokens_costs_no_engine_time() -> None:
    """Scorers price the expected TPOT misses by seconds of uncached prefill."""
    asked = DecisionScenario(
        TWO, hits={"b": 960}, loads={name: Load(expected_tpot_misses=(9.0,) * len(STALL_GRID)) for name in "ab"}
    )
    assert order(asked.decide()) == ["b", "a"]


def test_an_endpoint_without_a_load_counts_as_idle() -> None:
    """A newly configured endpoint."""
    decision = DecisionScenario(TWO, loads={"a": Load(queued_tokens=100.0)}, route=budget(1.0)).decide()
    assert order(decision) == ["b", "a"]


@pytest.mark.parametrize(
    ("asked", "pool", "reason"),
    [
        ({"tools": True}, {"capabilities": frozenset({"json_schema"})}, "it lacks tools"),
        ({"json_schema": True}, {"capabilities": frozenset({"tools"})}, "it lacks json_schema"),
        ({"images": True}, {"capabilities": frozenset()}, "it lacks images"),
        ({"max_tokens": 25}, {"context_window": 1024}, "1000 tokens + 25 output exceed its context window of 1024"),
        ({}, {"context_window": 1199}, "1000 tokens + 200 output exceed its context window of 1199"),
    ],
)
def test_a_tier_without_the_capability_or_context_window_is_rejected(
    asked: dict[str, Any], pool: dict[str, Any], reason: str
) -> None:
    """At any load; the next tier is considered."""
    scenario = DecisionScenario({"large": {"L": 0.1}, "small": {"s": 0.1}}, pools={"large": pool})
    decision = scenario.decide(RequestView(0.0, **asked))
    assert order(decision) == ["s"]
    assert rejections(decision) == {"large": reason}
    assert [rejection.tier for rejection in decision.rejected] == [0]


@pytest.mark.parametrize(
    ("asked", "pool"),
    [
        ({"tools": True}, {"capabilities": None}),
        ({"tools": True}, {"capabilities": frozenset({"tools", "images"})}),
        ({"max_tokens": 24}, {"context_window": 1024}),
        ({"max_tokens": 10**9}, {"context_window": None}),
    ],
)
def test_unknown_capabilities_and_context_windows_reject_nothing(asked: dict[str, Any], pool: dict[str, Any]) -> None:
    """Nor does a request that just fits."""
    assert order(DecisionScenario({"large": {"L": 0.1}}, pools={"large": pool}).decide(RequestView(0.0, **asked))) == [
        "L"
    ]


def test_the_context_window_is_checked_with_the_routes_output_limit() -> None:
    """The gateway sends the smaller of max_tokens and the route's limit."""
    scenario = DecisionScenario({"large": {"L": 0.1}}, pools={"large": {"context_window": 1100}})
    assert scenario.decide(RequestView(0.0, max_tokens=4096)).outcome is Placement.UNFIT
    scenario.route = {"limits": {"output_tokens": 100}}
    assert scenario.decide(RequestView(0.0, max_tokens=4096)).outcome is Placement.PLACE


def test_a_limit_that_fits_beside_the_prompt_of_no_tier_is_lowered_to_the_room_that_is_left() -> None:
    """By pool, less the error of the count: an engine refuses a token too many."""
    pools = {"large": {"context_window": 32_768}, "small": {"context_window": 16_384}}
    scenario = DecisionScenario({"large": {"L": 0.1}, "small": {"s": 0.1}}, pools=pools, tokens=10_000)
    scenario.beliefs.error = 300
    decision = scenario.decide(RequestView(0.0, max_tokens=32_000))
    assert order(decision) == ["L", "s"]
    assert decision.output_limits == {"large": 32_768 - 10_300, "small": 16_384 - 10_300}


@pytest.mark.parametrize(
    ("window", "sent"), [(32_768, {"large": 22_468}), (11_200, {"large": 1_024}), (200_000, {}), (None, {})]
)
def test_a_default_of_servers_that_want_a_limit_is_lowered_to_what_fits(
    window: int | None, sent: dict[str, int]
) -> None:
    """Where neither caller nor route has a limit; servers of other kinds get none."""
    pools = {"large": {"context_window": window, "default_output": 32_000}, "small": {"context_window": 16_384}}
    scenario = DecisionScenario({"large": {"L": 0.1}, "small": {"s": 0.1}}, pools=pools, tokens=10_000)
    scenario.beliefs.error = 300
    assert scenario.decide(RequestView(0.0)).output_limits == sent
    assert scenario.decide(RequestView(0.0, max_tokens=100)).output_limits == {}


def test_a_tier_with_room_for_the_whole_limit_is_asked_before_any_limit_is_lowered() -> None:
    """The caller's limit is lowered where nothing else can serve it."""
    pools = {"small": {"context_window": 16_384}}
    scenario = DecisionScenario({"small": {"s": 0.1}, "api": {"a": 0.9}}, pools=pools, tokens=10_000)
    decision = scenario.decide(RequestView(0.0, max_tokens=8_000))
    assert (order(decision), decision.output_limits) == (["a"], {})
    scenario.loads = {"a": Load(health=Health.DOWN)}
    decision = scenario.decide(RequestView(0.0, max_tokens=8_000))
    assert (order(decision), decision.output_limits) == (["s"], {"small": 6_384})


@pytest.mark.parametrize(("room", "asked", "placed"), [(1024, 8000, True), (1023, 8000, False), (100, 100, True)])
def test_a_prompt_with_less_room_than_an_answer_needs_is_too_long(room: int, asked: int, placed: bool) -> None:
    """An agent compacts its conversation then; the error of a count makes a lowered limit no smaller than that."""
    scenario = DecisionScenario(
        {"large": {"L": 0.1}}, pools={"large": {"context_window": 20_000}}, tokens=20_000 - room
    )
    scenario.beliefs.error = 5_000
    decision = scenario.decide(RequestView(0.0, max_tokens=asked))
    assert (decision.outcome is Placement.PLACE) is placed
    assert decision.output_limits == ({"large": 1024} if placed and asked > room else {})


def test_an_expected_length_beyond_every_context_window_refuses_no_request() -> None:
    """Without max_tokens the engine ends the answer at its window: the largest prompt that fits is answered."""
    scenario = DecisionScenario({"large": {"L": 0.1}}, pools={"large": {"context_window": 1001}})
    assert order(scenario.decide(RequestView(0.0))) == ["L"]
    assert scenario.decide(RequestView(0.0, max_tokens=2)).outcome is Placement.UNFIT
    scenario.tokens = 1001
    assert scenario.decide(RequestView(0.0)).outcome is Placement.UNFIT


def test_a_false_when_condition_rejects_its_tier() -> None:
    """The condition is the reason."""
    tiers = [{"pool": "small", "when": {"prompt_tokens": "<= 500"}}, "large"]
    decision = DecisionScenario({"small": {"s": 0.1}, "large": {"L": 0.1}}, route={"tiers": tiers}).decide()
    assert order(decision) == ["L"]
    assert rejections(decision) == {"small": "prompt_tokens 1000 is not <= 500"}


def test_a_pool_in_two_tiers_is_considered_once() -> None:
    """In the first tier whose condition is true."""
    tiers = [{"pool": "small", "when": {"tools": False}}, "large", "small"]
    scenario = DecisionScenario({"small": {"s": 0.1}, "large": {"L": 0.1}}, route={"tiers": tiers})
    assert [(c.endpoint.id, c.tier) for c in scenario.decide().ranked] == [("s", 0), ("L", 1)]
    assert [(c.endpoint.id, c.tier) for c in scenario.decide(RequestView(0.0, tools=True)).ranked] == [
        ("L", 1),
        ("s", 2),
    ]
    assert [(r.pool, r.tier, r.reason) for r in scenario.decide().rejected] == [
        ("small", 2, "its pool is looked at in tier 1")
    ]
    scenario.route = {"tiers": ["large", {"pool": "small", "when": {"tools": False}}, "small"]}
    assert [(r.tier, r.reason) for r in scenario.decide().rejected] == [(2, "its pool is looked at in tier 2")]


def test_a_warming_endpoint_is_rejected_with_a_reason() -> None:
    """Unless all endpoints of the pool are warming: then all are ranked."""
    warming = DecisionScenario({"small": {"a": 0.1, "b": 0.1}}, loads={"a": Load(warming=True)})
    assert order(warming.decide()) == ["b"]
    assert rejections(warming.decide()) == {"a": "being warmed up: it is given its cache back"}
    warming.loads = {"a": Load(warming=True), "b": Load(warming=True)}
    assert (sorted(order(warming.decide())), rejections(warming.decide())) == (["a", "b"], {})


def test_a_pool_without_a_token_estimate_is_rejected() -> None:
    """The pool's tokenizer failed or the pool is not in the fleet; other pools serve."""
    tiers = ["gone", "small"]
    decision = DecisionScenario(TWO, route={"tiers": tiers}).decide()
    assert sorted(order(decision)) == ["a", "b"]
    assert rejections(decision) == {"gone": "the prompt was not estimated for it"}


def test_each_usable_endpoint_is_forecast_once() -> None:
    """A forecast is the most expensive part of a decision."""
    scenario = DecisionScenario(
        {"small": {"a": 0.1, "b": 0.1}, "large": {"L": 0.1}}, loads={"b": Load(health=Health.DOWN)}
    )
    scenario.route = budget(1.0)
    scenario.decide()
    assert scenario.beliefs.asked == ["a", "L"]
