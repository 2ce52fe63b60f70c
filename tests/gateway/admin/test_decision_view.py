"""A Decision in words and milliseconds."""

from __future__ import annotations

import json
from dataclasses import replace

from gateway.admin.admin_views import explain
from gateway.cli.explain import decision_table
from gateway.strict_json import encode
from policies.batch.batch_work import VALLEY
from policies.fair_share.fair_share import SHARE
from policies.fleet.beliefs import Belief
from policies.queue.queued_request import Hold, HoldRule
from policies.types import (
    FOREVER,
    QUANTILES,
    Completion,
    Decision,
    Endpoint,
    Forecast,
    Load,
    Placement,
    Pool,
    PoolEstimate,
    PromptEstimate,
    Rejection,
    RejectionKind,
)
from tests.support.builders import candidate, decided

POOLS = {
    name: Pool(name, name, tuple(Endpoint(f"{name}/{host}", name) for host in "ab")) for name in ("small", "large")
}
ESTIMATE = PromptEstimate({"small": PoolEstimate(100), "large": PoolEstimate(110)}, output_tokens=200)


def test_every_candidate_is_explained_in_its_rank() -> None:
    """Milliseconds; tiers are counted from 1, as in the configuration."""
    ranked = (
        candidate(
            "small/a",
            0.1234,
            tokens=100,
            hit=64,
            to_load=(32, 0, 16),
            probability=0.98765,
            price=0.001,
            value=0.5,
            load=Load(queued_tokens=1234.4, running=3, waiting=2),
            rtt=0.0125,
        ),
        candidate("large/b", 0.4, tokens=110, tier=1, value=0.2, place=1),
    )
    ranked[0].endpoint = replace(ranked[0].endpoint, locality="eu")
    ranked[0].forecast = replace(ranked[0].forecast, prefill=0.05)  # of an engine: no guess from a prior
    said = explain(decided(*ranked, deadline=10.8, at=10.05), ESTIMATE, {}, POOLS, {})
    assert (said["outcome"], said["scorer"], said["budget_left_ms"]) == ("place", "predicted", 750.0)
    assert said["candidates"][0] == {
        "rank": 1,
        "chosen": True,
        "endpoint": "small/a",
        "pool": "small",
        "tier": 1,
        "region": "eu",
        "rtt_ms": 12.5,
        "ttft_p50_ms": 123.4,
        "ttft_p90_ms": 123.4,
        "tpot_ms": 0.0,
        "chance": 0.9877,
        "prompt_tokens": 100,
        "hit_tokens": 64,
        "hit_tokens_to_load": {"cpu": 32, "remote": 16},
        "tokens_ahead": 1234,
        "running": 3,
        "waiting": 2,
        "price_usd": 0.001,
        "value": 0.5,
        "terms": {"good": 0.9877, "soon": -0.4877, "misses": 0.0, "engine": 0.0, "place": 0.0},
        "samples": 0,
        "reason": "p50 123 ms, chance 0.988 >= 0 for 750 ms",
        "total_p50_ms": None,
        "total_p90_ms": None,
    }
    assert [c["chosen"] for c in said["candidates"]] == [True, False]
    assert [(c["rank"], c["endpoint"], c["tier"]) for c in said["candidates"]] == [(1, "small/a", 1), (2, "large/b", 2)]


def test_the_forecast_of_the_whole_answer_is_part_of_the_explanation() -> None:
    """Where the decision knows lengths and pace."""
    whole = Completion(Forecast(0.5), (100.0,) * len(QUANTILES), (1.0,) * len(QUANTILES), 0.02)
    decision = replace(decided(candidate("small/a", 0.5)), completion=lambda each: whole)
    [found] = explain(decision, ESTIMATE, {}, POOLS, {})["candidates"]
    assert (found["total_p50_ms"], found["total_p90_ms"]) == (2500, 2500)


def test_the_estimate_is_part_of_the_explanation() -> None:
    """Most surprises are long prompts and queued requests."""
    said = explain(decided(), ESTIMATE, {"chat": 3}, POOLS, {})
    assert (said["prompt_tokens"], said["expected_output_tokens"]) == ({"small": 100, "large": 110}, 200)
    assert said["held_now"] == {"chat": 3}
    assert said["held_by"] is None


def test_the_rule_that_would_hold_the_request_is_named_with_what_frees_it() -> None:
    """In the words of every page that shows a held request."""
    said = explain(decided(), ESTIMATE, {}, POOLS, {}, Hold(HoldRule.PACE, "small/a", 1.0))
    assert said["held_by"] == {"rule": "pace", "endpoint": "small/a", "freed_by": HoldRule.PACE.freed_by}
    assert f"held by pace at small/a; freed by {HoldRule.PACE.freed_by}" in decision_table(said)


def test_every_rule_of_the_queue_says_what_frees_a_request() -> None:
    """Those of its parts too."""
    rules = [rule for rule in vars(HoldRule).values() if isinstance(rule, HoldRule)]
    assert len(rules) == 8
    assert all(rule.freed_by for rule in (*rules, VALLEY, SHARE))


def test_every_rejection_has_its_reason() -> None:
    """Of one endpoint, of every endpoint of a rejected pool, or the name of a pool that is gone."""
    rejected = (
        Rejection("small", "small/a", 0, "is down", RejectionKind.DOWN),
        Rejection("large", "", 1, "when: prompt_tokens <= 10", RejectionKind.WHEN),
        Rejection("gone", "", 2, "was removed", RejectionKind.NOT_ESTIMATED),
    )
    said = explain(
        Decision(Placement.UNAVAILABLE, 0.0, 1.0, (), rejected, retry_after=1.5, reason="none is up"),
        ESTIMATE,
        {},
        POOLS,
        {},
    )
    assert said["rejected"] == [
        {"pool": "small", "endpoint": "small/a", "tier": 1, "kind": "down", "reason": "is down"},
        {"pool": "large", "endpoint": "large/a", "tier": 2, "kind": "when", "reason": "when: prompt_tokens <= 10"},
        {"pool": "large", "endpoint": "large/b", "tier": 2, "kind": "when", "reason": "when: prompt_tokens <= 10"},
        {"pool": "gone", "endpoint": None, "tier": 3, "kind": "not_estimated", "reason": "was removed"},
    ]
    assert (said["outcome"], said["reason"], said["retry_after_s"]) == ("unavailable", "none is up", 1.5)


def test_beliefs_about_the_pools_of_the_request_are_shown() -> None:
    """In seconds from the decision; of other pools none."""
    limit = Belief("limit of 100 requests a minute", "more than one caller was refused after so many", 40.0)
    own = Belief("down", "the provider refuses the gateway's key (401)", 12.5, callers=2)
    said = explain(decided(at=10.0), ESTIMATE, {}, POOLS, {"small/a": (limit, own), "other/a": (own,)})
    assert said["believed"] == {
        "small/a": [
            {"what": limit.what, "why": limit.why, "for_s": 30.0, "callers": "all"},
            {"what": own.what, "why": own.why, "for_s": 2.5, "callers": 2},
        ]
    }
    table = decision_table(said)
    assert "small/a: limit of 100 requests a minute, for 30 s, to all callers: more than one caller" in table
    assert "small/a: down, for 2 s, to 2 of the callers: the provider refuses the gateway's key (401)" in table


def test_a_request_that_is_not_placed_has_no_chosen_candidate() -> None:
    """The best of the candidates that would be late is named."""
    said = explain(Decision(Placement.SHED, 0.0, 1.0, (candidate(),), retry_after=1.5), ESTIMATE, {}, POOLS, {})
    assert [c["chosen"] for c in said["candidates"]] == [False]


def test_missing_values_are_null_and_the_view_is_json() -> None:
    """No deadline is null: JSON has no infinity."""
    said = explain(decided(deadline=FOREVER), ESTIMATE, {}, POOLS, {})
    assert (said["budget_left_ms"], said["retry_after_s"]) == (None, None)
    assert json.loads(encode(said)) == said
