"""Reservations against callers' quotas: the interface of every quota store, and the value that each keeps.

Rules:
- `reserve` claims or refuses. It never fails or delays a request: a store that cannot be reached decides alone.
- `settle` is called once for each reservation that was admitted, whatever became of its request.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from typing import Protocol

from policies.quota.key_limits import Claim, KeyLimits, Verdict

CONCURRENT_WAIT = 1.0  # s to wait for a free place: when one of the caller's own requests ends is unknown


@dataclass(frozen=True, slots=True)
class Reservation:
    """`second`: in which it counts, by the clock of the store that admitted it; 0: not in Redis yet. `at`: monotonic s.
    `lease`: its id in Redis. `local`: its copy in this process, where Redis keeps it."""

    name: str
    limits: KeyLimits
    claim: Claim
    verdict: Verdict
    second: int
    at: float
    lease: str = ""
    local: Reservation | None = None


class Quotas(Protocol):
    async def reserve(self, name: str, limits: KeyLimits, claim: Claim) -> Reservation:
        """`name`: of the key. A refused reservation has a `verdict.limit`, and has claimed nothing."""

    def settle(self, reservation: Reservation, tokens: int, cost: int) -> None:
        """The request is over; `tokens` and `cost` (billionths of a USD) are what it took."""


def month(wall: float) -> int:
    """202610: calendar month of a Unix time, in UTC."""
    return _month_of(int(wall // 86_400))


@lru_cache(maxsize=4)
def _month_of(day: int) -> int:
    date = datetime.fromtimestamp(day * 86_400, UTC)
    return date.year * 100 + date.month
