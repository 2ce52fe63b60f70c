"""Words and terms for the rank of a candidate, for `POST /explain`. No decision reads them."""

from __future__ import annotations

from policies.latency.tpot import expected_tpot_misses
from policies.routing.ranking import EQUAL, is_guess
from policies.types import Candidate, Decision, RankKind

_KINDS = {
    RankKind.VALUE: "",
    RankKind.HALF_OPEN: "probe, half-open: ",
    RankKind.STALE: "probe, not heard of lately: ",
    RankKind.RESERVE: "asked only after a failure: ",
}
_NAMES = {
    "good": "its chances",
    "soon": "its later first token",
    "misses": "the answers in progress there",
    "engine": "its longer prefill",
    "place": "the place of its tier or part of a tier",
}


def terms_of(decision: Decision, candidate: Candidate) -> dict[str, float]:
    """The terms of the value, which is their sum: good requests. Empty for a baseline's score."""
    if not decision.is_by_value or candidate.ranked_as is RankKind.RESERVE:
        return {}
    good = candidate.kept * (1.0 if is_guess(candidate, decision.target) else candidate.probability)
    misses = expected_tpot_misses(candidate.load, candidate.forecast.prefill)
    taken = {"misses": -misses, "engine": -candidate.engine}
    taken["place"] = -(1 - decision.target) * candidate.place
    return {"good": good, "soon": candidate.value - good - sum(taken.values()), **taken}


def reason_of(decision: Decision, candidate: Candidate) -> str:
    """Reason of a rank, in milliseconds and chances."""
    numbers = f"p50 {candidate.forecast.p50 * 1e3:.0f} ms, chance {candidate.probability:.3f}"
    if not decision.is_by_value:
        return f"{_KINDS[candidate.ranked_as]}{decision.scorer} in tier {candidate.tier + 1}; not weighed: {numbers}"
    told = f"{_KINDS[candidate.ranked_as]}{numbers}{_against_target(decision, candidate)}"
    first = decision.ranked[0]
    if candidate is first or candidate.ranked_as is RankKind.RESERVE:
        return told
    return f"{told}; {_behind(decision, candidate, first)}"


def _against_target(decision: Decision, candidate: Candidate) -> str:
    if decision.is_unbounded:
        return " (no TTFT budget)"
    within = f"for {(decision.deadline - decision.at) * 1e3:.0f} ms"
    if candidate.trial_s:
        return f" {within}; tried, as this forecast is a guess"
    return f" {'>=' if candidate.probability >= decision.target else '<'} {decision.target:g} {within}"


def _behind(decision: Decision, candidate: Candidate, first: Candidate) -> str:
    """The difference to the first, and the terms that make most of it."""
    less = first.value - candidate.value
    if first.ranked_as is not RankKind.VALUE:
        return "behind a probe"
    own, best = terms_of(decision, candidate), terms_of(decision, first)
    worst = max(best, key=lambda name: best[name] - own[name])
    if less < EQUAL:
        more = first.hit - candidate.hit
        held = f"holds {more} more tokens of the prompt" if more > 0 else "luck drew"
        return f"as good as the first, which {held}"
    return f"worth {less:.3f} less than the first, most of it by {_NAMES[worst]} ({best[worst] - own[worst]:.3f})"
