"""Turns the Record of a slow request, and the Records around it, into the facts that a diagnosis reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from statistics import median

from gateway.observe.record import QUEUE, STAGE_NAMES, UPSTREAM, Record, RequestOutcome
from policies.diagnosis.diagnosis_report import MAX_CANDIDATES
from policies.diagnosis.facts import (
    EarlierPrompt,
    EngineFacts,
    LostAttempt,
    Neighbour,
    Objective,
    RequestFacts,
    hit_tokens,
)
from policies.routes.when import EFFORT
from policies.types import NEVER, AttemptOutcome, Candidate, Decision, RejectionKind

COMPARED = 8  # latest other requests, to tell a lost cache from a prompt that broke its own
SIZEABLE = 512  # tokens of a prompt from which its cached share says something
REGIONAL = 3  # requests of a region, from which its speed is judged
DOWN = (RejectionKind.DOWN, RejectionKind.ON_TRIAL)
ASLEEP, DRAINED = (RejectionKind.ASLEEP,), (RejectionKind.DRAINED,)
SHORTEST = 1e-3  # s upstream, against a division by zero


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The Records around a slow request, its own excepted: `recent` have ended, oldest first; `live` are in progress.
    `lost_at`: when endpoints lost their caches."""

    recent: Sequence[Record]
    live: Sequence[Record]
    lost_at: Mapping[str, float]


def request_facts(
    record: Record, objective: Objective, around: Surroundings, earlier: EarlierPrompt | None
) -> RequestFacts:
    decision = record.decision
    candidate = _candidate(record, decision)
    return RequestFacts(
        route=record.route.name,
        pool=_pool(record, decision),
        tenant=record.tenant,
        endpoint=record.endpoint.id,
        region=record.endpoint.locality,
        objective=objective,
        over=over_budget(record, objective),
        stream=record.asked.stream,
        stages={name: spent for name, spent in zip(STAGE_NAMES, record.spent, strict=True) if spent is not None},
        held=record.held or {},
        attempts=_lost_attempts(record),
        placement=None if decision is None else decision.outcome,
        rejected=() if decision is None else [each.kind for each in decision.rejected],
        down=_rejected_for(DOWN, decision),
        asleep=_rejected_for(ASLEEP, decision),
        drained=_rejected_for(DRAINED, decision),
        prompt=prompt_tokens(record),
        cached=record.answer.cached_tokens,
        predicted=record.placed.cached_tokens or 0,
        output=record.answer.output_tokens or 0,
        tpot=record.answer.tpot,
        gap=record.answer.gaps.longest or 0.0,
        thinking=thinking_time(record),
        effort=record.asked.members.get(EFFORT, ""),
        unread=_unread(record),
        lag=record.loop_lag,
        forecast=None if candidate is None else candidate.forecast.p50,
        engine=_engine(record, candidate),
        local=candidate is None or candidate.forecast.prefill > 0,
        earlier=earlier,
        neighbours=list(_neighbours(record, around)),
        region_ratio=_region_ratio(record, around.recent),
        route_share=_route_share(record, around),
        endpoint_share=_endpoint_share(record, around),
    )


def over_budget(record: Record, objective: Objective) -> float:
    """Seconds over the budget that was missed; the whole time of a request that failed or has no first token."""
    if objective is Objective.TTFT and record.promised is not None:
        return record.promised - (record.budgets.ttft or 0.0)
    if objective is Objective.TPOT:
        return ((record.answer.tpot or 0.0) - (record.budgets.tpot or 0.0)) * (record.answer.output_tokens or 0)
    if objective is Objective.GAP:
        return (record.answer.gaps.longest or 0.0) - (record.budgets.gap or 0.0)
    return record.total - (record.budgets.total or 0.0) if objective is Objective.TOTAL else record.total


def thinking_time(record: Record) -> float:
    """Reasoning before the answer, where the budget is of the answer."""
    if not record.route.promises_answer or record.answer.first_reasoning is None:
        return 0.0
    return (
        record.total if record.answer.first_answer is None else record.answer.first_answer
    ) - record.answer.first_reasoning


def prompt_tokens(record: Record) -> int:
    """By the engine's count, or else by the gateway's."""
    return record.answer.prompt_tokens or record.placed.prompt_tokens or 0


def computed_tokens(record: Record) -> int:
    """Of the prompt."""
    prompt = prompt_tokens(record)
    return prompt - hit_tokens(prompt, record.answer.cached_tokens, record.placed.cached_tokens)


def _candidate(record: Record, decision: Decision | None) -> Candidate | None:
    ranked = () if decision is None else decision.ranked
    return next((each for each in ranked if record.endpoint.id in (each.endpoint.id, "-")), None)


def _pool(record: Record, decision: Decision | None) -> str:
    """The pool of a refused request is the first that was considered."""
    if record.endpoint.pool != "-" or decision is None:
        return record.endpoint.pool
    known = chain((each.endpoint.pool for each in decision.ranked), (each.pool for each in decision.rejected))
    return next(known, "-")


def _rejected_for(kinds: Sequence[RejectionKind], decision: Decision | None) -> Sequence[str]:
    """The endpoints, or pools, that were no candidates for one of these reasons."""
    if decision is None:
        return ()
    return [each.endpoint or each.pool for each in decision.rejected if each.kind in kinds]


def _lost_attempts(record: Record) -> list[LostAttempt]:
    """Attempts without an answer. A cancelled attempt of an answered request was overtaken by the winner."""
    if record.end is RequestOutcome.COMPLETED:
        lost, harmless = record.attempts[:-1], {AttemptOutcome.COMPLETED}
    else:
        lost, harmless = record.attempts, {AttemptOutcome.COMPLETED, AttemptOutcome.CANCELLED}
    return [
        LostAttempt(each.endpoint, each.ending, each.status, each.ended - each.opened, each.cause)
        for each in lost
        if each.ending not in harmless
    ]


def _unread(record: Record) -> float:
    """From the last token in to the last byte out."""
    stream, tokens = record.spent[-1], record.answer.output_tokens or 0
    if stream is None or record.answer.tpot is None:
        return 0.0
    return max(stream - record.answer.tpot * max(tokens - 1, 0), 0.0)


def _engine(record: Record, candidate: Candidate | None) -> EngineFacts:
    if candidate is None:
        return EngineFacts(record.answer.engine_queue, record.answer.engine_prefill)
    load = candidate.load
    return EngineFacts(
        record.answer.engine_queue,
        record.answer.engine_prefill,
        load.kv_usage,
        load.running,
        load.waiting,
        candidate.forecast.prefill,
        load.backlog_s + load.wait,
    )


# -- requests around ----------------------------------------------------------------------


def _prefill(record: Record, now: float) -> tuple[float, float]:
    """Times at which the prompt was sent and the first token came; `now` for a first token still awaited."""
    began = record.arrival + sum(spent or 0.0 for spent in record.spent[:UPSTREAM])
    return began, now if record.ttft is None else record.arrival + record.ttft


def _neighbours(record: Record, around: Surroundings) -> Iterable[Neighbour]:
    end = record.arrival + record.total
    queued = record.arrival + sum(spent or 0.0 for spent in record.spent[:QUEUE])
    sent, first = _prefill(record, end)
    places = _places(record)
    for other in (*around.recent, *around.live):
        if places and other.endpoint.id not in places:
            continue
        began, done = _prefill(other, end)
        ahead = began < first and done > queued and (began < sent or done <= first)
        during = began < end and done > first
        if ahead or during:
            served = other.ttft is not None and done <= end
            yield Neighbour(other.tenant, computed_tokens(other), ahead, during, served)


def _places(record: Record) -> frozenset[str]:
    """Endpoints where the request went, or could have gone; empty: any."""
    if record.endpoint.id != "-":
        return frozenset((record.endpoint.id, *(attempt.endpoint for attempt in record.attempts)))
    ranked = () if record.decision is None else record.decision.ranked
    return frozenset(each.endpoint.id for each in islice(ranked, MAX_CANDIDATES))


def _region_ratio(record: Record, recent: Iterable[Record]) -> float | None:
    if not record.endpoint.locality:
        return None
    here, elsewhere = list[float](), list[float]()
    for other in recent:
        if (
            other.route.name == record.route.name
            and other.endpoint.locality
            and (spent := other.spent[UPSTREAM]) is not None
        ):
            (here if other.endpoint.locality == record.endpoint.locality else elsewhere).append(spent)
    if min(len(here), len(elsewhere)) < REGIONAL:
        return None
    return median(here[-COMPARED:]) / max(median(elsewhere), SHORTEST)


def _route_share(record: Record, around: Surroundings) -> float | None:
    """Of the latest other prompts of the route, since the last loss of a cache: share forecast as cached."""
    since = around.lost_at.get(record.endpoint.id, NEVER)
    shares = [
        (other.placed.cached_tokens or 0) / (other.placed.prompt_tokens or 1)
        for other in around.recent
        if other.route.name == record.route.name
        and other.arrival > since
        and (other.placed.prompt_tokens or 0) >= SIZEABLE
    ]
    return median(shares[-COMPARED:]) if shares else None


def _endpoint_share(record: Record, around: Surroundings) -> float | None:
    """Of the latest other prompts at the endpoint that were forecast as cached: share that was."""
    shares = [
        other.answer.cached_tokens / other.placed.cached_tokens
        for other in around.recent
        if other.endpoint.id == record.endpoint.id
        and other.answer.cached_tokens is not None
        and other.placed.cached_tokens is not None
        and other.placed.cached_tokens >= SIZEABLE
    ]
    return median(shares[-COMPARED:]) if len(shares) >= REGIONAL else None
