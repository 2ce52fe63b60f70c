"""Over real sockets, as the OpenAI SDK and as plain HTTP."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import openai
import pytest
from openai import AsyncOpenAI

from backends.server_profiles import PROFILES
from lab.servers.simulated_server import SimulatedServer
from tests.support.engine_builders import encode
from tests.support.engine_callers import HELLO, chat, events, eventually, post, serving

pytestmark = pytest.mark.virtual_time

LONG: list[Any] = [{"role": "user", "content": " ".join(f"word{i}" for i in range(2000))}]
TOOL: Any = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


@asynccontextmanager
async def sdk(server: SimulatedServer) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=server.url + "/v1", api_key="any", max_retries=0) as client:
        yield client


# ------------------------------------------------------------------- answers


async def test_the_sdk_gets_a_whole_answer_with_usage():
    """Eight words for max_tokens=8, cut by length."""
    async with serving() as server, sdk(server) as client:
        reply = await client.chat.completions.create(model="m", messages=HELLO, max_tokens=8)
    assert reply.usage is not None
    assert reply.usage.prompt_tokens_details is not None
    assert (len((reply.choices[0].message.content or "").split()), reply.choices[0].finish_reason) == (8, "length")
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.total_tokens) == (8, 8, 16)
    assert reply.usage.prompt_tokens_details.cached_tokens == 0


async def test_an_event_may_carry_several_tokens():
    """The first token alone, then four at a time, then the rest; the text is the same. Usage without times."""
    body = chat(stream=True, max_tokens=8, stream_options={"include_usage": True})
    server = SimulatedServer(PROFILES["8b-h100"], model="m", encode=encode, tokens_per_event=4, tells_times=False)
    await server.start()
    async with sdk(server) as client:
        _, _, raw = await post(server, "/v1/chat/completions", body)
        whole = await client.chat.completions.create(model="m", messages=HELLO, max_tokens=8)
    await server.stop()
    *chunks, usage = map(msgspec.json.decode, events(raw)[:-1])
    texts = [chunk["choices"][0]["delta"]["content"] for chunk in chunks]
    assert [len(text.split()) for text in texts] == [0, 1, 4, 3]
    assert ("".join(texts), chunks[-1]["choices"][0]["finish_reason"]) == (whole.choices[0].message.content, "length")
    assert (usage["usage"]["completion_tokens"], "metrics" in usage) == (8, False)


async def test_a_bursty_api_tells_its_limit_in_refusals_alone():
    """The seventh request at once: 429, and when to come back, in seconds and in milliseconds."""
    async with serving("api-burst", speed=1.0) as server:
        asked = ("/v1/chat/completions", chat(max_tokens=1))
        replies = await asyncio.gather(*(post(server, *asked, authorization="Bearer x") for _ in range(7)))
    assert sorted(status for status, _, _ in replies) == [200] * 6 + [429]
    assert not any("ratelimit" in name.lower() for _, headers, _ in replies for name in headers)
    [refused] = [headers for status, headers, _ in replies if status == 429]
    assert refused["Retry-After"] == "1"
    assert 0 < int(refused["retry-after-ms"]) <= 250


async def test_the_sdk_gets_a_stream_of_one_token_per_chunk():
    """A role chunk, eight tokens, and a usage chunk without choices."""
    options: Any = {"include_usage": True}
    async with serving() as server, sdk(server) as client:
        stream = await client.chat.completions.create(
            model="m", messages=HELLO, max_tokens=8, stream=True, stream_options=options
        )
        chunks = [chunk async for chunk in stream]
        whole = await client.chat.completions.create(model="m", messages=HELLO, max_tokens=8)
    deltas = [chunk.choices[0].delta.content for chunk in chunks[:-1]]
    assert (chunks[0].choices[0].delta.role, deltas[0], len(deltas)) == ("assistant", "", 9)
    assert ("".join(d or "" for d in deltas), chunks[-2].choices[0].finish_reason) == (
        whole.choices[0].message.content,
        "length",
    )
    assert (chunks[-1].choices, chunks[-1].usage and chunks[-1].usage.completion_tokens) == ([], 8)


async def test_usage_and_metrics_come_only_when_asked_for():
    """Without include_usage a stream has nothing but its chunks and [DONE]."""
    async with serving() as server:
        _, _, raw = await post(server, "/v1/chat/completions", chat(stream=True))
        _, _, asked = await post(
            server, "/v1/chat/completions", chat(stream=True, stream_options={"include_usage": True})
        )
    last = msgspec.json.decode(events(asked)[-2])
    assert (len(events(raw)), len(events(asked)), events(raw)[-1]) == (10, 11, b"[DONE]")
    assert set(last["metrics"]) == {
        "time_to_first_token_ms",
        "queue_time_ms",
        "generation_time_ms",
        "mean_itl_ms",
        "tokens_per_second",
    }


async def test_the_second_turn_hits_the_first_with_its_answer():
    """cached_tokens covers prompt and answer of the first turn, in whole blocks."""
    async with serving() as server, sdk(server) as client:
        first = await client.chat.completions.create(model="m", messages=LONG, max_tokens=100)
        talk = [*LONG, {"role": "assistant", "content": first.choices[0].message.content}, *HELLO]
        second = await client.chat.completions.create(model="m", messages=talk, max_tokens=1)
        salted = await client.chat.completions.create(
            model="m", messages=talk, max_tokens=1, extra_body={"cache_salt": "tenant"}
        )
    assert first.usage is not None
    computed = first.usage.total_tokens - 1  # the last token was never fed back
    details = [reply.usage.prompt_tokens_details for reply in (second, salted) if reply.usage is not None]
    assert [d.cached_tokens for d in details if d is not None] == [computed // 16 * 16, 0]


async def test_a_required_tool_is_called_with_valid_arguments():
    """Streamed and whole, in the SDK's own types."""
    asked: dict[str, Any] = {"model": "m", "messages": HELLO, "tools": [TOOL], "tool_choice": "required"}
    async with serving() as server, sdk(server) as client:
        whole = await client.chat.completions.create(**asked)
        chunks = [chunk async for chunk in await client.chat.completions.create(**asked, stream=True)]
    deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    streamed = "".join(call.function.arguments for call in deltas)
    [call] = whole.choices[0].message.tool_calls
    assert (call.function.name, deltas[0].function.name) == ("weather", "weather")
    assert msgspec.json.decode(call.function.arguments) == msgspec.json.decode(streamed) == {"city": "water"}
    assert (whole.choices[0].finish_reason, chunks[-1].choices[0].finish_reason) == ("tool_calls", "tool_calls")


async def test_plain_completions_take_text_or_tokens():
    """Streamed or not, with ignore_eos for an exact length."""
    async with serving() as server, sdk(server) as client:
        text = await client.completions.create(model="m", prompt="once upon a time", max_tokens=5)
        tokens = await client.completions.create(
            model="m", prompt=[1, 2, 3], max_tokens=300, extra_body={"ignore_eos": True}
        )
        chunks = [c async for c in await client.completions.create(model="m", prompt="once", max_tokens=5, stream=True)]
    assert (len(text.choices[0].text.split()), len(tokens.choices[0].text.split()), len(chunks)) == (5, 300, 5)


async def test_a_peer_continues_an_answer_that_was_cut_off():
    """continue_final_message: the beginning from one engine and the rest from another make the whole."""
    async with serving() as one, serving() as two:
        _, _, whole = await post(one, "/v1/chat/completions", chat(max_tokens=20, ignore_eos=True))
        text = msgspec.json.decode(whole)["choices"][0]["message"]["content"]
        begun = " ".join(text.split()[:7])
        talk = [*HELLO, {"role": "assistant", "content": begun}]
        asked = chat(messages=talk, max_tokens=13, continue_final_message=True, ignore_eos=True)
        _, _, rest = await post(two, "/v1/chat/completions", asked)
    assert begun + msgspec.json.decode(rest)["choices"][0]["message"]["content"] == text


async def test_the_reply_carries_the_callers_request_id():
    """As vLLM: chatcmpl-<X-Request-Id>; and the request is kept for tests to look at."""
    async with serving() as server:
        _, _, raw = await post(server, "/v1/chat/completions", chat(), **{"X-Request-Id": "r-1"})
    assert msgspec.json.decode(raw)["id"] == "chatcmpl-r-1"
    assert (server.requests[0].headers["x-request-id"], server.requests[0].body["max_tokens"]) == ("r-1", 8)


# ------------------------------------------------------------------- the other paths


async def test_pages_of_an_engine_have_vllms_names():
    """Models, health, version, tokens and metrics under vLLM's names."""
    async with serving() as server, aiohttp.ClientSession(server.url) as session:
        await post(server, "/v1/chat/completions", chat())
        models = await (await session.get("/v1/models")).json()
        health = (await session.get("/health")).status
        version = await (await session.get("/version")).json()
        tokens = await (await session.post("/tokenize", json={"messages": HELLO})).json()
        page = await (await session.get("/metrics")).text()
    assert (models["data"][0]["id"], models["data"][0]["max_model_len"], health) == ("m", 131_072, 200)
    assert (tokens["count"], len(tokens["tokens"]), tokens["max_model_len"]) == (8, 8, 131_072)
    assert version["version"].startswith("0.32")
    for line in (
        'vllm:num_requests_running{engine="0",model_name="m"} 0.0',
        'vllm:num_requests_waiting{engine="0",model_name="m"} 0.0',
        'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.0',
        'vllm:prefix_cache_queries_total{engine="0",model_name="m"} 8.0',
        'vllm:prefix_cache_hits_total{engine="0",model_name="m"} 0.0',
        'vllm:cache_config_info{block_size="16",enable_prefix_caching="True",engine="0",num_gpu_blocks="28312"} 1.0',
        'vllm:time_to_first_token_seconds_count{engine="0",model_name="m"} 1.0',
    ):
        assert line in page.splitlines()


async def test_a_restart_changes_the_process_start_time():
    """A scrape can detect an empty cache."""

    async def started(server: SimulatedServer) -> str:
        async with aiohttp.ClientSession(server.url) as session:
            page = await (await session.get("/metrics")).text()
        return next(line for line in page.splitlines() if line.startswith("process_start_time_seconds"))

    async with serving() as server:
        before, url = await started(server), server.url
        await server.kill()
        await server.start()
        assert (await started(server) != before, server.url) == (True, url)


async def test_a_port_that_is_taken_is_an_error_that_leaves_nothing_behind():
    """No engine task runs on."""
    async with serving() as server:
        other = SimulatedServer(server.profile, model="m", encode=encode, port=server.port)
        tasks = len(asyncio.all_tasks())
        with pytest.raises(OSError, match="address already in use"):
            await other.start()
        assert len(asyncio.all_tasks()) == tasks


# ------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("body", "status", "kind", "message"),
    [
        (chat(model="other"), 404, "NotFoundError", "The model `other` does not exist."),
        (chat(messages=[]), 400, "BadRequestError", "length >= 1"),
        (chat(max_tokens=0), 400, "BadRequestError", "max_tokens"),
        (chat(n=2), 400, "BadRequestError", "n must be 1"),
        (chat(messages="hello"), 400, "BadRequestError", "messages"),
        (
            chat(messages=LONG, max_tokens=140_000),
            400,
            "BadRequestError",
            "This model's maximum context length is 131072 tokens. However, you requested 140000 output tokens and "
            "your prompt contains 2007 input tokens, for a total of 142007 tokens.",
        ),
    ],
)
async def test_errors_look_like_vllms(body: dict[str, Any], status: int, kind: str, message: str):
    """A CamelCase type and an int code."""
    async with serving() as server:
        got, _, raw = await post(server, "/v1/chat/completions", body)
    error = msgspec.json.decode(raw)["error"]
    assert (got, error["type"], error["code"], message in error["message"]) == (status, kind, status, True)


async def test_a_full_queue_answers_503():
    """In vLLM's envelope, without Retry-After."""
    async with serving(speed=1.0, max_queued_requests=0) as server:
        status, headers, raw = await post(server, "/v1/chat/completions", chat(stream=True))
    error = msgspec.json.decode(raw)["error"]
    assert (status, error["type"], error["code"], "Retry-After" in headers) == (503, "Service Unavailable", 503, False)


# ------------------------------------------------------------------- callers which disconnect


@pytest.mark.parametrize("stream", [True, False])
async def test_a_caller_that_leaves_frees_the_engine_at_once(stream: bool):
    """In the middle of an answer, streamed or not."""
    async with serving(speed=1.0) as server:
        body = chat(stream=stream, max_tokens=5000, ignore_eos=True)
        asking = asyncio.create_task(post(server, "/v1/chat/completions", body))
        await eventually(server, running=1)
        asking.cancel()
        await eventually(server, running=0, unfinished=0)
        assert (server.aborts, server.engine.kv_usage) == (1, 0.0)


async def test_a_caller_that_leaves_before_its_turn_frees_its_place():
    """A caller waits behind a long prefill."""
    async with serving(speed=0.5) as server:
        first = asyncio.create_task(post(server, "/v1/chat/completions", chat(messages=LONG)))
        await eventually(server, running=1)
        second = asyncio.create_task(post(server, "/v1/chat/completions", chat()))
        await eventually(server, unfinished=2)
        second.cancel()
        await eventually(server, unfinished=1)
        assert (await first)[0] == 200


async def test_a_hundred_streams_at_once_are_all_whole():
    """Every stream has all its tokens and its end."""
    async with serving() as server:
        body = chat(stream=True, max_tokens=50, ignore_eos=True)
        replies = await asyncio.gather(*(post(server, "/v1/chat/completions", body) for _ in range(100)))
    assert {(status, len(events(raw)), events(raw)[-1]) for status, _, raw in replies} == {(200, 52, b"[DONE]")}


# ------------------------------------------------------------------- an external API


async def test_an_api_wants_a_key_and_speaks_openai():
    """401 without a key; finish_reason on a chunk of its own, no metrics, and rate limit headers."""
    asked = chat(stream=True, stream_options={"include_usage": True})
    async with serving("api") as server:
        refused, _, error = await post(server, "/v1/chat/completions", asked)
        _, headers, raw = await post(server, "/v1/chat/completions", asked, Authorization="Bearer k")
        async with aiohttp.ClientSession(server.url) as session:
            hidden = [(await session.get(path)).status for path in ("/metrics", "/health", "/version")]
    chunks = [msgspec.json.decode(event) for event in events(raw)[:-1]]
    assert (refused, msgspec.json.decode(error)["error"]["code"], hidden) == (401, "invalid_api_key", [404, 404, 404])
    assert (chunks[-2]["choices"][0]["delta"], chunks[-2]["choices"][0]["finish_reason"]) == ({}, "length")
    assert (chunks[0]["usage"], chunks[-1]["usage"]["completion_tokens"], "metrics" in chunks[-1]) == (None, 8, False)
    assert chunks[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert (headers["x-ratelimit-limit-requests"], headers["x-ratelimit-remaining-requests"]) == ("600", "599")


async def test_an_api_answers_429_beyond_its_rate_limit():
    """The SDK sees a RateLimitError with the time to wait."""
    async with serving("api", requests_per_minute=1) as server, sdk(server) as client:
        await client.chat.completions.create(model="m", messages=HELLO, max_tokens=1)
        with pytest.raises(openai.RateLimitError) as limited:
            await client.chat.completions.create(model="m", messages=HELLO, max_tokens=1)
    assert (limited.value.code, limited.value.response.headers["x-ratelimit-remaining-requests"]) == (
        "rate_limit_exceeded",
        "0",
    )
    assert 0 < float(limited.value.response.headers["retry-after"]) <= 60


async def test_an_api_refuses_a_prompt_beyond_its_context_in_openais_words():
    """context_length_exceeded, which a gateway must not retry."""
    async with serving("api", max_model_len=1000) as server, sdk(server) as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model="m", messages=LONG)
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "messages")


async def test_an_api_forgets_a_caller_that_leaves():
    """The timers are cancelled, and the abort is counted."""
    async with serving("api", speed=1.0) as server:
        body = chat(stream=True, max_tokens=5000)
        asking = asyncio.create_task(post(server, "/v1/chat/completions", body, Authorization="Bearer k"))
        await eventually(server, running=1)
        asking.cancel()
        await eventually(server, running=0)
        assert server.aborts == 1
