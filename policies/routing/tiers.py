"""The tier walk: chooses the tier and endpoint that still put the first token before the deadline.

Rules:
- The deadline is the arrival of the request plus the budget: time spent in the gateway counts. Where the budget is of
  the answer, the first token must leave time for the reasoning, by the pool's own earlier answers.
- A tier qualifies if an endpoint makes the rest of the budget with `probability >= target`. `prefer` chooses among
  qualifying tiers: quality the first, cost the cheapest, latency the fastest.
- Where load would make the answer miss its TPOT in the first qualifying tier, the next one that keeps TTFT and TPOT
  with the target probability is taken. Where none does, or the first misses the TPOT even at rest, the TPOT is no
  reason to leave; and it makes no request late. An unknown TPOT counts as kept, until a few answers tell.
- Within a tier the scorer `predicted` ranks. Ties are broken by the sequence number of the request, so equal idle
  endpoints share the load.
- A half-open endpoint of the chosen tier gets the next request expected in time there, whatever the scorer prefers: a
  restarted engine is back at once. After a failed trial the request goes to the second of the ranking.
- An endpoint of the chosen tier without a first token for PROBE_AFTER seconds, while another had some, is probed by a
  request in PROBE_EVERY, if expected in time there too.
- A session returns to the endpoint of an API that it used before, key or region, as its prompt may be cached there:
  among endpoints of similar cost its name draws the first (rendezvous hashing: no memory that callers could fill). Of
  engines the prefix index knows better.
- The ranking is complete, because failover never asks again: qualifying endpoints of the chosen tier, then of the
  other tiers in the order of preference, then the rest by probability.
- Nothing is shed on a guess: while the forecast of a usable endpoint is not trained, a request that would be shed is
  tried there. (A public system refused 8,270 of 11,395 requests by an uncalibrated prefill rate, most without need.)
- A route with a scorer other than `predicted` is a baseline: the first tier with a usable endpoint is taken whole;
  probabilities and budgets play no part, nothing is shed.
- Tiers are numbered from 0 in values, and from 1 in reasons. Reasons name pools, never hosts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from zlib import crc32

from policies.routing.candidates import (
    EXTERNAL_LIMIT,
    CandidateSet,
    FleetView,
    PlacementRequest,
    TierCandidates,
    find_candidates,
)
from policies.routing.ranking import Ranking, ranked
from policies.scorers.predicted import alike, predicted
from policies.scorers.scorers import SCORERS, Scorer, tie_break
from policies.types import (
    FOREVER,
    TINY,
    Candidate,
    Decision,
    FleetSnapshot,
    Health,
    Load,
    Placement,
    Rejection,
    RejectionKind,
)

SHORTEST_WAIT, LONGEST_WAIT = 0.1, 30.0  # s, bounds of Retry-After: shorter invites a storm, longer is a guess
PROBE_AFTER, PROBE_EVERY = 30.0, 100  # s without a first token, and requests per probe
RECHECK = 1.0  # s until another try of an endpoint down or half-open: about a probe interval

_PLACE, _PROBING = Placement.PLACE, Health.PROBING  # a member is slow to look up in an enumeration


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
    if (scorer := scorers[queued.route.scorer]) is not predicted:
        return _baseline(found, scorer)
    qualifying, others = _split(found)
    return _walk(found, qualifying, others) if qualifying else _miss(found, others)


def _split(found: CandidateSet) -> tuple[list[TierCandidates], TierCandidates]:
    """Candidates that reach the target, by tier; and the rest."""
    qualifying: list[TierCandidates] = []
    others: TierCandidates = []
    for tier in found.tiers:
        able: TierCandidates = []
        for candidate in tier:
            (able if candidate.probability >= found.target else others).append(candidate)
        if able:
            qualifying.append(able)
    return qualifying, others


# --------------------------------------------------------------------------- the walk

_PREFERENCES: Mapping[str, Callable[[TierCandidates], float]] = {
    "quality": lambda tier: tier[0].tier,
    "cost": lambda tier: tier[0].price,  # all of a pool, so the price is the same
    "latency": lambda tier: min(candidate.forecast.p50 for candidate in tier),
}

_BY = {"quality": "", "cost": " by cost", "latency": " by latency"}


def _walk(found: CandidateSet, qualifying: list[TierCandidates], others: TierCandidates) -> Decision:
    numbers, fallback_count = _numbers(found.target, found.left == FOREVER), len(others)
    by = _BY[found.queued.route.prefer]
    if len(qualifying) > 1:
        qualifying.sort(key=_PREFERENCES[found.queued.route.prefer])
        if _move_tpot_first(found, qualifying):
            by = " for its TPOT"
        fallback_count += sum(map(len, qualifying[1:]))
    fallbacks = partial(_fallbacks, found, qualifying, others, by, numbers)
    ranking: Sequence[Candidate] = _by_score(found, qualifying[0], numbers, fallbacks, fallback_count)
    if (probed := _probed(found, qualifying[0])) is not None:
        ranking = _with_probe(probed, ranking)
    chosen = ranking[0]
    return _decision(found, _PLACE, ranking, f"tier {chosen.tier + 1}: {chosen.reason}")


def _move_tpot_first(found: CandidateSet, qualifying: list[TierCandidates]) -> bool:
    """Moves the first tier that keeps the TPOT to the front, where load makes the present first one miss it.

    An answer that is not streamed shows no pace, and a request without a deadline waits for an idle engine anyway.
    """
    request = found.queued.request
    budget = found.queued.route.tpot_budget(request.tpot_budget)
    if budget is None or not request.stream or found.left == FOREVER:
        return False
    if _keeps_tpot(found, qualifying[0], budget, against_rest=True):
        return False
    keeping = next((i for i, tier in enumerate(qualifying) if _keeps_tpot(found, tier, budget)), 0)
    qualifying.insert(0, qualifying.pop(keeping))
    return keeping > 0


def _keeps_tpot(found: CandidateSet, tier: TierCandidates, budget: float, against_rest: bool = False) -> bool:
    """An endpoint keeps TTFT and TPOT with the target probability; `against_rest`: as far as it could at rest."""
    for candidate in tier:
        chance = candidate.probability * found.view.tpot_chance(candidate, budget, found.now)
        if chance >= found.target:
            return True
        if against_rest and chance >= found.target * found.view.tpot_chance_at_rest(candidate, budget):
            return True
    return False


@cache
def _numbers(target: float, unbounded: bool) -> str:
    """A reason, with places for p50 (ms) and probability."""
    return f"p50 %.0f ms, chance %.3f {'(no TTFT budget)' if unbounded else f'>= {target:g}'}"


def _fallbacks(
    found: CandidateSet, qualifying: Sequence[TierCandidates], others: TierCandidates, by: str, numbers: str
) -> list[Candidate]:
    """Candidates after the chosen tier. `by`: what it is preferred by."""
    chosen = qualifying[0][0].tier + 1
    after: list[Candidate] = []
    for tier in qualifying[1:]:
        after += _by_score(found, tier, f"qualifies in tier {tier[0].tier + 1}; tier {chosen} preferred{by}: {numbers}")
    return after + _by_probability(found, others)


def _probed(found: CandidateSet, tier: TierCandidates) -> Candidate | None:
    """The endpoint that this request should probe: half-open, or with an untested prediction; mostly none."""
    for candidate in tier:
        if candidate.load.health is _PROBING:
            return candidate
    return None if tie_break(found.queued.sequence, "probe") % PROBE_EVERY else _stale(found, tier)


def _stale(found: CandidateSet, tier: TierCandidates) -> Candidate | None:
    """The endpoint longest without a first token, because an untested prediction stays wrong."""
    limit = found.now - PROBE_AFTER
    oldest = min(tier, key=lambda candidate: candidate.load.last_token_at)
    stale = oldest.load.last_token_at < limit <= max(candidate.load.last_token_at for candidate in tier)
    return oldest if stale and not oldest.load.prefilling else None


def _with_probe(probed: Candidate, ranking: Sequence[Candidate]) -> list[Candidate]:
    """The ranking with the probed endpoint first."""
    first, probe = ranking[0], next(each for each in ranking if each.endpoint is probed.endpoint)
    others = [each for each in ranking if each is not probe]
    if probe is not first:
        others[0] = replace(first, reason=f"{first.reason}; the first but for a probe")
    why = "half-open" if probed.load.health is _PROBING else "not heard of lately"
    return [replace(probe, reason=f"probe, {why}: {probe.reason}"), *others]


def _baseline(found: CandidateSet, scorer: Scorer) -> Decision:
    queued, ranking = found.queued, list[Candidate]()
    for tier in found.tiers:
        after = f", after tier {ranking[0].tier + 1}" if ranking else ""
        name = f"{queued.route.scorer} in tier {tier[0].tier + 1}{after}"
        scores = scorer(tier, queued.sequence, queued.route)
        ranking += Ranking(tier, scores, queued.sequence, f"{name}; not weighed: p50 %.0f ms, chance %.3f")
    return _decision(found, _PLACE, ranking, ranking[0].reason)


def _by_score(
    found: CandidateSet,
    tier: TierCandidates,
    reason: str,
    fallbacks: Callable[[], Sequence[Candidate]] = tuple,
    fallback_count: int = 0,
) -> Ranking:
    queued, sequence = found.queued, found.queued.sequence
    scores: Sequence[float] = predicted(tier, sequence, queued.route)
    session = queued.request.session
    if session and not found.fleet.pools[tier[0].endpoint.pool].local:
        scores, sequence = alike(scores, tier), crc32(session.encode(errors="surrogatepass"))
    return Ranking(tier, scores, sequence, reason, fallbacks, fallback_count)


def _by_probability(found: CandidateSet, others: TierCandidates) -> list[Candidate]:
    """The highest probability first, then the least delay, then by sequence number."""
    reason, sequence = f"p50 %.0f ms, chance %.3f < {found.target:g} for {_ms(found.left)}", found.queued.sequence

    def order(candidate: Candidate) -> tuple[float, float, int]:
        return -candidate.probability, candidate.forecast.p50, tie_break(sequence, candidate.endpoint.id)

    return [ranked(candidate, candidate.forecast.p50, reason) for candidate in sorted(others, key=order)]


def _decision(
    found: CandidateSet,
    outcome: Placement,
    ranked: Sequence[Candidate],
    reason: str,
    retry_after: float = 0.0,
    cause: RejectionKind | None = None,
) -> Decision:
    deadline = found.queued.deadline
    if found.queued.reasoning and ranked:
        deadline -= found.queued.extra_reasoning(ranked[0].endpoint.pool)
    return Decision(
        outcome=outcome,
        at=found.now,
        deadline=deadline,
        ranked=ranked,
        rejected=tuple(found.rejected),
        scorer=found.queued.route.scorer,
        retry_after=retry_after,
        reason=reason,
        cause=cause,
    )


# --------------------------------------------------------------------------- no qualifying tier


def _miss(found: CandidateSet, others: TierCandidates) -> Decision:
    """No tier can make the deadline: the best candidate all the same, or a refusal, as `on_miss` says."""
    ranking = _by_probability(found, others)
    best = f"the best chance is {ranking[0].probability:.3f} < {found.target:g} for {_ms(found.left)}"
    match found.queued.route.on_miss:
        case "shed" if found.left > 0 and (untrained := [each for each in ranking if not each.forecast.trained]):
            trained = [each for each in ranking if each.forecast.trained]
            return _decision(found, _PLACE, untrained + trained, f"{best}; tried, as this forecast is a guess")
        case "shed":
            return _shed(found, others, ranking, best)
        case "queue":
            return _decision(found, _PLACE, ranking, f"{best}; behind all that can still make theirs")
        case "best_effort":
            return _decision(found, _PLACE, ranking, f"{best}; best effort")


def _shed(found: CandidateSet, others: TierCandidates, ranking: Sequence[Candidate], best: str) -> Decision:
    """A refusal with the time until another try, with the whole budget, is worthwhile."""
    budget = found.queued.deadline - found.queued.request.arrival
    if any(_probability_when_idle(found, candidate, budget) >= found.target for candidate in others):
        wait = min(_wait(candidate, found.target, budget) for candidate in others)
        return _decision(found, Placement.SHED, ranking, best, _bounded(wait))
    reason = f"a prompt of this length cannot make {_ms(budget)} anywhere, even on an idle endpoint"
    return _decision(found, Placement.SHED, ranking, reason, LONGEST_WAIT)


def _wait(candidate: Candidate, target: float, budget: float) -> float:
    """Seconds until the endpoint reaches `target` again.

    Waiting shortens the queue, and so the point estimate, by a second per second; the endpoint qualifies when the
    `target` quantile, proportional to the point estimate, is down to the budget.
    """
    forecast = candidate.forecast
    return forecast.point_estimate * (1 - budget / max(forecast.quantile(target), TINY))


def _probability_when_idle(found: CandidateSet, candidate: Candidate, budget: float) -> float:
    idle = {candidate.endpoint.id: Load(at=found.now, scraped_at=found.now)}
    prompt = found.queued.estimate.pools[candidate.endpoint.pool]
    left = budget - found.queued.extra_reasoning(candidate.endpoint.pool)
    [alone] = found.view.candidates(idle, prompt, candidate.tier, candidate.price, found.now, left)
    return alone.probability


_OUT = "is down, on trial or rate limited"


def _nowhere(found: CandidateSet) -> Decision:
    """No tier can ever take the request, or every able endpoint is out."""
    if found.unfit == len(found.queued.route.tiers):
        return _decision(found, Placement.UNFIT, (), _misfit(found), cause=_cause_of_misfit(found.rejected))
    pinned = found.queued.request.pinned
    out = [one for one in found.rejected if one.endpoint and pinned in ("", one.endpoint)]
    if limited := [_back_in(found, rejection) for rejection in out if _is_rate_limited(found, rejection)]:
        reason, wait = (
            "the rate limit of every provider that could take it is reached",
            max(min(limited), SHORTEST_WAIT),
        )
        return _decision(found, Placement.RATE_LIMITED, (), reason, wait, RejectionKind.RATE_LIMITED)
    if not out and any(rejection.kind is RejectionKind.EXTERNAL_LIMIT for rejection in found.rejected):
        kind = RejectionKind.EXTERNAL_LIMIT
        return _decision(found, Placement.RATE_LIMITED, (), EXTERNAL_LIMIT, LONGEST_WAIT, kind)
    waits = [_back_in(found, rejection) for rejection in out]
    reason = f"{'the endpoint with its state' if pinned else 'every endpoint that could take it'} {_OUT}"
    kind = out[0].kind if out else RejectionKind.NOT_ESTIMATED
    return _decision(found, Placement.UNAVAILABLE, (), reason, _bounded(min(waits, default=RECHECK)), kind)


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
        return (
            f"prompt of {tokens} tokens + {output} output exceeds the context window of every tier "
            f"(largest: {largest.context_window}, pool {largest.name})"
        )
    return "; ".join(f"{rejection.pool}: {rejection.reason}" for rejection in found.rejected)


def _back_in(found: CandidateSet, rejected: Rejection) -> float:
    """Seconds until a rejected endpoint may be usable again."""
    load, prompt = found.fleet.loads[rejected.endpoint], found.queued.estimate.pools[rejected.pool]
    wait = load.limits.wait(prompt.tokens, found.now)
    return wait if load.health is Health.UP else max(wait, RECHECK)


def _bounded(wait: float) -> float:
    return min(max(wait, SHORTEST_WAIT), LONGEST_WAIT)


def _ms(seconds: float) -> str:
    return f"{max(seconds, 0.0) * 1e3:.0f} ms"
