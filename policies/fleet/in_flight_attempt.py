"""One attempt between its sending and its end, and what it teaches of its endpoint."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from policies.fleet.decode_interference import DecodingAnswer
from policies.fleet.endpoint_state import EndpointState
from policies.fleet.inflight_tokens import Queue
from policies.latency.ttft_predictor import Sample, Work, learn_at_least
from policies.prefix_cache.prefix_caches import PendingPrompt
from policies.types import AttemptOutcome, Candidate, PoolEstimate
from policies.value import value

_new = tuple.__new__  # half of what a named tuple's own constructor takes
_COMPLETED = AttemptOutcome.COMPLETED  # a member is slow to look up in its enumeration
OVERDUE, OVERDUE_LEAST = 0.98, 0.5  # the quantile of its forecast, and s, that an attempt must outlast to be silent


@value
class Reported:
    """What an attempt's answer said of it. None: it did not say."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    mean_itl: float | None = None  # s
    engine_ttft: float | None = None  # s
    retry_after: float | None = None  # s
    connected: bool = True  # False: refused, or reset before a byte came


@dataclass(slots=True)
class InFlightAttempt:
    """An attempt that has not ended."""

    state: EndpointState
    candidate: Candidate
    prompt: PoolEstimate
    work: Work  # as far as it could be told then
    told: float  # the TTFT expected then, s
    sent_at: float
    stream: bool
    cache: PendingPrompt | None  # what is believed of its prompt there; None: nothing can be
    queue: Queue  # what was ahead of it then
    rate: float  # tokens/s it was thought to drain at
    answer: DecodingAnswer  # that is to come
    first_at: float | None = None
    running: int = 0  # at its first token
    context: float = 0.0  # of all that were being answered then, tokens
    spent: float = 0.0  # s of prefill sent there, then

    def began(self, now: float) -> None:
        """Its first token is here."""
        state = self.state
        self.first_at, self.running, self.context, self.spent = now, state.answering, state.attended, state.stall.spent

    def sample(self, ttft: float) -> Sample:
        """What it teaches. How far the queue had drained when it was sent is judged by the rate as known now."""
        queue, work = self.queue, self.work
        if queue.tokens:
            rate = self.state.predictor.rate(queue.context)
            more = queue.ahead(self.sent_at, rate) - queue.ahead(self.sent_at, self.rate)
            work = work._replace(ahead=work.ahead + more, pairs=work.pairs + more * queue.context)
        return _new(Sample, (work, self.told, ttft))

    def learn_at_least(self, now: float) -> None:
        """It ended without a token."""
        learn_at_least(self.state.predictor, self.sample(now - self.sent_at), now)

    def learn_pace(self, itl: float, tokens: int) -> None:
        """What a token takes without the prefills that stalled it."""
        state, stall = self.state, self.state.stall
        stalled = (stall.spent - self.spent) / (tokens - 1) if tokens > 1 else 0.0
        alone, least = itl - stalled, itl * 0.1
        running, context = (self.running + state.answering) / 2, (self.context + state.attended) / 2
        state.pace.observe(running, context, alone if alone > least else least)

    def judge(self, key: Hashable, ending: AttemptOutcome, now: float, reported: Reported) -> None:
        """What its end says of its endpoint's health."""
        breaker, quota = self.state.breaker, self.state.quota
        if ending is _COMPLETED:
            breaker.ended(key, ending, now)
            return
        if ending is AttemptOutcome.SILENT:
            patience = max(self.candidate.forecast.quantile(OVERDUE), OVERDUE_LEAST)
            breaker.silent(key, self.sent_at, now, self.stream and now - self.sent_at > patience)
            return
        if ending is AttemptOutcome.RATE_LIMITED:
            breaker.limited(now, reported.retry_after)
            if quota is not None:
                quota.refused(now)
        breaker.ended(key, ending, now, reported.connected)

    def confirmed(self, cached: int) -> int | None:
        """How much of what was believed cached was; None: it does not say.

        Blocks that an attempt ahead was still computing say nothing of the cache's size.
        """
        believed = self.candidate.hit
        if not believed:
            return None
        if cached + self.state.block_size > believed:
            return believed
        return None if self.queue.tokens else cached
