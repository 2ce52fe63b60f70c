"""How much may be tried again: budgets that keep trouble from multiplying itself.

Rules:
- A retry answers an overload reply (429, 5xx): more of them is what an overloaded fleet needs
  least, so they are bounded by a share of the requests now active (Finagle's and Envoy's retry
  budget). Dead connections are not charged: no engine did work for them.
- A hedge is sent on suspicion alone, so hedges are bounded by a share of all requests, saved up
  in a token bucket ("The Tail at Scale", Dean and Barroso 2013).
- Whatever is taken and not used is given back.
"""

from __future__ import annotations


class RetryBudget:
    """Retries in flight: at most `share` of the active requests, or `minimum` where those are few."""

    __slots__ = ("_minimum", "_share", "active", "retrying")

    def __init__(self, share: float = 0.1, minimum: int = 3) -> None:
        self._share, self._minimum = share, minimum
        self.active = 0
        self.retrying = 0

    def began(self) -> None:
        """A request entered."""
        self.active += 1

    def ended(self) -> None:
        """A request left, whatever came of it. Its retries are given back by whoever took them."""
        self.active -= 1

    def try_take(self) -> bool:
        """Whether one more request may be retried now; if so it counts until it is given back."""
        if self.retrying >= max(self._minimum, int(self._share * self.active)):
            return False
        self.retrying += 1
        return True

    def give_back(self) -> None:
        """The retry has ended, or was not sent after all."""
        self.retrying -= 1


class HedgeBudget:
    """A token bucket: every request earns `max_extra` of a hedge, up to `burst` of them.

    It starts empty, so hedges never exceed that share of the requests so far. Counted in
    millionths, because ten times 0.1 is less than one in floating point.
    """

    __slots__ = ("_burst", "_tokens", "share")

    _HEDGE = 1_000_000

    def __init__(self, max_extra: float, burst: int = 10) -> None:
        self.share = round(max_extra * self._HEDGE)
        self._burst = burst * self._HEDGE
        self._tokens = 0

    def began(self) -> None:
        """A request of the route entered: it earns its share."""
        self._tokens = min(self._tokens + self.share, self._burst)

    def try_take(self) -> bool:
        """Whether a hedge may be sent now."""
        if self._tokens < self._HEDGE:
            return False
        self._tokens -= self._HEDGE
        return True

    def give_back(self) -> None:
        """It was not sent after all."""
        self._tokens = min(self._tokens + self._HEDGE, self._burst)
