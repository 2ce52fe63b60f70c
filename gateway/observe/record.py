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
from typing import Any, NamedTuple

from backends.interface import ReplyFacts
from gateway.observe.trace_context import Trace
from policies.routes.route import Route
from policies.types import AttemptKind, AttemptOutcome, Decision, Endpoint


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
NOWHERE = Endpoint("-", "-")
UNROUTED = Route.model_construct(name="-", workload="-")
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
    locality: str = ""  # of the endpoint: where the prompt went, whoever answered
    charged: bool = True  # to the caller; else bought in vain, by a fault of the gateway


class AskedFacts(NamedTuple):
    """Facts of a request as sent by the caller, kept after the end of the request."""

    stream: bool = False
    max_tokens: int | None = None
    choices: int = 1  # answers asked for
    members: Mapping[str, str] = {}  # of the body, of the caller's words: those that conditions of tiers test
    job_class: str = ""  # of requests that are learned of together
    sent_before: float | None = None  # s from the sending to the arrival, by the sender's clock (`x-request-start`)
    session: int = 0  # as a hash that is never shown; 0: none is named
    conversation: str = ""  # digest of the name that the caller gives it, for traces alone; empty: it names none
    service_tier: Any = None  # for traces alone
    prompt_changes: Sequence[str] = ()  # rules that changed the prompt


class Budgets(NamedTuple):
    """Seconds. None: not promised, or not to be judged."""

    ttft: float | None = None
    tpot: float | None = None
    gap: float | None = None
    total: float | None = None


class Placed(NamedTuple):
    """Facts of the decision, which outlive it: of the candidate at `endpoint`. Forecasts are s from arrival."""

    tier: int | None = None
    chance: float | None = None
    scorer: str = ""
    rejected: frozenset[str] = frozenset()  # kinds of rejections that hold for now only
    max_tokens: int | None = None  # as sent, where the caller's exceed the context window or the route's limit
    prompt_tokens: int | None = None  # estimated
    cached_tokens: int | None = None  # predicted
    to_load: tuple[int, ...] = ()  # of these, from slower tiers of the engine's cache, by tier
    ttft_p50: float | None = None
    ttft_p90: float | None = None
    total_p50: float | None = None  # where the route weighs the whole answer
    total_p90: float | None = None


class AnswerFacts(NamedTuple):
    """Facts of the attempt that answered. Times are s from arrival, but for the engine's and those between tokens."""

    model: str = "-"
    head: float | None = None  # of the reply, which an engine may send early
    first_byte: float | None = None  # of its body: most engines send a chunk with the role before a token
    first_reasoning: float | None = None  # first token of reasoning before the answer
    first_answer: float | None = None  # first token of the answer
    tpot: float | None = None
    gaps: TokenGaps = NO_GAPS
    prompt_tokens: int | None = None  # these five as reported
    cached_tokens: int | None = None
    cache_write_tokens: int | None = None
    reasoning_tokens: int | None = None
    output_tokens: int | None = None  # or as counted
    engine_queue: float | None = None  # by the engine's own word: these two are parts of `upstream`
    engine_prefill: float | None = None
    engine_ttft: float | None = None
    facts: ReplyFacts = NO_FACTS  # for traces alone


NOTHING_ASKED, NO_BUDGETS, NOT_PLACED, NO_ANSWER = AskedFacts(), Budgets(), Placed(), AnswerFacts()


@dataclass(slots=True)
class Record:
    """Facts of a request at its end, by origin, each a value that is set as a whole.
    `gateway.observe.record_columns` shows it. `-` marks a label that never became known."""

    request_id: str = ""
    arrival: float = 0.0
    wall: float = 0.0  # arrival as Unix time, s
    trace: Trace | None = None  # with tracing on
    trace_id: str = ""
    tenant: str = "-"
    operation: str = "-"
    route: Route = UNROUTED
    asked: AskedFacts = NOTHING_ASKED
    budgets: Budgets = NO_BUDGETS
    decision: Decision | None = None  # while the request lives
    endpoint: Endpoint = NOWHERE  # of the last attempt, or chosen for the first
    placed: Placed = NOT_PLACED
    attempts: list[AttemptRecord] = field(default_factory=list)
    answer: AnswerFacts = NO_ANSWER
    spent: list[float | None] = field(default_factory=UNSPENT.copy)  # s by Stage; None: never closed
    held: Mapping[str, float] | None = None  # s in the queue, by the rule that held the request
    ttft: float | None = None
    total: float = 0.0
    loop_lag: float = 0.0  # longest stall of the event loop that may have delayed the first token
    end: RequestOutcome = RequestOutcome.INTERNAL
    status: int = 0
    error: str = ""
    is_judged: bool = True  # False: the answer says nothing of engines
    prefix: Sequence[int] = ()  # landmarks of the prompt
    notes: tuple[Any, ...] = ()  # of parts (`gateway.observe.columns.Note`)

    @property
    def stages(self) -> Mapping[Stage, float]:
        """Seconds in each closed stage, in order."""
        return {stage: spent for stage, spent in zip(STAGES, self.spent, strict=True) if spent is not None}

    @property
    def promised(self) -> float | None:
        """Seconds from arrival to the token that the TTFT budget is of; None: it never came."""
        answer = self.answer
        return answer.first_answer if self.route.promises_answer and answer.first_reasoning is not None else self.ttft

    @property
    def verdicts(self) -> Verdicts:
        """The budgets of TTFT, TPOT, gap and total: met or missed. None: there is none, or the request is not judged by
        it. Under two tokens there is no TPOT, which counts as met.

        TTFT is not judged of a fault of the caller, of a caller that left within the budget, and of an answer without
        streaming, which arrives whole: `total` judges that."""
        budgets, answer, is_stream, end = self.budgets, self.answer, self.asked.stream, self.end
        ttft = tpot = gap = total = None
        if budgets.ttft is not None and self.is_judged and end is not RequestOutcome.REFUSED:
            if (promised := self.promised) is not None:
                ttft = promised <= budgets.ttft if is_stream else None
            elif end is not RequestOutcome.CLIENT_GONE or self.total > budgets.ttft:
                ttft = False
        if is_stream and self.ttft is not None:
            if budgets.tpot is not None:
                tpot = answer.tpot is None or answer.tpot <= budgets.tpot
            if budgets.gap is not None and self.is_judged:
                gap = (answer.gaps.longest or 0.0) <= budgets.gap
        if budgets.total is not None and self.is_judged and end not in _NOT_JUDGED:
            total = end is RequestOutcome.COMPLETED and self.total <= budgets.total
        return ttft, tpot, gap, total

    @property
    def ttft_met(self) -> bool | None:
        return self.verdicts[0]

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
    def cost_usd(self) -> float:
        """Of all attempts that the caller is charged for."""
        return sum((each.cost_usd for each in self.attempts if each.charged), 0.0)


def goodput_met(end: RequestOutcome, verdicts: Verdicts) -> bool | None:
    """Completed within every budget that the request is judged by; None: by none, or a caller that left before one was
    missed."""
    if False in verdicts:
        return False
    if True not in verdicts or end is RequestOutcome.CLIENT_GONE:
        return None
    return end is RequestOutcome.COMPLETED
