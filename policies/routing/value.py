"""The value of a place for a request: good requests that sending it to an endpoint now is expected to add.

    value = chance x pace x total + SOON x (1 - p50 / budget - tpot / tpot budget) - misses - ENGINE x more
            - place x (1 - target)

- chance: that the first token comes before the deadline, by the forecast, with all that is queued before the request.
- pace: that the answer keeps its TPOT at the endpoint's load, over the same in the first tier at rest; where there are
  several tiers.
- total: that the whole answer is there within `total` of the route. A promise with a target of its own is kept by a
  chance of that.
- p50 / budget: share of the TTFT budget that the median first token takes. Soon is better than just in time.
- tpot / tpot budget: share of the TPOT budget that a token takes there now, of streams with such a budget. An answer
  that is written sooner leaves its engine sooner: fewer are lost with an engine, and more find their pace.
- misses: answers in progress there that the prefill is expected to make miss their TPOT (`policies.latency.tpot`).
- more: seconds of prefill beyond the least of its tier, which others cannot have; at the pace of the fastest engine of
  the tier, as the time of a slow engine is worth less.
- place: of the tier in the order that `prefer` gives, from 0 on. A place up is worth as much of a chance as the route
  may miss: a tier is left where another adds more than 1 - target.

Decision 0103 says what else was tried, and what the constants are worth.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from policies.latency.tpot import expected_tpot_misses
from policies.rate_limit.send_limits import UNLIMITED
from policies.routing.candidates import CandidateSet, TierCandidates
from policies.types import FOREVER, MEDIAN, NEVER, Candidate, Completion

SOON = 0.1  # good requests for a first token that takes none of the budget, rather than all of it
ENGINE = 0.3  # good requests for a second of prefill that another engine of the tier would save
UNBOUNDED = 3.0  # s that stand for a TTFT budget where there is none
HOPELESS = 0.05  # chance at rest of a TPOT budget that no engine of the tier keeps
TRIED = 3  # requests in progress at an endpoint of unknown pace, above which others have to tell


def weigh(found: CandidateSet) -> None:
    """Set the value of each candidate."""
    places, step, soon, target = in_order(found), 1 - found.target, soon_per_s(found), found.target
    tpot_budget = _tpot_budget(found)
    per_tpot = 0.0 if tpot_budget is None else SOON / tpot_budget
    pace = None if tpot_budget is None or len(places) == 1 else _pace(found, places[0], tpot_budget)
    for place, tier in enumerate(places):
        _keep(found, tier, pace)
        hits = [each.hit for each in tier]
        most = max(hits)
        per_token = 0.0 if most == min(hits) else ENGINE * _fastest_prefill(tier)
        for each in tier:
            forecast, load = each.forecast, each.load
            good, prefill = each.probability * each.kept, forecast.prefill
            p50 = forecast.point_estimate * forecast.ratios[MEDIAN]
            if not prefill and is_guess(each, target):
                good, p50 = each.kept, 0.0
            each.engine = engine = per_token * (most - each.hit)
            value = good + SOON - soon * p50 - per_tpot * load.tpot - engine - step * place
            if load.expected_tpot_misses:
                value -= expected_tpot_misses(load, prefill)
            each.value, each.place = value, place


def _keep(found: CandidateSet, tier: TierCandidates, pace: Callable[[Candidate], float] | None) -> None:
    """Set the chances to keep what is promised beyond the first token, where anything is."""
    if pace is not None:
        for each in tier:
            each.kept *= pace(each)
    if found.queued.weighs_total:
        for each in tier:
            each.kept *= found.total_kept(each)


def _fastest_prefill(tier: TierCandidates) -> float:
    """Seconds per token of the engine that would compute its part of the prompt fastest."""
    tokens = tier[0].prompt_tokens
    return min([each.forecast.prefill / (tokens - each.hit) for each in tier if each.hit < tokens], default=0.0)


def is_guess(candidate: Candidate, target: float) -> bool:
    """An API is known by its prior alone, and is to be tried: a guess that is never tried is never known."""
    forecast = candidate.forecast
    is_prior = not forecast.prefill and not forecast.trained
    return candidate.trial_s > 0 or (is_prior and candidate.probability >= target)


def soon_per_s(found: CandidateSet) -> float:
    """Good requests that a second less to the first token is worth."""
    budget = found.queued.deadline - found.queued.request.arrival
    return SOON / (UNBOUNDED if budget == FOREVER else max(budget, found.left))


def _tpot_budget(found: CandidateSet) -> float | None:
    """None: no pace is seen, of an answer that is not streamed, or waited for."""
    request = found.queued.request
    return found.queued.route.tpot_budget(request.tpot_budget) if request.stream and found.left < FOREVER else None


def _pace(found: CandidateSet, preferred: TierCandidates, budget: float) -> Callable[[Candidate], float]:
    """The chance to keep the TPOT, as a share of what the preferred tier could promise at rest: a budget that no load
    makes worse there is no reason to leave."""
    route, view, now = found.queued.route, found.view, found.now
    wanted = max(view.tpot_chance_at_rest(each, budget) for each in preferred) * (route.tpot_target or 1.0)
    return lambda each: 1.0 if wanted < HOPELESS else min(view.tpot_chance(each, budget, now) / wanted, 1.0)


# --------------------------------------------------------------------------- the order of the tiers


def in_order(found: CandidateSet) -> list[TierCandidates]:
    """The tiers, the preferred first. A tier at its rate limit is behind those that need not be waited for."""
    if len(found.tiers) == 1:
        return found.tiers
    prefers = PREFERENCES[found.queued.route.prefer]

    def order(tier: TierCandidates) -> tuple[bool, float]:
        return _is_limited(found, tier), 0.0 if prefers is None else min(prefers(found, each) for each in tier)

    return sorted(found.tiers, key=order)


def _is_limited(found: CandidateSet, tier: TierCandidates) -> bool:
    """Every endpoint of the tier is at a rate limit."""
    limits = [(each.load.limits, each.prompt_tokens) for each in tier]
    return all(limit is not UNLIMITED and limit.wait(tokens, found.now) > 0 for limit, tokens in limits)


def _of_whole(found: CandidateSet, each: Candidate, of: Callable[[Completion], float], guess: float) -> float:
    """Figure of the whole answer; of an unknown pace a few answers are to tell, and a guess meanwhile."""
    whole = found.completion(each)
    if whole is not None:
        return of(whole)
    return NEVER if each.load.in_flight < TRIED else guess


def _completion(found: CandidateSet, each: Candidate) -> float:
    guess = each.forecast.p50 + found.expected_output * each.forecast.tpot
    return _of_whole(found, each, lambda whole: whole.p50, guess)


def _tpot(found: CandidateSet, each: Candidate) -> float:
    return _of_whole(found, each, lambda whole: whole.median_tpot, each.forecast.tpot)


PREFERENCES: Mapping[str, Callable[[CandidateSet, Candidate], float] | None] = {  # the least of a tier counts
    "quality": None,  # the order of the configuration
    "cost": lambda found, each: each.price,  # all of a pool, so the price is the same
    "latency": lambda found, each: each.forecast.p50,
    "completion": _completion,
    "throughput": _tpot,
}
