"""A provider's rate limit at a moment: the time until a request would be accepted.

Rules:
- A limit is a token bucket that fills at a constant rate. The reported reset is the time until it is full: OpenAI
  (guide "Rate limits", headers), Anthropic (API reference "Rate limits", headers) and Groq say so, read in 2026-11.
  Where no limit is reported, the rate is unknown, and what remains is all there is until the reset.
- A prompt larger than the limit needs the whole limit.
- A bucket owes at most as much as it holds when full: one request takes the whole limit at most, as many together twice
  that. A prompt that no provider would take, or a wrong count of tokens, closes an endpoint for no longer.
- A report is believed for BELIEVED seconds: nothing else would end a wrong one, as no request would ask again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

BELIEVED = 60.0  # s
SHORTEST = 1e-3  # s until a limit is full; a shorter time is none


@dataclass(frozen=True, slots=True)
class RateLimit:
    """A limit of requests, or of tokens, at the time `at`."""

    counts_tokens: bool
    remaining: float
    limit: float  # inf: unknown
    rate: float  # per second; 0: unknown
    full_at: float
    at: float
    until: float = inf  # believed

    @classmethod
    def reported(
        cls, counts_tokens: bool, remaining: float, limit: float | None, reset: float, now: float
    ) -> RateLimit:
        """`reset`: seconds until full."""
        known = limit is not None and limit > remaining and reset >= SHORTEST
        rate = (limit - remaining) / reset if limit is not None and known else 0.0
        return cls(counts_tokens, remaining, inf if limit is None else limit, rate, now + reset, now, now + BELIEVED)

    @classmethod
    def configured(cls, counts_tokens: bool, per_minute: float) -> RateLimit:
        """A full bucket of this size, which refills in a minute. Believed for ever."""
        return cls(counts_tokens, per_minute, per_minute, per_minute / 60.0, -inf, -inf)

    def after(self, tokens: float, now: float, requests: int = 1) -> RateLimit:
        """The limit after requests of this many tokens together."""
        taken = tokens if self.counts_tokens else float(requests)
        if not self.rate:
            return replace(self, remaining=self.remaining - taken)
        left = min(self.remaining + self.rate * (now - self.at), self.limit) - min(taken, self.limit)
        left = max(left, -self.limit)
        return replace(self, remaining=left, full_at=now + (self.limit - left) / self.rate, at=now)

    def wait(self, tokens: float, now: float, requests_ahead: int = 0, tokens_ahead: float = 0.0) -> float:
        """Seconds until a request of this many tokens is accepted, behind others that are not sent yet."""
        own, ahead = (tokens, tokens_ahead) if self.counts_tokens else (1.0, float(requests_ahead))
        missing = ahead + min(own, self.limit) - self.remaining
        if self.rate:
            missing -= min(self.rate * (now - self.at), self.limit - self.remaining)
            wait = missing / self.rate
        else:
            wait = self.full_at - now if missing > 0 else 0.0
        return max(min(wait, self.until - now), 0.0)
