"""Limits on sending to an endpoint, as a decision sees them: the seconds until a request may be sent there.

`RateLimit` is a provider's limit at a moment, as reported or configured. Rules:
- A limit is a token bucket that fills at a constant rate. The reported reset is the time until it is full: OpenAI
  (guide "Rate limits", headers), Anthropic (API reference "Rate limits", headers) and Groq say so, read in 2026-11.
  Where no limit is reported, the rate is unknown, and what remains is all there is until the reset.
- A prompt larger than the limit needs the whole limit.
- A bucket owes at most as much as it holds when full: one request takes the whole limit at most, as many together twice
  that. A prompt that no provider would take, or a wrong count of tokens, closes an endpoint for no longer.
- A report is believed for BELIEVED seconds: nothing else would end a wrong one, as no request would ask again.

`LearnedLimit` is the limit of an API that reports none, learned from its refusals. Rules:
- The limit is taken for a token bucket: `rate` a second, and bursts of `size`. A meter counts what is sent and drains
  at that rate; a request fits while the meter is below the size. Whatever is on its way counts as taken.
- Each refusal corrects one of the two. Where the meter was empty in between, a burst was refused: its size is what the
  meter shows. Otherwise the API was busy: its rate is what it took since the refusal before, by the time between the
  moments at which it had room again. A refusal at an empty meter is of the rate too, whose half is its least: the API
  may have been idle.
- An API that took much more than the rate has another limit by now: twice the rate is a guess like the first.
- The first rate is that of the second before the refusal: too high, which the next refusal corrects. One too low would
  only be found by trying.
- More is tried as time goes by without a refusal: one request more after `patience`, twice as many after each sixth of
  it more. A limit that stands costs a refusal in `patience`, one that was raised is followed within minutes, and one
  that was none is soon as good as forgotten, but for what is known once it refuses again.
- Refusals of requests sent before the latest refusal came are the same event.
"""

from __future__ import annotations

from collections.abc import Iterable
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


FIRST_PATIENCE, PATIENCE = 15.0, 60.0  # s; doubled by each refusal: a rate that is a guess is tried sooner
STEPS = 6  # doublings of what is tried, in `patience`: 64 requests more after twice as long, 1,000 after 2.7 times
IDLE = 0.1  # share of the time with an empty meter, from which the API was not busy: the error of a rate bears as much
OUTGROWN = 1.25  # times the rate, from which the limit was raised: by now it is higher than what was taken on average
BURST = 1.0  # s before the first refusal, whose rate is the first guess
LONGEST = 60.0  # s until a request is tried, whatever was learned: as long as a provider's own time is believed
ENOUGH = 30  # doublings: a billion requests, and no more than a float bears


@dataclass(frozen=True, slots=True)
class LearnedLimit:
    """A limit of requests, or of tokens, at the time `at`."""

    counts_tokens: bool
    rate: float  # per second
    size: float  # of a burst
    meter: float  # taken lately, at `at`
    at: float
    unit: float  # amount of the refused request
    refused_at: float  # the latest refusal came
    ready_at: float  # when the API had room for the refused request
    taken: float = 0.0  # since then
    idle: float = 0.0  # s since then, with an empty meter
    patience: float = FIRST_PATIENCE
    of_burst: bool = True  # the latest refusal: it corrected the size

    @classmethod
    def of_first_refusal(
        cls,
        counts_tokens: bool,
        sent: Iterable[tuple[float, float]],
        amount: float,
        now: float,
        retry_after: float | None,
    ) -> LearnedLimit:
        """`sent`: time and amount of the requests taken before, oldest first; `amount`: of the refused one."""
        sent = list(sent)
        rate = sum((each for at, each in sent if now - at < BURST), amount) / BURST
        meter, before = 0.0, -inf
        for at, each in sent:
            meter, before = max(meter - rate * (at - before), 0.0) + each, at
        size = max(meter - rate * (now - before), amount)
        found = cls(counts_tokens, rate, size, 0.0, now, amount, now, now)
        return found._after_refusal(amount, now, found._ready_at(amount, now, retry_after))

    def after(self, tokens: float, now: float, requests: int = 1) -> LearnedLimit:
        """The limit after requests of this many tokens together."""
        taken, left = tokens if self.counts_tokens else float(requests), self._left(now)
        idle = self.idle + min(max(-left / self.rate, 0.0), max(now - self.ready_at, 0.0))
        meter = max(max(left, 0.0) + min(taken, self.size), 0.0)
        return replace(self, meter=meter, at=now, taken=self.taken + taken, idle=idle)

    @property
    def words(self) -> str:
        """For the operator."""
        what = "tokens" if self.counts_tokens else "requests"
        return f"{self.rate:.3g} {what} a second and bursts of {self.size:.3g}"

    def _left(self, now: float) -> float:
        """Of the meter; below 0 since it was empty. Until the API has room, no more than one request of `unit`
        fits: others of that size try at the rate, as the time may be of the refused caller alone."""
        ready_at = min(max(self.ready_at, self.at), now)
        left = self.meter - self.rate * (ready_at - self.at)
        return (max(left, self.size - self.unit) if ready_at > self.at else left) - self.rate * (now - ready_at)

    def wait(self, tokens: float, now: float, requests_ahead: int = 0, tokens_ahead: float = 0.0) -> float:
        """Seconds until a request of this many tokens is accepted, behind others that are not sent yet."""
        own, ahead = (tokens, tokens_ahead) if self.counts_tokens else (1.0, float(requests_ahead))
        own, meter = min(own, self.size), max(self._left(now), 0.0)
        more: float = 2.0 ** min(STEPS * ((now - self.ready_at) / self.patience - 1), ENOUGH)
        return min(max((meter + ahead + own - self.size - own * more) / self.rate, 0.0), LONGEST)

    def refused(self, tokens: float, sent_at: float, now: float, retry_after: float | None) -> LearnedLimit:
        """The limit after the refusal of a request that was counted as taken. `retry_after`: s, by the provider."""
        amount = max(tokens, 1.0) if self.counts_tokens else 1.0
        ready_at = self._ready_at(amount, now, retry_after)
        if sent_at <= self.refused_at:
            size = max(self.size - amount, amount) if self.of_burst else self.size
            found = replace(self, size=size)
            return found._after_refusal(amount, self.refused_at, max(self.ready_at, ready_at))
        found = replace(self.after(-amount, now, requests=-1), patience=min(2 * self.patience, PATIENCE))
        seconds = max(ready_at - self.ready_at, now - self.refused_at)
        return found._corrected(amount, seconds)._after_refusal(amount, now, ready_at)

    def _ready_at(self, amount: float, now: float, retry_after: float | None) -> float:
        return now + min(amount / self.rate if retry_after is None else retry_after, LONGEST)

    def _corrected(self, amount: float, seconds: float) -> LearnedLimit:
        """`seconds`: between two refusals."""
        is_busy = self.idle < IDLE * seconds
        if not is_busy and self.meter >= amount:
            return replace(self, size=self.meter, of_burst=True)
        rate = self.taken / (seconds - self.idle if is_busy else seconds)
        if rate > OUTGROWN * self.rate:
            return replace(self, rate=2 * self.rate, patience=FIRST_PATIENCE, of_burst=False)
        return replace(self, rate=max(rate, self.rate / 2, amount / LONGEST), of_burst=False)

    def _after_refusal(self, amount: float, now: float, ready_at: float) -> LearnedLimit:
        """The API has room for the next request at `ready_at`; half a request later it is sent, as networks jitter."""
        meter = max(min(self.size - amount / 2 + self.rate * (ready_at - now), self.size + amount), 0.0)
        found = replace(self, meter=meter, at=now, unit=amount, refused_at=now, ready_at=ready_at)
        return replace(found, taken=0.0, idle=0.0)


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
