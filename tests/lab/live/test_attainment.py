"""Attainment with intervals, from answers; and the text of prompts that a trace describes."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from gateway.tokenize.tokenizers import encoder
from lab.intervals import wilson
from lab.live.attainment import attainments
from lab.live.live_player import LiveAnswer
from lab.live.live_report import report
from lab.live.trace_prompts import TracePrompts
from lab.traffic.traces import Arrival
from policies.routes.route import Ttft


def budget(text: str, **more: Any) -> Ttft:
    return Ttft.model_validate({"budget": text, **more})


def answer(first: float | None, route: str = "chat", at: float = 0.0, **more: Any) -> LiveAnswer:
    return LiveAnswer(Arrival(at, 1_000, 5, array("Q", [7]), route), first=first, **more)


@pytest.mark.parametrize(
    ("met", "of", "low", "high"),
    [(0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (50, 100, 0.4038, 0.5962), (81, 263, 0.2553, 0.3662), (0, 0, 0, 1)],
)
def test_an_interval_is_wilsons(met: int, of: int, low: float, high: float) -> None:
    """Published values; 81 of 263 is the example of Newcombe (1998). Of nothing, nothing is known."""
    assert wilson(met, of) == pytest.approx((low, high), abs=5e-5)


def test_a_request_without_a_first_token_is_a_miss() -> None:
    """Whatever refused it: shedding raises no attainment."""
    answers = [answer(0.1), answer(0.3), answer(None, failure="503 overloaded"), answer(0.1)]
    [row] = attainments(answers, {"chat": budget("200ms")})
    assert (row.sent, row.met, row.share) == (4, 2, 0.5)
    assert row.failures == {"503 overloaded": 1}


def test_routes_have_their_own_budgets_and_a_common_row() -> None:
    """A route without a budget has times, and counts in no attainment."""
    answers = [answer(0.1), answer(0.3, "code"), answer(9.0, "batch")]
    rows = attainments(answers, {"chat": budget("200ms"), "code": budget("200ms"), "batch": None})
    assert [(row.name, row.met, row.budgeted, row.sent) for row in rows] == [
        ("batch", 0, 0, 1),
        ("chat", 1, 1, 1),
        ("code", 0, 1, 1),
        ("all", 1, 2, 3),
    ]
    lines = report(rows, answers, ())
    assert lines[1].split() == ["batch", "1", "-", "-", "-", "9s", "9s", "9s", "-", "0"]


def test_a_budget_that_grows_counts_tokens_that_are_new_in_the_trace() -> None:
    """1,000 new tokens come within 200 ms; of the same prompt again 488 are new, whatever a cache holds."""
    growing = budget("100ms", per_1k_tokens="100ms")
    assert [row.met for row in attainments([answer(0.19), answer(0.19, at=1.0)], {"chat": growing})] == [1]


def test_a_budget_of_the_answer_is_judged_by_the_answer() -> None:
    """After all reasoning."""
    thoughtful = answer(0.1, first_answer=5.0)
    assert attainments([thoughtful], {"chat": budget("1s")})[0].met == 1
    assert attainments([thoughtful], {"chat": budget("1s", of="answer")})[0].met == 0


def test_a_late_machine_and_the_words_of_a_server_are_told() -> None:
    """Failures in one clean line each, without the key."""
    answers = [answer(0.1, late=1.25), answer(None, failure="500 \u001b[2Jno\nsk-key here")]
    lines = report(attainments(answers, {"chat": budget("1s")}), answers, ["sk-key"])
    assert "warning: 1 of 2 requests were sent more than 50ms late, up to 1.25s" in "\n".join(lines)
    assert lines[-1] == "failed: 1 of 2: 500 [2Jno [key] here"
    assert all(line.isprintable() for line in lines)


def prompt(prompts: TracePrompts, tokens: int, *hashes: int) -> str:
    text: str = prompts.body(Arrival(0.0, tokens, 1, array("Q", hashes)))["messages"][0]["content"]
    return text


def test_equal_blocks_become_equal_text_at_the_beginning() -> None:
    """Of the recorded length; what follows the common blocks differs, also where the trace is the same."""
    prompts = TracePrompts()
    first, second = prompt(prompts, 1_500, 1, 2), prompt(prompts, 1_500, 1, 3)
    again = prompt(prompts, 1_500, 1, 2)
    assert first.split()[:512] == second.split()[:512]
    assert first.split()[512:1024] != second.split()[512:1024]
    assert first.split()[:1024] == again.split()[:1024]
    assert first.split()[1024:] != again.split()[1024:]
    counts = [encoder("o200k_base").count(text) for text in (first, second)]
    assert all(1_500 <= count <= 1_501 for count in counts)  # a first word without a space before it may be two tokens


def test_no_two_runs_send_the_same_text() -> None:
    """The cache of a run before would make the next one faster."""
    assert prompt(TracePrompts(), 512, 1).split()[:20] != prompt(TracePrompts(), 512, 1).split()[:20]
    assert prompt(TracePrompts(run=3), 512, 1) == prompt(TracePrompts(run=3), 512, 1)
