"""Tells an answer of the tier that the route would rather have from one of a tier that stood in."""

from __future__ import annotations

from policies.types import Decision, RejectionKind

# Reasons that hold for this request whenever it comes: a tier that is rejected for one of these is not waited for.
LASTING = frozenset(
    {
        RejectionKind.WHEN,
        RejectionKind.CONTEXT_WINDOW,
        RejectionKind.CAPABILITY,
        RejectionKind.UNTRANSLATABLE,
        RejectionKind.POOL_TAKEN,
        RejectionKind.REGION,
        RejectionKind.PINNED_ELSEWHERE,
        RejectionKind.UNKNOWN_ADAPTER,
    }
)


def is_of_first_choice(decision: Decision, prefer: str, tier: int | None) -> bool:
    """`tier`: that has answered. By `quality` the first tier that is suited for the request is wanted, whether or not
    it was up and in time; by any other preference the one that was chosen among all that are suited."""
    usable = {candidate.tier for candidate in decision.ranked}
    out = {one.tier for one in decision.rejected if one.kind not in LASTING} - usable
    if not usable:
        return False
    return tier == min(usable | out) if prefer == "quality" else not out and tier == decision.ranked[0].tier
