"""Fills the Record of one request in progress.

Rules:
- While a request runs, the end of a stage is a stamp in a list. `add_up` makes stages of the stamps: for the headers of
  the answer, and once at the end.
- Stages are closed in order and never overlap, so their sum is the TTFT by construction.
- The timeline only takes notes; `gateway.observe.record` derives results. Facts of one origin are set as one value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from time import monotonic

from backends.interface import EngineTimes, ReplyFacts, Usage
from gateway.api.inference_request import InferenceRequest
from gateway.api.request_headers import sent_before
from gateway.observe.metrics.loop_lag import LoopLag
from gateway.observe.record import (
    CONNECT,
    ESTIMATE,
    FAILOVER,
    NO_FACTS,
    NO_GAPS,
    QUEUE,
    RATE_LIMIT,
    RELAY,
    SEND,
    STREAM,
    UPSTREAM,
    AnswerFacts,
    AskedFacts,
    AttemptRecord,
    Budgets,
    Placed,
    Record,
    RequestOutcome,
    Stage,
    TokenGaps,
)
from gateway.observe.trace_context import Trace, parent
from policies.fleet.fleet import AttemptReport
from policies.queue.queued_request import HoldRule
from policies.routes.route import Route
from policies.types import (
    FOREVER,
    AttemptOutcome,
    Candidate,
    Decision,
    PoolEstimate,
    PrefixBlocks,
    PromptEstimate,
)

LANDMARK = 512  # tokens between two block hashes in a Record
RATE_LIMITED = AttemptOutcome.RATE_LIMITED
NO_BLOCKS = PrefixBlocks()
NOTHING = frozenset[str]()
UNWATCHED = LoopLag()  # of an event loop without measurement


class RequestTimeline:
    """Fills one Record as a request moves forward. `stamps`: ends of stages that are not added up yet; `prompt`: as the
    pool of the first tier sees it; `kept_of`: pool and model of a kept answer that is repeated, which the Record does
    not count for the pool."""

    __slots__ = ("_blocks", "_cap", "_is_queued", "_lag", "_mark", "kept_of", "prompt", "record", "request", "stamps")

    def __init__(self, record: Record, lag: LoopLag = UNWATCHED) -> None:
        self.record = record
        self.stamps = list[tuple[Stage, float]]()
        self._mark = record.arrival
        self._blocks = NO_BLOCKS  # of the prompt
        self.request: InferenceRequest | None = None
        self.prompt: PoolEstimate | None = None
        self.kept_of = ("", "")
        self._cap: int | None = None  # of the route, where the caller asks for more
        self._is_queued = False  # the queue stage is closed
        self._lag = lag

    def end_stage(self, stage: Stage) -> None:
        """Close `stage` now."""
        self.stamps.append((stage, monotonic()))

    def close(self, *ends: tuple[Stage, float]) -> None:
        """Close stages at earlier times."""
        self.stamps += ends

    def add_up(self) -> float:
        """Make stages of the stamps; returns the end of the last one. A time before the end of the stage before counts
        as no time. A stage closed again adds up."""
        mark, spent = self._mark, self.record.spent
        for stage, at in self.stamps:
            if at > mark:
                spent[stage] = (spent[stage] or 0.0) + at - mark
                mark = at
            elif spent[stage] is None:
                spent[stage] = 0.0
        self.stamps.clear()
        self._mark = mark
        return mark

    def stalled(self, now: float) -> float:
        """Note the longest stall of the event loop that may have delayed the request so far."""
        lag = self.record.loop_lag = self._lag.since(self.record.arrival, now)
        return lag

    def identified(self, request_id: str, operation: str, trace: Trace | None) -> None:
        """Note request id, operation and, with tracing on, the trace context."""
        record = self.record
        record.request_id = request_id
        record.operation = operation
        record.trace = trace
        if trace is not None:
            record.trace_id = trace.id

    def routed(self, request: InferenceRequest, route: Route) -> None:
        """Note what was asked, and the budgets. Labels come from the configuration only: no caller can create a metric
        series."""
        record, asked = self.record, request.max_tokens
        record.route = route
        cap = route.limits.output_tokens
        self._cap = cap if cap is not None and asked is not None and asked > cap else None
        record.asked = AskedFacts(
            stream=request.stream,
            max_tokens=asked,
            choices=request.choices,
            members=request.members,
            job_class=request.job_class,
            sent_before=None if request.sent_at is None else sent_before(request.sent_at, record.wall),
            session=hash((record.tenant, request.session)) if request.session else 0,
            conversation=_digest(request.session) if request.is_conversation else "",
            service_tier=request.body.get("service_tier"),
            prompt_changes=request.prompt_changes,
        )
        ttft, total = route.ttft_budget(request.ttft_budget), route.total.budget if route.total else None
        if ttft == FOREVER and total is None and (by := route.done_within(request.by)) != FOREVER:
            total = by
        record.budgets = Budgets(
            ttft=None if ttft == FOREVER else ttft,
            tpot=route.tpot_budget(request.tpot_budget),
            gap=route.gap.budget if route.gap else None,
            total=total,
        )
        if not record.trace_id and request.traceparent and (caller := parent(request.traceparent)) is not None:
            record.trace_id = caller.id  # with tracing off, the id of the caller's own trace

    def prompt_changed(self, rules: Sequence[str]) -> None:
        """Note the rules that have changed the prompt since it was routed."""
        self.record.asked = self.record.asked._replace(prompt_changes=rules)

    def estimated(self, request: InferenceRequest, route: Route, estimate: PromptEstimate) -> None:
        """Note the prompt, which a request that is refused has too, and its TTFT budget, where the route's grows; the
        estimate stage ends."""
        if (prompt := next(iter(estimate.pools.values()), None)) is not None:  # of the first tier
            self.record.placed = Placed(prompt_tokens=prompt.tokens)
            self._blocks, self.prompt = prompt.blocks, prompt
            self.request = request
        if route.budget_grows:
            self._budget(ttft=route.ttft_budget(request.ttft_budget, estimate.uncached_tokens))
        self.stamps.append((ESTIMATE, monotonic()))

    def decided(self, decision: Decision) -> Decision:
        """Note the decision, its deadline and the prediction for the first candidate. The queue stage ends, unless
        `held` has ended it."""
        record = self.record
        if not self._is_queued:
            self._is_queued = True
            self.stamps.append((QUEUE, decision.at))
        record.decision = decision
        budgets = record.budgets
        if budgets.ttft is None and budgets.total is None and decision.deadline != FOREVER:
            self._budget(ttft=decision.deadline - record.arrival)
        if (chosen := decision.chosen) is not None:
            self._predicted(decision, chosen, decision.at)
        else:
            record.placed = record.placed._replace(scorer=decision.scorer, rejected=_rejected(decision))
        return decision

    def held(self, at: float, by_rule: Mapping[str, float]) -> None:
        """Close the queue stage at `at`. `by_rule`: seconds by the rule that held the request since the stage began;
        those of a rate limit are a stage of their own. A request that is queued again after a reload adds up."""
        record, self._is_queued = self.record, True
        if not by_rule:
            self.stamps.append((QUEUE, at))
            return
        before = record.held or {}
        record.held = {**before, **{rule: before.get(rule, 0.0) + seconds for rule, seconds in by_rule.items()}}
        limited = by_rule.get(HoldRule.RATE_LIMIT, 0.0)
        self.stamps.append((QUEUE, at - limited))
        if limited:
            self.stamps.append((RATE_LIMIT, at))

    def unread(self) -> None:
        """Note that the caller does not read: the end of the answer is no longer the gateway's to forecast."""
        self.record.placed = self.record.placed._replace(total_p50=None, total_p90=None)

    def _predicted(self, decision: Decision | None, candidate: Candidate, at: float) -> None:
        """Note the candidate of an attempt, with its forecasts counted from arrival."""
        forecast, waited = candidate.forecast, at - self.record.arrival
        completion = None if decision is None else decision.completion(candidate)
        self.record.endpoint = candidate.endpoint
        self.record.placed = Placed(
            tier=candidate.tier,
            chance=candidate.probability,
            scorer="" if decision is None else decision.scorer,
            rejected=NOTHING if decision is None or not decision.rejected else _rejected(decision),
            max_tokens=None if decision is None else decision.output_limits.get(candidate.endpoint.pool, self._cap),
            prompt_tokens=candidate.prompt_tokens,
            cached_tokens=candidate.hit,
            to_load=candidate.to_load,
            ttft_p50=waited + forecast.p50,
            ttft_p90=waited + forecast.p90,
            total_p50=None if completion is None else waited + completion.p50,
            total_p90=None if completion is None else waited + completion.p90,
        )

    def attempt_ended(self, attempt: AttemptRecord) -> None:
        self.record.attempts.append(attempt)

    def won(
        self,
        candidate: Candidate,
        model: str,
        *,
        opened: float,
        connected: float,
        sent: float,
        first_in: float,
        head: float | None = None,
        first_byte: float | None = None,
    ) -> None:
        """Note the attempt that answered; the time before was lost to other attempts. `head`, `first_byte`: of the
        reply, before its first token.

        A further attempt at an endpoint that refused waits for the announced rate limit.
        """
        record, endpoint = self.record, candidate.endpoint.id
        arrival = record.arrival
        record.answer = AnswerFacts(
            model=model,
            head=None if head is None else head - arrival,
            first_byte=None if first_byte is None else first_byte - arrival,
        )
        if endpoint != record.endpoint.id:
            self._predicted(record.decision, candidate, opened)
        if record.attempts:
            lost = record.attempts[-1]
            if lost.ending is RATE_LIMITED and lost.endpoint == endpoint:
                self.stamps += ((FAILOVER, arrival + lost.ended), (RATE_LIMIT, opened))
            else:
                self.stamps.append((FAILOVER, opened))
        self.stamps += ((CONNECT, connected), (SEND, sent), (UPSTREAM, first_in))

    def first_token_out(self, at: float, status: int) -> None:
        record = self.record
        self.stamps.append((RELAY, at))
        record.loop_lag = self._lag.since(record.arrival, at)
        record.status = status
        record.ttft = at - record.arrival

    def answered(
        self,
        attempt: AttemptRecord,
        reported: AttemptReport,
        times: EngineTimes,
        *,
        output_tokens: int,
        tpot: float | None,
        blocks: PrefixBlocks,
        gaps: TokenGaps = NO_GAPS,
        reasoning_in: float | None = None,
        answer_in: float | None = None,
        usage: Usage | None = None,
        facts: ReplyFacts = NO_FACTS,
    ) -> None:
        """Note tokens and engine times of the attempt that won, at its end. `reasoning_in`, `answer_in`: first tokens.
        `blocks`: of the prompt, as the pool that answered counts. `usage`: of the whole answer, where one server gave
        it."""
        record, ttft, before = self.record, self.record.ttft, self.record.answer
        record.attempts.append(attempt)
        if ttft is not None:  # no earlier than the first token was written
            reasoning_in = None if reasoning_in is None else max(reasoning_in - record.arrival, ttft)
            answer_in = None if answer_in is None else max(answer_in - record.arrival, ttft)
        record.answer = AnswerFacts(
            model=before.model,
            head=before.head,
            first_byte=before.first_byte,
            first_reasoning=None if ttft is None else reasoning_in,
            first_answer=None if ttft is None else answer_in,
            tpot=tpot,
            gaps=gaps,
            prompt_tokens=reported.prompt_tokens,
            cached_tokens=reported.cached_tokens,
            cache_write_tokens=None if usage is None else usage.cache_write,
            reasoning_tokens=None if usage is None else usage.reasoning,
            output_tokens=output_tokens,
            engine_queue=times.queue,
            engine_prefill=times.prefill,
            engine_ttft=reported.engine_ttft,
            facts=facts,
        )
        self._blocks = blocks

    def unjudged(self) -> None:
        """Note that the answer is none of an engine: its promises are not judged."""
        self.record.is_judged = False

    def unseen(self) -> None:
        """Drop the TTFT budget of an answer whose body another proxy hides: the time of the first token is unknown."""
        self._budget(ttft=None)

    def gaps_unseen(self) -> None:
        """Drop the gap budget of an answer: the arrival times of some tokens are unknown, and so are the gaps."""
        self._budget(gap=None)

    def _budget(self, **changed: float | None) -> None:
        self.record.budgets = self.record.budgets._replace(**changed)

    def refused(self, status: int, error: str, end: RequestOutcome, at: float) -> None:
        """An error reply is about to be written."""
        self.record.status = status
        self.finished(end, at, error)

    def replied(self, status: int, at: float) -> None:
        """The gateway itself has answered."""
        self.first_token_out(at, status)
        self.finished(RequestOutcome.COMPLETED, at)

    def delivered(self, status: int, at: float) -> None:
        """A reply without inference is written: it has no first token."""
        self.record.status = status
        self.finished(RequestOutcome.COMPLETED, at)

    def note_error(self, error: str) -> None:
        """Note the reason of the coming end."""
        self.record.error = error

    def finished(self, end: RequestOutcome, at: float, error: str = "") -> None:
        """The last byte is out, or nothing more will be."""
        record = self.record
        record.prefix = landmarks(self._blocks) if self._blocks.hashes else ()
        if record.ttft is not None:
            self.stamps.append((STREAM, at))
        else:
            self.stalled(at)
        record.end = end
        record.total = at - record.arrival
        if error:
            record.error = error
        self.add_up()

    def close_unanswered(self) -> None:
        """Close the stages of a request that ended without a first token: the time of its failed attempts, then of the
        attempts that were in progress."""
        record = self.record
        failed = [attempt.ended for attempt in record.attempts if attempt.ending is not AttemptOutcome.CANCELLED]
        if failed:
            self.stamps.append((FAILOVER, record.arrival + max(failed)))
        if len(failed) < len(record.attempts):
            self.stamps.append((UPSTREAM, record.arrival + record.total))
        self.add_up()


def landmarks(blocks: PrefixBlocks) -> Sequence[int]:
    """Block hashes of the prompt at every LANDMARK tokens, enough for a replay to find prompts with a shared prefix.
    The tokens are the gateway's own: an engine's count is learned, and learned counts change."""
    step = max(LANDMARK // blocks.size, 1)
    return blocks.hashes[step - 1 :: step]


def _rejected(decision: Decision) -> frozenset[str]:
    return frozenset(each.kind.value for each in decision.rejected if not each.kind.is_lasting)


def _digest(name: str) -> str:
    """Digest of the name of a conversation, which may hold an account of the caller: alike in all replicas. It has no
    key: a guess of the name can be checked."""
    return blake2b(name.encode(errors="surrogatepass"), digest_size=8).hexdigest() if name else ""
