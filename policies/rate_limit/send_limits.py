"""Limits on sending to an endpoint, as a decision sees them: the seconds until a request may be sent there."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

from policies.rate_limit.bucket import RateLimit
from policies.rate_limit.learned_limit import LearnedLimit

RATE_LIMIT_WINDOW = 60.0  # s: providers count by the minute, most of them


@dataclass(frozen=True, slots=True)
class SendLimits:
    """`buckets`: as reported, as configured, and as learned. `held_requests`: in the gateway's own queue for the
    endpoint, before the request; `held_tokens`: of their prompts."""

    blocked_until: float = -inf  # a provider's refusal of whatever request, past ones too
    refused_until: float = -inf  # the same, of requests of the deciding caller alone
    buckets: tuple[RateLimit | LearnedLimit, ...] = ()
    held_requests: int = 0
    held_tokens: float = 0.0

    def wait(self, tokens: float, now: float) -> float:
        """Seconds until the provider accepts a request of this many tokens; 0: at once."""
        wait = max(self.blocked_until - now, self.refused_until - now, 0.0)
        for bucket in self.buckets:
            wait = max(wait, bucket.wait(tokens, now, self.held_requests, self.held_tokens))
        return wait

    def may_hold(self, now: float) -> bool:
        """Some request may have to wait."""
        return bool(self.buckets) or self.blocked_until > now or self.refused_until > now

    def refused_lately(self, now: float) -> bool:
        """The provider refuses, or did within RATE_LIMIT_WINDOW seconds."""
        return now - self.blocked_until <= RATE_LIMIT_WINDOW

    def behind(self, requests: int, tokens: float) -> SendLimits:
        """Limits of a request sent after `requests` others, with prompts of `tokens` tokens together."""
        return replace(self, held_requests=requests, held_tokens=tokens) if requests and self.buckets else self


UNLIMITED = SendLimits()
