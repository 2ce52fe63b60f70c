"""Names that callers send: aliases, models of pools, and unknown ones, from the request to the server and the log."""

from __future__ import annotations

import hashlib
import json

import pytest

from gateway.observe.record import RequestOutcome
from tests.support.builders import CHAT, STREAMED, WHOLE, calling, get, post
from tests.support.gateways import pool, running
from tests.support.upstream import Upstream, reply

pytestmark = pytest.mark.virtual_time

JSON = "content-type: application/json"


@pytest.mark.parametrize(
    ("asked", "route", "sent"),
    [
        ("chat", "chat", "served"),
        ("claude-opus-9", "chat", "served"),
        ("only/a", "only/*", "a"),
        ("a", "only/*", "a"),
        ("only/meta/llama", "only/*", "meta/llama"),
    ],
)
async def test_a_name_leads_to_a_route_and_to_a_model(asked: str, route: str, sent: str) -> None:
    """Streamed and not. The servers get the pool's model, or the one that was named."""
    routes = {"chat": {"tiers": ["only"], "aliases": ["claude-*"]}}
    async with (
        Upstream([reply(WHOLE, "200 OK", JSON)]) as upstream,
        running({"only": pool(upstream.url, models=["a", "*"])}, routes) as gateway,
        calling(gateway.url) as caller,
    ):
        status, headers, _ = await caller.whole(post({**CHAT, "model": asked}))
        found = json.loads((await get(gateway.url, "/v1/models"))[2])["data"]
    assert (status, headers["x-firsttoken-route"], headers["x-firsttoken-model"]) == (200, route, sent)
    assert json.loads(upstream.requests[0].body)["model"] == sent
    assert [model["id"] for model in found] == ["chat", "claude-*", "only/a"]


async def test_an_unknown_model_of_a_pool_takes_no_server_out() -> None:
    """The name is the caller's to get right, whatever the pool lists; others are answered there at once."""
    missing = (
        b'{"error":{"message":"The model does not exist.","type":"invalid_request_error","code":"model_not_found"}}'
    )
    async with (
        Upstream([reply(missing, "404 Not Found", JSON)], [reply(WHOLE, "200 OK", JSON)]) as upstream,
        running({"only": pool(upstream.url, models=["gone", "a"])}, {}) as gateway,
        calling(gateway.url) as caller,
    ):
        first, _, _ = await caller.whole(post({**CHAT, "model": "only/gone"}))
        second, _, _ = await caller.whole(post({**CHAT, "model": "only/a"}))
    assert (first, second) == (404, 200)


async def test_an_unknown_name_is_in_the_log_and_its_neighbours_in_the_answer() -> None:
    """No server is asked."""
    async with (
        Upstream([STREAMED]) as upstream,
        running({"only": pool(upstream.url, models=["llama3.2"])}) as gateway,
        calling(gateway.url) as caller,
    ):
        status, _, body = await caller.whole(post({**CHAT, "model": "lama3.2"}))
        (record,) = gateway.recorder.recent
    assert (status, json.loads(body)["error"]["message"]) == (
        404,
        "The model 'lama3.2' does not exist here. Did you mean only/llama3.2?",
    )
    assert (record.end, record.error) == (RequestOutcome.REFUSED, "unknown model lama3.2")
    assert upstream.requests == []


async def test_a_refusal_tells_nothing_of_a_route_that_the_key_may_not_use() -> None:
    """The name, an alias and a pattern of such a route are refused as an unknown name is: with the same headers."""
    key = {"name": "web", "sha256": hashlib.sha256(b"key-of-web").hexdigest(), "routes": ["chat"]}
    routes = {"chat": {"tiers": ["only"]}, "secret": {"tiers": ["only"], "aliases": ["gpt-4o", "claude-*"]}}
    told = []
    async with (
        Upstream([STREAMED]) as upstream,
        running({"only": pool(upstream.url)}, routes, keys=[key]) as gateway,
        calling(gateway.url) as caller,
    ):
        for model in ("unknown", "secret", "gpt-4o", "claude-9"):
            request = post({**CHAT, "model": model, "stream": True}, "authorization: Bearer key-of-web")
            status, headers, body = await caller.whole(request)
            stages = [each.partition(";")[0] for each in headers["server-timing"].split(", ")]
            told.append((status, {*headers}, headers["x-firsttoken-route"], stages, body.replace(model.encode(), b"")))
    assert told == [told[0]] * 4
    assert upstream.requests == []


async def test_a_key_sent_as_the_model_is_not_in_the_log() -> None:
    """Nor where a route takes every name, and the key may not use it."""
    key = {"name": "web", "sha256": hashlib.sha256(b"key-of-web").hexdigest(), "routes": ["chat"]}
    async with (
        Upstream([STREAMED]) as upstream,
        running({"only": pool(upstream.url)}, keys=[key], passthrough="only") as gateway,
        calling(gateway.url) as caller,
    ):
        await caller.whole(post({**CHAT, "model": "key-of-web"}, "authorization: Bearer key-of-web"))
        (record,) = gateway.recorder.recent
    assert record.error == "unknown model"
