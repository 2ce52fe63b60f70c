"""Lessons count for those for whom there is evidence, for a time, and in bounded memory."""

from __future__ import annotations

import pytest

from policies.lessons.lesson_book import (
    APART,
    MOST_CALLERS,
    MOST_OWN,
    MOST_OWN_HERE,
    MOST_PLACES,
    MOST_SHARED,
    MOST_WITNESSED,
    OWN,
    SHARED,
    LessonBook,
    Place,
)

HERE, THERE = Place("pool", "model", "/v1/chat/completions"), Place("other", "model", "/v1/chat/completions")
NOBODY = ""  # callers that are not told apart


@pytest.fixture
def book() -> LessonBook[str]:
    return LessonBook()


def helped(
    book: LessonBook[str],
    lesson: str,
    *callers: str,
    now: float = 0.0,
    place: Place = HERE,
    concerns_all: bool = True,
) -> None:
    for caller in callers:
        book.helped(place, caller, lesson, now, concerns_all=concerns_all)


def test_what_has_helped_a_caller_counts_for_that_caller_and_place_alone(book: LessonBook[str]) -> None:
    assert not book.own
    helped(book, "no temperature", "a")
    assert book.own
    assert book.of(HERE, "a", 1.0) == ["no temperature"]
    assert (book.of(HERE, "b", 1.0), book.of(THERE, "a", 1.0)) == ([], [])


def test_a_lesson_of_a_caller_lapses_and_is_learned_anew(book: LessonBook[str]) -> None:
    helped(book, "no temperature", "a")
    assert book.of(HERE, "a", OWN - 1) == ["no temperature"]
    assert book.of(HERE, "a", OWN + 1) == []
    helped(book, "no temperature", "a", now=OWN + 1)
    assert book.of(HERE, "a", 2 * OWN) == ["no temperature"]


def test_any_evidence_of_one_caller_counts_for_no_other(book: LessonBook[str]) -> None:
    for second in range(100):
        helped(book, "no temperature", "a", now=APART * second)
    assert book.of(HERE, "b", 1.0) == []


def test_a_second_caller_shares_a_lesson_with_all_for_an_hour(book: LessonBook[str]) -> None:
    helped(book, "no temperature", "a", "b")
    assert book.of(HERE, "c", SHARED - 1) == ["no temperature"]
    assert [each.callers for each in book.known("pool", 1.0)] == [0]
    assert [book.of(HERE, each, SHARED + 1) for each in ("a", "b", "c")] == [[], [], []]


def test_a_lesson_about_what_no_other_caller_has_is_shared_with_nobody(book: LessonBook[str]) -> None:
    helped(book, "no member of a's own", "a", "b", concerns_all=False)
    assert (book.of(HERE, "a", 1.0), book.of(HERE, "c", 1.0)) == (["no member of a's own"], [])


def test_a_witness_that_has_lapsed_counts_no_more(book: LessonBook[str]) -> None:
    helped(book, "no temperature", "a")
    helped(book, "no temperature", "b", now=OWN)
    assert book.of(HERE, "c", OWN) == []
    helped(book, "no temperature", "a", now=OWN)
    assert book.of(HERE, "c", OWN) == ["no temperature"]


def test_an_answer_to_the_contrary_takes_the_witness_away(book: LessonBook[str]) -> None:
    """What helped the one caller stays with that caller."""
    helped(book, "no temperature", "a")
    assert book.in_question(HERE, 1.0) == ["no temperature"]
    book.contradicted(HERE, "no temperature")
    assert book.in_question(HERE, 1.0) == []
    helped(book, "no temperature", "b")
    assert (book.of(HERE, "c", 1.0), book.of(HERE, "a", 1.0)) == ([], ["no temperature"])


def test_a_lesson_in_question_is_so_no_longer_than_its_witness_counts(book: LessonBook[str]) -> None:
    helped(book, "no temperature", "a")
    assert book.in_question(HERE, OWN) == []


def test_callers_without_a_name_are_two_witnesses_a_minute_apart(book: LessonBook[str]) -> None:
    """The minute is time for an answer to the contrary. Until then each request is mended for itself."""
    for second in (0.0, 1.0, APART - 1):
        helped(book, "no temperature", NOBODY, now=second)
        assert book.of(HERE, NOBODY, second) == []
    helped(book, "no temperature", NOBODY, now=APART)
    assert book.of(HERE, NOBODY, APART) == ["no temperature"]
    assert book.of(HERE, NOBODY, APART + SHARED) == []


def test_one_caller_evicts_its_own_lessons_alone(book: LessonBook[str]) -> None:
    """Names of members are callers' to make up, so a caller can have any number of lessons."""
    helped(book, "of b", "b")
    helped(book, "of all", "b", "c")
    for number in range(10 * MOST_OWN):
        helped(book, f"{number}", "a")
    assert len(book.own["a"]) == MOST_OWN
    assert book.of(HERE, "a", 1.0) == ["of all", *(f"{10 * MOST_OWN - each}" for each in range(MOST_OWN_HERE, 0, -1))]
    assert set(book.of(HERE, "b", 1.0)) == {"of b", "of all"}
    assert len(book.in_question(HERE, 1.0)) == MOST_WITNESSED


def test_memory_is_bounded_whatever_callers_do(book: LessonBook[str]) -> None:
    for number in range(2 * MOST_CALLERS):
        helped(book, f"of {number // 2}", f"caller {number}")
        helped(book, "mine", f"caller {number}", concerns_all=False)
        helped(book, "of a place", "a", "b", place=Place(f"pool {number}", "model", "/v1/messages"))
        helped(book, "in question", "a", place=Place(f"pool {number}", "model", "/v1/messages"))
    assert len(book.own) <= MOST_CALLERS
    assert max(map(len, book.own.values())) <= MOST_OWN
    assert len(book.shared) == len(book.witnessed) == MOST_PLACES
    assert max(map(len, book.shared.values())) <= MOST_SHARED


def test_who_has_learned_last_is_forgotten_last(book: LessonBook[str]) -> None:
    """Callers, and places, by their latest lesson."""
    for number in range(MOST_CALLERS):
        helped(book, "first", f"caller {number}", concerns_all=False)
    helped(book, "second", "caller 0", now=1.0, concerns_all=False)
    helped(book, "first", "new", now=1.0, concerns_all=False)
    assert book.of(HERE, "caller 0", 2.0) == ["first", "second"]
    assert book.of(HERE, "caller 1", 2.0) == []


def test_a_place_with_a_new_lesson_for_all_is_forgotten_last(book: LessonBook[str]) -> None:
    helped(book, "first", "a", "b")
    for number in range(1, MOST_PLACES + 1):
        if number == MOST_PLACES:
            helped(book, "second", "a", "b")
        helped(book, "first", "a", "b", place=Place(f"pool {number}", "model", "/v1/messages"))
    assert book.of(HERE, "c", 1.0) == ["first", "second"]
    assert book.of(Place("pool 1", "model", "/v1/messages"), "c", 1.0) == []


def test_pools_that_are_gone_are_forgotten(book: LessonBook[str]) -> None:
    helped(book, "no temperature", "a", "b")
    helped(book, "no seed", "a")
    helped(book, "no seed", "a", place=THERE)
    book.keep(lambda pool: pool == "other")
    assert (book.of(HERE, "a", 1.0), book.of(THERE, "a", 1.0)) == ([], ["no seed"])
    assert (book.in_question(HERE, 1.0), book.in_question(THERE, 1.0)) == ([], ["no seed"])
