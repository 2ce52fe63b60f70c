"""A route: the model name that callers ask for, and its latency budgets, tiers and limits.

These models are the validated `routes:` section of the YAML, and are read by decisions directly.

Rules:
- Durations are written `250ms`, `2s`, `5m`, always with a unit (`budget: 800` could be ms or s); shares `3%`; sizes
  `32MB`. An error message shows the right form. The JSON Schema allows exactly the forms that validation allows.
- The preset of a route's workload (policies/presets/) supplies missing keys before validation, so the operator's keys
  win one by one: `ttft: {target: 0.99}` keeps the preset's budget.
- `ttft`, `tpot` and `total` can be `off`, which removes a preset's budget.
- Contradictions are errors: a first token due after the whole answer, a tier that no request can reach.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from itertools import accumulate, pairwise
from types import NoneType
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from policies.adapters.known_adapters import knows_adapter
from policies.external_share.external_share import within_share
from policies.external_share.external_use import ExternalUse
from policies.pinned_state import has_its_state
from policies.prefix_doctor.break_class import RepairRule
from policies.route_hooks import Confines, Divide, Fits, Meter, PoolFits
from policies.routes.levels import MOST_ATTEMPTS, MOST_RETRIES, AttemptRules, FailureCause, drawn_order
from policies.routes.region import RoutedRegions
from policies.routes.when import When
from policies.types import FOREVER, Endpoint, RequestView

_UNITS = {"us": (1, 1_000_000), "ms": (1, 1_000), "s": (1, 1), "m": (60, 1), "h": (3600, 1)}  # s, as a fraction
_SIZES = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_MOST_CHARACTERS = 256  # of an alias
_NUMBER = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z%]*)\s*")


def _split(value: str, example: str) -> tuple[float, str]:
    match = _NUMBER.fullmatch(value)
    if match is None:
        raise ValueError(f"'{value}' is not understood; write it like {example}")
    return float(match[1]), match[2]


def seconds(value: Any) -> Any:
    """`250ms` -> 0.25. A bare number is refused: it has no unit."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        raise ValueError(f"{value} has no unit; write '{value}ms' or '{value}s'")
    if not isinstance(value, str):
        raise ValueError("write a duration like 250ms, 2s or 5m")
    number, unit = _split(value, "250ms, 2s or 5m")
    if unit not in _UNITS:
        raise ValueError(f"'{value}' has no unit of time; write it like 250ms, 2s or 5m")
    times, parts = _UNITS[unit]
    return number * times / parts  # 700 * 0.001 is not 0.7


def share(value: Any) -> Any:
    """`3%` -> 0.03; a number from 0 to 1 is unchanged."""
    if isinstance(value, bool):
        raise ValueError("write a share like 3% or 0.03")
    if not isinstance(value, str):
        return value
    number, unit = _split(value, "3% or 0.03")
    if unit not in ("%", ""):
        raise ValueError(f"'{value}' is not a share; write it like 3% or 0.03")
    return number / 100 if unit else number


def size(value: Any) -> Any:
    """`32MB` -> 32000000; a bare number is bytes."""
    if isinstance(value, bool):
        raise ValueError("write a size like 32MB")
    if not isinstance(value, str):
        return value
    number, unit = _split(value, "32MB")
    if unit.upper() not in _SIZES and unit:
        raise ValueError(f"'{value}' has no unit of size; write it like 32MB")
    return int(number * _SIZES[unit.upper() or "B"])


def _text(description: str, pattern: str) -> dict[str, Any]:
    return {"type": "string", "pattern": pattern, "description": description}


_DURATION = _text("a duration: 250ms, 2s, 5m", r"^\s*\d+(\.\d+)?\s*(us|ms|s|m|h)\s*$")
_SHARE = _text("a share: 3%, or 0.03", r"^\s*\d+(\.\d+)?\s*%?\s*$")
_SIZE = _text("a size: 32MB; a bare number is bytes", r"^\s*\d+(\.\d+)?\s*([KkMmGg]?[Ii]?[Bb])?\s*$")

Duration = Annotated[float, BeforeValidator(seconds), WithJsonSchema(_DURATION)]
Share = Annotated[
    float, BeforeValidator(share), WithJsonSchema({"anyOf": [{"type": "number", "minimum": 0, "maximum": 1}, _SHARE]})
]
Size = Annotated[int, BeforeValidator(size), WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 0}, _SIZE]})]


Workload = Literal["autocomplete", "chat", "task", "agent", "batch"]
ScorerName = Literal["predicted", "round_robin", "least_request", "prefix_hash"]

Positive = Annotated[Duration, Field(gt=0)]

TARGET = 0.9  # default probability of making the TTFT budget that a route promises


def _off(value: Any) -> Any:
    """Converts `off` (false in YAML 1.1) to no budget."""
    return None if value == "off" or value is False else value


def _switch(value: Any) -> Any:
    """Converts booleans back to `on` and `off`: YAML 1.1 parses these as booleans."""
    return ("on" if value else "off") if isinstance(value, bool) else value


def _may_be_off(schema: dict[str, Any]) -> None:
    for name in ("ttft", "tpot", "total", "by"):
        schema["properties"][name]["anyOf"].append({"const": "off"})


KeepAlive = Annotated[Annotated[Duration, Field(ge=0.1)] | Literal["off"], BeforeValidator(_switch)]


class Strict(BaseModel):
    """Base of models in which unknown keys are errors: a misspelt budget must not become no budget."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_switch_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Pydantic takes `true` for 1."""
        if isinstance(value, bool) and _is_number(cls.model_fields[info.field_name or ""].annotation):
            raise ValueError("write a number, not true or false")
        return value


def _is_number(annotation: Any) -> bool:
    """A number or None, and nothing else."""
    return bool({*(get_args(annotation) or (annotation,))} <= {int, float, NoneType})


class Ttft(Strict):
    """Time to first token."""

    budget: Positive
    """From the request's arrival to its first token."""
    per_1k_tokens: Positive | None = None
    """Added to the budget for each 1,000 prompt tokens that no endpoint holds in its cache at arrival; absent: the
    budget is the same for every prompt."""
    target: Share = Field(default=TARGET, gt=0, lt=1)
    """Probability of making the budget that the route promises; a place of a tier is worth 1 less this."""
    of: Literal["any", "answer"] = "any"
    """The token that must come within the budget: the first of any kind, or of the answer, after all reasoning."""


class Budget(Strict):
    budget: Positive
    target: Share | None = Field(default=None, gt=0, lt=1)
    """Probability of making the budget that the route promises; absent: that of `ttft`."""


LIMIT_PER_BUDGET = 10  # default of `total.limit`, in budgets


class Total(Budget):
    """Time to the last byte."""

    limit: Annotated[Positive | Literal["off"], BeforeValidator(_switch)] | None = None
    """An answer that takes longer is ended by an error; `off`: never; absent: ten times the budget."""

    @model_validator(mode="after")
    def _limit_after_budget(self) -> Self:
        if isinstance(self.limit, float) and self.limit < self.budget:
            raise ValueError(f"total.limit ({self.limit:g}s) is shorter than total.budget ({self.budget:g}s); raise it")
        return self


class GapBudget(Strict):
    budget: Annotated[Duration, Field(ge=0.01)]
    """Longest silence between two tokens. Silences below 10 ms are not measured."""


class Fallback(Strict):
    """Refusals of a backend after which another pool is asked."""

    context: bool = True
    """The prompt is too long: a pool with a larger, or unknown, context window."""
    content_filter: bool = False
    """The content was refused: the next pool, which may judge it otherwise."""


def _one_or_more(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class Tier(Strict):
    """A pool, and the conditions under which it may be used."""

    pool: str
    when: When | None = None
    adapter: str = ""
    """LoRA adapter of the pool that answers; absent: the pool's model."""
    after: Annotated[frozenset[FailureCause], BeforeValidator(_one_or_more)] = frozenset()
    """Only after this has happened in the tiers before, never for lateness: `failure`, an attempt failed, or no
    endpoint takes requests; `context`, the prompt is too long; `content_filter`, the content was refused. Absent:
    always."""
    beside: bool = False
    """Equal to the tier before: which of them comes first is drawn for each request, by their weights."""
    weight: float = Field(default=1.0, gt=0, le=1e9)
    """Among tiers that are beside each other, the share of requests for which this one comes first."""

    @model_validator(mode="before")
    @classmethod
    def _bare_name(cls, value: Any) -> Any:
        return {"pool": value} if isinstance(value, str) else value


class Hedge(Strict):
    """A second attempt while the first token is overdue."""

    max_extra: Share = Field(default=0.03, ge=0, le=1)
    """Largest share of requests sent twice."""


def is_model_name(value: str) -> bool:
    """True for printable text without leading or trailing blanks."""
    return 0 < len(value) <= _MOST_CHARACTERS and value.isprintable() and value == value.strip()


def _alias(value: str) -> str:
    if not is_model_name(value):
        raise ValueError(f"{value!r} is not a model name: printable text without blanks around it only")
    if "**" in value:
        raise ValueError(f"'{value}': one * stands for any characters; write it once")
    return value


Alias = Annotated[str, AfterValidator(_alias)]


class External(Strict):
    """Limit of a route's use of external APIs; at least one of the two."""

    share: Share | None = Field(default=None, ge=0, le=1)
    """Of its requests of the last hour."""
    usd_per_hour: float | None = Field(default=None, ge=0)

    @model_validator(mode="before")
    @classmethod
    def _bare_share(cls, value: Any) -> Any:
        return {"share": value} if isinstance(value, (str, int, float)) else value

    @model_validator(mode="after")
    def _limits_something(self) -> Self:
        if self.share is None and self.usd_per_hour is None:
            raise ValueError("limits.external is empty; write a share (2%), or {usd_per_hour: 5}")
        return self


class Limits(Strict):
    """Limits of callers' requests."""

    output_tokens: int | None = Field(default=None, gt=0)
    """Default and cap of max_tokens."""
    ttft_budget: Positive | None = None
    """Loosest TTFT budget that a caller may ask for; absent: the route's own."""
    external: External | None = None
    """Limit of what is sent to external APIs, in each process: a share of the route's requests, or USD per hour."""


LONGEST_CACHED = 7 * 86_400.0  # s


class AnswerCaching(Strict):
    """Answers kept for equal requests of the same cache group."""

    ttl: Annotated[Positive, Field(le=LONGEST_CACHED)]
    """Time from the answer for which equal requests get it again."""
    any_temperature: bool = False
    """Of requests that ask for samples too; else only of those with temperature 0, and of embeddings and rankings."""


Shortcoming = Literal["refusal", "empty", "length", "invalid_json"]
_FOUND_IN_WORDS = ("refusal_text", "language")  # reasons of former versions


def _reasons(value: Any) -> Any:
    """Validator: reject values of former versions, with the replacement in the error message."""
    if isinstance(value, dict):
        raise ValueError("no stream is held back and judged any more; write the reasons alone, as in [invalid_json]")
    if isinstance(value, list) and any(each in _FOUND_IN_WORDS for each in value):
        raise ValueError(f"no answer is judged by its words any more; leave out {' and '.join(_FOUND_IN_WORDS)}")
    return value


class Route(Strict):
    """Policy of one model name."""

    model_config = ConfigDict(json_schema_extra=_may_be_off)

    name: str = ""  # the key in the YAML, set by the config loader
    workload: Workload = "chat"
    """Preset of all keys that are not given: autocomplete, chat, task, agent or batch."""
    aliases: tuple[Alias, ...] = ()
    """Further model names that callers may send; `*` stands for any characters: gpt-4o, claude-*."""
    ttft: Annotated[Ttft | None, BeforeValidator(_off)] = None
    tpot: Annotated[Budget | None, BeforeValidator(_off)] = None
    """Mean time between two tokens of the answer."""
    gap: GapBudget | None = None
    """Longest silence within a stream. Measured, and decides nothing."""
    total: Annotated[Total | None, BeforeValidator(_off)] = None
    """From arrival to the last byte."""
    by: Annotated[Positive | None, BeforeValidator(_off)] = None
    """From arrival to the last byte, of work that can wait: it runs where it costs no other request a budget, and
    elsewhere only as its time runs out. On routes without `ttft` and `total`."""
    tiers: tuple[Tier, ...] = Field(min_length=1)
    """Pools, most wanted first: names, or {pool, when, adapter}."""
    hedge: Annotated[Hedge | Literal["off"], BeforeValidator(_switch)] = "off"
    on_miss: Literal["best_effort", "queue", "shed"] = "best_effort"
    """If no tier can make the TTFT budget: queue for an idle endpoint, with or without a limit of 30 s; or refuse."""
    keepalive: KeepAlive | None = None
    """Interval of comments in a stream before its first token, for balancers that close silent connections. The first
    one commits status 200: later failures are error events. Absent: `defaults.keepalive`."""
    rescue: Annotated[Literal["on", "off"], BeforeValidator(_switch)] = "off"
    """Continue a stream that breaks after its first token on another endpoint of its pool, else of the other tiers.

    Peers are vllm and sglang pools."""
    fallback: Fallback = Fallback()
    upstream_stream: Annotated[Literal["auto", "off"], BeforeValidator(_switch)] = "auto"
    """Ask for whole answers as streams, and put them together, where no member of the answer can differ; or never."""
    escalate: Annotated[frozenset[Shortcoming], BeforeValidator(_reasons)] = frozenset()
    """Whole answers (not streamed) after which the next tier is asked once, before anything is sent: a refusal in the
    dialect's own form, no output, an answer cut at the limit, JSON that breaks its schema."""
    drop: frozenset[str] = frozenset()
    """Members of a request to leave out where a pool's dialect cannot express them; else such a pool is not used."""
    prefer: Literal["quality", "cost", "latency", "completion", "throughput"] = "quality"
    """Order of the tiers, in which a place is worth `1 - target`: as written, or the cheapest first, the soonest first
    token, the soonest whole answer, or the most tokens a second."""
    region: RoutedRegions | None = None
    """Regions of the endpoints that the route may use (`only`), or uses first (`prefer`); absent: all alike."""
    scorer: ScorerName = "predicted"
    """`predicted` orders by value; all others are baselines, which skip no tier for being slow."""
    limits: Limits = Limits()
    repair: tuple[RepairRule, ...] = ()
    """Rules that change prompts so that their prefix stays the same: strip_cch, sort_tools."""
    cache: AnswerCaching | None = None
    """Answer equal requests from memory, or Redis (`state.answers`); absent: every request is sent."""
    retries: int | None = Field(default=None, ge=0, le=MOST_RETRIES)
    """Attempts after the first in each tier, and the tiers beside it, before the next tier; an endpoint may be asked
    again. Absent: each endpoint is asked once."""
    max_attempts: int = Field(default=3, ge=1, le=MOST_ATTEMPTS)

    @model_validator(mode="after")
    def _budgets_agree(self) -> Self:
        if self.ttft and self.total and self.ttft.budget > self.total.budget:
            raise ValueError(
                f"ttft.budget ({self.ttft.budget:g}s) is longer than total.budget ({self.total.budget:g}s), "
                f"one of which may be the preset of workload {self.workload}; lower ttft.budget or raise total.budget"
            )
        if self.by is not None and (self.ttft or self.total):
            kept = "ttft" if self.ttft else "total"
            raise ValueError(
                f"by ({self.by:g}s) is for work that can wait; write `{kept}: off` on this route, or no by"
            )
        if self.gap and self.tpot and self.gap.budget < self.tpot.budget:
            raise ValueError(
                f"gap.budget ({self.gap.budget:g}s) is shorter than tpot.budget ({self.tpot.budget:g}s), which may be "
                f"the preset of workload {self.workload}: no stream at that pace keeps it; raise gap.budget or lower "
                "tpot.budget"
            )
        loosest = self.limits.ttft_budget
        if self.ttft and loosest is not None and loosest < self.ttft.budget:
            raise ValueError(
                f"limits.ttft_budget ({loosest:g}s) is shorter than ttft.budget ({self.ttft.budget:g}s): "
                "it is how far callers may loosen it; raise it or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _tiers_reachable(self) -> Self:
        unconditional: dict[str, int] = {}
        for number, tier in enumerate(self.tiers, 1):
            if tier.pool in unconditional:
                raise ValueError(
                    f"tier {number} can never be reached: tier {unconditional[tier.pool]} takes every request "
                    f"to pool {tier.pool}; remove one, or give the first a `when`"
                )
            if tier.when is None:
                unconditional[tier.pool] = number
        return self

    @model_validator(mode="after")
    def _equals_stand_together(self) -> Self:
        if self.tiers[0].after:
            raise ValueError(f"tier 1 cannot be `after` anything: pool {self.tiers[0].pool} is the first to be asked")
        for number, (before, tier) in enumerate(pairwise((None, *self.tiers)), 1):
            if tier and tier.beside and (before is None or before.after != tier.after):
                raise ValueError(f"tier {number} is `beside` no tier: the one before has to have the same `after`")
        return self

    @model_validator(mode="after")
    def _one_adapter_per_pool(self) -> Self:
        asked: dict[str, str] = {}
        for number, tier in enumerate(self.tiers, 1):
            if (other := asked.setdefault(tier.pool, tier.adapter)) != tier.adapter:
                names = " and ".join(name or "none" for name in (other, tier.adapter))
                raise ValueError(f"tier {number}: pool {tier.pool} has two adapters in one route, {names}; keep one")
        return self

    def is_same_part(self, one: Endpoint, other: Endpoint) -> bool:
        """True for endpoints of the same pool that no hook of the route divides."""
        return one.pool == other.pool and (self.region is None or self.region.keeps_together(one, other))

    @cached_property
    def prefers_region(self) -> bool:
        """True if the route prefers endpoints of some regions."""
        return self.region is not None and self.region.prefer is not None

    @cached_property
    def confines(self) -> Confines | None:
        """Hook that excludes endpoints, whatever their state; None: the route may use any of its pools."""
        return None if self.region is None or self.region.only is None else self.region

    def allows(self, endpoint: Endpoint) -> bool:
        """No hook of the route excludes the endpoint."""
        return self.confines is None or self.confines.allows(endpoint)

    @cached_property
    def _fits(self) -> tuple[Fits, ...]:
        limited = self.confines is not None and self.region is not None
        hooks = (limited and self.region and self.region.only_there, self.variants and knows_adapter)
        return tuple(hook for hook in hooks if hook)

    def fits(self, request: RequestView) -> tuple[Fits, ...]:
        """Filter hooks for endpoints, of the features used by route and request."""
        return (*self._fits, has_its_state) if request.pinned or request.readers else self._fits

    @cached_property
    def divide(self) -> Divide | None:
        """Hook that divides a tier into parts, ordered like tiers; None: a tier is a single part."""
        return None if self.region is None else self.region.divide

    @cached_property
    def new_meter(self) -> Callable[[], Meter] | None:
        """Builds the meter of a hook in `pool_fits`; None: no hook needs one."""
        return None if self.limits.external is None else ExternalUse

    @cached_property
    def pool_fits(self) -> tuple[PoolFits, ...]:
        """Filter hooks for pools, of the features used by the route."""
        return () if self.limits.external is None else (partial(within_share, self),)

    @cached_property
    def levels(self) -> tuple[int, ...]:
        """Level number of each tier: tiers beside each other share a level."""
        return tuple(accumulate(int(not tier.beside) for tier in self.tiers))

    @cached_property
    def has_equals(self) -> bool:
        return len(self.tiers) > self.levels[-1]

    def drawn_tiers(self, sequence: int) -> tuple[Tier, ...]:
        """The tiers; those of a level in an order drawn for the request: each comes first by its weight's share."""
        weights = [tier.weight for tier in self.tiers]
        return tuple(self.tiers[i] for i in drawn_order(self.levels, self.pools, weights, sequence))

    @cached_property
    def attempt_rules(self) -> AttemptRules | None:
        """Rules of the tiers for attempts after the first; None: none."""
        after = tuple(tier.after for tier in self.tiers)
        return None if self.retries is None and not any(after) else AttemptRules(self.levels, after, self.retries)

    @cached_property
    def pools(self) -> tuple[str, ...]:
        return tuple(tier.pool for tier in self.tiers)

    @cached_property
    def budget_grows(self) -> bool:
        """The TTFT budget grows with the prompt."""
        return self.ttft is not None and self.ttft.per_1k_tokens is not None

    @cached_property
    def variants(self) -> Mapping[str, str]:
        """Variant of the model by pool, for pools of which the route asks for one."""
        return {tier.pool: tier.adapter for tier in self.tiers if tier.adapter}

    @cached_property
    def target(self) -> float:
        """Promised probability of meeting the TTFT budget, or else the `total` budget."""
        return self.ttft.target if self.ttft else (self.total and self.total.target) or TARGET

    @cached_property
    def total_target(self) -> float:
        """The same of the budget of the whole answer."""
        return (self.total and self.total.target) or self.target

    @cached_property
    def tpot_target(self) -> float | None:
        """The same of the TPOT alone; None: TTFT and TPOT together are to reach `target`."""
        return self.tpot.target if self.tpot else None

    @cached_property
    def weighs_completion(self) -> bool:
        """Decisions depend on the end of the answer."""
        return self.total is not None or self.prefer in ("completion", "throughput")

    @cached_property
    def promises_answer(self) -> bool:
        """True if the TTFT budget counts to the answer's first token, not to the reasoning's."""
        return self.ttft is not None and self.ttft.of == "answer"

    @cached_property
    def hedge_share(self) -> float:
        """Share of requests that may be sent twice."""
        return 0.0 if self.hedge == "off" else self.hedge.max_extra

    @cached_property
    def total_limit(self) -> float:
        """Seconds from arrival to the last byte after which an answer is ended."""
        if self.total is None or self.total.limit == "off":
            return FOREVER
        return self.total.limit or LIMIT_PER_BUDGET * self.total.budget

    def ttft_budget(self, asked: float | None, uncached_tokens: int = 0) -> float:
        """Seconds from arrival to first token: a caller may tighten the route's, or loosen it up to its limit.

        The route's grows with the uncached tokens of the prompt, to the budget of the whole answer at most.
        """
        own = self.ttft.budget if self.ttft else FOREVER
        if self.ttft and self.ttft.per_1k_tokens:
            grown = own + self.ttft.per_1k_tokens * uncached_tokens / 1000
            own = min(grown, self.total.budget) if self.total else grown
        return own if asked is None else min(asked, max(own, self.limits.ttft_budget or own))

    def done_within(self, asked: float | None) -> float:
        """Seconds from arrival to the last byte, of work that can wait; FOREVER: neither side says."""
        by = self.by if asked is None else asked
        return FOREVER if by is None else min(by, self.total_limit)

    def tpot_budget(self, asked: float | None) -> float | None:
        """Seconds per token after the first: a caller may tighten the route's."""
        own = self.tpot.budget if self.tpot else None
        return own if asked is None else asked if own is None else min(own, asked)

    def output_cap(self, asked: int | None) -> int | None:
        """The caller's max_tokens under the route's cap; None: neither says."""
        cap = self.limits.output_tokens
        return asked or cap if asked is None or cap is None else min(asked, cap)
