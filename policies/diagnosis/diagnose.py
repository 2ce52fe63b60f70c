"""The cause of one slow request: the part of its time that exceeds the usual most, then the reason within that part.

Rules:
- One cause for each request. A cause needs evidence in the facts; without any the verdict is UNKNOWN, and tells what
  was seen.
- The usual is of the route's requests that met their budgets. Where there are too few of them, a forecast of less than
  half the time upstream stands for its usual value, and zero for all other parts.
- A stall of the event loop lies within other stages, so it is looked for first.

`prompt_cause` finds why a prompt took long to compute: its length, or a prefix that should have been cached.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from policies.diagnosis.causes import Cause, CauseFound, CauseVerdict
from policies.diagnosis.facts import EarlierPrompt, LostAttempt, Objective, RequestFacts, ms
from policies.diagnosis.usual import Usual
from policies.diagnosis.waiting_cause import (
    behind,
    culprit,
    engine_wait_cause,
    noisy_neighbour,
    own_work_of,
    queue_cause,
    rate_limit_cause,
)
from policies.external_share.external_share import EXTERNAL_LIMIT
from policies.types import AttemptOutcome, Placement, RejectionKind

NOTICEABLE_TOKENS = 512  # tokens: landmarks of prompts are as far apart
MOST_TOKENS = 0.5  # of the tokens in question
REGULAR = 0.3  # share of a prompt from which a route is expected to find its prefix cached
LONGER, LONGEST = 1.5, 1.1  # times the usual median, and its 90th percentile


def prompt_cause(facts: RequestFacts, usual: Usual) -> CauseFound | None:
    """None: the prompt is no reason."""
    return _lost_turn(facts) or _lost_prefix(facts) or _broken(facts) or _unseen(facts, usual) or _long(facts, usual)


def _lost_turn(facts: RequestFacts) -> CauseFound | None:
    """The prompt continues an earlier one, whose blocks were computed and are gone."""
    earlier = facts.earlier
    if earlier is None or earlier.shared < earlier.tokens or earlier.tokens - facts.hit < NOTICEABLE_TOKENS:
        return None
    if facts.hit > MOST_TOKENS * earlier.tokens:
        return None
    told = (
        f"{facts.hit:,} of {facts.prompt:,} prompt tokens were cached; {earlier.tokens:,} of them were computed "
        f"{ms(earlier.ago)} ago at {earlier.endpoint}"
    )
    if earlier.endpoint != facts.endpoint:
        return CauseFound(Cause.COLD_CACHE, f"{told}, and this turn went to {facts.endpoint}")
    if earlier.lost:
        return CauseFound(Cause.COLD_CACHE, f"{told}, which was restarted or gone since")
    return CauseFound(Cause.EVICTED_SESSION, f"{told}, which has dropped them since")


def _lost_prefix(facts: RequestFacts) -> CauseFound | None:
    """The forecast counted on blocks which the engine did not have."""
    lacking = facts.predicted - facts.hit
    if facts.cached is None or lacking < NOTICEABLE_TOKENS or facts.hit > MOST_TOKENS * facts.predicted:
        return None
    told = f"{facts.predicted:,} of {facts.prompt:,} prompt tokens were expected in the cache; {facts.hit:,} were there"
    if facts.endpoint_share is not None and facts.endpoint_share < MOST_TOKENS:
        return CauseFound(Cause.COLD_CACHE, f"{told}, and other prompts at {facts.endpoint} missed theirs too")
    return CauseFound(Cause.EVICTED_SESSION, told)


def _broken(facts: RequestFacts) -> CauseFound | None:
    """The prompt departs early from the one before it in its session, and is no shorter."""
    earlier = facts.earlier
    if (
        earlier is None
        or earlier.shared >= MOST_TOKENS * earlier.tokens
        or earlier.tokens - earlier.shared < NOTICEABLE_TOKENS
    ):
        return None
    if facts.prompt < earlier.tokens or facts.hit > MOST_TOKENS * earlier.tokens:
        return None
    return CauseFound(Cause.CACHE_BROKEN, f"{_departs(earlier)}; {facts.hit:,} of {facts.prompt:,} tokens were cached")


def _departs(earlier: EarlierPrompt) -> str:
    where = f"after {earlier.shared:,} tokens" if earlier.shared else f"within its first {NOTICEABLE_TOKENS} tokens"
    return (
        f"the prompt departs {where} from the one of {earlier.tokens:,} tokens sent {ms(earlier.ago)} before it in "
        "the same session"
    )


def _unseen(facts: RequestFacts, usual: Usual) -> CauseFound | None:
    """A route whose prompts usually find a prefix, and a prompt that finds none."""
    expected = usual.predicted_share.p50 if usual.known else 0.0
    missing = expected * facts.prompt - facts.hit
    if expected < REGULAR or missing < NOTICEABLE_TOKENS or facts.hit > MOST_TOKENS * expected * facts.prompt:
        return None
    if facts.prompt > LONGER * max(usual.prompt.p90, 1.0):
        return None
    share = facts.hit / max(facts.prompt, 1)
    told = f"{share:.0%} of {facts.prompt:,} prompt tokens were cached; usual here: {expected:.0%}"
    if facts.route_share is not None and facts.route_share >= MOST_TOKENS * expected:
        return CauseFound(
            Cause.CACHE_BROKEN,
            f"{told}, and {facts.route_share:.0%} in the other latest prompts: this one begins differently",
        )
    return CauseFound(Cause.COLD_CACHE, f"{told}; the other latest prompts of the route found no prefix either")


def _long(facts: RequestFacts, usual: Usual) -> CauseFound | None:
    if usual.known:
        if facts.computed < max(LONGER * usual.computed.p50, LONGEST * usual.computed.p90, NOTICEABLE_TOKENS / 2):
            return None
        told = f"{facts.computed:,} prompt tokens to compute; usual here: {usual.computed.p50:,.0f} (p50), "
        return CauseFound(Cause.LONG_PROMPT, f"{told}{usual.computed.p90:,.0f} (p90)")
    if (
        facts.engine.forecast_prefill < MOST_TOKENS * facts.stages.get("upstream", 0.0)
        or facts.computed < NOTICEABLE_TOKENS
    ):
        return None
    alone = f"the forecast gave the prefill alone {ms(facts.engine.forecast_prefill)}"
    return CauseFound(Cause.LONG_PROMPT, f"{facts.computed:,} prompt tokens to compute; {alone}")


NOTICEABLE = 0.005  # s over the usual, below which a part explains nothing
MOST = 0.5  # of a time, to explain it
NAMED = 3  # endpoints in a sentence
SLOWER = 1.5  # times the usual
DISTANT = 2.0  # time upstream of a slow region, over that of the others
LIMITS = (RejectionKind.RATE_LIMITED, EXTERNAL_LIMIT)
LOST_BY = {
    AttemptOutcome.FAILED: "failed",
    AttemptOutcome.SILENT: "gave no token",
    AttemptOutcome.CANCELLED: "gave no token before another attempt did",
    AttemptOutcome.BROKEN: "broke in mid-stream",
    AttemptOutcome.MISCONFIGURED: "was refused for the gateway's own key, model or path",
}
WITHOUT_TOKEN = (AttemptOutcome.SILENT, AttemptOutcome.CANCELLED)  # in time; the latter overtaken by a hedge
CauseOf = Callable[[RequestFacts, Usual], CauseFound]
THINKING = "thinking"  # a part of a request with a budget for the answer; all other parts are stages


def diagnose(facts: RequestFacts, usual: Usual) -> CauseVerdict:
    part, finding = _found(facts, usual)
    names = {"route": facts.route, "pool": facts.pool, "tenant": facts.tenant}
    return CauseVerdict(
        finding.cause,
        finding.evidence,
        finding.cause.mend.format(**names),
        part,
        facts.over,
        culprit(finding, facts),
        own_work_of(finding, facts),
        facts.objective is Objective.ANSWER,
        finding.witnessed,
    )


def _found(facts: RequestFacts, usual: Usual) -> tuple[str, CauseFound]:
    """The part of the time in question, and the cause."""
    if facts.objective is Objective.ANSWER:
        return "failed", _failed(facts, usual)
    if facts.objective is Objective.TPOT:
        return "stream", _slow_stream(facts, usual)
    if facts.objective is Objective.GAP:
        return "stream", _silent_stream(facts, usual)
    excess = {name: spent - _usually(name, facts, usual) for name, spent in _parts(facts).items()}
    part, over = max(excess.items(), key=lambda found: found[1], default=("", 0.0))
    if facts.lag - usual.lag.p90 >= max(MOST * over, NOTICEABLE):
        told = f"the gateway's event loop stood still for {ms(facts.lag)}; usual here: {ms(usual.lag.p50)}"
        return part, CauseFound(Cause.GATEWAY_STALLED, told)
    if over < NOTICEABLE:
        return part, _unknown(facts, part, "no stage took longer than usual")
    return part, BY_PART[part](facts, usual)


def _parts(facts: RequestFacts) -> Mapping[str, float]:
    """Seconds of the stages that count for the missed budget."""
    stages = dict(facts.stages)
    if facts.objective is Objective.TTFT:
        stages.pop("stream", None)
        if facts.thinking:
            stages[THINKING] = facts.thinking
    return stages


def _usually(part: str, facts: RequestFacts, usual: Usual) -> float:
    if part == THINKING:
        return usual.thinking.p50 if usual.known else 0.0
    if part == "upstream" and not usual.known and facts.forecast is not None:
        return facts.forecast if facts.forecast < MOST * facts.stages[part] else 0.0
    return usual.of_stage(part)


# -- a request without an answer -----------------------------------------------------------


def _failed(facts: RequestFacts, usual: Usual) -> CauseFound:
    """Refused, or lost with its last attempt."""
    if facts.attempts:
        return _lost(facts, usual)
    if facts.placement is Placement.RATE_LIMITED or any(kind in LIMITS for kind in facts.rejected):
        return rate_limit_cause(facts)
    if facts.placement in (Placement.SHED, Placement.OVERLOADED):
        return _shed(facts, usual)
    if facts.down:
        return CauseFound(Cause.ENDPOINT_FAILED, _at_the_decision("down", facts.down), facts.down[0], witnessed=False)
    if facts.asleep:
        told = (
            f"{_at_the_decision('asleep', facts.asleep)}; to be woken by POST /wake_up, or by `wake: true` of its pool"
        )
        return CauseFound(Cause.ENDPOINT_FAILED, told, facts.asleep[0], witnessed=False)
    if facts.drained:
        told = _at_the_decision("drained by an operator", facts.drained)
        return CauseFound(Cause.DRAINED, told, facts.drained[0], witnessed=False)
    if facts.stages.get("queue", 0.0) > NOTICEABLE:
        return queue_cause(facts, usual)
    return _unknown(facts, "", "the request ended before any attempt")


def _at_the_decision(state: str, endpoints: Sequence[str]) -> str:
    others = " and others" if len(endpoints) > NAMED else ""
    return f"{state} at the decision: {', '.join(endpoints[:NAMED])}{others}"


def _shed(facts: RequestFacts, usual: Usual) -> CauseFound:
    """No endpoint could make the deadline: for the work before this prompt, or for the prompt itself."""
    engine = facts.engine
    if facts.stages.get("queue", 0.0) <= engine.forecast_prefill and engine.backlog < engine.forecast_prefill:
        found = prompt_cause(facts, usual)
        if found is not None:
            return found
    return queue_cause(facts, usual)


def _lost(facts: RequestFacts, usual: Usual) -> CauseFound:
    """By the attempt that cost most time."""
    if not facts.attempts:  # time between two placements, which no attempt has taken
        return _unknown(facts, "failover", "no attempt was lost")
    lost = max(facts.attempts, key=lambda each: each.took)
    if lost.outcome in (AttemptOutcome.RATE_LIMITED, AttemptOutcome.QUOTA):
        return rate_limit_cause(facts)
    if lost.outcome in WITHOUT_TOKEN and (busy := _busy(lost, facts, usual)) is not None:
        return replace(busy, evidence=f"no token from {lost.endpoint} in {ms(lost.took)}; {busy.evidence}")
    ended = LOST_BY.get(lost.outcome, lost.outcome.value) + (f" (status {lost.status})" if lost.status else "")
    told = f"the attempt at {lost.endpoint} {ended} after {ms(lost.took)}"
    return CauseFound(_blamed(lost), told + (f": {lost.cause}" if lost.cause else ""), lost.endpoint)


def _busy(lost: LostAttempt, facts: RequestFacts, usual: Usual) -> CauseFound | None:
    """An engine without a fault is silent, too, while it computes the prompts of others, or this one."""
    others_served = any(each.prefill and each.served for each in facts.neighbours)
    waited = engine_wait_cause(facts, usual) if others_served else None
    computes = facts.engine.forecast_prefill >= MOST * lost.took
    return waited or (prompt_cause(facts, usual) if computes else None)


def _blamed(lost: LostAttempt) -> Cause:
    """The connection where no byte of a reply came, unless the attempt was abandoned as silent."""
    unreached = lost.status == 0 and lost.outcome is AttemptOutcome.FAILED
    return Cause.CONNECTION if unreached else Cause.ENDPOINT_FAILED


# -- a slow answer -------------------------------------------------------------------------


def _own_stage(facts: RequestFacts, usual: Usual) -> CauseFound:
    """Stages of the gateway itself."""
    spent = {name: facts.stages.get(name, 0.0) for name in OWN_STAGES}
    name, longest = max(spent.items(), key=lambda found: found[1])
    return CauseFound(Cause.GATEWAY_STALLED, f"{name} took {ms(longest)}; usual here: {ms(usual.of_stage(name))}")


def _stage(stage: str, cause: Cause, told: str) -> CauseOf:
    """The cause of a stage that says by its length alone where the time went."""

    def found(facts: RequestFacts, usual: Usual) -> CauseFound:
        return CauseFound(cause, told.format(spent=ms(facts.stages[stage]), usual=ms(usual.of_stage(stage))))

    return found


def _connect(facts: RequestFacts, usual: Usual) -> CauseFound:
    spent = facts.stages.get("connect", 0.0) + facts.stages.get("send", 0.0)
    usually = usual.of_stage("connect") + usual.of_stage("send")
    told = f"{ms(spent)} to connect to {facts.endpoint} and send the request; usual here: {ms(usually)}"
    return CauseFound(Cause.CONNECTION, told)


def _thinks(facts: RequestFacts, usual: Usual) -> CauseFound:
    told = f"{ms(facts.thinking)} of reasoning before the answer; usual here: {ms(usual.thinking.p50)}"
    told += f"; the caller asked for the effort {facts.effort}" if facts.effort else "; the caller named no effort"
    return CauseFound(Cause.MODEL_THINKS, told)


def _upstream(facts: RequestFacts, usual: Usual) -> CauseFound:
    """Waiting in the engine, computing the prompt, or the way there: the largest by the engine's report, or else the
    first with evidence."""
    if facts.region_ratio is not None and facts.region_ratio >= DISTANT:
        told = f"requests to {facts.region} take {facts.region_ratio:.1f} times as long upstream as to other regions"
        return CauseFound(Cause.SLOW_REGION, told)
    waited = engine_wait_cause(facts, usual) if _waits_most(facts, usual) else None
    found = waited or prompt_cause(facts, usual) or engine_wait_cause(facts, usual) or _decode_share(facts, usual)
    spent = facts.stages["upstream"]
    return found or _unknown(facts, "upstream", f"{facts.endpoint} took {ms(spent)} for a usual prompt, alone there")


def _waits_most(facts: RequestFacts, usual: Usual) -> bool:
    engine = facts.engine
    if engine.queue is None or engine.prefill is None:
        return engine.backlog > engine.forecast_prefill
    return engine.queue - usual.engine_queue.p50 > engine.prefill - usual.engine_prefill.p50


def _decode_share(facts: RequestFacts, usual: Usual) -> CauseFound | None:
    """An answer that came whole includes its output; a first token shares the engine with answers in progress."""
    if not facts.stream and usual.known and facts.output > SLOWER * usual.output.p50:
        told = f"{facts.output:,} tokens of answer, delivered as a whole; usual here: {usual.output.p50:,.0f}"
        return CauseFound(Cause.DECODE_BOUND, told)
    return None


# -- a slow stream -------------------------------------------------------------------------


def _slow_stream(facts: RequestFacts, usual: Usual) -> CauseFound:
    """Slow tokens, many tokens, or a caller that reads slowly."""
    spent = facts.stages.get("stream", 0.0)
    if facts.objective is Objective.TOTAL and facts.unread > MOST * spent:
        told = f"{ms(facts.unread)} from the last token to the last byte taken by the caller, of {ms(spent)}"
        return CauseFound(Cause.CALLER_SLOW, told)
    during = [each for each in facts.neighbours if each.decode]
    slower = usual.known and facts.tpot is not None and facts.tpot > SLOWER * usual.tpot.p50
    noisy = noisy_neighbour(facts, during, usual) if slower or not usual.known else None
    if noisy is not None:
        return noisy
    if facts.tpot is None:
        return _unknown(facts, "stream", f"{facts.output:,} tokens in {ms(spent)}")
    pace = f"{facts.output:,} tokens at {ms(facts.tpot)} each"
    if usual.known:
        pace += f"; usual here: {usual.output.p50:,.0f} at {ms(usual.tpot.p50)}"
    if facts.engine.running:
        pace += f"; {facts.engine.running} answers in progress at {facts.endpoint}"
    return CauseFound(Cause.DECODE_BOUND, pace)


def _silent_stream(facts: RequestFacts, usual: Usual) -> CauseFound:
    """A silence within the answer: of an attempt that was lost, behind the prompts of others, or of the engine."""
    if facts.attempts:
        return _lost(facts, usual)
    during = [each for each in facts.neighbours if each.decode]
    if (noisy := noisy_neighbour(facts, during, usual)) is not None:
        return noisy
    silent = f"no token from {facts.endpoint} for {ms(facts.gap)} within the answer"
    if during:
        return CauseFound(Cause.DECODE_BOUND, f"{silent}, beside {behind(during)}")
    return CauseFound(Cause.ENDPOINT_FAILED, f"{silent}, and no other prompt was computed there")


def _unknown(facts: RequestFacts, part: str, seen: str) -> CauseFound:
    where = f" in {part}" if part else ""
    return CauseFound(Cause.UNKNOWN, f"{seen}; {ms(facts.over)} over{where}")


OWN_STAGES = ("parse", "estimate", "admit", "decide")
BY_PART: Mapping[str, CauseOf] = {
    **dict.fromkeys(OWN_STAGES, _own_stage),
    **dict.fromkeys(("connect", "send"), _connect),
    "read": _stage("read", Cause.CALLER_SLOW, "the caller took {spent} to send its request; usual here: {usual}"),
    "queue": queue_cause,
    "rate_limit": lambda facts, usual: rate_limit_cause(facts),
    "failover": _lost,
    "upstream": _upstream,
    "relay": _stage("relay", Cause.CALLER_SLOW, "the first token waited {spent} for the caller to read"),
    "stream": _slow_stream,
    THINKING: _thinks,
}
