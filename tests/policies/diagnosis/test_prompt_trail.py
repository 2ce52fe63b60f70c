"""The earlier prompt that a prompt continues, or departs from; bounded."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from policies.diagnosis.prompt_trail import PROMPTS, PromptTrail, SentPrompt


def sent(landmarks: list[int], session: int = 0, at: float = 0.0, tokens: int = 0) -> SentPrompt:
    return SentPrompt(tokens or 600 * len(landmarks), landmarks, "small/a", session, at)


def test_a_prompt_is_found_by_the_one_that_continues_it() -> None:
    trail = PromptTrail()
    trail.note(sent([1, 2, 3]))
    found = trail.earlier(sent([1, 2, 3, 4, 5], at=9.0), {})
    assert found is not None
    assert (found.tokens, found.shared, found.ago, found.lost) == (1800, 1800, 9.0, False)


def test_a_prompt_that_departs_is_found_by_its_session() -> None:
    """A third of the prompt before is shared."""
    trail = PromptTrail()
    trail.note(sent([1, 2, 3], session=7))
    found = trail.earlier(sent([1, 8, 9, 10], session=7), {})
    assert found is not None
    assert (found.tokens, found.shared) == (1800, 600)
    assert trail.earlier(sent([1, 8, 9, 10], session=6), {}) is None


def test_the_longer_of_a_continued_prompt_and_the_last_of_the_session_counts() -> None:
    """A shared system prompt is an earlier prompt, too."""
    trail = PromptTrail()
    trail.note(sent([1]))
    trail.note(sent([1, 2, 3], session=7))
    found = trail.earlier(sent([1, 8, 9], session=7), {})
    assert found is not None
    assert found.tokens == 1800


def test_a_cache_lost_since_is_told() -> None:
    trail = PromptTrail()
    trail.note(sent([1, 2], at=5.0))
    after, before = (trail.earlier(sent([1, 2, 3], at=9.0), {"small/a": lost_at}) for lost_at in (6.0, 4.0))
    assert after is not None
    assert before is not None
    assert (after.lost, before.lost) == (True, False)


def test_a_trail_is_bounded_and_keeps_the_latest() -> None:
    trail = PromptTrail()
    for number in range(PROMPTS + 1):
        trail.note(sent([number], session=number + 1))
    assert trail.earlier(sent([0, -1], session=1), {}) is None
    assert trail.earlier(sent([PROMPTS, -1]), {}) is not None


@given(st.integers(0, 6), st.integers(0, 6), st.integers(1, 6))
def test_the_shared_beginning_is_exact(shared: int, more: int, other: int) -> None:
    trail = PromptTrail()
    trail.note(sent([*range(shared), *range(100, 100 + other)], session=1, tokens=(shared + other) * 10))
    found = trail.earlier(sent([*range(shared), *range(200, 200 + more)], session=1), {})
    assert found is not None
    assert found.shared == shared * 10
