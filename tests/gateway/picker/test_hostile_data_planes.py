"""The endpoint picker before data planes that break the protocol, reloads, and many requests at once."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
from collections import Counter
from contextlib import AsyncExitStack
from typing import Any

import pytest

from backends.ext_proc.messages import BodyMode, EnvoyMessage
from gateway.app import Gateway
from gateway.config.models import Config
from gateway.observe.record import RequestOutcome
from gateway.parts.picker.named_model import named_model
from gateway.parts.picker.part import PickerPart
from gateway.tokenize.estimator import WORKERS
from tests.gateway.picker.test_picker import (
    CHAT,
    POST,
    ROUTES,
    Envoy,
    addresses,
    answered,
    destination,
    headers,
    picking,
    talk,
)
from tests.support.ext_proc import HttpBody, HttpTrailers, ProcessingRequest
from tests.support.gateways import document, running
from tests.support.grpc_client import framed, grpc_client
from tests.support.simulated import engine_pool, engines, eventually

pytestmark = pytest.mark.virtual_time

PICK = {"pick": {"listen": "127.0.0.1:0"}}


async def test_an_engine_that_joins_while_a_request_waits_is_named() -> None:
    """The decision names endpoints of the runtime in force when it was made, not of the one before."""
    async with engines(2) as servers:
        few, more = (engine_pool(*some, concurrent_requests=1) for some in (servers[:1], servers))
        async with (
            running({"only": few}, ROUTES, **PICK) as gateway,
            grpc_client(gateway.part(PickerPart).url) as client,
        ):
            await Envoy(client, BodyMode.BUFFERED).pick()
            waits = asyncio.create_task(Envoy(client, BodyMode.BUFFERED).pick())
            await eventually(lambda: gateway.queue.depth())
            await gateway.apply_config(Config.model_validate(document({"only": more}, ROUTES, **PICK)))
            assert destination(await waits) in addresses(servers[1:])
            assert not gateway.queue.scheduler.queues.in_dispatch


async def test_a_request_that_would_wait_goes_to_no_engine_of_another_model() -> None:
    """The least loaded endpoint is one of the route's pools, though another pool is idle."""
    async with engines(2) as servers:
        pools = {"a": engine_pool(servers[0], concurrent_requests=1), "b": engine_pool(servers[1])}
        routes = {"served": {"tiers": ["a"]}, "other": {"tiers": ["b"]}}
        async with running(pools, routes, **PICK) as gateway, grpc_client(gateway.part(PickerPart).url) as client:
            found = {destination(await Envoy(client, BodyMode.BUFFERED).pick()) for _ in range(4)}
            assert found == addresses(servers[:1])


async def test_a_body_that_is_parsed_too_late_goes_to_no_engine_of_another_model() -> None:
    """Large bodies are parsed in threads, in turn: here, both are busy for longer than the answer may take."""
    async with engines(2) as servers:
        pools = {"a": engine_pool(servers[0]), "b": engine_pool(servers[1])}
        routes = {"served": {"tiers": ["a"]}, "other": {"tiers": ["b"]}}
        async with running(pools, routes, **PICK) as gateway:
            busy, executor = threading.Event(), gateway.core.estimator.executor
            held = [executor.submit(busy.wait, 30) for _ in range(WORKERS)]
            async with grpc_client(gateway.part(PickerPart).url) as client:
                body = {"messages": [{"role": "user", "content": "x" * 200_000}], "model": "served"}
                found = {destination(await Envoy(client, BodyMode.BUFFERED).pick(body)) for _ in range(4)}
                assert found == addresses(servers[:1])
                assert not any(each.done() for each in held)
                busy.set()


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{", b'{"model": 7}', b'{"model": "\xff"}', b'{"\xff": 1}', b'{"a":' + b"[" * 100_000]
)
def test_a_body_without_a_model_names_none(body: bytes) -> None:
    assert named_model(body) == ""


async def test_requests_named_an_engine_by_load_alone_are_spread() -> None:
    """Between two polls no engine has told of them."""
    async with picking(4) as (_, client, servers):
        found: Counter[str] = Counter()
        for _ in range(40):
            blind = Envoy(client, BodyMode.NONE)
            found[destination(await blind.ask(request_headers=headers(POST)))] += 1
        assert found == dict.fromkeys(addresses(servers), 10)


async def test_requests_that_the_queue_would_hold_are_spread() -> None:
    """A thousand callers at once do not all go to one engine when their 200 ms are over."""
    async with engines(4) as servers:
        only = engine_pool(*servers, concurrent_requests=1)
        async with (
            running({"only": only}, ROUTES, **PICK) as gateway,
            grpc_client(gateway.part(PickerPart).url) as client,
        ):
            told = await asyncio.gather(*(Envoy(client, BodyMode.BUFFERED).pick() for _ in range(44)))
            found = Counter(map(destination, told))
            assert set(found) == addresses(servers)
            assert max(found.values()) <= 12


@pytest.mark.parametrize(("status", "end"), [("200", RequestOutcome.COMPLETED), ("500", RequestOutcome.FAILED)])
async def test_the_record_of_a_request_placed_by_load_alone_has_its_status(status: str, end: RequestOutcome) -> None:
    async with picking(1) as (gateway, client, _):
        blind = Envoy(client, BodyMode.NONE)
        await blind.ask(request_headers=headers(POST))
        await blind.ask(response_headers=headers({":status": status}))
        await blind.tell(response_body=HttpBody(body=b"x", end_of_stream=True), end=True)
        assert await client.status(blind.call) == "0"
        record = gateway.recorder.recent[-1]
        assert (record.end, record.status) == (end, int(status))


async def test_an_answer_that_ends_with_trailers_is_complete() -> None:
    async with picking(1) as (gateway, client, _):
        envoy = Envoy(client, BodyMode.BUFFERED, BodyMode.FULL_DUPLEX)
        await envoy.pick()
        await envoy.ask(response_headers=headers({":status": "200"}))
        await envoy.ask(response_body=HttpBody(body=b"data: [DONE]\n\n"))
        await envoy.tell(response_trailers=HttpTrailers(), end=True)
        assert await client.status(envoy.call) == "0"
        assert gateway.recorder.recent[-1].end is RequestOutcome.COMPLETED


async def test_headers_of_an_answer_after_its_end_count_nothing() -> None:
    async with picking(2) as (gateway, client, servers):
        envoy = Envoy(client, BodyMode.BUFFERED)
        (other,) = addresses(servers) - {destination(await envoy.pick())}
        await envoy.ask(response_headers=headers({":status": "200"}))
        await envoy.ask(response_body=HttpBody(body=b"x", end_of_stream=True))
        late = ProcessingRequest(response_headers=headers({":status": "500"}))
        late.attributes["envoy.filters.http.ext_proc"].update({"upstream.address": other})
        await client.send(envoy.call, framed(late.SerializeToString()))
        await envoy.told()
        assert not any(load.in_flight for load in gateway.monitor.loads().values())
        client.h2.reset_stream(envoy.call)
        client.flush()
        await eventually(lambda: len(gateway.recorder.recent) == 1)
        assert gateway.recorder.recent[-1].end is RequestOutcome.COMPLETED


async def unanswered(envoy: Envoy, **message: Any) -> None:
    """Sends the message and ends the call: the next answer of the picker would come before its status."""
    await envoy.tell(**message, end=True)
    assert await envoy.client.status(envoy.call) == "0"
    assert not envoy.client.unread(envoy.call)


@pytest.mark.parametrize(
    "late",
    [
        {"request_body": HttpBody(end_of_stream=True)},
        {"request_body": HttpBody(body=b"more")},
        {"request_trailers": HttpTrailers()},
        {"request_headers": headers(POST)},
    ],
)
async def test_nothing_is_sent_behind_the_end_of_a_duplex_request(late: dict[str, Any]) -> None:
    async with picking(1) as (_, client, servers):
        envoy = Envoy(client, BodyMode.FULL_DUPLEX, BodyMode.FULL_DUPLEX)
        await envoy.tell(request_headers=headers(POST))
        await envoy.tell(request_body=HttpBody(body=json.dumps(CHAT).encode(), end_of_stream=True))
        assert destination(await envoy.told()) in addresses(servers)
        assert (await envoy.told()).request_body.response.body_mutation.streamed_response.end_of_stream
        await unanswered(envoy, **late)


@pytest.mark.parametrize("late", [{"response_body": HttpBody(body=b"x")}, {"response_trailers": HttpTrailers()}])
async def test_nothing_is_sent_behind_the_end_of_a_duplex_answer(late: dict[str, Any]) -> None:
    async with picking(1) as (gateway, client, _):
        envoy = Envoy(client, BodyMode.BUFFERED, BodyMode.FULL_DUPLEX)
        await envoy.pick()
        await envoy.ask(response_headers=headers({":status": "200"}))
        await envoy.ask(response_body=HttpBody(body=b"data: [DONE]\n\n", end_of_stream=True))
        await unanswered(envoy, **late)
        assert gateway.recorder.recent[-1].end is RequestOutcome.COMPLETED


@pytest.mark.parametrize("mode", [BodyMode.BUFFERED, BodyMode.FULL_DUPLEX])
async def test_nothing_is_sent_behind_a_refusal(mode: BodyMode) -> None:
    more = {"pick": {"listen": "127.0.0.1:0"}, "defaults": {"max_body": "1kB"}}
    async with (
        engines(1) as servers,
        running({"only": engine_pool(*servers)}, ROUTES, **more) as gateway,
        grpc_client(gateway.part(PickerPart).url) as client,
    ):
        envoy = Envoy(client, mode)
        await envoy.tell(request_headers=headers(POST))
        await envoy.tell(request_body=HttpBody(body=json.dumps(CHAT).encode()))
        while (told := await envoy.told()).WhichOneof("response") != "immediate_response":
            pass
        assert told.immediate_response.status.code == 413
        await unanswered(envoy, request_body=HttpBody(body=b"more", end_of_stream=True))


async def test_the_message_with_a_body_is_not_kept_while_the_engine_works() -> None:
    """Of a thousand calls with long answers it would be a second copy of each prompt, which nothing counts."""
    async with picking() as (_, client, _servers):
        body = talk("kept")
        await Envoy(client, BodyMode.BUFFERED).pick(body)
        size = len(json.dumps(body))
        assert not [each for each in gc.get_objects() if isinstance(each, EnvoyMessage) and len(each.body) == size]


async def test_bodies_of_all_calls_together_have_a_bound() -> None:
    """`server.max_body_bytes`, shared with the data port. Beyond it large ones are refused and small ones are not; all
    is given back when the calls end."""
    async with engines(1) as servers:
        bounded = {**PICK, "server": {"max_body_bytes": "1MB"}}
        async with running({"only": engine_pool(*servers)}, ROUTES, **bounded) as gateway:
            async with grpc_client(gateway.part(PickerPart).url) as client:
                calls = [Envoy(client, BodyMode.FULL_DUPLEX, BodyMode.FULL_DUPLEX) for _ in range(8)]
                for envoy in calls:
                    await envoy.tell(request_headers=headers(POST))
                    await envoy.tell(request_body=HttpBody(body=b" " * 60_000))
                    for _ in range(5):
                        await envoy.tell(request_body=HttpBody(body=b" " * 60_000))
                    await asyncio.sleep(0.01)  # all that a call has sent is read before the next call
                assert (await calls[-1].told()).immediate_response.status.code == 503
                assert gateway.core.intake.body_bytes <= 1_000_000 + 8 * 64_000
                assert destination(await Envoy(client, BodyMode.BUFFERED).pick()) in addresses(servers)
            await eventually(lambda: gateway.core.intake.body_bytes == 0)


async def test_messages_that_are_not_whole_have_the_same_bound() -> None:
    async with engines(1) as servers:
        bounded = {**PICK, "server": {"max_body_bytes": "1MB"}}
        async with running({"only": engine_pool(*servers)}, ROUTES, **bounded) as gateway:
            async with grpc_client(gateway.part(PickerPart).url) as client:
                calls = [client.begin() for _ in range(4)]
                for call in calls:
                    await client.send(call, framed(b"x" * 500_000)[:400_000])
                assert await client.status(calls[-1]) == "8"
                await client.send(calls[-1], b"x" * 100_000, end=True)  # what a call that is over still sends
                assert destination(await Envoy(client, BodyMode.BUFFERED).pick()) in addresses(servers)
            await eventually(lambda: gateway.core.intake.body_bytes == 0)


async def test_a_request_is_answered_after_every_fault_of_its_data_plane() -> None:
    """What one call breaks off at any message is nothing to the next: no attempt stays in flight."""
    steps = [
        {"request_headers": headers(POST)},
        {"request_body": HttpBody(body=json.dumps(CHAT).encode(), end_of_stream=True)},
        {"response_headers": headers({":status": "200"})},
        {"response_body": HttpBody(body=b"data: {}\n\n")},
        {"response_body": HttpBody(body=b"data: [DONE]\n\n", end_of_stream=True)},
    ]
    async with picking(1) as (gateway, client, _):
        for count in range(1, len(steps) + 1):
            for order in (steps[:count], steps[:count][::-1]):
                envoy = Envoy(client, BodyMode.BUFFERED)
                for step in order:
                    await envoy.ask(**step)
                client.h2.reset_stream(envoy.call)
                client.flush()
        (id,) = gateway.monitor.loads()
        await eventually(lambda: gateway.monitor.loads()[id].in_flight == 0)
        assert not gateway.queue.scheduler.queues.in_dispatch
        envoy = Envoy(client, BodyMode.BUFFERED)
        await answered(envoy, destination(await envoy.pick()))


async def test_ranks_of_a_server_are_one_address() -> None:
    """No address is named twice, and the request counts at the rank that was chosen."""
    async with engines(1, ranks=(0, 1)) as (server,):
        ranks = [{"url": server.url, "dp_rank": rank} for rank in (0, 1)]
        only = {**engine_pool(), "backend": "vllm", "endpoints": ranks}
        async with (
            running({"only": only}, ROUTES, pick={"listen": "127.0.0.1:0", "fallbacks": 1}) as gateway,
            grpc_client(gateway.part(PickerPart).url) as client,
        ):
            blind = Envoy(client, BodyMode.NONE)
            assert {destination(await blind.ask(request_headers=headers(POST)))} == addresses([server])
            envoy = Envoy(client, BodyMode.BUFFERED)
            assert {destination(await envoy.pick())} == addresses([server])
            (timeline,) = (each for each in gateway.recorder.lives if each.record.route.name == "served")
            busy = [id for id, load in gateway.monitor.loads().items() if load.in_flight]
            assert busy == [timeline.record.endpoint.id]


async def test_a_message_that_could_hold_no_valid_body_is_answered_413() -> None:
    """By its length, before it is there; the end of the call would let the body pass, where Envoy fails open."""
    async with engines(1) as servers:
        bounded = {**PICK, "defaults": {"max_body": "100kB"}}
        async with (
            running({"only": engine_pool(*servers)}, ROUTES, **bounded) as gateway,
            grpc_client(gateway.part(PickerPart).url) as client,
        ):
            envoy = Envoy(client, BodyMode.BUFFERED)
            await envoy.ask(request_headers=headers(POST))
            await client.send(envoy.call, framed(b"x" * 400_000)[:100])
            assert (await envoy.told()).immediate_response.status.code == 413
            assert await client.status(envoy.call) == "0"
            assert gateway.recorder.recent[-1].status == 413


async def test_a_picker_that_stops_ends_its_calls_and_takes_no_more() -> None:
    """GOAWAY: data planes open their next connection elsewhere."""
    async with engines(1) as servers, AsyncExitStack() as stack:
        config = Config.model_validate(document({"only": engine_pool(*servers)}, ROUTES, **PICK))
        gateway = Gateway(config)
        await gateway.start()
        client = await stack.enter_async_context(grpc_client(gateway.part(PickerPart).url))
        envoy = Envoy(client, BodyMode.BUFFERED)
        served = destination(await envoy.pick())
        stopping = asyncio.create_task(gateway.stop(grace=60.0))
        await eventually(lambda: client.going_away)
        with pytest.raises(ConnectionError):
            await stack.enter_async_context(grpc_client(gateway.part(PickerPart).url))
        await answered(envoy, served)
        await eventually(lambda: client.gone)
        await stopping
        assert gateway.recorder.recent[-1].end is RequestOutcome.COMPLETED
