"""Figures that an engine reports and that cannot be: the requests after them are served as before."""

from __future__ import annotations

import openai
import pytest

from tests.support.gateways import pool, running
from tests.support.upstream import LAST_CHUNK, STREAM_HEAD, Upstream, chunk

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
