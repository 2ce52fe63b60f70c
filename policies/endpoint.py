"""All that is learned of one endpoint, and how its load follows from it."""

from __future__ import annotations

from dataclasses import dataclass

from policies.breaker import LONGEST_EJECTION, Breaker
from policies.facts import NEVER, Endpoint, EngineLoad, Forecast, Load, Pool
from policies.ledger import REMAINDER, Ledger
from policies.pace import Pace
from policies.predictor import ApiPredictor, EnginePredictor, Predictor
from policies.prefix import PrefixStatistics
from policies.quota import Quota
from policies.residency import ResidencyStatistics
from policies.stall import Stall, closed

STALE = 5.0  # s after which a scrape says nothing about other traffic
TYPICAL_PROMPT = 1_000.0  # uncached tokens of other traffic's prompts, before we know our own
MEMORY = 1 / 32  # weight of the latest prompt in means
API_EJECTION = 10.0  # s: no probe tells when an API is back, so ask again soon
BLOCK_TOLERANCE = 0.05  # of a block's size: the token scale differs a little from prompt to prompt
READ = 5e-4  # requests that decode: a token of context that must be read for one slows a step by as much
LEAST_LEFT = 0.1  # of its time, that an engine decodes, however much it prefills
RESTART = 1.0  # s by which an engine's own start time must move to be another start


@dataclass(frozen=True, slots=True)
class EndpointStatistics:
    """One endpoint, for people."""

    endpoint: Endpoint
    load: Load
    breaker: str
    openings: int  # that followed one another
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
        "_typical",
        "block_size",
        "block_tokens",
        "breaker",
        "context",
        "endpoint",
        "engine",
        "heard_at",
        "kv_tokens",
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
        "used_at",
        "warming",
    )  # fmt: skip

    def __init__(self, endpoint: Endpoint, pool: Pool) -> None:
        self.endpoint, self.pool, self.local = endpoint, pool, pool.local
        self.ledger = Ledger()
        self.breaker = Breaker(LONGEST_EJECTION if pool.local else API_EJECTION)
        self.predictor: Predictor = EnginePredictor() if pool.local else ApiPredictor()
        self.pace = Pace()
        self.stall = Stall()
        self.quota: Quota | None = None if pool.local else Quota()
        self.block_size = pool.block_size  # the engine's
        self.block_tokens = self._mean_block = float(pool.block_size)  # engine tokens in one block of the estimator
        self.kv_tokens = pool.kv_tokens
        self.engine = EngineLoad()
        self.scraped_at = self.used_at = self.heard_at = NEVER
        self.taught_by = 0  # samples of the sibling that knew most when this one was taught
        self.warming = False
        self._others_running = self._others_waiting = self._excess = 0
        self._typical = TYPICAL_PROMPT
        self.context = 0.0  # attention pairs per token ahead, as of the last `load`
        self.rate = self.predictor.rate(0.0)  # tokens/s, as of the last `load`

    @property
    def blocks(self) -> int:
        """How many of the estimator's blocks the engine's cache has room for."""
        return max(1, int(self.kv_tokens / self.block_tokens))

    def load(self, now: float) -> Load:
        ledger, breaker = self.ledger, self.breaker
        ledger.expire(now, self.rate)
        queue = ledger.queue
        self.context = queue.context
        self.rate = rate = self.predictor.rate(self.context)
        fresh = now - self.scraped_at <= STALE
        waiting = self._others_waiting if fresh else 0
        others = max(waiting * self._typical - rate * (now - self.scraped_at), 0.0) if waiting else 0.0
        running = ledger.in_flight - ledger.prefilling + (self._others_running if fresh else 0)
        ahead, stall = queue.ahead(now, rate) + others, self.stall
        duty, pace = stall.duty(now), self.pace.predict(running, stall.context)
        strain = stall.strain(pace)
        return Load(
            at=now,
            health=breaker.health(now),
            in_flight=ledger.in_flight,
            prefilling=ledger.prefilling,
            ahead=ahead,
            running=running,
            waiting=ledger.prefilling + waiting,
            kv_usage=self.engine.kv_usage or 0.0,
            scraped_at=self.scraped_at,
            blocked_until=self._blocked_until(now),
            busy=ahead / rate,
            harm=stall.harm,
            stalled=stall.since,
            strain=strain,
            closed=closed(strain, ahead / rate),
            duty=duty,
            tpot=pace / max(1 - duty, LEAST_LEFT),
            context=stall.context,
            warming=self.warming,
            heard_at=self.heard_at,
        )

    def _blocked_until(self, now: float) -> float:
        blocked = self.breaker.blocked_until
        return blocked if self.quota is None else max(blocked, self.quota.full_until(now))

    def work(self, load: Load, prompt_tokens: int, hit: int, now: float) -> tuple[int, int, float, float, float]:
        """The fields of a `Work`."""
        uncached, ahead = prompt_tokens - hit, load.ahead
        pairs = uncached * (hit + 0.5 * uncached)
        if ahead:
            ahead = max(ahead - self.rate * (now - load.at), ahead * REMAINDER)
            pairs += ahead * self.context
        return prompt_tokens, uncached, ahead, pairs, load.running + load.context * READ

    def forecast(self, load: Load, prompt_tokens: int, hit: int, now: float) -> Forecast:
        predictor, uncached = self.predictor, prompt_tokens - hit
        own = predictor.seconds(uncached, uncached * (hit + 0.5 * uncached))
        if load.ahead or not self.local:
            wait = max(load.wait, load.blocked_until - now)
            center = wait + predictor.center(*self.work(load, prompt_tokens, hit, now), now)
        else:
            center = load.wait + predictor.idle(prompt_tokens, own, load.running + load.context * READ)
        return Forecast(center, predictor.quantiles(load.ahead, now), load.tpot, predictor.samples, own)

    def progress(self, now: float) -> None:
        self.stall.look(self.pace.predict(self.ledger.in_flight - self.ledger.prefilling, self.stall.context), now)

    def statistics(
        self, prefix: PrefixStatistics, resident: ResidencyStatistics | None, now: float
    ) -> EndpointStatistics:
        load = self.load(now)
        ratios = self.predictor.quantiles(load.ahead, now)
        return EndpointStatistics(
            endpoint=self.endpoint,
            load=load,
            breaker=self.breaker.state.value,
            openings=self.breaker.openings,
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
        excess = 0 if restarted else max(0, running + waiting - self.ledger.in_flight)
        others, self._excess = min(excess, self._excess), excess
        self._others_waiting = min(max(0, waiting - self.ledger.prefilling), others)
        self._others_running = others - self._others_waiting

    def follow(self, sibling: EndpointState, now: float) -> None:
        """Nothing is known of this endpoint: expect of it what its sibling does."""
        self.predictor.follow(sibling.predictor, now)
        self.pace.follow(sibling.pace)


def _restarted(before: EngineLoad, after: EngineLoad) -> bool:
    if before.started_at is not None and after.started_at is not None:
        return abs(after.started_at - before.started_at) > RESTART
    return _backwards(before.prefix_queries, after.prefix_queries) or _backwards(before.prefix_hits, after.prefix_hits)


def _backwards(before: float | None, after: float | None) -> bool:
    return before is not None and after is not None and after < before
