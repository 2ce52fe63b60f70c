"""Fills the Record of one request in progress.

Rules:
- Stages are closed in order and never overlap, so their sum is the TTFT by construction.
- The timeline only takes notes; `gateway.observe.record` derives results.
- A timeline is on the path of every request: closing a stage writes one number into a list.
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
    HIT,
    MISS,
    NO_FACTS,
    NO_GAPS,
    QUEUE,
    RATE_LIMIT,
    RELAY,
    SEND,
    STREAM,
    UPSTREAM,
    AnswerSight,
    AttemptRecord,
    Record,
    RequestOutcome,
    Stage,
    TokenGaps,
)
from gateway.observe.trace_context import Trace, parent
from policies.fleet.fleet import AttemptReport
from policies.queue.queued_request import HoldRule
from policies.quota.key_limits import Reservation
from policies.routes.route import Route
from policies.types import (
    FOREVER,
    AttemptOutcome,
    Candidate,
    Decision,
    PoolEstimate,
    PrefixBlocks,
    PromptEstimate,
    RejectionKind,
)

LANDMARK = 512  # tokens between two block hashes in a Record
RATE_LIMITED = AttemptOutcome.RATE_LIMITED
NO_BLOCKS = PrefixBlocks()
UNWATCHED = LoopLag()  # of an event loop without measurement


class RequestTimeline:
    """Fills one Record as a request moves forward. `mark`: end of the last closed stage, the start of the next;
    `prompt`: as the pool of the first tier sees it; `kept_of`: pool and model of a kept answer that is repeated, which
    the Record does not count for the pool."""

    __slots__ = ("_blocks", "_cap", "_lag", "kept_of", "mark", "prompt", "record", "request")

    def __init__(self, record: Record, lag: LoopLag = UNWATCHED) -> None:
        self.record = record
        self.mark = record.arrival
        self._blocks = NO_BLOCKS  # of the prompt
        self.request: InferenceRequest | None = None
        self.prompt: PoolEstimate | None = None
        self.kept_of = ("", "")
        self._cap: int | None = None  # of the route, where the caller asks for more
        self._lag = lag

    def end_stage(self, stage: Stage) -> None:
        """Close `stage` now."""
        now, spent = monotonic(), self.record.spent
        spent[stage] = (spent[stage] or 0.0) + now - self.mark
        self.mark = now

    def close(self, *ends: tuple[Stage, float]) -> None:
        """Close stages at earlier times; a time before `mark` counts as no time. A stage closed again adds up."""
        spent = self.record.spent
        for stage, at in ends:
            if at > self.mark:
                spent[stage] = (spent[stage] or 0.0) + at - self.mark
                self.mark = at
            elif spent[stage] is None:
                spent[stage] = 0.0

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

    def authorized(self, tenant: str) -> None:
        self.record.tenant = tenant

    def routed(self, request: InferenceRequest, route: Route) -> None:
        """Note labels and budgets. Labels come from the configuration only: no caller can create a metric series."""
        record = self.record
        record.route = route.name
        record.workload = route.workload
        record.weighs_completion = route.weighs_completion
        record.stream = request.stream
        record.max_tokens = asked = request.max_tokens
        cap = route.limits.output_tokens
        self._cap = cap if cap is not None and asked is not None and asked > cap else None
        record.choices = request.choices
        record.repaired = request.repaired
        if request.session:
            record.session = hash((record.tenant, request.session))
        if request.sent_at is not None:
            record.sent_before = sent_before(request.sent_at, record.wall)
        if route.promises_answer:
            record.ttft_of = "answer"
        ttft_budget = route.ttft_budget(request.ttft_budget)
        record.ttft_budget = None if ttft_budget == FOREVER else ttft_budget
        record.tpot_budget = route.tpot_budget(request.tpot_budget)
        record.gap_budget = route.gap.budget if route.gap else None
        record.total_budget = route.total.budget if route.total else None
        if record.ttft_budget is None and record.total_budget is None:
            by = route.done_within(request.by)
            record.total_budget = None if by == FOREVER else by
        if not record.trace_id and request.traceparent and (caller := parent(request.traceparent)) is not None:
            record.trace_id = caller.id  # with tracing off, the id of the caller's own trace

    def repaired(self, rules: Sequence[str]) -> None:
        """Note the rules that have changed the prompt since it was routed."""
        self.record.repaired = rules

    def estimated(self, request: InferenceRequest, route: Route, estimate: PromptEstimate) -> None:
        """Note the prompt, which a request that is refused has too, and its TTFT budget, where the route's grows; the
        estimate stage ends."""
        if (prompt := next(iter(estimate.pools.values()), None)) is not None:  # of the first tier
            self.record.prompt_tokens_estimated = prompt.tokens
            self._blocks, self.prompt = prompt.blocks, prompt
            self.request = request
        if route.budget_grows:
            self.record.ttft_budget = route.ttft_budget(request.ttft_budget, estimate.uncached_tokens)
        self.end_stage(ESTIMATE)

    def reserved(self, reservation: Reservation | None) -> None:
        """Note the reservation against the key's limits, or the limit that refused the request; None: withdrawn."""
        self.record.quota = reservation

    def decided(self, decision: Decision) -> Decision:
        """Note the decision, its deadline and the prediction for the first candidate. The queue stage ends, unless
        `held` has ended it."""
        record = self.record
        if record.spent[QUEUE] is None:
            self.close((QUEUE, decision.at))
        record.decision = decision
        record.scorer = decision.scorer
        record.external_refused = bool(decision.rejected) and any(
            each.kind is RejectionKind.EXTERNAL_LIMIT for each in decision.rejected
        )
        if record.ttft_budget is None and record.total_budget is None and decision.deadline != FOREVER:
            record.ttft_budget = decision.deadline - record.arrival
        if (chosen := decision.chosen) is not None:
            self._predicted(chosen, decision.at)
        return decision

    def held(self, at: float, by_rule: Mapping[str, float]) -> None:
        """Close the queue stage at `at`. `by_rule`: seconds by the rule that held the request since the stage began;
        those of a rate limit are a stage of their own. A request that is queued again after a reload adds up."""
        record = self.record
        for rule, seconds in by_rule.items():
            record.held[rule] = record.held.get(rule, 0.0) + seconds
        limited = by_rule.get(HoldRule.RATE_LIMIT, 0.0)
        self.close((QUEUE, at - limited))
        if limited:
            self.close((RATE_LIMIT, at))

    def unread(self) -> None:
        """Note that the caller does not read: the end of the answer is no longer the gateway's to forecast."""
        self.record.total_predicted_p50 = self.record.total_predicted_p90 = None

    def _predicted(self, candidate: Candidate, at: float) -> None:
        """Note the predictions for the candidate of an attempt, counted from arrival."""
        record, endpoint, forecast = self.record, candidate.endpoint, candidate.forecast
        waited = at - record.arrival
        record.pool = endpoint.pool
        record.endpoint = endpoint.id
        record.region = endpoint.region
        record.tier = candidate.tier
        record.chance = candidate.probability
        record.max_tokens_lowered = (
            None if record.decision is None else record.decision.output_limits.get(endpoint.pool, self._cap)
        )
        record.prompt_tokens_estimated = candidate.prompt_tokens
        record.cached_tokens_predicted = candidate.hit
        record.cached_tokens_to_load = candidate.hit_tiers if candidate.to_load else None
        record.ttft_predicted_p50 = waited + forecast.p50
        record.ttft_predicted_p90 = waited + forecast.p90
        completion = None if record.decision is None else record.decision.completion(candidate)
        record.total_predicted_p50 = None if completion is None else waited + completion.p50
        record.total_predicted_p90 = None if completion is None else waited + completion.p90

    def kept(self, shortcoming: str) -> None:
        """An answer is kept while another pool is asked for a better one."""
        self.record.escalated = shortcoming

    def tagged(self, tags: Sequence[str]) -> None:
        self.record.tags = tags

    def looked_up(self, found: bool) -> None:
        """Note the result of a look into the cache of answers."""
        self.record.cache = HIT if found else MISS

    def replays(self, pool: str, model: str) -> None:
        """Note whose answer the cache has kept."""
        self.kept_of = pool, model

    def left_out(self, members: Mapping[str, str]) -> None:
        """Note the members of the request that its translation for the pool has lost."""
        self.record.left_out = members

    def rescue(self, state: str) -> None:
        """Note what became of a stream that broke: failed (so far), rescued or refused."""
        self.record.rescue = state

    def attempt_ended(self, attempt: AttemptRecord) -> None:
        self.record.attempts.append(attempt)
        if attempt.charged:
            self.record.cost_usd += attempt.cost_usd

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
        record.model = model
        record.head = None if head is None else head - record.arrival
        record.first_byte = None if first_byte is None else first_byte - record.arrival
        if endpoint != record.endpoint:
            self._predicted(candidate, opened)
        if record.attempts:
            lost = record.attempts[-1]
            if lost.ending is RATE_LIMITED and lost.endpoint == endpoint:
                self.close((FAILOVER, record.arrival + lost.ended), (RATE_LIMIT, opened))
            else:
                self.close((FAILOVER, opened))
        self.close((CONNECT, connected), (SEND, sent), (UPSTREAM, first_in))

    def first_token_out(self, at: float, status: int) -> None:
        record = self.record
        self.close((RELAY, at))
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
        record = self.record
        self.attempt_ended(attempt)
        record.prompt_tokens_reported = reported.prompt_tokens
        record.cached_tokens_reported = reported.cached_tokens
        record.engine_ttft = reported.engine_ttft
        record.engine_queue = times.queue
        record.engine_prefill = times.prefill
        record.output_tokens = output_tokens
        record.tpot = tpot
        record.gaps = gaps
        record.facts = facts
        if usage is not None:
            record.cache_write_tokens_reported = usage.cache_write
            record.reasoning_tokens_reported = usage.reasoning
        if record.ttft is not None:  # no earlier than the first token was written
            if reasoning_in is not None:
                record.first_reasoning = max(reasoning_in - record.arrival, record.ttft)
            if answer_in is not None:
                record.first_answer = max(answer_in - record.arrival, record.ttft)
        self._blocks = blocks

    def unseen(self) -> None:
        """Drop the TTFT budget of an answer whose body another proxy hides: the time of the first token is unknown."""
        self.record.ttft_budget = None

    def gaps_unseen(self) -> None:
        """Drop the gap budget of an answer: the arrival times of some tokens are unknown, and so are the gaps."""
        self.record.gap_budget = None

    def seen(self, sight: AnswerSight) -> None:
        self.record.sight = sight

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
        record.prefix = landmarks(self._blocks)
        if (request := self.request) is not None:
            record.reasoning_effort = request.reasoning_effort
            record.conversation = _digest(request.session) if request.is_conversation else ""
            record.service_tier = request.body.get("service_tier")
        if record.ttft is not None:
            self.close((STREAM, at))
        else:
            self.stalled(at)
        record.end = end
        record.total = at - record.arrival
        if error:
            record.error = error

    def close_unanswered(self) -> None:
        """Close the stages of a request that ended without a first token: the time of its failed attempts, then of the
        attempts that were in progress."""
        record = self.record
        failed = [attempt.ended for attempt in record.attempts if attempt.ending is not AttemptOutcome.CANCELLED]
        if failed:
            self.close((FAILOVER, record.arrival + max(failed)))
        if len(failed) < len(record.attempts):
            self.close((UPSTREAM, record.arrival + record.total))

    def landmarks(self) -> Sequence[int]:
        """Block hashes of the prompt at every LANDMARK tokens, enough for a replay to find prompts with a shared
        prefix. The tokens are the gateway's own: an engine's count is learned, and learned counts change."""
        return landmarks(self._blocks)


def landmarks(blocks: PrefixBlocks) -> Sequence[int]:
    """Block hashes at every LANDMARK tokens."""
    step = max(LANDMARK // blocks.size, 1)
    return blocks.hashes[step - 1 :: step]


def note_on_screen(record: Record, seconds: float) -> None:
    """Note the caller's own measurement, which comes after the answer."""
    record.on_screen = seconds


def _digest(name: str) -> str:
    """Digest of the name of a conversation, which may hold an account of the caller: alike in all replicas. It has no
    key: a guess of the name can be checked."""
    return blake2b(name.encode(errors="surrogatepass"), digest_size=8).hexdigest() if name else ""
