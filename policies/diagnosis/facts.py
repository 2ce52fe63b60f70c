"""Facts of one slow request, as a diagnosis reads them. Times are seconds; tokens are the engine's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from policies.types import AttemptOutcome, Placement, RejectionKind


class Objective(StrEnum):
    """The promise that was missed. ANSWER: the request failed."""

    ANSWER, TTFT, TPOT, GAP, TOTAL = "answer", "ttft", "tpot", "gap", "total"


@dataclass(frozen=True, slots=True)
class LostAttempt:
    """An attempt that brought no answer, or broke."""

    endpoint: str
    outcome: AttemptOutcome
    status: int  # 0: no reply
    took: float
    cause: str


@dataclass(frozen=True, slots=True)
class Neighbour:
    """Another request at the same endpoint. `prefill`: its prompt was computed while this request waited for its first
    token; `served`: its first token came meanwhile; `decode`: its prompt was computed while this request's answer was
    under way."""

    tenant: str
    computed: int  # tokens
    prefill: bool
    decode: bool
    served: bool = True


@dataclass(frozen=True, slots=True)
class EarlierPrompt:
    """A prompt that this one continues (`shared` == `tokens`), or departs from. `lost`: the endpoint has lost its whole
    cache since."""

    endpoint: str
    tokens: int
    shared: int  # tokens at the beginning of both
    ago: float
    lost: bool = False


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """By the engine's report (None: it has none), and as of the decision."""

    queue: float | None = None
    prefill: float | None = None
    kv_usage: float = 0.0
    running: int = 0
    waiting: int = 0
    forecast_prefill: float = 0.0  # of this prompt, with the forecast hit
    backlog: float = 0.0  # of the prompts before it


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFacts:
    """`stages`: time by stage's name; `held`: time in the queue by its rule; `attempts`: those lost.

    `region_ratio`: time upstream of this region's latest requests, over that of the other regions.
    `route_share`: of the latest other prompts of the route, forecast as cached; `endpoint_share`: of the latest other
    prompts at the endpoint, reported as cached over forecast. None: unknown.
    """

    route: str = "-"
    pool: str = "-"
    tenant: str = "-"
    endpoint: str = "-"
    region: str = ""
    objective: Objective = Objective.TTFT
    over: float = 0.0
    stream: bool = True
    stages: Mapping[str, float] = field(default_factory=dict)
    held: Mapping[str, float] = field(default_factory=dict)
    attempts: Sequence[LostAttempt] = ()
    placement: Placement | None = None
    rejected: Sequence[RejectionKind] = ()
    down: Sequence[str] = ()  # endpoints, or pools, that were down at the decision
    asleep: Sequence[str] = ()  # in sleep mode
    drained: Sequence[str] = ()  # taken out by an operator (`firsttoken drain`)
    prompt: int = 0
    cached: int | None = None
    predicted: int = 0
    output: int = 0
    tpot: float | None = None
    gap: float = 0.0  # the longest between two tokens
    thinking: float = 0.0
    effort: str = ""  # of reasoning, as the caller asked; empty: it named none
    unread: float = 0.0  # from the last token in to the last byte out
    lag: float = 0.0
    forecast: float | None = None  # median time upstream
    engine: EngineFacts = EngineFacts()
    local: bool = True  # an engine, whose queue and prefill are modelled
    earlier: EarlierPrompt | None = None
    neighbours: Sequence[Neighbour] = ()
    region_ratio: float | None = None
    route_share: float | None = None
    endpoint_share: float | None = None

    @property
    def hit(self) -> int:
        """Tokens of the prompt that were cached."""
        return hit_tokens(self.prompt, self.cached, self.predicted)

    @property
    def computed(self) -> int:
        return self.prompt - self.hit


def hit_tokens(prompt: int, reported: int | None, predicted: int | None) -> int:
    """Tokens of a prompt that were cached: by the engine's report, or else as forecast."""
    return min((predicted or 0) if reported is None else reported, prompt)


def ms(seconds: float) -> str:
    """A time in words."""
    return f"{seconds * 1e3:,.0f} ms" if seconds < 10 else f"{seconds:,.1f} s"
