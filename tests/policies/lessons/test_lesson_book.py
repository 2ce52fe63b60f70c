"""Lessons count for those for whom there is evidence, for a time, and in bounded memory."""

from __future__ import annotations

import pytest

from policies.lessons.lesson_book import (
    LASTING,
    MOST_CALLERS,
    MOST_OWN,
    MOST_PLACES,
    MOST_SHARED,
    PROOFS,
    TRIAL,
    LessonBook,
    Place,
)

HERE, THERE = Place("pool", "model", "/v1/chat/completions"), Place("other", "model", "/v1/chat/completions")


@pytest.fixture
def book() -> LessonBook[str]:
    return LessonBook()


def proved(book: LessonBook[str], lesson: str, *callers: str, now: float = 0.0) -> None:
    for caller in callers:
        book.refused(HERE, caller, lesson, now)
        book.answered(HERE, caller, lesson, now)


def test_a_refusal_teaches_its_own_caller_and_place_alone(book: LessonBook[str]) -> None:
    assert not book
    book.refused(HERE, "a", "no temperature", 0.0)
    assert book
    assert book.of(HERE, "a", 1.0) == ["no temperature"]
    assert (book.of(HERE, "b", 1.0), book.of(THERE, "a", 1.0)) == ([], [])


def test_any_number_of_proofs_by_one_caller_counts_for_no_other(book: LessonBook[str]) -> None:
    book.refused(HERE, "a", "no temperature", 0.0)
    for _ in range(100):
        book.answered(HERE, "a", "no temperature", 0.0)
    assert book.of(HERE, "b", 1.0) == []


def test_an_answer_to_a_second_caller_proves_a_lesson_for_all(book: LessonBook[str]) -> None:
    """A refusal of the second caller alone is no proof: the changed body has to be answered."""
    proved(book, "no temperature", "a")
    book.refused(HERE, "b", "no temperature", 0.0)
    assert book.of(HERE, "c", 1.0) == []
    book.answered(HERE, "b", "no temperature", 0.0)
    assert book.of(HERE, "c", LASTING - 1) == ["no temperature"]
    assert [each.callers for each in book.known("pool", 1.0)] == [0]
    assert book.of(HERE, "a", LASTING + 1) == []


def test_a_trial_lapses_and_a_proven_lesson_lasts(book: LessonBook[str]) -> None:
    book.refused(HERE, "a", "trial", 0.0)
    book.refused(HERE, "a", "proven", 0.0)
    for _ in range(PROOFS):
        assert book.is_on_trial(HERE, "a", "proven")
        book.answered(HERE, "a", "proven", 0.0)
    assert not book.is_on_trial(HERE, "a", "proven")
    assert book.of(HERE, "a", TRIAL - 1) == ["trial", "proven"]
    assert book.of(HERE, "a", TRIAL + 1) == ["proven"]
    assert book.of(HERE, "a", LASTING + 1) == []


def test_evidence_that_has_lapsed_counts_no_more(book: LessonBook[str]) -> None:
    book.refused(HERE, "a", "no temperature", 0.0)
    book.answered(HERE, "a", "no temperature", 0.0)
    book.refused(HERE, "a", "no temperature", TRIAL + 1)
    book.answered(HERE, "a", "no temperature", TRIAL + 1)
    assert book.is_on_trial(HERE, "a", "no temperature")


def test_a_lesson_that_has_not_helped_is_dropped_unless_it_has_helped_before(book: LessonBook[str]) -> None:
    book.refused(HERE, "a", "no help", 0.0)
    book.refused(HERE, "a", "help", 0.0)
    book.answered(HERE, "a", "help", 0.0)
    for lesson in ("no help", "help", "unknown"):
        book.failed(HERE, "a", lesson)
    assert book.of(HERE, "a", 1.0) == ["help"]


def test_one_caller_evicts_its_own_lessons_alone(book: LessonBook[str]) -> None:
    """Names of members are callers' to make up, so a caller can have any number of lessons."""
    book.refused(HERE, "b", "of b", 0.0)
    proved(book, "of all", "b", "c")
    for number in range(10 * MOST_OWN):
        proved(book, f"{number}", "a")
    assert len(book.of(HERE, "a", 1.0)) == MOST_OWN + 1
    assert set(book.of(HERE, "b", 1.0)) == {"of b", "of all"}
    assert len(book._first) <= MOST_OWN


def test_memory_is_bounded_whatever_callers_do(book: LessonBook[str]) -> None:
    for number in range(2 * MOST_CALLERS):
        proved(book, f"of {number // 2}", f"caller {number}")
        book.refused(HERE, f"caller {number}", "mine", 0.0)
    assert len(book._own) == MOST_CALLERS
    assert len(book._shared[HERE]) == MOST_SHARED
    assert len(book._first) <= MOST_CALLERS * MOST_OWN


def test_who_has_learned_last_is_forgotten_last(book: LessonBook[str]) -> None:
    """Callers, and places, by their latest lesson."""
    for number in range(MOST_CALLERS):
        book.refused(HERE, f"caller {number}", "first", 0.0)
    book.refused(HERE, "caller 0", "second", 1.0)
    book.refused(HERE, "new", "first", 1.0)
    assert book.of(HERE, "caller 0", 2.0) == ["first", "second"]
    assert book.of(HERE, "caller 1", 2.0) == []


def test_a_place_with_a_new_lesson_for_all_is_forgotten_last(book: LessonBook[str]) -> None:
    proved(book, "first", "a", "b")
    for number in range(1, MOST_PLACES + 1):
        if number == MOST_PLACES:
            proved(book, "second", "a", "b")
        place = Place(f"pool {number}", "model", "/v1/messages")
        for caller in ("a", "b"):
            book.refused(place, caller, "first", 0.0)
            book.answered(place, caller, "first", 0.0)
    assert book.of(HERE, "c", 1.0) == ["first", "second"]
    assert book.of(Place("pool 1", "model", "/v1/messages"), "c", 1.0) == []


def test_pools_that_are_gone_are_forgotten(book: LessonBook[str]) -> None:
    proved(book, "no temperature", "a", "b")
    book.refused(HERE, "a", "no seed", 0.0)
    book.refused(THERE, "a", "no seed", 0.0)
    book.keep(lambda pool: pool == "other")
    assert (book.of(HERE, "a", 1.0), book.of(THERE, "a", 1.0)) == ([], ["no seed"])
    assert book._first == {}
