"""Divides endpoints by region: those that a route may use, and those that come first.

    region: {only: [eu]}              # data residency: no other endpoint, whatever fails
    region: {prefer: [eu, us]}        # of each tier those in eu first, then those in us, then the others
    region: {prefer: nearest}         # of each tier those with the least network time first

Rules:
- `only` is a filter of candidates: what is no candidate gets no attempt of any kind. An endpoint without a region is in
  none. A request cannot widen `only`.
- `prefer` divides a tier: the parts are ordered as tiers are (Envoy: priority levels of localities).
- Nearest is the least round trip. Regions that are ALIKE are one part: one nearer by microseconds would take all the
  load from its neighbour. An endpoint that no connection has measured yet counts as near: a request measures it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from policies.route_hooks import Divide, Refused
from policies.types import Candidate, Endpoint, Load, PoolEstimate, RejectionKind, RequestView

ALIKE, ALIKE_S = 1.5, 0.002  # times the least round trip, and s more, up to which a region is as near

REGION = RejectionKind("region", is_lasting=True, excludes=True)
_OUTSIDE = REGION, "outside of the regions of the route"
RegionNames = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1)]


class RoutedRegions(BaseModel):
    """Regions that requests may go to, and the order in which regions are preferred."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    only: RegionNames | None = None
    """Regions whose endpoints alone get requests of the route."""
    prefer: Literal["nearest"] | RegionNames | None = None
    """Regions whose endpoints come first, where these make the budgets; `nearest`: by measured network time."""

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.only is None and self.prefer is None:
            raise ValueError("region is empty; write {only: [eu]}, {prefer: [eu, us]} or {prefer: nearest}")
        if self.only is not None and isinstance(self.prefer, tuple):
            for name in self.prefer:
                if name not in self.only:
                    raise ValueError(f"region.prefer names {name}, which region.only excludes; remove it from prefer")
        return self

    def allows(self, endpoint: Endpoint) -> bool:
        return self.only is None or endpoint.locality in self.only

    def keeps_together(self, one: Endpoint, other: Endpoint) -> bool:
        """No division of a tier parts the two."""
        return self.prefer is None or one.locality == other.locality

    def only_there(
        self, request: RequestView, prompt: PoolEstimate, endpoint: Endpoint, load: Load, now: float
    ) -> Refused | None:
        """Hook of routes with `only`."""
        return None if self.allows(endpoint) else _OUTSIDE

    @property
    def divide(self) -> Divide | None:
        """Hook of routes with `prefer`: the candidates of a tier by region, the preferred part first."""
        if self.prefer is None or self.prefer == "nearest":
            return None if self.prefer is None else _by_distance
        return partial(_by_name, {name: number for number, name in enumerate(self.prefer)})


def _by_name(order: Mapping[str, int], candidates: Sequence[Candidate]) -> list[list[Candidate]]:
    """`order`: number of the part by region; all other regions are the last part."""
    found: dict[int, list[Candidate]] = {}
    for each in candidates:
        found.setdefault(order.get(each.endpoint.locality, len(order)), []).append(each)
    return [found[number] for number in sorted(found)]


def _by_distance(candidates: Sequence[Candidate]) -> list[list[Candidate]]:
    """By the least round trip within each region."""
    regions: dict[str, list[Candidate]] = {}
    for each in candidates:
        regions.setdefault(each.endpoint.locality, []).append(each)
    found, limit = list[list[Candidate]](), -1.0
    for least, region in sorted((min(each.rtt for each in one), name) for name, one in regions.items()):
        if least > limit:
            limit = least * ALIKE + ALIKE_S
            found.append([])
        found[-1] += regions[region]
    return found
