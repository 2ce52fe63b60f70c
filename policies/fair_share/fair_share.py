"""Requests of a tenant above its share of the engines wait behind all in time, and begin where they harm nobody.

Within their share, requests with a deadline keep the order of deadlines among tenants. Best effort begins with the
tenant of the least recent use (`policies.tenant_use`), above its share or not.
"""

from __future__ import annotations

from policies.latency.tpot import expected_tpot_misses
from policies.queue.queue_part import IdleEngine, QueuePart
from policies.queue.queued_request import HoldRule, QueuedRequest
from policies.tenant_use import TenantUse
from policies.types import FOREVER, Candidate

SHARE = HoldRule("share", "use of the engines by other tenants: its tenant is above its share")
HARMLESS = 0.01  # expected TPOT misses because of a request of a tenant above its share


class FairShare(QueuePart):
    """Use of engines by tenant, but for work that waits for room to spare: that takes from nobody."""

    def __init__(self) -> None:
        self.use = TenantUse()

    def behind(self, queued: QueuedRequest) -> HoldRule | None:
        return SHARE if self.use.is_over(queued.tenant) else None

    def hold(self, queued: QueuedRequest, engine: IdleEngine) -> HoldRule | None:
        if not self.use.is_over(queued.tenant):
            return None
        return SHARE if expected_tpot_misses(engine.load, engine.prefill_s) > HARMLESS else None

    def precedence(self, queued: QueuedRequest) -> tuple[float, ...]:
        return (self.use.of(queued.tenant),)

    def on_dispatched(self, queued: QueuedRequest, chosen: Candidate, now: float) -> None:
        if queued.due == FOREVER:
            self.use.charge(queued, chosen, now)
