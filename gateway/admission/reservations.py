"""Reservations against callers' quotas: what every place that keeps them offers, and what is kept of each.

Rules:
- `reserve` claims or refuses, and is never the reason that a request fails or waits: what cannot ask decides alone.
- `settle` is called once for each that was let in, whatever became of it.
"""

from __future__ import annotations

from datetime import UTC, datetime
from functools import lru_cache
from typing import Protocol

from policies.quota.key_limits import Claim, KeyLimits, Verdict

CONCURRENT_WAIT = 1.0  # s to wait for a place: nobody knows when one of the caller's own requests ends


class Reservation:
    """`second`: in which it counts, of the clock of whoever let it in. `lease`: its name where others see it.
    `beside`: what our own process knows of it, where another keeps it."""

    __slots__ = ("at", "beside", "claim", "lease", "limits", "name", "second", "verdict")

    def __init__(self, name: str, limits: KeyLimits, claim: Claim, verdict: Verdict, second: int, at: float) -> None:
        self.name, self.limits, self.claim, self.verdict, self.second, self.at = (
            name,
            limits,
            claim,
            verdict,
            second,
            at,
        )
        self.lease = ""
        self.beside: Reservation | None = None


class Quotas(Protocol):
    async def reserve(self, name: str, limits: KeyLimits, claim: Claim) -> Reservation:
        """`name`: of the key. One that was refused says so in its verdict, and has claimed nothing."""

    def settle(self, reservation: Reservation, tokens: int, cost: int) -> None:
        """It is over, and took so much in truth."""


def month(wall: float) -> int:
    """202610: of the calendar of UTC."""
    return _month_of(int(wall // 86_400))


@lru_cache(maxsize=4)
def _month_of(day: int) -> int:
    date = datetime.fromtimestamp(day * 86_400, UTC)
    return date.year * 100 + date.month
