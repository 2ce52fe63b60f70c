"""An attempt between sending and end, and the samples for the endpoint's models."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace

from policies.fleet.endpoint_state import EndpointState
from policies.latency.decode_interference import DecodingAnswer
from policies.latency.inflight_tokens import PrefillQueue
from policies.latency.ttft_predictor import PrefillWork, TtftSample
from policies.prefix_cache.endpoint_cache import PendingPrompt
from policies.types import AttemptOutcome, Candidate, PoolEstimate

OVERDUE_QUANTILE = 0.98  # of the forecast, after which an attempt counts as silent
MIN_OVERDUE = 0.5  # s


@dataclass(slots=True)
class AttemptReport:
    """Report of an attempt's answer. None: not reported."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    mean_itl: float | None = None  # s
    engine_ttft: float | None = None  # s
    retry_after: float | None = None  # s
    connected: bool = True  # False: refused, or reset before a byte came


@dataclass(slots=True)
class InFlightAttempt:
    """An attempt which has not ended. `work`, `queue` and `prefill_rate` are as of its sending."""

    state: EndpointState
    candidate: Candidate
    prompt: PoolEstimate
    work: PrefillWork
    predicted_ttft: float  # s
    sent_at: float
    stream: bool
    pending_prompt: PendingPrompt | None  # None: nothing is known of the endpoint's cache
    queue: PrefillQueue
    prefill_rate: float  # tokens/s
    answer: DecodingAnswer
    first_at: float | None = None
    running: int = 0  # decoding answers at the first token
    context: float = 0.0  # tokens of their prompts
    prefill_s: float = 0.0  # sent to the endpoint in all, by then

    def on_first_token(self, now: float) -> None:
        self.first_at = now
        self.running = self.state.decoding
        self.context = self.state.decoding_context
        self.prefill_s = self.state.interference.prefill_s

    def sample(self, ttft: float) -> TtftSample:
        """The attempt as a sample. How far the queue had drained at its sending is judged by the rate known now."""
        queue, work = self.queue, self.work
        if queue.tokens:
            rate = self.state.predictor.prefill_rate(queue.context_per_token)
            more = queue.tokens_left(self.sent_at, rate) - queue.tokens_left(self.sent_at, self.prefill_rate)
            pairs = work.pairs + more * queue.context_per_token
            work = replace(work, queued_tokens=work.queued_tokens + more, pairs=pairs)
        return TtftSample(work, self.predicted_ttft, ttft)

    def learn_at_least(self, now: float) -> None:
        """The attempt ended without a token."""
        self.state.predictor.observe_at_least(self.sample(now - self.sent_at), now)

    def learn_tpot(self, itl: float, tokens: int) -> None:
        """Teaches the inter-token latency without the prefills which stalled the answer."""
        state = self.state
        stalled = (state.interference.prefill_s - self.prefill_s) / (tokens - 1) if tokens > 1 else 0.0
        running, context = (self.running + state.decoding) / 2, (self.context + state.decoding_context) / 2
        state.tpot_predictor.observe(running, context, max(itl - stalled, itl * 0.1))

    def update_breaker(self, key: Hashable, outcome: AttemptOutcome, now: float, report: AttemptReport) -> None:
        breaker, rate_limit = self.state.breaker, self.state.rate_limit
        if outcome is AttemptOutcome.SILENT:
            patience = max(self.candidate.forecast.quantile(OVERDUE_QUANTILE), MIN_OVERDUE)
            breaker.on_silent(key, self.sent_at, now, self.stream and now - self.sent_at > patience)
            return
        if outcome is AttemptOutcome.RATE_LIMITED:
            breaker.on_rate_limited(now, report.retry_after)
            if rate_limit is not None:
                rate_limit.on_rejected(now)
        breaker.on_ended(key, outcome, now, report.connected)

    def confirmed_hit(self, cached: int) -> int | None:
        """Confirmed tokens of the believed hit; None: unknown.

        Blocks which an attempt ahead was still computing say nothing about the cache's size.
        """
        believed = self.candidate.hit
        if not believed:
            return None
        if cached + self.state.block_size > believed:
            return believed
        return None if self.queue.tokens else cached
