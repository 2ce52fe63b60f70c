"""Schedule of the gateway's own requests, which warm an engine up or keep an endpoint warm.

Rules:
- An engine which lost its cache, while a sibling can take the traffic, is warmed up with its pool's hottest prefixes
  (`policies.prefix_cache.hot_prefixes`): at most CACHE_SHARE of its cache, and MAX_PREFILL_S seconds at its learned
  prefill rate.
- Warming ends early when the pool needs the engine (MAX_OTHER_REQUESTS more requests than at its start: a warming
  endpoint is the last choice), after MAX_FAILURES in a row, and after MAX_WARM_UP in any case.
- An engine is not warmed up twice within MIN_INTERVAL: it may restart all the time, or be several behind one address.
- An endpoint of a pool with `keep_warm` gets a request after an idle time. A jitter per endpoint spreads
  endpoints which went idle together. Endpoints which are down or rate limited are left alone; a half-open one is tried
  by this request rather than by a caller's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Generic, TypeVar

from policies.scorers.scorer import tie_break
from policies.types import Health, Load

Prefix = TypeVar("Prefix")

CACHE_SHARE = 0.25
MAX_PREFILL_S = 10.0
MAX_WARM_UP = 20.0  # s
MIN_INTERVAL = 600.0  # s
CONCURRENCY = 2  # requests: the engine need not wait for the next
MAX_OTHER_REQUESTS = 2
MAX_FAILURES = 2
JITTER = 0.1  # of `idle`


def warm_up_tokens(cache: int, rate: float) -> int:
    """Tokens to warm up an engine with a cache of `cache` tokens, at `rate` tokens/s."""
    return int(min(CACHE_SHARE * cache, MAX_PREFILL_S * rate))


class WarmUp(Generic[Prefix]):
    """The warm-up of an engine. `in_flight`: of its load, these requests included."""

    def __init__(self, prefixes: Sequence[Prefix], in_flight: int, now: float) -> None:
        self.prefixes = self.tokens = 0  # computed so far
        self._remaining = deque(prefixes)
        self._others = in_flight
        self._pending = self._failures = 0
        self._until = now + MAX_WARM_UP

    def next(self, in_flight: int, now: float) -> Prefix | None:
        """The prefix to send now; None: the warm-up is over."""
        needed = in_flight - self._pending >= self._others + MAX_OTHER_REQUESTS
        if needed or now >= self._until or self._failures >= MAX_FAILURES or not self._remaining:
            return None
        self._pending += 1
        return self._remaining.popleft()

    def on_ended(self, ok: bool, tokens: int) -> None:
        """`tokens`: of the prefix."""
        self._pending -= 1
        self._failures = 0 if ok else self._failures + 1
        if ok:
            self.prefixes += 1
            self.tokens += tokens


def is_idle(endpoint_id: str, load: Load, used_at: float, idle: float, now: float) -> bool:
    """Returns whether a keep-warm request is due. `idle`: s without a request."""
    if load.health is Health.DOWN or load.in_flight or load.blocked_until > now:
        return False
    jitter = tie_break(int(used_at * 1e3), endpoint_id) % 1024 / 1024
    return now - used_at >= idle * (1 - JITTER * jitter)
