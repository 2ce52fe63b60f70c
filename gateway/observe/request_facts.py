"""Turns the Record of a slow request, and the Records around it, into the facts that a diagnosis reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from statistics import median

from gateway.observe.record import FAULTS, QUEUE, STAGE_NAMES, UPSTREAM, Record, RequestOutcome
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
from policies.types import NEVER, AttemptOutcome, Candidate, Decision, RejectionKind

COMPARED = 8  # latest other requests, to tell a lost cache from a prompt that broke its own
SIZEABLE = 512  # tokens of a prompt from which its cached share says something
REGIONAL = 3  # requests of a region, from which its speed is judged
OBJECTIVES = (Objective.TTFT, Objective.TPOT, Objective.GAP, Objective.TOTAL)  # in the order of `Record.verdicts`
DOWN = (RejectionKind.DOWN, RejectionKind.ON_TRIAL)
ASLEEP = (RejectionKind.ASLEEP,)
SHORTEST = 1e-3  # s upstream, against a division by zero


def missed_objective(record: Record) -> Objective | None:
    """The first promise that was missed; None: the request is not slow."""
    if record.end in FAULTS:
        return Objective.ANSWER
    verdicts = record.verdicts
    return OBJECTIVES[verdicts.index(False)] if False in verdicts else None


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
        route=record.route,
        pool=_pool(record, decision),
        tenant=record.tenant,
        endpoint=record.endpoint,
        region=record.region,
        objective=objective,
        over=over_budget(record, objective),
        stream=record.stream,
        stages={name: spent for name, spent in zip(STAGE_NAMES, record.spent, strict=True) if spent is not None},
        held=record.held,
        attempts=_lost_attempts(record),
        placement=None if decision is None else decision.outcome,
        rejected=() if decision is None else [each.kind for each in decision.rejected],
        down=_rejected_for(DOWN, decision),
        asleep=_rejected_for(ASLEEP, decision),
        prompt=prompt_tokens(record),
        cached=record.cached_tokens_reported,
        predicted=record.cached_tokens_predicted or 0,
        output=record.output_tokens or 0,
        tpot=record.tpot,
        gap=record.gaps.longest or 0.0,
        thinking=thinking_time(record),
        effort=record.reasoning_effort,
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
        return record.promised - (record.ttft_budget or 0.0)
    if objective is Objective.TPOT:
        return ((record.tpot or 0.0) - (record.tpot_budget or 0.0)) * (record.output_tokens or 0)
    if objective is Objective.GAP:
        return (record.gaps.longest or 0.0) - (record.gap_budget or 0.0)
    return record.total - (record.total_budget or 0.0) if objective is Objective.TOTAL else record.total


def thinking_time(record: Record) -> float:
    """Reasoning before the answer, where the budget is of the answer."""
    if record.ttft_of == "any" or record.first_reasoning is None:
        return 0.0
    return (record.total if record.first_answer is None else record.first_answer) - record.first_reasoning


def prompt_tokens(record: Record) -> int:
    """By the engine's count, or else by the gateway's."""
    return record.prompt_tokens_reported or record.prompt_tokens_estimated or 0


def computed_tokens(record: Record) -> int:
    """Of the prompt."""
    prompt = prompt_tokens(record)
    return prompt - hit_tokens(prompt, record.cached_tokens_reported, record.cached_tokens_predicted)


def _candidate(record: Record, decision: Decision | None) -> Candidate | None:
    ranked = () if decision is None else decision.ranked
    return next((each for each in ranked if record.endpoint in (each.endpoint.id, "-")), None)


def _pool(record: Record, decision: Decision | None) -> str:
    """The pool of a refused request is the first that was considered."""
    if record.pool != "-" or decision is None:
        return record.pool
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
    stream, tokens = record.spent[-1], record.output_tokens or 0
    if stream is None or record.tpot is None:
        return 0.0
    return max(stream - record.tpot * max(tokens - 1, 0), 0.0)


def _engine(record: Record, candidate: Candidate | None) -> EngineFacts:
    if candidate is None:
        return EngineFacts(record.engine_queue, record.engine_prefill)
    load = candidate.load
    return EngineFacts(
        record.engine_queue,
        record.engine_prefill,
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
        if places and other.endpoint not in places:
            continue
        began, done = _prefill(other, end)
        ahead = began < first and done > queued and (began < sent or done <= first)
        during = began < end and done > first
        if ahead or during:
            served = other.ttft is not None and done <= end
            yield Neighbour(other.tenant, computed_tokens(other), ahead, during, served)


def _places(record: Record) -> frozenset[str]:
    """Endpoints where the request went, or could have gone; empty: any."""
    if record.endpoint != "-":
        return frozenset((record.endpoint, *(attempt.endpoint for attempt in record.attempts)))
    ranked = () if record.decision is None else record.decision.ranked
    return frozenset(each.endpoint.id for each in islice(ranked, MAX_CANDIDATES))


def _region_ratio(record: Record, recent: Iterable[Record]) -> float | None:
    if not record.region:
        return None
    here, elsewhere = list[float](), list[float]()
    for other in recent:
        if other.route == record.route and other.region and (spent := other.spent[UPSTREAM]) is not None:
            (here if other.region == record.region else elsewhere).append(spent)
    if min(len(here), len(elsewhere)) < REGIONAL:
        return None
    return median(here[-COMPARED:]) / max(median(elsewhere), SHORTEST)


def _route_share(record: Record, around: Surroundings) -> float | None:
    """Of the latest other prompts of the route, since the last loss of a cache: share forecast as cached."""
    since = around.lost_at.get(record.endpoint, NEVER)
    shares = [
        (other.cached_tokens_predicted or 0) / (other.prompt_tokens_estimated or 1)
        for other in around.recent
        if other.route == record.route and other.arrival > since and (other.prompt_tokens_estimated or 0) >= SIZEABLE
    ]
    return median(shares[-COMPARED:]) if shares else None


def _endpoint_share(record: Record, around: Surroundings) -> float | None:
    """Of the latest other prompts at the endpoint that were forecast as cached: share that was."""
    shares = [
        other.cached_tokens_reported / other.cached_tokens_predicted
        for other in around.recent
        if other.endpoint == record.endpoint
        and other.cached_tokens_reported is not None
        and other.cached_tokens_predicted is not None
        and other.cached_tokens_predicted >= SIZEABLE
    ]
    return median(shares[-COMPARED:]) if len(shares) >= REGIONAL else None
