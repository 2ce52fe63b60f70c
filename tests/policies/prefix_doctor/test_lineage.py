"""Memory of the prompts of many callers."""

from __future__ import annotations

import sys
from array import array
from typing import Any

from policies.prefix_doctor.lineage import Lineages, Link, SentNow
from policies.prompt_outline import EMPTY, SYSTEM, USER, PartOutline, PromptOutline

CALLERS, MEMORY = 400, 2_000_000


def prompt(number: int, blocks: int = 1) -> PromptOutline:
    """Like no other."""
    hashes = array("Q", [number << 12 | i for i in range(blocks)])
    part = PartOutline(number, USER, 200.0, 800)
    return PromptOutline([part], array("q", [number]), EMPTY, number, 0, hashes, lambda n: n, 200, lambda *place: None)


def follow(lineages: Lineages, caller: str, outline: PromptOutline) -> None:
    lineages.follow(SentNow(caller, "chat", "", 0.0, 1.0), outline, lambda *place: None)


def test_room_among_many_callers_is_made_without_a_look_at_each_for_each_prompt() -> None:
    """The event loop waits meanwhile: every stream would."""
    lineages, calls, most = Lineages(MEMORY), 0, 0

    def count(frame: Any, event: str, arg: Any) -> None:
        nonlocal calls
        calls += event == "call"

    for number in range(1, MEMORY // 600):
        before = lineages.bytes
        calls = 0
        sys.setprofile(count)
        follow(lineages, f"caller-{number % CALLERS}", prompt(number))
        sys.setprofile(None)
        given_up = max(before - lineages.bytes, 0) // 600
        most = max(most, given_up)
        assert calls <= 100 + CALLERS + 10 * given_up
    assert most > 100  # room was made
    assert lineages.bytes <= MEMORY


def test_a_prompt_of_many_system_messages_costs_a_look_at_each() -> None:
    """Of a template that an earlier prompt had, and with nothing else in common: the event loop waits meanwhile."""
    lineages, parts, calls = Lineages(MEMORY), 2_000, 0

    def count(frame: Any, event: str, arg: Any) -> None:
        nonlocal calls
        calls += event == "call"

    for number in (1, 2):
        found = [PartOutline(number << 16 | i, SYSTEM, float(i), i) for i in range(1, parts + 1)]
        digests = array("q", [part.digest for part in found])
        outline = PromptOutline(found, digests, EMPTY, 0, 7, [], lambda n: n, parts, lambda *place: None)
        calls = 0
        sys.setprofile(count)
        link = lineages.follow(SentNow("caller", "chat", "", 0.0, 1.0), outline, lambda *place: None).link
        sys.setprofile(None)
    assert (link, calls < 2 * parts) == (Link.TEMPLATE, True)


def test_the_caller_with_most_makes_room_for_the_others() -> None:
    """Of one with long prompts and many, nobody else loses any."""
    lineages = Lineages(MEMORY)
    for number in range(1, CALLERS):
        follow(lineages, f"caller-{number}", prompt(number))
    for number in range(CALLERS, CALLERS + 500):
        follow(lineages, "large", prompt(number, blocks=4000))
    found = [
        lineages.follow(SentNow(f"caller-{number}", "chat", "", 2.0, 3.0), prompt(number), lambda *place: None).link
        for number in range(1, CALLERS)
    ]
    assert found == [Link.CONVERSATION] * (CALLERS - 1)
