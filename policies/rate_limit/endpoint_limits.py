"""Beliefs about the rate limits of one key at one endpoint.

Rules:
- Read from replies by `backends.rate_limit_headers`; written by attempts at the endpoint alone
  (`policies.fleet.in_flight_attempt`); asked by decisions as `policies.rate_limit.send_limits`.
- Limits are those that the provider reports, those of the configuration, and of an API that reports none those learned
  from its refusals (`policies.rate_limit.send_limits`), which are of all callers: they share the key.
- A refusal that its own request explains teaches nothing: no other was taken within a minute, or the prompt is more
  than OUTSIZED times as long as any of these, unless the provider speaks of requests.
- A report is as of the sending of its request: what was sent later is deducted, and an older report changes nothing.
- A refusal is no failure: the provider says until when to wait. It counts for requests of whatever size.

Saved limits are values that survive a restart. Rules:
- A value is checked when it is made, by decoding too: ValueError for one that no provider reports. A broken or hostile
  file shuts an endpoint for no longer than a provider can.
- Times are seconds from the save: the clock of a process ends with the process.
- A refusal that one caller alone has met with is saved with its caller's name, and is that caller's after a restart.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite

from policies.rate_limit.send_limits import BELIEVED, RATE_LIMIT_WINDOW, UNLIMITED, LearnedLimit, RateLimit, SendLimits

LONGEST = 30 * 86_400.0  # s until a limit is full
MOST = 1e15  # of a limit
MAX_TEXT = 1024  # characters
MAX_BUCKETS, MAX_CALLERS = 16, 64


def _check(name: str, value: float, least: float, most: float) -> None:
    if not (isfinite(value) and least <= value <= most):
        raise ValueError(f"{name} outside of {least:g} to {most:g}")


@dataclass(frozen=True, slots=True)
class SavedRefusal:
    """A provider refuses requests for `left` s more."""

    left: float
    why: str = ""

    def __post_init__(self) -> None:
        _check("time of a refusal", self.left, 0.0, BELIEVED)
        if len(self.why) > MAX_TEXT:
            raise ValueError("reason of a refusal that is too long")


@dataclass(frozen=True, slots=True)
class SavedBucket:
    """`limit` None: unknown; `believed` None: for ever, as a limit of the configuration is, or one that was learned."""

    counts_tokens: bool
    remaining: float
    limit: float | None
    rate: float
    full_in: float
    believed: float | None

    def __post_init__(self) -> None:
        _check("limit", MOST if self.limit is None else self.limit, 0.0, MOST)
        _check("rest of a limit", self.remaining, -MOST, MOST)
        _check("rate of a limit", self.rate, 0.0, MOST)
        _check("time until a limit is full", self.full_in, 0.0, LONGEST)
        _check("time of a report", BELIEVED if self.believed is None else self.believed, 0.0, BELIEVED)

    @classmethod
    def of_learned(cls, found: LearnedLimit, now: float) -> SavedBucket:
        """With the time until the API has room in place of the time until it is full."""
        ready_in = max(found.ready_at - now, 0.0)
        return cls(found.counts_tokens, found.size - found.meter, found.size, found.rate, ready_in, None)

    def learned(self, age: float, now: float) -> LearnedLimit | None:
        """As of a save `age` seconds ago; None for one that was none."""
        if not self.limit or not self.rate:
            return None
        at, meter = now - age, min(max(self.limit - self.remaining, 0.0), 2 * self.limit)
        return LearnedLimit(self.counts_tokens, self.rate, self.limit, meter, at, 1.0, at, at + self.full_in)

    @classmethod
    def of(cls, bucket: RateLimit, now: float) -> SavedBucket:
        refilled = bucket.rate * (now - bucket.at) if isfinite(bucket.at) else inf
        remaining = min(bucket.remaining + refilled, bucket.limit) if bucket.rate else bucket.remaining
        return cls(
            bucket.counts_tokens,
            remaining,
            bucket.limit if isfinite(bucket.limit) else None,
            bucket.rate,
            min(max(bucket.full_at - now, 0.0), LONGEST),
            max(bucket.until - now, 0.0) if isfinite(bucket.until) else None,
        )

    def bucket(self, age: float, now: float) -> RateLimit:
        """As of a save `age` seconds ago."""
        at = now - age
        return RateLimit(
            self.counts_tokens,
            self.remaining,
            inf if self.limit is None else self.limit,
            self.rate,
            at + self.full_in,
            at,
            inf if self.believed is None else at + self.believed,
        )


@dataclass(frozen=True, slots=True)
class SavedLimits:
    """`callers`: refusals that one caller alone has met with, by the caller."""

    refusal: SavedRefusal | None = None
    callers: dict[str, SavedRefusal] = field(default_factory=dict)
    reported: list[SavedBucket] = field(default_factory=list)
    configured: list[SavedBucket] = field(default_factory=list)
    learned: list[SavedBucket] = field(default_factory=list)

    def __post_init__(self) -> None:
        if len(self.callers) > MAX_CALLERS or any(count > MAX_BUCKETS for count in self._counts):
            raise ValueError("more limits than an endpoint has")
        if any(len(caller) > MAX_TEXT for caller in self.callers):
            raise ValueError("name of a caller that is too long")
        if any(bucket.believed is None for bucket in self.reported):
            raise ValueError("report that is believed for ever")

    @property
    def _counts(self) -> tuple[int, ...]:
        return len(self.reported), len(self.configured), len(self.learned)


RECENT = 2048  # sent requests remembered
OUTSIZED = 2.0  # times the longest other prompt: an estimate of tokens is never as far off
FORGOTTEN = 600.0  # s without a refusal, after which a limit is learned anew: what is tried has long outgrown it
MIN_RETRY_AFTER, DEFAULT_RETRY_AFTER, MAX_RETRY_AFTER = 0.1, 1.0, 60.0  # s; default: where the provider names none
LIMITED, CONFIGURED = "limited by its provider", "limited by the configuration"  # beliefs
PEER_REPORT = "a peer process reports it"

Buckets = tuple[RateLimit, ...]
SendBuckets = tuple[RateLimit | LearnedLimit, ...]
Reason = tuple[str, str, float]  # belief, reason, end


class ProviderRefusal:
    """A provider refuses requests for a while: 429, or no capacity. `until`: end of the latest refusal, past ones too;
    `why`: its reason, for the operator."""

    def __init__(self) -> None:
        self.until = -inf
        self.why = ""

    def on_refused(self, now: float, retry_after: float | None, why: str = "") -> None:
        """`retry_after`: seconds, by the provider; None: not named."""
        self.why = why
        wait = DEFAULT_RETRY_AFTER if retry_after is None else max(retry_after, MIN_RETRY_AFTER)
        self.until = max(self.until, now + min(wait, MAX_RETRY_AFTER))

    def restore(self, saved: SavedRefusal, age: float, now: float) -> None:
        """Brings back what was saved `age` seconds ago, unless more is known by now."""
        if (until := now + saved.left - age) > max(self.until, now):
            self.until, self.why = until, saved.why or "known from before the restart"

    def reasons(self, now: float) -> Iterator[Reason]:
        if self.until > now:
            yield LIMITED, self.why, self.until


class EndpointLimits:
    """`learns`: limits of an API are reported, refused or learned; an engine has none."""

    def __init__(self, requests_per_minute: float | None, tokens_per_minute: float | None, *, learns: bool) -> None:
        self.refusal = ProviderRefusal()  # of requests of all callers
        self._reported: Buckets = ()  # with all that was sent since
        self._as_of = -inf  # sending of the request with the latest report
        self._sent: deque[tuple[float, float]] = (
            deque()
        )  # time and tokens of requests not refused, since the latest report
        self._tokens = 0.0  # of these
        self._learns = learns
        self._learned: tuple[LearnedLimit, ...] = ()  # of requests, of tokens, or both
        self._per_minute = requests_per_minute, tokens_per_minute
        self._configured = _per_minute(*self._per_minute)  # with all that this process has sent

    def reload(self, requests_per_minute: float | None, tokens_per_minute: float | None, *, learns: bool) -> None:
        """Begin anew with other limits of the configuration. No configuration lifts a limit of the provider."""
        per_minute = requests_per_minute, tokens_per_minute
        if per_minute != self._per_minute:
            self._per_minute, self._configured = per_minute, _per_minute(*per_minute)
        if learns != self._learns:
            self._learns, self._learned = learns, ()

    def on_other_account(self) -> None:
        """Another key: the limits that are known are of another account."""
        self.refusal.until = -inf
        self._reported, self._as_of = (), -inf
        self._sent.clear()
        self._tokens = 0.0
        self._learned = ()
        self._configured = _per_minute(*self._per_minute)

    def is_over(self, now: float) -> bool:
        """No limit is left that a request might meet with."""
        learned = all(now - each.ready_at > FORGOTTEN for each in self._learned)
        reported = all(min(bucket.full_at, bucket.until) <= now for bucket in self._reported)
        configured = all(bucket.full_at <= now for bucket in self._configured)
        return learned and reported and configured and self.refusal.until <= now

    def on_sent(self, tokens: float, now: float) -> None:
        """A prompt of `tokens` tokens was sent."""
        if not self._learns:
            return
        self._sent.append((now, tokens))
        self._tokens += tokens
        if len(self._sent) > RECENT:
            self._tokens -= self._sent.popleft()[1]
        self._reported, self._configured = _after(self._reported, tokens, now), _after(self._configured, tokens, now)
        if self._learned:
            recent = [each for each in self._learned if now - each.ready_at <= FORGOTTEN]
            self._learned = tuple([each.after(tokens, now) for each in recent])

    def on_output(self, tokens: float, now: float) -> None:
        """An answer has ended: its tokens count too, and can be known no sooner."""
        self._configured = _after(self._configured, tokens, now, requests=0)
        if self._learned:
            self._learned = tuple([each.after(tokens, now, requests=0) for each in self._learned])

    def on_reported(self, limits: Sequence[RateLimit], sent_at: float) -> None:
        """A reply to the request sent at `sent_at` has reported these limits."""
        if sent_at < self._as_of:
            return
        self._as_of = sent_at
        while self._sent and self._sent[0][0] <= sent_at:
            self._tokens -= self._sent.popleft()[1]
        later = len(self._sent)
        self._reported = tuple([limit.after(self._tokens, limit.at, later) if later else limit for limit in limits])
        kinds = {limit.counts_tokens for limit in limits}
        self._learned = tuple([each for each in self._learned if each.counts_tokens not in kinds])

    def exhausted_for(self, now: float, of_tokens: bool | None = None) -> float | None:
        """Seconds until an exhausted limit, by the provider's own figures, lets a request pass; None: none is.
        `of_tokens`: limits of tokens alone, or of requests alone."""
        asked = [limit for limit in self._reported if of_tokens in (None, limit.counts_tokens)]
        return max((wait for limit in asked if (wait := limit.wait(1.0, now)) > 0), default=None)

    def on_refused(
        self, counts_tokens: bool | None, tokens: float, sent_at: float, now: float, retry_after: float | None
    ) -> None:
        """The provider refuses a prompt of `tokens` tokens for a rate limit. `counts_tokens` None: it does not say of
        what; `retry_after`: s, None where it names none. Teaches the limit, unless it is reported."""
        of_tokens = bool(counts_tokens)
        self.on_not_taken(tokens, sent_at)
        others = [(at, each) for at, each in self._sent if now - at <= RATE_LIMIT_WINDOW]
        longest = max((each for _, each in others), default=0.0)
        is_own = not others or (counts_tokens is not False and tokens > OUTSIZED * longest)
        if not self._learns or is_own or any(limit.counts_tokens == of_tokens for limit in self._reported):
            return
        taken = others if of_tokens else [(at, 1.0) for at, _ in others]
        amount = max(tokens, 1.0) if of_tokens else 1.0
        known = {each.counts_tokens: each for each in self._learned}
        known[of_tokens] = (
            known[of_tokens].refused(tokens, sent_at, now, retry_after)
            if of_tokens in known
            else LearnedLimit.of_first_refusal(of_tokens, taken, amount, now, retry_after)
        )
        self._learned = (*known.values(),)

    def on_not_taken(self, tokens: float, sent_at: float) -> None:
        """The provider has not served the prompt sent then: it shows no rate that was taken."""
        if (sent := (sent_at, tokens)) in self._sent:
            self._sent.remove(sent)
            self._tokens -= tokens

    def saved(self, blocked_until: float, callers: Mapping[str, ProviderRefusal], now: float) -> SavedLimits | None:
        """The limits that survive a restart; None: none is in force. `blocked_until`: for all callers, as any process
        knows; `callers`: what single callers have met with."""
        why = self.refusal.why if self.refusal.until >= blocked_until else ""
        reported = [SavedBucket.of(each, now) for each in self._reported if min(each.full_at, each.until) > now]
        configured = [SavedBucket.of(each, now) for each in self._configured if each.full_at > now]
        found = SavedLimits(
            _saved(blocked_until, why, now),
            {name: saved for name, one in callers.items() if (saved := _saved(one.until, one.why, now)) is not None},
            reported[:MAX_BUCKETS],
            configured,
            [SavedBucket.of_learned(each, now) for each in self._learned if now - each.ready_at <= FORGOTTEN],
        )
        return None if found == SavedLimits() else found

    def restore(self, saved: SavedLimits, age: float, now: float) -> None:
        """Restore limits saved `age` seconds ago where nothing newer is known. Configured limits that the configuration
        has no more are dropped."""
        if saved.refusal is not None:
            self.refusal.restore(saved.refusal, age, now)
        if self._as_of == -inf:
            self._reported = tuple([each.bucket(age, now) for each in saved.reported])
        if self._learns and not self._learned:
            self._learned = tuple(filter(None, [each.learned(age, now) for each in saved.learned]))
        known = {(each.counts_tokens, each.limit): each.bucket(age, now) for each in saved.configured}
        self._configured = tuple(
            [known.get((one.counts_tokens, one.limit), one) if one.at == -inf else one for one in self._configured]
        )

    def reasons(self, seen: SendLimits, unpaid_until: float, now: float) -> Iterator[Reason]:
        """Reasons of `seen`, the limits of all callers, for the operator."""
        yield from self.refusal.reasons(now)
        yield from _used_up(LIMITED, "its reported limit", self._reported, now)
        yield from _used_up(CONFIGURED, "the pool's limit", self._configured, now)
        for each in self._learned:
            if (wait := each.wait(1.0, now)) > 0:
                yield LIMITED, f"the limit learned from its refusals, {each.words}, is reached", now + wait
        if seen.blocked_until > max(now, self.refusal.until, unpaid_until):
            yield LIMITED, PEER_REPORT, seen.blocked_until

    def send_limits(self, refused_until: float) -> SendLimits:
        """The limits as of now, for all callers. `refused_until`: end of a refusal known from elsewhere."""
        blocked_until = max(refused_until, self.refusal.until)
        buckets: SendBuckets = self._reported + self._configured + self._learned
        return SendLimits(blocked_until, buckets=buckets) if buckets or blocked_until > -inf else UNLIMITED


def _saved(until: float, why: str, now: float) -> SavedRefusal | None:
    return SavedRefusal(min(until - now, MAX_RETRY_AFTER), why[:MAX_TEXT]) if until > now else None


def _used_up(what: str, whose: str, buckets: Buckets, now: float) -> Iterator[Reason]:
    for bucket in buckets:
        if (wait := bucket.wait(1.0, now)) > 0:
            yield what, f"{whose} of {'tokens' if bucket.counts_tokens else 'requests'} is used up", now + wait


def _per_minute(requests: float | None, tokens: float | None) -> Buckets:
    of_tokens = (False, requests), (True, tokens)
    return tuple([RateLimit.configured(kind, limit) for kind, limit in of_tokens if limit is not None])


def _after(buckets: Buckets, tokens: float, now: float, requests: int = 1) -> Buckets:
    return tuple([bucket.after(tokens, now, requests) for bucket in buckets]) if buckets else buckets
