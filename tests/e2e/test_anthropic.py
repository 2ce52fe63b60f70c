"""Anthropic's dialect at both ends, over real sockets, with the SDKs of OpenAI and Anthropic as callers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import openai
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from gateway.app import Gateway
from gateway.observe.record import RequestOutcome
from gateway.observe.record_columns import RECORD
from tests.support.builders import last
from tests.support.dialect_strategies import Json, message_events, named_sse
from tests.support.gateways import pool, running
from tests.support.simulated import engine_pool, engines
from tests.support.upstream import LAST_CHUNK, STREAM_HEAD, Script, Upstream, chunk, reply

pytestmark = pytest.mark.virtual_time

JSON = "content-type: application/json"
ASKED: list[Any] = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CALLS = [
    {"type": "tool_use", "id": f"toolu_{city}", "name": "weather", "input": {"city": city}} for city in ("Ulm", "Bern")
]
MESSAGE: Json = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "model": "claude",
    "content": [{"type": "text", "text": "Two calls."}, *CALLS],
    "stop_reason": "tool_use",
    "stop_sequence": None,
    "usage": {"input_tokens": 3, "cache_read_input_tokens": 5, "cache_creation_input_tokens": 2, "output_tokens": 9},
}
COMPLETION: Json = {
    "id": "c1",
    "object": "chat.completion",
    "created": 1,
    "model": "served",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "two"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 9, "completion_tokens": 1, "total_tokens": 10},
}


def whole(body: Any, status: str = "200 OK", *headers: str) -> Script:
    return [reply(json.dumps(body).encode(), status, JSON, *headers)]


def streamed(*events: bytes) -> Script:
    return [STREAM_HEAD + b"".join(map(chunk, events)) + LAST_CHUNK]


def error(kind: str, message: str = "no") -> Json:
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": "req_1"}


def claude(upstream: Upstream, **more: Any) -> dict[str, Any]:
    """Without cache breakpoints, which tests/backends/test_prompt_breakpoints.py adds."""
    sent = {"prompt_caching": "off", **more}
    return pool(upstream.url, backend="anthropic", model="claude", api_key="sk-ant-own", **sent)


@asynccontextmanager
async def before_claude(*scripts: Script, **route: Any) -> AsyncIterator[tuple[Gateway, Upstream]]:
    """A gateway before a server that speaks as Anthropic does."""
    async with Upstream(*scripts) as upstream:
        routes = {"chat": {"tiers": ["claude"], **route}}
        async with running({"claude": claude(upstream)}, routes) as gateway:
            yield gateway, upstream


def openai_sdk(gateway: Gateway) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="caller", max_retries=0)


def anthropic_sdk(gateway: Gateway, key: str = "caller") -> AsyncAnthropic:
    return AsyncAnthropic(base_url=gateway.url, api_key=key, max_retries=0)


def sent(upstream: Upstream) -> Json:
    """The body of the last request."""
    body: Json = json.loads(upstream.requests[-1].body)
    return body


# --------------------------------------------------------------------------- OpenAI's SDK before Anthropic

TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]


async def test_openais_sdk_is_served_by_anthropic() -> None:
    async with before_claude(whole(MESSAGE)) as (gateway, upstream), openai_sdk(gateway) as client:
        answer = await client.chat.completions.create(
            model="chat", messages=[{"role": "system", "content": "short"}, *ASKED], tools=TOOLS,
            parallel_tool_calls=False, max_tokens=50, stop="END", user="u1",
        )  # fmt: skip
        assert upstream.requests[-1].target == "/v1/messages"
        assert upstream.requests[-1].headers["x-api-key"] == "sk-ant-own"
        assert "authorization" not in upstream.requests[-1].headers
        assert sent(upstream) == {
            "model": "claude",
            "system": "short",
            "messages": ASKED,
            "tools": [{"name": "weather", "input_schema": SCHEMA}],
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
            "max_tokens": 50,
            "stop_sequences": ["END"],
            "metadata": {"user_id": "u1"},
            "stream": True,  # put together for the caller
        }
        choice = answer.choices[0]
        assert (choice.message.content, choice.finish_reason) == ("Two calls.", "tool_calls")
        called = [(call.id, json.loads(call.function.arguments)) for call in choice.message.tool_calls or ()]
        assert called == [("toolu_Ulm", {"city": "Ulm"}), ("toolu_Bern", {"city": "Bern"})]
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.prompt_tokens_details.cached_tokens) == (10, 5)
        record = last(gateway)
        assert (record.end, record.answer.prompt_tokens) == (RequestOutcome.COMPLETED, 10)


@pytest.mark.parametrize("wants_usage", [True, False])
async def test_openais_sdk_streams_from_anthropic(wants_usage: bool) -> None:
    """The usage comes where the caller has asked for it."""
    events = named_sse(message_events(MESSAGE))
    async with before_claude(streamed(*events)) as (gateway, upstream), openai_sdk(gateway) as client:
        options: Any = {"stream_options": {"include_usage": True}} if wants_usage else {}
        text, calls, usages, finish = "", {}, [], None
        stream = await client.chat.completions.create(model="chat", messages=ASKED, stream=True, **options)
        async for part in stream:
            usages += [part.usage] if part.usage else []
            for choice in part.choices:
                text += choice.delta.content or ""
                finish = choice.finish_reason or finish
                for call in choice.delta.tool_calls or ():
                    calls[call.index] = calls.get(call.index, "") + (call.function.arguments or "")
        assert (text, finish) == ("Two calls.", "tool_calls")
        assert {index: json.loads(written) for index, written in calls.items()} == {
            0: {"city": "Ulm"}, 1: {"city": "Bern"},
        }  # fmt: skip
        assert [usage.prompt_tokens for usage in usages] == [10] * wants_usage
        assert sent(upstream)["stream"] is True
        assert "stream_options" not in sent(upstream)
        assert last(gateway).end is RequestOutcome.COMPLETED


async def test_results_of_tools_reach_anthropic_in_one_turn() -> None:
    """The loop of an agent: what one answer has called, the next request answers."""
    done = {**MESSAGE, "content": [{"type": "text", "text": "Rain."}], "stop_reason": "end_turn"}
    async with before_claude(whole(MESSAGE), whole(done)) as (gateway, upstream), openai_sdk(gateway) as client:
        first = await client.chat.completions.create(model="chat", messages=ASKED, tools=TOOLS)
        said = first.choices[0].message
        results: list[Any] = [
            {"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in said.tool_calls or ()
        ]
        turns: list[Any] = [*ASKED, said.model_dump(), *results]
        second = await client.chat.completions.create(model="chat", messages=turns, tools=TOOLS)
        assert second.choices[0].message.content == "Rain."
        assert sent(upstream)["messages"][1:] == [
            {"role": "assistant", "content": MESSAGE["content"]},
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": call["id"], "content": "rain"} for call in CALLS
                ],
            },
        ]  # fmt: skip


@pytest.mark.parametrize(
    ("status", "kind", "raised"),
    [
        ("400 Bad Request", "invalid_request_error", openai.BadRequestError),
        ("401 Unauthorized", "authentication_error", openai.InternalServerError),
        ("403 Forbidden", "permission_error", openai.InternalServerError),
        ("404 Not Found", "not_found_error", openai.NotFoundError),
        ("413 Payload Too Large", "request_too_large", openai.APIStatusError),
        ("429 Too Many Requests", "rate_limit_error", openai.RateLimitError),
        ("500 Internal Server Error", "api_error", openai.InternalServerError),
        ("529 Overloaded", "overloaded_error", openai.InternalServerError),
    ],
)
async def test_errors_of_anthropic_are_openais_to_openais_sdk(status: str, kind: str, raised: Any) -> None:
    """The gateway's key is no fault of the caller's, who is told no word about it; a 404 without a model's name is
    about the caller's id."""
    async with before_claude(whole(error(kind, "said why"), status)) as (gateway, _), openai_sdk(gateway) as client:
        with pytest.raises(raised) as caught:
            await client.chat.completions.create(model="chat", messages=ASKED)
        assert isinstance(caught.value.body, dict)
        assert ("said why" in str(caught.value)) == (kind not in ("authentication_error", "permission_error"))


async def test_an_error_in_a_stream_is_raised_by_openais_sdk() -> None:
    events = [*named_sse(iter(list(message_events(MESSAGE))[:5])), b"event: error\ndata: %b\n\n" % json.dumps(
        error("overloaded_error")).encode()]  # fmt: skip
    async with before_claude(streamed(*events)) as (gateway, _), openai_sdk(gateway) as client:
        with pytest.raises(openai.APIError, match="overloaded"):
            async for _ in await client.chat.completions.create(model="chat", messages=ASKED, stream=True):
                pass
        assert last(gateway).end is RequestOutcome.UPSTREAM_BROKE


@pytest.mark.parametrize(
    "fault",
    [
        whole(error("rate_limit_error"), "429 Too Many Requests", "retry-after: 30"),
        whole(error("overloaded_error"), "529 Overloaded"),
        whole(error("billing_error"), "402 Payment Required"),
        whole(error("overloaded_error")),
        streamed(b"event: error\ndata: %b\n\n" % json.dumps(error("overloaded_error")).encode()),
    ],
    ids=["rate limit", "overloaded", "no money", "an error by 200", "an error as the first event"],
)
@pytest.mark.parametrize("speaks", ["chat", "messages"])
async def test_a_tier_of_another_dialect_takes_over(fault: Script, speaks: str) -> None:
    """A route may mix dialects, whichever the caller speaks."""
    streams = fault[0].startswith(STREAM_HEAD)  # type: ignore[union-attr]
    tokens = [b'data: {"choices":[{"index":0,"delta":{"content":"two"}}]}\n\n',
              b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n']  # fmt: skip
    async with Upstream(fault) as first, Upstream(streamed(*tokens) if streams else whole(COMPLETION)) as second:
        pools = {"claude": claude(first), "second": pool(second.url)}
        async with running(pools) as gateway:
            assert await asked(gateway, speaks, streams) == "two"
            assert last(gateway).endpoint.pool == "second"


async def asked(gateway: Gateway, speaks: str, streams: bool) -> str | None:
    """The text of an answer, by the SDK of a dialect."""
    if speaks == "chat":
        async with openai_sdk(gateway) as client:
            if not streams:
                answer = await client.chat.completions.create(model="chat", messages=ASKED)
                return answer.choices[0].message.content
            parts = await client.chat.completions.create(model="chat", messages=ASKED, stream=True)
            return "".join([part.choices[0].delta.content or "" async for part in parts])
    async with anthropic_sdk(gateway) as sdk:
        if not streams:
            return text_of(await sdk.messages.create(model="chat", max_tokens=9, messages=ASKED))
        async with sdk.messages.stream(model="chat", max_tokens=9, messages=ASKED) as stream:
            return text_of(await stream.get_final_message())


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


async def test_a_member_without_equivalent_is_refused_or_dropped() -> None:
    """Refused by name before anything is sent, unless the route drops it."""
    async with before_claude(whole(MESSAGE)) as (gateway, upstream), openai_sdk(gateway) as client:
        with pytest.raises(openai.BadRequestError, match="'logit_bias'"):
            await client.chat.completions.create(model="chat", messages=ASKED, logit_bias={"5": 1})
        assert not upstream.requests
    async with before_claude(whole(MESSAGE), drop=["logit_bias"]) as (gateway, upstream), openai_sdk(gateway) as client:
        await client.chat.completions.create(model="chat", messages=ASKED, logit_bias={"5": 1})
        assert "logit_bias" not in sent(upstream)


async def test_what_a_translation_has_left_out_is_told() -> None:
    """Labels and members that the route drops: in a header, the Record and the metric."""
    spoken = [{**ASKED[0], "name": "eve"}, {**ASKED[0], "name": "bob"}]
    async with before_claude(whole(MESSAGE), drop=["seed"]) as (gateway, _), openai_sdk(gateway) as client:
        raw = await client.chat.completions.with_raw_response.create(
            model="chat", messages=spoken, seed=7, metadata={"team": "t"}
        )
        assert set(raw.headers["x-firsttoken-left-out"].split(", ")) == {"seed", "metadata", "messages.name"}
        assert set(RECORD.view(last(gateway))["left_out"]) == {"seed", "metadata", "messages.name"}
        gateway.core.metrics.flush()
        counted = {labels: each.value for labels, each in gateway.core.metrics.left_out.of.items()}
        assert counted == {("chat", "claude", name): 1 for name in ("seed", "metadata", "messages.name")}


async def test_nothing_is_told_where_nothing_is_left_out() -> None:
    async with before_claude(whole(MESSAGE)) as (gateway, _), openai_sdk(gateway) as client:
        raw = await client.chat.completions.with_raw_response.create(model="chat", messages=ASKED)
        assert "x-firsttoken-left-out" not in raw.headers


# --------------------------------------------------------------------------- Anthropic's SDK before Anthropic


async def test_a_native_answer_passes_untouched() -> None:
    """Body, version and betas as the caller has them; the key is the gateway's."""
    async with before_claude(whole(MESSAGE)) as (gateway, upstream), anthropic_sdk(gateway) as client:
        raw = await client.messages.with_raw_response.create(
            model="chat", max_tokens=9, messages=ASKED, extra_headers={"anthropic-beta": "files-api-2025-04-14"},
            extra_body={"context_management": {"edits": []}},
        )  # fmt: skip
        assert json.loads(raw.http_response.content) == MESSAGE
        assert raw.headers["request-id"] == last(gateway).request_id
        received = upstream.requests[-1]
        assert (received.headers["anthropic-version"], received.headers["anthropic-beta"]) == (
            "2026-10-21", "files-api-2025-04-14",
        )  # fmt: skip
        assert received.headers["x-api-key"] == "sk-ant-own"
        assert "caller" not in json.dumps(received.headers)
        assert sent(upstream)["context_management"] == {"edits": []}


async def test_a_native_stream_passes_untouched() -> None:
    events = named_sse(message_events(MESSAGE))
    async with before_claude(streamed(*events)) as (gateway, _), anthropic_sdk(gateway) as client:
        async with client.messages.stream(model="chat", max_tokens=9, messages=ASKED) as stream:
            message = await stream.get_final_message()
        assert message.to_dict()["content"] == MESSAGE["content"]
        assert (message.stop_reason, message.usage.cache_read_input_tokens) == ("tool_use", 5)
        assert (last(gateway).end, last(gateway).answer.prompt_tokens) == (RequestOutcome.COMPLETED, 10)


async def test_the_tokens_of_a_prompt_are_counted_by_anthropic() -> None:
    async with before_claude(whole({"input_tokens": 14})) as (gateway, upstream), anthropic_sdk(gateway) as client:
        count = await client.messages.count_tokens(model="chat", messages=ASKED)
        assert (count.input_tokens, upstream.requests[-1].target) == (14, "/v1/messages/count_tokens")
        assert "max_tokens" not in sent(upstream)


@pytest.mark.parametrize(
    ("status", "kind", "raised", "shown"),
    [
        ("400 Bad Request", "invalid_request_error", anthropic.BadRequestError, "invalid_request_error"),
        ("429 Too Many Requests", "rate_limit_error", anthropic.RateLimitError, "rate_limit_error"),
        ("529 Overloaded", "overloaded_error", anthropic.OverloadedError, "overloaded_error"),
        ("500 Internal Server Error", "api_error", anthropic.InternalServerError, "api_error"),
    ],
)
async def test_errors_are_in_anthropics_shape(status: str, kind: str, raised: Any, shown: str) -> None:
    async with before_claude(whole(error(kind), status)) as (gateway, _), anthropic_sdk(gateway) as client:
        with pytest.raises(raised) as caught:
            await client.messages.create(model="chat", max_tokens=9, messages=ASKED)
        assert isinstance(caught.value.body, dict)
        assert caught.value.body["error"]["type"] == shown


# --------------------------------------------------------------------------- Anthropic's SDK before chat backends


async def test_anthropics_sdk_is_served_by_an_engine_over_chat() -> None:
    """A simulated engine without `/v1/messages`, streamed and whole; the engine's usage is the message's."""
    async with (
        engines() as [engine],
        running({"only": engine_pool(engine)}, {"chat": {"tiers": ["only"]}}) as gateway,
        anthropic_sdk(gateway) as client,
    ):
        message = await client.messages.create(model="chat", max_tokens=12, system="Be short.", messages=ASKED)
        assert (message.type, message.role, message.stop_reason) == ("message", "assistant", "max_tokens")
        assert (message.usage.output_tokens, message.usage.input_tokens > 0) == (12, True)
        async with client.messages.stream(model="chat", max_tokens=12, messages=ASKED) as stream:
            kinds = [event.type async for event in stream]
            message = await stream.get_final_message()
        assert [kinds[0], kinds[-1]] == ["message_start", "message_stop"]
        assert kinds.count("content_block_start") == 1
        assert (message.usage.output_tokens, bool(text_of(message))) == (12, True)
        assert last(gateway).end is RequestOutcome.COMPLETED


def chat_chunk(delta: Json, finish: str | None = None) -> bytes:
    choices = [{"index": 0, "delta": delta, "finish_reason": finish}]
    body = {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": "served", "choices": choices}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def tool_call(index: int, **function: str) -> Sequence[Json]:
    more = {"id": f"call_{index}", "type": "function"} if "name" in function else {}
    return [{"index": index, **more, "function": function}]


async def test_anthropics_sdk_streams_thinking_and_calls_from_a_chat() -> None:
    usage = b'data: {"id":"c1","choices":[],"usage":{"prompt_tokens":9,"completion_tokens":7,"total_tokens":16}}\n\n'
    parts = [
        chat_chunk({"role": "assistant", "content": ""}),
        chat_chunk({"reasoning_content": "Hm"}),
        chat_chunk({"content": "Two calls."}),
        chat_chunk({"tool_calls": tool_call(0, name="weather", arguments="")}),
        chat_chunk({"tool_calls": tool_call(0, arguments='{"city":"Ulm"}')}),
        chat_chunk({"tool_calls": tool_call(1, name="weather", arguments='{"city":"Bern"}')}),
        chat_chunk({}, "tool_calls") + usage + b"data: [DONE]\n\n",
    ]
    async with Upstream(streamed(*parts)) as upstream, running({"only": pool(upstream.url)}) as gateway:
        tools: Any = [{"name": "weather", "input_schema": SCHEMA}]
        async with (
            anthropic_sdk(gateway) as client,
            client.messages.stream(model="chat", max_tokens=9, messages=ASKED, tools=tools) as stream,
        ):
            message = await stream.get_final_message()
        assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
        assert [block.input for block in message.content if block.type == "tool_use"] == [
            {"city": "Ulm"}, {"city": "Bern"},
        ]  # fmt: skip
        assert (message.stop_reason, message.usage.input_tokens, message.usage.output_tokens) == ("tool_use", 9, 7)
        assert sent(upstream)["tools"] == TOOLS
        assert upstream.requests[-1].target == "/v1/chat/completions"


async def test_a_broken_chat_ends_in_anthropics_error_event() -> None:
    broken = [
        STREAM_HEAD + chunk(chat_chunk({"content": "two"})) + chunk(b'data: {"error":{"code":500}}\n\n') + LAST_CHUNK
    ]
    async with Upstream(broken) as upstream, running({"only": pool(upstream.url)}) as gateway:
        async with anthropic_sdk(gateway) as client:
            with pytest.raises(anthropic.APIStatusError) as caught:
                async with client.messages.stream(model="chat", max_tokens=9, messages=ASKED) as stream:
                    await stream.get_final_message()
        assert caught.value.body == {"type": "error", "error": {"type": "api_error", "message": "The backend failed."}}
        assert last(gateway).end is RequestOutcome.UPSTREAM_BROKE


async def test_a_tool_of_the_provider_is_refused_by_name() -> None:
    async with Upstream(whole(COMPLETION)) as upstream, running({"only": pool(upstream.url)}) as gateway:
        async with anthropic_sdk(gateway) as client:
            tools: Any = [{"type": "web_search_20250305", "name": "web_search"}]
            with pytest.raises(anthropic.BadRequestError, match="web_search_20250305"):
                await client.messages.create(model="chat", max_tokens=9, messages=ASKED, tools=tools)
        assert not upstream.requests


# --------------------------------------------------------------------------- what other callers have cached


@pytest.mark.parametrize("dialect", ["messages", "chat"])
@pytest.mark.parametrize("streams", [True, False], ids=["streamed", "whole"])
async def test_a_message_tells_no_caller_what_another_has_cached(dialect: str, streams: bool) -> None:
    """Two groups of keys meet in one cache: the input is the whole prompt, wherever the count comes from."""
    answers = {
        ("messages", False): whole(MESSAGE),
        ("messages", True): streamed(*named_sse(message_events(MESSAGE))),
        ("chat", False): whole({**COMPLETION, "usage": CACHED}),
        ("chat", True): streamed(chat_chunk({"content": "two"}), chat_chunk({}, "stop") + USAGE + b"data: [DONE]\n\n"),
    }
    keys = [
        {"name": name, "sha256": hashlib.sha256(name.encode()).hexdigest(), "cache_group": name} for name in ("a", "b")
    ]
    async with Upstream(answers[dialect, streams]) as upstream:
        only = claude(upstream) if dialect == "messages" else pool(upstream.url)
        async with running({"only": only}, keys=keys) as gateway, anthropic_sdk(gateway, "a") as client:
            if streams:
                async with client.messages.stream(model="chat", max_tokens=9, messages=ASKED) as stream:
                    usage = (await stream.get_final_message()).usage
            else:
                usage = (await client.messages.create(model="chat", max_tokens=9, messages=ASKED)).usage
            assert (usage.input_tokens, usage.cache_read_input_tokens) == (10, 0)
            assert last(gateway).answer.cached_tokens == 5


CACHED = {
    "prompt_tokens": 10,
    "completion_tokens": 7,
    "total_tokens": 17,
    "prompt_tokens_details": {"cached_tokens": 5},
}
USAGE = b"data: %b\n\n" % json.dumps({"id": "c1", "choices": [], "usage": CACHED}).encode()


async def test_stable_prefixes_are_marked_for_anthropics_cache_and_written_tokens_have_their_price() -> None:
    """What an OpenAI caller cannot say: the end of the system prompt is a breakpoint."""
    usage = {"input_tokens": 10, "cache_read_input_tokens": 0, "cache_creation_input_tokens": 1_000_000}
    answer = {**MESSAGE, "usage": {**usage, "output_tokens": 0}}
    async with Upstream(whole(answer)) as upstream:
        price = {"input": 3.0, "cached_input": 0.3, "cache_write": 3.75, "output": 15.0}
        async with running({"claude": claude(upstream, prompt_caching="on", price=price)}) as gateway:
            async with openai_sdk(gateway) as client:
                messages: list[Any] = [{"role": "system", "content": "long"}, *ASKED]
                await client.chat.completions.create(model="chat", messages=messages)
            assert last(gateway).cost_usd == pytest.approx(3.75 + 10 * 3e-6)
        marked = [{"type": "text", "text": "long", "cache_control": {"type": "ephemeral"}}]
        assert sent(upstream)["system"] == marked
