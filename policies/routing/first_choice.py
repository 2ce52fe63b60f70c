"""Tells an answer of the tier that the route would rather have from one of a tier that stood in."""

from __future__ import annotations

from policies.types import Decision


def is_of_first_choice(decision: Decision, prefer: str, tier: int | None) -> bool:
    """`tier`: that has answered. By `quality` the first tier that is suited for the request is wanted, whether or not
    it was up and in time; by any other preference the one that was chosen among all that are suited.
    A tier that is rejected for this request, whenever it comes, is not waited for."""
    usable = {candidate.tier for candidate in decision.ranked}
    out = {one.tier for one in decision.rejected if not one.kind.is_lasting} - usable
    if not usable:
        return False
    return tier == min(usable | out) if prefer == "quality" else not out and tier == decision.ranked[0].tier
