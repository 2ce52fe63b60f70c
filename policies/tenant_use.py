"""Engine time that each tenant has used lately, and who is above a fair share.

Start-time fair queueing (Goyal, Vin and Cheng, 1996) and VTC (Sheng et al., "Fairness in Serving Large Language
Models", OSDI 2024) serve the tenant first that has used least per weight; so does the queue for best effort. Requests
with a deadline keep the order of deadlines among tenants within their share. Rules:
- A request costs its tenant the predicted seconds of prefill, and its part of the decoding. An API costs nothing:
  nobody else waits for it.
- Use decays with TIME_CONSTANT. A tenant that was not served for ACTIVE seconds starts again at the mean of those
  within their share, with neither a debt nor a credit.
- A tenant is above its share if its use per weight exceeds that of all other active tenants together, by SLACK and
  GRACE. Alone, no tenant is.
"""

from __future__ import annotations

from math import exp

from policies.queue.queued_request import QueuedRequest
from policies.types import NEVER, Candidate

TIME_CONSTANT = 60.0  # s
SLACK = 1.1  # equal tenants differ by as much: lengths vary
DECAY_INTERVAL = 1.0  # s; in between, use grows only: the comparison needs no common factor
GRACE = 0.5  # s per weight: a few requests are no flood
ACTIVE = 10.0  # s
MOST = 60.0  # s of a request: a caller may ask for a million choices, and leave


def engine_seconds(queued: QueuedRequest, chosen: Candidate) -> float:
    """Predicted time of an engine for the request. The answers in progress share a decoding step."""
    forecast = chosen.forecast
    if not forecast.prefill:
        return 0.0
    tokens = queued.estimate.output_tokens * queued.request.choices
    return min(forecast.prefill + tokens * forecast.tpot / (chosen.load.in_flight + 1), MOST)


class TenantUse:
    """Recent use by tenant."""

    def __init__(self) -> None:
        self._used: dict[str, tuple[float, float, float]] = {}  # s of use, the weight, and the time of the last
        self._total = self._weights = 0.0
        self._decayed_at = NEVER

    def charge(self, queued: QueuedRequest, chosen: Candidate, now: float) -> None:
        """The request is dispatched."""
        if now - self._decayed_at >= DECAY_INTERVAL:
            self._decay(now)
        tenant, weight, seconds = queued.tenant, queued.weight, engine_seconds(queued, chosen)
        if tenant in self._used:
            used, before, _ = self._used[tenant]
        else:
            used, before = self._usual() * weight, 0.0
            self._total += used
        self._used[tenant] = used + seconds, weight, now
        self._total += seconds
        self._weights += weight - before

    def of(self, tenant: str) -> float:
        """Recent seconds per weight. A tenant that was not active comes first, once."""
        if tenant not in self._used:
            return 0.0
        used, weight, _ = self._used[tenant]
        return used / weight

    def is_over(self, tenant: str) -> bool:
        """The tenant is above its share."""
        if len(self._used) < 2 or tenant not in self._used:
            return False
        used, weight, _ = self._used[tenant]
        return used / weight > SLACK * (self._total - used) / (self._weights - weight) + GRACE

    def _usual(self) -> float:
        """Mean use per weight of the tenants within the share: a tenant that begins later owes nothing for a flood."""
        within = [self._used[tenant][:2] for tenant in self._used if not self.is_over(tenant)]
        return sum(used for used, _ in within) / sum(weight for _, weight in within) if within else 0.0

    def _decay(self, now: float) -> None:
        factor = exp((self._decayed_at - now) / TIME_CONSTANT)
        self._decayed_at = now
        before, self._used = self._used, {}
        self._total = self._weights = 0.0
        for tenant, (used, weight, at) in before.items():
            if now - at < ACTIVE:
                self._used[tenant] = used * factor, weight, at
                self._total += used * factor
                self._weights += weight
