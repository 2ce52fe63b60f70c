"""What users read of an ended request stays as it is, for each kind of end: JSON, CSV, line at a terminal, metrics.

`ended_requests.json` holds all of them; a change of a name or a value that is meant is written there by
`python -m tests.gateway.observe.test_ended_requests`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from prometheus_client import CollectorRegistry

from backends.interface import EngineTimes, ReplyFacts, Usage
from gateway.admin.admin_server import requests_csv
from gateway.admin.admin_views import request_view
from gateway.api.inference_request import InferenceRequest
from gateway.observe.logs import terminal_line
from gateway.observe.metrics.loop_lag import LoopLag
from gateway.observe.metrics.request_metrics import RequestMetrics, ServedLabels
from gateway.observe.part_notes import CACHE, HIT, LEFT_OUT, MISS, RESCUE, SHORTCOMING, SIGHT, TAGS, AnswerSight
from gateway.observe.record import AttemptRecord, Record, RequestOutcome, Stage, TokenGaps
from gateway.observe.record_columns import GROUPS, RECORD
from gateway.observe.recorder import Recorder
from gateway.observe.timeline import RequestTimeline
from gateway.observe.trace_context import Trace
from gateway.parts.prefix_doctor.part import PrefixDoctor, PrefixDoctorPart, PromptCounts
from gateway.tokenize.estimator import Estimator
from gateway.tokenize.prompt_reader import PromptText, TokenizerConfig
from policies.external_share.external_share import EXTERNAL_LIMIT
from policies.fleet.fleet import AttemptReport
from policies.latency.token_counts import TokenScale
from policies.rescue.successors import RESCUE_ATTEMPT
from policies.routes.route import Route
from policies.types import (
    QUANTILES,
    AttemptKind,
    AttemptOutcome,
    Candidate,
    Completion,
    Decision,
    Endpoint,
    Forecast,
    Placement,
    PoolEstimate,
    PrefixBlocks,
    Price,
    PromptEstimate,
    Rejection,
)
from tests.support.agent_prompts import PLANTS, agent_turns
from tests.support.builders import candidate, decided, request, route

KEPT = Path(__file__).with_name("ended_requests.json")
ARRIVAL, WALL = 100.0, 1_700_000_000.25
EU = Candidate(Endpoint("small/a", "small", "eu"), 0, 1200, 512, Forecast(0.2, samples=9, prefill=0.1), 0.97, 0.001)
CHAT = route(
    ttft={"budget": "800ms"}, tpot={"budget": "50ms"}, gap={"budget": "1s"}, total={"budget": "30s"}, workload="agent"
)
THINKING = route("thinking", ttft={"budget": "2s", "of": "answer"})
BATCH = route("nightly", by="6h")
Lived = Callable[[RequestTimeline], None]


def begun(life: RequestTimeline, on: Route, decision: Decision | None = None, **body: Any) -> None:
    """A request up to its decision."""
    asked = request({"x-request-start": f"t={WALL - 0.02:.3f}"}, **{"stream": True, **body})
    sent(life, on, asked, PromptEstimate({"small": PoolEstimate(1200, blocks())}, 100), decision)


def sent(
    life: RequestTimeline, on: Route, asked: InferenceRequest, estimate: PromptEstimate, decision: Decision | None
) -> None:
    life.close((Stage.READ, ARRIVAL + 0.001), (Stage.PARSE, ARRIVAL + 0.0012))
    life.record.tenant = "team-a"
    life.routed(asked, on)
    with patch("gateway.observe.timeline.monotonic", lambda: ARRIVAL + 0.002):
        life.estimated(asked, on, estimate)
    life.close((Stage.ADMIT, ARRIVAL + 0.0021))
    life.decided(decision or decided(EU, candidate("large/c", 0.4, tier=1), deadline=ARRIVAL + 0.8, at=ARRIVAL + 0.003))
    life.close((Stage.DECIDE, ARRIVAL + 0.0032))


def attempt(number: int, outcome: AttemptOutcome, opened: float, ended: float, **more: Any) -> AttemptRecord:
    given = {"kind": AttemptKind.PRIMARY, "endpoint": "small/a", "pool": "small", "locality": "eu", **more}
    return AttemptRecord(number, opened=opened, ended=ended, ending=outcome, **given)


def won(life: RequestTimeline, chosen: Candidate = EU, *, first: float = 0.3) -> None:
    at = ARRIVAL + 0.0033
    life.won(
        *(chosen, "qwen"), opened=at, connected=at + 0.001, sent=at + 0.002, first_in=ARRIVAL + first, head=at + 0.01
    )
    life.first_token_out(ARRIVAL + first + 0.0004, 200)


def answered(life: RequestTimeline, attempt: AttemptRecord, **more: Any) -> None:
    given: dict[str, Any] = {"output_tokens": 87, "tpot": 0.011, "gaps": TokenGaps(0.4, 0.3, 0), "blocks": blocks()}
    given["usage"] = Usage(prompt=1234, cached=500, completion=87, cache_write=64, reasoning=12)
    given["facts"] = ReplyFacts("chatcmpl-1", "default", {0: "stop"})
    reported = AttemptReport(prompt_tokens=1234, cached_tokens=500, output_tokens=87, engine_ttft=0.25)
    life.answered(attempt, reported, EngineTimes(queue=0.05, prefill=0.2), **{**given, **more})


def blocks() -> PrefixBlocks:
    return PrefixBlocks(tuple(range(1, 80)), 16)


def completed(life: RequestTimeline) -> None:
    begun(life, CHAT, max_tokens=400, n=2, reasoning_effort="low")
    won(life)
    answered(life, attempt(1, AttemptOutcome.COMPLETED, 0.0033, 1.3, tokens=1321, cost_usd=0.0012, upstream_id="up-1"))
    life.finished(RequestOutcome.COMPLETED, ARRIVAL + 1.3)


def whole(life: RequestTimeline) -> None:
    begun(life, CHAT, stream=False)
    won(life, first=0.9)
    answered(life, attempt(1, AttemptOutcome.COMPLETED, 0.0033, 0.9), tpot=None, gaps=TokenGaps())
    life.finished(RequestOutcome.COMPLETED, ARRIVAL + 0.901)


def late_after_a_refusal_and_a_hedge(life: RequestTimeline) -> None:
    begun(life, CHAT)
    life.held(ARRIVAL + 0.5, {"prefill": 0.2, "rate_limit": 0.25})
    life.attempt_ended(attempt(1, AttemptOutcome.RATE_LIMITED, 0.5, 0.6, status=429, cause="429 slow down"))
    hedge = attempt(2, AttemptOutcome.CANCELLED, 0.65, 0.98, kind=AttemptKind.HEDGE, endpoint="large/c", pool="large")
    life.attempt_ended(hedge)
    at = ARRIVAL + 0.7
    life.won(EU, "qwen", opened=at, connected=at, sent=at + 0.001, first_in=ARRIVAL + 0.98)
    life.first_token_out(ARRIVAL + 0.981, 200)
    answered(life, attempt(3, AttemptOutcome.COMPLETED, 0.7, 3.0, kind=AttemptKind.FALLBACK, junk=2))
    life.finished(RequestOutcome.COMPLETED, ARRIVAL + 3.0)


def thought_for_too_long(life: RequestTimeline) -> None:
    begun(life, THINKING)
    won(life, first=0.5)
    ended = attempt(1, AttemptOutcome.COMPLETED, 0.0033, 5.0)
    answered(life, ended, reasoning_in=ARRIVAL + 0.5, answer_in=ARRIVAL + 4.0)
    life.finished(RequestOutcome.COMPLETED, ARRIVAL + 5.0)


def forecast_to_the_end(life: RequestTimeline) -> None:
    ones = (1.0,) * len(QUANTILES)
    lengths = tuple(100 * each for each in ones)
    made = decided(EU, deadline=ARRIVAL + 30, at=ARRIVAL + 0.003)
    completion = Completion(Forecast(0.5), lengths, ones, 0.01)
    begun(life, BATCH, replace(made, completion=lambda each: completion, output_limits={"small": 300}), max_tokens=999)
    won(life)
    answered(life, attempt(1, AttemptOutcome.COMPLETED, 0.0033, 1.3))
    life.finished(RequestOutcome.COMPLETED, ARRIVAL + 1.3)


def refused_at_once(life: RequestTimeline) -> None:
    life.close((Stage.READ, ARRIVAL + 0.001))
    life.refused(400, "messages: missing", RequestOutcome.REFUSED, ARRIVAL + 0.002)


def shed(life: RequestTimeline) -> None:
    made = Decision(Placement.SHED, ARRIVAL + 0.003, ARRIVAL + 0.8, (EU,), scorer="predicted", reason="too late")
    begun(life, CHAT, made)
    life.refused(429, "too late", RequestOutcome.SHED, ARRIVAL + 0.004)


def at_the_limit_of_apis(life: RequestTimeline) -> None:
    rejected = (Rejection("api", "", 0, "limits.external", EXTERNAL_LIMIT),)
    begun(life, CHAT, Decision(Placement.UNAVAILABLE, ARRIVAL + 0.003, ARRIVAL + 0.8, (), rejected))
    life.refused(429, "limits.external", RequestOutcome.UNAVAILABLE, ARRIVAL + 0.004)


def failed(life: RequestTimeline) -> None:
    begun(life, CHAT)
    for number, endpoint in enumerate(("small/a", "small/b"), 1):
        lost = attempt(number, AttemptOutcome.FAILED, 0.1 * number, 0.1 * number + 0.05, endpoint=endpoint)
        life.attempt_ended(replace(lost, status=500, cause="500 out of memory"))
    life.refused(502, "every attempt failed", RequestOutcome.FAILED, ARRIVAL + 0.3)


def broke(life: RequestTimeline) -> None:
    begun(life, CHAT)
    won(life)
    answered(life, attempt(1, AttemptOutcome.FAILED, 0.0033, 2.0, cause="connection reset"))
    life.finished(RequestOutcome.UPSTREAM_BROKE, ARRIVAL + 2.0, "connection reset")


def client_gone(life: RequestTimeline) -> None:
    begun(life, CHAT)
    life.attempt_ended(attempt(1, AttemptOutcome.CANCELLED, 0.0033, 0.2))
    life.finished(RequestOutcome.CLIENT_GONE, ARRIVAL + 0.2)


def delivered(life: RequestTimeline) -> None:
    life.record.tenant = "team-a"
    life.delivered(200, ARRIVAL + 0.004)


def repeated_from_the_cache(life: RequestTimeline) -> None:
    begun(life, CHAT)
    CACHE.put(life.record, HIT)
    life.unjudged()
    life.delivered(200, ARRIVAL + 0.01)


def with_all_that_parts_note(life: RequestTimeline) -> None:
    begun(life, CHAT)
    TAGS.put(life.record, ("team=a", "project=b"))
    CACHE.put(life.record, MISS)
    SHORTCOMING.put(life.record, "empty")
    LEFT_OUT.put(life.record, {"seed": "seed", "x-mine": "other"})
    RESCUE.put(life.record, "failed")
    RESCUE.put(life.record, "rescued")
    life.stalled(ARRIVAL + 0.1)
    won(life)
    answered(life, attempt(1, AttemptOutcome.COMPLETED, 0.0033, 1.3, kind=RESCUE_ATTEMPT, engine_kv_tokens=9000))
    life.finished(RequestOutcome.COMPLETED, ARRIVAL + 1.3)


def carried_by_another_proxy(life: RequestTimeline) -> None:
    begun(life, CHAT)
    life.unread()
    life.unseen()
    life.gaps_unseen()
    SIGHT.put(life.record, AnswerSight.ACCESS_LOG)
    answered(life, attempt(1, AttemptOutcome.COMPLETED, 0.0033, 1.3), facts=ReplyFacts(), usage=None)
    life.delivered(200, ARRIVAL + 1.3)


def internal(life: RequestTimeline) -> None:
    begun(life, CHAT)
    life.note_error("ValueError")
    life.finished(RequestOutcome.INTERNAL, ARRIVAL + 0.2)


def turn(number: int) -> Lived:
    """A turn of an agent whose tools change their order, as the doctor follows it."""

    def lived(life: RequestTimeline) -> None:
        found = [each for each in agent_turns(PLANTS["tool_order"]) if each.session == 1][number]
        asked = request({"x-session-id": "s-1"}, **{**found.body, "model": "chat", "stream": True})
        asked.caller = "team-a"
        estimator = Estimator({"small": TokenizerConfig("o200k_base")}, lambda name: TokenScale())
        text = PromptText(asked.prompt, ("small",))
        pools = estimator.estimate(text).pools
        for _ in estimator.count(text):
            pass
        sent(life, CHAT, asked, PromptEstimate(pools, 100), None)
        won(life)
        answered(life, attempt(1, AttemptOutcome.COMPLETED, 0.0033, 1.3), blocks=pools["small"].blocks)
        life.finished(RequestOutcome.COMPLETED, ARRIVAL + 1.3)

    return lived


LIVES: dict[str, Lived] = {
    **{
        lived.__name__: lived
        for lived in (
            *(completed, whole, late_after_a_refusal_and_a_hedge, thought_for_too_long, forecast_to_the_end),
            *(refused_at_once, shed, at_the_limit_of_apis, failed, broke, client_gone, delivered, internal),
            *(repeated_from_the_cache, with_all_that_parts_note, carried_by_another_proxy),
        )
    },
    "first_turn": turn(0),
    "turn_with_a_break": turn(1),
}


def lag() -> LoopLag:
    found = LoopLag()
    found.saw(0.03, ARRIVAL + 0.05)
    return found


def lived() -> Iterator[tuple[str, Record, str]]:
    """All kinds of requests, one after another, with the lines of `/metrics` that each has moved."""
    metrics = RequestMetrics(CollectorRegistry(), [CHAT, THINKING, BATCH], ServedLabels({"small": "qwen"}, ("team-a",)))
    doctor, counts = PrefixDoctor(lambda pool: Price(input=2.0, cached_input=0.5)), PromptCounts()
    recorder = Recorder([], [metrics, counts.count], lag(), [doctor.on_ended])
    before: dict[str, float] = {}
    for name, each in LIVES.items():
        trace = Trace("0af7651916cd43dd8448eb211c80319c", 7, True) if name == "completed" else None
        life = RequestTimeline(Record(arrival=ARRIVAL, wall=WALL), recorder.lag)
        life.identified(f"req-{name}", "chat", trace)
        each(life)
        recorder.emit(life)
        recorder.flush()
        after = samples(metrics) | samples(counts)
        moved = {line: value - before.get(line, 0.0) for line, value in after.items() if value != before.get(line, 0.0)}
        before = after
        yield name, life.record, json.dumps({line: round(value, 9) for line, value in sorted(moved.items())})


def samples(metrics: RequestMetrics | PromptCounts) -> dict[str, float]:
    """Without buckets, whose counts follow from sums and counts."""
    return {
        f"{each.name}{sorted(each.labels.items())}": each.value
        for family in metrics.collect()
        for each in family.samples
        if not each.name.endswith("_bucket") and "loop_lag" not in each.name
    }


async def shown() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, record, metrics in lived():
        view = json.loads(json.dumps(request_view(record)))
        for member in ("session", "template", "prefix"):  # hashes that are keyed by the process
            view[member] = view[member] and len(view[member])
        _, line = requests_csv([view]).decode().splitlines()
        at_terminal = terminal_line(record).decode().partition(" ")[2].rstrip()  # the time is in the machine's zone
        found[name] = {"json": view, "csv": line, "terminal": at_terminal, "metrics": json.loads(metrics)}
    return found


@pytest.fixture(scope="module")
def now() -> Iterator[dict[str, Any]]:
    """Without the columns of parts that these requests have no notes of."""
    before, RECORD.all = RECORD.all, ()
    RECORD.add(column for group in (*GROUPS.values(), PrefixDoctorPart.columns) for column in group)
    yield asyncio.run(shown())
    RECORD.add(before)


@pytest.mark.parametrize("name", LIVES)
@pytest.mark.parametrize("form", ["json", "csv", "terminal", "metrics"])
def test_what_users_read_of_an_ended_request_is_as_it_was(name: str, form: str, now: dict[str, Any]) -> None:
    assert now[name][form] == json.loads(KEPT.read_text())[name][form]


def test_the_head_of_the_table_is_as_it_was() -> None:
    """Columns of a spreadsheet are found by their place."""
    assert requests_csv([]).decode().strip() == (
        "arrived,request_id,route,tenant,endpoint,end,status,cause,ttft_ms,ttft_budget_ms,ttft_predicted_p50_ms,"
        "tpot_ms,total_ms,longest_gap_ms,prompt_tokens_reported,cached_tokens_reported,output_tokens,cost_usd,"
        "over_ms,evidence,mend"
    )


if __name__ == "__main__":
    KEPT.write_text(json.dumps(asyncio.run(shown()), indent=1, sort_keys=True) + "\n")
