"""The smallest number of engines that meets every budget: three replays around the present number, then bisection."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from lab.capacity.fleet_size import FleetSizeResult

SPARE = 0.25  # of what is possible above the required attainment, for a fleet that is smaller than the present one
EQUAL = 0.01  # of attainment: less than that is no reason for another engine, where no number is enough

Replay = Callable[[int], FleetSizeResult]


@dataclass(frozen=True, slots=True)
class SmallestFleet:
    """`needed`: engines. `curve`: what was replayed, by number of engines. `possible`: some number is enough; if not,
    `needed` is the smallest that the largest one hardly betters."""

    needed: int
    possible: bool
    curve: Mapping[int, FleetSizeResult] = field(default_factory=dict)


class FleetSearch:
    """Asks `replay` for sizes from `least` to `most`, each once. A size below `current` has to have room."""

    def __init__(self, replay: Replay, least: int, most: int, current: int = 0) -> None:
        self._replay = replay
        self._least = least
        self._most = most
        self._current = current
        self._curve: dict[int, FleetSizeResult] = {}

    def around(self, n: int) -> SmallestFleet:
        """Begins at `n` and its neighbours."""
        middle = min(max(n, self._least), self._most)
        for size in (middle, middle - 1, middle + 1):
            if self._least <= size <= self._most:
                self.at(size)
        return self._smallest()

    def whole(self) -> SmallestFleet:
        """Every size."""
        for size in range(self._least, self._most + 1):
            self.at(size)
        return self._smallest()

    def at(self, n: int) -> FleetSizeResult:
        if n not in self._curve:
            self._curve[n] = self._replay(n)
        return self._curve[n]

    def _is_enough(self, n: int) -> bool:
        return self.at(n).has_room(SPARE if n < self._current else 0.0)

    def _smallest(self) -> SmallestFleet:
        enough = [n for n in self._curve if self._is_enough(n)]
        short = [n for n in self._curve if n < min(enough, default=self._most + 1)]
        low, high = max(short, default=self._least - 1), min(enough, default=self._most)
        if not enough and not self._is_enough(self._most):
            return self._best_of_too_few()
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._is_enough(middle) else (middle, high)
        return SmallestFleet(high, True, dict(sorted(self._curve.items())))

    def _best_of_too_few(self) -> SmallestFleet:
        best, low, high = self.at(self._most).attainment, self._least - 1, self._most
        while high - low > 1:
            middle = (low + high) // 2
            is_equal = self.at(middle).attainment >= best - EQUAL
            low, high = (low, middle) if is_equal else (middle, high)
        return SmallestFleet(high, False, dict(sorted(self._curve.items())))
