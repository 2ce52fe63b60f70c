"""Use of external APIs by a route within the last hour, against its limit (`limits.external`).

Rules:
- Requests count from their arrival; every attempt at an API counts, a retry or a hedge too.
- Costs are expected ones until the provider has reported the tokens.
- The limit holds for each process by itself, and for choices: an attempt after a failure may exceed it, and is counted.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Protocol

from policies.route_hooks import Meter

WINDOW = 60  # minutes; a minute counts as a whole until its end is this old


@dataclass(slots=True)
class MinuteOfUse:
    minute: int
    requests: int = 0
    external: int = 0  # attempts
    usd: float = 0.0


class ExternalLimit(Protocol):
    """As in the configuration of a route. None: no limit."""

    @property
    def share(self) -> float | None: ...

    @property
    def usd_per_hour(self) -> float | None: ...


class ExternalUse(Meter):
    """Use of APIs by one route, by minute."""

    def __init__(self) -> None:
        self._minutes: deque[MinuteOfUse] = deque()

    def on_arrived(self, now: float) -> None:
        self._at(now).requests += 1

    def on_sent(self, usd: float, now: float) -> None:
        """An attempt at an API, of an expected cost."""
        current = self._at(now)
        current.external += 1
        current.usd += usd

    def on_cost(self, more_usd: float, now: float) -> None:
        """Cost of an attempt beyond the expectation."""
        self._at(now).usd += more_usd

    def allows(self, limit: ExternalLimit, usd: float, now: float) -> bool:
        """One more attempt of this cost keeps within the limit."""
        self._at(now)
        if limit.usd_per_hour is not None and sum(each.usd for each in self._minutes) + usd > limit.usd_per_hour:
            return False
        requests, external = (sum(getattr(each, name) for each in self._minutes) for name in ("requests", "external"))
        return limit.share is None or external + 1 <= limit.share * requests

    def _at(self, now: float) -> MinuteOfUse:
        """The present minute; minutes older than the window are dropped."""
        minute = int(now // 60)
        while self._minutes and self._minutes[0].minute < minute - WINDOW:
            self._minutes.popleft()
        if not self._minutes or self._minutes[-1].minute < minute:
            self._minutes.append(MinuteOfUse(minute))
        return self._minutes[-1]
