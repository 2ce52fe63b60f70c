"""Servers that refuse a form of a request, in the providers' words: asked again in another form, which is remembered.

A refusal of what the caller means, or has got wrong, is mended nowhere; one of what the gateway wrote is not the end.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

import pytest

from policies.queue.queued_request import QueuedRequest
from policies.types import AttemptKind, Decision
from tests.support.builders import get, last, post
from tests.support.refusing_server import (
    FITTED,
    HELLO,
    TOOL,
    A,
    B,
    Json,
    Rule,
    Verifying,
    anthropic,
    ask,
    lessons,
    mistral,
    never,
    no_temperature,
    openai,
    served,
    tools_elsewhere,
)

pytestmark = pytest.mark.virtual_time

# --------------------------------------------------------------------------- mended once


def _extra_reasoning(target: str, body: Json) -> bytes | None:
    place = next((i for i, each in enumerate(body["messages"]) if "reasoning_content" in each), None)
    return None if place is None else mistral("messages", place, "assistant", "reasoning_content")


def _no_developer(target: str, body: Json) -> bytes | None:
    roles = [each["role"] for each in body["messages"]]
    return openai("Unexpected message role.") if "developer" in roles else None


def _one_system(target: str, body: Json) -> bytes | None:
    roles = [each["role"] for each in body["messages"]]
    return openai("System message must be at the beginning.") if "system" in roles[1:] else None


def _new_limit(target: str, body: Json) -> bytes | None:
    words = "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead."
    return openai(words, "max_tokens", "unsupported_parameter") if "max_tokens" in body else None


def _no_pair(target: str, body: Json) -> bytes | None:
    words = "`temperature` and `top_p` cannot both be specified for this model. Please use only one."
    return anthropic(words) if {"temperature", "top_p"} <= body.keys() else None


THOUGHT: Json = {"role": "assistant", "content": "hm", "reasoning_content": "so"}
MENDED: Mapping[str, tuple[str, Rule, Json, Callable[[Json], bool], str]] = {
    "a deprecated member": (
        "anthropic",
        no_temperature,
        {"temperature": 0.5},
        lambda body: "temperature" not in body,
        "temperature",
    ),
    "two that exclude each other": (
        "anthropic",
        _no_pair,
        {"temperature": 0.5, "top_p": 0.9},
        lambda body: "top_p" not in body and body["temperature"] == 0.5,
        "top_p",
    ),
    "an extra member of the history": (
        "compatible",
        _extra_reasoning,
        {"messages": [HELLO, THOUGHT, HELLO]},
        lambda body: body["messages"][1] == {"role": "assistant", "content": "hm"},
        "messages.reasoning_content",
    ),
    "the developer's role": (
        "compatible",
        _no_developer,
        {"messages": [{"role": "developer", "content": "be kind"}, HELLO]},
        lambda body: body["messages"][0] == {"role": "system", "content": "be kind"},
        "messages.role",
    ),
    "a second system message": (
        "compatible",
        _one_system,
        {"messages": [{"role": "system", "content": "a"}, {"role": "system", "content": "b"}, HELLO]},
        lambda body: body["messages"] == [{"role": "system", "content": "a\n\nb"}, HELLO],
        "messages.role",
    ),
    "another name of the limit": (
        "compatible",
        _new_limit,
        {},
        lambda body: body["max_completion_tokens"] == 9 and "max_tokens" not in body,
        "",
    ),
}


@pytest.mark.parametrize("name", MENDED)
async def test_a_refused_form_is_mended_at_the_same_endpoint_beside_max_attempts(name: str) -> None:
    """One attempt is allowed, and one more is made: with the change alone, and told to the caller and in the Record."""
    kind, rule, members, is_mended, told = MENDED[name]
    async with Verifying(rule) as server, served((kind, server), max_attempts=1) as (gateway, caller):
        status, headers, body = await ask(caller, **members)
        assert (status, len(server.bodies)) == (200, 2), body
        first, second = server.bodies
        assert is_mended(second)
        untouched = {"messages", "temperature", "top_p", "max_tokens", "max_completion_tokens"}
        assert {**first, **dict.fromkeys(untouched)} == {**second, **dict.fromkeys(untouched)}
        assert headers.get("x-firsttoken-left-out", "") == told
        record = last(gateway)
        assert [each.kind for each in record.attempts] == [AttemptKind.PRIMARY, AttemptKind.MENDED]
        (lesson,) = await lessons(gateway)
        assert (lesson["callers"], lesson["model"]) == (1, "served")
        _, _, page = await get(gateway.admin_url, "/requests")
        assert json.loads(page)[-1]["lessons"] == [lesson["lesson"]]
        assert (await ask(caller, **members))[0] == 200
        assert is_mended(server.bodies[-1])
        assert len(server.bodies) == 3  # changed before it was sent


async def test_a_streamed_request_is_mended_before_its_first_byte() -> None:
    async with Verifying(no_temperature) as server, served(("compatible", server)) as (_, caller):
        body = {"model": "chat", "stream": True, "temperature": 0, "messages": [HELLO]}
        status, headers = await caller.ask(post(body, f"authorization: Bearer {A}"))
        answer = b"".join(await caller.chunks())
        assert (status, len(server.bodies), answer.count(b'"hi"')) == (200, 2, 1)
        assert headers["x-firsttoken-attempts"] == "2"


async def test_tools_go_to_the_operation_that_the_server_names() -> None:
    """OpenAI's newest take tools with an effort over Responses alone: whoever asks over Messages or chat gets there."""

    def rule(target: str, body: Json) -> bytes | None:
        words = "Function tools with reasoning_effort are not supported for gpt-5.6 in /v1/chat/completions. "
        is_refused = target.endswith("/chat/completions") and body.get("tools")
        return openai(words + "To use function tools, use /v1/responses", "reasoning_effort") if is_refused else None

    async with Verifying(rule) as server, served(("openai", server)) as (_, caller):
        status, headers, body = await ask(caller, tools=[TOOL], reasoning_effort="low")
        assert (status, body["choices"][0]["message"]["content"]) == (200, "hi")
        assert [each.rpartition("/v1/")[2] for each in server.targets] == ["chat/completions", "responses"]
        assert headers["x-firsttoken-attempts"] == "2"
        assert (await ask(caller, tools=[TOOL], reasoning_effort="low"))[0] == 200
        assert (await ask(caller))[0] == 200
        assert [each.rpartition("/v1/")[2] for each in server.targets[2:]] == ["responses", "chat/completions"]
        tool = {"name": "look", "input_schema": {"type": "object"}}
        status, _, message = await ask(caller, path="/v1/messages", tools=[tool])
        assert (status, message["content"][0]["text"]) == (200, "hi")
        assert server.targets[-1].endswith("responses")


async def test_reasoning_that_the_server_demands_is_returned() -> None:
    """Kimi behind `compatible`: a Messages caller returns its thinking, which the first body left out."""

    def rule(target: str, body: Json) -> bytes | None:
        words = "thinking is enabled but reasoning_content is missing in assistant tool call message at index 1"
        turn = body["messages"][1]
        return None if turn.get("reasoning_content") == "so" else openai(words)

    call = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}
    turns = [
        HELLO,
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "so", "signature": ""}, call]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "seen"}]},
    ]
    tool = {"name": "look", "input_schema": {"type": "object"}}
    async with Verifying(rule) as server, served(("compatible", server)) as (gateway, caller):
        for bodies in (2, 3, 4):
            status, _, message = await ask(caller, path="/v1/messages", messages=turns, tools=[tool])
            assert (status, len(server.bodies)) == (200, bodies), message
        (lesson,) = await lessons(gateway)
        assert lesson["lesson"] == "fitted to accepts.reasoning: returned"


# --------------------------------------------------------------------------- the next pool


async def test_a_translated_body_that_is_refused_goes_to_the_next_pool() -> None:
    """81 characters of a tool's name are good at Anthropic, and none at OpenAI: the caller wrote what is right."""

    def rule(target: str, body: Json) -> bytes | None:
        words = "Invalid 'tools[0].function.name': string too long. Expected a string with maximum length 64."
        return openai(words, "tools[0].function.name", "string_above_max_length")

    async with (
        Verifying(rule) as first,
        Verifying(never) as second,
        served(("openai", first), ("anthropic", second)) as (_, caller),
    ):
        tool = {"name": "x" * 81, "input_schema": {"type": "object"}}
        status, headers, _ = await ask(caller, path="/v1/messages", tools=[tool])
        assert (status, headers["x-firsttoken-pool"]) == (200, "p1")
        assert (len(first.bodies), len(second.bodies)) == (1, 1)


async def test_what_the_server_lacks_goes_to_the_next_pool_or_is_refused() -> None:
    """A tool is never left out: without another pool the caller reads the server's refusal."""

    def rule(target: str, body: Json) -> bytes | None:
        words = '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
        return openai(words) if "tools" in body else None

    async with Verifying(rule) as first, Verifying(never) as second:
        async with served(("compatible", first), ("compatible", second)) as (_, caller):
            assert (await ask(caller, tools=[TOOL]))[0] == 200
            assert second.bodies[0]["tools"] == [TOOL]
        async with served(("compatible", first)) as (_, caller):
            status, _, body = await ask(caller, tools=[TOOL])
            assert (status, "requires" in body["error"]["message"]) == (400, True)
        assert [each["tools"] for each in first.bodies] == [[TOOL], [TOOL]]


async def test_a_fault_of_the_caller_stays_a_400_at_one_attempt() -> None:
    """A value out of range is refused on its merits, and no other pool is asked."""

    def rule(target: str, body: Json) -> bytes | None:
        words = "Invalid 'temperature': decimal above maximum value. Expected a value <= 2, but got 3 instead."
        return openai(words, "temperature", "decimal_above_max_value")

    async with (
        Verifying(rule) as first,
        Verifying(never) as second,
        served(("compatible", first), ("compatible", second)) as (gateway, caller),
    ):
        status, headers, body = await ask(caller, temperature=3)
        assert (status, headers["x-firsttoken-attempts"]) == (400, "1")
        assert "maximum value" in body["error"]["message"]
        assert (len(second.bodies), await lessons(gateway)) == (0, [])


async def test_a_value_that_no_server_is_known_to_take_is_the_callers_fault() -> None:
    """The nearest of the listed values is sent for one that other servers take, and for no other."""

    def rule(target: str, body: Json) -> bytes | None:
        words = "Unsupported value: 'reasoning_effort' does not support this. Supported values are: 'low' and 'high'."
        is_known = body.get("reasoning_effort") in ("low", "high")
        return None if is_known else openai(words, "reasoning_effort", "unsupported_value")

    async with (
        Verifying(rule) as first,
        Verifying(never) as second,
        served(("compatible", first), ("compatible", second), max_attempts=2) as (_, caller),
    ):
        assert (await ask(caller, reasoning_effort="banana"))[0] == 400
        assert (len(first.bodies), len(second.bodies)) == (1, 0)
        assert (await ask(caller, reasoning_effort="max"))[0] == 200
        assert [each["reasoning_effort"] for each in first.bodies] == ["banana", "max", "high"]


async def test_a_server_is_not_asked_for_the_same_again() -> None:
    """It wants reasoning back, and the history has none."""

    def rule(target: str, body: Json) -> bytes | None:
        return openai("reasoning_content is missing in assistant message at index 1")

    async with Verifying(rule) as server, served(("compatible", server)) as (_, caller):
        assert (await ask(caller))[0] == 400
        assert len(server.bodies) == 1


async def test_a_changed_body_that_is_refused_goes_to_the_next_pool_with_nothing_changed() -> None:
    """The caller has not written what was refused last, and no lesson is left of it."""

    def rule(target: str, body: Json) -> bytes | None:
        words = "Invalid 'max_tokens': integer below minimum value."
        return no_temperature(target, body) or openai(words, "max_tokens", "integer_below_min_value")

    async with (
        Verifying(rule) as first,
        Verifying(never) as second,
        served(("compatible", first), ("compatible", second), max_attempts=2) as (gateway, caller),
    ):
        status, headers, _ = await ask(caller, temperature=0)
        assert (status, headers["x-firsttoken-pool"], len(first.bodies)) == (200, "p1", 2)
        assert second.bodies[0]["temperature"] == 0
        assert await lessons(gateway) == []


async def test_what_is_mended_once_is_not_remembered() -> None:
    """State of another maker is of one conversation."""

    def rule(target: str, body: Json) -> bytes | None:
        has_state = any("reasoning_details" in each for each in body["messages"])
        return openai("Provider returned error") if has_state else None

    turn = {"role": "assistant", "content": "hm", "reasoning_details": [{"type": "reasoning.text", "text": "so"}]}
    async with Verifying(rule) as server, served(("compatible", server)) as (gateway, caller):
        for asked in (2, 4):
            assert (await ask(caller, messages=[HELLO, turn, HELLO]))[0] == 200
            assert (len(server.bodies), await lessons(gateway)) == (asked, [])


async def test_a_body_for_another_operation_is_fitted_to_what_the_first_has_shown() -> None:
    """What the server takes of ids holds at each of its operations."""

    def rule(target: str, body: Json) -> bytes | None:
        if not target.endswith("/chat/completions"):
            return None
        is_long = len(body["messages"][1]["tool_calls"][0]["id"]) != 9
        words = "Tool call id was call_123 but must be a-z, A-Z, 0-9, with a length of 9."
        return openai(words if is_long else "To use function tools, use /v1/responses")

    call = {"id": "call_123", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    turns = [
        HELLO,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_123", "content": "x"},
    ]
    async with Verifying(rule) as server, served(("openai", server)) as (_, caller):
        for _ in range(2):
            assert (await ask(caller, messages=turns, tools=[TOOL]))[0] == 200
            assert server.targets[-1].endswith("/responses")
            assert {len(each["call_id"]) for each in server.bodies[-1]["input"] if "call_id" in each} == {9}


async def test_what_the_first_operation_refused_hinders_no_body_for_another() -> None:
    """Responses has no `stop`: the chat that the server refuses for it too is made without, and told so."""

    def rule(target: str, body: Json) -> bytes | None:
        if "stop" in body:
            return openai("Unsupported parameter: 'stop'", "stop", "unsupported_parameter")
        return tools_elsewhere(target, body)

    async with Verifying(rule) as server, served(("openai", server)) as (_, caller):
        for bodies in (3, 4):
            status, headers, _ = await ask(caller, tools=[TOOL], stop=["x"], max_tokens=99)
            assert (status, len(server.bodies), headers["x-firsttoken-left-out"]) == (200, bodies, "stop")
            assert server.targets[-1].endswith("/responses")


# --------------------------------------------------------------------------- facts that a refusal shows


@pytest.mark.parametrize("name", FITTED)
async def test_a_body_is_fitted_to_what_a_refusal_shows_of_its_server(name: str) -> None:
    """As if the fact stood under `accepts` of the pool: no tool is lost, and once two callers were answered so, the
    bodies of all are fitted before they are sent."""
    kind, rule, tool = FITTED[name]
    async with Verifying(rule) as server, served((kind, server)) as (gateway, caller):
        for key, asked in ((A, 2), (A, 3), (B, 5), (B, 6), (A, 7)):
            status, _, body = await ask(caller, key, tools=[tool])
            assert (status, len(server.bodies)) == (200, asked), body
            assert len(server.bodies[-1]["tools"]) == 1
        told = await lessons(gateway)
        assert [(each["callers"], each["lesson"].startswith("fitted to accepts.")) for each in told] == [("all", True)]


async def test_a_request_that_waits_over_a_reload_is_sent_without_lessons_of_the_server_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its body was changed on arrival; the pool is another when it gets its place."""
    async with Verifying(no_temperature) as server, served(("compatible", server)) as (gateway, caller):
        assert (await ask(caller, temperature=0))[0] == 200
        server.rule = never
        section = gateway.config.pools["p0"].model_copy(update={"model": "other"})
        after, decide = gateway.config.model_copy(update={"pools": {"p0": section}}), gateway.queue.decide

        async def reloading(queued: QueuedRequest, entered_at: float) -> Decision | None:
            """As the queue ends the wait of a request whose route was replaced."""
            monkeypatch.setattr(gateway.queue, "decide", decide)
            await gateway.apply_config(after)
            return None

        monkeypatch.setattr(gateway.queue, "decide", reloading)
        status, headers, _ = await ask(caller, temperature=0)
        assert (status, server.bodies[-1]["model"], server.bodies[-1]["temperature"]) == (200, "other", 0)
        assert "x-firsttoken-left-out" not in headers
        _, _, page = await get(gateway.admin_url, "/requests")
        assert json.loads(page)[-1]["lessons"] == []


async def test_a_reload_that_changes_a_pool_forgets_its_lessons() -> None:
    async with Verifying(no_temperature) as server, served(("compatible", server)) as (gateway, caller):
        assert (await ask(caller, temperature=0))[0] == 200
        await gateway.apply_config(gateway.config)
        assert len(await lessons(gateway)) == 1
        section = gateway.config.pools["p0"].model_copy(update={"model": "other"})
        await gateway.apply_config(gateway.config.model_copy(update={"pools": {"p0": section}}))
        assert await lessons(gateway) == []
