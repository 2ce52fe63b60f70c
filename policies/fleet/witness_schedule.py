"""Schedule of probes: the gateway asks an endpoint itself, as a witness to failures that one caller alone has met.

Rules:
- A probe is wanted once the evidence of a single caller would have ejected the endpoint. The first is sent at once.
- One at a time for each endpoint, at least FIRST seconds apart. While probes find the endpoint well, the interval
  doubles up to LONGEST: a caller who repeats a request that fails costs a paid API about 290 probes a day.
- A probe that fails confirms the evidence; the endpoint's breaker decides from then on. FORGOTTEN seconds after a probe
  the interval is the first again.
"""

from __future__ import annotations

from dataclasses import dataclass

from policies.types import NEVER

FIRST, LONGEST = 10.0, 300.0  # s between two probes
FORGOTTEN = 3600.0  # s


@dataclass(slots=True)
class _Probes:
    """Of one endpoint."""

    began_at: float = NEVER
    interval: float = 0.0
    running: bool = False


class WitnessSchedule:
    """Probes by endpoint."""

    def __init__(self) -> None:
        self._probes: dict[str, _Probes] = {}

    def __len__(self) -> int:
        return len(self._probes)

    def begin(self, endpoint: str, now: float) -> bool:
        """Begins a probe; False: one is in progress, or it is too early for another."""
        probes = self._probes.get(endpoint)
        if probes is not None and (probes.running or now - probes.began_at < probes.interval):
            return False
        self._forget(now)
        probes = self._probes.setdefault(endpoint, _Probes())
        probes.began_at, probes.running = now, True
        return True

    def on_ended(self, endpoint: str, well: bool) -> None:
        """`well`: the endpoint has answered the probe."""
        if (probes := self._probes.get(endpoint)) is not None:
            probes.running = False
            probes.interval = min(max(2 * probes.interval, FIRST), LONGEST) if well else FIRST

    def _forget(self, now: float) -> None:
        for endpoint in [name for name, probes in self._probes.items() if now - probes.began_at > FORGOTTEN]:
            del self._probes[endpoint]
