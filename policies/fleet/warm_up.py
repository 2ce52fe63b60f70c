"""When the gateway sends requests of its own: to warm an engine up, or to keep an endpoint warm.

Rules:
- An engine that lost its cache, while a sibling can take the traffic, is warming: it is given its pool's hottest
  prefixes (`policies.prefix_cache.hot_prefixes`) before it takes its share. They take at most CACHE_SHARE of its
  cache, and PREFILL seconds
  at the rate that was learned of it or of its siblings.
- Warming ends early when the pool needs the engine (NEEDED more requests than when it began are there: it is the last
  to be sent to), when FAILURES in a row say that it is not up to it, and after LONGEST in any case.
- Nor is an engine warmed up twice within REST: one that restarts all the time is not worth it, and an address behind
  which several engines take turns seems to.
- An endpoint of a pool with `keep_warm` is sent a request when it had none for that long, and has none now. Each waits
  a little less, by its own luck: those that went idle together are not all busy at once. Never one that is down or
  that limits us; one on trial, rather than a caller's request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Generic, TypeVar

from policies.scorers.scorer import tie_break
from policies.types import Health, Load

Prefix = TypeVar("Prefix")

CACHE_SHARE = 0.25
PREFILL = 10.0  # s
LONGEST = 20.0  # s
REST = 600.0  # s
AT_ONCE = 2  # requests: the engine need not wait for the next
NEEDED = 2  # requests
FAILURES = 2
JITTER = 0.1  # of `idle`


def room(cache: int, rate: float) -> int:
    """How many tokens to warm an engine up with: `cache` tokens, `rate` tokens/s."""
    return int(min(CACHE_SHARE * cache, PREFILL * rate))


class WarmUp(Generic[Prefix]):
    """One engine's. `in_flight`: what its load says, these requests included."""

    __slots__ = ("_failures", "_left", "_others", "_pending", "_until", "prefixes", "tokens")

    def __init__(self, prefixes: Sequence[Prefix], in_flight: int, now: float) -> None:
        self.prefixes = self.tokens = 0  # that were computed
        self._left = deque(prefixes)
        self._others = in_flight
        self._pending = self._failures = 0
        self._until = now + LONGEST

    def next(self, in_flight: int, now: float) -> Prefix | None:
        """What to send now; None: it is over."""
        needed = in_flight - self._pending >= self._others + NEEDED
        if needed or now >= self._until or self._failures >= FAILURES or not self._left:
            return None
        self._pending += 1
        return self._left.popleft()

    def ended(self, well: bool, tokens: int) -> None:
        """One of them did."""
        self._pending -= 1
        self._failures = 0 if well else self._failures + 1
        self.prefixes += well
        self.tokens += tokens if well else 0


def is_idle(endpoint_id: str, load: Load, used_at: float, idle: float, now: float) -> bool:
    """Whether to keep this endpoint warm now."""
    if load.health is Health.DOWN or load.in_flight or load.blocked_until > now:
        return False
    luck = tie_break(int(used_at * 1e3), endpoint_id) % 1024 / 1024
    return now - used_at >= idle * (1 - JITTER * luck)
