"""The order of candidates: by value (`policies.routing.value`), or by a baseline's scorer.

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

from collections.abc import Sequence
from operator import attrgetter
from zlib import crc32

from policies.routing.candidates import CandidateSet, TierCandidates
from policies.routing.value import soon_per_s, weigh
from policies.scorers.scorers import Scorer, draw, tie_break
from policies.types import Candidate, Health, RankKind

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
