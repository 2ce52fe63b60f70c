"""Speeds that an API sells: left out where they are not sold, told, and priced as served."""

from __future__ import annotations

import pytest

from backends.facts.lookup import facts_of
from backends.fitting.target import Author
from tests.backends.fitting.bodies import CHAT, MESSAGES, Json, fitted

OPENAI = facts_of("openai", "gpt-5.5")
OPUS = facts_of("anthropic", "claude-opus-5-5")
HAIKU = facts_of("anthropic", "claude-haiku-4-5")
OWN = facts_of("vllm", "m")


@pytest.mark.parametrize("tier", ["auto", "default", "flex", "priority", "fast"])
def test_a_speed_that_is_sold_is_sent(tier: str) -> None:
    assert fitted(OPENAI, CHAT, {"service_tier": tier}) == ({"service_tier": tier}, [])
    assert fitted(OPUS, MESSAGES, {"speed": "fast"}) == ({"speed": "fast"}, [])


@pytest.mark.parametrize("author", [Author.GATEWAY, Author.CALLER])
def test_a_speed_that_is_not_sold_is_left_out_and_told(author: Author) -> None:
    """Each on its merits: another tier of the same request may sell it."""
    assert fitted(HAIKU, MESSAGES, {"speed": "fast"}, author) == ({}, ["speed"])
    assert fitted(OPENAI, CHAT, {"service_tier": "ultrafast"}, author) == ({}, ["service_tier"])
    assert fitted(OWN, CHAT, {"service_tier": "priority"}, author) == ({}, ["service_tier"])


def test_one_speed_of_two_names_is_sent_by_the_name_at_which_it_is_sold() -> None:
    body, told = fitted(OPUS, CHAT, {"service_tier": "priority"})
    assert (body, told) == ({"service_tier": "fast"}, [])


def test_the_standard_speed_is_sold_everywhere() -> None:
    body: Json = {"service_tier": "default"}
    assert fitted(OWN, CHAT, body) == (body, [])


def test_where_nothing_is_known_of_speeds_the_server_decides() -> None:
    body: Json = {"service_tier": "priority"}
    assert fitted(facts_of("compatible", "m"), CHAT, body) == (body, [])
