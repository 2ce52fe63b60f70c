"""KEDA's external scaler over gRPC: the desired replicas of a pool as a metric.

Rules:
- The target is 1, so that a HorizontalPodAutoscaler with AverageValue sets exactly the metric's value.
- A pool is always active: it has one engine at least. It has no number until one is found: KEDA falls back.
- `pool` in the metadata of the trigger names the pool; it may be left out where one pool is scaled.
- Health checks (grpc.health.v1) are answered: the process serves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from backends.ext_proc.protobuf import number
from gateway.parts.picker.grpc_server import INVALID_ARGUMENT, UNAVAILABLE, UNIMPLEMENTED, Call, GrpcError
from gateway.parts.picker.picker_service import HEALTH, SERVING
from lab.autoscale.keda_messages import (
    ScaledObject,
    decode_metrics_request,
    decode_scaled_object,
    is_active,
    metric_spec,
    metric_value,
)

SERVICE = "/externalscaler.ExternalScaler/"
METRIC = "desired-replicas"
TARGET = 1.0
NOT_FOUND = 5  # grpc-status


class ExternalScaler:
    """`desired`: replicas by pool; None: not known yet."""

    def __init__(self, desired: Callable[[], Mapping[str, int | None]]) -> None:
        self._desired = desired

    async def serve(self, call: Call) -> None:
        """Raises GrpcError."""
        method = call.path.removeprefix(SERVICE)
        asked = await _only_message(call)
        if call.path == HEALTH:
            call.send(number(1, SERVING))
            return
        try:
            decode = decode_metrics_request if method == "GetMetrics" else decode_scaled_object
            replicas = _replicas(decode(asked), self._desired())
        except ValueError as error:
            raise GrpcError(INVALID_ARGUMENT, str(error)) from None
        match method:
            case "IsActive" | "StreamIsActive":
                call.send(is_active(True))
            case "GetMetricSpec" | "StreamMetricSpec":
                call.send(metric_spec(METRIC, TARGET))
            case "GetMetrics":
                if replicas is None:
                    raise GrpcError(UNAVAILABLE, "no engine of the pool is found yet")
                call.send(metric_value(METRIC, float(replicas)))
            case _:
                raise GrpcError(UNIMPLEMENTED, "the method is not known")
        if method.startswith("Stream"):
            call.has_no_end = True
            await asyncio.Event().wait()  # until the caller leaves: nothing changes


def _replicas(asked: ScaledObject, found: Mapping[str, int | None]) -> int | None:
    """Raises GrpcError."""
    name = asked.metadata.get("pool", "")
    if not name and len(found) == 1:
        [name] = found
    if name not in found:
        known = ", ".join(found) or "none"
        raise GrpcError(NOT_FOUND, f"write the name of a scaled pool as pool; known: {known}")
    return found[name]


async def _only_message(call: Call) -> bytes:
    """Raises GrpcError at a second one: a peer that goes on sending fills no memory."""
    found: bytes | None = None
    async for message in call:
        if found is not None:
            raise GrpcError(INVALID_ARGUMENT, "one message is wanted")
        found = message
    if found is None:
        raise GrpcError(INVALID_ARGUMENT, "one message is wanted")
    return found
