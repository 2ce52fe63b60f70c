"""The tier walk: which endpoint, of which tier, still makes the first token in time.

Rules:
- A straight line: survey the tiers, walk them, rank their endpoints. Nothing is asked twice, and
  nothing is remembered between requests.
- The deadline is the request's arrival plus its budget: the time that the gateway spent counts.
- A tier qualifies if an endpoint of it offers `chance >= target` of making what is left of the
  budget. `prefer` chooses among those: quality the first, cost the cheapest, latency the fastest.
- Within a tier the route's scorer ranks. Ties are spread by the request's ordinal, so that equal
  idle endpoints share the load.
- An endpoint of the chosen tier that was not heard of for PROBE_AFTER seconds, while others were, is tried by one
  request of PROBE_EVERY that it would serve in time too.
- The ranking is complete, because failover never asks again: the chosen tier's qualifying
  endpoints, those of the other tiers in the order of preference, then all others by their chance.
- A route whose scorer is not `predicted` is a yardstick and must not inherit our brain: the first
  tier with a usable endpoint is taken whole; chances and budgets play no part, nothing is shed.
- Tiers are numbered from 0 in values, and from 1 in reasons. Reasons name pools, never hosts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from itertools import repeat

from policies.routes.route import Route
from policies.routing.candidates import CandidateSet, TierCandidates, survey
from policies.routing.fleet_view import FleetView
from policies.routing.ranking import Ranking, Row
from policies.scorers.scorer import CandidateInput, Context, tie_break
from policies.scorers.scorer_catalog import SCORERS
from policies.types import (
    FOREVER,
    QUANTILES,
    TINY,
    Candidate,
    Decision,
    FleetSnapshot,
    Health,
    Load,
    Placement,
    PromptEstimate,
    RequestView,
)

SHORTEST_WAIT, LONGEST_WAIT = 0.1, 30.0  # s, bounds of Retry-After: sooner is a storm, later a guess
PROBE_AFTER, PROBE_EVERY = 30.0, 100  # s without a first token, and requests of which one tries such an endpoint
RECHECK = 1.0  # s until an endpoint that is down or on trial deserves another look: about one probe

_PLACE = Placement.PLACE  # a member is slow to look up in its enumeration


def decide(
    ask: RequestView,
    estimate: PromptEstimate,
    route: Route,
    fleet: FleetSnapshot,
    beliefs: FleetView,
    now: float,
    seed: int,
) -> Decision:
    """Where to send a request. `seed` is its ordinal: it turns round robin and breaks ties."""
    found = survey(ask, estimate, route, fleet, beliefs, now, seed)
    if not found.groups:
        return _nowhere(found)
    if route.scorer != "predicted":
        return _by_yardstick(found)
    able, others = _divided(found)
    return _walk(found, able, others) if able else _miss(found, others)


def _divided(found: CandidateSet) -> tuple[list[TierCandidates], TierCandidates]:
    """Those that offer the target, by tier; and all that do not.

    Where the quantile next to the target is within what is left, the chance need not be worked out.
    """
    left, target, at = found.left, found.target, bisect_left(QUANTILES, found.target)
    able: list[TierCandidates] = []
    others: TierCandidates = []
    for group in found.groups:
        hopeful: TierCandidates = []
        for p in group:
            _, _, _, _, _, _, center, ratios, _, _ = p  # by place: by name it takes twice as long
            sure = at < len(QUANTILES) and left / (center or TINY) >= ratios[at]
            (hopeful if sure or p.probability(left) >= target else others).append(p)
        if hopeful:
            able.append(hopeful)
    return able, others


# --------------------------------------------------------------------------- the walk


def _first(group: TierCandidates) -> float:
    return group[0].tier


def _cheapest(group: TierCandidates) -> float:
    return group[0].price  # a tier is one pool, and has one price


def _fastest(group: TierCandidates) -> float:
    return min(p.p50 for p in group)


_PREFERENCES: Mapping[str, Callable[[TierCandidates], float]] = {
    "quality": _first,
    "cost": _cheapest,
    "latency": _fastest,
}


def _walk(found: CandidateSet, able: list[TierCandidates], others: TierCandidates) -> Decision:
    numbers, behind = _numbers(found.target, found.deadline == FOREVER), len(others)
    if len(able) > 1:
        able.sort(key=_PREFERENCES[found.route.prefer])
        behind += sum(map(len, able[1:]))
    ranked = _by_score(found, able[0], numbers, partial(_behind, found, able, others, numbers), behind)
    if not tie_break(found.seed, "probe") % PROBE_EVERY and (unheard := _unheard(found, able[0])) is not None:
        ranked = _probing(unheard, ranked.told(), found.left)
    chosen = ranked[0]
    return _decision(found, _PLACE, ranked, f"tier {chosen.tier + 1}: {chosen.reason}")


@cache
def _numbers(target: float, unbounded: bool) -> str:
    """A reason, to be filled in with an endpoint's p50 (ms) and chance."""
    return f"p50 %.0f ms, chance %.3f {'(no TTFT budget)' if unbounded else f'>= {target:g}'}"


def _behind(found: CandidateSet, able: Sequence[TierCandidates], others: TierCandidates, numbers: str) -> list[Row]:
    """What comes after the chosen tier."""
    chosen, prefer = able[0][0].tier + 1, found.route.prefer
    by, rows = "" if prefer == "quality" else f" by {prefer}", []
    for group in able[1:]:
        reason = f"qualifies in tier {group[0].tier + 1}; tier {chosen} preferred{by}: {numbers}"
        rows += _by_score(found, group, reason).told()
    return rows + _by_chance(found, others)


def _unheard(found: CandidateSet, group: TierCandidates) -> CandidateInput | None:
    """The one that this request is to try, for a belief that nobody tests stays wrong: mostly none."""
    latest = found.now - PROBE_AFTER
    longest = min(group, key=lambda p: p.load.last_token_at)
    stale = longest.load.last_token_at < latest <= max(p.load.last_token_at for p in group)
    return longest if stale and not longest.load.prefilling else None


def _probing(unheard: CandidateInput, rows: list[Row], left: float) -> Ranking:
    first = rows[0]
    rows.sort(key=lambda row: row[0] is not unheard)
    _, score, reason = rows[0]
    rows[0] = (unheard, score, f"probe, not heard of lately: {reason}")
    if first[0] is not unheard:
        rows[1] = (first[0], first[1], f"{first[2]}; the first but for a probe")
    return Ranking.of(rows, left)


def _by_yardstick(found: CandidateSet) -> Decision:
    rows: list[Row] = []
    for group in found.groups:
        after = f", after tier {rows[0][0].tier + 1}" if rows else ""
        reason = f"{found.route.scorer} in tier {group[0].tier + 1}{after}; not weighed: p50 %.0f ms, chance %.3f"
        rows += _by_score(found, group, reason).told()
    ranked = Ranking.of(rows, found.left)
    return _decision(found, Placement.PLACE, ranked, ranked[0].reason)


def _by_score(
    found: CandidateSet, group: TierCandidates, reason: str, others: Callable[[], list[Row]] = list, more: int = 0
) -> Ranking:
    scores = SCORERS[found.route.scorer](group, Context(found.now, found.seed))
    return Ranking(found.seed, found.left, group, scores, reason, others, more)


def _by_chance(found: CandidateSet, others: TierCandidates) -> list[Row]:
    """The best chance first; where none is left, the least delay; ties by the luck of the request."""
    left, delays = found.left, [p.p50 for p in others]
    ties = len(set(delays)) < len(delays)
    luck = [tie_break(found.seed, p.endpoint.id) for p in others] if ties else repeat(0)
    order = sorted(zip([-p.probability(left) for p in others], delays, luck, range(len(others)), others, strict=False))
    reason = f"p50 %.0f ms, chance %.3f < {found.target:g} for {_ms(left)}"
    return [(p, delay, reason) for _, delay, _, _, p in order]


def _decision(
    found: CandidateSet, outcome: Placement, ranked: Sequence[Candidate], reason: str, retry_after: float = 0.0
) -> Decision:
    rejected, scorer = tuple(found.rejected), found.route.scorer
    return Decision(outcome, found.now, found.deadline, ranked, rejected, scorer, retry_after, reason)


# --------------------------------------------------------------------------- when there is no such tier


def _miss(found: CandidateSet, others: TierCandidates) -> Decision:
    """No tier can make the deadline: send to the best all the same, or say when another try would be worth it."""
    ranked = Ranking.of(_by_chance(found, others), found.left)
    best = f"the best chance is {ranked[0].probability:.3f} < {found.target:g} for {_ms(found.left)}"
    match found.route.on_miss:
        case "shed":
            wait, reason = _shed(found, others, best)
            return _decision(found, Placement.SHED, ranked, reason, _bounded(wait))
        case "queue":
            return _decision(found, Placement.PLACE, ranked, f"{best}; behind all that can still make theirs")
        case "best_effort":
            return _decision(found, Placement.PLACE, ranked, f"{best}; best effort")


def _shed(found: CandidateSet, others: TierCandidates, best: str) -> tuple[float, str]:
    """Seconds until another try, which starts with the whole budget, and why."""
    if any(_chance_when_idle(found, p) >= found.target for p in others):
        return _wait(others, found.target, found.budget), best
    return LONGEST_WAIT, f"a prompt of this length cannot make {_ms(found.budget)} anywhere, even on an idle endpoint"


def _wait(others: TierCandidates, target: float, budget: float) -> float:
    """Seconds until the first of them offers `target` again.

    Waiting shortens the queue, and so the prediction's center, by a second per second; it qualifies
    when its `target` quantile, which scales with the center, is down to the budget.
    """
    return min(p.point_estimate * (1 - budget / max(p.forecast.quantile(target), 1e-9)) for p in others)


def _chance_when_idle(found: CandidateSet, p: CandidateInput) -> float:
    idle = Load(at=found.now, scraped_at=found.now)
    [alone] = found.beliefs.prospects((p.endpoint,), (idle,), p.prompt, p.tier, p.price, found.now)
    return alone.probability(found.budget)


def _nowhere(found: CandidateSet) -> Decision:
    """The request fits nowhere, or what it fits is out."""
    if found.unfit == len(found.route.tiers):
        return _decision(found, Placement.UNFIT, (), _misfit(found))
    waits = [_back_in(found.fleet.loads[r.endpoint], found.now) for r in found.rejected if r.endpoint]
    reason = "every endpoint that could take it is down, on trial or rate limited"
    return _decision(found, Placement.UNAVAILABLE, (), reason, _bounded(min(waits, default=RECHECK)))


def _misfit(found: CandidateSet) -> str:
    pools = [found.fleet.pools[tier.pool] for tier in found.route.tiers]
    largest = max(pools, key=lambda pool: pool.context_window or FOREVER)
    tokens, output = found.estimate.pools[largest.name].tokens, found.output_tokens
    if largest.context_window is not None and tokens + output > largest.context_window:
        return (
            f"prompt of {tokens} tokens + {output} output exceeds the context window of every tier "
            f"(largest: {largest.context_window}, pool {largest.name})"
        )
    return "; ".join(f"{rejection.pool}: {rejection.reason}" for rejection in found.rejected)


def _back_in(load: Load, now: float) -> float:
    """Seconds until an endpoint that is out may be in again."""
    return load.blocked_until - now if load.health is Health.UP else RECHECK


def _bounded(wait: float) -> float:
    return min(max(wait, SHORTEST_WAIT), LONGEST_WAIT)


def _ms(seconds: float) -> str:
    return f"{max(seconds, 0.0) * 1e3:.0f} ms"
