"""The prompts of the benchmarks: as costly as real ones, and new where they must be."""

from __future__ import annotations

import json

import pytest

from benchmarks.figures.crowd import with_new_turn
from benchmarks.figures.users import CONVERSATIONS, KINDS, Prompts
from benchmarks.processes import ROOT
from benchmarks.prompts import Writer, text
from gateway.tokenize.tokenizers import encoder

SEEN, NEW = Prompts(8_000, True), Prompts(8_000, False)


def messages(request: bytes) -> list[str]:
    return [each["content"] for each in json.loads(request.partition(b"\r\n\r\n")[2])["messages"]]


def characters_per_token(written: str) -> float:
    return len(written) / encoder("o200k_base").count(written)


def test_a_text_has_as_many_tokens_as_real_prose_and_code() -> None:
    """Of this project's own pages and sources, within a fifth."""
    real = [*sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "gateway").rglob("*.py"))]
    sources = "".join(path.read_text() for path in real)
    assert characters_per_token(text(200_000)) == pytest.approx(characters_per_token(sources), rel=0.2)


def test_a_text_has_thousands_of_words() -> None:
    """A text of few words is known to every cache after a moment."""
    assert len(set(text(100_000).split())) > 3_000


def test_a_seed_gives_the_same_text_and_another_seed_another() -> None:
    """From the first word on."""
    assert Writer("a").text(500) == Writer("a").text(500)
    assert Writer("a").text(500)[:30] != Writer("b").text(500)[:30]
    assert text(500) != text(500)


@pytest.mark.parametrize("prompts", KINDS, ids=lambda prompts: prompts.name)
def test_a_prompt_has_its_size(prompts: Prompts) -> None:
    """Within a tenth, without the JSON around it."""
    _, requests = prompts.ask(1, "seed")
    assert sum(map(len, messages(requests[0]))) == pytest.approx(prompts.size, rel=0.1)


def test_all_but_the_last_turn_of_a_seen_prompt_has_been_sent_before() -> None:
    """And the last turn is new in each."""
    first, requests = SEEN.ask(2 * CONVERSATIONS, "seed")
    before = [messages(each)[:-1] for each in first]
    assert all(messages(each)[:-1] in before for each in requests)
    assert len({messages(each)[-1] for each in (*first, *requests)}) == len(first) + len(requests)


def test_nothing_of_a_new_prompt_has_been_sent_before() -> None:
    """Not even its beginning, by which prefixes are recognised."""
    first, requests = NEW.ask(8, "seed")
    assert first == []
    assert len({messages(each)[0][:30] for each in requests}) == 8


def test_a_last_turn_is_renewed_without_being_written_again() -> None:
    """Valid JSON of the same length, with the shape of the answer."""
    _, (request,) = SEEN.ask(1, "seed")
    renewed = [with_new_turn(request, number) for number in range(3)]
    assert len({*renewed, request}) == 4
    for each in renewed:
        assert len(each) == len(request)
        assert messages(each)[:-1] == messages(request)[:-1]
        assert messages(each)[-1][-20:] == messages(request)[-1][-20:]
