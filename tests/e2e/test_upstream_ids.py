"""Request ids at the backend are the gateway's own: callers may repeat an id, by accident or in bad faith."""

from __future__ import annotations

import asyncio
import json
import os

import pytest
from openai import AsyncOpenAI

from gateway.api.request_headers import new_request_id
from gateway.observe.record_columns import RECORD
from tests.support import gateways
from tests.support.upstream import LAST_CHUNK, STREAM_HEAD, Upstream, chunk

pytestmark = pytest.mark.virtual_time

TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":"hi"},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
ANSWER = STREAM_HEAD + chunk(TOKEN) + LAST_CHUNK


async def test_callers_with_one_id_do_not_collide_at_the_backend() -> None:
    """Fifty concurrent requests have fifty upstream ids. The answer and the Record have the caller's id, the Record
    the upstream id too."""
    async with Upstream([ANSWER]) as upstream, gateways.running({"only": gateways.pool(upstream.url)}) as gateway:
        client = AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", default_headers={"x-request-id": "mine"})

        async def ask() -> str:
            said = await client.chat.completions.with_raw_response.create(
                model="chat", messages=[{"role": "user", "content": "hello"}], stream=True
            )
            await said.http_response.aread()
            return said.headers["x-request-id"]

        returned = {*await asyncio.gather(*(ask() for _ in range(50)))}
        await client.close()
        sent = {request.headers["x-request-id"] for request in upstream.requests}
        assert (len(upstream.requests), len(sent), returned) == (50, 50, {"mine"})
        assert not any("mine" in id for id in sent)
        records = [RECORD.view(record) for record in gateway.recorder.recent]
        assert {record["request_id"] for record in records} == {"mine"}
        assert {attempt["upstream_id"] for record in records for attempt in record["attempts"]} == sent


@pytest.mark.parametrize(("kind", "field"), [("vllm", "request_id"), ("sglang", "rid")])
async def test_the_forwarded_body_contains_no_request_id(kind: str, field: str) -> None:
    """Engines read an id from the body too."""
    async with Upstream([ANSWER]) as upstream:
        pool = {"backend": kind, "model": "served", "endpoints": [upstream.url]}
        async with (
            gateways.running({"only": pool}, defaults={"scrape": "60s"}) as gateway,
            AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none") as client,
        ):
            asked = client.chat.completions.create(
                model="chat",
                messages=[{"role": "user", "content": "hello"}],
                stream=True,
                extra_body={field: "mine", "top_k": 3},
            )
            async for _ in await asked:
                pass
        (body,) = [json.loads(request.body) for request in upstream.requests if request.body]
        assert (field in body, body["top_k"]) == (False, 3)


def test_ids_of_forked_workers_differ() -> None:
    """Workers are forks of one process, and so is the counter."""
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        os.write(write, new_request_id().encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 100).decode()[:-8] != new_request_id()[:-8]
    os.close(read)
    os.close(write)
