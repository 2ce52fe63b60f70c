"""The length that 95% of a key's own answers do not exceed."""

from __future__ import annotations

from policies.latency import answer_lengths as longest_answers
from policies.latency.answer_lengths import KNOWN, SAMPLES, LongestAnswers


def test_too_few_answers_tell_nothing_and_few_tell_their_longest() -> None:
    found = LongestAnswers()
    for tokens in range(1, KNOWN):
        found.observe("web 1", "chat", tokens)
    assert found.tokens("web 1", "chat") is None
    found.observe("web 1", "chat", 100)
    assert found.tokens("web 1", "chat") == 100


def test_one_answer_in_twenty_may_be_longer() -> None:
    found = LongestAnswers()
    for _ in range(SAMPLES):
        found.observe("web 1", "chat", 10)
    for _ in range(2):
        found.observe("web 1", "chat", 1_000)
    assert found.tokens("web 1", "chat") == 10
    for _ in range(3):
        found.observe("web 1", "chat", 1_000)
    assert found.tokens("web 1", "chat") == 1_000


def test_a_key_vouches_for_itself_and_a_route_for_itself_in_bounded_memory() -> None:
    found = LongestAnswers()
    for _ in range(KNOWN):
        found.observe("web 1", "chat", 10)
    assert [found.tokens(*of) for of in (("web 2", "chat"), ("web 1", "task"))] == [None, None]
    for number in range(longest_answers.MOST):
        found.observe(f"other {number}", "chat", 1)
    assert found.tokens("web 1", "chat") is None
