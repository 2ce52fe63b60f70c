"""A map of what was asked for lately."""

from __future__ import annotations

from gateway.api.generational_cache import GenerationalCache


def test_what_was_put_is_found() -> None:
    """And what was not is not."""
    memo: GenerationalCache[str] = GenerationalCache(2)
    memo.update({1: "one", 3: ""})
    assert (memo.get(1), memo.get(2), memo.get(3)) == ("one", None, "")
    assert memo.get_all([3, 2, 1]) == ["", None, "one"]


def test_two_generations_are_kept_at_most() -> None:
    """However much is put."""
    memo: GenerationalCache[int] = GenerationalCache(10)
    for key in range(1_000):
        memo.update({key: key})
        assert len(memo) <= 20
    assert [memo.get(key) for key in (979, 980, 999)] == [None, 980, 999]


def test_what_is_asked_for_is_not_forgotten() -> None:
    """It moves to the young generation."""
    memo: GenerationalCache[str] = GenerationalCache(4)
    memo.update({0: "kept"})
    for key in range(1, 100):
        memo.update({key: "passing"})
        assert memo.get_all([key, 0]) == ["passing", "kept"]
