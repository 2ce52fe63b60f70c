"""Models that engines know by other names than callers: the picker writes the engine's name into the body."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from backends.ext_proc.messages import BodyMode
from gateway.parts.picker.named_model import rewritten
from gateway.parts.picker.part import PickerPart
from tests.gateway.picker.test_picker import CHAT, POST, Envoy, addresses, destination, headers
from tests.support.ext_proc import HttpBody
from tests.support.gateways import running
from tests.support.grpc_client import GrpcClient, grpc_client
from tests.support.simulated import engine_pool, engines

pytestmark = pytest.mark.virtual_time

ROUTES: dict[str, Any] = {
    "assistant": {"tiers": ["small"], "aliases": ["gpt-*"]},
    "either": {"tiers": ["small", "large"]},
    "served": {"tiers": ["small"]},
}


@asynccontextmanager
async def picking() -> AsyncIterator[tuple[GrpcClient, set[str], set[str]]]:
    """The addresses of two pools of two engines each, which know their models as `served` and `served-large`."""
    async with engines(4) as servers:
        small, large = servers[:2], servers[2:]
        pools = {"small": engine_pool(*small), "large": engine_pool(*large, model="served-large", models=["served-x"])}
        settings = {"listen": "127.0.0.1:0", "fallbacks": 3}
        async with (
            running(pools, ROUTES, pick=settings) as gateway,
            grpc_client(gateway.part(PickerPart).url) as client,
        ):
            yield client, addresses(small), addresses(large)


def sent(told: Any) -> Any:
    """The body in place of the caller's; None: it stays."""
    response = told.request_body.response
    return json.loads(response.body_mutation.body) if response.HasField("body_mutation") else None


def length(told: Any) -> list[int]:
    """Values of the header `content-length` that are set."""
    options = told.request_body.response.header_mutation.set_headers
    return [int(each.header.raw_value) for each in options if each.header.key == "content-length"]


@pytest.mark.parametrize(
    ("name", "own"), [("assistant", "served"), ("gpt-9", "served"), ("large/served-x", "served-x"), ("served", None)]
)
async def test_an_engine_gets_its_own_name_of_the_model(name: str, own: str | None) -> None:
    async with picking() as (client, *_):
        told = await Envoy(client, BodyMode.BUFFERED).pick({**CHAT, "model": name}, **{"content-length": "1"})
        if own is None:
            assert (sent(told), length(told)) == (None, [])
        else:
            assert sent(told) == {**CHAT, "model": own}
            assert length(told) == [len(told.request_body.response.body_mutation.body)]


async def test_no_length_is_told_of_a_body_that_came_without_one() -> None:
    """It would stand beside `transfer-encoding: chunked`."""
    async with picking() as (client, *_):
        told = await Envoy(client, BodyMode.BUFFERED).pick({**CHAT, "model": "assistant"})
        assert (sent(told), length(told)) == ({**CHAT, "model": "served"}, [])


async def test_a_body_that_is_sent_back_has_the_engines_name() -> None:
    """FULL_DUPLEX_STREAMED, in pieces."""
    body = {**CHAT, "model": "assistant", "note": "x" * 100_000}
    async with picking() as (client, *_):
        envoy = Envoy(client, BodyMode.FULL_DUPLEX, BodyMode.FULL_DUPLEX)
        raw = json.dumps(body).encode()
        await envoy.tell(request_headers=headers({**POST, "content-length": str(len(raw))}))
        told = await envoy.ask(request_body=HttpBody(body=raw, end_of_stream=True))
        options = told.request_headers.response.header_mutation.set_headers
        lengths = [int(each.header.raw_value) for each in options if each.header.key == "content-length"]
        received, is_last = b"", False
        while not is_last:
            piece = (await envoy.told()).request_body.response.body_mutation.streamed_response
            received, is_last = received + piece.body, piece.end_of_stream
        assert json.loads(received) == {**body, "model": "served"}
        assert lengths == [len(received)]


async def test_endpoints_that_know_the_model_by_another_name_are_not_named_beside() -> None:
    """A retry would carry a name that they refuse."""
    async with picking() as (client, small, large):
        told = await Envoy(client, BodyMode.BUFFERED).pick({**CHAT, "model": "either"})
        named, own = {*destination(told).split(",")}, sent(told)["model"]
        assert (named, own) in ((small, "served"), (large, "served-large"))


async def test_a_request_named_an_endpoint_by_load_alone_has_its_name() -> None:
    """The gateway does not understand the body; the engine shall answer."""
    body = {"model": "either", "messages": "no list"}
    async with picking() as (client, small, large):
        told = await Envoy(client, BodyMode.BUFFERED).pick(body)
        named = {*destination(told).split(",")}
        assert (named, sent(told)) in (
            (small, {**body, "model": "served"}),
            (large, {**body, "model": "served-large"}),
        )


def test_all_other_members_stay_as_they_are_written() -> None:
    raw = rb'{"at": 1.0, "model" : "a", "big": 1234567890123456789012, "text": "\u00e9\/", "list": [ 1 , {"a":1.50} ]}'
    expected = (
        rb'{"at":1.0,"model":"other \"name\"","big":1234567890123456789012,"text":"\u00e9\/","list":[ 1 , {"a":1.50} ]}'
    )
    assert rewritten(raw, 'other "name"') == expected


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"nonsense", b"\xff", b"[" * 10_000])
def test_what_is_no_object_stays_as_it_is(body: bytes) -> None:
    assert rewritten(body, "served") is None


@pytest.mark.parametrize("body", [{**CHAT, "model": "assistant"}, CHAT, {**CHAT, "messages": "no list"}])
async def test_members_and_headers_of_an_engines_own_are_removed(body: dict[str, Any]) -> None:
    """Also where the model keeps its name, and where only loads are compared."""
    held = {"vllm_xargs": {"kv_transfer_params": [1], "a": 1.50}, "kv_transfer_params": {"remote_host": "10.0.0.9"}}
    async with picking() as (client, *_):
        more = {"content-length": "1", "x-data-parallel-rank": "3", "x-prefiller-host-port": "10.0.0.9:80"}
        told = await Envoy(client, BodyMode.BUFFERED).pick({**body, **held}, **more)
        removed = set(told.request_body.response.header_mutation.remove_headers)
        assert sent(told) == {**body, "model": "served", "vllm_xargs": {"a": 1.50}}
        assert length(told) == [len(told.request_body.response.body_mutation.body)]
        assert {"x-data-parallel-rank", "x-prefiller-host-port"} <= removed
