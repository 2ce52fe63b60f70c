"""No request is refused by a forecast without samples."""

from __future__ import annotations

from policies.fleet.fleet import Fleet
from policies.queue.queued_request import QueuedRequest
from policies.rate_limit.send_limits import RateLimit
from policies.routing.decide import decide
from policies.routing.reasons import reason_of
from policies.types import (
    TRAINED_SAMPLES,
    AttemptOutcome,
    Decision,
    Endpoint,
    Placement,
    Pool,
    PoolEstimate,
    PromptEstimate,
    RequestView,
)
from tests.support.decision_fleet import budget, preset

TOKENS = 60_000  # 3 s by the prior of 20,000 tokens a second
ROUTE = preset("autocomplete", {"tiers": ["small"], "total": "off", **budget(1.0)})


def fleet(*names: str) -> Fleet:
    return Fleet([Pool("small", "m", tuple(Endpoint(f"small/{name}", "small") for name in names))])


def decided(by: Fleet, now: float) -> Decision:
    request = RequestView(now, stream=True)
    queued = QueuedRequest(now, request, PromptEstimate({"small": PoolEstimate(TOKENS)}), ROUTE, int(now))
    return decide(queued, by.snapshot(now), by.view, now)


def serve(by: Fleet, ttft: float, now: float) -> Decision:
    """Sends a request; the first token comes after `ttft` seconds, if placed."""
    decision = decided(by, now)
    if decision.chosen is not None:
        by.on_sent(now, decision.chosen, PoolEstimate(TOKENS), now, stream=True)
        by.on_first_token(now, now + ttft)
        by.on_ended(now, AttemptOutcome.COMPLETED, now + ttft)
    return decision


def test_a_prior_that_is_far_too_slow_refuses_nothing() -> None:
    """The engine is fifteen times faster than the prior: every request is placed, and meets the budget."""
    by = fleet("a")
    outcomes = [serve(by, 0.2, float(number)).outcome for number in range(100)]
    assert outcomes == [Placement.PLACE] * 100


def test_a_slow_engine_sheds_after_training() -> None:
    """TRAINED_SAMPLES requests are late first."""
    by = fleet("a")
    outcomes = [serve(by, 3.0, 10.0 * number).outcome for number in range(30)]
    assert outcomes == [Placement.PLACE] * TRAINED_SAMPLES + [Placement.SHED] * (30 - TRAINED_SAMPLES)


def test_an_untrained_endpoint_is_preferred_to_known_slow_ones() -> None:
    """Only the untrained forecast is open."""
    by = fleet("a")
    for number in range(TRAINED_SAMPLES):
        serve(by, 3.0, 10.0 * number)
    by.reload(fleet("a", "b")._pools[name].pool for name in ("small",))
    decision = decided(by, 1000.0)
    assert decision.chosen is not None
    assert decision.chosen.endpoint.id == "small/b"
    assert decision.reason.endswith("tried, as this forecast is a guess")


def test_a_budget_that_is_spent_is_no_guess() -> None:
    """No endpoint can put out a token in the past."""
    by, request = fleet("a"), RequestView(0.0, stream=True)
    queued = QueuedRequest(0, request, PromptEstimate({"small": PoolEstimate(10)}), ROUTE, 0)
    assert decide(queued, by.snapshot(2.0), by.view, 2.0).outcome is Placement.SHED


def placed(by: Fleet, number: int, ttft: float | None = None) -> str:
    """The pool of a request, one a second. `ttft`: s until its whole answer; None: it stays in progress."""
    route, now = preset("chat", {"tiers": ["api", "small"], **budget(1.0)}), float(number)
    prompt = PromptEstimate({"api": PoolEstimate(1_000), "small": PoolEstimate(1_000)})
    decision = decide(
        QueuedRequest(number, RequestView(now, stream=True), prompt, route, number), by.snapshot(now), by.view, now
    )
    assert decision.chosen is not None
    by.on_sent(number, decision.chosen, PoolEstimate(1_000), now, stream=True)
    if ttft is not None:
        by.on_first_token(number, now + ttft)
        by.on_ended(number, AttemptOutcome.COMPLETED, now + ttft)
    return decision.chosen.endpoint.pool


def api_before_an_engine() -> Fleet:
    """The prior of the API, 4 s, misses the budget of 1 s, which the engine makes."""
    api = Pool("api", "o3", (Endpoint("api/a", "api"),), local=False, prior_ttft={"": 4.0})
    return Fleet([api, Pool("small", "m", (Endpoint("small/b", "small"),))])


def test_an_api_of_which_only_a_prior_is_known_is_tried_by_one_request_at_a_time() -> None:
    by = api_before_an_engine()
    assert [placed(by, number) for number in range(3)] == ["api", "small", "small"]


def test_an_api_that_answers_sooner_than_its_prior_is_used() -> None:
    by = api_before_an_engine()
    assert {placed(by, number, 0.2) for number in range(4 * TRAINED_SAMPLES)} == {"api"}


def test_an_api_as_slow_as_its_prior_is_left_once_that_is_known() -> None:
    by = api_before_an_engine()
    pools = [placed(by, 10 * number, 4.0 if number < TRAINED_SAMPLES else 0.2) for number in range(3 * TRAINED_SAMPLES)]
    assert pools == ["api"] * TRAINED_SAMPLES + ["small"] * (2 * TRAINED_SAMPLES)


def test_an_api_that_limits_its_rate_is_not_waited_for_to_be_known() -> None:
    """The next request is due there in half a second, within the budget; the later tier answers at once."""
    by = api_before_an_engine()
    assert placed(by, 0) == "api"
    spent = RateLimit(counts_tokens=False, remaining=0.0, limit=60.0, rate=1 / 1.4, full_at=84.0, at=0.1)
    by.on_rate_limits(0, [spent])
    by.on_ended(0, AttemptOutcome.RATE_LIMITED, 0.1)
    assert placed(by, 1) == "small"


def tried(by: Fleet, number: int, seconds: float = 1.0, stream: bool = True, left_after: float = 0.0) -> Decision:
    """The decision of a request, which is sent, and cancelled without a token after `left_after` seconds."""
    route, now = preset("chat", {"tiers": ["api", "small"], **budget(seconds)}), 10.0 * number
    prompt = PromptEstimate({"api": PoolEstimate(1_000), "small": PoolEstimate(1_000)})
    queued = QueuedRequest(number, RequestView(now, stream=stream), prompt, route, number)
    decision = decide(queued, by.snapshot(now), by.view, now)
    assert decision.chosen is not None
    by.on_sent(number, decision.chosen, PoolEstimate(1_000), now, stream=stream)
    by.on_ended(number, AttemptOutcome.CANCELLED, now + left_after)
    return decision


def pools(decisions: list[Decision]) -> list[str]:
    return [decision.chosen.endpoint.pool for decision in decisions if decision.chosen is not None]


def test_a_trial_is_told_with_its_own_figures() -> None:
    """Not as a chance that the guess beside it contradicts."""
    decision = tried(api_before_an_engine(), 0)
    assert decision.chosen is not None
    assert decision.chosen.probability == decision.chosen.forecast.probability(1.0) < 0.05
    told = reason_of(decision, decision.chosen)
    assert told == "p50 4500 ms, chance 0.015 for 1000 ms; tried, as this forecast is a guess"


def test_three_silent_trials_are_enough_for_a_budget_of_their_length() -> None:
    """For ten minutes; a longer budget is another question. A caller that leaves early has asked none."""
    by = api_before_an_engine()
    assert pools([tried(by, number, left_after=0.1) for number in range(5)]) == ["api"] * 5
    assert pools([tried(by, number, left_after=0.6) for number in range(5, 13)]) == ["api"] * 3 + ["small"] * 5
    assert pools([tried(by, 14, 3.0)]) == ["api"]
    assert pools([tried(by, 80, left_after=0.6)]) == ["api"]


def test_no_trial_takes_the_time_of_the_next_candidate() -> None:
    """A stream is left after half of the time, which a slow engine needs; a whole answer shows no silence."""
    by = api_before_an_engine()
    assert pools([tried(by, 0, stream=False)]) == ["small"]
    assert pools([tried(by, 1, seconds=0.2)]) == ["small"]
    assert pools([tried(by, 2, seconds=0.03, stream=False)]) == ["api"]
