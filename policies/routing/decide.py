"""Decides where a request goes: its candidates, their order by value, and what follows.

Rules:
- The deadline is the arrival of the request plus the budget: time spent in the gateway counts. Where the budget is of
  the answer, the first token must leave time for the reasoning, by the pool's earlier answers of the same effort.
- The first of the ranking (`policies.routing.ranking`) is taken where a candidate makes the deadline with the target
  probability. Where none does, the likeliest is the first, and `on_miss` of the route says what follows.
- Nothing is shed on a guess: while the forecast of a usable endpoint is not trained, a request that would be shed is
  tried there. (A public system refused 8,270 of 11,395 requests by an uncalibrated prefill rate, most without need.)
- On a baseline route probabilities and budgets play no part, and nothing is shed.
- Tiers are numbered from 0 in code, and from 1 in reasons. Reasons name pools, never hosts.

Numbers of this room, all of them; decision 0103 has figures of SOON, ENGINE and EQUAL:
- `ranking`: SOON 0.1 and ENGINE 0.3, weights of the formula; UNBOUNDED 3 s, for a budget where there is none; HOPELESS
  0.05, the chance of a TPOT that no engine keeps; TRIED 3 requests tell the pace of an endpoint; EQUAL 0.01
  good requests, within which the longest hit is first; NEAR 0.05 and SIMILAR 0.5 of the median, within which the order
  is drawn; NOISE 0.002 s, below which medians are equal; PROBE_AFTER 30 s without a token,
  of which a request in PROBE_EVERY 100 is a probe.
- `fleet_view`: LIKELY 0.5 and ALIKE 1.2, of trials of an API that is not known yet.
- `candidates`: LEAST_OUTPUT 1024 tokens of room; LONGEST_HOLD 60 s at a rate limit, without a deadline.
- `decide`: SHORTEST_WAIT 0.1 s, LONGEST_WAIT 30 s and RECHECK 1 s, of Retry-After.
- `prompt_counts`: ROUGH 0.3, the margin from which a prompt is counted before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace

from policies.routing.candidates import CandidateSet, find_candidates
from policies.routing.fleet_view import FleetView, with_answer, with_total
from policies.routing.placement_request import PlacementRequest
from policies.routing.ranking import rank
from policies.scorers.scorers import SCORERS, Scorer
from policies.types import (
    FOREVER,
    TINY,
    Candidate,
    Decision,
    FleetSnapshot,
    Forecast,
    Health,
    Load,
    Placement,
    Rejection,
    RejectionKind,
)

SHORTEST_WAIT, LONGEST_WAIT = 0.1, 30.0  # s, bounds of Retry-After: shorter invites a storm, longer is a guess
RECHECK = 1.0  # s until another try of an endpoint down or half-open: about a probe interval

_PLACE = Placement.PLACE  # a member is slow to look up in an enumeration


def decide(
    queued: PlacementRequest,
    fleet: FleetSnapshot,
    view: FleetView,
    now: float,
    scorers: Mapping[str, Scorer] = SCORERS,
) -> Decision:
    """Ranks the destinations of a request. Pure: equal arguments give equal decisions. `scorers`: by name."""
    found = find_candidates(queued, fleet, view, now)
    if not found.tiers:
        return _nowhere(found)
    scorer = None if queued.route.scorer == "predicted" else scorers[queued.route.scorer]
    ranking = rank(found, scorer)
    if scorer is not None or any(map(found.queued.qualifies, ranking)):
        return _decision(found, _PLACE, ranking)
    ranking.sort(key=lambda each: (-each.probability, each.forecast.p50))
    return replace(_miss(found, ranking), in_time=False)


def _decision(
    found: CandidateSet,
    outcome: Placement,
    ranked: Sequence[Candidate],
    reason: str = "",
    retry_after: float = 0.0,
    cause: RejectionKind | None = None,
) -> Decision:
    deadline = found.queued.deadline
    if found.queued.unseen and ranked:
        deadline -= found.queued.extra_unseen(ranked[0].endpoint.pool)
    return Decision(
        outcome=outcome,
        at=found.now,
        deadline=deadline,
        ranked=ranked,
        rejected=tuple(found.rejected),
        scorer=found.queued.route.scorer,
        target=found.target,
        retry_after=retry_after,
        reason=reason,
        cause=cause,
        output_limits=found.output_limits(),
        completion=found.completion,
    )


# --------------------------------------------------------------------------- no qualifying tier


def _miss(found: CandidateSet, ranking: Sequence[Candidate]) -> Decision:
    """No tier can make the deadline: the best candidate all the same, or a refusal, as `on_miss` says."""
    best = f"the best chance is {ranking[0].probability:.3f} < {found.target:g} for {in_ms(found.left)}"
    match found.queued.route.on_miss:
        case "shed" if found.left > 0 and (untrained := [each for each in ranking if not each.forecast.trained]):
            trained = [each for each in ranking if each.forecast.trained]
            return _decision(found, _PLACE, untrained + trained, f"{best}; tried, as this forecast is a guess")
        case "shed":
            return _shed(found, ranking, best)
        case "queue":
            return _decision(found, _PLACE, ranking, f"{best}; behind all that can still make theirs")
        case "best_effort":
            return _decision(found, _PLACE, ranking, f"{best}; best effort")


def _shed(found: CandidateSet, ranking: Sequence[Candidate], best: str) -> Decision:
    """A refusal with the time until another try, with the whole budget, is worthwhile."""
    wait = _again_in(found.queued, found.view, ranking, found.now)
    if wait is not None:
        return _decision(found, Placement.SHED, ranking, best, _bounded(wait))
    budget = found.queued.deadline - found.queued.request.arrival
    reason = f"a prompt of this length cannot make {in_ms(budget)} anywhere, even on an idle endpoint"
    return _decision(found, Placement.SHED, ranking, reason, LONGEST_WAIT)


def _again_in(queued: PlacementRequest, view: FleetView, ranked: Sequence[Candidate], now: float) -> float | None:
    """Seconds until another try, with the whole TTFT budget, is worthwhile; 0: now. None: no endpoint of these could
    make it, even idle."""
    budget, target = queued.deadline - queued.request.arrival, queued.route.target
    if budget == FOREVER:
        return None
    able = [each for each in ranked if _probability_when_idle(queued, view, each, budget, now) >= target]
    if not able:
        return None
    wait = min(_wait(each.forecast, target, budget) for each in able)
    return _bounded(wait) if wait > 0 else 0.0


def _wait(forecast: Forecast, target: float, budget: float) -> float:
    """Seconds until the `target` quantile is down to the budget.

    Waiting shortens the queue, and so the point estimate, by a second per second; the quantile is proportional to it.
    """
    return forecast.point_estimate * (1 - budget / max(forecast.quantile(target), TINY))


def _probability_when_idle(
    queued: PlacementRequest, view: FleetView, candidate: Candidate, budget: float, now: float
) -> float:
    idle = {candidate.endpoint.id: Load(at=now, scraped_at=now)}
    prompt = queued.estimate.pools[candidate.endpoint.pool]
    found = view.candidates(idle, prompt, candidate.tier, candidate.price, now, budget)
    [alone] = with_total(queued, view, with_answer(queued, found, budget), now, spent=False)
    return alone.probability


_OUT = "is down, on trial or rate limited"
_DRAINED = "drained by an operator"


def _nowhere(found: CandidateSet) -> Decision:
    """No tier can ever take the request, or every able endpoint is out."""
    if found.unfit == len(found.queued.route.tiers):
        return _decision(found, Placement.UNFIT, (), _misfit(found), cause=_cause_of_misfit(found.rejected))
    out = [one for one in found.rejected if one.endpoint and not one.kind.excludes]
    if limited := [_back_in(found, rejection) for rejection in out if _is_rate_limited(found, rejection)]:
        reason = "the rate limit of every provider that could take it is reached"
        wait, kind = max(min(limited), SHORTEST_WAIT), RejectionKind.RATE_LIMITED
        return _decision(found, Placement.RATE_LIMITED, (), reason, wait, kind)
    if not out and found.used_up is not None:
        kind, reason = found.used_up
        return _decision(found, Placement.RATE_LIMITED, (), reason, LONGEST_WAIT, kind)
    waits = [_back_in(found, rejection) for rejection in out]
    named = (one.kind.others for one in found.rejected if one.kind.others)
    subject = next(named, "every endpoint that could take it")
    reason = f"{subject} {_state_of({rejection.kind for rejection in out})}"
    kind, wait = out[0].kind if out else RejectionKind.NOT_ESTIMATED, min(waits, default=RECHECK)
    return _decision(found, Placement.UNAVAILABLE, (), reason, max(wait, SHORTEST_WAIT), kind)


def _state_of(kinds: Set[RejectionKind]) -> str:
    """Words for what endpoints that are out have in common."""
    if kinds == {RejectionKind.ASLEEP}:
        return "is asleep"
    if kinds == {RejectionKind.DRAINED}:
        return f"is {_DRAINED}"
    return f"{_OUT}, or {_DRAINED}" if RejectionKind.DRAINED in kinds else _OUT


def _cause_of_misfit(rejected: Sequence[Rejection]) -> RejectionKind:
    """A prompt that is too long for one pool is the cause: the caller can shorten it."""
    kinds = [rejection.kind for rejection in rejected]
    return RejectionKind.CONTEXT_WINDOW if RejectionKind.CONTEXT_WINDOW in kinds else kinds[0]


def _is_rate_limited(found: CandidateSet, rejected: Rejection) -> bool:
    """An API is up, and takes no request yet."""
    load, pool = found.fleet.loads[rejected.endpoint], found.fleet.pools[rejected.pool]
    prompt = found.queued.estimate.pools[rejected.pool]
    return not pool.local and load.health is Health.UP and load.limits.wait(prompt.tokens, found.now) > 0


def _misfit(found: CandidateSet) -> str:
    queued = found.queued
    pools = [found.fleet.pools[tier.pool] for tier in queued.route.tiers]
    largest = max(pools, key=lambda pool: pool.context_window or FOREVER)
    tokens, output = queued.estimate.pools[largest.name].tokens, found.max_output
    if largest.context_window is not None and tokens + output > largest.context_window:
        most = largest.context_window - output
        return (  # the first words are Anthropic's: Claude Code compacts the conversation by them
            f"prompt is too long: {tokens} tokens > {most} maximum, with {output} output it exceeds the context window "
            f"of every tier (largest: {largest.context_window}, pool {largest.name})"
        )
    return "; ".join(f"{rejection.pool}: {rejection.reason}" for rejection in found.rejected)


def _back_in(found: CandidateSet, rejected: Rejection) -> float:
    """Seconds until a rejected endpoint may be usable again."""
    load, prompt = found.fleet.loads[rejected.endpoint], found.queued.estimate.pools[rejected.pool]
    wait = load.limits.wait(prompt.tokens, found.now)
    return wait if load.health is Health.UP else max(wait, RECHECK)


def _bounded(wait: float) -> float:
    return min(max(wait, SHORTEST_WAIT), LONGEST_WAIT)


def in_ms(seconds: float) -> str:
    return f"{max(seconds, 0.0) * 1e3:.0f} ms"
