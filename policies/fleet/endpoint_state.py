"""All that is learned of one endpoint, and how its load follows from it."""

from __future__ import annotations

from dataclasses import dataclass

from policies.fleet.circuit_breaker import LONGEST_EJECTION, Breaker
from policies.fleet.decode_interference import NOBODY, DecodeInterference, reopens_in
from policies.fleet.inflight_tokens import InflightTokens, Queue
from policies.fleet.learned_rate_limit import LearnedRateLimit
from policies.fleet.peers import NOTHING, PeerLoad, added
from policies.latency.calibration import Calibration, CalibrationStatistics
from policies.latency.tpot_predictor import TpotPredictor
from policies.latency.ttft_predictor import READ, ApiPredictor, EnginePredictor, Predictor, Work
from policies.prefix_cache.prefix_index import PrefixStatistics
from policies.prefix_cache.residency import ResidencyStatistics
from policies.types import FOREVER, NEVER, Endpoint, EngineLoad, Load, Pool

STALE = 5.0  # s after which a scrape says nothing about other traffic
TYPICAL_PROMPT = 1_000.0  # uncached tokens of other traffic's prompts, before we know our own
MEMORY = 1 / 32  # weight of the latest prompt in means
API_EJECTION = 10.0  # s: no probe tells when an API is back, so ask again soon
BLOCK_TOLERANCE = 0.05  # of a block's size: the token scale differs a little from prompt to prompt
LEAST_LEFT = 0.1  # of its time, that an engine decodes, however much it prefills
RESTART = 1.0  # s by which an engine's own start time must move to be another start

_new = tuple.__new__  # half of what a named tuple's own constructor takes


@dataclass(frozen=True, slots=True)
class EndpointStatistics:
    """One endpoint, for people."""

    endpoint: Endpoint
    load: Load
    breaker: str
    why: str  # it is not closed
    until: float  # when its ejection ends; NEVER, or in the past, where it is over
    openings: int  # that followed one another
    calibration: CalibrationStatistics | None
    samples: int
    prefill_rate: float  # tokens/s, of prompts without context
    error: tuple[float, float, float]  # actual / predicted TTFT: p10, p50, p90
    tpot: float  # s, at the present load
    block_size: int  # tokens
    prefix_blocks: int  # believed cached, in the estimator's blocks
    prefix_capacity: int  # of them, that the index bounds itself to
    resident: ResidencyStatistics | None  # by the engine's own events, in its blocks


class EndpointState:
    """One endpoint: ledger, breaker and models, and what its last scrape said."""

    __slots__ = (
        "_excess",
        "_mean_block",
        "_others_running",
        "_others_waiting",
        "_told",
        "_typical",
        "block_size",
        "block_tokens",
        "breaker",
        "calibration",
        "context",
        "endpoint",
        "engine",
        "kv_tokens",
        "last_token_at",
        "ledger",
        "local",
        "pace",
        "pool",
        "predictor",
        "quota",
        "rate",
        "scraped_at",
        "stall",
        "taught_by",
        "theirs",
        "used_at",
        "warming",
    )

    def __init__(self, endpoint: Endpoint, pool: Pool) -> None:
        self.endpoint, self.pool, self.local = endpoint, pool, pool.local
        self.ledger = InflightTokens()
        self.breaker = Breaker(LONGEST_EJECTION if pool.local else API_EJECTION)
        self.calibration = Calibration()
        self.predictor: Predictor = EnginePredictor() if pool.local else ApiPredictor()
        self.pace = TpotPredictor()
        self.stall = DecodeInterference()
        self.quota: LearnedRateLimit | None = None if pool.local else LearnedRateLimit()
        self.block_size = pool.block_size  # the engine's
        self.block_tokens = self._mean_block = float(pool.block_size)  # engine tokens in one block of the estimator
        self.kv_tokens = pool.kv_tokens
        self.engine = EngineLoad()
        self.scraped_at = self.used_at = self.last_token_at = NEVER
        self.taught_by = 0  # samples of the sibling that knew most when this one was taught
        self.warming = False
        self._others_running = self._others_waiting = self._excess = 0
        self._typical = TYPICAL_PROMPT
        self.theirs = NOTHING  # what siblings have under way there
        self._told = 0.0  # s of prefill in `stall.spent` that are theirs
        self.context = 0.0  # attention pairs per token ahead, as of the last `load`
        self.rate = self.predictor.top_rate  # tokens/s, as of the last `load`

    @property
    def blocks(self) -> int:
        """How many of the estimator's blocks the engine's cache has room for."""
        return max(1, int(self.kv_tokens / self.block_tokens))

    @property
    def queue(self) -> Queue:
        """What waits there, whoever sent it."""
        own = self.ledger.queue
        return own if self.theirs is NOTHING else self.theirs.beside(own, self.last_token_at)

    @property
    def answering(self) -> int:
        """Answers being written there, whoever asked."""
        own = len(self.ledger.answering)
        return own if self.theirs is NOTHING else own + self.theirs.running

    @property
    def attended(self) -> int:
        """Tokens that they attend to."""
        own = self.stall.context
        return own if self.theirs is NOTHING else own + self.theirs.context

    @property
    def burden(self) -> PeerLoad:
        """What we have under way there, for siblings."""
        ledger, stall, breaker = self.ledger, self.stall, self.breaker
        tokens, pairs, remainder, since = ledger.queue
        waiting = ledger.prefilling
        return PeerLoad(
            ledger.in_flight,
            waiting,
            tokens,
            pairs,
            remainder,
            stall.context,
            int(self.warming),
            since if waiting else FOREVER,
            self.last_token_at,
            self.used_at,
            breaker.blocked_until,
            breaker.down_at,
            stall.spent - self._told,
            *(stall.writing if stall.answers else NOBODY),
            stall.expected_tpot_misses,
        )

    def on_peer_load(self, theirs: PeerLoad, now: float) -> None:
        """What siblings have under way there has changed. Their prefills stall our answers as our own do."""
        spent = theirs.spent - self.theirs.spent
        if spent > 0:  # less: one of them has begun anew
            self.stall.prefill(spent, now)
            self._told += spent
        self.last_token_at, self.used_at = (
            max(self.last_token_at, theirs.last_token_at),
            max(self.used_at, theirs.used_at),
        )
        self.theirs = theirs

    def load(self, now: float) -> Load:
        ahead, running, waiting = self._look(now)
        ledger, stall, theirs, busy = self.ledger, self.stall, self.theirs, ahead / self.rate
        prefilling, blocked, warming = len(ledger.waiting), self.breaker.blocked_until, self.warming
        in_flight, context, harm, writing = (
            prefilling + len(ledger.answering),
            stall.context,
            stall.expected_tpot_misses,
            NOBODY,
        )
        if self.quota is not None:
            blocked = max(blocked, self.quota.full_until(now))
        if theirs is not NOTHING:
            in_flight, prefilling = in_flight + theirs.in_flight, prefilling + theirs.prefilling
            context, harm, blocked = (
                self.attended,
                added(harm, theirs.expected_tpot_misses),
                max(blocked, theirs.blocked_until),
            )
            writing, warming = theirs.writing, warming or theirs.warming > 0
        duty, pace = stall.prefill_utilization(now), self.pace.predict(running, context)
        alone = pace if running < 2 else self.pace.predict(1, context / running)
        strain, left = stall.tpot_pressure(alone, writing), 1 - duty
        return Load(
            now,
            self.breaker.health(now),
            in_flight,
            prefilling,
            ahead,
            running,
            waiting,
            self.engine.kv_usage or 0.0,
            self.scraped_at,
            blocked,
            busy,
            0.0,
            harm,
            stall.since,
            strain,
            reopens_in(strain, busy) if strain else 0.0,
            duty,
            pace / (left if left > LEAST_LEFT else LEAST_LEFT),
            context,
            self.last_token_at,
            warming,
        )

    def _look(self, now: float) -> tuple[float, int, int]:
        """Tokens ahead of a prompt, and requests that decode and that wait; how fast what is ahead drains."""
        ledger, theirs, ahead = self.ledger, self.theirs, 0.0
        if ledger.waiting:
            ledger.expire(now, self.rate)
        waiting, running = len(ledger.waiting), len(ledger.answering)
        if theirs is not NOTHING:
            waiting, running = waiting + theirs.prefilling, running + theirs.running
        if waiting:
            queue = self.queue
            self.context = queue.context
            self.rate = self.predictor.rate(self.context)
            ahead = queue.ahead(now, self.rate)
        else:
            self.context, self.rate = 0.0, self.predictor.top_rate
        if (self._others_waiting or self._others_running) and now - self.scraped_at <= STALE:
            ahead += max(self._others_waiting * self._typical - self.rate * (now - self.scraped_at), 0.0)
            waiting += self._others_waiting
            running += self._others_running
        return ahead, running, waiting

    def work(self, tokens: int, hit: int, now: float) -> Work:
        """What a prompt sent now makes it do, and behind what."""
        ahead, running, _ = self._look(now)
        uncached = tokens - hit
        pairs = uncached * (hit + 0.5 * uncached) + ahead * self.context
        return _new(Work, (tokens, uncached, ahead, pairs, running + self.attended * READ))

    def progress(self, now: float) -> None:
        self.stall.look(self.pace.predict(self.answering, self.attended), now)

    def statistics(
        self, prefix: PrefixStatistics, resident: ResidencyStatistics | None, now: float
    ) -> EndpointStatistics:
        load = self.load(now)
        ratios = self.predictor.quantiles(load.queued_tokens, now)
        return EndpointStatistics(
            endpoint=self.endpoint,
            load=load,
            breaker=self.breaker.state.value,
            why=self.breaker.why,
            until=self.breaker.until,
            openings=self.breaker.openings,
            calibration=self.calibration.statistics(),
            samples=self.predictor.samples,
            prefill_rate=self.predictor.rate(0.0),
            error=(ratios[2], ratios[6], ratios[10]),
            tpot=load.tpot,
            block_size=self.block_size,
            prefix_blocks=prefix.blocks,
            prefix_capacity=prefix.capacity,
            resident=resident,
        )

    def measure(self, block_tokens: float) -> bool:
        """The estimator's blocks are about this large; whether that changes how many there is room for."""
        self._mean_block += (block_tokens - self._mean_block) * MEMORY
        if abs(self._mean_block - self.block_tokens) <= BLOCK_TOLERANCE * self.block_tokens:
            return False
        self.block_tokens = self._mean_block
        return True

    def seen(self, uncached: int) -> None:
        """One more prompt of ours, from which other traffic's are guessed."""
        self._typical += (uncached - self._typical) * MEMORY

    def scraped(self, engine: EngineLoad, now: float) -> bool:
        """Take in a scrape; whether it shows that the engine restarted."""
        restarted = _restarted(self.engine, engine)
        self.engine, self.scraped_at = engine, now
        self.block_size = engine.block_size or self.block_size
        if engine.kv_blocks:
            self.kv_tokens = engine.kv_blocks * self.block_size
        self._reconcile(engine.running or 0, engine.waiting or 0, restarted)
        return restarted

    def _reconcile(self, running: int, waiting: int, restarted: bool) -> None:
        """Other traffic is what two scrapes in a row show beyond ours: one may just be older than our news."""
        prefilling = self.ledger.prefilling + self.theirs.prefilling
        excess = 0 if restarted else max(0, running + waiting - self.answering - prefilling)
        others, self._excess = min(excess, self._excess), excess
        self._others_waiting = min(max(0, waiting - prefilling), others)
        self._others_running = others - self._others_waiting

    def warm_start_from(self, sibling: EndpointState, now: float) -> None:
        """Nothing is known of this endpoint: expect of it what its sibling does."""
        self.predictor.warm_start_from(sibling.predictor, now)
        self.pace.warm_start_from(sibling.pace)


def _restarted(before: EngineLoad, after: EngineLoad) -> bool:
    if before.started_at is not None and after.started_at is not None:
        return abs(after.started_at - before.started_at) > RESTART
    return _backwards(before.prefix_queries, after.prefix_queries) or _backwards(before.prefix_hits, after.prefix_hits)


def _backwards(before: float | None, after: float | None) -> bool:
    return before is not None and after is not None and after < before
