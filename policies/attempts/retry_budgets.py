"""Retry and hedge budgets: they keep trouble from multiplying itself.

Rules:
- A retry follows an overload reply (429, 5xx) and adds load, so retries are bounded by a share of the active requests
  (Finagle's and Envoy's retry budget). Lost connections are not charged: no engine did work for them.
- A hedge is sent on suspicion alone, so hedges are bounded by a share of all requests, saved in a token bucket ("The
  Tail at Scale", Dean and Barroso 2013).
- An unused permission is given back.
"""

from __future__ import annotations


class RetryBudget:
    """Retries in flight: at most `share` of the active requests, or `minimum` where those are few."""

    def __init__(self, share: float = 0.1, minimum: int = 3) -> None:
        self._share = share
        self._minimum = minimum
        self.active = 0
        self.retrying = 0

    def began(self) -> None:
        """A request entered."""
        self.active += 1

    def ended(self) -> None:
        """A request left. Its retries are given back separately."""
        self.active -= 1

    def try_take(self) -> bool:
        """Takes a permission for one retry, if one is left."""
        if self.retrying >= max(self._minimum, int(self._share * self.active)):
            return False
        self.retrying += 1
        return True

    def give_back(self) -> None:
        """The retry has ended, or was not sent."""
        self.retrying -= 1


class HedgeBudget:
    """Token bucket: every request earns `max_extra` of a hedge, up to `burst` of them.

    The bucket starts empty, so hedges never exceed that share of the requests so far. Counted in millionths, because
    ten times 0.1 is less than one in floating point.
    """

    _HEDGE = 1_000_000

    def __init__(self, max_extra: float, burst: int = 10) -> None:
        self.share = round(max_extra * self._HEDGE)
        self._burst = burst * self._HEDGE
        self._tokens = 0

    def began(self) -> None:
        """A request of the route entered: it earns its share."""
        self._tokens = min(self._tokens + self.share, self._burst)

    def try_take(self) -> bool:
        """Takes a permission for one hedge, if one is left."""
        if self._tokens < self._HEDGE:
            return False
        self._tokens -= self._HEDGE
        return True

    def give_back(self) -> None:
        """The hedge was not sent."""
        self._tokens = min(self._tokens + self._HEDGE, self._burst)
