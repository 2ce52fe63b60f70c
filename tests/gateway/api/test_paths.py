"""Paths with a model, Azure OpenAI's paths, and the refusal of WebSockets."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import aiohttp
import openai
import pytest

from gateway.api.paths import MODEL, canonical
from tests.support.builders import CHAT, STREAMED, WHOLE, calling, conversing, get, post
from tests.support.gateways import pool, running
from tests.support.upstream import Upstream, reply

AZURE = "/openai/deployments/chat/chat/completions?api-version=2024-10-21"
NO_WEBSOCKETS = {"listen": "127.0.0.1:0", "admin": "127.0.0.1:0", "websockets": False}
UPGRADE = "connection: Upgrade\r\nupgrade: WebSocket\r\nsec-websocket-version: 13\r\nsec-websocket-key: eA=="


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("/v1/models/chat", (MODEL, "chat")),
        ("/v1/models/meta-llama/Llama-3.3", (MODEL, "meta-llama/Llama-3.3")),
        ("/v1/models/meta-llama%2FLlama-3.3", (MODEL, "meta-llama/Llama-3.3")),
        ("/openai/models/chat", (MODEL, "chat")),
        ("/openai/v1/models/a/b", (MODEL, "a/b")),
        ("/openai/models", ("/v1/models", "")),
        ("/openai/responses", ("/v1/responses", "")),
        ("/openai/v1/chat/completions", ("/v1/chat/completions", "")),
        ("/openai/deployments/chat/chat/completions", ("/v1/chat/completions", "chat")),
        ("/openai/deployments/chat/completions", ("/v1/completions", "chat")),
        ("/openai/deployments/a/b/chat/completions", ("/v1/chat/completions", "a/b")),
        ("/openai/deployments/a%2Fb/embeddings", ("/v1/embeddings", "a/b")),
        ("/chat/completions", ("/v1/chat/completions", "")),
        ("/messages", ("/v1/messages", "")),
        ("/responses", ("/v1/responses", "")),
        ("/responses/r1", ("/v1/responses/{id}", "r1")),
        ("/responses/compact", ("/v1/responses/compact", "")),
        ("/openai/v1/responses/input_tokens", ("/v1/responses/input_tokens", "")),
        ("/embeddings", ("/v1/embeddings", "")),
        ("/models", ("/v1/models", "")),
        ("/models/a/b", (MODEL, "a/b")),
        ("/tokenize", ("/tokenize", "")),
        ("/v1/v1/messages", ("/v1/messages", "")),
    ],
)
def test_a_path_of_another_api_is_a_path_of_ours(path: str, found: tuple[str, str]) -> None:
    assert canonical(path) == found


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/v1/models/",
        "/v1/model/chat",
        "/models/",
        "/chat",
        "/chat/completions/",
        "/v1/v1",
        "/openai",
        "/openai/v1",
        "/openai/chat/completions",
        "/openai/deployments/chat/completions/",
        "/openai/deployments//chat/completions",
        "/openai/deployments/chat",
        "/openai/deployments/chat/images/generations",
        "/OpenAI/deployments/chat/chat/completions",
        "/v1/openai/deployments/chat/chat/completions",
    ],
)
async def test_any_other_path_is_unknown(path: str) -> None:
    """As it was before: 404, in the same shape, whatever follows."""
    assert canonical(path)[1] == ""
    async with running({"only": pool("http://127.0.0.1:9")}) as gateway:
        status, _, body = await get(gateway.url, path)
    assert (status, json.loads(body)["error"]["code"]) == (404, "unknown_url")


async def test_the_path_of_a_quote_says_where_its_figures_are_now() -> None:
    async with running({"only": pool("http://127.0.0.1:9")}) as gateway, calling(gateway.url) as caller:
        status, _, body = await caller.whole(post(CHAT, path="/quote/v1/chat/completions"))
    error = json.loads(body)["error"]
    assert (status, error["code"]) == (404, "unknown_url")
    assert "POST /explain on the admin port" in error["message"]


def test_a_long_path_is_matched_in_linear_time() -> None:
    """A hundred times the longest request line: in time that grows with the square, a match would not end in the time
    of a test."""
    hostile = "/openai/deployments/" + "/chat/completions" * 95_000 + "x"
    assert canonical(hostile) == (hostile, "")


async def test_openais_client_works_with_a_base_url_without_v1() -> None:
    """It appends /chat/completions and /models to the base URL as given."""
    async with (
        Upstream([STREAMED]) as upstream,
        running({"only": pool(upstream.url)}) as gateway,
        openai.AsyncOpenAI(base_url=gateway.url, api_key="none", max_retries=0) as client,
    ):
        asked: Any = {"model": "chat", "messages": CHAT["messages"]}
        stream = await client.chat.completions.create(**asked, stream=True)
        streamed = "".join([event.choices[0].delta.content or "" async for event in stream if event.choices])
        models = [model.id async for model in client.models.list()]
    assert (streamed, models) == ("hi", ["chat"])


# --------------------------------------------------------------------------- Azure


@pytest.mark.parametrize("deployment", [None, "chat"])
async def test_azures_client_works_with_an_endpoint_and_a_key_alone(deployment: str | None) -> None:
    """Chat, streamed and not, and models; the deployment given once, or by each call's model."""
    keys = [{"name": "web", "sha256": hashlib.sha256(b"sk-web").hexdigest()}]
    given = {} if deployment is None else {"azure_deployment": deployment}
    model = "chat" if deployment is None else "gpt-4.1"
    asked: Any = {"model": model, "messages": CHAT["messages"]}
    whole = reply(WHOLE, "200 OK", "content-type: application/json")
    async with (
        Upstream([whole], [STREAMED]) as upstream,
        running({"only": pool(upstream.url)}, keys=keys) as gateway,
        openai.AsyncAzureOpenAI(
            azure_endpoint=gateway.url, api_key="sk-web", api_version="2024-10-21", max_retries=0, **given
        ) as client,
    ):
        answer = await client.chat.completions.create(**asked)
        stream = await client.chat.completions.create(**asked, stream=True)
        streamed = "".join([event.choices[0].delta.content or "" async for event in stream if event.choices])
        models = [model.id async for model in client.models.list()]
        one = await client.models.retrieve("chat")
    assert (answer.choices[0].message.content, streamed, models, one.id) == ("hi", "hi", ["chat"], "chat")
    assert [json.loads(request.body)["model"] for request in upstream.requests] == ["served", "served"]
    assert all("api-key" not in request.headers for request in upstream.requests)


@pytest.mark.parametrize("body", [{"messages": CHAT["messages"]}, {**CHAT, "model": "other"}], ids=["none", "another"])
async def test_the_deployment_is_the_model_whatever_the_body_says(body: dict[str, object]) -> None:
    """As with Azure, where REST callers name no model."""
    async with conversing([reply(WHOLE)]) as (_, caller, _):
        status, headers, _ = await caller.whole(post(body, path=AZURE))
        large = {**body, "messages": [{"role": "user", "content": "x" * 200_000}]}
        assert (await caller.whole(post(large, path=AZURE)))[0] == 200
    assert (status, headers["x-firsttoken-route"]) == (200, "chat")


async def test_a_deployment_may_serve_embeddings() -> None:
    """REST callers name no model in the body; the pool's servers get theirs."""
    answer = b'{"object":"list","data":[{"object":"embedding","index":0,"embedding":[0.5]}],"model":"served"}'
    async with conversing([reply(answer, "200 OK", "content-type: application/json")]) as (_, caller, upstream):
        path = "/openai/deployments/chat/embeddings?api-version=2024-10-21"
        status, _, body = await caller.whole(post({"input": "hello"}, path=path))
    assert (status, json.loads(body)["data"][0]["embedding"]) == (200, [0.5])
    assert upstream.requests[0].target == "/v1/embeddings"
    assert json.loads(upstream.requests[0].body) == {"input": "hello", "model": "served"}


@pytest.mark.parametrize("raw", [b"", b"[]", b"{", b'{"model":"a","model":"b","messages":[]}', b'{"messages":[]}'])
async def test_a_broken_body_for_a_deployment_is_a_400(raw: bytes) -> None:
    async with conversing([reply(WHOLE)]) as (_, caller, upstream):
        status, _, body = await caller.whole(post(raw, path=AZURE))
    assert (status, json.loads(body)["error"]["type"], upstream.requests) == (400, "invalid_request_error", [])


async def test_an_unknown_deployment_is_an_unknown_model() -> None:
    async with conversing([reply(WHOLE)]) as (_, caller, upstream):
        status, _, body = await caller.whole(post(CHAT, path=AZURE.replace("/chat/", "/nope%0d%0a/", 1)))
    assert (status, json.loads(body)["error"]["code"], upstream.requests) == (404, "model_not_found", [])


# --------------------------------------------------------------------------- WebSocket


@pytest.mark.parametrize("path", ["/v1/responses", "/openai/v1/responses"])
async def test_a_websocket_for_responses_is_refused_at_once_where_switched_off(path: str) -> None:
    """Coding agents try it first, without a retry after a 426 alone. No key is needed to hear it."""
    keys = [{"name": "web", "sha256": hashlib.sha256(b"sk-web").hexdigest()}]
    async with running({"only": pool("http://127.0.0.1:9")}, keys=keys, server=NO_WEBSOCKETS) as gateway:
        async with aiohttp.ClientSession() as client:
            with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                await client.ws_connect(gateway.url + path)
        status, headers, body = await get(gateway.url, path, UPGRADE)
    assert refused.value.status == status == 426
    assert (headers["upgrade"], headers["connection"]) == ("HTTP/1.1", "close")
    assert "POST /v1/responses" in json.loads(body)["error"]["message"]


@pytest.mark.parametrize(
    "offer", [UPGRADE.replace("connection: Upgrade\r\n", ""), UPGRADE.replace("13", "12"), UPGRADE.replace("eA==", "x")]
)
async def test_an_offer_that_a_proxy_has_mangled_is_refused(offer: str) -> None:
    """A proxy that is not set up for WebSockets passes on a part of the headers alone."""
    async with running({"only": pool("http://127.0.0.1:9")}) as gateway:
        assert (await get(gateway.url, "/v1/responses", offer))[0] == 426


async def test_the_connection_of_a_refused_websocket_is_closed() -> None:
    """Frames sent ahead of the answer are no requests."""
    only = {"only": pool("http://127.0.0.1:9")}
    async with running(only, server=NO_WEBSOCKETS) as gateway, calling(gateway.url) as caller:
        raw = f"GET /v1/responses HTTP/1.1\r\nhost: localhost\r\n{UPGRADE}\r\n\r\n"
        assert (await caller.ask(raw.encode()))[0] == 426
        assert (await caller.rest()).endswith(b"}")


async def test_other_requests_ignore_the_offer_of_a_websocket() -> None:
    """A server may ignore an Upgrade (RFC 9110 section 7.8)."""
    async with running({"only": pool("http://127.0.0.1:9")}) as gateway:
        assert (await get(gateway.url, "/v1/models", UPGRADE))[0] == 200
        assert (await get(gateway.url, "/v1/chat/completions", UPGRADE))[0] == 405
