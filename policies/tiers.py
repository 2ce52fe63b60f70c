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

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat

from policies.beliefs import Beliefs
from policies.facts import FOREVER, Ask, Candidate, Decision, FleetSnapshot, Health, Load, Outcome, PromptEstimate
from policies.ranking import Ranking, Row
from policies.route import Route
from policies.scorers.catalog import SCORERS
from policies.scorers.interface import Context, Prospect, scatter
from policies.survey import Group, Survey, survey

SHORTEST_WAIT, LONGEST_WAIT = 0.1, 30.0  # s, bounds of Retry-After: sooner is a storm, later a guess
PROBE_AFTER, PROBE_EVERY = 30.0, 100  # s without a first token, and requests of which one tries such an endpoint
RECHECK = 1.0  # s until an endpoint that is down or on trial deserves another look: about one probe


def decide(
    ask: Ask, estimate: PromptEstimate, route: Route, fleet: FleetSnapshot, beliefs: Beliefs, now: float, seed: int
) -> Decision:
    """Where to send a request. `seed` is its ordinal: it turns round robin and breaks ties."""
    found = survey(ask, estimate, route, fleet, beliefs, now, seed)
    if not found.groups:
        return _nowhere(found)
    if route.scorer != "predicted":
        return _by_yardstick(found)
    able = [group for all_ in found.groups if (group := [p for p in all_ if p.chance >= found.target])]
    others = [p for group in found.groups for p in group if p.chance < found.target]
    return _walk(found, able, others) if able else _miss(found, others)


# --------------------------------------------------------------------------- the walk


def _first(group: Group) -> float:
    return group[0].tier


def _cheapest(group: Group) -> float:
    return group[0].price  # a tier is one pool, and has one price


def _fastest(group: Group) -> float:
    return min(p.forecast.p50 for p in group)


_PREFERENCES: Mapping[str, Callable[[Group], float]] = {"quality": _first, "cost": _cheapest, "latency": _fastest}


def _walk(found: Survey, able: list[Group], others: Group) -> Decision:
    able.sort(key=_PREFERENCES[found.route.prefer])
    rows: list[Row] = []
    for group, reason in zip(able, _reasons(found, able), strict=True):
        rows += _by_score(found, group, reason)
    if others:
        rows += _by_chance(found, others)
    if (unheard := _unheard(found, able[0])) is not None:
        rows.sort(key=lambda row: row[0] is not unheard)
        rows[0] = (unheard, rows[0][1], f"probe, not heard of lately: {rows[0][2]}")
    ranked = Ranking(rows)
    return _decision(found, Outcome.PLACE, ranked, f"tier {ranked[0].tier + 1}: {ranked[0].reason}")


def _unheard(found: Survey, group: Group) -> Prospect | None:
    """The one that this request is to try, for a belief that nobody tests stays wrong: mostly none."""
    latest = found.now - PROBE_AFTER
    if max(p.load.heard_at for p in group) < latest or scatter(found.seed, "probe") % PROBE_EVERY:
        return None
    longest = min(group, key=lambda p: p.load.heard_at)
    return longest if longest.load.heard_at < latest and not longest.load.prefilling else None


def _reasons(found: Survey, able: Sequence[Group]) -> list[str]:
    """One for each tier, to be filled in with an endpoint's p50 (ms) and chance."""
    target = "(no TTFT budget)" if found.deadline == FOREVER else f">= {found.target:g}"
    numbers = f"p50 %.0f ms, chance %.3f {target}"
    chosen, prefer = able[0][0].tier + 1, found.route.prefer
    by = "" if prefer == "quality" else f" by {prefer}"
    later = [f"qualifies in tier {group[0].tier + 1}; tier {chosen} preferred{by}: {numbers}" for group in able[1:]]
    return [numbers, *later]


def _by_yardstick(found: Survey) -> Decision:
    rows: list[Row] = []
    for group in found.groups:
        reason = f"{found.route.scorer} in tier {group[0].tier + 1}; not weighed: p50 %.0f ms, chance %.3f"
        rows += _by_score(found, group, reason)
    ranked = Ranking(rows)
    return _decision(found, Outcome.PLACE, ranked, ranked[0].reason)


def _by_score(found: Survey, group: Group, reason: str) -> list[Row]:
    scores = SCORERS[found.route.scorer](group, Context(found.now, found.seed))
    return _ranked(found.seed, group, repeat(0.0), scores, reason)


def _by_chance(found: Survey, others: Group) -> list[Row]:
    """The best chance first; where none is left, the least delay."""
    reason = f"p50 %.0f ms, chance %.3f < {found.target:g} for {_ms(found.left)}"
    return _ranked(found.seed, others, [-p.chance for p in others], [p.forecast.p50 for p in others], reason)


def _ranked(seed: int, group: Group, precedence: Iterable[float], scores: Sequence[float], reason: str) -> list[Row]:
    """By precedence, then score; ties by the luck of the request, which is drawn only if there are any."""
    ties = len(set(scores)) < len(scores)
    luck = [scatter(seed, p.endpoint.id) for p in group] if ties else repeat(0)
    order = sorted(zip(precedence, scores, luck, range(len(group)), group, strict=False))
    return [(p, score, reason) for _, score, _, _, p in order]


def _decision(
    found: Survey, outcome: Outcome, ranked: Sequence[Candidate], reason: str, retry_after: float = 0.0
) -> Decision:
    rejected, scorer = tuple(found.rejected), found.route.scorer
    return Decision(outcome, found.now, found.deadline, ranked, rejected, scorer, retry_after, reason)


# --------------------------------------------------------------------------- when there is no such tier


def _miss(found: Survey, others: Group) -> Decision:
    """No tier can make the deadline: send to the best all the same, or say when another try would be worth it."""
    ranked = Ranking(_by_chance(found, others))
    best = f"the best chance is {ranked[0].chance:.3f} < {found.target:g} for {_ms(found.left)}"
    match found.route.on_miss:
        case "shed":
            wait, reason = _shed(found, others, best)
            return _decision(found, Outcome.SHED, ranked, reason, _bounded(wait))
        case "queue":
            return _decision(found, Outcome.PLACE, ranked, f"{best}; behind all that can still make theirs")
        case "best_effort":
            return _decision(found, Outcome.PLACE, ranked, f"{best}; best effort")


def _shed(found: Survey, others: Group, best: str) -> tuple[float, str]:
    """Seconds until another try, which starts with the whole budget, and why."""
    if any(_chance_when_idle(found, p) >= found.target for p in others):
        return _wait(others, found.target, found.budget), best
    return LONGEST_WAIT, f"a prompt of this length cannot make {_ms(found.budget)} anywhere, even on an idle endpoint"


def _wait(others: Group, target: float, budget: float) -> float:
    """Seconds until the first of them offers `target` again.

    Waiting shortens the queue, and so the prediction's center, by a second per second; it qualifies
    when its `target` quantile, which scales with the center, is down to the budget.
    """
    return min(p.forecast.center * (1 - budget / max(p.forecast.quantile(target), 1e-9)) for p in others)


def _chance_when_idle(found: Survey, p: Prospect) -> float:
    idle = Load(at=found.now, scraped_at=found.now)
    return found.beliefs.forecast(p.endpoint, idle, p.prompt.tokens, p.hit, found.now).chance(found.budget)


def _nowhere(found: Survey) -> Decision:
    """The request fits nowhere, or what it fits is out."""
    if found.unfit == len(found.route.tiers):
        return _decision(found, Outcome.UNFIT, (), _misfit(found))
    waits = [_back_in(found.fleet.loads[r.endpoint], found.now) for r in found.rejected if r.endpoint]
    reason = "every endpoint that could take it is down, on trial or rate limited"
    return _decision(found, Outcome.UNAVAILABLE, (), reason, _bounded(min(waits, default=RECHECK)))


def _misfit(found: Survey) -> str:
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
