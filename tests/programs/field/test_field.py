"""A slice of the bench: conversations of eleven clients before every API that verifies (`make field` runs 2,000)."""

from __future__ import annotations

import asyncio
import json
from functools import cache
from typing import Any

import pytest

from tests.programs.field.bench import ANSWER, LOST, MENDED, NAMED, REFUSED, Results, run, sessions
from tests.programs.field.dice import Dice
from tests.programs.field.fakes import Fake
from tests.programs.field.page import page
from tests.programs.field.providers import Accounts
from tests.programs.field.refusals import refusal
from tests.programs.field.rules import Target, by_api, table, targets
from tests.programs.field.shares import Found, Plan, carry_out

SLICE = 22  # conversations, two of each client
_OF_API = pytest.mark.parametrize("api", by_api())
_OF_TARGET = pytest.mark.parametrize("target", targets(), ids=lambda target: target.name)


@cache
def results() -> Results:
    return asyncio.run(run(range(SLICE), steps=3))


def kinds(api: str, form: str) -> list[str]:
    counts = results().counts
    return [f"{kind} ({count})" for (of, name, kind), count in sorted(counts.items()) if (of, name) == (api, form)]


@_OF_API
def test_no_request_is_refused_for_what_the_gateway_could_have_left_out(api: str) -> None:
    assert kinds(api, REFUSED) == []


@_OF_API
def test_no_state_is_lost_that_its_maker_would_have_accepted(api: str) -> None:
    assert kinds(api, LOST) == []


def test_a_session_may_change_its_model_at_any_step() -> None:
    """Nothing is refused, and what is refused by name is no form of the history, but a file or an image in it."""
    found, _ = asyncio.run(sessions(range(3), 25))
    histories = [key for key in found.counts if key[1] == NAMED and _is_of_history(key[2])]
    assert [key for key in found.counts if key[1] in (REFUSED, LOST, ANSWER)] + histories == []


def _is_of_history(words: str) -> bool:
    return ("input" in words or "messages" in words) and "messages.content." not in words


def test_every_answer_is_the_models_in_the_callers_dialect() -> None:
    assert [found for api in by_api() for found in kinds(api, ANSWER)] == []


def test_every_api_is_asked() -> None:
    """By every conversation at least once."""
    assert {api for api in by_api() if results().requests[api] >= SLICE} == {*by_api()}


def test_a_page_names_every_api() -> None:
    text = page(Plan(SLICE, 0, 0, 0, (), 1), Found(results()), 5)
    assert [api for api in by_api() if f"| {api} |" not in text] == []


@pytest.mark.parametrize("route", ["alone", "further"])
def test_lessons_mend_what_no_fact_tells(route: str) -> None:
    """Where nothing is believed of models and APIs, a pool loses two requests at most by one kind of refusal, and a
    caller with a further tier none. Of what most clients send."""
    plan = Plan(11, 0, 0, 0, (), 1, route, without_facts=True, odd=False)
    found = carry_out(plan).short
    assert found.requests.total() > 11 * len(by_api())
    assert [(key, count) for key, count in found.lost.items() if count > (2 if route == "alone" else 0)] == []
    assert any(count for (_, form), count in found.classes.items() if form == MENDED)


# --------------------------------------------------------------------------- the fakes


def plain_request(target: Target) -> tuple[str, dict[str, Any]]:
    """A dialect that the API speaks, and a body without options."""
    dialect = target.rules["speaks"][0]
    body = {"model": target.model, "messages": [{"role": "user", "content": "hello"}]}
    return dialect, body | ({"max_tokens": 99} if dialect == "messages" else {})


@_OF_TARGET
def test_a_plain_request_breaks_no_rule(target: Target) -> None:
    """The rules do not refuse everything."""
    dialect, body = plain_request(target)
    assert Fake(target, Dice(1)).verify(dialect, body) == []


@_OF_TARGET
def test_a_result_without_its_call_is_refused_in_the_words_of_the_api(target: Target) -> None:
    """And answered all the same by an account that is lenient."""
    dialect, body = plain_request(target)
    wrong: dict[str, Any] = {"role": "tool", "tool_call_id": "abcdefghi", "content": "done"}
    if dialect == "messages":
        result = {"type": "tool_result", "tool_use_id": "abcdefghi", "content": "done"}
        wrong = {"role": "user", "content": [result]}
    body["messages"].append(wrong)
    accounts = Accounts(Dice(1))
    status, _, said = accounts.answer(target, dialect, body)
    assert (status, accounts.exchanges[-1].violations[0].kind) == (
        table()["refusals"][target.rule("refusal")].get("status", 400),
        "result without its call",
    )
    assert json.loads(said)
    accounts.lenient = True
    assert accounts.answer(target, dialect, body)[0] == 200


def test_a_refused_member_is_named_where_the_api_names_it() -> None:
    """By its path in Gemini's details and Mistral's list, in camel case by xAI, in the parameter by OpenAI."""
    by_name = {target.api: target for target in targets()}
    said = {}
    for api, member in (("gemini", "seed"), ("mistral", "user"), ("xai", "presence_penalty"), ("openai", "top_k")):
        body = plain_request(by_name[api])[1] | {member: 1}
        found = Fake(by_name[api], Dice(1)).verify("chat", body)
        said[api] = json.loads(refusal(by_name[api], found[0])[1])
    assert said["gemini"][0]["error"]["details"][0]["fieldViolations"][0]["field"] == "seed"
    assert said["mistral"]["message"]["detail"][0]["loc"] == ["body", "user"]
    assert said["xai"]["error"].endswith("presencePenalty")
    assert said["openai"]["error"]["param"] == "top_k"
