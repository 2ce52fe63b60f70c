"""The Record of one request: where every millisecond went, and what was believed and found.

Rules:
- Stages are closed in order and never overlap, so they sum to the TTFT by construction; the
  time that follows the first token is the `stream` stage.
- A request has exactly one Record, whatever happens to it. `Life` fills it and nobody else does.
- Seconds of the monotonic clock inside; milliseconds only where a Record is shown.
"""

from __future__ import annotations

from array import array
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from time import monotonic
from typing import Any, TypeVar

from policies.facts import FOREVER, AttemptKind, Candidate, Decision, Ending, PrefixBlocks

T = TypeVar("T")

LANDMARK = 512  # tokens


class Stage(Enum):
    """In the order of a request's life. All but the last sum to TTFT."""

    READ = "read"  # arrival to the whole body
    PARSE = "parse"
    ESTIMATE = "estimate"
    ADMIT = "admit"  # keys, quotas
    QUEUE = "queue"  # the gateway's own
    DECIDE = "decide"
    FAILOVER = "failover"  # attempts that were lost before the one that won was opened
    CONNECT = "connect"
    SEND = "send"
    UPSTREAM = "upstream"  # request sent to first token in
    RELAY = "relay"  # first token in to first token out
    STREAM = "stream"  # first token out to last byte out


class End(Enum):
    """How a request ended. Values are the `outcome` label of firsttoken_requests_total."""

    COMPLETED = "completed"
    REFUSED = "refused"  # the request's own fault: 4xx
    SHED = "shed"  # no tier could make its deadline
    UNAVAILABLE = "unavailable"  # no usable endpoint
    FAILED = "failed"  # every attempt failed
    CLIENT_GONE = "client_gone"
    UPSTREAM_BROKE = "upstream_broke"  # died after the first token
    INTERNAL = "internal"  # our bug


@dataclass(frozen=True, slots=True)
class AttemptRecord:
    """One attempt, won or lost. Times are seconds after arrival."""

    number: int
    kind: AttemptKind
    endpoint: str
    pool: str
    opened: float
    ended: float
    ending: Ending


@dataclass(slots=True)
class Record:
    """All that is known of a request at its end. `-` marks a label that never became known."""

    request_id: str = ""
    arrival: float = 0.0
    wall: float = 0.0  # arrival as Unix time, s
    route: str = "-"
    workload: str = "-"
    tenant: str = "-"
    operation: str = "-"
    stream: bool = False
    end: End = End.INTERNAL
    status: int = 0
    error: str = ""
    stages: dict[Stage, float] = field(default_factory=dict)
    ttft: float | None = None
    ttft_budget: float | None = None
    tpot_budget: float | None = None
    total_budget: float | None = None
    total: float = 0.0
    tpot: float | None = None
    prompt_tokens_estimated: int | None = None
    prompt_tokens_reported: int | None = None
    cached_tokens_predicted: int | None = None
    cached_tokens_reported: int | None = None
    output_tokens: int | None = None
    engine_queue: float | None = None
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
    cost_usd: float = 0.0
    attempts: list[AttemptRecord] = field(default_factory=list)
    decision: Decision | None = None
    prefix: Sequence[int] = ()  # landmarks of the prompt

    @property
    def ttft_met(self) -> bool | None:
        """None: the route has no TTFT budget, or the caller left before it ran out, or the fault was the caller's.

        An answer that is not streamed arrives whole; it is judged by the total budget alone.
        """
        if self.ttft_budget is None or self.end is End.REFUSED:
            return None
        if self.ttft is not None:
            return self.ttft <= self.ttft_budget if self.stream else None
        if self.end is End.CLIENT_GONE and self.total <= self.ttft_budget:
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
        if self.total_budget is None or self.end in (End.REFUSED, End.CLIENT_GONE):
            return None
        return self.end is End.COMPLETED and self.total <= self.total_budget

    def as_json(self) -> dict[str, Any]:
        """For the access log and GET /requests: flat, milliseconds, no text of prompt or answer."""
        out: dict[str, Any] = {f.name: getattr(self, f.name) for f in _PLAIN}
        out["end"] = self.end.value
        for name in _SECONDS:
            value = getattr(self, name)
            out[f"{name}_ms"] = None if value is None else round(value * 1e3, 3)
        out["stages_ms"] = {stage.value: round(s * 1e3, 3) for stage, s in self.stages.items()}
        out["ttft_met"], out["tpot_met"], out["total_met"] = self.ttft_met, self.tpot_met, self.total_met
        out["attempts"] = [_attempt_json(a) for a in self.attempts]
        out["prefix"] = b64encode(array("Q", self.prefix)).decode() or None
        return out


_SECONDS = (
    "ttft",
    "ttft_budget",
    "total",
    "tpot",
    "engine_queue",
    "engine_ttft",
    "ttft_predicted_p50",
    "ttft_predicted_p90",
)
_OTHERWISE = ("arrival", "end", "stages", "attempts", "decision", "tpot_budget", "total_budget", "prefix")
_PLAIN = [f for f in fields(Record) if f.name not in {*_SECONDS, *_OTHERWISE}]


def landmarks(blocks: PrefixBlocks) -> Sequence[int]:
    """The hash at every LANDMARK tokens: enough for a replay to know which prompts share a beginning.

    Tokens as we count them: an engine's count is learned, and what moves cannot be compared.
    """
    step = max(LANDMARK // blocks.size, 1)
    return blocks.hashes[step - 1 :: step]


def _attempt_json(a: AttemptRecord) -> dict[str, Any]:
    return {
        "number": a.number,
        "kind": a.kind.value,
        "endpoint": a.endpoint,
        "opened_ms": round(a.opened * 1e3, 3),
        "ended_ms": round(a.ended * 1e3, 3),
        "ending": a.ending.value,
    }


class Life:
    """Fills one Record as a request moves forward. `note` closes a stage and passes the value on."""

    __slots__ = ("_mark", "record")

    def __init__(self, record: Record) -> None:
        self.record = record
        self._mark = record.arrival

    def note(self, stage: Stage, value: T) -> T:
        """Close `stage` now."""
        self.close(stage, monotonic())
        return value

    def close(self, stage: Stage, at: float) -> None:
        """Close `stage` at a time that was taken earlier; a time before the last mark counts as no time."""
        at = max(at, self._mark)
        stages = self.record.stages
        stages[stage] = stages.get(stage, 0.0) + at - self._mark
        self._mark = at

    def decided(self, decision: Decision) -> Decision:
        """The decision, its deadline and the belief about its first choice; the wait for it is over."""
        self.close(Stage.QUEUE, decision.at)
        record = self.record
        record.decision, record.scorer = decision, decision.scorer
        if decision.deadline != FOREVER:
            record.ttft_budget = decision.deadline - record.arrival
        if (chosen := decision.chosen) is not None:
            self._believed(chosen, decision.at)
        return decision

    def _believed(self, candidate: Candidate, at: float) -> None:
        """Predictions belong to the candidate that is sent, from the moment it is."""
        record, waited = self.record, at - self.record.arrival
        record.pool, record.endpoint, record.region = (
            candidate.endpoint.pool,
            candidate.endpoint.id,
            candidate.endpoint.region,
        )
        record.tier, record.chance = candidate.tier, candidate.chance
        record.prompt_tokens_estimated, record.cached_tokens_predicted = candidate.prompt_tokens, candidate.hit
        record.ttft_predicted_p50 = waited + candidate.forecast.p50
        record.ttft_predicted_p90 = waited + candidate.forecast.p90

    def won(self, candidate: Candidate, opened: float, connected: float, sent: float, first_in: float) -> None:
        """The attempt that answered; what came before it was lost to others."""
        if candidate.endpoint.id != self.record.endpoint:
            self._believed(candidate, opened)
        if self.record.attempts:
            self.close(Stage.FAILOVER, opened)
        self.close(Stage.CONNECT, connected)
        self.close(Stage.SEND, sent)
        self.close(Stage.UPSTREAM, first_in)

    def first_token_out(self, at: float) -> None:
        self.close(Stage.RELAY, at)
        self.record.ttft = at - self.record.arrival

    def finished(self, end: End, at: float, error: str = "") -> None:
        """The last byte is out, or nothing more will be."""
        record = self.record
        if record.ttft is not None:
            self.close(Stage.STREAM, at)
        record.end, record.total = end, at - record.arrival
        if error:
            record.error = error
