"""Answers that the picker reads to their first token, and whose end Envoy's access log tells."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from backends.ext_proc.messages import BodyMode
from gateway.app import Gateway
from gateway.observe.part_notes import SIGHT, AnswerSight
from gateway.observe.record import Record, RequestOutcome
from gateway.parts.picker.envoy_log import PICK, STREAM_LOGS
from gateway.parts.picker.envoy_request import WATCHED
from gateway.parts.picker.part import PickerPart
from tests.gateway.picker.test_picker import FIRST, SECOND, Envoy, answered, destination, headers, picking
from tests.support.ext_proc import HttpBody, ProcessingRequest, StreamAccessLogsMessage
from tests.support.grpc_client import GrpcClient, framed, grpc_client
from tests.support.simulated import eventually

pytestmark = pytest.mark.virtual_time


@asynccontextmanager
async def logging(**pool: Any) -> AsyncIterator[tuple[Gateway, GrpcClient, int]]:
    """A picker to which the data plane of the client logs, and the call of the log."""
    async with picking(pool=pool) as (gateway, client, _):
        log = client.begin(STREAM_LOGS)
        await tell(client, log, "0")
        await ready(client)
        yield gateway, client, log


async def ready(client: GrpcClient) -> None:
    """Messages sent before were read."""
    envoy = Envoy(client, BodyMode.NONE)
    await envoy.tell(end=True)
    await client.status(envoy.call)


async def tell(
    client: GrpcClient, log: int, number: str, last_byte: float = 2.0, size: int = 0, flag: str = ""
) -> None:
    message = StreamAccessLogsMessage()
    entry = message.http_logs.log_entry.add()
    entry.response.response_code.value = 200
    entry.response.response_body_bytes = size
    common = entry.common_properties
    common.time_to_last_upstream_rx_byte.FromMilliseconds(int(last_byte * 1e3))
    common.metadata.filter_metadata["envoy.lb"].update({PICK: number})
    if flag:
        setattr(common.response_flags, flag, True)
    await client.send(log, framed(message.SerializeToString()))


async def begun(client: GrpcClient, mode: BodyMode = BodyMode.STREAMED) -> tuple[Envoy, str]:
    """A request whose first token has come, and the number of its pick."""
    envoy = Envoy(client, BodyMode.BUFFERED, mode)
    told = await envoy.pick()
    part = ProcessingRequest(response_headers=headers({":status": "200"}), protocol_config=envoy.modes)
    part.attributes["envoy.filters.http.ext_proc"].update({"upstream.address": destination(told)})
    await client.send(envoy.call, framed(part.SerializeToString()))
    await envoy.told()
    for chunk in (FIRST, SECOND):
        await asyncio.sleep(0.02)
        await envoy.ask(response_body=HttpBody(body=chunk))
    return envoy, told.dynamic_metadata["envoy.lb"][PICK]


def in_flight(gateway: Gateway) -> int:
    return sum(load.in_flight for load in gateway.monitor.loads().values())


async def last_record(gateway: Gateway) -> Record:
    await eventually(lambda: gateway.recorder.live == 0)
    return gateway.recorder.recent[-1]


async def test_the_call_ends_at_the_first_token_and_the_log_tells_the_rest() -> None:
    """The time of the end, and tokens by bytes: 99 events as long as the first one came unseen."""
    async with logging() as (gateway, client, log):
        envoy, number = await begun(client)
        assert await client.status(envoy.call) == "0"
        assert in_flight(gateway) == 1
        await asyncio.sleep(3.0)
        await tell(client, log, number, last_byte=2.0, size=len(FIRST) + 100 * len(SECOND))
        record = await last_record(gateway)
        assert (record.end, SIGHT.of(record)) == (RequestOutcome.COMPLETED, AnswerSight.ACCESS_LOG)
        assert (record.answer.output_tokens, record.total) == (100, pytest.approx(2.0))
        assert record.ttft is not None
        assert record.answer.tpot == pytest.approx((2.0 - record.ttft) / 99)
        assert in_flight(gateway) == 0


@pytest.mark.parametrize(
    ("flag", "end"),
    [
        ("downstream_connection_termination", RequestOutcome.CLIENT_GONE),
        ("upstream_connection_termination", RequestOutcome.FAILED),
    ],
)
async def test_flags_tell_a_broken_answer(flag: str, end: RequestOutcome) -> None:
    async with logging() as (gateway, client, log):
        _, number = await begun(client)
        await tell(client, log, number, flag=flag)
        assert (await last_record(gateway)).end is end


async def test_without_a_log_an_answer_is_read_to_its_end() -> None:
    """A log of another connection is the log of another data plane, or of another thread of it."""
    async with logging() as (gateway, _, _), grpc_client(client_url(gateway)) as other:
        envoy = Envoy(other, BodyMode.BUFFERED)
        told = await envoy.pick()
        assert PICK not in told.dynamic_metadata["envoy.lb"]
        await answered(envoy, destination(told))
        assert SIGHT.of(await last_record(gateway)) is AnswerSight.BODY


async def test_an_entry_of_another_connection_ends_nothing() -> None:
    async with logging() as (gateway, client, _), grpc_client(client_url(gateway)) as other:
        _, number = await begun(client)
        log = other.begin(STREAM_LOGS)
        await tell(other, log, number)
        await ready(other)
        assert in_flight(gateway) == 1


async def test_a_duplex_answer_is_read_to_its_end() -> None:
    """Envoy loses the last chunk of one that is left."""
    async with logging() as (_, client, _):
        envoy, _ = await begun(client, BodyMode.FULL_DUPLEX)
        await envoy.ask(response_body=HttpBody(body=SECOND))
        assert envoy.call not in client.trailers


async def test_one_answer_of_many_is_read_whole() -> None:
    """For the engine's own counts of tokens."""
    async with logging() as (gateway, client, log):
        whole = 0
        for _ in range(WATCHED):
            envoy, number = await begun(client)
            if await is_left(envoy):
                await tell(client, log, number)
            else:
                whole += 1
                await envoy.ask(response_body=HttpBody(body=SECOND, end_of_stream=True))
                await envoy.client.send(envoy.call, b"", end=True)
        await eventually(lambda: in_flight(gateway) == 0)
        assert whole == 1


async def is_left(envoy: Envoy) -> bool:
    await asyncio.sleep(0.01)
    await ready(envoy.client)
    return envoy.call in envoy.client.trailers


async def test_the_end_of_the_log_ends_what_it_would_have_told() -> None:
    async with logging() as (gateway, client, log):
        await begun(client)
        await client.send(log, b"", end=True)
        record = await last_record(gateway)
        assert (record.end, SIGHT.of(record), record.answer.output_tokens) == (
            RequestOutcome.COMPLETED,
            AnswerSight.HEADERS,
            0,
        )
        assert in_flight(gateway) == 0


async def test_an_entry_that_never_comes_is_replaced_by_the_load_of_the_engine() -> None:
    """Its polls say that it is idle."""
    async with logging() as (gateway, client, _):
        await begun(client)
        assert in_flight(gateway) == 1
        await asyncio.sleep(30)
        assert in_flight(gateway) == 0


async def test_an_engine_that_tells_no_load_is_given_ten_times_the_forecast() -> None:
    """An answer of 256 tokens, 20 ms each, is over after 60 s at the latest, and not after 30 s."""
    async with logging(backend="openai", api_key="none") as (gateway, client, _):
        await begun(client)
        await asyncio.sleep(30)
        assert in_flight(gateway) == 1
        await asyncio.sleep(40)
        assert in_flight(gateway) == 0


async def test_a_reset_after_the_end_of_the_call_ends_no_request() -> None:
    """Many peers end a call so."""
    async with logging() as (gateway, client, log):
        envoy, number = await begun(client)
        client.h2.reset_stream(envoy.call)
        client.flush()
        await ready(client)
        assert in_flight(gateway) == 1
        await tell(client, log, number)
        assert (await last_record(gateway)).end is RequestOutcome.COMPLETED


async def test_a_lost_connection_is_a_data_plane_that_is_gone() -> None:
    async with logging() as (gateway, client, _):
        await begun(client)
        client.writer.transport.abort()
        assert (await last_record(gateway)).end is RequestOutcome.CLIENT_GONE
        assert in_flight(gateway) == 0


async def test_nobody_waits_for_the_end_of_a_log() -> None:
    """A picker that stops has answered all when its answers are over."""
    async with logging() as (gateway, _, _):
        async with asyncio.timeout(1.0):
            await gateway.part(PickerPart).server.stop(grace=60.0)


async def test_a_malformed_message_ends_the_log_alone() -> None:
    async with logging() as (_, client, log):
        await client.send(log, framed(b"\x12\x04\x0a\x02\x0a\xff"))
        assert await client.status(log) == "3"
        envoy = Envoy(client, BodyMode.BUFFERED)
        await answered(envoy, destination(await envoy.pick()))


def client_url(gateway: Gateway) -> str:
    return gateway.part(PickerPart).url
