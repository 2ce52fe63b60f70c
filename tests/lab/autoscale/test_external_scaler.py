"""KEDA asks `firsttoken autoscale` for the desired replicas."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.parts.picker.grpc_server import UNAVAILABLE, Call, GrpcError
from gateway.parts.picker.part import PickerPart
from gateway.parts.picker.picker_service import HEALTH
from lab.autoscale.external_scaler import SERVICE, ExternalScaler
from tests.gateway.picker.test_grpc_port import listening
from tests.support.external_scaler import (
    GetMetricSpecResponse,
    GetMetricsRequest,
    GetMetricsResponse,
    IsActiveResponse,
    ScaledObjectRef,
)
from tests.support.gateways import running
from tests.support.grpc_client import GrpcClient, framed, grpc_client
from tests.support.simulated import engine_pool, engines, eventually

pytestmark = pytest.mark.virtual_time
SCALER = ExternalScaler(lambda: {"main": 3})
MAIN = ScaledObjectRef(name="llama", namespace="default", scalerMetadata={"pool": "main"})


class OneMessage(Call):
    """A call with one message, whose answers are kept."""

    def __init__(self, path: str, message: Any) -> None:
        self.path = path
        self.sent: list[bytes] = []
        self._asked = message.SerializeToString()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self._asked

    def send(self, message: bytes) -> None:
        self.sent.append(message)


async def call(client: GrpcClient, method: str, message: Any) -> int:
    stream = client.begin(SERVICE + method)
    await client.send(stream, framed(message.SerializeToString()), end=True)
    return stream


async def test_keda_gets_the_desired_replicas_as_a_value_with_the_target_1() -> None:
    async with listening(SCALER.serve) as (_, url), grpc_client(url) as client:
        spec = await client.message(await call(client, "GetMetricSpec", MAIN))
        value = await client.message(await call(client, "GetMetrics", GetMetricsRequest(scaledObjectRef=MAIN)))
        unnamed = await client.message(await call(client, "GetMetrics", GetMetricsRequest()))
        active = await client.message(await call(client, "IsActive", MAIN))
        stream = await call(client, "StreamIsActive", MAIN)
        assert IsActiveResponse.FromString(await client.message(stream)).result
        assert stream not in client.trailers
    [metric] = GetMetricSpecResponse.FromString(spec).metricSpecs
    assert metric.targetSizeFloat == 1.0
    [found] = GetMetricsResponse.FromString(value).metricValues
    assert (found.metricName, found.metricValueFloat) == (metric.metricName, 3.0)
    assert unnamed == value
    assert IsActiveResponse.FromString(active).result


async def test_a_second_message_ends_the_call_before_more_are_kept() -> None:
    """KEDA sends one; a peer that goes on would fill the memory."""
    async with listening(SCALER.serve) as (_, url), grpc_client(url) as client:
        stream = client.begin(SERVICE + "IsActive")
        for _ in range(2):
            await client.send(stream, framed(MAIN.SerializeToString()))  # and no end
        assert await client.status(stream) == "3"


async def test_a_pool_without_an_engine_has_no_number_and_is_active() -> None:
    scaler = ExternalScaler(lambda: {"main": None})
    with pytest.raises(GrpcError, match="no engine of the pool is found yet") as told:
        await scaler.serve(OneMessage(SERVICE + "GetMetrics", GetMetricsRequest(scaledObjectRef=MAIN)))
    assert told.value.status == UNAVAILABLE
    await scaler.serve(asked := OneMessage(SERVICE + "IsActive", MAIN))
    assert IsActiveResponse.FromString(asked.sent[0]).result


async def test_an_unknown_pool_method_or_message_ends_the_call_with_a_status_that_says_so() -> None:
    async with listening(SCALER.serve) as (_, url), grpc_client(url) as client:
        wrong = await call(client, "IsActive", ScaledObjectRef(scalerMetadata={"pool": "mian"}))
        unknown = await call(client, "Scale", MAIN)
        broken = client.begin(SERVICE + "IsActive")
        await client.send(broken, framed(b"\x08\x01"), end=True)
        told = [await client.status(stream) for stream in (wrong, unknown, broken)]
        reason = client.trailers[wrong]["grpc-message"]
    assert told == ["5", "12", "3"]
    assert reason.endswith("known: main")


@pytest.mark.parametrize("method", ["StreamIsActive", "StreamMetricSpec"])
async def test_a_stream_to_keda_holds_no_process_that_stops(method: str) -> None:
    """A trigger of type external-push keeps the call open for good: the connection ends without it."""
    async with listening(SCALER.serve) as (server, url), grpc_client(url) as client:
        assert await client.message(await call(client, method, MAIN))
        server.drain()
        await eventually(lambda: client.gone)


async def test_health_checks_are_answered() -> None:
    async with listening(SCALER.serve) as (_, url), grpc_client(url) as client:
        stream = client.begin(HEALTH)
        await client.send(stream, framed(b""), end=True)
        assert await client.message(stream) == b"\x08\x01"


async def test_the_port_of_a_picker_says_where_the_scaler_went() -> None:
    async with engines() as servers:
        pools = {"main": engine_pool(*servers)}
        async with (
            running(pools, {"served": {"tiers": ["main"]}}, pick={"listen": "127.0.0.1:0"}) as gateway,
            grpc_client(gateway.part(PickerPart).url) as client,
        ):
            asked = await call(client, "GetMetrics", GetMetricsRequest(scaledObjectRef=MAIN))
            assert await client.status(asked) == "12"
            assert "firsttoken autoscale" in client.trailers[asked]["grpc-message"]
