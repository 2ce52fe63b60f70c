"""The value of a place for a request: good requests that sending it to an endpoint now is expected to add.

    value = chance x pace x total + SOON x (1 - p50 / budget) - misses - ENGINE x more - place x (1 - target)

- chance: that the first token comes before the deadline, by the forecast, with all that is queued before the request.
- pace: that the answer keeps its TPOT at the endpoint's load, over the same in the first tier at rest; where there are
  several tiers.
- total: that the whole answer is there within `total` of the route. A promise with a target of its own is kept by a
  chance of that.
- p50 / budget: share of the TTFT budget that the median first token takes. Soon is better than just in time.
- misses: answers in progress there that the prefill is expected to make miss their TPOT (`policies.latency.tpot`).
- more: seconds of prefill beyond the least of its tier, which others cannot have; at the pace of the fastest engine of
  the tier, as the time of a slow engine is worth less.
- place: of the tier in the order that `prefer` gives, from 0 on. A place up is worth as much of a chance as the route
  may miss: a tier is left where another adds more than 1 - target.

Decision 0103 says what else was tried, and what the constants are worth.

The order of candidates: by this value, or by a baseline's scorer.

Rules:
- The ranking is complete, because failover never asks again.
- Of values EQUAL to the best of its tier the longest hit comes first, so that a prefix stays on an endpoint: sessions
  that move for little lose the caches of others. Of equal hits, those NEAR the best are drawn by the sequence number of
  the request, so that idle endpoints share the load: forecasts are not more exact.
- A session returns to the endpoint of an API that it used before, one of several keys or places, as its prompt may be
  cached there: among endpoints of a SIMILAR median TTFT its name draws the first (rendezvous hashing: no memory that
  callers could fill). Of engines the prefix index knows better.
- A half-open endpoint of the chosen tier gets the next request expected in time there: a restarted engine is back at
  once. After a failed trial the request goes to the second of the ranking.
- An endpoint of the chosen tier without a first token for PROBE_AFTER seconds, while another had some, is probed by a
  request in PROBE_EVERY, if expected in time there too: an untested forecast stays wrong.
- Tiers that come `after` a failure are last, in their order, whatever `prefer` says.
- With a scorer other than `predicted`, a baseline, tiers keep their order and budgets play no part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from zlib import crc32

from policies.latency.tpot import expected_tpot_misses
from policies.rate_limit.send_limits import UNLIMITED
from policies.routing.candidates import CandidateSet, TierCandidates
from policies.scorers.scorers import Scorer, draw, tie_break
from policies.types import FOREVER, MEDIAN, NEVER, Candidate, Completion, Health, RankKind

SOON = 0.1  # good requests for a first token that takes none of the budget, rather than all of it
ENGINE = 0.3  # good requests for a second of prefill that another engine of the tier would save
UNBOUNDED = 3.0  # s that stand for a TTFT budget where there is none
HOPELESS = 0.05  # chance at rest of a TPOT budget that no engine of the tier keeps
TRIED = 3  # requests in progress at an endpoint of unknown pace, above which others have to tell


def weigh(found: CandidateSet) -> None:
    """Set the value of each candidate."""
    places, step, soon, target = in_order(found), 1 - found.target, soon_per_s(found), found.target
    pace, weighs_total = _pace(found, places[0]) if len(places) > 1 else None, found.queued.weighs_total
    for place, tier in enumerate(places):
        if pace is not None or weighs_total:
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
            value = good + SOON - soon * p50 - engine - step * place
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


def _pace(found: CandidateSet, preferred: TierCandidates) -> Callable[[Candidate], float] | None:
    """The chance to keep the TPOT, as a share of what the preferred tier could promise at rest: a budget that no load
    makes worse there is no reason to leave. None: no pace is seen, of an answer that is not streamed, or waited for."""
    request, route, view, now = found.queued.request, found.queued.route, found.view, found.now
    budget = route.tpot_budget(request.tpot_budget) if request.stream and found.left < FOREVER else None
    if budget is None:
        return None
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


EQUAL = 0.01  # good requests, up to which the longest hit comes first
NEAR = 0.05  # of the median TTFT of the best, up to which the order is drawn
SIMILAR = 0.5  # of the same: a provider's cache saves more of the time and the price of a long prompt
NOISE = 0.002  # s of median TTFT: a difference below NEAR or SIMILAR of it is none, however fast both are
PROBE_AFTER, PROBE_EVERY = 30.0, 100  # s without a first token, and requests per probe
PROBES = crc32(b"probe")  # so that the draw of probes is not that of equals

_PROBING = Health.PROBING  # a member is slow to look up in an enumeration
_value = attrgetter("value")


def rank(found: CandidateSet, scorer: Scorer | None) -> list[Candidate]:
    """All candidates, the first choice first. `scorer`: of a baseline."""
    ranking = _by_value(found) if scorer is None else _by_score(found, found.tiers, scorer)
    if found.reserve:
        reserve = _by_score(found, found.reserve, scorer or _p50s)
        for each in reserve:
            each.ranked_as = RankKind.RESERVE
        ranking += reserve
    return ranking


def _by_value(found: CandidateSet) -> list[Candidate]:
    weigh(found)
    ranking = [each for tier in found.tiers for each in tier]
    if len(ranking) > 1:
        ranking.sort(key=_value, reverse=True)
        _order_equals(found, ranking)
        _probe(found, ranking)
    return ranking


def _order_equals(found: CandidateSet, ranking: list[Candidate]) -> None:
    """Order the first of the ranking that are as good as the best, all of its tier."""
    best, session = ranking[0], found.queued.request.session
    sticks = bool(session) and not found.fleet.pools[best.endpoint.pool].local
    near = SIMILAR if sticks else NEAR
    p50 = max(best.forecast.p50, NOISE)
    limit = best.value - max(EQUAL, near * soon_per_s(found) * p50)
    if ranking[1].value < limit:
        return
    seed = crc32(session.encode(errors="surrogatepass")) if sticks else found.queued.sequence
    equals = [each for each in ranking if each.tier == best.tier and each.value >= limit]

    def order(each: Candidate) -> tuple[float, bool, float]:
        is_drawn = each.forecast.p50 <= (1 + near) * p50 or (sticks and not each.forecast.trained)
        return -each.hit, not is_drawn, tie_break(seed, each.endpoint.id) if is_drawn else -each.value

    equals.sort(key=order)
    chosen = {id(each) for each in equals}
    ranking[:] = [*equals, *(each for each in ranking if id(each) not in chosen)]


def _by_score(found: CandidateSet, tiers: Sequence[TierCandidates], scorer: Scorer) -> list[Candidate]:
    """The tiers in their order, the candidates of each by the scorer, ties by the sequence number."""
    ranking, sequence = list[Candidate](), found.queued.sequence
    for tier in tiers:
        for each, score in zip(tier, scorer(tier, sequence, found.queued.route), strict=True):
            each.value = -score
        ranking += sorted(tier, key=lambda each: (-each.value, tie_break(sequence, each.endpoint.id)))
    return ranking


def _p50s(candidates: Sequence[Candidate], sequence: int, route: object) -> list[float]:
    return [each.forecast.p50 for each in candidates]


# --------------------------------------------------------------------------- probes


def _probe(found: CandidateSet, ranking: list[Candidate]) -> None:
    """Move the endpoint that this request should probe to the front; mostly none."""
    first, qualifies = ranking[0], found.queued.qualifies
    if not qualifies(first):
        return
    probed, kind = None, RankKind.HALF_OPEN
    if found.has_half_open:
        tried = (each for each in ranking if each.load.health is _PROBING and each.tier == first.tier)
        probed = next(filter(qualifies, tried), None)
    if probed is None and not draw(found.queued.sequence + PROBES) % PROBE_EVERY:
        tier = [each for each in ranking if each.tier == first.tier and qualifies(each)]
        probed, kind = _stale(found, tier), RankKind.STALE
    if probed is not None:
        ranking.remove(probed)
        ranking.insert(0, probed)
        probed.ranked_as = kind


def _stale(found: CandidateSet, tier: TierCandidates) -> Candidate | None:
    """The endpoint longest without a first token."""
    limit = found.now - PROBE_AFTER
    oldest = min(tier, key=lambda each: each.load.last_token_at)
    stale = oldest.load.last_token_at < limit <= max(each.load.last_token_at for each in tier)
    return oldest if stale and not oldest.load.prefilling else None
