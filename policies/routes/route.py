"""A route: the model name that callers ask for, and its latency budgets, tiers and limits.

These models are the validated `routes:` section of the YAML, and are read by decisions directly.

Rules:
- A workload preset supplies missing keys (`policies.routes.workloads`) before validation.
- `ttft`, `tpot` and `total` can be `off`, which removes a preset's budget.
- Contradictions are errors: a first token due after the whole answer, a tier that no request can reach.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from policies.routes.units import Duration, Share
from policies.routes.when import When
from policies.types import FOREVER

Workload = Literal["autocomplete", "chat", "task", "agent", "batch"]
ScorerName = Literal["predicted", "round_robin", "least_request", "prefix_hash", "lmetric", "token_load", "argmin_ttft"]

Positive = Annotated[Duration, Field(gt=0)]

TARGET = 0.9  # default probability of making the TTFT budget that a tier must offer


def _off(value: Any) -> Any:
    """Converts `off` (false in YAML 1.1) to no budget."""
    return None if value == "off" or value is False else value


def _switch(value: Any) -> Any:
    """Converts booleans back to `on` and `off`: YAML 1.1 parses these as booleans."""
    return ("on" if value else "off") if isinstance(value, bool) else value


def _may_be_off(schema: dict[str, Any]) -> None:
    for name in ("ttft", "tpot", "total"):
        schema["properties"][name]["anyOf"].append({"const": "off"})


class Strict(BaseModel):
    """Base of models in which unknown keys are errors: a misspelt budget must not become no budget."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Ttft(Strict):
    """Time to first token."""

    budget: Positive
    """From the request's arrival to its first token."""
    target: Share = Field(default=TARGET, gt=0, lt=1)
    """Probability of making the budget that a tier must offer."""


class Budget(Strict):
    budget: Positive


class Tier(Strict):
    """A pool, and the conditions under which it may be used."""

    pool: str
    when: When | None = None

    @model_validator(mode="before")
    @classmethod
    def _bare_name(cls, value: Any) -> Any:
        return {"pool": value} if isinstance(value, str) else value


class Hedge(Strict):
    """A second attempt while the first token is overdue."""

    max_extra: Share = Field(default=0.03, ge=0, le=1)
    """Largest share of requests sent twice."""


class Limits(Strict):
    """Limits of callers' requests."""

    output_tokens: int | None = Field(default=None, gt=0)
    """Default and cap of max_tokens."""
    ttft_budget: Positive | None = None
    """Loosest TTFT budget that a caller may ask for; absent: the route's own."""


class Route(Strict):
    """Policy of one model name."""

    model_config = ConfigDict(json_schema_extra=_may_be_off)

    name: str = ""  # the key in the YAML, set by the config loader
    workload: Workload = "chat"
    """Preset of all keys that are not given: autocomplete, chat, task, agent or batch."""
    ttft: Annotated[Ttft | None, BeforeValidator(_off)] = None
    tpot: Annotated[Budget | None, BeforeValidator(_off)] = None
    """Mean time between two tokens of the answer."""
    total: Annotated[Budget | None, BeforeValidator(_off)] = None
    """From arrival to the last byte."""
    tiers: tuple[Tier, ...] = Field(min_length=1)
    """Pools, most wanted first: names, or {pool, when}."""
    hedge: Annotated[Hedge | Literal["off"], BeforeValidator(_switch)] = "off"
    on_miss: Literal["best_effort", "queue", "shed"] = "best_effort"
    """If no tier can make the TTFT budget: queue for an idle endpoint, with or without a limit of 30 s; or refuse."""
    rescue: Annotated[Literal["on", "off"], BeforeValidator(_switch)] = "off"
    """Accepted without effect: continuing a broken stream on a peer is not implemented."""
    prefer: Literal["quality", "cost", "latency"] = "quality"
    """Among tiers that can make the budget: the first, the cheapest, or the fastest."""
    scorer: ScorerName = "predicted"
    """Ranks a tier's endpoints. All but `predicted` are baselines, which skip no tier for being slow."""
    limits: Limits = Limits()
    max_attempts: int = Field(default=3, ge=1, le=10)

    @model_validator(mode="after")
    def _budgets_agree(self) -> Self:
        if self.ttft and self.total and self.ttft.budget > self.total.budget:
            raise ValueError(
                f"ttft.budget ({self.ttft.budget:g}s) is longer than total.budget ({self.total.budget:g}s), "
                f"one of which may be the preset of workload {self.workload}; lower ttft.budget or raise total.budget"
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

    @property
    def target(self) -> float:
        """Probability of making the TTFT budget that a tier must offer."""
        return self.ttft.target if self.ttft else TARGET

    def ttft_budget(self, asked: float | None) -> float:
        """Seconds from arrival to first token: a caller may tighten the route's, or loosen it up to its limit."""
        own = self.ttft.budget if self.ttft else FOREVER
        return own if asked is None else min(asked, max(own, self.limits.ttft_budget or own))

    def tpot_budget(self, asked: float | None) -> float | None:
        """Seconds per token after the first: a caller may tighten the route's."""
        own = self.tpot.budget if self.tpot else None
        return own if asked is None else asked if own is None else min(own, asked)

    def output_cap(self, asked: int | None) -> int | None:
        """The caller's max_tokens under the route's cap; None: neither says."""
        cap = self.limits.output_tokens
        return asked or cap if asked is None or cap is None else min(asked, cap)
