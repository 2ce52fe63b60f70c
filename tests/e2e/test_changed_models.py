"""Sessions that change their model: state of a turn returns to its own maker alone, over real sockets."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import pytest

from tests.e2e.test_anthropic import ASKED, COMPLETION, MESSAGE, claude, sent, streamed, whole
from tests.support.gateways import pool, running
from tests.support.upstream import Upstream

pytestmark = pytest.mark.virtual_time

THOUGHT = {"type": "thinking", "thinking": "hm", "signature": "opus+signature/=="}
SIGNED = {**MESSAGE, "content": [THOUGHT, {"type": "text", "text": "so"}], "stop_reason": "end_turn"}
EXTRA = {"google": {"thought_signature": "c2ln/+=="}}
CALL = {"id": "f:0", "type": "function", "function": {"name": "f", "arguments": "{}"}, "extra_content": EXTRA}
CALLED = {"index": 0, "message": {"role": "assistant", "content": None, "tool_calls": [CALL]}}
CALLS = {**COMPLETION, "choices": [{**CALLED, "finish_reason": "tool_calls"}]}


async def ask(url: str, model: str, *turns: Any) -> tuple[Any, Any]:
    """Body and headers of the answer to a Messages caller."""
    body = {"model": model, "max_tokens": 9, "messages": [*ASKED, *turns]}
    async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/messages", json=body) as answer:
        return json.loads(await answer.read()), answer.headers


async def test_a_signature_of_one_model_is_not_sent_to_another() -> None:
    """The answer passes untouched; its maker gets the signature back as it was, the other model gets the text alone."""
    async with Upstream(whole(SIGNED), whole(SIGNED)) as opus, Upstream(whole(MESSAGE)) as sonnet:
        pools = {"opus": claude(opus), "sonnet": {**claude(sonnet), "model": "sonnet"}}
        async with running(pools, {"a": {"tiers": ["opus"]}, "b": {"tiers": ["sonnet"]}}) as gateway:
            answer, _ = await ask(gateway.url, "a")
            assert answer["content"] == SIGNED["content"]
            history = {"role": "assistant", "content": answer["content"]}, ASKED[0]
            await ask(gateway.url, "a", *history)
            assert sent(opus)["messages"][1]["content"][0] == THOUGHT
            _, headers = await ask(gateway.url, "b", *history)
    assert sent(sonnet)["messages"][1]["content"] == [{"type": "text", "text": "so"}]
    assert headers["x-firsttoken-left-out"] == "messages.content.thinking"


async def test_state_of_a_call_returns_to_its_maker_alone() -> None:
    """A Messages caller has no member for it: the id of the call holds the state."""
    async with Upstream(whole(CALLS), whole(COMPLETION)) as maker, Upstream(whole(COMPLETION)) as other:
        pools = {
            "maker": pool(maker.url, backend="compatible", model="m"),
            "other": pool(other.url, backend="compatible", model="n"),
        }
        async with running(pools, {"a": {"tiers": ["maker"]}, "b": {"tiers": ["other"]}}) as gateway:
            answer, _ = await ask(gateway.url, "a")
            [block] = answer["content"]
            result = {"type": "tool_result", "tool_use_id": block["id"], "content": "r"}
            history = {"role": "assistant", "content": [block]}, {"role": "user", "content": [result]}
            await ask(gateway.url, "a", *history)
            assert sent(maker)["messages"][1]["tool_calls"] == [CALL]
            assert sent(maker)["messages"][2]["tool_call_id"] == CALL["id"]
            _, headers = await ask(gateway.url, "b", *history)
    [call] = sent(other)["messages"][1]["tool_calls"]
    assert call.keys() == {"id", "type", "function"}
    assert sent(other)["messages"][2]["tool_call_id"] == call["id"]
    assert "ftst1" not in json.dumps(sent(other))
    assert headers["x-firsttoken-left-out"] == "messages.content.tool_use.state"


async def test_a_signature_is_of_the_model_that_the_caller_named() -> None:
    """Of one pool that takes any model: another model gets the text alone, the same one its signature."""
    async with Upstream(whole(SIGNED), whole(MESSAGE)) as api:
        pools = {"api": {**claude(api), "model": ""}}
        async with running(pools, {}, passthrough="api") as gateway:
            answer, _ = await ask(gateway.url, "claude-opus-5-5")
            history = {"role": "assistant", "content": answer["content"]}, ASKED[0]
            await ask(gateway.url, "claude-opus-5-5", *history)
            assert sent(api)["messages"][1]["content"][0] == THOUGHT
            await ask(gateway.url, "claude-haiku-5-5", *history)
            assert sent(api)["model"] == "claude-haiku-5-5"
            assert sent(api)["messages"][1]["content"] == [{"type": "text", "text": "so"}]


DETAIL = {"type": "reasoning.encrypted", "data": "c2VjcmV0", "id": "rs_1", "format": "openai-responses-v1", "index": 0}


def chunks(*choices: Any) -> Any:
    heads = [{**COMPLETION, "object": "chat.completion.chunk", "choices": [each], "usage": None} for each in choices]
    return streamed(*(f"data: {json.dumps(each)}\n\n".encode() for each in heads), b"data: [DONE]\n\n")


@pytest.mark.parametrize("stream", [False, True])
async def test_details_of_reasoning_in_a_chat_return_to_their_maker_alone(stream: bool) -> None:
    """A chat server's own, in an answer that passes untouched."""
    message = {"role": "assistant", "content": "so", "reasoning_details": [DETAIL]}
    answered = whole({**COMPLETION, "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})
    if stream:
        parts = {"reasoning_details": [DETAIL]}, {"content": "so"}
        deltas = [{"index": 0, "delta": delta, "finish_reason": None} for delta in parts]
        answered = chunks(*deltas, {"index": 0, "delta": {}, "finish_reason": "stop"})
    body = {"stream": stream, "messages": ASKED}
    async with Upstream(answered) as maker, Upstream(whole(COMPLETION)) as other:
        pools = {"maker": pool(maker.url, model="m"), "other": pool(other.url, model="n")}
        async with running(pools, {"a": {"tiers": ["maker"]}, "b": {"tiers": ["other"]}}) as gateway:
            await say(gateway.url, {**body, "model": "a"})
            body = {"stream": False, "messages": [*ASKED, message, *ASKED]}
            await say(gateway.url, {**body, "model": "a"})
            assert sent(maker)["messages"][1]["reasoning_details"] == [DETAIL]
            headers = await say(gateway.url, {**body, "model": "b"})
    assert "reasoning_details" not in sent(other)["messages"][1]
    assert headers["x-firsttoken-left-out"] == "messages.reasoning_details"


async def say(url: str, body: Any) -> Any:
    """Headers of the answer to a chat caller."""
    async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/chat/completions", json=body) as answer:
        await answer.read()
        return answer.headers
