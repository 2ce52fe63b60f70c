"""Budgets of further attempts, shared by all requests.

- A retry after an overload reply (429, 5xx) adds load to a pool, so retries are bounded by a share of the requests. A
  lost connection is not charged: no engine did work for it.
- A hedge is sent on suspicion alone, so hedges are bounded by a share of all requests, saved in a token bucket ("The
  Tail at Scale", Dean and Barroso 2013).
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class RetryBudget:
    """Token bucket: every request earns `earned` of a retry, up to `burst`, the size at the start. An empty bucket
    still allows as many retries in flight as `share` of the active requests. So a steady fault adds less than a tenth
    to the load (Finagle's RetryBudget), and a sudden one under load is not left without retries (Envoy's).
    """

    earned: float = 0.09
    burst: float = 10.0
    share: float = 0.1
    active: int = 0  # requests
    retrying: int = 0
    tokens: float = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = self.burst

    def began(self) -> None:
        """A request entered."""
        self.active += 1
        self.tokens = min(self.tokens + self.earned, self.burst)

    def ended(self) -> None:
        """A request left. Retries are given back separately."""
        self.active -= 1

    def try_take(self) -> bool:
        """Takes a permission for a retry, if any is left."""
        if self.tokens >= 1:
            self.tokens -= 1
        elif self.retrying >= int(self.share * self.active):
            return False
        self.retrying += 1
        return True

    def give_back(self) -> None:
        """The retry has ended."""
        self.retrying -= 1


class HedgeBudget:
    """Token bucket: every request earns `max_extra` of a hedge, up to `burst` hedges.

    The bucket starts empty, so hedges never exceed the share of the requests so far. Counted in millionths, because
    ten times 0.1 is less than one in floating point.
    """

    _HEDGE = 1_000_000

    def __init__(self, max_extra: float, burst: int = 10) -> None:
        self.share = round(max_extra * self._HEDGE)
        self._burst = burst * self._HEDGE
        self._tokens = 0

    def began(self) -> None:
        """A request of the route entered, and earns a share."""
        self._tokens = min(self._tokens + self.share, self._burst)

    def try_take(self) -> bool:
        """Takes a permission for a hedge, if any is left."""
        if self._tokens < self._HEDGE:
            return False
        self._tokens -= self._HEDGE
        return True


class RequestBudgets:
    """Shares of one request in the retry budget and the hedge budget, from its start to its end."""

    def __init__(self, retries: RetryBudget, hedges: HedgeBudget) -> None:
        self.denied = False  # the latest retry was wanted, and not allowed
        self._retries, self._hedges = retries, hedges
        self._counted = False  # among the requests of the retry budget
        self._retrying = 0  # permissions not given back yet

    def begin(self) -> None:
        self._counted = True
        self._retries.began()
        if self._hedges.share:
            self._hedges.began()

    def take_retry(self) -> bool:
        """Take a permission of the retry budget, if any is left."""
        taken = self._retries.try_take()
        self._retrying += taken
        self.denied = not taken
        return taken

    def take_hedge(self) -> bool:
        """Take a permission of the hedge budget, if any is left."""
        return self._hedges.try_take()

    def end(self) -> None:
        """Return what is held. No effect before `begin`, nor twice."""
        if self._counted:
            self._retries.ended()
            self._counted = False
        while self._retrying:
            self._retries.give_back()
            self._retrying -= 1
