"""The services of the picker's port: external processing for Envoy, and health."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

from backends.ext_proc.messages import decode
from backends.ext_proc.protobuf import number
from gateway.api.inference_request import request_id_of
from gateway.downstream.intake import Intake
from gateway.observe.timeline import Recorder
from gateway.picker.envoy_request import EnvoyRequest
from gateway.picker.grpc_server import INVALID_ARGUMENT, UNIMPLEMENTED, Call, GrpcError
from gateway.picker.picker import Picker

PROCESS = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
HEALTH = "/grpc.health.v1.Health/Check"
SERVING, NOT_SERVING = 1, 2  # grpc.health.v1.HealthCheckResponse.status


class PickerService:
    """Serves calls of any service name that health checks ask for. `max_body`: bytes, as of now."""

    def __init__(
        self,
        picker: Picker,
        recorder: Recorder,
        max_body: Callable[[], int],
        is_ready: Callable[[], bool],
        intake: Intake,
    ) -> None:
        self._picker = picker
        self._recorder = recorder
        self._max_body = max_body
        self._is_ready = is_ready
        self._intake = intake

    async def serve(self, call: Call) -> None:
        """Raises GrpcError."""
        if call.path == HEALTH:
            async for _ in call:
                call.send(number(1, SERVING if self._is_ready() else NOT_SERVING))
        elif call.path == PROCESS:
            await self._process(call)
        else:
            raise GrpcError(UNIMPLEMENTED, "the service is not known")

    async def _process(self, call: Call) -> None:
        with self._recorder.timeline(monotonic()) as timeline:
            request = EnvoyRequest(self._picker, timeline, self._max_body(), self._intake)
            try:
                async for data in call:
                    try:
                        message = decode(data)
                    except ValueError as error:
                        raise GrpcError(INVALID_ARGUMENT, str(error)) from None
                    if not timeline.record.request_id:
                        timeline.identified(request_id_of(message.headers), "pick", None)
                    for reply in await request.on(message):
                        call.send(reply)
            finally:
                request.close()
