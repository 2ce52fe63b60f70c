"""The columns of a Record, in the order of its JSON: the core's, then those of each part.

`scripts/record_page.py` writes docs/record.md from this table.
"""

from __future__ import annotations

from array import array
from base64 import b64encode
from collections.abc import Sequence

from gateway.observe.columns import MS, Column, Columns, ms
from gateway.observe.part_notes import CAUSES, OTHERS, Own
from gateway.observe.record import STAGE_NAMES, AttemptRecord, Record, goodput_met
from policies.external_share.external_share import EXTERNAL_LIMIT
from policies.routes.when import EFFORT
from policies.types import SLOWER_TIERS


def _by_tier(tokens: Sequence[int]) -> dict[str, int] | None:
    """Of the tiers below the GPU that hold some."""
    return {tier: each for tier, each in zip(SLOWER_TIERS, tokens, strict=False) if each} if tokens else None


def _landmarks(hashes: Sequence[int]) -> str | None:
    return b64encode(array("Q", hashes)).decode() if hashes else None


def _ttft_of(record: Record) -> str:
    return "answer" if record.route.promises_answer else "any"


ATTEMPT: tuple[Column[AttemptRecord], ...] = (
    Column("number", "", lambda a: a.number, "from 1"),
    Column("kind", "", lambda a: a.kind.value, "primary, fallback, hedge, rescue, whole or mended"),
    Column("endpoint", "", lambda a: a.endpoint, "where it went"),
    Column("opened_ms", "ms", lambda a: ms(a.opened), "its start, from the arrival"),
    Column("ended_ms", "ms", lambda a: ms(a.ended), "its end, from the arrival"),
    Column("ending", "", lambda a: a.ending.value, "outcome"),
    Column("upstream_id", "", lambda a: a.upstream_id, "`x-request-id` at the backend"),
    Column("tokens", "tokens", lambda a: a.tokens, "that the server may bill: prompt and output"),
    Column("cost_usd", "USD", lambda a: a.cost_usd, "by the prices of the pools"),
    Column("status", "", lambda a: a.status, "of the reply; 0: there was none"),
    Column("cause", "", lambda a: a.cause, "of a failure: status, the server's code, first line of its message"),
    Column("engine_kv_tokens", "tokens", lambda a: a.engine_kv_tokens, "of the engine's KV cache; 0: not reported"),
    Column("region", "", lambda a: a.locality, "of the endpoint"),
)

REQUEST: Own = (
    Column("request_id", "", lambda e: e.request_id, "`x-request-id` of the answer", csv=0),
    Column("wall", "s", lambda e: e.wall, "arrival, Unix time"),
    Column("sent_before_ms", MS, lambda e: e.asked.sent_before, "from sending to arrival, by `x-request-start`"),
    Column("trace_id", "", lambda e: e.trace_id, "the gateway's trace, or the caller's own; empty: none"),
    Column("tenant", "", lambda e: e.tenant, "name of the caller's key", csv=2),
    Column("operation", "", lambda e: e.operation, "API that was called"),
    Column("route", "", lambda e: e.route.name, "name of the route", csv=1),
    Column("workload", "", lambda e: e.route.workload, "preset of the route"),
    Column("stream", "", lambda e: e.asked.stream, "the caller asked for a stream"),
    Column("max_tokens", "tokens", lambda e: e.asked.max_tokens, "output limit that the caller asked for"),
    Column("max_tokens_lowered", "tokens", lambda e: e.placed.max_tokens, "output limit as sent, where it is lower"),
    Column("choices", "", lambda e: e.asked.choices, "answers asked for"),
    Column("reasoning_effort", "", lambda e: e.asked.members.get(EFFORT, ""), "as the caller asked; empty: not named"),
)
OUTCOME: Own = (
    Column("end", "", lambda e: e.end, "outcome of the request", csv=4),
    Column("status", "", lambda e: e.status, "of the answer; 0: none was begun", csv=5),
    Column("error", "", lambda e: e.error, "reason of an end without a complete answer"),
)
DECISION: Own = (
    Column("scorer", "", lambda e: e.placed.scorer, "scorer of the decision"),
    Column("tier", "", lambda e: e.placed.tier, "tier of the endpoint, from 0"),
    Column("pool", "", lambda e: e.endpoint.pool, "last chosen pool"),
    Column("model", "", lambda e: e.answer.model, "model of the answer, as sent to the server"),
    Column("endpoint", "", lambda e: e.endpoint.id, "last chosen endpoint", csv=3),
    Column("region", "", lambda e: e.endpoint.locality, "of the endpoint"),
    Column("chance", "", lambda e: e.placed.chance, "probability of the deadline, when it was decided"),
    Column(
        "external_refused",
        "",
        lambda e: EXTERNAL_LIMIT.value in e.placed.rejected,
        "an API was left out by `limits.external`",
    ),
    Column(
        "prompt_tokens_estimated",
        "tokens",
        lambda e: e.placed.prompt_tokens,
        "of the prompt, as decided by",
    ),
    Column("cached_tokens_predicted", "tokens", lambda e: e.placed.cached_tokens, "believed cached at the endpoint"),
    Column(
        *("cached_tokens_to_load", "tokens", lambda e: _by_tier(e.placed.to_load)),
        "of these, those in slower tiers of the engine's cache, by tier",
    ),
    Column("ttft_predicted_p50_ms", MS, lambda e: e.placed.ttft_p50, "forecast of `ttft_ms`", csv=9),
    Column("ttft_predicted_p90_ms", MS, lambda e: e.placed.ttft_p90, "forecast of `ttft_ms`"),
    Column("total_predicted_p50_ms", MS, lambda e: e.placed.total_p50, "forecast of `total_ms`, where weighed"),
    Column("total_predicted_p90_ms", MS, lambda e: e.placed.total_p90, "forecast of `total_ms`, where weighed"),
    Column(
        *("held_ms", "", lambda e: {rule: ms(seconds) for rule, seconds in (e.held or {}).items()}),
        "ms in the queue, by the rule that held the request",
    ),
)
TIMES: Own = (
    Column("ttft_ms", MS, lambda e: e.ttft, "arrival to first token written; of a whole answer, to all of it", csv=7),
    Column("head_ms", MS, lambda e: e.answer.head, "arrival to the head of the backend's reply"),
    Column("first_byte_ms", MS, lambda e: e.answer.first_byte, "arrival to the first byte of its body"),
    Column("first_reasoning_ms", MS, lambda e: e.answer.first_reasoning, "arrival to the first token of reasoning"),
    Column("first_answer_ms", MS, lambda e: e.answer.first_answer, "arrival to the first token of the answer"),
    Column("tpot_ms", MS, lambda e: e.answer.tpot, "per output token after the first", csv=10),
    Column("total_ms", MS, lambda e: e.total, "arrival to the end", csv=11),
    Column("loop_lag_ms", MS, lambda e: e.loop_lag, "longest stall of the gateway's own loop before the first token"),
    Column(
        *("stages_ms", "", lambda e: [*map(ms, e.spent)], "ms by stage; all but `stream` sum to `ttft_ms`"),
        members=STAGE_NAMES,
    ),
    Column("longest_gap_ms", MS, lambda e: e.answer.gaps.longest, "longest time between two tokens", csv=12),
    Column("p99_gap_ms", MS, lambda e: e.answer.gaps.p99, "99th percentile of these"),
    Column("gaps_over_1s", "", lambda e: e.answer.gaps.over_1s, "number of those above a second"),
)
BUDGETS: Own = (
    Column("ttft_of", "", _ttft_of, "token of the TTFT budget: any, or the answer's first"),
    Column("ttft_budget_ms", MS, lambda e: e.budgets.ttft, "TTFT budget", csv=8),
    Column("gap_budget_ms", MS, lambda e: e.budgets.gap, "budget of the longest gap"),
    Column("total_budget_ms", MS, lambda e: e.budgets.total, "budget of the whole answer"),
    Column("ttft_met", "", lambda e: e.ttft_met, "null: not judged, here and below"),
    Column("tpot_met", "", lambda e: e.tpot_met, "the TPOT budget was met"),
    Column("gap_met", "", lambda e: e.gap_met, "the gap budget was met"),
    Column("total_met", "", lambda e: e.total_met, "the budget of the whole answer was met"),
    Column("goodput_met", "", lambda e: goodput_met(e.end, e.verdicts), "completed within every budget"),
)
ANSWER: Own = (
    Column("prompt_tokens_reported", "tokens", lambda e: e.answer.prompt_tokens, "by the server", csv=13),
    Column("cached_tokens_reported", "tokens", lambda e: e.answer.cached_tokens, "by the server", csv=14),
    Column("output_tokens", "tokens", lambda e: e.answer.output_tokens, "by the server, else as counted", csv=15),
    Column("cost_usd", "USD", lambda e: e.cost_usd, "of all attempts that the caller is charged for", csv=16),
    Column("speed", "", lambda e: e.answer.facts.speed, "service tier by the server; empty: not reported"),
    Column("engine_queue_ms", MS, lambda e: e.answer.engine_queue, "part of `upstream`, by the engine"),
    Column("engine_prefill_ms", MS, lambda e: e.answer.engine_prefill, "part of `upstream`, by the engine"),
    Column("engine_ttft_ms", MS, lambda e: e.answer.engine_ttft, "TTFT by the engine"),
    Column(
        *("attempts", "", lambda e: [[each.get(attempt) for each in ATTEMPT] for attempt in e.attempts]),
        "all attempts, the one that answered last",
        members=tuple(each.name for each in ATTEMPT),
        many=True,
    ),
)


PROMPT: Own = (
    Column("prefix", "", lambda e: _landmarks(e.prefix), "a salted hash for each 512 tokens of the prompt, in base64"),
    Column("repaired", "", lambda e: e.asked.prompt_changes, "rules that changed the prompt"),
)
GROUPS = {
    "Request": REQUEST,
    "Outcome": OUTCOME,
    "Decision": DECISION,
    "Times": TIMES,
    "Budgets": BUDGETS,
    "Answer": ANSWER,
    "Prompt": PROMPT,
    "Causes": CAUSES,
    "Other parts": OTHERS,
}
RECORD = Columns(column for group in GROUPS.values() for column in group)
