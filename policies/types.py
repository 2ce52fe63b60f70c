"""The values of decisions.

Rules:
- Values move forward: no field is assigned to after construction.
- Values made for every request or attempt are plain dataclasses: a frozen dataclass costs 0.2 us a field more.
- Times are seconds of one monotonic clock; durations are seconds; tokens are the engine's own.
- No sockets, bytes or YAML here: `backends` speaks, `gateway` drives.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from math import exp, hypot, log
from typing import ClassVar

from policies.prompt_outline import PromptOutline
from policies.rate_limit.send_limits import UNLIMITED, SendLimits
from policies.variants import Variants

NEVER = float("-inf")
FOREVER = float("inf")
TINY = 1e-9
LONG_WRITE = 2.0  # times the price of input
UNKNOWN_TTFT: Mapping[str, float] = {"": 0.4}  # s to the first token of an API, before any; a guess

# --------------------------------------------------------------------------- the fleet


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server of a pool, or one of several keys of a server. `id` is unique in the fleet and stable over reloads:
    `small/10.0.0.11:8000`, `api/api.example.com:443/key2`."""

    id: str
    pool: str
    locality: str = ""  # where the endpoint is; read by hooks and Records
    first_token_limit: float | None = None  # s, in place of the default
    server: str = ""  # equal for all keys of a server; empty: there is one
    stream_idle: float | None = None  # s without a byte in mid-stream, in place of the default
    host: str = field(default="", compare=False)  # host and port of the URL, equal for ranks and keys; empty: not told
    account: str = field(default="", compare=False)  # the server and the account there, in any pool; empty: unknown
    limit_is_meant: bool = False  # `first_token_limit` is of the configuration, not assumed


@dataclass(frozen=True, slots=True)
class Price:
    """USD per million tokens. None: as `input`; `cache_write_1h`: see `long_write`."""

    input: float = 0.0
    output: float = 0.0
    cached_input: float | None = None  # read from the server's prompt cache
    cache_write: float | None = None  # written into it
    cache_write_1h: float | None = None  # the same, to be kept for an hour or longer
    long: tuple[int, Price] | None = None  # tokens of a prompt from which all tokens of its request cost another price
    speeds: Mapping[str, float] = field(default_factory=dict, hash=False)  # factor on all of these, by speed

    def of(
        self,
        input_tokens: float,
        output_tokens: float,
        cached: float = 0.0,
        written: float = 0.0,
        written_1h: float = 0.0,
    ) -> float:
        """USD of a request. `cached`, `written`: of the input tokens; `written_1h`: of `written`."""
        if self.long is not None and input_tokens >= self.long[0]:
            return self.long[1].of(input_tokens, output_tokens, cached, written, written_1h)
        if not (cached or written):  # as every decision asks
            return (input_tokens * self.input + output_tokens * self.output) / 1e6
        cached = min(cached, input_tokens)
        written = min(written, input_tokens - cached)
        usd = (input_tokens - cached - written) * self.input + output_tokens * self.output
        usd += cached * (self.input if self.cached_input is None else self.cached_input)
        if written:
            kept = min(written_1h, written)
            usd += (written - kept) * (self.input if self.cache_write is None else self.cache_write)
            usd += kept * self.long_write
        return usd / 1e6

    def factor(self, *speeds: str) -> float:
        """Factor of the prices of a request served at a speed, by the server's name; of several, the dearest. 1: no own
        price is known."""
        return max([self.speeds.get(speed, 1.0) for speed in speeds], default=1.0)

    @property
    def long_write(self) -> float:
        """Price of cache writes kept an hour or longer. Default: the price of other writes, or at least LONG_WRITE
        times the input price if writes cost more than input, as at all providers with two prices (2026-11)."""
        if self.cache_write_1h is not None:
            return self.cache_write_1h
        write = self.input if self.cache_write is None else self.cache_write
        return max(write, LONG_WRITE * self.input) if write > self.input else write

    def at_most(self, input_tokens: float, output_tokens: float) -> float:
        """USD of a request, whatever is cached."""
        if self.long is not None and input_tokens >= self.long[0]:
            return self.long[1].at_most(input_tokens, output_tokens)
        dearest = max(self.input, self.cached_input or 0.0, self.cache_write or 0.0, self.long_write)
        return (input_tokens * dearest + output_tokens * self.output) / 1e6


@dataclass(frozen=True, slots=True)
class PromptCacheTerms:
    """Prompts that an API keeps, to be read again at a lower price."""

    lifetime: float  # s since the latest use
    least: int = 0  # tokens of the shortest prefix that is kept


@dataclass(frozen=True, slots=True)
class Pool:
    """Interchangeable endpoints with the same model.

    `local` pools are engines, with modelled queue, prefill and prefix cache; the rest are APIs with observable
    latencies and rate limits only. `capabilities` None means unknown, and filters nothing.
    """

    name: str
    model: str
    endpoints: tuple[Endpoint, ...]
    local: bool = True
    context_window: int | None = None
    default_output: int | None = None  # tokens, if the servers require a limit and none is set
    capabilities: frozenset[str] | None = None
    price: Price = Price()
    block_size: int = 16
    kv_tokens: int = 400_000  # prefix cache capacity until reported by the engine
    concurrent_requests: int | None = None  # maximum at each endpoint
    variants: Variants | None = None  # of the model, which engines load when asked for
    requests_per_minute: float | None = None  # to each endpoint, from this process
    tokens_per_minute: float | None = None  # of prompts and answers
    wakes: bool = False  # sleeping engines are woken for requests that no other endpoint of the pool can take
    prior_ttft: Mapping[str, float] = field(
        default_factory=lambda: UNKNOWN_TTFT, hash=False
    )  # s, of an API, by job class
    prompt_cache: PromptCacheTerms | None = None  # of an API; None: not known, or no cheaper


class Health(Enum):
    """Result of the circuit breaker of an endpoint, of its own word, or of an operator's."""

    UP = "up"
    PROBING = (
        "probing"  # half-open: the next request is the trial; until its end the endpoint is DOWN for all other requests
    )
    DOWN = "down"
    ASLEEP = "asleep"  # as reported by the engine: requests would wait for a wake-up
    DRAINING = "draining"  # as wanted by an operator: only requests in progress are left there


UNUSABLE = (Health.DOWN, Health.ASLEEP, Health.DRAINING)


@dataclass(slots=True)
class Load:
    """Load of an endpoint at time `at`.

    `queued_tokens` counts uncached prompt tokens of our own attempts without a first token yet; the count drains with
    time. `running` and `waiting` are the engine's, as of `scraped_at`.
    """

    at: float = NEVER
    health: Health = Health.UP
    failing: bool = False  # down, but maybe not unreachable: a last resort
    wake_s: float = 0.0  # s to wake the endpoint, while asleep; 0: nothing wakes it
    doubted: bool = False  # down by the word of a page alone, and tried where nothing else is up
    on_trial: bool = False  # down until the end of a trial request
    in_flight: int = 0  # our attempts not ended
    prefilling: int = 0  # of these, without a first token
    queued_tokens: float = 0.0
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    kv_room: float = FOREVER  # tokens that find free blocks in the engine's KV cache; FOREVER: unknown
    scraped_at: float = NEVER
    limits: SendLimits = UNLIMITED  # rate limits of the provider and of the configuration
    unknown_variants: Mapping[str, float] | None = None  # refused there: until when
    full: bool = False  # as many requests as the configuration allows
    backlog_s: float = 0.0  # s of prefill of `queued_tokens`
    wait: float = 0.0  # s in the gateway's own queue before a request is sent there
    expected_tpot_misses: tuple[float, ...] = ()  # answers missing TPOT by stall (policies.latency.tpot)
    stalled: float = 0.0  # s of prefill sent since `expected_tpot_misses` was computed
    tpot_pressure: float = 0.0  # of the answers in progress: from 1 on another prefill is too much
    reopens_in: float = 0.0  # s until the answers in progress can bear another prefill
    prefill_utilization: float = 0.0  # recent share of time spent on prefill
    tpot: float = 0.0  # s per output token of an answer there now
    context: float = 0.0  # tokens attended to by the answers in progress
    last_token_at: float = NEVER  # time of the last first token
    warming: bool = False  # the lost cache is being refilled: last choice of the pool


@dataclass(frozen=True, slots=True)
class FleetSnapshot:
    """Pools and endpoint loads at a moment."""

    at: float
    pools: Mapping[str, Pool]
    loads: Mapping[str, Load]  # by endpoint id


# --------------------------------------------------------------------------- the request


@dataclass(slots=True)
class RequestView:
    """The part of a request that policies read. The gateway's InferenceRequest adds body and prompt."""

    arrival: float
    stream: bool = False
    max_tokens: int | None = None  # the caller's own, for each choice
    choices: int = 1  # answers to generate: `n` or `best_of`, for each prompt
    user_turns: int = 1
    caller: str = ""  # name of the key, or an address; empty: the gateway itself
    tools: bool = False
    images: bool = False
    json_schema: bool = False
    priority: int = 0
    job_class: str = ""  # of requests whose times and lengths are learned together; empty: no class is named
    headers: Mapping[str, str] = field(default_factory=dict)  # lower-case names; only headers in a `when`
    members: Mapping[str, str] = field(default_factory=dict)  # of the body, which the caller named: those in a `when`
    pinned: str = ""  # id of the endpoint that holds state of this request; empty: any endpoint may serve
    # By pool: the only endpoint that can read its state in this request; other pools go without the state.
    readers: Mapping[str, str] = field(default_factory=dict)
    session: str = ""
    unfit: Mapping[str, str] = field(default_factory=dict)  # pools that cannot serve the request, with the reason
    ttft_budget: float | None = None  # s, asked for by the caller; bounded by the route
    tpot_budget: float | None = None  # s per token
    by: float | None = None  # s from arrival to the last byte, on a route without a TTFT budget


@dataclass(slots=True)
class PartEnds:
    """The ends of a prompt's messages, and of segments within long ones: depths in blocks, ascending, and tokens up to
    there, in any one unit."""

    depths: Sequence[float]
    tokens: Sequence[float]

    def share(self, depth: float) -> float:
        """Share of the prompt's tokens in its first `depth` blocks; linear between two ends."""
        depths, tokens = self.depths, self.tokens
        i = bisect_left(depths, depth)
        if i == len(depths) or not depth:
            return 1.0 if depth else 0.0
        low, below = (depths[i - 1], tokens[i - 1]) if i else (0.0, 0.0)
        return (below + (tokens[i] - below) * (depth - low) / (depths[i] - low)) / tokens[-1]


@dataclass(slots=True)
class PrefixBlocks:
    """Chained hashes of a prompt's full blocks, in order: equal hashes mean equal prefixes.

    `size` is a block's nominal number of tokens; `scale` converts to the engine's, on average over the prompt.
    """

    hashes: Sequence[int] = ()
    size: int = 16
    scale: float = 1.0
    ends: PartEnds | None = None  # None: all blocks have the same number of tokens

    def tokens(self, depth: float) -> float:
        """The engine's tokens in the first `depth` blocks."""
        per_block = self.size * self.scale
        return depth * per_block if self.ends is None else self.ends.share(depth) * self.ends.depths[-1] * per_block


@dataclass(slots=True)
class PoolEstimate:
    """Token count and prefix blocks of a prompt by a pool's tokenizer, corrected by the engine's counts."""

    tokens: int
    blocks: PrefixBlocks = field(default_factory=PrefixBlocks)
    text_tokens: int = 0  # of text, before correction
    messages: int = 1
    variant: str = ""  # of the model, which answers; empty: the model itself
    job_class: str = ""  # of the request
    margin: int = 0  # tokens more or less, nearly always; 0: counted
    counted_text: Callable[[], int] | None = field(default=None, compare=False, repr=False)  # 0: not counted yet
    outline: Callable[[], PromptOutline] | None = field(default=None, compare=False, repr=False)

    def count(self) -> int:
        """Tokens of the text, before correction; 0: not counted yet."""
        return self.text_tokens if not self.margin else 0 if self.counted_text is None else self.counted_text()

    def counted_tokens(self) -> int:
        """Tokens, corrected by a count that came after the estimate; the estimate where there is none yet."""
        text = self.count() if self.margin else 0
        return round(self.tokens * text / self.text_tokens) if text else self.tokens


@dataclass(slots=True)
class PromptEstimate:
    """Estimates by pool, for the pools of the request's route; the expected length of the answer; uncached tokens."""

    pools: Mapping[str, PoolEstimate]
    output_tokens: int = 256
    uncached_tokens: int = 0  # that the best endpoint would have to compute; where the TTFT budget grows with these

    @property
    def counted(self) -> bool:
        """No part of the prompt is estimated."""
        for pool in self.pools.values():  # noqa: SIM110 - a generator costs as much as the rest
            if pool.margin:
                return False
        return True


# --------------------------------------------------------------------------- predictions

Quantiles = tuple[float, ...]  # of a distribution, at QUANTILES: ascending
QUANTILES: Quantiles = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.995)
BEYOND = 1.0 - QUANTILES[-1]  # share of a distribution beyond its last quantile
SLOWER_TIERS = ("cpu", "disk", "remote")  # of an engine's KV cache, below the GPU
TRAINED_SAMPLES = 8  # first tokens, from which a forecast is more than a guess
MEDIAN, NINETIETH = QUANTILES.index(0.5), QUANTILES.index(0.9)


@dataclass(slots=True)
class Forecast:
    """Predicted TTFT from send to first token (seconds, a distribution) and TPOT of a candidate.

    TTFT = `point_estimate` * ratio; `ratios` are the ratio's quantiles at QUANTILES (ascending, shared between
    forecasts). Outside the grid the tails are exponential in the last step.
    """

    point_estimate: float
    ratios: Quantiles = (1.0,) * len(QUANTILES)
    tpot: float = 0.0
    samples: int = 0  # first tokens observed there
    prefill: float = 0.0  # s of engine time for this prompt; 0 for an API
    silent_s: float = (
        0.0  # of an API: budgets up to this have been tried lately in vain; of an engine: a silence learned
    )

    def quantile(self, q: float) -> float:
        """TTFT, s, not exceeded by a share `q` of such requests."""
        return self.point_estimate * self.ratio(q)

    def ratio(self, q: float) -> float:
        """TTFT / `point_estimate`, not exceeded by a share `q` of such requests (linear between grid points)."""
        grid, ratios = QUANTILES, self.ratios
        i = bisect_left(grid, q)
        if i == 0:
            return ratios[0]
        if i == len(grid):
            return ratios[-1]
        low, high = grid[i - 1], grid[i]
        return ratios[i - 1] + (ratios[i] - ratios[i - 1]) * (q - low) / (high - low)

    def probability(self, within: float) -> float:
        """P(TTFT <= `within` seconds), 0 to 1."""
        if within <= 0:
            return 0.0
        ratios = self.ratios
        x = within / (self.point_estimate or TINY)
        if x >= (largest := ratios[-1]):  # the common case: an idle engine and a generous budget
            return 1.0 - BEYOND * largest / x
        i = bisect_right(ratios, x)
        if i == 0:
            return QUANTILES[0] * x / ratios[0]
        low, q = ratios[i - 1], QUANTILES[i - 1]
        return q + (QUANTILES[i] - q) * (x - low) / (ratios[i] - low)

    def followed_by(self, then: Forecast) -> Forecast:
        """Sum of two consecutive times. Deviations from the medians add in quadrature, as for independent
        quantities."""
        unit, middle, ratios = self.point_estimate or TINY, self.p50 + then.p50, []
        for i, (own, other) in enumerate(zip(self.ratios, then.ratios, strict=True)):
            deviation = hypot(own * unit - self.p50, other * then.point_estimate - then.p50)
            ratios.append((middle + (deviation if i > MEDIAN else -deviation)) / unit)
        return Forecast(unit, tuple(ratios), self.tpot, self.samples, self.prefill)

    def or_else(self, longer: Forecast, share: float) -> Forecast:
        """A forecast of which `share` of the requests take as long as `longer` instead: its upper quantiles."""
        times = (longer.quantile(1 - (1 - q) / share) if q > 1 - share else 0.0 for q in QUANTILES)
        unit = self.point_estimate or TINY
        return replace(self, ratios=tuple(max(own, s / unit) for own, s in zip(self.ratios, times, strict=True)))

    @property
    def trained(self) -> bool:
        return self.samples >= TRAINED_SAMPLES

    @property
    def p50(self) -> float:
        return self.point_estimate * self.ratios[MEDIAN]

    @property
    def p90(self) -> float:
        return self.point_estimate * self.ratios[NINETIETH]


@dataclass(slots=True)
class FirstTokenOutlook:
    """The first token of an attempt in flight, as expected now. Times in seconds."""

    since: float  # time from which the forecast counts
    forecast: Forecast
    heard_at: float  # latest token of any answer there
    upcoming: Forecast  # of an attempt at the next candidate, sent now


@dataclass(slots=True)
class Completion:
    """Predicted seconds from send to the last token (a distribution): TTFT + tokens * TPOT.

    `tokens`: quantiles of the answer's length; `pace`: of actual / predicted TPOT; both at QUANTILES. Deviations from
    the medians add up as those of independent quantities: by their squares, of factors by those of the logarithms.
    """

    ttft: Forecast
    tokens: Quantiles
    pace: Quantiles
    tpot: float  # predicted, s

    @property
    def p50(self) -> float:
        return self.ttft.p50 + self.tokens[MEDIAN] * self.median_tpot

    @property
    def p90(self) -> float:
        return self.at(NINETIETH)

    @property
    def median_tpot(self) -> float:
        return self.pace[MEDIAN] * self.tpot

    def at(self, i: int) -> float:
        """Seconds not exceeded by a share QUANTILES[i] of such requests."""
        tokens, pace, ttft, sign = self.tokens, self.pace, self.ttft, 1 if i > MEDIAN else -1
        decode = tokens[MEDIAN] * (pace[MEDIAN] * self.tpot)
        factor = exp(sign * hypot(log(tokens[i] / tokens[MEDIAN]), log(pace[i] / pace[MEDIAN])))
        first = (ttft.ratios[i] - ttft.ratios[MEDIAN]) * ttft.point_estimate
        return ttft.p50 + decode + sign * hypot(decode * (factor - 1), first)

    def probability(self, within: float) -> float:
        """P(last token <= `within` seconds), 0 to 1."""
        last = len(QUANTILES) - 1
        if within >= (longest := self.at(last)):  # the common case
            return 1.0 - BEYOND * longest / within
        return self._probability(within, last)

    def share_of(self, target: float, within: float) -> float:
        """Probability as a share of `target`, at most 1. Usually a single quantile suffices."""
        wanted = bisect_left(QUANTILES, target)
        if wanted == len(QUANTILES):
            return min(self.probability(within) / target, 1.0)
        return 1.0 if within >= self.at(wanted) else min(self._probability(within, wanted) / target, 1.0)

    def _probability(self, within: float, above: int) -> float:
        """Of a time before the quantile `above`."""
        if within <= 0:
            return 0.0
        i = bisect_right(range(above), within, key=self.at)
        if i == 0:
            return QUANTILES[0] * within / self.at(0)
        low, high, q = self.at(i - 1), self.at(i), QUANTILES[i - 1]
        return q + (QUANTILES[i] - q) * (within - low) / (high - low)


# --------------------------------------------------------------------------- the decision


class RankKind(Enum):
    """Reason for the rank of a candidate."""

    VALUE = "value"
    HALF_OPEN = "half_open"  # first, as its circuit breaker is half-open
    STALE = "stale"  # first, as its forecast was not tested lately
    RESERVE = "reserve"  # last, as its tier comes after a failure


@dataclass(slots=True)
class Candidate:
    """An endpoint able to take the request, with state and forecast at decision time."""

    endpoint: Endpoint
    tier: int
    prompt_tokens: int
    hit: int  # tokens, believed cached
    forecast: Forecast
    probability: float  # of the TTFT deadline if sent now, or of `total` where that is all the route promises; or 1
    price: float  # expected USD
    load: Load = field(default_factory=Load)  # before this request
    blocks: PrefixBlocks = field(default_factory=PrefixBlocks, compare=False, repr=False)  # of the prompt
    value: float = 0.0  # good requests (`policies.routing.ranking`); of a baseline's scorer, less its score
    kept: float = 1.0  # chance, once the first token is in time, to keep the TPOT and the total of the route
    place: int = 0  # of the tier in the order of preference
    engine: float = 0.0  # good requests, for the engine time
    ranked_as: RankKind = RankKind.VALUE
    to_load: tuple[int, ...] = ()  # tokens of the hit, by tier of SLOWER_TIERS; empty: all are in the GPU
    rtt: float = 0.0  # s of a round trip to the endpoint, part of the forecast; 0: not measured
    trial_s: float = 0.0  # s left to try an API whose forecast is a guess; 0: no trial

    @property
    def hit_tiers(self) -> dict[str, int]:
        """Tokens of the hit that the engine has to load, by tier."""
        return {tier: tokens for tier, tokens in zip(SLOWER_TIERS, self.to_load, strict=False) if tokens}

    @property
    def uncached(self) -> int:
        return self.prompt_tokens - self.hit


@dataclass(frozen=True, slots=True, eq=False)
class RejectionKind:
    """Reason why an endpoint or a pool cannot take a request; a hook that refuses has kinds of its own. `is_lasting`:
    it holds for this request, whenever it comes; `excludes`: whatever becomes of the endpoint; `others`: the endpoints
    that are left, in words, where these are not all that could take the request."""

    value: str
    is_lasting: bool = False
    excludes: bool = False
    others: str = ""

    WHEN: ClassVar[RejectionKind]  # the tier's `when` is false
    CONTEXT_WINDOW: ClassVar[RejectionKind]
    CAPABILITY: ClassVar[RejectionKind]  # lacks tools, images or schemas
    UNTRANSLATABLE: ClassVar[RejectionKind]  # the pool cannot serve what the request holds
    NOT_ESTIMATED: ClassVar[RejectionKind]  # the pool is new, or gone
    POOL_TAKEN: ClassVar[RejectionKind]  # by an earlier tier
    DOWN: ClassVar[RejectionKind]
    ASLEEP: ClassVar[RejectionKind]
    DRAINED: ClassVar[RejectionKind]  # by an operator
    ON_TRIAL: ClassVar[RejectionKind]  # half-open, with its trial request in progress
    AT_CAP: ClassVar[RejectionKind]
    RATE_LIMITED: ClassVar[RejectionKind]
    WARMING: ClassVar[RejectionKind]  # its cache is being refilled, and a sibling is ready


RejectionKind.WHEN = RejectionKind("when", is_lasting=True)
RejectionKind.CONTEXT_WINDOW = RejectionKind("context_window", is_lasting=True)
RejectionKind.CAPABILITY = RejectionKind("capability", is_lasting=True)
RejectionKind.UNTRANSLATABLE = RejectionKind("untranslatable", is_lasting=True)
RejectionKind.NOT_ESTIMATED = RejectionKind("not_estimated")
RejectionKind.POOL_TAKEN = RejectionKind("pool_taken", is_lasting=True)
RejectionKind.DOWN, RejectionKind.ASLEEP = RejectionKind("down"), RejectionKind("asleep")
RejectionKind.DRAINED = RejectionKind("drained")
RejectionKind.ON_TRIAL, RejectionKind.AT_CAP = RejectionKind("on_trial"), RejectionKind("at_cap")
RejectionKind.RATE_LIMITED, RejectionKind.WARMING = RejectionKind("rate_limited"), RejectionKind("warming")


@dataclass(frozen=True, slots=True)
class Rejection:
    """An endpoint (or a whole pool: endpoint "") unable to take the request, and the reason. Code reads `kind`,
    people read `reason`."""

    pool: str
    endpoint: str
    tier: int
    reason: str
    kind: RejectionKind


class Placement(Enum):
    PLACE = "place"
    SHED = "shed"  # nothing can make the deadline and the route sheds: 429 with Retry-After
    OVERLOADED = "overloaded"  # it is late, and would wait too long: 503 with Retry-After
    UNAVAILABLE = "unavailable"  # nothing usable at all: 503
    RATE_LIMITED = "rate_limited"  # the providers take no more requests before the deadline: 429
    UNFIT = "unfit"  # no tier can ever take this request (context, capabilities): 400


_PLACE = Placement.PLACE  # a member is slow to look up in an enumeration


def _uncompleted(candidate: Candidate) -> Completion | None:
    """Nothing is known of the end of an answer."""


@dataclass(slots=True)
class Decision:
    """Destinations of a request in order of preference: failover never asks again."""

    outcome: Placement
    at: float
    deadline: float  # of the first token, absolute; FOREVER where the route has no TTFT or total budget
    ranked: Sequence[Candidate] = ()
    rejected: tuple[Rejection, ...] = ()
    scorer: str = ""
    target: float = 0.0  # chance of the deadline that the route asks for
    in_time: bool = True  # a candidate makes the deadline with that chance, or the route asks for none
    retry_after: float = 0.0  # s, for SHED, UNAVAILABLE and RATE_LIMITED
    reason: str = ""
    cause: RejectionKind | None = None  # of a refusal
    expected: Forecast | None = None  # TTFT of a request refused for its queue wait
    output_limits: Mapping[str, int] = field(default_factory=dict)  # tokens by pool, if the caller's limit does not fit
    completion: Callable[[Candidate], Completion | None] = field(default=_uncompleted, compare=False, repr=False)
    chosen: Candidate | None = field(init=False)

    def __post_init__(self) -> None:
        self.chosen = self.ranked[0] if self.outcome is _PLACE and self.ranked else None

    @property
    def is_by_value(self) -> bool:
        return self.scorer == "predicted"

    @property
    def is_unbounded(self) -> bool:
        return self.deadline == FOREVER

    @property
    def pools(self) -> Collection[Endpoint]:
        """An endpoint of each pool."""
        return {each.endpoint.pool: each.endpoint for each in self.ranked}.values()


# --------------------------------------------------------------------------- attempts


@dataclass(frozen=True, slots=True)
class AttemptKind:
    """Reason of an attempt. `value`: label of metrics and Records. `continues`: the attempt writes the rest of a broken
    answer; a part that does so names its own kind."""

    value: str
    continues: bool = False

    PRIMARY: ClassVar[AttemptKind]
    FALLBACK: ClassVar[AttemptKind]
    HEDGE: ClassVar[AttemptKind]
    WHOLE: ClassVar[AttemptKind]  # retry at the endpoint unstreamed: the stream could not be assembled
    MENDED: ClassVar[AttemptKind]  # retry at the endpoint with a mended body


AttemptKind.PRIMARY, AttemptKind.FALLBACK = AttemptKind("primary"), AttemptKind("fallback")
AttemptKind.HEDGE = AttemptKind("hedge")
AttemptKind.WHOLE, AttemptKind.MENDED = AttemptKind("whole"), AttemptKind("mended")


@dataclass(slots=True)
class Attempt:
    """A sending of a request to an endpoint. `number` counts from 1 within the request."""

    number: int
    kind: AttemptKind
    candidate: Candidate


class AttemptOutcome(Enum):
    """End of an attempt, for learning and metrics."""

    COMPLETED = "completed"
    FAILED = "failed"  # the endpoint's fault: connect, reset, 5xx, malformed reply
    MISCONFIGURED = "misconfigured"  # the server refuses our key, our name of its model, or the path
    QUOTA = "quota"  # our account with the provider is used up
    RATE_LIMITED = "rate_limited"
    SILENT = "silent"  # abandoned because no token came in time
    REFUSED = "refused"  # a 4xx caused by the request itself: no evidence against the endpoint
    CANCELLED = "cancelled"  # by the gateway: lost hedge, client gone
    BROKEN = "broken"  # failed after the first token
