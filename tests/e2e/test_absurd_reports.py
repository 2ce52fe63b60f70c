"""Figures that an engine reports and that cannot be: the requests after them are served as before."""

from __future__ import annotations

import json
from hashlib import sha256
from typing import Any

import openai
import pytest

from tests.support.builders import CHAT, calling, last, post
from tests.support.gateways import pool, running
from tests.support.upstream import LAST_CHUNK, STREAM_HEAD, Upstream, chunk, reply

pytestmark = pytest.mark.virtual_time

TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":"hi"},"finish_reason":null}]}\n\n'
FINISH = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
DONE = b"data: [DONE]\n\n"
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":%d,"total_tokens":9}}\n\n'


async def test_an_absurd_length_of_one_answer_refuses_no_later_request() -> None:
    """A caller without max_tokens: a guess of the answer's length is no reason to say that its prompt is too long."""
    absurd, usual = (chunk(TOKEN + FINISH + USAGE % tokens + DONE) + LAST_CHUNK for tokens in (10**12, 2))
    async with (
        Upstream([STREAM_HEAD, absurd], [STREAM_HEAD, usual]) as upstream,
        running({"only": pool(upstream.url, context_window=32_768)}) as gateway,
        openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client,
    ):
        for _ in range(3):
            stream = await client.chat.completions.create(
                model="chat",
                messages=[{"role": "user", "content": "hello"}],
                stream=True,
                stream_options={"include_usage": True},
            )
            async for _event in stream:
                pass
    assert len(upstream.requests) == 3


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize(("prompt", "completion"), [(10**12, 2), (9, 10**12), (10**12, 10**12)])
async def test_no_key_pays_for_tokens_that_cannot_be(
    prompt: int, completion: int, streamed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The gateway's own counts stand, and the log names the endpoint."""
    usage = {"prompt_tokens": prompt, "completion_tokens": completion}
    message = {"index": 0, "message": {"content": "hi"}, "finish_reason": "stop"}
    event = b'data: {"choices":[],"usage":%b}\n\n' % json.dumps(usage).encode()
    script = (
        [STREAM_HEAD, chunk(TOKEN + FINISH + event + DONE) + LAST_CHUNK]
        if streamed
        else [
            reply(
                json.dumps({"choices": [message], "usage": usage}).encode(), "200 OK", "content-type: application/json"
            )
        ]
    )
    keys = [{"name": "dev", "sha256": sha256(b"sk-dev").hexdigest(), "monthly_cost_usd": 10.0}]
    only = {"price": {"input": 100.0, "output": 400.0}}
    async with (
        Upstream(*[script] * 3) as upstream,
        running({"only": pool(upstream.url, **only)}, keys=keys) as gateway,
        calling(gateway.url) as caller,
    ):
        for _ in range(3):
            body = {**CHAT, "stream": streamed, "max_tokens": 20}
            status, headers = await caller.ask(post(body, "authorization: Bearer sk-dev"))
            assert status == 200
            await (caller.chunks() if streamed else caller.body(headers))
        record = last(gateway)
    assert record.cost_usd < 0.05
    assert record.attempts[-1].tokens < 100
    assert [line for line in caplog.messages if "cannot be" in line and "only/" in line]


@pytest.mark.parametrize(
    ("path", "body", "answer"),
    [
        ("/v1/embeddings", {"input": "hello"}, {"data": [{"embedding": [0.5]}]}),
        ("/v1/rerank", {"query": "hello", "documents": ["a"]}, {"results": [{"index": 0, "relevance_score": 0.5}]}),
        ("/v1/score", {"text_1": "hello", "text_2": "a"}, {"data": [{"index": 0, "score": 0.5}]}),
    ],
)
@pytest.mark.parametrize(
    "usage", [{"prompt_tokens": 1000, "total_tokens": 1000}, {"prompt_tokens": 1000, "completion_tokens": 7}]
)
async def test_what_generates_nothing_has_no_output(path: str, body: Any, answer: Any, usage: Any) -> None:
    """No cost, no token of a quota, none of the metrics."""
    given = reply(json.dumps({**answer, "usage": usage}).encode(), "200 OK", "content-type: application/json")
    keys = [{"name": "dev", "sha256": sha256(b"sk-dev").hexdigest(), "tokens_per_minute": 2000}]
    price = {"price": {"input": 1000.0, "output": 4000.0}}
    only = {**pool("", **price), "backend": "vllm", "api_key": ""}
    async with Upstream([reply(b"", "404 Not Found")], [given]) as upstream:
        upstream.script = lambda got: [given if got.method == "POST" else reply(b"", "404 Not Found")]  # type: ignore[method-assign]
        only["endpoints"] = [upstream.url]
        async with running({"only": only}, keys=keys) as gateway, calling(gateway.url) as caller:
            sent = post({"model": "chat", **body, "pad": "x" * 900}, "authorization: Bearer sk-dev", path=path)
            status, headers, _ = await caller.whole(sent)
            record = last(gateway)
            assert (status, record.answer.output_tokens, record.attempts[-1].tokens) == (200, 0, 1000)
            assert float(headers["x-firsttoken-cost-usd"]) == pytest.approx(1.0)
