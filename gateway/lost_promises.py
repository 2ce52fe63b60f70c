"""Pools whose every answer is slower than a route's TPOT budget, even alone on an engine at rest.

No decision depends on these: decisions weigh the budget of each answer (`policies.latency.tpot`). They are for the
operator, who promised what the hardware cannot do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from policies.routes.route import Route
from policies.types import NEVER

KEPT_AGAIN = 0.9  # of the budget, below which the promise can be kept again: the TPOT varies
HOLD = 60.0  # s between two changes of one pair: a host that is busy now and then would fill the log


@dataclass(frozen=True, slots=True)
class LostPromise:
    """A promise that is, or was, lost. `alone`: TPOT of an answer alone on the fastest engine of the pool, at rest; in
    seconds, as `budget`."""

    route: str
    pool: str
    alone: float
    budget: float


class LostPromises:
    """`is_lost` by route and pool; pairs without a TPOT budget, or with an unknown TPOT, are absent."""

    def __init__(self) -> None:
        self.is_lost: Mapping[tuple[str, str], bool] = {}
        self._changed_at: dict[tuple[str, str], float] = {}

    def update(
        self, routes: Iterable[Route], tpot_alone: Callable[[str], float | None], now: float
    ) -> list[LostPromise]:
        """Returns the changes. `tpot_alone`: of the fastest engine of a pool; None: not known."""
        is_lost, changes = dict[tuple[str, str], bool](), list[LostPromise]()
        for promise in _promises(routes, tpot_alone):
            key = promise.route, promise.pool
            was_lost = self.is_lost.get(key, False)
            is_lost[key] = promise.alone > (KEPT_AGAIN if was_lost else 1.0) * promise.budget
            if is_lost[key] != was_lost and now - self._changed_at.get(key, NEVER) < HOLD:
                is_lost[key] = was_lost
            elif is_lost[key] != was_lost:
                self._changed_at[key] = now
                changes.append(promise)
        self.is_lost = is_lost
        self._changed_at = {key: at for key, at in self._changed_at.items() if key in is_lost}
        return changes


def _promises(routes: Iterable[Route], tpot_alone: Callable[[str], float | None]) -> Iterator[LostPromise]:
    known: dict[str, float | None] = {}
    for route in routes:
        for pool in dict.fromkeys(route.pools) if route.tpot is not None else ():
            alone = known[pool] if pool in known else known.setdefault(pool, tpot_alone(pool))
            if alone is not None and route.tpot is not None:
                yield LostPromise(route.name, pool, alone, route.tpot.budget)
