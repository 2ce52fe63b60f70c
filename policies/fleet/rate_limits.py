"""Rate limits of one key at one endpoint: reported by the provider, and set by the configuration.

A report is as of the sending of its request: what was sent later is deducted, and an older report changes nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from policies.rate_limit import RateLimit
from policies.types import NEVER

RECENT = 2048  # sent requests remembered


class ReportedLimits:
    """`current`: the limits, with all that was sent since."""

    def __init__(self) -> None:
        self.current: tuple[RateLimit, ...] = ()
        self._as_of = NEVER  # sending of the request with the latest report
        self._sent: deque[tuple[float, float]] = deque()  # time and tokens of the requests since
        self._tokens = 0.0  # of these

    def on_sent(self, tokens: float, now: float) -> None:
        self._sent.append((now, tokens))
        self._tokens += tokens
        if len(self._sent) > RECENT:
            self._tokens -= self._sent.popleft()[1]
        if self.current:
            self.current = tuple([limit.after(tokens, now) for limit in self.current])

    def on_reported(self, limits: Sequence[RateLimit], sent_at: float) -> None:
        """A reply to the request sent at `sent_at` has reported these limits."""
        if sent_at < self._as_of:
            return
        self._as_of = sent_at
        while self._sent and self._sent[0][0] <= sent_at:
            self._tokens -= self._sent.popleft()[1]
        later = len(self._sent)
        self.current = tuple([limit.after(self._tokens, limit.at, later) if later else limit for limit in limits])

    def exhausted_for(self, now: float, of_tokens: bool | None = None) -> float | None:
        """Seconds until an exhausted limit lets a request pass; None: none is exhausted. `of_tokens`: limits of tokens
        alone, or of requests alone."""
        asked = [limit for limit in self.current if of_tokens in (None, limit.counts_tokens)]
        return max((wait for limit in asked if (wait := limit.wait(1.0, now)) > 0), default=None)


class ConfiguredLimits:
    """`current`: limits per minute of the configuration, with all that this process has sent."""

    def __init__(self, requests_per_minute: float | None, tokens_per_minute: float | None) -> None:
        of_tokens = (False, requests_per_minute), (True, tokens_per_minute)
        self.current = tuple([RateLimit.configured(kind, limit) for kind, limit in of_tokens if limit is not None])

    def on_sent(self, prompt_tokens: float, now: float) -> None:
        if self.current:
            self.current = tuple([limit.after(prompt_tokens, now) for limit in self.current])

    def on_output(self, tokens: float, now: float) -> None:
        """An answer has ended: its tokens count too, and can be known no sooner."""
        if self.current:
            self.current = tuple([limit.after(tokens, now, requests=0) for limit in self.current])
