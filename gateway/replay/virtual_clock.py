"""Virtual time, and what is due in it."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import Any

from policies.types import FOREVER


class Clock:
    """`now` is moved by its owner; what is due at the same time is done in the order in which it was asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self._timers: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._order = count()

    @property
    def upcoming(self) -> float:
        return self._timers[0][0] if self._timers else FOREVER

    def at(self, when: float, act: Callable[[Any], None], payload: Any) -> None:
        heappush(self._timers, (max(when, self.now), next(self._order), act, payload))

    def run(self) -> None:
        """Do what is due, and what that makes due."""
        while self.upcoming <= self.now:
            _, _, act, payload = heappop(self._timers)
            act(payload)
