"""Endpoints that nobody was sent to lately are tried by a little of the traffic."""

from __future__ import annotations

from policies.types import Load, RequestView
from tests.policies.deciding import DecisionScenario, budget

REQUESTS = 4000
ASK = RequestView(100.0, stream=True)


def world(**loads: Load) -> DecisionScenario:
    """`slow` is three times slower and never the best; `late` cannot make the deadline."""
    heard = {name: Load(last_token_at=99.0) for name in ("fast", "other", "slow", "late")}
    return DecisionScenario(
        {"p": {"fast": 0.1, "other": 0.1, "slow": 0.3, "late": 5.0}}, loads={**heard, **loads}, route=budget(1.0)
    )


def share(of: DecisionScenario, endpoint: str) -> float:
    decisions = [of.decide(ASK, now=100.0, sequence=seed) for seed in range(REQUESTS)]
    tried = [one for one in decisions if one.ranked[0].endpoint.id == endpoint]
    assert all("probe" in one.ranked[0].reason and "probe" in one.reason for one in tried)
    return len(tried) / REQUESTS


def test_one_request_in_a_hundred_tries_who_was_not_heard_of() -> None:
    """Slower than the others as it is: what is never tried is never known to have become better."""
    assert 0.005 < share(world(slow=Load(last_token_at=60.0)), "slow") < 0.015


def test_who_was_heard_of_lately_is_not_tried() -> None:
    """Twenty seconds ago, or about to be: a prompt is there already."""
    assert share(world(slow=Load(last_token_at=80.0)), "slow") == 0
    assert share(world(slow=Load(last_token_at=60.0, prefilling=1)), "slow") == 0


def test_a_request_that_would_be_late_there_does_not_try() -> None:
    """A probe is paid for with slack, not with a miss."""
    assert share(world(late=Load(last_token_at=0.0)), "late") == 0


def test_where_nothing_was_heard_of_anybody_nobody_is_tried() -> None:
    """After a quiet night every endpoint is as little known as the others."""
    quiet = {name: Load(last_token_at=10.0) for name in ("fast", "other", "slow", "late")}
    assert share(world(**quiet), "slow") == 0


def test_a_yardstick_does_not_probe() -> None:
    """A baseline must not inherit the probes of ours."""
    baseline = world(slow=Load(last_token_at=60.0))
    baseline.route = {**budget(1.0), "scorer": "argmin_ttft"}
    assert share(baseline, "slow") == 0


def test_a_probe_that_fails_goes_on_in_the_usual_order() -> None:
    """Only the first place changes."""
    probing = world(slow=Load(last_token_at=60.0))
    decisions = [probing.decide(ASK, now=100.0, sequence=seed) for seed in range(REQUESTS)]
    tried = [one for one in decisions if one.ranked[0].endpoint.id == "slow"]
    assert tried
    for one in tried:
        assert {c.endpoint.id for c in one.ranked[1:3]} == {"fast", "other"}
        assert "; the first but for a probe" in one.ranked[1].reason
        assert one.ranked[3].endpoint.id == "late"
