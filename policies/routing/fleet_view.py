"""Learned state of the fleet, as decisions read it.

From it follow probabilities of meeting a budget, where the first token of an engine is not yet what a caller waits for.

Rules:
- A budget of the answer leaves time for its reasoning.
- A route that promises the whole answer alone is decided by the chance of that.
- An API of which a prior alone is known is tried by one request at a time: by its prior alone it would never be known.
  Where the prior lies beyond the deadline, only if no other candidate would make it, or one would after a stream has
  been silent for half of the time; and not for a budget in which the API has lately been silent. Behind another guess
  it is tried only where no other candidate would make the deadline: there is no time for two that may hang.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

from policies.route_hooks import Meter
from policies.routes.route import Route
from policies.routing.placement_request import PlacementRequest
from policies.types import Candidate, Completion, Endpoint, Load, PoolEstimate, Quantiles


class FleetView(Protocol):
    """Learned state, read-only to decisions; implemented by `policies.fleet.fleet_reader.FleetReader`."""

    def candidates(
        self,
        loads: Mapping[str, Load],
        prompt: PoolEstimate,
        tier: int,
        price: float,
        now: float,
        left: float,
    ) -> list[Candidate]:
        """Cache hits and forecasts of a prompt sent at `now` to these endpoints of one pool, in their order.

        `loads`: by endpoint id; `left`: s of the TTFT budget.
        """
        ...

    def provider_hit(self, endpoint: Endpoint, prompt: PoolEstimate, now: float) -> int:
        """Tokens of the prompt that a provider's prompt cache is believed to hold, at this key."""
        ...

    def tpot_chance(self, candidate: Candidate, budget: float, now: float) -> float:
        """Probability of an answer sent there at `now` to keep the TPOT budget, s per token."""
        ...

    def tpot_chance_at_rest(self, candidate: Candidate, budget: float) -> float:
        """The same at an endpoint that prefills nothing."""
        ...

    def completion(self, candidate: Candidate, tokens: Quantiles, now: float) -> Completion | None:
        """Seconds of an answer of so many tokens, sent there at `now`; None: nothing is known of its pace there."""
        ...

    def prompt_error(self, pool: str, prompt: PoolEstimate) -> int:
        """Tokens by which the engine's count of the prompt may exceed the estimate, nearly always."""
        ...

    def meter(self, route: Route) -> Meter | None:
        """None: no hook of the route has one."""
        ...


ALIKE = 1.2  # of two budgets, the greater by the less
LIKELY = 0.5  # chance of a prior that lies within the deadline


def with_answer(queued: PlacementRequest, candidates: list[Candidate], left: float) -> list[Candidate]:
    """The candidates with their chances of the answer's first token: TTFT and reasoning are independent. `left`: s
    until the deadline, which leaves the least reasoning."""
    if not queued.reasoning:
        return candidates
    within = left + queued.least_unseen
    return [
        replace(each, probability=each.forecast.followed_by(queued.reasoning[each.endpoint.pool]).probability(within))
        for each in candidates
    ]


def to_be_tried(candidates: list[Candidate], target: float, left: float) -> list[Candidate]:
    """The candidates of an API; as trials while a prior is all that is known of its first token and nothing is in
    progress or waited for there. `left`: s until the deadline."""
    if any(each.forecast.trained or each.load.in_flight or each.load.wait for each in candidates):
        return candidates
    return [
        each if each.probability >= target or left <= ALIKE * each.forecast.silent_s else replace(each, trial_s=left)
        for each in candidates
    ]


def with_time_for_trials(
    tiers: list[list[Candidate]], target: float, left: float, stream: bool
) -> list[list[Candidate]]:
    """The tiers without the trials that would take another candidate's time. `left`: s until the deadline; `stream`:
    silence is seen."""
    others = [each for tier in tiers for each in tier if each.probability >= target]
    if not others:
        return tiers
    has_time = stream and any(each.forecast.probability(left / 2) >= target for each in others)
    guesses = [any(not each.forecast.trained and not each.forecast.prefill for each in tier) for tier in tiers]
    return [
        [replace(each, trial_s=0.0) if any(guesses[:i]) or _has_no_time(each, has_time) else each for each in tier]
        for i, tier in enumerate(tiers)
    ]


def _has_no_time(candidate: Candidate, has_time: bool) -> bool:
    return not has_time and candidate.probability < LIKELY


def with_total(
    queued: PlacementRequest, view: FleetView, candidates: list[Candidate], now: float, spent: bool = True
) -> list[Candidate]:
    """The candidates; where the route promises the whole answer alone, with their chances of that. `spent`: the time
    since the arrival counts."""
    if not queued.answer_tokens or not queued.promises_total_alone:
        return candidates
    within = queued.total_deadline - (now if spent else queued.request.arrival)
    found = [(each, view.completion(each, queued.answer_tokens, now)) for each in candidates]
    return [each if whole is None else replace(each, probability=whole.probability(within)) for each, whole in found]
