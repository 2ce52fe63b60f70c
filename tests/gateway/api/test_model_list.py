"""GET /v1/models and /v1/models/{id} in the shapes of OpenAI and Anthropic."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator

import openai
import pytest

from gateway.app import Gateway
from tests.support.builders import get
from tests.support.gateways import pool, running

pytestmark = pytest.mark.virtual_time

KEYS = [
    {"name": "web", "sha256": hashlib.sha256(b"sk-web").hexdigest(), "routes": ["chat"]},
    {"name": "all", "sha256": hashlib.sha256(b"sk-all").hexdigest()},
]
ROUTES = {"chat": {"tiers": ["only"]}, "meta/llama": {"tiers": ["only"]}}
WEB, ALL, ANTHROPIC = "authorization: Bearer sk-web", "x-api-key: sk-all", "anthropic-version: 2023-06-01"


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    async with running({"only": pool("http://127.0.0.1:9")}, ROUTES, keys=KEYS) as gateway:
        yield gateway


@pytest.mark.parametrize("id", ["chat", "meta/llama"])
async def test_openais_client_retrieves_a_model(gateway: Gateway, id: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="sk-all", max_retries=0) as client:
        found = await client.models.retrieve(id)
        with pytest.raises(openai.NotFoundError) as refused:
            await client.models.retrieve("nope")
    assert (found.id, found.object, found.owned_by) == (id, "model", "firsttoken")
    assert (refused.value.code, refused.value.param) == ("model_not_found", "model")


async def test_a_model_of_another_key_does_not_exist(gateway: Gateway) -> None:
    """The same answer as for a name that nobody has."""
    assert (await get(gateway.url, "/v1/models/meta/llama", ALL))[0] == 200
    answers = [await get(gateway.url, f"/v1/models/{id}", WEB) for id in ("meta/llama", "meta/lxxxx")]
    assert [status for status, _, _ in answers] == [404, 404]
    assert answers[0][2].replace(b"llama", b"lxxxx") == answers[1][2]
    assert (await get(gateway.url, "/v1/models/chat"))[0] == 401


async def test_every_model_of_a_passthrough_exists() -> None:
    """Requests for it are passed on, so it cannot be denied."""
    async with running({"only": pool("http://127.0.0.1:9")}, {}, passthrough="only") as gateway:
        status, _, body = await get(gateway.url, "/v1/models/gpt-4.1")
    assert (status, json.loads(body)["id"]) == (200, "gpt-4.1")


async def test_anthropics_clients_get_anthropics_shapes(gateway: Gateway) -> None:
    """Every field that anthropic-python 2.12 requires; one page."""
    status, _, body = await get(gateway.url, "/v1/models?limit=1000", ALL, ANTHROPIC)
    one = json.loads((await get(gateway.url, "/v1/models/meta%2Fllama", ALL, ANTHROPIC))[2])
    listed = json.loads(body)
    assert status == 200
    assert [model["id"] for model in listed["data"]] == ["chat", "meta/llama"]
    assert (listed["has_more"], listed["first_id"], listed["last_id"]) == (False, "chat", "meta/llama")
    assert one == listed["data"][1]
    assert one == {
        "type": "model",
        "id": "meta/llama",
        "display_name": "meta/llama",
        "created_at": "1970-01-01T00:00:00Z",
        "lifecycle": "active",
    }


async def test_a_model_has_the_context_window_of_its_route() -> None:
    """The largest of its pools, where all are known: agents compact their conversations by it."""
    pools = {
        name: pool("http://127.0.0.1:9", **more)
        for name, more in (("small", {"context_window": 8192}), ("large", {"context_window": 32_768}), ("any", {}))
    }
    routes = {"chat": {"tiers": ["small", "large"]}, "far": {"tiers": ["small", "any"]}}
    async with running(pools, routes) as gateway:
        listed = json.loads((await get(gateway.url, "/v1/models"))[2])["data"]
        one = json.loads((await get(gateway.url, "/v1/models/chat", ANTHROPIC))[2])
    assert {model["id"]: model.get("max_model_len") for model in listed} == {"chat": 32_768, "far": None}
    assert one["max_input_tokens"] == 32_768


async def test_a_page_without_models_has_no_ids() -> None:
    async with running({"only": pool("http://127.0.0.1:9")}, {}, passthrough="only") as gateway:
        _, _, body = await get(gateway.url, "/v1/models", ANTHROPIC)
    assert json.loads(body) == {"data": [], "has_more": False, "first_id": None, "last_id": None}


@pytest.mark.parametrize("method", ["POST", "DELETE", "PUT"])
async def test_a_model_is_read_only(gateway: Gateway, method: str) -> None:
    status, headers, _ = await get(gateway.url, "/v1/models/chat", ALL, method=method)
    assert (status, headers["allow"]) == (405, "GET, HEAD")
