"""Times of reasoning before the answer, learned per route and pool."""

from __future__ import annotations

from policies.latency.answer_lengths import REASONING_AGE, AnswerLengths, ReasoningTimes
from tests.support.decision_fleet import preset


def test_a_quantile_is_one_of_the_observed_times() -> None:
    """Without an answer, no reasoning is expected."""
    times = ReasoningTimes()
    assert times.quantile(0.9, 0.0) == 0.0
    for seconds in range(10):
        times.observe(float(seconds), 0.0)
    assert [times.quantile(share, 0.0) for share in (0.0, 0.5, 0.9, 1.0)] == [0.0, 5.0, 9.0, 9.0]


def test_old_and_many_times_are_forgotten() -> None:
    """A pool left for its reasoning is tried again; the latest 64 answers count."""
    times = ReasoningTimes()
    times.observe(50.0, 0.0)
    assert times.quantile(0.9, REASONING_AGE + 1) == 0.0
    for _ in range(64):
        times.observe(1.0, 1.0)
    assert times.quantile(1.0, 1.0) == 1.0


def test_reasoning_is_expected_for_the_pools_of_routes_that_promise_the_answer() -> None:
    """Each route and pool has times of its own; other routes have none."""
    lengths = AnswerLengths()
    promised = preset("chat", {"name": "deep", "tiers": ["thinker", "direct"], "ttft": {"of": "answer"}})
    usual = preset("chat", {"name": "chat", "tiers": ["thinker"]})
    lengths.observe_reasoning("deep", "thinker", 4.0, now=1.0)
    lengths.observe_reasoning("other", "direct", 9.0, now=1.0)
    assert lengths.expected_reasoning(promised, 2.0) == {"thinker": 4.0, "direct": 0.0}
    assert lengths.expected_reasoning(usual, 2.0) is None
