"""An attempt in flight at an endpoint: the effects of its sending, first token and end on the endpoint's state.

Rules:
- An attempt writes only to its own endpoint's state. Effects on the pool, peers and attempts at other endpoints belong
  to the fleet (`policies.fleet.fleet`).
- Conditions of sending and decoding are noted here: the queue ahead, concurrent answers, prefills that stalled the
  answer. Learning follows later (`policies.fleet.observations`).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace

from policies.blame.blame import BLAME, Blame, Evidence, Fault, blame_of, reason
from policies.fleet.circuit_breaker import BreakerState
from policies.fleet.endpoint_state import EWMA_WEIGHT, EndpointState
from policies.latency.token_counts import NO_QUEUE, PrefillQueue, PrefillTokens
from policies.latency.tpot import DecodingAnswer
from policies.latency.ttft_predictor import PrefillWork
from policies.prefix_cache.endpoint_cache import PendingPrompt
from policies.route_hooks import Meter
from policies.types import AttemptOutcome, Candidate, Forecast, Health, PoolEstimate
from policies.variants import LOADED, UNKNOWN, VariantSlots, VariantWait

OVERDUE_QUANTILE = 0.98  # of the forecast, after which an attempt counts as silent
MIN_OVERDUE = 0.5  # s
LOST = 0.05  # of prompts: the engine has evicted a prefix that was believed cached
STEP_S = 1.0  # s between two tokens of answers while the engine reads a longer prompt: the slowest step counted
_CLOSED = BreakerState.CLOSED  # a member is slow to look up in an enumeration
OUTLIER = BLAME["server"]  # of a refusal that siblings do not share


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
    unknown_model: bool = False  # the server does not know the name of the model or variant
    blame: Blame | None = None  # of a failed attempt; None: by its outcome
    cause: str = ""  # of a failure: "401 invalid_api_key: Incorrect API key provided", "connection refused"
    output_tokens: int = 0  # without a report too: as far as the answer was read
    cost_usd: float | None = None  # of all that the server bills; None: by the counts above


@dataclass(slots=True)
class InFlightAttempt:
    """An attempt which has not ended. `work`, `queue` and `prefill_rate` are as of the sending."""

    state: EndpointState
    candidate: Candidate
    prompt: PoolEstimate
    work: PrefillWork
    predicted_ttft: float  # s
    predicted_tpot: float  # s
    sent_at: float
    stream: bool
    pending_prompt: PendingPrompt | None  # None: nothing is known of the endpoint's cache
    queue: PrefillQueue
    prefill_rate: float  # tokens/s
    reported_queue: float  # tokens of `work.queued_tokens` which this process did not send
    answer: DecodingAnswer
    models_before: int = 0  # of the endpoint; another number by now: nothing is learned, and no failure counts
    found_room: bool = True  # in the engine's KV cache, at the sending
    kv_tokens: int = 0  # of this room, that the prompt takes
    variant_wait: VariantWait = LOADED
    kv_load_s: float = 0.0  # to load cached tokens from slower tiers
    network_s: float = 0.0  # of the TTFT: a round trip, and a new connection where one was needed
    waited: float = 0.0  # s of the TTFT in which the engine neither queued nor computed the prompt: all these
    first_at: float | None = None
    running: int = 0  # decoding answers at the first token
    context: int = 0  # tokens of the prompts of these answers
    prefill_s: float = 0.0  # sent to the endpoint in all, by then
    provider_hit: int | None = None  # tokens believed held by the provider at the sending; None: nothing is believed
    meter: Meter | None = None  # of the route, where it has one and this is an API
    caller: str = ""  # name of the key, or an address; empty: the gateway itself
    paused: bool = (
        False  # this process was paused meanwhile (`policies.fleet.observations`): nothing of it tells a time
    )
    overdue: bool = False  # left as silent, for longer than a forecast can explain
    unread: bool = False  # the caller stopped reading for a while, so did the gateway: no pace can be learned

    @classmethod
    def sent(
        cls,
        state: EndpointState,
        candidate: Candidate,
        prompt: PoolEstimate,
        now: float,
        *,
        stream: bool,
        answer: DecodingAnswer,
        pending_prompt: PendingPrompt | None,
        provider_hit: int | None,
        meter: Meter | None,
        caller: str,
    ) -> InFlightAttempt:
        """An attempt sent now, with the work ahead of its prompt."""
        state.advance(now)
        work = state.work(candidate.prompt_tokens, candidate.hit, now)
        variants, queue = state.variants if prompt.variant else None, state.queue
        queued, rate = work.queued_tokens, state.predictor.drain_rate
        predictor = state.predictor if state.pool.local else state.predictor.of(prompt.job_class)
        variant_wait = LOADED if variants is None else variants.on_sent(prompt.variant, now)
        kv_load_s, network_s = state.kv_loads.seconds(candidate.to_load) if candidate.to_load else 0.0, state.rtt
        return cls(
            state=state,
            candidate=candidate,
            prompt=prompt,
            work=work,
            predicted_ttft=predictor.point_estimate(work, now),
            predicted_tpot=state.tpot_of(candidate.load, candidate.prompt_tokens),
            sent_at=now,
            stream=stream,
            pending_prompt=pending_prompt,
            queue=queue.as_of_now() if queue.tokens else NO_QUEUE,
            prefill_rate=rate,
            reported_queue=max(queued - state.inflight.queue.tokens_left(now, rate), 0.0) if queued else 0.0,
            answer=answer,
            models_before=state.models_before,
            found_room=state.kv_room.on_sent(kv_tokens := work.uncached + sum(candidate.to_load), now),
            kv_tokens=kv_tokens,
            kv_load_s=kv_load_s,
            network_s=network_s,
            waited=variant_wait.seconds + kv_load_s + network_s,
            provider_hit=provider_hit,
            variant_wait=variant_wait,
            meter=meter,
            caller=caller,
        )

    def on_sent(self, key: Hashable) -> None:
        """Takes the attempt into the counts of the endpoint."""
        state, work, hit, now = self.state, self.work, self.candidate.hit, self.sent_at
        prefill_s = state.predictor.prefill_seconds(work.uncached, work.uncached * (hit + 0.5 * work.uncached))
        state.interference.on_prefill(prefill_s + self.variant_wait.load_s, now)
        state.inflight.on_sent(key, work.uncached, now, hit, self.stream)
        state.predictor.on_sent()
        state.last_used_at = now
        if not state.pool.local:  # an engine has no limits
            state.limits.on_sent(self.candidate.prompt_tokens, now)
        if self.meter is not None:
            self.meter.on_sent(self.candidate.price, now)
        if state.callers.states or state.breaker.state is not _CLOSED:
            state.callers.on_sent(key, self.caller, now)
        state.typical_prompt += (work.uncached - state.typical_prompt) * EWMA_WEIGHT

    def on_first_token(self, key: Hashable, now: float) -> None:
        """The answer decodes from now on."""
        state = self.state
        self.first_at, state.last_token_at = now, max(now, state.last_token_at)  # a token may be known late
        self.running, self.context = state.decoding
        self.prefill_s = state.interference.prefill_s
        if not self.unread:
            state.interference.on_first_token(key, self.answer, now)
        state.inflight.on_first_token(key, now)
        state.callers.on_answer(key, self.caller, now)
        state.newest_answered = max(state.newest_answered, self.sent_at)
        if state.variants is not None:
            state.variants.on_answer(self.prompt.variant)

    def on_unread(self, key: Hashable) -> None:
        """The caller does not read: how fast the answer is read from the endpoint says nothing of the endpoint."""
        self.unread = True
        self.state.interference.on_ended(key)

    def on_pause(self, key: Hashable) -> None:
        """This process was paused: how long anything took is not known."""
        self.paused = True
        self.on_unread(key)

    def on_ended(self, key: Hashable, outcome: AttemptOutcome, now: float, report: AttemptReport) -> None:
        """Takes an attempt that has ended out of the counts of the endpoint, and settles the cost."""
        state = self.state
        self.overdue = outcome is AttemptOutcome.SILENT and self._is_overdue(key, now)
        if self.first_at is None and outcome is AttemptOutcome.COMPLETED:
            state.inflight.on_first_token(key, now)
            state.newest_answered = max(state.newest_answered, self.sent_at)
            if state.variants is not None:
                state.variants.on_answer(self.prompt.variant)
        elif self.first_at is None:
            state.kv_room.on_left(self.kv_tokens, self.sent_at)
        state.inflight.on_ended(key, now)
        if not state.pool.local:
            state.limits.on_output(report.output_tokens or report.completion_tokens or 0, now)
        if self.prompt.variant and state.variants is not None:
            state.variants.on_ended(self.prompt.variant, now - self.sent_at)
        state.interference.on_ended(key, report.mean_itl, report.completion_tokens)
        if self.meter is not None and report.completion_tokens is not None:
            self.meter.on_cost(self.cost(report) - self.candidate.price, now)

    @property
    def prompt_tokens(self) -> int:
        """By the count, if it came since."""
        counted = self.prompt.counted_tokens() - self.prompt.tokens if self.prompt.margin else 0
        return self.candidate.prompt_tokens + counted

    def cost(self, report: AttemptReport) -> float:
        """USD."""
        if report.cost_usd is not None:
            return report.cost_usd
        tokens = self.prompt_tokens if report.prompt_tokens is None else report.prompt_tokens
        return self.state.pool.price.of(tokens, report.completion_tokens or 0, report.cached_tokens or 0)

    def outlook(self, key: Hashable, now: float) -> tuple[float, Forecast, float] | None:
        """Start time of a TTFT forecast, the forecast by the engine's present queue and batch, and the time of the
        engine's latest token. None: an API, or an engine that was asleep."""
        state, inflight = self.state, self.state.inflight
        if not state.pool.local or key not in inflight.prefilling or self.candidate.load.health is Health.ASLEEP:
            return None
        since, (cached, lost) = inflight.queue.started_at, inflight.prefills_of(key)
        reported = self.reported_queue if since <= self.sent_at else 0.0  # the queue ends with a first token
        forecast, heard_at = self._forecast_of(cached, reported, now), max(state.heard_at, state.last_token_at)
        if not state.interference.answers or now - max(since, heard_at) < STEP_S:
            forecast = forecast.or_else(self._forecast_of(lost, reported, now), LOST)
        return since, forecast, heard_at

    def _is_overdue(self, key: Hashable, now: float) -> bool:
        """No token has come for longer than a forecast can explain."""
        forecast, since = self.candidate.forecast, self.sent_at
        if (outlook := self.outlook(key, now)) is not None:
            since, forecast = max(outlook[0], outlook[2]), outlook[1]
        return self.stream and now - since > max(forecast.quantile(OVERDUE_QUANTILE), MIN_OVERDUE)

    def _forecast_of(self, prefills: PrefillTokens, reported: float, now: float) -> Forecast:
        """TTFT from the begin of these prefills, the last of which is the attempt's own."""
        predictor = self.state.predictor.of(self.prompt.job_class)
        ahead = prefills.tokens + reported - self.work.uncached
        pairs = prefills.pairs + reported * self.queue.context_per_token
        work = replace(self.work, queued_tokens=ahead, pairs=pairs)
        return replace(
            self.candidate.forecast,
            point_estimate=self.waited + predictor.point_estimate(work, now),
            ratios=predictor.quantiles(max(ahead, 0.0), now),
            samples=predictor.samples,
        )

    def update_breaker(
        self, key: Hashable, outcome: AttemptOutcome, now: float, report: AttemptReport, outlier: bool
    ) -> None:
        """`outlier`: a refusal that says more of the endpoint than of the request."""
        callers = self.state.callers
        blame = OUTLIER if outlier else report.blame or blame_of(outcome, report.connected)
        former = self.models_before != self.state.models_before and (
            outcome is AttemptOutcome.SILENT or (blame and blame.evidence.is_failure)
        )
        if former or (outcome is AttemptOutcome.SILENT and self.paused):
            callers.on_replied(key, self.caller, AttemptOutcome.CANCELLED, now)
        elif outcome is AttemptOutcome.SILENT:
            callers.on_silent(key, self.caller, self.sent_at, now, self.overdue)
        elif blame is None or not blame.evidence.is_failure:
            if blame is not None and blame.evidence is Evidence.BUSY:
                self._on_busy(blame, report, now)
            if blame is not None:
                outcome = AttemptOutcome.CANCELLED if blame.evidence is Evidence.NONE else blame.outcome
            callers.on_replied(key, self.caller, outcome, now)
        else:
            connected = report.connected and blame.evidence is not Evidence.UNREACHABLE
            why = reason(blame, report.cause)
            self.state.limits.on_not_taken(self.candidate.prompt_tokens, self.sent_at)
            callers.on_failed(key, self.caller, blame.outcome, blame.evidence, now, connected=connected, why=why)

    def on_unknown_variant(self, key: Hashable, variants: VariantSlots, now: float) -> None:
        """The engine does not know the variant; its other models are served."""
        callers, variant = self.state.callers, self.prompt.variant
        if callers.on_unknown_variant(variant, self.caller, now, now + UNKNOWN):
            variants.on_unknown(variant, now)
        callers.on_replied(key, self.caller, AttemptOutcome.CANCELLED, now)

    def _on_busy(self, blame: Blame, report: AttemptReport, now: float) -> None:
        """Handle a refusal for load. An engine's queue limit becomes a cap. For a rate limit, the provider's figures
        are preferred. Retry-After counts for the caller until a second caller is refused; the rate counts for all."""
        state = self.state
        if blame.fault is Fault.QUEUE and state.on_queue_limit(self.caller, now):
            return  # the cap holds requests back, for as long as it is full
        of_tokens = {Fault.TOKEN_RATE: True, Fault.REQUEST_RATE: False}.get(blame.fault)
        spent = state.limits.exhausted_for(now, of_tokens)
        wait = spent if report.retry_after is None else report.retry_after
        why = reason(blame, report.cause)
        state.callers.on_rate_limited(self.caller, now, wait, spent is not None, why)
        if blame.fault in (Fault.RATE, Fault.REQUEST_RATE, Fault.TOKEN_RATE):
            state.limits.on_refused(of_tokens, self.candidate.prompt_tokens, self.sent_at, now, report.retry_after)

    def settle_prompt(self, key: Hashable, report: AttemptReport, computed: bool) -> None:
        """Teaches the contents of the cache. `computed`: the engine has read the prompt."""
        state, pending, accounted = self.state, self.pending_prompt, False
        if pending is not None and computed:
            accounted = state.cache.on_answered(key, pending, report.prompt_tokens, report.cached_tokens)
        elif pending is not None:
            state.cache.on_unanswered(key, pending)
        if report.cached_tokens is not None and self.candidate.hit and state.pool.local and not accounted:
            self.confirm_hit(report.cached_tokens, report.prompt_tokens)

    def settle_provider_cache(self, report: AttemptReport) -> bool:
        """Teaches what the provider holds once its cache has the prompt. Returns whether it is believed to."""
        reported = None if report.prompt_tokens is None else report.cached_tokens or 0  # some usage names no count of 0
        return self.state.provider_cache.on_answered(self.prompt, self.sent_at, self.provider_hit or 0, reported)

    def confirm_hit(self, cached: int, prompt: int | None) -> None:
        """Corrects the believed size of the cache by how many tokens of the believed hit were cached.
        `prompt`: reported tokens; where they are fewer than estimated, so are those of the hit.

        Blocks which an attempt ahead was still computing say nothing about the size.
        """
        estimated, index = self.candidate.prompt_tokens, self.state.cache.index
        believed = self.candidate.hit if prompt is None else int(self.candidate.hit * min(prompt / estimated, 1.0))
        if cached + self.state.block_size > believed:
            index.confirm(believed, believed)
        elif not self.queue.tokens:
            index.confirm(believed, cached)
