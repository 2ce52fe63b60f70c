"""Learned state of an endpoint, and the load which follows from this state and the attempts in flight there.

Rules:
- What is about the server outlives the entry in the configuration, and another model: the attempts in flight, the load,
  limits, the breaker and the evidence of callers. What is about the model begins anew with another one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, replace
from operator import attrgetter

from policies.fleet.beliefs import Belief, beliefs, limits
from policies.fleet.caller_evidence import CallerEvidence, LearnedCap
from policies.fleet.circuit_breaker import MAX_EJECTION, BreakerState, CircuitBreaker
from policies.fleet.engine_kv_cache import KvLoads, KvRoom
from policies.fleet.engine_load import EngineCounters, EngineLoad, EngineRates, EngineSleep, has_restarted
from policies.fleet.network_path import NetworkPath
from policies.fleet.peers import NO_LOAD, PeerLoad, add_misses
from policies.latency.api_predictor import ApiPredictor
from policies.latency.online_learning import Calibration, ErrorQuantiles
from policies.latency.token_counts import InflightTokens, PrefillQueue
from policies.latency.tpot import (
    MIN_TPOT,
    DecodeInterference,
    TpotPredictor,
    reopens_in,
)
from policies.latency.ttft_predictor import (
    CONTEXT_WEIGHT,
    EnginePredictor,
    PrefillWork,
    TtftPredictor,
)
from policies.prefix_cache.endpoint_cache import EndpointCache, PendingPrompt
from policies.prefix_cache.provider_cache import ProviderCache
from policies.prefix_cache.residency import MAX_BLOCKS, ResidencyStatistics
from policies.rate_limit.endpoint_limits import EndpointLimits
from policies.rate_limit.send_limits import SendLimits
from policies.types import FOREVER, NEVER, Endpoint, Health, Load, Pool, PoolEstimate

STALE = 5.0  # s after which a scrape says nothing about other traffic
DEFAULT_PROMPT = 1_000.0  # uncached tokens, before any prompt
EWMA_WEIGHT = 1 / 32  # of the latest prompt
MAX_API_EJECTION = 10.0  # s: no probe tells when an API is back, so try again soon
BLOCK_TOLERANCE = 0.05  # of a block's size: the token scale differs a little from prompt to prompt
MIN_DECODE_SHARE = 0.1  # of an engine's time, left for decoding however many prefills there are
JUDGED = 20  # latest answers that an outlier is judged by
MAX_MODELS = 4  # models before the present one with times kept

_WORST = (Health.UP, Health.PROBING, Health.DOWN, Health.ASLEEP, Health.DRAINING)
_UP, _DOWN, _ASLEEP = Health.UP, Health.DOWN, Health.ASLEEP  # a member is slow to look up in an enumeration
_CLOSED = BreakerState.CLOSED
ASLEEP = "it is asleep: it gets no request until it is woken"
DRAINED = "an operator has drained it: it gets no request until it is ready again"
_prefix_totals = attrgetter("prefix_queries", "prefix_hits")

LearnedTimes = tuple[TtftPredictor, TpotPredictor, Calibration]


@dataclass(frozen=True, slots=True)
class EndpointStatistics:
    """An endpoint in the answer of GET /fleet."""

    endpoint: Endpoint
    load: Load
    breaker: str
    why: str  # reason for not being closed
    until: float  # end of the ejection; NEVER, or in the past: over
    openings: int  # in a row
    calibration: Calibration | None
    samples: int
    prefill_rate: float  # tokens/s, of prompts without context
    error: tuple[float, float, float]  # actual / predicted TTFT: p10, p50, p90
    tpot: float  # s, at the present load
    block_tokens: float  # of the engine, in one of the estimator's blocks
    prefix_blocks: int  # believed cached, in the estimator's blocks
    prefix_capacity: int  # of the index, in the estimator's blocks
    resident: ResidencyStatistics | None  # by KV events, in the engine's blocks
    variants: tuple[str, ...]  # believed loaded, least recently used first
    believed: tuple[Belief, ...]  # reasons to send no requests, or fewer than the endpoint's share
    rtt: float | None  # s of a round trip on the network; None: not measured


class EndpointState:
    """Attempts in flight, circuit breaker, models and last scrape of an endpoint. `unix_offset`: of `now`, s."""

    def __init__(self, endpoint: Endpoint, pool: Pool, unix_offset: float = 0.0) -> None:
        self.endpoint = endpoint
        self.pool = pool
        self.unix_offset = unix_offset
        self.inflight = InflightTokens()
        self.breaker = CircuitBreaker(MAX_EJECTION if pool.local else MAX_API_EJECTION)
        self.queue_cap: LearnedCap | None = None  # of the engine itself, for all callers
        self.has_refused_more = False  # refused requests beyond an engine limit
        self.limits = EndpointLimits(pool.requests_per_minute, pool.tokens_per_minute, learns=not pool.local)
        self.callers = CallerEvidence(self.breaker, self.limits.refusal)
        self.shown = self.breaker.state  # as reported to the operator
        self.interference = DecodeInterference()
        self.variants = None if pool.variants is None else pool.variants.new_slots()
        self.models_before = 0  # models configured before
        self._forget_model()
        self.engine, self.rates = EngineLoad(), EngineRates()
        self.load_fault = ""  # reason why the engine's load is unknown; empty: known, or never polled
        self.sleep = EngineSleep()
        self.kv_room = KvRoom()
        self.network: NetworkPath | None = None
        self.scraped_at = self.last_used_at = self.last_token_at = NEVER
        self.heard_at = NEVER  # poll before the latest increase of the token count: the tokens came later
        self.newest_answered = NEVER  # sending of the newest attempt with a first token or an answer
        self.warming = self.drained = False
        self.peer_load = NO_LOAD
        self.other_running = self.other_waiting = self._excess = 0  # requests of other traffic
        self.typical_prompt = DEFAULT_PROMPT  # uncached tokens, assumed for other traffic
        self._peer_prefill_s = 0.0  # seconds in `interference.prefill_s` which peers sent

    def _new_predictor(self) -> TtftPredictor:
        return EnginePredictor() if self.pool.local else ApiPredictor(self.unix_offset, self.pool.prior_ttft)

    def _forget_model(self) -> None:
        """Begin anew with all that is about the model and not about the server."""
        pool = self.pool
        self.refusals: deque[bool] = deque(maxlen=JUDGED)  # of the latest answers, the 4xx
        self.calibration = Calibration()
        self.predictor = self._new_predictor()
        self.tpot_predictor = TpotPredictor()
        self.pace = ErrorQuantiles()  # of TPOT / `tpot_of`
        self.model = ""  # as named by the engine; empty: not yet
        self._times: dict[str, LearnedTimes] = {}  # of models served before
        self.block_size = pool.block_size  # the engine's
        self.block_tokens = self._mean_block_tokens = float(pool.block_size)  # engine tokens per estimator's block
        self.kv_tokens = pool.kv_tokens
        self.cache = EndpointCache(int(self.kv_tokens / self.block_tokens))
        self.provider_cache = ProviderCache()  # of an API
        self.kv_loads = KvLoads()
        self.teacher_samples = 0  # of the most experienced sibling at the last warm start

    def reload(self, endpoint: Endpoint, pool: Pool, *, mended: bool = True) -> None:
        """Apply a changed configuration. `mended` False: only other endpoints have changed, so earlier refusals are not
        retried."""
        (before, former), self.endpoint, self.pool = (self.pool, self.endpoint), endpoint, pool
        self.breaker.max_ejection = MAX_EJECTION if pool.local else MAX_API_EJECTION
        if pool.variants != before.variants:
            self.variants = None if pool.variants is None else pool.variants.new_slots()
        if (pool.model, pool.local) != (before.model, before.local):
            self.models_before += 1
            self._forget_model()
            if self.variants is not None:
                self.variants.clear()
        self.limits.reload(pool.requests_per_minute, pool.tokens_per_minute, learns=not pool.local)
        if endpoint.account != former.account:
            self.limits.on_other_account()
            self.callers.on_other_account()
            self.provider_cache = ProviderCache()
        if mended:
            self.breaker.on_reload()
            self.callers.on_reload()

    @property
    def is_busy(self) -> bool:
        """Attempts run at the server, ours or those of peers."""
        return bool(self.inflight.prefilling or self.inflight.decoding or self.peer_load.in_flight)

    def is_settled(self, now: float) -> bool:
        """True if no request runs at the server, and no refusal or limit is in force."""
        refused = (state.refused_until for state in self.callers.states.values())
        ends = self.peer_load.blocked_until, *refused, NEVER if self.breaker.state is _CLOSED else self.breaker.until
        return not self.is_busy and self.limits.is_over(now) and max(ends) <= now

    @property
    def blocks(self) -> int:
        """Capacity of the engine's cache and what its slower tiers hold beyond, in the estimator's blocks. An engine's
        report may be absurd."""
        return min(max(int((self.kv_tokens + self.cache.slower_tokens) / self.block_tokens), 1), MAX_BLOCKS)

    @property
    def rtt(self) -> float:
        """Seconds of a round trip on the network; 0: not known."""
        return 0.0 if self.network is None else self.network.network_s()[0]

    @property
    def queue(self) -> PrefillQueue:
        """Prefills of all processes."""
        own, peers = self.inflight.queue, self.peer_load
        return peers.joined_with(own, self.last_token_at) if peers.prefilling else own

    @property
    def decoding(self) -> tuple[int, int]:
        """Decoding answers of all processes, and the tokens of their prompts."""
        peers = self.peer_load
        answers = len(self.inflight.decoding) + peers.in_flight - peers.prefilling
        return answers, self.interference.context + peers.decoding_context

    @property
    def own_load(self) -> PeerLoad:
        """Load of this process alone, for its peers."""
        inflight, interference = self.inflight, self.interference
        queue, decoding = inflight.queue, bool(interference.answers)
        return PeerLoad(
            in_flight=inflight.in_flight,
            prefilling=len(inflight.prefilling),
            queued_tokens=queue.tokens,
            queued_pairs=queue.pairs,
            queued_remainder=queue.remainder,
            decoding_context=interference.context,
            warming=int(self.warming),
            queued_since=queue.started_at if inflight.prefilling else FOREVER,
            last_token_at=self.last_token_at,
            last_used_at=self.last_used_at,
            blocked_until=self.limits.refusal.until,
            down_since=self.breaker.down_since,
            prefill_s=interference.prefill_s - self._peer_prefill_s,
            decode_s=interference.decode_s if decoding else 0.0,
            decode_tokens=interference.decode_tokens if decoding else 0.0,
            tpot_limit=interference.tpot_limit(self.tpot_predictor.at_rest(*self.decoding)),
            expected_tpot_misses=interference.expected_tpot_misses,
        )

    def on_peer_load(self, load: PeerLoad, now: float) -> None:
        """`load`: of all peers together. Prefills of peers stall our answers as our own do."""
        seconds = load.prefill_s - self.peer_load.prefill_s
        if seconds > 0:  # less: a peer restarted
            self.interference.on_prefill(seconds, now)
            self._peer_prefill_s += seconds
        self.last_token_at = max(self.last_token_at, load.last_token_at)
        self.last_used_at = max(self.last_used_at, load.last_used_at)
        self.peer_load = load

    def load(self, now: float) -> Load:
        """The load, for all callers, with the drain rate as of the latest `advance`."""
        queued_tokens, waiting, running = self._queue_at(now)
        inflight, interference, peers = self.inflight, self.interference, self.peer_load
        breaker, is_closed = self.breaker, self.breaker.state is _CLOSED
        context, pressure = interference.context + peers.decoding_context, 0.0
        rest = self.tpot_predictor.at_rest(running, context)
        if interference.answers or peers.tpot_limit < FOREVER:
            pressure = interference.tpot_pressure(rest, peers.decode_s, peers.decode_tokens, peers.tpot_limit)
        backlog_s = queued_tokens / self.predictor.drain_rate
        utilization = interference.prefill_utilization(now)
        misses = interference.expected_tpot_misses
        if peers.expected_tpot_misses:
            misses = add_misses(misses, peers.expected_tpot_misses)
        in_flight = len(inflight.prefilling) + len(inflight.decoding) + peers.in_flight
        cap = self.pool.concurrent_requests if self.queue_cap is None else self.cap(now)
        asleep = out = self.sleep.asleep
        health = _ASLEEP if asleep else _UP if is_closed else breaker.health(now)
        if self.drained:
            health, asleep, out = Health.DRAINING, False, True
        return Load(
            at=now,
            health=health,
            failing=not (is_closed or out) and breaker.failing(now),
            wake_s=self.sleep.wake_s if asleep and self.pool.wakes else 0.0,
            doubted=not (is_closed or out) and breaker.doubted,
            on_trial=not is_closed and breaker.on_trial,
            in_flight=in_flight,
            prefilling=len(inflight.prefilling) + peers.prefilling,
            queued_tokens=queued_tokens,
            running=running,
            waiting=waiting,
            kv_usage=self.engine.kv_usage or 0.0,
            kv_room=self.kv_room.tokens(now),
            scraped_at=self.scraped_at,
            limits=self._send_limits(),
            unknown_variants=None if self.variants is None else self.variants.unknown,
            full=cap is not None and in_flight >= cap,
            backlog_s=backlog_s,
            expected_tpot_misses=misses,
            stalled=interference.unaccounted_s,
            tpot_pressure=pressure,
            reopens_in=reopens_in(pressure, backlog_s) if pressure else 0.0,
            prefill_utilization=utilization,
            tpot=rest.undisturbed / max(1 - utilization, MIN_DECODE_SHARE),
            context=context,
            last_token_at=self.last_token_at,
            warming=self.warming or peers.warming > 0,
        )

    def cap(self, now: float, caller: str = "") -> int | None:
        """Maximum of requests in progress, by the configuration and by the engine, as the caller has met with it; None:
        there is none."""
        own, learned = self.callers.states.get(caller), None if self.queue_cap is None else self.queue_cap.at(now)
        caps = self.pool.concurrent_requests, learned, None if own is None else own.cap(now)
        return min((cap for cap in caps if cap is not None), default=None)

    def on_queue_limit(self, caller: str, now: float) -> bool:
        """The engine has refused a request of the caller beside those in flight. False: there are none, and nothing is
        learned."""
        in_flight = self.inflight.in_flight + self.peer_load.in_flight
        if in_flight:
            self.has_refused_more = True
            self.queue_cap = self.callers.on_queue_limit(caller, LearnedCap(in_flight, now), now) or self.queue_cap
        return in_flight > 0

    def tpot_of(self, load: Load, prompt_tokens: int) -> float:
        """Seconds per token of an answer sent there now, beside all that run and wait there."""
        running, context = load.running + load.waiting + 1, load.context + prompt_tokens
        alone = max(self.tpot_predictor.predict(running, context), MIN_TPOT)
        return alone / max(1 - load.prefill_utilization, MIN_DECODE_SHARE)

    def _send_limits(self) -> SendLimits:
        refused_until = self.peer_load.blocked_until
        if self.breaker.state is not _CLOSED:
            refused_until = max(self.breaker.unpaid_until, refused_until)
        return self.limits.send_limits(refused_until)

    def may_be_closed(self, now: float) -> bool:
        """A cap, a rate limit or the evidence of a caller is known; without one, no load has to be computed."""
        capped = self.pool.concurrent_requests is not None or self.queue_cap is not None
        return capped or bool(self.callers.states) or self._send_limits().may_hold(now)

    def load_for(self, caller: str, load: Load, now: float) -> Load:
        """The load as this caller has met with the endpoint. `load`: for all callers."""
        own = self.callers.states.get(caller)
        if own is None or own.is_over(now):
            return load
        health = own.breaker.health(now)
        down = [
            failing
            for seen, failing in ((health, own.breaker.failing(now)), (load.health, load.failing))
            if seen is _DOWN
        ]
        unknown = own.unknown_variants
        return replace(
            load,
            health=max(health, load.health, key=_WORST.index),
            failing=bool(down) and all(down),
            on_trial=load.on_trial or own.breaker.on_trial,
            limits=replace(load.limits, refused_until=own.refused_until),
            full=load.full or ((cap := own.cap(now)) is not None and load.in_flight >= cap),
            unknown_variants={**(load.unknown_variants or {}), **unknown} if unknown else load.unknown_variants,
        )

    def on_progress(self, now: float) -> None:
        """The tokens of the answers in progress have been counted."""
        interference, predictor, since = self.interference, self.tpot_predictor, self.interference.updated_at
        running, context = self.decoding
        prefilling = self.inflight.prefilling or self.peer_load.prefilling or interference.unaccounted_s
        decode_s, tokens = interference.update(predictor.at_rest(running, context), now)
        if not prefilling and self.last_token_at < since:
            predictor.observe_at_rest(running, context, decode_s, tokens, now - since)

    def advance(self, now: float) -> None:
        """Drops prefills that have ended unnoticed, and sets the drain rate of the queue."""
        inflight, predictor = self.inflight, self.predictor
        if inflight.prefilling:
            inflight.expire(now, predictor.drain_rate)
        if inflight.prefilling or self.peer_load.prefilling:
            context_per_token = self.queue.context_per_token
            predictor.context_per_token = context_per_token
            predictor.drain_rate = predictor.prefill_rate(context_per_token)
        else:
            predictor.context_per_token, predictor.drain_rate = 0.0, predictor.max_prefill_rate

    def _queue_at(self, now: float) -> tuple[float, int, int]:
        """Tokens ahead of a new prompt, and waiting and decoding requests."""
        inflight, peers, predictor = self.inflight, self.peer_load, self.predictor
        waiting = len(inflight.prefilling) + peers.prefilling
        running = len(inflight.decoding) + peers.in_flight - peers.prefilling
        tokens = self.queue.tokens_left(now, predictor.drain_rate) if waiting else 0.0
        age = 0.0 if self.load_fault else now - self.scraped_at  # assumed: see `assume_others`
        if (self.other_waiting or self.other_running) and age <= STALE:
            tokens += max(self.other_waiting * self.typical_prompt - predictor.drain_rate * age, 0.0)
            waiting += self.other_waiting
            running += self.other_running
        return tokens, waiting, running

    def work(self, tokens: int, hit: int, now: float) -> PrefillWork:
        """Work of a prompt of `tokens` tokens, `hit` of these cached, sent now."""
        queued, _, running = self._queue_at(now)
        context, uncached = self.interference.context + self.peer_load.decoding_context, tokens - hit
        return PrefillWork(
            prompt_tokens=tokens,
            uncached=uncached,
            queued_tokens=queued,
            pairs=uncached * (hit + 0.5 * uncached) + queued * self.predictor.context_per_token,
            running=running + context * CONTEXT_WEIGHT,
        )

    def loadable(self, prompt: PoolEstimate, hit: int, load: Load) -> tuple[int, tuple[int, ...]]:
        """Tokens of the hit, and those to load, by tier. A load that would wait for blocks of the GPU is no hit: these
        come when answers end, and another engine computes the prompt meanwhile."""
        to_load = self.cache.to_load(prompt, hit)
        if to_load and load.kv_room < prompt.tokens - hit + sum(to_load):
            return hit - sum(to_load), ()
        return hit, to_load

    def statistics(self, now: float) -> EndpointStatistics:
        load, residency = self.load(now), self.cache.residency
        ratios = self.predictor.quantiles(load.queued_tokens, now)
        return EndpointStatistics(
            endpoint=self.endpoint,
            load=load,
            breaker=self.breaker.state.value,
            why="; ".join(filter(None, (self.breaker.why, *self.notes))),
            until=self.breaker.until,
            openings=self.breaker.openings,
            calibration=self.calibration.rounded(),
            samples=self.predictor.samples,
            prefill_rate=self.predictor.prefill_rate(0.0),
            error=(ratios[2], ratios[6], ratios[10]),
            tpot=load.tpot,
            block_tokens=self.block_tokens,
            prefix_blocks=len(self.cache.index),
            prefix_capacity=self.cache.index.capacity,
            resident=None if residency is None else residency.statistics(),
            variants=() if self.variants is None else self.variants.loaded,
            believed=self.believed(load, now),
            rtt=self.rtt or None,
        )

    def believed(self, load: Load, now: float) -> tuple[Belief, ...]:
        """Beliefs that keep requests away from the endpoint. `load`: for all callers."""
        limited = [*self.limits.reasons(load.limits, self.breaker.unpaid_until, now)]
        if self.queue_cap is not None:
            limited.extend(self.queue_cap.reasons(now))
        return tuple(beliefs(load, self.breaker, self.callers.states.values(), limited, now, self.load_fault))

    @property
    def notes(self) -> tuple[str, ...]:
        """Reasons of the engine's own for fewer requests."""
        fault = self.load_fault if self.load_fault != self.breaker.why else ""
        drained, asleep = DRAINED if self.drained else "", ASLEEP if self.sleep.asleep else ""
        return tuple(filter(None, (drained, asleep, fault and f"its load is not known: {fault}")))

    def limits_in_force(self, now: float) -> tuple[Belief, ...]:
        """Limits for which requests of all callers, or of some, do not go there now."""
        limited = self.limits.reasons(self._send_limits(), self.breaker.unpaid_until, now)
        return tuple(limits(self.callers.states.values(), limited, now))

    def record_prompt(self, key: Hashable, prompt: PoolEstimate, session: str) -> PendingPrompt:
        """Assumes that the engine will have cached this prompt."""
        self.observe_block_size(prompt.blocks.size * prompt.blocks.scale)
        return self.cache.on_sent(key, prompt, session)

    def observe_block_size(self, tokens: float) -> None:
        """`tokens`: the engine's, in one of the estimator's blocks."""
        self._mean_block_tokens += (tokens - self._mean_block_tokens) * EWMA_WEIGHT
        if abs(self._mean_block_tokens - self.block_tokens) > BLOCK_TOLERANCE * self.block_tokens:
            self.block_tokens = self._mean_block_tokens
            self.cache.index.resize(self.blocks)

    def on_model(self, model: str) -> str:
        """Returns the model served before, if this is another. Times learned of a model return with the model."""
        before, self.model = self.model, model
        if before in ("", model):
            return ""
        self._times[before] = self.predictor, self.tpot_predictor, self.calibration
        unknown = self._new_predictor(), TpotPredictor(), Calibration()
        times = self._times.pop(model, unknown)
        self.predictor, self.tpot_predictor = times[:2]
        self.calibration, self.pace = times[2], ErrorQuantiles()
        if len(self._times) > MAX_MODELS:
            del self._times[next(iter(self._times))]
        self.teacher_samples = 0
        return before

    def on_load_unknown(self, fault: str, now: float) -> None:
        """The load report failed. Learned values stay; load is counted from the gateway's own requests."""
        self.load_fault, self.scraped_at = fault, NEVER
        self.engine = replace(self.engine, running=None, waiting=None, kv_usage=None)
        self.other_running = self.other_waiting = self._excess = 0
        self.sleep.on_unknown(now)

    def assume_others(self, running: int, waiting: int) -> None:
        """Assume other traffic at an engine without load report, as reported by sibling engines."""
        self.other_running, self.other_waiting = running, waiting

    def on_scrape(self, engine: EngineLoad, now: float) -> bool:
        """Take a load report. True: the engine has restarted, slept or woken since the last scrape, and lost its
        cache."""
        slept = self._on_sleep(bool(engine.asleep), now)
        restarted = slept or has_restarted(self.engine, engine, _prefix_totals)
        self.engine = engine
        self.scraped_at, self.load_fault = now, ""
        evicted = None if self.cache.residency is None else self.cache.residency.evicted
        self.rates.note(
            EngineCounters(engine.preemptions, engine.drafted, engine.accepted, evicted, engine.rejections), now
        )
        self.block_size = engine.block_size or self.block_size
        if engine.kv_blocks:
            self.kv_tokens = engine.kv_blocks * self.block_size
        if engine.kv_blocks or self.cache.slower_tokens:
            self.cache.index.resize(self.blocks)
        self.kv_room.on_scrape(engine, self._queue_at(now)[0], now)
        if self.variants is not None:
            self.variants.on_scrape(engine.variants, engine.variant_slots)
        # Only requests beyond ours in two scrapes in a row count: one scrape may be older than our last attempt.
        running, waiting = engine.running or 0, engine.waiting or 0
        prefilling = len(self.inflight.prefilling) + self.peer_load.prefilling
        excess = 0 if restarted else max(0, running + waiting - self.decoding[0] - prefilling)
        others = min(excess, self._excess)
        self._excess = excess
        self.other_waiting = min(max(0, waiting - prefilling), others)
        self.other_running = others - self.other_waiting
        return restarted

    def on_drained(self, drained: bool) -> None:
        """An operator takes the endpoint out, or has it ready again: what it has refused before may be mended."""
        self.drained = drained
        if not drained:
            self.breaker.on_reload()
            self.callers.on_reload()

    def on_woken(self, seconds: float, now: float) -> None:
        """The engine was woken, in so many seconds."""
        self.sleep.on_woken(seconds, now)
        self.breaker.on_woken(now)

    def _on_sleep(self, asleep: bool, now: float) -> bool:
        changed = self.sleep.on_told(asleep, now)
        if changed and not asleep:
            self.breaker.on_woken(now)
        return changed
