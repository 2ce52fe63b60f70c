"""Tells the operator when an endpoint's limit shuts it for callers, and when it is open again.

Rules:
- A limit is a provider's, or the configuration's (`policies.rate_limit`): of all callers, or of those whose requests
  alone are the evidence.
- A line when a limit begins and a line when it is over, not one for each request. A limit that ends within SHORT
  seconds is ordinary pacing, and has none.
- A limit that comes back within QUIET seconds of the line before has a line only if it lasts for LONG seconds.
- What a peer process has met with is in the peer's log.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from policies.fleet.beliefs import ALL, Belief
from policies.rate_limit.endpoint_limits import PEER_REPORT

log = logging.getLogger("firsttoken")

SHORT, LONG = 1.0, 10.0  # s
QUIET = 60.0  # s

Limits = Mapping[str, Sequence[Belief]]


class LimitLog:
    """`limits`: those in force at a time, by endpoint. `on_begin` is called at each line of a beginning."""

    def __init__(self, limits: Callable[[float], Limits]) -> None:
        self._limits = limits
        self.on_begin: Callable[[], None] = lambda: None
        self._told: dict[str, str] = {}  # limits in force that have a line, by endpoint
        self._told_at: dict[str, float] = {}  # latest line of a beginning

    def look(self, now: float) -> None:
        """Compare the limits in force with those told. Called every few seconds."""
        limits = self._limits(now)
        for endpoint, found in limits.items():
            mine = [each for each in found if each.why != PEER_REPORT]
            if mine and endpoint not in self._told:
                self._begin(endpoint, max(mine, key=lambda each: each.until), now)
        for endpoint in self._told.keys() - limits.keys():
            log.warning("endpoint %s is no longer %s", endpoint, self._told.pop(endpoint))
        self._told_at = {name: at for name, at in self._told_at.items() if name in self._told or now - at < QUIET}

    def _begin(self, endpoint: str, limit: Belief, now: float) -> None:
        left = limit.until - now
        is_quiet = now - self._told_at.get(endpoint, -QUIET) >= QUIET
        if left >= (SHORT if is_quiet else LONG):
            whom = "" if limit.callers == ALL else f" for {limit.callers} of the callers"
            log.warning("endpoint %s is %s for %.0f s%s: %s", endpoint, limit.what, left, whom, limit.why)
            self._told[endpoint] = limit.what
            self._told_at[endpoint] = now
            self.on_begin()
