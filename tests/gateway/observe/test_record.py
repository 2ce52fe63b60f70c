"""Objectives met by a request, and the JSON of a Record."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest

from gateway.observe.record import NO_GAPS, UNSPENT, AttemptRecord, Record, RequestOutcome, TokenGaps
from gateway.observe.record_columns import RECORD
from gateway.strict_json import encode
from policies.types import AttemptKind, AttemptOutcome
from tests.support.builders import FLAT, ORIGINS, record

# --------------------------------------------------------------------------- the verdict


@pytest.mark.parametrize(
    ("known", "met"),
    [
        ({"ttft": 0.8}, True),
        ({"ttft": 0.800001}, False),
        ({"ttft": 0.1, "ttft_budget": None}, None),
        ({"end": RequestOutcome.SHED, "ttft": None}, False),
        ({"end": RequestOutcome.UNAVAILABLE, "ttft": None}, False),
        ({"end": RequestOutcome.FAILED, "ttft": None}, False),
        ({"end": RequestOutcome.INTERNAL, "ttft": None}, False),
        ({"end": RequestOutcome.REFUSED, "ttft": None}, None),
        ({"end": RequestOutcome.CLIENT_GONE, "ttft": None, "total": 0.8}, None),
        ({"end": RequestOutcome.CLIENT_GONE, "ttft": None, "total": 0.81}, False),
        ({"end": RequestOutcome.CLIENT_GONE, "ttft": 0.2}, True),
        ({"end": RequestOutcome.CLIENT_GONE, "ttft": 0.9}, False),
        ({"end": RequestOutcome.UPSTREAM_BROKE, "ttft": 0.2}, True),
        ({"ttft_of": "answer", "first_answer": 0.2}, True),
        ({"ttft_of": "answer", "first_reasoning": 0.2, "first_answer": 0.8}, True),
        ({"ttft_of": "answer", "first_reasoning": 0.2, "first_answer": 0.81}, False),
        ({"ttft_of": "answer", "first_reasoning": 0.2}, False),
        ({"ttft_of": "answer", "first_reasoning": 0.2, "end": RequestOutcome.CLIENT_GONE, "total": 0.8}, None),
        ({"first_reasoning": 0.2, "first_answer": 0.9}, True),
        ({"stream": False, "ttft": 0.2}, None),
        ({"stream": False, "ttft": 0.9}, None),
        ({"stream": False, "end": RequestOutcome.SHED, "ttft": None}, False),
        ({"stream": False, "end": RequestOutcome.REFUSED, "ttft": None}, None),
    ],
)
def test_ttft_is_met_by_a_first_token_within_the_budget(known: dict[str, object], met: bool | None) -> None:
    """All offered requests count: shed, failed, and left after the deadline are misses; faults of callers and
    requests left
    before the deadline are neither. An answer without streaming has no first token."""
    assert record(**known).ttft_met is met


@pytest.mark.parametrize(
    ("known", "met"),
    [
        ({"tpot": 0.05}, True),
        ({"tpot": 0.051}, False),
        ({"tpot": None}, True),
        ({"tpot": 0.01, "tpot_budget": None}, None),
        ({"tpot": 0.01, "stream": False}, None),
        ({"tpot": None, "ttft": None, "end": RequestOutcome.FAILED}, None),
        ({"tpot": 0.06, "end": RequestOutcome.UPSTREAM_BROKE}, False),
    ],
)
def test_tpot_is_met_within_its_budget_or_by_fewer_than_two_tokens(known: dict[str, object], met: bool | None) -> None:
    """Under two tokens there is no gap to judge, which counts as met; without a token there is nothing to judge."""
    assert record(**{"tpot_budget": 0.05, **known}).tpot_met is met


@pytest.mark.parametrize(
    ("known", "met"),
    [
        ({"gaps": TokenGaps(1.0)}, True),
        ({"gaps": TokenGaps(1.01)}, False),
        ({"gaps": NO_GAPS}, True),
        ({"gaps": TokenGaps(9.0), "gap_budget": None}, None),
        ({"gaps": NO_GAPS, "stream": False}, None),
        ({"gaps": NO_GAPS, "ttft": None, "end": RequestOutcome.FAILED}, None),
        ({"gaps": NO_GAPS, "cache": "hit"}, None),
        ({"gaps": TokenGaps(9.0), "end": RequestOutcome.CLIENT_GONE}, False),
    ],
)
def test_a_gap_is_met_while_no_silence_is_longer(known: dict[str, object], met: bool | None) -> None:
    """A silence in which the caller left counts; without a token there is nothing to judge."""
    assert record(**{"gap_budget": 1.0, **known}).gap_met is met


@pytest.mark.parametrize(
    ("known", "met"),
    [
        ({"total": 5.0}, True),
        ({"total": 5.1}, False),
        ({"total": 1.0, "stream": False}, True),
        ({"total": 1.0, "total_budget": None}, None),
        ({"total": 1.0, "end": RequestOutcome.UPSTREAM_BROKE}, False),
        ({"total": 1.0, "end": RequestOutcome.FAILED, "ttft": None}, False),
        ({"total": 0.1, "end": RequestOutcome.SHED, "ttft": None}, False),
        ({"total": 0.1, "end": RequestOutcome.UNAVAILABLE, "ttft": None}, False),
        ({"total": 0.1, "end": RequestOutcome.INTERNAL, "ttft": None}, False),
        ({"total": 0.1, "end": RequestOutcome.REFUSED, "ttft": None}, None),
        ({"total": 9.0, "end": RequestOutcome.CLIENT_GONE}, None),
    ],
)
def test_total_is_met_by_a_complete_answer_within_the_budget(known: dict[str, object], met: bool | None) -> None:
    """Streamed or whole; a disconnected caller proves nothing."""
    assert record(**{"total_budget": 5.0, **known}).total_met is met


@pytest.mark.parametrize(
    ("known", "met"),
    [
        ({"ttft": 0.2, "tpot_budget": 0.05, "tpot": 0.01}, True),
        ({"ttft": 0.2, "tpot_budget": 0.05, "tpot": 0.06}, False),
        ({"ttft": 0.9, "tpot_budget": 0.05, "tpot": 0.01}, False),
        ({"ttft": 0.2, "total_budget": 1.0, "total": 1.5}, False),
        ({"ttft": 0.2, "gap_budget": 1.0, "gaps": TokenGaps(1.5)}, False),
        ({"ttft": 0.2, "gap_budget": 1.0, "gaps": TokenGaps(0.5)}, True),
        ({"ttft": 0.2, "ttft_budget": None, "tpot_budget": None}, None),
        ({"ttft": 0.2, "end": RequestOutcome.UPSTREAM_BROKE}, False),
        ({"ttft": 0.2, "end": RequestOutcome.CLIENT_GONE}, None),
        ({"ttft": 0.9, "end": RequestOutcome.CLIENT_GONE}, False),
        ({"end": RequestOutcome.SHED, "ttft": None}, False),
        ({"end": RequestOutcome.REFUSED, "ttft": None}, None),
        ({"stream": False, "ttft": 0.2, "total_budget": 1.0, "total": 0.5}, True),
    ],
)
def test_goodput_is_what_completes_within_every_budget(known: dict[str, object], met: bool | None) -> None:
    """A caller that leaves a good answer is neither; an answer that broke after a timely first token is not good."""
    assert record(**known).goodput_met is met


# --------------------------------------------------------------------------- JSON


def test_a_record_is_shown_flat_and_in_milliseconds() -> None:
    """Operators use grep: only stages and attempts are nested."""
    times = 0.1, 0.25, AttemptOutcome.CANCELLED
    attempt = AttemptRecord(2, AttemptKind.HEDGE, "small/b", "small", *times, "req_5", locality="eu")
    shown = RECORD.view(record(spent=[0.00125, *UNSPENT[1:]], attempts=[attempt], tpot=0.0125, tpot_budget=0.05))
    names = ("request_id", "end", "status", "ttft_ms", "ttft_budget_ms", "total_ms", "tpot_ms")
    assert {name: shown[name] for name in names} == {
        "request_id": "req-1",
        "end": "completed",
        "status": 200,
        "ttft_ms": 200.0,
        "ttft_budget_ms": 800.0,
        "total_ms": 1000.0,
        "tpot_ms": 12.5,
    }
    assert shown["stages_ms"] == {"read": 1.25}
    assert shown["attempts"] == [
        {
            "number": 2,
            "kind": "hedge",
            "endpoint": "small/b",
            "opened_ms": 100.0,
            "ended_ms": 250.0,
            "ending": "cancelled",
            "upstream_id": "req_5",
            "tokens": 0,
            "cost_usd": 0.0,
            "status": 0,
            "cause": "",
            "engine_kv_tokens": 0,
            "region": "eu",
        }
    ]
    assert (shown["ttft_met"], shown["tpot_met"], shown["total_met"]) == (True, True, None)


def test_a_record_is_shown_completely_except_for_the_decision() -> None:
    """Decisions belong to /explain, a diagnosis to /requests; times are those with a meaning outside the process. The
    lineage of a prompt, with the cost of its break, is shown by its members."""
    shown = set(RECORD.view(record()))
    facts = {each.name for each in fields(Record)} - ORIGINS.keys() | FLAT.keys()
    facts -= {"arrival", "decision", "is_judged", "notes", "spent", "trace"}
    facts -= {"tpot_budget", "gaps", "output_tokens_reported", "prompt_tokens", "cached_tokens"}
    facts -= {"cache_write_tokens", "reasoning_tokens"}
    # Of GenAI metrics and spans alone:
    facts -= {"conversation", "service_tier", "facts", "cache_write_tokens_reported", "reasoning_tokens_reported"}
    facts = facts - {"prompt_changes", "members", "job_class", "rejected"}
    facts |= {"repaired", "reasoning_effort", "external_refused"}
    assert {name for name in facts if name not in shown and f"{name}_ms" not in shown} == set()
    assert {"session", "template", "step", "kept_tokens", "continues", "prefix_break"} <= shown
    assert {"longest_gap_ms", "p99_gap_ms", "gaps_over_1s"} <= shown


def test_unknown_values_are_null() -> None:
    """Not zero, which would be a time."""
    shown = json.loads(encode(RECORD.view(Record())))
    assert (shown["ttft_ms"], shown["route"], shown["ttft_met"]) == (None, "-", None)
