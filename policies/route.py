"""A route: the model name that callers ask for, and what they were promised.

These models are the `routes:` section of the YAML, validated; decisions read them as they are.
A workload preset fills whatever the operator left out (`policies.workloads`).
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from policies.units import Duration, Share
from policies.when import When

Workload = Literal["autocomplete", "chat", "task", "agent", "batch"]
ScorerName = Literal[
    "predicted", "round_robin", "least_request", "prefix_hash", "lmetric", "token_load", "argmin_ttft"
]


class Strict(BaseModel):
    """Unknown keys are errors: a misspelt budget must not become no budget."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Ttft(Strict):
    """TTFT `budget` from arrival; `target` is the chance of making it that a tier must offer to be taken."""

    budget: Duration
    target: float = Field(0.9, gt=0, lt=1)


class Budget(Strict):
    budget: Duration


class Tier(Strict):
    """A pool, and the conditions under which it may be used."""

    pool: str
    when: When | None = None

    @model_validator(mode="before")
    @classmethod
    def _bare_name(cls, value: Any) -> Any:
        return {"pool": value} if isinstance(value, str) else value


class Hedge(Strict):
    """At most `max_extra` (a share of requests) may be sent a second time before their first token."""

    max_extra: Share = Field(0.03, ge=0, le=1)


class Limits(Strict):
    """`output_tokens`: default and cap of max_tokens. `ttft_budget`: how far a caller may loosen its budget."""

    output_tokens: int | None = Field(None, gt=0)
    ttft_budget: Duration | None = None


class Route(Strict):
    """What callers of one model name get."""

    name: str = ""  # the key in the YAML, filled in by the config loader
    workload: Workload = "chat"
    ttft: Ttft | None = None
    tpot: Budget | None = None
    total: Budget | None = None
    tiers: tuple[Tier, ...] = Field(min_length=1)
    hedge: Hedge | Literal["off"] = "off"
    on_miss: Literal["best_effort", "queue", "shed"] = "best_effort"
    rescue: Literal["on", "off"] = "off"
    prefer: Literal["quality", "cost", "latency"] = "quality"
    scorer: ScorerName = "predicted"
    limits: Limits = Limits()
    max_attempts: int = Field(3, ge=1, le=10)
