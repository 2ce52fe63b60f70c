"""The cause of a slow request, from facts: the part that exceeds the usual most, then the reason within it."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.observe.record import STAGE_NAMES
from policies.diagnosis.causes import Cause, CauseVerdict
from policies.diagnosis.diagnose import BY_PART, diagnose
from policies.diagnosis.facts import EarlierPrompt, EngineFacts, LostAttempt, Neighbour, Objective, RequestFacts
from policies.diagnosis.usual import ENOUGH, Spread, Usual
from policies.types import AttemptOutcome, Placement

STAGES = {"read": 0.001, "queue": 0.0, "connect": 0.001, "upstream": 0.1, "relay": 0.001, "stream": 1.0}
USUAL = Usual(
    requests=50,
    stages={name: Spread(spent, spent * 1.5) for name, spent in STAGES.items()},
    prompt=Spread(4_000, 6_000),
    computed=Spread(400, 800),
    predicted_share=Spread(0.9, 0.95),
    output=Spread(50, 90),
    tpot=Spread(0.02, 0.025),
)
LOST = LostAttempt("small/a", AttemptOutcome.FAILED, 0, 0.9, "")
BROKEN = LostAttempt("small/a", AttemptOutcome.BROKEN, 200, 0.9, "")
BESIDE = [Neighbour(name, 3_000, False, True) for name in "abcd"]
OTHERS = [Neighbour("b", 9_000, True, False), Neighbour("c", 300, True, False)]
EQUALS = [Neighbour(name, 3_000, True, False) for name in "abcd"]


def verdict(usual: Usual = USUAL, stages: dict[str, float] | None = None, **known: Any) -> CauseVerdict:
    given = {"route": "chat", "pool": "small", "tenant": "a", "endpoint": "small/a", "over": 0.5, "prompt": 4_000}
    facts = RequestFacts(
        **{**given, "cached": 3_600, "predicted": 3_600, "stages": {**STAGES, **(stages or {})}, **known}
    )
    return diagnose(facts, usual)


SLOW = {"upstream": 1.0}
CASES: list[tuple[Cause, dict[str, Any]]] = [
    (Cause.CALLER_SLOW, {"stages": {"read": 2.0}}),
    (Cause.CALLER_SLOW, {"stages": {"relay": 2.0}}),
    (Cause.CALLER_SLOW, {"objective": Objective.TOTAL, "stages": {"stream": 9.0}, "unread": 8.0, "tpot": 0.02}),
    (Cause.GATEWAY_STALLED, {"stages": SLOW, "lag": 0.8}),
    (Cause.GATEWAY_STALLED, {"stages": {"estimate": 0.9}}),
    (Cause.QUEUED, {"stages": {"queue": 1.0}, "held": {"turn": 0.9}, "neighbours": EQUALS}),
    (Cause.QUEUED, {"stages": SLOW, "neighbours": EQUALS}),
    (Cause.QUEUED, {"stages": SLOW, "engine": EngineFacts(queue=0.8, prefill=0.1, waiting=3)}),
    (Cause.NOISY_NEIGHBOUR, {"stages": {"queue": 1.0}, "held": {"prefill": 0.9}, "neighbours": OTHERS}),
    (Cause.NOISY_NEIGHBOUR, {"stages": SLOW, "neighbours": OTHERS, "engine": EngineFacts(queue=0.8, prefill=0.1)}),
    (Cause.KV_FULL, {"stages": SLOW, "engine": EngineFacts(queue=0.8, prefill=0.1, kv_usage=0.99)}),
    (Cause.RATE_LIMIT, {"stages": {"rate_limit": 1.0}}),
    (Cause.RATE_LIMIT, {"stages": {"queue": 1.0}, "held": {"rate_limit": 0.9, "turn": 0.1}}),
    (Cause.RATE_LIMIT, {"objective": Objective.ANSWER, "placement": Placement.RATE_LIMITED}),
    (Cause.CONNECTION, {"stages": {"connect": 1.0}}),
    (Cause.CONNECTION, {"stages": {"failover": 1.0}, "attempts": [LOST]}),
    (Cause.ENDPOINT_FAILED, {"objective": Objective.ANSWER, "down": ["small/a"]}),
    (Cause.LONG_PROMPT, {"stages": SLOW, "prompt": 20_000, "cached": 3_600}),
    (Cause.SLOW_REGION, {"stages": SLOW, "region": "eu", "region_ratio": 3.0}),
    (Cause.MODEL_THINKS, {"thinking": 4.0}),
    (Cause.DECODE_BOUND, {"objective": Objective.TPOT, "tpot": 0.09, "output": 50}),
    (Cause.DECODE_BOUND, {"objective": Objective.GAP, "gap": 1.5, "neighbours": BESIDE}),
    (Cause.ENDPOINT_FAILED, {"objective": Objective.GAP, "gap": 1.5}),
    (Cause.ENDPOINT_FAILED, {"objective": Objective.GAP, "gap": 1.5, "attempts": [BROKEN]}),
    (Cause.UNKNOWN, {"stages": SLOW}),
    (Cause.UNKNOWN, {"stages": {"failover": 1.0}}),
    (Cause.UNKNOWN, {}),
]


@pytest.mark.parametrize(("cause", "known"), CASES)
def test_a_cause_follows_from_its_evidence(cause: Cause, known: dict[str, Any]) -> None:
    assert verdict(**known).cause is cause


def earlier(shared: int, endpoint: str = "small/a", lost: bool = False) -> dict[str, Any]:
    prompt = EarlierPrompt(endpoint, 3_800, shared, 30.0, lost)
    return {"stages": SLOW, "cached": 0, "predicted": 0, "earlier": prompt}


@pytest.mark.parametrize(
    ("cause", "known"),
    [
        (Cause.EVICTED_SESSION, earlier(3_800)),
        (Cause.COLD_CACHE, earlier(3_800, endpoint="small/b")),
        (Cause.COLD_CACHE, earlier(3_800, lost=True)),
        (Cause.CACHE_BROKEN, earlier(0)),
        (Cause.CACHE_BROKEN, {"stages": SLOW, "cached": 0, "predicted": 0, "route_share": 0.9}),
        (Cause.COLD_CACHE, {"stages": SLOW, "cached": 0, "predicted": 0, "route_share": 0.0}),
        (Cause.EVICTED_SESSION, {"stages": SLOW, "cached": 0, "endpoint_share": 0.9}),
        (Cause.COLD_CACHE, {"stages": SLOW, "cached": 0, "endpoint_share": 0.0}),
    ],
)
def test_a_prefix_that_is_not_cached_has_one_of_four_reasons(cause: Cause, known: dict[str, Any]) -> None:
    """Evicted, cold, or broken by the caller, by where and when the same beginning was computed before."""
    assert verdict(**known).cause is cause


def test_a_shorter_prompt_of_the_session_is_a_new_conversation() -> None:
    """Its beginning may differ: nothing is broken."""
    known = earlier(0) | {"prompt": 900, "cached": 800}
    assert verdict(**known).cause is Cause.UNKNOWN


def test_the_largest_excess_decides_and_not_the_longest_stage() -> None:
    """Half a second upstream is usual here; 0.3 s in the queue is not."""
    usual = Usual(requests=50, stages={"upstream": Spread(0.5, 0.6)})
    found = verdict(usual, {"upstream": 0.55, "queue": 0.3}, held={"turn": 0.3})
    assert (found.cause, found.part) == (Cause.QUEUED, "queue")


def test_without_usual_values_the_prompt_is_judged_by_its_forecast() -> None:
    few = Usual(requests=ENOUGH - 1, computed=Spread(10_000, 10_000))
    engine = EngineFacts(forecast_prefill=0.9)
    found = verdict(few, SLOW, prompt=8_000, cached=0, predicted=0, forecast=0.95, engine=engine)
    assert found.cause is Cause.LONG_PROMPT
    assert verdict(few, SLOW, prompt=8_000, cached=0, predicted=0, forecast=0.1).cause is Cause.UNKNOWN


@pytest.mark.parametrize("status", [500, 0])
def test_a_silent_attempt_is_the_endpoint_unless_others_were_served_meanwhile(status: int) -> None:
    lost = LostAttempt("small/a", AttemptOutcome.SILENT, status, 4.0, "")
    known: dict[str, Any] = {"stages": {"failover": 4.0}, "attempts": [lost]}
    stuck = [Neighbour("b", 300, True, False, served=False)]
    assert verdict(**known, neighbours=stuck).cause is Cause.ENDPOINT_FAILED
    assert verdict(**known, neighbours=EQUALS).cause is Cause.QUEUED


def test_a_caller_is_no_noisy_neighbour_of_itself() -> None:
    own = [Neighbour("a", 9_000, True, False)]
    assert verdict(stages={"queue": 1.0}, held={"turn": 1.0}, neighbours=own).cause is Cause.QUEUED


def test_a_request_shed_for_its_own_prompt_is_long_and_one_behind_others_is_queued() -> None:
    shed: dict[str, Any] = {"objective": Objective.ANSWER, "placement": Placement.SHED, "stages": {"upstream": 0.0}}
    own = EngineFacts(forecast_prefill=2.0, backlog=0.1)
    behind = EngineFacts(forecast_prefill=0.1, backlog=2.0)
    assert verdict(**shed, engine=own, prompt=20_000, cached=None, predicted=0).cause is Cause.LONG_PROMPT
    assert verdict(**shed, engine=behind, neighbours=EQUALS).cause is Cause.QUEUED


def test_a_model_that_thinks_is_named_with_the_effort_that_the_caller_asked_for() -> None:
    """It is what the caller can change."""
    assert "the effort high" in verdict(thinking=4.0, effort="high").evidence
    assert "named no effort" in verdict(thinking=4.0).evidence


def test_every_stage_before_the_end_has_a_rule() -> None:
    """A stage without one would lose the diagnosis of all requests that were slow there."""
    assert BY_PART.keys() - {"thinking"} == set(STAGE_NAMES)


def test_every_mend_names_a_key_of_the_configuration_or_says_that_there_is_none() -> None:
    names = {"route": "chat", "pool": "small", "tenant": "a"}
    for cause in set(Cause) - {Cause.UNKNOWN}:
        mend = cause.mend.format(**names)
        assert "`" in mend or "no key of the gateway" in mend, cause
        assert "{" not in mend
