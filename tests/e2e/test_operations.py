"""Operations beside chat, over real sockets: which pools are asked, what they receive, and what a caller reads."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.api import operation_fit
from gateway.observe.record import RequestOutcome
from tests.support.builders import CHAT, calling, conversing, get, last, post
from tests.support.gateways import pool, running
from tests.support.upstream import Upstream, reply

pytestmark = pytest.mark.virtual_time

EMBEDDED = b'{"object":"list","data":[{"object":"embedding","index":0,"embedding":[0.5]}],"usage":{"prompt_tokens":2}}'
ANSWER = b'{"choices":[{"message":{"content":"hi"},"finish_reason":"stop"}],"usage":{"prompt_tokens":3}}'
ABSENT = reply(b'{"detail":"Not Found"}', "404 Not Found")


def json_reply(body: bytes) -> bytes:
    return reply(body, "200 OK", "content-type: application/json")


async def test_embeddings_pass_through_untouched() -> None:
    """Only the model's name changes on the way to the server; the Record has the engine's count."""
    asked = {"model": "chat", "input": ["first", "second"], "dimensions": 8}
    async with conversing([json_reply(EMBEDDED)]) as (gateway, caller, upstream):
        status, _, body = await caller.whole(post(asked, path="/v1/embeddings"))
        assert (status, body) == (200, EMBEDDED)
        assert upstream.requests[0].target == "/v1/embeddings"
        assert json.loads(upstream.requests[0].body) == {**asked, "model": "served"}
        assert (last(gateway).end, last(gateway).answer.prompt_tokens) == (RequestOutcome.COMPLETED, 2)


@pytest.mark.parametrize(
    ("path", "body", "target"),
    [
        ("/v1/rerank", {"query": "q", "documents": ["a", {"text": "b"}]}, "/v1/rerank"),
        ("/rerank", {"query": "q", "documents": ["a"]}, "/v1/rerank"),
        ("/v1/score", {"text_1": "a", "text_2": ["b"]}, "/v1/score"),
        ("/tokenize", {"prompt": "text"}, "/tokenize"),
        ("/tokenize", {"messages": [{"role": "user", "content": "hi"}]}, "/tokenize"),
    ],
)
async def test_operations_of_engines_pass_through_to_vllm(path: str, body: dict[str, Any], target: str) -> None:
    async with Upstream([json_reply(b'{"count": 1}')]) as upstream:
        pools = {"only": pool(upstream.url, backend="vllm")}
        async with running(pools) as gateway, calling(gateway.url) as caller:
            status, _, _ = await caller.whole(post({"model": "chat", **body}, path=path))
            asked = [request for request in upstream.requests if request.method == "POST"]
            assert (status, [request.target for request in asked]) == (200, [target])


async def test_an_operation_that_no_pool_serves_is_refused_before_anything_is_sent() -> None:
    async with conversing([json_reply(b"{}")]) as (_, caller, upstream):
        status, _, body = await caller.whole(post({"model": "chat", "text_1": "a", "text_2": "b"}, path="/v1/score"))
        error = json.loads(body)["error"]
        assert (status, error["code"]) == (400, "no_suitable_tier")
        assert "/v1/score" in error["message"]
        assert not upstream.requests


async def test_a_pool_without_the_operation_is_not_asked() -> None:
    """The second tier's kind of server reranks; the first tier's does not."""
    async with Upstream([json_reply(ANSWER)]) as first, Upstream([json_reply(b'{"results": []}')]) as second:
        pools = {"first": pool(first.url), "second": pool(second.url, backend="vllm")}
        async with running(pools) as gateway, calling(gateway.url) as caller:
            asked = {"model": "chat", "query": "q", "documents": ["a"]}
            status, headers, _ = await caller.whole(post(asked, path="/v1/rerank"))
            assert (status, headers["x-firsttoken-pool"]) == (200, "second")
            assert not first.requests


async def test_a_server_that_lacks_an_operation_stays_in_use_for_others() -> None:
    """A 404 for embeddings is no sign of a wrong URL: the endpoint is as healthy as before, and not asked again."""
    async with conversing([ABSENT], [json_reply(ANSWER)]) as (_, caller, upstream):
        embed = post({"model": "chat", "input": "text"}, path="/v1/embeddings")
        status, _, body = await caller.whole(embed)
        assert (status, json.loads(body)["error"]["code"]) == (404, "unsupported_operation")
        status, _, _ = await caller.whole(embed)
        assert (status, len(upstream.requests)) == (400, 1)
        status, _, body = await caller.whole(post(CHAT))
        assert (status, body) == (200, ANSWER)


async def test_one_refusal_takes_no_operation_from_a_pool_that_has_served_it() -> None:
    """Whatever made the server refuse: the next caller is served."""
    async with conversing([json_reply(EMBEDDED)], [ABSENT], [json_reply(EMBEDDED)]) as (_, caller, _):
        embed = post({"model": "chat", "input": "text"}, path="/v1/embeddings")
        assert [(await caller.whole(embed))[0] for _ in range(3)] == [200, 404, 200]


async def test_a_pool_is_asked_again_after_a_while_for_an_operation_that_it_lacked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(operation_fit, "LACKING", 0.0)
    async with conversing([ABSENT], [json_reply(EMBEDDED)]) as (_, caller, _):
        embed = post({"model": "chat", "input": "text"}, path="/v1/embeddings")
        assert [(await caller.whole(embed))[0] for _ in range(2)] == [404, 200]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"model": "chat"}),
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/rerank", {"model": "chat", "query": "q"}),
        ("/v1/messages", {"model": "chat", "messages": []}),
        ("/v1/messages", {"model": "chat", "messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/messages", {"model": "chat", "max_tokens": 5, "messages": [{"role": "user", "content": [5]}]}),
        ("/v1/responses", {"model": "chat", "input": 5}),
        ("/v1/responses", {"model": "chat", "input": [5]}),
    ],
)
async def test_a_malformed_body_is_400_in_the_dialect_of_its_path(path: str, body: dict[str, Any]) -> None:
    async with conversing([json_reply(ANSWER)]) as (_, caller, upstream):
        status, _, raw = await caller.whole(post(body, path=path))
        error = json.loads(raw)
        assert (status, error["error"]["type"]) == (400, "invalid_request_error")
        assert (error.get("type") == "error") == (path == "/v1/messages")
        assert not upstream.requests


async def test_errors_of_messages_are_anthropics() -> None:
    """Envelope, `request_id` in body and header, and the type for the status."""
    async with conversing([json_reply(ANSWER)]) as (_, caller, _):
        status, headers, raw = await caller.whole(post({"model": "chat"}, path="/v1/messages"))
        error = json.loads(raw)
        assert (status, error["type"], error["error"]["type"]) == (400, "error", "invalid_request_error")
        assert error["request_id"] == headers["request-id"] == headers["x-request-id"]


async def test_a_caller_with_anthropics_version_header_reads_anthropics_errors_on_any_path() -> None:
    async with conversing([json_reply(ANSWER)]) as (gateway, _, _):
        status, _, raw = await get(gateway.url, "/v1/nothing", "anthropic-version: 2023-06-01")
        assert (status, json.loads(raw)["error"]["type"]) == (404, "not_found_error")
