"""Rate limits of one key at one endpoint: all that is believed of them.

Rules:
- Written by the attempts at the endpoint alone (`policies.fleet.in_flight_attempt`), read as `SendLimits`.
- Limits are those that the provider reports, and those of the configuration. Requests per minute of an API that reports
  none are learned from its rejections.
- A report is as of the sending of its request: what was sent later is deducted, and an older report changes nothing.
- A refusal counts by itself, of whatever size a request is (`policies.rate_limit.provider_refusal`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import inf

from policies.rate_limit.bucket import RateLimit
from policies.rate_limit.learned_limit import LearnedRateLimit
from policies.rate_limit.provider_refusal import ProviderRefusal
from policies.rate_limit.send_limits import UNLIMITED, SendLimits

RECENT = 2048  # sent requests remembered


class ReportedLimits:
    """`current`: the limits, with all that was sent since."""

    def __init__(self) -> None:
        self.current: tuple[RateLimit, ...] = ()
        self._as_of = -inf  # sending of the request with the latest report
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


class EndpointLimits:
    """`learns`: an API, whose limits are its provider's; an engine has none of these."""

    def __init__(self, requests_per_minute: float | None, tokens_per_minute: float | None, *, learns: bool) -> None:
        self.refusal = ProviderRefusal()  # of requests of all callers
        self._per_minute = requests_per_minute, tokens_per_minute
        self._configured = ConfiguredLimits(*self._per_minute)
        self._reported = ReportedLimits()
        self.learned = LearnedRateLimit() if learns else None

    def reload(self, requests_per_minute: float | None, tokens_per_minute: float | None) -> None:
        """Begin anew with another limit of the configuration, and with what was learned."""
        per_minute = requests_per_minute, tokens_per_minute
        if per_minute != self._per_minute:
            self._per_minute, self._configured = per_minute, ConfiguredLimits(*per_minute)
        self.learned = None if self.learned is None else LearnedRateLimit()

    def on_sent(self, tokens: float, now: float) -> None:
        """A prompt of `tokens` tokens was sent."""
        if self.learned is not None:
            self.learned.on_sent(now)
            self._reported.on_sent(tokens, now)
            self._configured.on_sent(tokens, now)

    def on_output(self, tokens: float, now: float) -> None:
        self._configured.on_output(tokens, now)

    def on_reported(self, limits: Sequence[RateLimit], sent_at: float) -> None:
        self._reported.on_reported(limits, sent_at)

    def exhausted_for(self, now: float, of_tokens: bool | None = None) -> float | None:
        """Seconds until an exhausted limit, by the provider's own figures, lets a request pass; None: none is."""
        return self._reported.exhausted_for(now, of_tokens)

    def on_requests_spent(self, now: float) -> None:
        """The provider refuses for a limit of requests, whoever asks: teaches the limit, unless it is reported."""
        if self.learned is not None and all(limit.counts_tokens for limit in self._reported.current):
            self.learned.on_rejected(now)

    def send_limits(self, refused_until: float) -> SendLimits:
        """The limits as of now, for all callers. `refused_until`: end of a refusal known from elsewhere."""
        learned = -inf if self.learned is None else self.learned.full_until
        blocked_until = max(refused_until, self.refusal.until, learned)
        buckets = self._reported.current + self._configured.current
        return SendLimits(blocked_until, buckets=buckets) if buckets or blocked_until > -inf else UNLIMITED
