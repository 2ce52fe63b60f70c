"""How many requests a minute an API takes, learned from its refusals.

Rules:
- What it took in the minute before it refused is its limit. Fewer than LEAST say nothing: it was overloaded, or
  counts something else.
- At the limit it is full until the oldest of that minute is a minute old: asking sooner costs a refusal.
- A limit grows by GROWTH a minute, since what is not tried again is never known to have been raised.
"""

from __future__ import annotations

from collections import deque

from policies.types import FOREVER, NEVER

WINDOW = 60.0  # s
LEAST = 20  # requests
GROWTH = 0.01  # of the limit, per minute
MOST = 10_000  # requests a minute that are counted: beyond, no limit is learned


class LearnedRateLimit:
    """One API's."""

    __slots__ = ("_learned_at", "_limit", "_sent")

    def __init__(self) -> None:
        self._sent: deque[float] = deque(maxlen=MOST)
        self._limit, self._learned_at = FOREVER, NEVER

    def sent(self, now: float) -> None:
        self._sent.append(now)
        self._forget(now)

    def refused(self, now: float) -> None:
        """The latest was, for there were too many."""
        self._forget(now)
        if self._sent:
            self._sent.pop()
        if LEAST <= len(self._sent) < MOST - 1:
            self._limit, self._learned_at = float(len(self._sent)), now

    def full_until(self, now: float) -> float:
        """When it takes another; NEVER if it does now."""
        if self._limit == FOREVER:
            return NEVER
        self._forget(now)
        limit = int(self._limit * (1 + GROWTH * (now - self._learned_at) / WINDOW))
        return NEVER if len(self._sent) < limit else self._sent[-limit] + WINDOW

    def _forget(self, now: float) -> None:
        while self._sent and self._sent[0] <= now - WINDOW:
            self._sent.popleft()
