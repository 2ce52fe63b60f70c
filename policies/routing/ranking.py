"""The order of preference: of the tiers that qualify, and of the candidates of each.

Rules:
- A tier qualifies if an endpoint makes the rest of the budget with `probability >= target`. `prefer` chooses among
  qualifying tiers: quality the first, cost the cheapest, latency the soonest first token, completion the soonest whole
  answer, throughput the most tokens a second. Of a pace not known yet a few answers are asked for. A tier at its rate
  limit comes behind those that need not be waited for.
- The parts of a tier by region (`policies.routes.region`) qualify and are chosen as tiers are; quality and cost take
  them in their order.
- Where load would make the answer miss its TPOT in the first qualifying tier, or the whole answer would miss `total`,
  the next one that keeps both with the target probability is taken. Where none does, or the first misses the TPOT even
  at rest, that is no reason to leave; and it makes no request late. What is unknown counts as kept, until answers tell.
- Of the chosen tier, endpoints that keep `total` come first. A route that promises `total` alone qualifies by it.
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
  other tiers in the order of preference, then the rest by probability. It is described on demand: mostly the first
  answers, and describing all costs as much as the rest of the decision.
- Tiers that come `after` a failure are last, in their order, whatever `prefer` says.
- A route with a scorer other than `predicted` is a baseline: every tier with a usable endpoint qualifies, in its order.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from zlib import crc32

from policies.rate_limit.send_limits import UNLIMITED
from policies.routing.candidates import CandidateSet, TierCandidates
from policies.scorers.scorers import Scorer, tie_break
from policies.types import FOREVER, NEVER, Candidate, Completion, Endpoint, Health

TRIED = 3  # requests in progress at an endpoint of unknown pace, above which others have to tell
PROBE_AFTER, PROBE_EVERY = 30.0, 100  # s without a first token, and requests per probe
SIMILAR = 0.5  # of the least cost, or
SIMILAR_SECONDS = 0.1  # more: a provider's cache saves more of the time and the price of a long prompt

_PROBING = Health.PROBING  # a member is slow to look up in an enumeration


def _weighed(found: CandidateSet, candidate: Candidate, of: Callable[[Completion], float], guess: float) -> float:
    """Figure of the whole answer; of an unknown pace a few answers are to tell, and a guess meanwhile."""
    whole = found.completion(candidate)
    if whole is not None:
        return of(whole)
    return NEVER if candidate.load.in_flight < TRIED else guess


def _completion(found: CandidateSet, each: Candidate) -> float:
    guess = each.forecast.p50 + found.expected_output * each.forecast.tpot
    return _weighed(found, each, lambda whole: whole.p50, guess)


_PREFERENCES: Mapping[str, tuple[str, Callable[[CandidateSet, Candidate], float]]] = {  # of a tier, the least counts
    "quality": ("", lambda found, candidate: candidate.tier),
    "cost": (" by cost", lambda found, candidate: candidate.price),  # all of a pool, so the price is the same
    "latency": (" by latency", lambda found, candidate: candidate.forecast.p50),
    "completion": (" by completion", _completion),
    "throughput": (
        " by throughput",
        lambda found, each: _weighed(found, each, lambda whole: whole.median_tpot, each.forecast.tpot),
    ),
}


@dataclass(slots=True)
class TierOrder:
    """Candidates that reach the target, by tier, the chosen tier first; and the rest. `by`: what chose the first."""

    qualifying: list[TierCandidates]
    others: TierCandidates
    by: str = ""


def walk_tiers(found: CandidateSet) -> TierOrder:
    """The order of the tiers that `prefer` of the route and the TPOT budget give; of a baseline, their own order."""
    if found.queued.route.scorer != "predicted":
        return TierOrder(found.tiers, [])
    qualifying, others = list[TierCandidates](), TierCandidates()
    for tier in found.tiers:
        able = TierCandidates()
        for each in tier:
            (able if each.probability >= found.target or each.trial_s else others).append(each)
        if able:
            qualifying.append(able)
    by, preference = _PREFERENCES[found.queued.route.prefer]
    if len(qualifying) > 1:
        qualifying.sort(
            key=lambda tier: (_is_limited(found, tier), min(preference(found, candidate) for candidate in tier))
        )
        by = _move_keeping_first(found, qualifying) or by
    return TierOrder(qualifying, others, by)


def _is_limited(found: CandidateSet, tier: TierCandidates) -> bool:
    """Every endpoint of the tier is at a rate limit."""
    return all(
        (limits := each.load.limits) is not UNLIMITED and limits.wait(each.prompt_tokens, found.now) > 0
        for each in tier
    )


def _move_keeping_first(found: CandidateSet, qualifying: list[TierCandidates]) -> str:
    """Moves the first tier that keeps TPOT and total to the front, where the present first one would miss either by
    load. Returns the reason.

    An answer that is not streamed shows no pace, and a request without a deadline waits for an idle engine anyway.
    """
    request, route, first = found.queued.request, found.queued.route, qualifying[0]
    tpot = route.tpot_budget(request.tpot_budget) if request.stream and found.left < FOREVER else None
    keeps_tpot = any(_keeps_tpot(found, each, tpot, against_rest=True) for each in first)
    if keeps_tpot and any(map(found.keeps_total, first)):
        return ""
    is_lost = keeps_tpot and not any(_keeps_tpot(found, each, tpot) for each in first)
    for i, tier in enumerate(qualifying):
        if any(_keeps_tpot(found, each, tpot, is_lost) and found.keeps_total(each) for each in tier):
            qualifying.insert(0, qualifying.pop(i))
            return "" if i == 0 else " for its total" if keeps_tpot else " for its TPOT"
    return ""


def _keeps_tpot(found: CandidateSet, candidate: Candidate, budget: float | None, against_rest: bool = False) -> bool:
    """The endpoint keeps TTFT and TPOT with the target probability; `against_rest`: as far as it could at rest."""
    if budget is None:
        return True
    own, view = found.queued.route.tpot_target, found.view
    chance, target = view.tpot_chance(candidate, budget, found.now), own or found.target
    chance *= 1.0 if own or candidate.trial_s else candidate.probability
    return chance >= target or (against_rest and chance >= target * view.tpot_chance_at_rest(candidate, budget))


# --------------------------------------------------------------------------- candidates


def rank(found: CandidateSet, order: TierOrder, scorer: Scorer) -> Sequence[Candidate]:
    """All candidates, the first choice first. `scorer`: of the route."""
    if not order.qualifying:
        return _by_probability(found, order.others)
    tier = order.qualifying[0]
    fallbacks, fallback_count = partial(_fallbacks, found, order, scorer), sum(map(len, found.tiers)) - len(tier)
    ranking = _by_score(found, order, scorer, tier, fallbacks, fallback_count)
    if found.queued.route.scorer != "predicted":
        return ranking
    if found.queued.answer_tokens and not found.keeps_total(ranking[0]):
        keeping, missing = _parted(tier, found.keeps_total)
        if keeping:
            return rank(found, TierOrder([keeping, missing, *order.qualifying[1:]], order.others, order.by), scorer)
    probed = _probed(found, tier)
    return ranking if probed is None else _with_probe(probed, ranking)


def with_reserve(found: CandidateSet, ranking: Sequence[Candidate], scorer: Scorer) -> list[Candidate]:
    """The ranking, and behind it the tiers that come after a failure, in their order."""
    order, route = TierOrder(found.reserve, TierCandidates()), found.queued.route
    last = [each for tier in found.reserve for each in _by_score(found, order, scorer, tier)]
    said = "asked only after {}; p50 {:.0f} ms"
    return [
        *ranking,
        *(
            replace(
                each, reason=said.format(" or ".join(sorted(route.tiers[each.tier].after)), each.forecast.p50 * 1e3)
            )
            for each in last
        ),
    ]


def _parted(tier: TierCandidates, holds: Callable[[Candidate], bool]) -> tuple[TierCandidates, TierCandidates]:
    parts: tuple[TierCandidates, TierCandidates] = [], []
    for candidate in tier:
        parts[not holds(candidate)].append(candidate)
    return parts


def _fallbacks(found: CandidateSet, order: TierOrder, scorer: Scorer) -> list[Candidate]:
    """Candidates after the chosen tier."""
    after = (each for tier in order.qualifying[1:] for each in _by_score(found, order, scorer, tier))
    return [*after, *_by_probability(found, order.others)]


def _by_score(
    found: CandidateSet,
    order: TierOrder,
    scorer: Scorer,
    tier: TierCandidates,
    fallbacks: Callable[[], Sequence[Candidate]] = tuple,
    fallback_count: int = 0,
) -> Ranking:
    route, sequence, session = found.queued.route, found.queued.sequence, found.queued.request.session
    scores = scorer(tier, sequence, route)
    if session and route.scorer == "predicted" and not found.fleet.pools[tier[0].endpoint.pool].local:
        scores, sequence = _alike(scores, tier), crc32(session.encode(errors="surrogatepass"))
    return Ranking(tier, scores, sequence, _reason(found, order, tier), fallbacks, fallback_count)


def _alike(costs: Sequence[float], candidates: Sequence[Candidate]) -> list[float]:
    """Costs, with every cost SIMILAR to the least, and every guess, replaced by the least."""
    least = min(costs)
    near = least + max(least * SIMILAR, SIMILAR_SECONDS)
    return [
        least if cost <= near or not candidate.forecast.trained else cost
        for cost, candidate in zip(costs, candidates, strict=True)
    ]


def _reason(found: CandidateSet, order: TierOrder, tier: TierCandidates) -> str:
    """The reason of a tier's candidates, with places for p50 (ms) and probability."""
    scorer, number, chosen = found.queued.route.scorer, tier[0].tier + 1, order.qualifying[0][0].tier + 1
    if scorer != "predicted":
        after = "" if number == chosen else f", after tier {chosen}"
        return f"{scorer} in tier {number}{after}; not weighed: p50 %.0f ms, chance %.3f"
    numbers = _numbers(found.target, found.left == FOREVER, found.queued.promises_total_alone)
    if tier[0].trial_s:
        numbers = f"p50 %.0f ms, chance %.3f for {in_ms(found.left)}; tried, as this forecast is a guess"
    if number == chosen:
        return numbers if tier is order.qualifying[0] else f"{numbers}; {_why_behind(found, tier, order.qualifying[0])}"
    return f"qualifies in tier {number}; tier {chosen} preferred{order.by}: {numbers}"


def _why_behind(found: CandidateSet, part: TierCandidates, chosen: TierCandidates) -> str:
    """The reason why another part of the same tier is preferred."""
    region = chosen[0].endpoint.region
    by_region = found.queued.route.prefers_region and part[0].endpoint.region != region
    return f"region {region or 'unknown'} preferred" if by_region else "its whole answer would be late"


@cache
def _numbers(target: float, unbounded: bool, of_total: bool) -> str:
    of = " of its total" if of_total else ""
    return f"p50 %.0f ms, chance %.3f {'(no TTFT budget)' if unbounded else f'>= {target:g}{of}'}"


def _by_probability(found: CandidateSet, others: TierCandidates) -> list[Candidate]:
    """The highest probability first, then the least delay, then by sequence number."""
    within = in_ms(found.left) + (" before its total" if found.queued.promises_total_alone else "")
    reason, sequence = f"p50 %.0f ms, chance %.3f < {found.target:g} for {within}", found.queued.sequence

    def order(candidate: Candidate) -> tuple[float, float, int]:
        return -candidate.probability, candidate.forecast.p50, tie_break(sequence, candidate.endpoint.id)

    return [ranked(candidate, candidate.forecast.p50, reason) for candidate in sorted(others, key=order)]


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


# --------------------------------------------------------------------------- descriptions


def in_ms(seconds: float) -> str:
    return f"{max(seconds, 0.0) * 1e3:.0f} ms"


def ranked(candidate: Candidate, score: float, reason: str) -> Candidate:
    """The candidate with a rank. `reason` has places for p50 (ms) and probability."""
    return Candidate(  # `replace` takes five times as long
        endpoint=candidate.endpoint,
        tier=candidate.tier,
        prompt_tokens=candidate.prompt_tokens,
        hit=candidate.hit,
        forecast=candidate.forecast,
        probability=candidate.probability,
        price=candidate.price,
        score=score,
        reason=reason % (candidate.forecast.p50 * 1e3, candidate.probability),
        load=candidate.load,
        blocks=candidate.blocks,
        to_load=candidate.to_load,
        rtt=candidate.rtt,
        trial_s=candidate.trial_s,
    )


def p50_of(candidates: Sequence[Candidate], at: int) -> float:
    """Median TTFT of the candidate at this rank, s, without its description."""
    return candidates.p50(at) if isinstance(candidates, Ranking) else candidates[at].forecast.p50


def one_of_each_pool(candidates: Sequence[Candidate]) -> list[Endpoint]:
    """An endpoint of each pool, where possible without the description of a candidate."""
    if isinstance(candidates, Ranking) and (only := candidates.of_one_pool()) is not None:
        return [only]
    return list({each.endpoint.pool: each.endpoint for each in candidates}.values())


class Ranking(Sequence[Candidate]):
    """A tier's candidates by score, ties by sequence number; then the result of `fallbacks`."""

    def __init__(
        self,
        tier: TierCandidates,
        scores: Sequence[float],
        sequence: int,
        reason: str,
        fallbacks: Callable[[], Sequence[Candidate]] = tuple,
        fallback_count: int = 0,
    ) -> None:
        """`reason` has places for p50 (ms) and probability; `fallbacks` is called at most once."""
        self._order = sorted(range(len(tier)), key=scores.__getitem__)  # ties are in order once asked for
        self._sorted = [*map(scores.__getitem__, self._order)]
        self._sequence = sequence
        self._tier = tier
        self._scores = scores
        self._reason = reason
        self._fallbacks = fallbacks
        self._size = len(tier) + fallback_count
        self._described: dict[int, Candidate] = {}
        self._settled = 0  # ranks from the first on whose ties are in order

    def of_one_pool(self) -> Endpoint | None:
        """An endpoint of the only pool; None: there are fallbacks, perhaps of other pools."""
        return self._tier[0].endpoint if self._size == len(self._tier) else None

    def p50(self, at: int) -> float:
        return (self._tier[self._index(at)] if at < len(self._tier) else self[at]).forecast.p50

    def _index(self, at: int) -> int:
        """Index in the tier of the candidate at this rank."""
        if at < self._settled:
            return self._order[at]
        score = self._sorted[at]
        low, high = bisect_left(self._sorted, score), bisect_right(self._sorted, score)
        if high - low > 1:
            self._order[low:high] = sorted(self._order[low:high], key=self._tie_break)
        if low == self._settled:
            self._settled = high
        return self._order[at]

    def _tie_break(self, i: int) -> int:
        return tie_break(self._sequence, self._tier[i].endpoint.id)

    def _describe(self, at: int) -> Candidate:
        if at < len(self._tier):
            i = self._index(at)
            return ranked(self._tier[i], self._scores[i], self._reason_behind(at) if at else self._reason)
        self._described.update(enumerate(self._fallbacks(), len(self._tier)))
        return self._described[at]

    def _reason_behind(self, at: int) -> str:
        """Reason of a rank behind the first of the tier: the difference between the two."""
        own, first = self._index(at), self._index(0)
        if self._scores[own] == self._scores[first]:
            return f"{self._reason}; as good as the first of its tier, which luck drew"
        more = self._tier[first].hit - self._tier[own].hit
        if (score := f"{self._scores[own]:.4g}") == (best := f"{self._scores[first]:.4g}") and more > 0:
            return f"{self._reason}; as good as the first of its tier, which holds {more} more tokens of the prompt"
        return f"{self._reason}; score {score}, the first of its tier has {best}"

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, at: int) -> Candidate:  # type: ignore[override]  # no slices
        at = range(self._size)[at]
        if at not in self._described:
            self._described[at] = self._describe(at)
        return self._described[at]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]  # candidates are compared, not hashed
