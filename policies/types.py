"""The values that decisions are made on, and made of.

Rules:
- Every value is frozen. Values move forward: nothing here is filled in later.
- Times are seconds of one monotonic clock; durations are seconds; tokens are the engine's own.
- Nothing here knows of sockets, bytes or YAML: `backends` speaks, `gateway` drives.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import field
from enum import Enum

from policies.value import value

NEVER = float("-inf")
FOREVER = float("inf")
TINY = 1e-9

# --------------------------------------------------------------------------- the fleet


@value
class Endpoint:
    """One server of a pool. `id` is unique in the fleet and stable over reloads: `small/10.0.0.11:8000`."""

    id: str
    pool: str
    region: str = ""


@value
class Price:
    """USD per million tokens."""

    input: float = 0.0
    output: float = 0.0

    def of(self, input_tokens: float, output_tokens: float) -> float:
        """USD of a request."""
        return (input_tokens * self.input + output_tokens * self.output) / 1e6


@value
class Pool:
    """Interchangeable endpoints that serve one model.

    `local` pools are engines whose queue, prefill and prefix cache are modelled; the others are
    APIs, of which only latencies and rate limits can be seen. `capabilities` None means unknown:
    nothing is filtered on it.
    """

    name: str
    model: str
    endpoints: tuple[Endpoint, ...]
    local: bool = True
    context_window: int | None = None
    capabilities: frozenset[str] | None = None
    price: Price = Price()
    block_size: int = 16
    kv_tokens: int = 400_000  # prefix cache capacity until the engine says its own


class Health(Enum):
    """What the monitor believes of an endpoint."""

    UP = "up"
    PROBING = "probing"  # half-open: the next request tries it, and while it does the endpoint is DOWN to others
    DOWN = "down"


@value
class EngineLoad:
    """What an engine says of itself in one scrape. None: it does not say."""

    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None  # 0 to 1
    block_size: int | None = None  # tokens
    kv_blocks: int | None = None  # capacity, in blocks
    started_at: float | None = None  # engine's own wall clock, s; a change means a restart
    prefix_queries: float | None = None  # counters, tokens
    prefix_hits: float | None = None


@value
class Load:
    """What is known of an endpoint's load, at time `at`.

    `ahead` is our own ledger: uncached prompt tokens sent that have produced no first token yet,
    as of `at`; it drains with time. `running` and `waiting` are the engine's, as of `scraped_at`.
    """

    at: float = NEVER
    health: Health = Health.UP
    in_flight: int = 0  # our attempts not ended
    prefilling: int = 0  # of these, without a first token
    queued_tokens: float = 0.0
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    scraped_at: float = NEVER
    blocked_until: float = NEVER  # a provider's rate limit
    backlog_s: float = 0.0  # s of prefill that `ahead` is
    wait: float = 0.0  # s that the gateway itself would hold a request back for it
    expected_tpot_misses: tuple[
        float, ...
    ] = ()  # answers that would lose their pace to a stall (policies.fleet.decode_interference)
    stalled: float = 0.0  # s of prefill sent since that was worked out
    tpot_pressure: float = 0.0  # of the answers being written there: from 1 on they can bear no other prefill
    reopens_in: float = 0.0  # s until the answers being written there can bear another prefill
    prefill_utilization: float = 0.0  # share of its time that it prefills, lately
    tpot: float = 0.0  # s per output token that an answer takes there now
    context: float = 0.0  # tokens that the answers being written there attend to
    last_token_at: float = NEVER  # when its last first token came
    warming: bool = False  # lost its cache and is being given it back: the last to be sent to


@value
class FleetSnapshot:
    """The fleet as one decision sees it."""

    at: float
    pools: Mapping[str, Pool]
    loads: Mapping[str, Load]  # by endpoint id


# --------------------------------------------------------------------------- the request


@value
class RequestView:
    """What policies know of a request (the body stays with the gateway)."""

    route: str
    arrival: float
    stream: bool = False
    max_tokens: int | None = None  # the caller's own, clamped by the route
    turns: int = 1  # user messages
    tools: bool = False
    images: bool = False
    json_schema: bool = False
    priority: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)  # lower-case names; only those a `when` names
    cache_group: str = ""
    session: str = ""
    ttft_budget: float | None = None  # what this caller asked for, s; bounded by the route
    tpot_budget: float | None = None


@value
class PrefixBlocks:
    """Chained hashes of a prompt's full blocks, in order: equal hash means equal prefix up to there.

    `size` tokens of the estimator's count per block; `scale` turns those into the engine's tokens.
    """

    hashes: Sequence[int] = ()
    size: int = 16
    scale: float = 1.0


@value
class PoolEstimate:
    """A prompt as one pool's tokenizer sees it. `tokens` is corrected by what the engine reported before."""

    tokens: int
    blocks: PrefixBlocks = PrefixBlocks()
    text_tokens: int = 0  # the raw count of text, before correction
    messages: int = 1


@value
class PromptEstimate:
    """By pool, for the pools that the request's route names; and the expected answer."""

    pools: Mapping[str, PoolEstimate]
    output_tokens: int = 256


# --------------------------------------------------------------------------- predictions

Quantiles = tuple[float, ...]  # of a distribution, at QUANTILES: ascending
QUANTILES: Quantiles = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.995)
MEDIAN, NINETIETH = QUANTILES.index(0.5), QUANTILES.index(0.9)


def probability_within(center: float, ratios: Quantiles, within: float) -> float:
    """The chance of a `Forecast` that is not made for it."""
    if within <= 0:
        return 0.0
    x = within / (center or TINY)
    if x >= (most := ratios[-1]):  # mostly: a budget is generous to an engine that is idle
        return 1.0 - (1.0 - QUANTILES[-1]) * most / x
    i = bisect_right(ratios, x)
    if i == 0:
        return QUANTILES[0] * x / ratios[0]  # bisect has it: x is less
    low, least = ratios[i - 1], QUANTILES[i - 1]
    return least + (QUANTILES[i] - least) * (x - low) / (ratios[i] - low)


@value
class Forecast:
    """Predicted TTFT from send to first token (seconds, a distribution) and TPOT of one candidate.

    TTFT = `center` * ratio; `ratios` are the ratio's quantiles at QUANTILES (ascending, shared
    between forecasts). Outside the grid the tails are taken as exponential in the last step.
    """

    point_estimate: float
    ratios: Quantiles = (1.0,) * len(QUANTILES)
    tpot: float = 0.0
    samples: int = 0  # how many first tokens stand behind it
    prefill: float = 0.0  # s of the engine's time that this prompt takes; 0 for an API

    def quantile(self, q: float) -> float:
        """The TTFT, s, under which a share `q` of such requests fall (linear between grid points)."""
        grid, ratios = QUANTILES, self.ratios
        i = bisect_left(grid, q)
        if i == 0:
            return self.point_estimate * ratios[0]
        if i == len(grid):
            return self.point_estimate * ratios[-1]
        low, high = grid[i - 1], grid[i]
        return self.point_estimate * (ratios[i - 1] + (ratios[i] - ratios[i - 1]) * (q - low) / (high - low))

    def probability(self, within: float) -> float:
        """P(TTFT <= `within` seconds), 0 to 1."""
        return probability_within(self.point_estimate, self.ratios, within)

    @property
    def p50(self) -> float:
        return self.point_estimate * self.ratios[MEDIAN]

    @property
    def p90(self) -> float:
        return self.point_estimate * self.ratios[NINETIETH]


# --------------------------------------------------------------------------- the decision


@value
class Candidate:
    """An endpoint that could take the request, with everything known of it at decision time."""

    endpoint: Endpoint
    tier: int
    prompt_tokens: int
    hit: int  # tokens, believed cached
    forecast: Forecast
    probability: float  # of making the TTFT deadline if sent now; 1 where the route has none
    price: float  # expected USD
    score: float = 0.0  # the scorer's, smaller is better; its unit is the scorer's own
    reason: str = ""  # why it stands where it stands
    load: Load = Load()  # what was ahead of it there

    @property
    def uncached(self) -> int:
        return self.prompt_tokens - self.hit


@value
class Rejection:
    """An endpoint (or a whole pool: endpoint "") that could not be considered, and why."""

    pool: str
    endpoint: str
    tier: int
    reason: str


class Placement(Enum):
    PLACE = "place"
    SHED = "shed"  # nothing can make the deadline and the route says so: 429 with Retry-After
    UNAVAILABLE = "unavailable"  # nothing usable at all: 503
    UNFIT = "unfit"  # no tier can ever take this request (context, capabilities): 400


_PLACE = Placement.PLACE  # a member is slow to look up in its enumeration


@value
class Decision:
    """Where to send a request, in order of preference: failover never asks again."""

    outcome: Placement
    at: float
    deadline: float  # absolute; FOREVER where the route has no TTFT budget
    ranked: Sequence[Candidate] = ()
    rejected: tuple[Rejection, ...] = ()
    scorer: str = ""
    retry_after: float = 0.0  # s, for SHED and UNAVAILABLE
    reason: str = ""
    rate_limited: float = 0.0  # s that it was held back because of a provider's rate limit

    @property
    def chosen(self) -> Candidate | None:
        return self.ranked[0] if self.outcome is _PLACE else None


# --------------------------------------------------------------------------- attempts


class AttemptKind(Enum):
    PRIMARY = "primary"
    FALLBACK = "fallback"
    HEDGE = "hedge"
    RESCUE = "rescue"


@value
class Attempt:
    """One sending of a request to one endpoint. `number` counts from 1 within the request."""

    number: int
    kind: AttemptKind
    candidate: Candidate


class AttemptOutcome(Enum):
    """How an attempt ended, for beliefs and metrics."""

    COMPLETED = "completed"
    FAILED = "failed"  # the endpoint's fault: connect, reset, 5xx, garbage
    RATE_LIMITED = "rate_limited"
    SILENT = "silent"  # left because no token came in time
    REFUSED = "refused"  # a 4xx that is the request's own fault: says nothing against the endpoint
    CANCELLED = "cancelled"  # our choice: lost hedge, client gone
    BROKEN = "broken"  # died after its first token
