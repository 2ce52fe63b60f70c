"""The Record of one request: time by stage, predictions, outcome.

Rules:
- Stages sum to the TTFT; the time after the first token is the `stream` stage.
- A request has exactly one Record. Only the timeline (`gateway.observe.timeline`) writes to it.
- Times are seconds of the monotonic clock; only the JSON has milliseconds.
- Records are on the path of every request: a stage is an index into a list, names are for readers.
"""

from __future__ import annotations

from array import array
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from gateway.observe.trace_context import Trace
from policies.diagnosis.diagnosis_report import Diagnosis
from policies.types import AttemptKind, AttemptOutcome, Decision

if TYPE_CHECKING:
    from policies.quota.key_limits import Reservation


class Stage(IntEnum):
    """In the order of a request's life; the number is a place in `Record.spent`. All but the last sum to TTFT."""

    READ = 0  # arrival to the whole body
    PARSE = 1
    ESTIMATE = 2
    ADMIT = 3  # keys, quotas
    QUEUE = 4  # the gateway's own
    RATE_LIMIT = 5  # held back, here or between two attempts, because a provider refuses for a while
    DECIDE = 6
    FAILOVER = 7  # lost attempts before the start of the answering attempt
    CONNECT = 8
    SEND = 9
    UPSTREAM = 10  # request sent to first token in
    RELAY = 11  # first token in to first token out
    STREAM = 12  # first token out to last byte out


STAGES = tuple(Stage)
# `Stage.READ` is looked up in two classes each time: 60 ns, and a request names fifteen.
READ, PARSE, ESTIMATE, ADMIT, QUEUE, RATE_LIMIT, DECIDE, FAILOVER, CONNECT, SEND, UPSTREAM, RELAY, STREAM = STAGES
STAGE_NAMES = tuple(stage.name.lower() for stage in STAGES)  # as they are shown
UNSPENT: list[float | None] = [None] * len(STAGES)


class RequestOutcome(StrEnum):
    """End of a request. Values are the `outcome` label of firsttoken_requests_total."""

    COMPLETED = "completed"
    REFUSED = "refused"  # the request's own fault: 4xx
    SHED = "shed"  # no tier could meet the deadline
    UNAVAILABLE = "unavailable"  # no usable endpoint
    FAILED = "failed"  # every attempt failed
    CLIENT_GONE = "client_gone"
    UPSTREAM_BROKE = "upstream_broke"  # died after the first token
    INTERNAL = "internal"  # our bug
    CUT = "cut"  # stopped with the gateway before the end


@dataclass(slots=True)
class AttemptRecord:
    """An attempt, won or lost. Times are seconds after arrival."""

    number: int
    kind: AttemptKind
    endpoint: str
    pool: str
    opened: float
    ended: float
    ending: AttemptOutcome
    upstream_id: str = ""  # `x-request-id` at the backend
    tokens: int = 0  # that the server may bill: prompt and output
    cost_usd: float = 0.0
    junk: int = 0  # events that are no JSON
    status: int = 0  # of the reply; 0: there was none
    cause: str = ""  # of a failure, for the operator: status, the server's code, first line of its message, scrubbed

    def as_json(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "kind": self.kind.value,
            "endpoint": self.endpoint,
            "opened_ms": _ms(self.opened),
            "ended_ms": _ms(self.ended),
            "ending": self.ending.value,
            "upstream_id": self.upstream_id,
            "tokens": self.tokens,
            "cost_usd": self.cost_usd,
            "status": self.status,
            "cause": self.cause,
        }


@dataclass(slots=True)
class Record:
    """Everything known of a request at the end. `-` marks a label that never became known."""

    request_id: str = ""
    arrival: float = 0.0
    wall: float = 0.0  # arrival as Unix time, s
    trace: Trace | None = None  # with tracing on
    route: str = "-"
    workload: str = "-"
    tenant: str = "-"
    operation: str = "-"
    stream: bool = False
    end: RequestOutcome = RequestOutcome.INTERNAL
    status: int = 0
    error: str = ""
    spent: list[float | None] = field(default_factory=UNSPENT.copy)  # s by Stage; None: never closed
    ttft: float | None = None
    first_reasoning: float | None = None  # first token of reasoning before the answer, from arrival like ttft
    first_answer: float | None = None  # first token of the answer
    ttft_of: str = "any"  # token of the budget: any, or answer
    ttft_budget: float | None = None
    tpot_budget: float | None = None
    total_budget: float | None = None
    loop_lag: float = 0.0  # longest stall of the event loop that may have delayed the first token
    total: float = 0.0
    tpot: float | None = None
    max_tokens: int | None = None  # as the caller asked
    max_tokens_lowered: int | None = None  # as sent, where the caller's do not fit into the context window
    choices: int = 1  # answers asked for
    prompt_tokens_estimated: int | None = None
    prompt_tokens_reported: int | None = None
    cached_tokens_predicted: int | None = None
    cached_tokens_reported: int | None = None
    output_tokens: int | None = None
    engine_queue: float | None = None  # by the engine's own word: these two are parts of `upstream`
    engine_prefill: float | None = None
    engine_ttft: float | None = None
    ttft_predicted_p50: float | None = None  # from arrival, like ttft
    ttft_predicted_p90: float | None = None
    chance: float | None = None
    tier: int | None = None
    pool: str = "-"
    model: str = "-"
    endpoint: str = "-"
    region: str = ""
    scorer: str = ""
    cost_usd: float = 0.0  # of all attempts
    attempts: list[AttemptRecord] = field(default_factory=list)
    escalated: str = ""  # shortcoming of an answer for which another pool was asked: refusal, length, invalid_json
    held: dict[str, float] = field(default_factory=dict)  # s in the queue, by the rule that held the request
    external_refused: bool = False  # an API was left out because of `limits.external`
    rescue: str = ""  # of a stream that broke on a route with rescue: rescued, failed or refused
    cache: str = ""  # of a route with a cache of answers: hit or miss
    tags: Sequence[str] = ()  # of the listed ones, those that the caller named
    left_out: Mapping[str, str] = field(default_factory=dict)  # members lost in translation; the metric's label of each
    decision: Decision | None = None  # while the request lives
    prefix: Sequence[int] = ()  # landmarks of the prompt
    session: int = 0  # of the caller, as a hash that is never shown; 0: none is named
    diagnosis: Diagnosis | None = None  # of a request that missed a budget, or failed
    trace_id: str = ""
    on_screen: float | None = None  # s to the first token as measured by the caller (`gateway.admin.gateway_admin`)
    quota: Reservation | None = None  # reservation against the key's limits, until settled

    @property
    def stages(self) -> Mapping[Stage, float]:
        """Seconds in each closed stage, in order."""
        return {stage: spent for stage, spent in zip(STAGES, self.spent, strict=True) if spent is not None}

    @property
    def is_cached(self) -> bool:
        """The answer to an earlier request was the answer."""
        return self.cache == "hit"

    @property
    def promised(self) -> float | None:
        """Seconds from arrival to the token that the TTFT budget is of; None: it never came."""
        return self.ttft if self.ttft_of == "any" or self.first_reasoning is None else self.first_answer

    @property
    def ttft_met(self) -> bool | None:
        """None: no TTFT budget on the route, a caller that left within the budget, a fault of the caller, or an answer
        from the cache, which says nothing of engines.

        An answer without streaming arrives whole and is judged by the total budget alone.
        """
        if self.ttft_budget is None or self.end is RequestOutcome.REFUSED or self.is_cached:
            return None
        if (promised := self.promised) is not None:
            return promised <= self.ttft_budget if self.stream else None
        if self.end is RequestOutcome.CLIENT_GONE and self.total <= self.ttft_budget:
            return None
        return False

    @property
    def tpot_met(self) -> bool | None:
        """Under two tokens there is no TPOT, which counts as met."""
        if self.tpot_budget is None or self.ttft is None or not self.stream:
            return None
        return self.tpot is None or self.tpot <= self.tpot_budget

    @property
    def total_met(self) -> bool | None:
        if (
            self.total_budget is None
            or self.is_cached
            or self.end in (RequestOutcome.REFUSED, RequestOutcome.CLIENT_GONE)
        ):
            return None
        return self.end is RequestOutcome.COMPLETED and self.total <= self.total_budget

    @property
    def cause(self) -> str:
        """Of a request that missed a budget, or failed; empty for any other."""
        return "" if self.diagnosis is None else self.diagnosis.verdict.cause.value

    def as_json(self) -> dict[str, Any]:
        """For the access log and GET /requests: flat, milliseconds, no text of prompt or answer."""
        shown = dict(zip(SHOWN, _shown(self), strict=True))
        for name, seconds in zip(TIMES_MS, _times(self), strict=True):
            shown[name] = _ms(seconds)
        shown["stages_ms"] = {
            name: int(s * 1e6 + 0.5) / 1e3 for name, s in zip(STAGE_NAMES, self.spent, strict=True) if s is not None
        }
        shown["held_ms"] = {rule: _ms(seconds) for rule, seconds in self.held.items()}
        shown["left_out"] = list(self.left_out)
        shown["ttft_met"] = self.ttft_met
        shown["tpot_met"] = self.tpot_met
        shown["total_met"] = self.total_met
        shown["attempts"] = [attempt.as_json() for attempt in self.attempts]
        shown["prefix"] = b64encode(array("Q", self.prefix)).decode() if self.prefix else None
        shown["trace_id"] = self.trace_id
        return shown


# Members of a Record's JSON: as they are, and in milliseconds.
SHOWN = (
    *("request_id", "wall", "route", "workload", "tenant", "operation", "stream", "end", "status", "error"),
    *(
        "max_tokens",
        "max_tokens_lowered",
        "choices",
        "prompt_tokens_estimated",
        "prompt_tokens_reported",
        "cached_tokens_predicted",
    ),
    *("cached_tokens_reported", "output_tokens", "chance", "tier", "pool", "model", "endpoint", "region", "scorer"),
    *("cost_usd", "escalated", "external_refused", "rescue", "ttft_of", "cache", "tags", "cause"),
)
TIMES = (
    *(
        "ttft",
        "first_reasoning",
        "first_answer",
        "ttft_budget",
        "on_screen",
        "total",
        "tpot",
        "loop_lag",
        "engine_queue",
        "engine_prefill",
    ),
    *("engine_ttft", "ttft_predicted_p50", "ttft_predicted_p90"),
)
TIMES_MS = tuple(f"{name}_ms" for name in TIMES)
_shown, _times = attrgetter(*SHOWN), attrgetter(*TIMES)


def _ms(seconds: float | None) -> float | None:
    """Milliseconds, rounded to the microsecond: `round` takes three times as long, and a Record has twenty values."""
    return None if seconds is None else int(seconds * 1e6 + 0.5) / 1e3
