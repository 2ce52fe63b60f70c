"""The Record of one request: time by stage, predictions, outcome.

Rules:
- Stages sum to the TTFT; the time after the first token is the `stream` stage.
- A request has exactly one Record. Only the timeline (`gateway.observe.timeline`) writes to it, and the recorder once
  the request has ended.
- Times are seconds of the monotonic clock; only what is shown (`gateway.observe.record_columns`) has milliseconds.
- Records are on the path of every request: a stage is an index into a list, names are for readers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from backends.interface import ReplyFacts
from gateway.observe.trace_context import Trace
from policies.diagnosis.diagnosis_report import Diagnosis
from policies.prefix_doctor.lineage import Lineage
from policies.prefix_doctor.prefix_ledger import NO_COST, NO_LINEAGE, BreakCost
from policies.prefix_doctor.prompt_outline import Composition
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
    RELAY = 11  # to first token out
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


class AnswerSight(StrEnum):
    """Source of the end of an answer that another proxy carries. Values are the `sight` label of
    firsttoken_picked_answers_total."""

    BODY = "body"  # first token, end and usage
    ACCESS_LOG = "access_log"  # the end, and the first token from the body
    HEADERS = "headers"


_UNANSWERED = (RequestOutcome.SHED, RequestOutcome.UNAVAILABLE, RequestOutcome.FAILED)
_NOT_JUDGED = (RequestOutcome.REFUSED, RequestOutcome.CLIENT_GONE)  # by the budget of the whole answer
FAULTS = frozenset({*_UNANSWERED, RequestOutcome.UPSTREAM_BROKE, RequestOutcome.INTERNAL})  # not the caller's


class TokenGaps(NamedTuple):
    """Seconds between the tokens of a stream, as they came from the server. None: less than 10 ms, or no gap. The
    silence before the end of a stream that did not end by itself counts as a gap."""

    longest: float | None = None
    p99: float | None = None
    over_1s: int = 0


NO_GAPS = TokenGaps()
NO_FACTS = ReplyFacts()
HIT, MISS = "hit", "miss"
Verdicts = tuple[bool | None, bool | None, bool | None, bool | None]  # on TTFT, TPOT, gap and total


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
    engine_kv_tokens: int = 0  # size of the engine's KV cache, by its own report; 0: none
    region: str = ""  # of the endpoint: where the prompt went, whoever answered
    charged: bool = True  # to the caller; else bought in vain, by a shortcoming of the gateway


@dataclass(slots=True)
class Record:
    """Everything known of a request at the end. `-` marks a label that never became known."""

    request_id: str = ""
    arrival: float = 0.0
    wall: float = 0.0  # arrival as Unix time, s
    sent_before: float | None = None  # s from the sending to the arrival, by the sender's clock (`x-request-start`)
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
    head: float | None = None  # from arrival like ttft: head of the reply that answered, which an engine may send early
    first_byte: float | None = None  # first byte of its body: most engines send a chunk with the role before a token
    first_reasoning: float | None = None  # first token of reasoning before the answer, from arrival like ttft
    first_answer: float | None = None  # first token of the answer
    ttft_of: str = "any"  # token of the budget: any, or answer
    ttft_budget: float | None = None
    tpot_budget: float | None = None
    gap_budget: float | None = None
    total_budget: float | None = None
    loop_lag: float = 0.0  # longest stall of the event loop that may have delayed the first token
    total: float = 0.0
    tpot: float | None = None
    gaps: TokenGaps = NO_GAPS
    conversation: str = ""  # digest of the name that the caller gives it, for traces alone; empty: it names none
    service_tier: Any = None  # as the caller asked, for traces alone
    facts: ReplyFacts = NO_FACTS  # of the reply that answered, for traces alone
    reasoning_effort: str = ""  # as the caller asked (`gateway.api.parsed_body`); empty: it named none
    max_tokens: int | None = None  # as the caller asked
    max_tokens_lowered: int | None = None  # as sent, where the caller's exceed the context window or the route's limit
    choices: int = 1  # answers asked for
    prompt_tokens_estimated: int | None = None
    prompt_tokens_reported: int | None = None
    cached_tokens_predicted: int | None = None
    cached_tokens_to_load: dict[str, int] | None = None  # of these, from slower tiers of the engine's cache, by tier
    cached_tokens_reported: int | None = None
    cache_write_tokens_reported: int | None = None
    reasoning_tokens_reported: int | None = None
    output_tokens: int | None = None
    engine_queue: float | None = None  # by the engine's own word: these two are parts of `upstream`
    engine_prefill: float | None = None
    engine_ttft: float | None = None
    ttft_predicted_p50: float | None = None  # from arrival, like ttft
    ttft_predicted_p90: float | None = None
    total_predicted_p50: float | None = None  # from arrival, like total; where the route weighs it
    total_predicted_p90: float | None = None
    chance: float | None = None
    tier: int | None = None
    pool: str = "-"
    model: str = "-"
    endpoint: str = "-"
    region: str = ""
    scorer: str = ""
    cost_usd: float = 0.0  # of all attempts that the caller is charged for
    attempts: list[AttemptRecord] = field(default_factory=list)
    escalated: str = ""  # shortcoming of an answer for which another pool was asked (`policies.routes.route`)
    held: dict[str, float] = field(default_factory=dict)  # s in the queue, by the rule that held the request
    external_refused: bool = False  # an API was left out because of `limits.external`
    rescue: str = ""  # of a stream that broke on a route with rescue: rescued, failed or refused
    sight: AnswerSight | None = None  # of an answer that another proxy carries
    cache: str = ""  # of a route with a cache of answers: HIT, of an answer to an earlier request, or MISS
    tags: Sequence[str] = ()  # the listed tags that the caller named
    left_out: Mapping[str, str] = field(default_factory=dict)  # members lost in translation; the metric's label of each
    decision: Decision | None = None  # while the request lives
    prefix: Sequence[int] = ()  # landmarks of the prompt
    session: int = 0  # of the caller, as a hash that is never shown; 0: none is named
    weighs_completion: bool = False  # decisions of the route depend on the end of the answer
    diagnosis: Diagnosis | None = None  # of a request that missed a budget, or failed
    composition: Composition | None = None  # of the prompt, in tokens
    lineage: Lineage = NO_LINEAGE  # earlier prompt of the same conversation, continued or broken by this prompt
    break_cost: BreakCost = NO_COST  # of the break in `lineage`
    repaired: Sequence[str] = ()  # rules that changed the prompt
    trace_id: str = ""
    on_screen: float | None = None  # s to the first token as measured by the caller (`gateway.admin.gateway_admin`)
    quota: Reservation | None = None  # reservation against the key's limits, until settled

    @property
    def stages(self) -> Mapping[Stage, float]:
        """Seconds in each closed stage, in order."""
        return {stage: spent for stage, spent in zip(STAGES, self.spent, strict=True) if spent is not None}

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
        if self.ttft_budget is None or self.end is RequestOutcome.REFUSED or self.cache == HIT:
            return None
        if (promised := self.promised) is not None:
            return promised <= self.ttft_budget if self.stream else None
        if self.end is RequestOutcome.CLIENT_GONE and self.total <= self.ttft_budget:
            return None
        return False

    @property
    def verdicts(self) -> Verdicts:
        """The budgets of TTFT, TPOT, gap and total: met or missed. None: there is none, or the request is not judged by
        it. Under two tokens there is no TPOT, which counts as met."""
        ttft = None if self.ttft_budget is None else self.ttft_met
        tpot = gap = total = None
        if self.stream and self.ttft is not None:
            if self.tpot_budget is not None:
                tpot = self.tpot is None or self.tpot <= self.tpot_budget
            if self.gap_budget is not None and self.cache != HIT:
                gap = (self.gaps.longest or 0.0) <= self.gap_budget
        if self.total_budget is not None and self.cache != HIT and self.end not in _NOT_JUDGED:
            total = self.end is RequestOutcome.COMPLETED and self.total <= self.total_budget
        return ttft, tpot, gap, total

    @property
    def tpot_met(self) -> bool | None:
        return self.verdicts[1]

    @property
    def gap_met(self) -> bool | None:
        return self.verdicts[2]

    @property
    def total_met(self) -> bool | None:
        return self.verdicts[3]

    @property
    def goodput_met(self) -> bool | None:
        return goodput_met(self.end, self.verdicts)

    @property
    def cause(self) -> str:
        """Of a request that missed a budget, or failed; empty for any other."""
        return "" if self.diagnosis is None else self.diagnosis.verdict.cause.value


def goodput_met(end: RequestOutcome, verdicts: Verdicts) -> bool | None:
    """Completed within every budget that the request is judged by; None: by none, or a caller that left before one was
    missed."""
    if False in verdicts:
        return False
    if True not in verdicts or end is RequestOutcome.CLIENT_GONE:
        return None
    return end is RequestOutcome.COMPLETED
