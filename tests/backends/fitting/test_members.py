"""Members at the top of a chat's body, for servers that refuse what they do not know."""

from __future__ import annotations

import pytest

from backends.facts.fact_rows import apis
from backends.facts.lookup import facts_of
from backends.facts.model_facts import Facts, UnknownMembers
from backends.fitting.members import HINTS
from backends.fitting.target import Author
from backends.translation.translation import UntranslatableError
from tests.backends.fitting.bodies import ASKED, CHAT, FUNCTION, RESPONSES, Json, fitted

GEMINI = facts_of("gemini", "gemini-3.8-flash")
SAID: Json = {"store": True, "metadata": {"team": "a"}, "verbosity": "low", "prompt_cache_key": "k", "top_k": 4}


@pytest.mark.parametrize("author", Author)
def test_hints_that_a_server_does_not_know_are_left_out_and_told(author: Author) -> None:
    """Whoever wrote them: a caller of one server too, who means the answer and not the hint."""
    body, told = fitted(GEMINI, CHAT, {**SAID, "temperature": 0}, author)
    assert (body, told) == ({"temperature": 0}, sorted(SAID))


def test_a_hint_that_says_nothing_is_left_out_untold() -> None:
    silent = {"store": False, "metadata": {}, "verbosity": "medium", "prompt_cache_key": None}
    assert fitted(GEMINI, CHAT, silent) == ({}, [])


def test_what_a_server_knows_stays() -> None:
    """By its own list: these know a key of the cache, others do not."""
    for api, model in (("mistral", "mistral-medium-3.5"), ("cerebras", "gpt-oss-120b")):
        assert fitted(facts_of(api, model), CHAT, {"prompt_cache_key": "k"}) == ({"prompt_cache_key": "k"}, [])
    assert fitted(facts_of("vllm", "m"), CHAT, SAID) == (SAID, [])


def test_what_was_meant_is_refused_by_name_where_another_server_can_be_asked() -> None:
    meant = {"web_search_options": {}}
    with pytest.raises(UntranslatableError, match="web_search_options"):
        fitted(GEMINI, CHAT, meant, Author.CALLER)
    assert fitted(GEMINI, CHAT, meant, Author.KNOWING) == (meant, [])


def test_a_tool_that_a_row_refuses_is_no_reason_to_lose_it() -> None:
    facts = Facts(refused=frozenset({"tools", "messages", "response_format"}))
    tools = {"tools": [FUNCTION], "messages": [ASKED]}
    with pytest.raises(UntranslatableError, match="tools"):
        fitted(facts, CHAT, tools, Author.CALLER)
    assert fitted(facts, CHAT, tools, Author.KNOWING) == (tools, [])
    assert fitted(facts, CHAT, {"messages": [ASKED], "response_format": {"type": "text"}}) == (
        {"messages": [ASKED]},
        ["response_format"],
    )


def test_a_member_has_the_servers_name_and_its_own_spelling_counts() -> None:
    facts = Facts(renamed={"seed": "random_seed"})
    assert fitted(facts, CHAT, {"seed": 1}) == ({"random_seed": 1}, [])
    assert fitted(facts, CHAT, {"seed": 1, "random_seed": 2}) == ({"random_seed": 2}, [])


def test_a_member_that_nobody_knows_is_the_server_s_to_judge() -> None:
    """It may be newer than the rows."""
    new = {"of_next_month": 1}
    assert fitted(GEMINI, CHAT, new, Author.CALLER) == (new, [])


def test_the_members_are_those_of_a_chat_alone() -> None:
    body = {"truncation": "auto", "include": ["x"], "top_k": 3}
    assert fitted(facts_of("openai", "gpt-5.6"), RESPONSES, body, Author.CALLER)[0].keys() >= {"truncation", "include"}


def test_a_server_that_refuses_unknown_members_has_a_list_of_those_it_knows() -> None:
    """All that speak chat; what a list says is known is not refused in the next line, or both would be guesses."""
    for name, row in apis().items():
        strict = row.facts.get("unknown_members") == UnknownMembers.EVERYWHERE.value
        if strict and name not in ("anthropic", "fireworks"):
            known = set(row.facts["members"])
            assert {"model", "messages", "stream", "tools", "temperature"} <= known, name
            assert not known & (set(row.facts.get("refused", ())) - {"stream_options"}) & HINTS, name
