"""Headers cross by allow-list, in both directions."""

from __future__ import annotations

import hashlib
import json

import aiohttp
import pytest

from gateway.app import Gateway
from tests.support.gateways import pool, running
from tests.support.upstream import LAST_CHUNK, STREAM_HEAD, Upstream, chunk

pytestmark = pytest.mark.virtual_time

SECRETS = {
    "authorization": "Bearer sk-caller",
    "cookie": "session=caller",
    "x-api-key": "sk-caller-2",
    "proxy-authorization": "Basic caller",
    "x-forwarded-for": "10.1.2.3",
    "x-stainless-arch": "x64",
    "openai-organization": "org-caller",
    "user-agent": "caller/1.0",
    "cache-control": "no-store",
    "x-cache-salt": "caller",
    "accept-encoding": "gzip, br",
}
TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":"hi"}}]}\n\n'
END = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
LEAKY = STREAM_HEAD.replace(
    b"content-type",
    b"server: uvicorn\r\nset-cookie: a=b\r\nx-ratelimit-remaining-requests: 3\r\nvia: 1.1 secret-host\r\n"
    b"openai-organization: org-backend\r\nx-request-id: backend-id\r\nlocation: http://10.0.0.1/\r\ncontent-type",
)


async def post(gateway: Gateway, headers: dict[str, str], **more: object) -> tuple[int, dict[str, str], bytes]:
    body = {"model": "chat", "stream": True, "messages": [{"role": "user", "content": "x"}], **more}
    async with (
        aiohttp.ClientSession(auto_decompress=False) as session,
        session.post(f"{gateway.url}/v1/chat/completions", json=body, headers=headers) as reply,
    ):
        return reply.status, {k.lower(): v for k, v in reply.headers.items()}, await reply.read()


async def test_a_callers_secrets_never_reach_a_backend() -> None:
    """The backend receives the gateway's key and the necessary headers, and no other header of the caller."""
    async with Upstream([STREAM_HEAD + chunk(TOKEN + END) + LAST_CHUNK]) as upstream:
        async with running({"only": pool(upstream.url)}) as gateway:
            await post(gateway, {**SECRETS, "traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01"})
        sent = upstream.requests[0].headers
    assert sent.pop("authorization") == "Bearer sk-backend"
    assert sent.pop("accept-encoding") == "identity"  # the tap reads passing bytes
    assert sent.pop("user-agent").startswith("firsttoken")
    assert set(sent) == {"host", "content-type", "content-length", "accept", "traceparent", "x-request-id"}
    assert "caller" not in json.dumps(sent)


async def test_a_backends_secrets_never_reach_a_caller() -> None:
    """The answer has the content type and the gateway's headers; no server name, cookie, limit or id of the backend."""
    leaky = Upstream([LEAKY + chunk(TOKEN + END) + LAST_CHUNK])
    async with leaky as upstream, running({"only": pool(upstream.url)}) as gateway:
        _, headers, body = await post(gateway, {"x-request-id": "mine-1"}, stream_options={"include_usage": True})
    assert body == TOKEN + END
    assert {name for name in headers if not name.startswith("x-firsttoken-")} == {
        "date",
        "content-type",
        "cache-control",
        "x-accel-buffering",
        "x-request-id",
        "server-timing",
        "transfer-encoding",
    }
    assert headers["x-request-id"] == "mine-1"


async def test_every_answer_has_the_x_firsttoken_and_server_timing_headers() -> None:
    """In streams too, since the head is written with the first token."""
    async with Upstream([STREAM_HEAD + chunk(TOKEN + END) + LAST_CHUNK]) as upstream:
        routes = {"chat": {"tiers": ["only"], "ttft": {"budget": "5s"}}}
        async with running({"only": pool(upstream.url)}, routes) as gateway:
            _, headers, _ = await post(gateway, {})
    assert headers["x-firsttoken-route"] == "chat"
    assert headers["x-firsttoken-pool"] == "only"
    assert headers["x-firsttoken-model"] == "served"
    assert headers["x-firsttoken-attempts"] == "1"
    assert headers["x-firsttoken-ttft-budget-ms"] == "5000"
    assert float(headers["x-firsttoken-ttft-predicted-ms"]) > 0
    timing = dict(part.split(";dur=") for part in headers["server-timing"].split(", "))
    assert {"read", "parse", "estimate", "admit", "decide", "connect", "send", "upstream", "relay"} <= set(timing)
    timing.pop("loop_lag", None)  # part of other stages, and present only from 5 ms on
    assert abs(sum(map(float, timing.values())) - float(headers["x-firsttoken-ttft-ms"])) < 1.0


async def test_usage_is_requested_upstream_and_removed_unless_the_caller_requested_it() -> None:
    """The gateway meters every stream; only a caller with include_usage receives the usage chunk."""
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":1}}\n\n'
    script = [
        STREAM_HEAD
        + chunk(TOKEN)
        + chunk(END.replace(b"data: [DONE]\n\n", b"") + usage + b"data: [DONE]\n\n")
        + LAST_CHUNK
    ]
    async with Upstream(script) as upstream, running({"only": pool(upstream.url)}) as gateway:
        _, _, without = await post(gateway, {})
        _, _, with_usage = await post(gateway, {}, stream_options={"include_usage": True})
        requested = [json.loads(request.body)["stream_options"] for request in upstream.requests]
    assert requested == [{"include_usage": True}] * 2
    assert without == TOKEN + END
    assert with_usage == TOKEN + END.replace(b"data: [DONE]", usage + b"data: [DONE]")
    assert [record.answer.prompt_tokens for record in gateway.recorder.recent] == [7, 7]


async def test_unknown_fields_are_forwarded_unchanged() -> None:
    """At any depth; only the model's name is the backend's."""
    odd = {"seed": 2**53 + 1, "vendor": {"nested": [1.5, None, {"ü": "\u2028"}]}, "logit_bias": {"50256": -100}}
    async with Upstream([STREAM_HEAD + chunk(TOKEN + END) + LAST_CHUNK]) as upstream:
        async with running({"only": pool(upstream.url)}) as gateway:
            await post(gateway, {}, **odd)
        sent = json.loads(upstream.requests[0].body)
    assert {name: sent[name] for name in odd} == odd
    assert sent["model"] == "served"


async def test_a_key_may_use_its_own_routes_only() -> None:
    """401 without a known key, 404 for a route that the key may not use; neither reaches a backend."""
    keys = [{"name": "web", "sha256": hashlib.sha256(b"sk-web").hexdigest(), "routes": ["chat"]}]
    async with Upstream([STREAM_HEAD + chunk(TOKEN + END) + LAST_CHUNK]) as upstream:
        routes = {name: {"tiers": ["only"]} for name in ("chat", "other")}
        async with running({"only": pool(upstream.url)}, routes, keys=keys) as gateway:
            assert (await post(gateway, {}))[0] == 401
            assert (await post(gateway, {"authorization": "Bearer sk-we"}))[0] == 401
            assert (await post(gateway, {"authorization": "Bearer sk-web"}, model="other"))[0] == 404
            assert upstream.requests == []
            assert (await post(gateway, {"authorization": "Bearer sk-web"}))[0] == 200
