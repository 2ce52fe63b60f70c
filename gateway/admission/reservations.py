"""The interface of every quota store.

Rules:
- `reserve` claims or refuses, and never fails or delays a request: an unreachable store decides alone.
- `settle` is called once for each admitted reservation, for any end of its request.
"""

from __future__ import annotations

from datetime import UTC, datetime
from functools import lru_cache
from typing import Protocol

from policies.quota.key_limits import Claim, KeyLimits, Reservation

CONCURRENT_WAIT = 1.0  # s to wait for a free place: the end of the caller's own requests is unknown


class Quotas(Protocol):
    async def reserve(self, name: str, limits: KeyLimits, claim: Claim) -> Reservation:
        """`name`: of the key. A refused reservation has a `verdict.limit`, and has claimed nothing."""

    def settle(self, reservation: Reservation, tokens: int, cost: int) -> None:
        """Ends the reservation of a finished request. `tokens` and `cost` (billionths of a USD): actual amounts."""


def month(wall: float) -> int:
    """202610: calendar month of a Unix time, in UTC."""
    return _month_of(int(wall // 86_400))


@lru_cache(maxsize=4)
def _month_of(day: int) -> int:
    date = datetime.fromtimestamp(day * 86_400, UTC)
    return date.year * 100 + date.month
