"""Probes: a small share of the traffic tries endpoints without recent first tokens."""

from __future__ import annotations

from policies.routing.reasons import reason_of
from policies.types import Health, Load, RequestView
from tests.support.decision_fleet import DecisionScenario, budget

REQUESTS = 4000
REQUEST = RequestView(100.0, stream=True)


def world(**loads: Load) -> DecisionScenario:
    """`slow` is three times slower and never the best; `late` cannot make the deadline."""
    heard = {name: Load(last_token_at=99.0) for name in ("fast", "other", "slow", "late")}
    return DecisionScenario(
        {"p": {"fast": 0.1, "other": 0.1, "slow": 0.3, "late": 5.0}}, loads={**heard, **loads}, route=budget(1.0)
    )


def share(of: DecisionScenario, endpoint: str) -> float:
    decisions = [of.decide(REQUEST, now=100.0, sequence=seed) for seed in range(REQUESTS)]
    tried = [decision for decision in decisions if decision.ranked[0].endpoint.id == endpoint]
    assert all(reason_of(decision, decision.ranked[0]).startswith("probe, ") for decision in tried)
    return len(tried) / REQUESTS


def test_one_request_in_a_hundred_probes_an_endpoint_without_recent_tokens() -> None:
    """A slow endpoint included: without traffic, an improvement would stay unknown."""
    assert 0.005 < share(world(slow=Load(last_token_at=60.0)), "slow") < 0.015


def test_an_endpoint_with_a_recent_token_or_a_prefill_is_not_probed() -> None:
    """A first token within 20 s, or a prompt in prefill."""
    assert share(world(slow=Load(last_token_at=80.0)), "slow") == 0
    assert share(world(slow=Load(last_token_at=60.0, prefilling=1)), "slow") == 0


def test_a_half_open_endpoint_gets_the_next_request() -> None:
    """A restarted engine is back at once, despite warmer caches of its peers; never for a request that would be
    late."""
    half_open = Load(last_token_at=99.0, health=Health.PROBING)
    assert share(world(slow=half_open), "slow") == 1
    assert share(world(late=half_open), "late") == 0, "never at the price of a deadline"


def test_a_request_that_would_be_late_does_not_probe() -> None:
    """A probe spends slack, not the deadline."""
    assert share(world(late=Load(last_token_at=0.0)), "late") == 0


def test_a_pool_without_any_recent_token_is_not_probed() -> None:
    """After a quiet night all endpoints are equally unknown."""
    quiet = {name: Load(last_token_at=10.0) for name in ("fast", "other", "slow", "late")}
    assert share(world(**quiet), "slow") == 0


def test_a_baseline_scorer_does_not_probe() -> None:
    """A baseline must not profit from the probes of `predicted`."""
    stale = world(slow=Load(last_token_at=60.0, in_flight=1))
    assert share(stale, "slow") > 0
    stale.route = {**budget(1.0), "scorer": "least_request"}
    assert share(stale, "slow") == 0


def test_fallbacks_of_a_probe_keep_the_usual_order() -> None:
    """Only the first rank changes."""
    probing = world(slow=Load(last_token_at=60.0))
    decisions = [probing.decide(REQUEST, now=100.0, sequence=seed) for seed in range(REQUESTS)]
    tried = [decision for decision in decisions if decision.ranked[0].endpoint.id == "slow"]
    assert tried
    for decision in tried:
        assert {c.endpoint.id for c in decision.ranked[1:3]} == {"fast", "other"}
        assert reason_of(decision, decision.ranked[1]).endswith("; behind a probe")
        assert decision.ranked[3].endpoint.id == "late"
