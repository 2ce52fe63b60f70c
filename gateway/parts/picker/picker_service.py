"""The gRPC services of the endpoint picker, and its port: external processing (ext_proc) and access log for Envoy,
health checks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic

from backends.ext_proc.messages import EnvoyMessage, decode
from backends.ext_proc.protobuf import number, sized
from gateway.api.request_headers import request_id_of
from gateway.config.models import PickSection
from gateway.downstream.limits import Intake
from gateway.observe.recorder import Recorder
from gateway.parts.picker.envoy_log import STREAM_LOGS, EnvoyLogs
from gateway.parts.picker.envoy_request import EnvoyRequest
from gateway.parts.picker.grpc_port import GrpcServer
from gateway.parts.picker.grpc_server import INVALID_ARGUMENT, UNIMPLEMENTED, Call, GrpcError, MessageTooLongError
from gateway.parts.picker.picker import Picker
from gateway.process import BACKLOG, PICK_KEY, bind, naming, url_of

PROCESS = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
HEALTH = "/grpc.health.v1.Health/Check"
HEAD = 1 << 18  # bytes of a message beside a body: headers, attributes, metadata
SCALER = "/externalscaler.ExternalScaler/"  # which this port served before 0.2.0
SERVING, NOT_SERVING = 1, 2  # grpc.health.v1.HealthCheckResponse.status
_ALIVE = sized(1, b"liveness")  # HealthCheckRequest.service, as endpoint pickers have it: a process that answers


class PickerService:
    """Serves external processing, the access log, and health checks: of `liveness`, and of any other name as readiness.
    `max_body`: bytes, read for each request."""

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
        self._logs = EnvoyLogs()

    async def serve(self, call: Call) -> None:
        """Raises GrpcError."""
        if call.path == HEALTH:
            async for data in call:
                is_serving = data == _ALIVE or self._is_ready()
                call.send(number(1, SERVING if is_serving else NOT_SERVING))
        elif call.path == PROCESS:
            await self._process(call)
        elif call.path == STREAM_LOGS:
            await self._logs.serve(call)
        elif call.path.startswith(SCALER):
            raise GrpcError(UNIMPLEMENTED, "KEDA asks firsttoken autoscale, a process of its own")
        else:
            raise GrpcError(UNIMPLEMENTED, "the service is not known")

    async def _process(self, call: Call) -> None:
        with self._recorder.timeline(monotonic()) as timeline:
            request = EnvoyRequest(
                self._picker, timeline, self._max_body(), self._intake, self._logs.of(call), call.send
            )
            call.max_message = self._max_body() + HEAD
            try:
                async for data in call:
                    message = decoded(data)
                    if not timeline.record.request_id:
                        timeline.identified(request_id_of(message.headers), "pick", None)
                    for reply in await request.on(message):
                        call.send(reply)
                    if request.has_seen_enough:
                        break
                    del data, message  # the next one may come in a minute
                if request.is_to_be_logged:
                    call.end()
                    await request.until_logged()
            except MessageTooLongError:
                for reply in request.too_long():
                    call.send(reply)
            finally:
                request.close()


def decoded(data: bytes) -> EnvoyMessage:
    """Raises GrpcError."""
    try:
        return decode(data)
    except ValueError as error:
        raise GrpcError(INVALID_ARGUMENT, str(error)) from None


class PickerServer:
    """Serves calls from `start` to `stop`. `url`: of the port, once it listens."""

    def __init__(self, service: PickerService, intake: Intake) -> None:
        self.url = ""
        self._calls = GrpcServer(service.serve, intake)
        self._server: asyncio.Server | None = None

    async def start(self, settings: PickSection, *, shared: bool) -> None:
        """Listens; `shared`: with the other workers. Raises OSError if the port is taken."""
        with naming(settings.listen, PICK_KEY):
            listener = bind(settings.listen, shared=shared)
        self.url = url_of(listener, settings.listen.host)
        self._server = await asyncio.get_running_loop().create_server(self._calls, sock=listener, backlog=BACKLOG)

    def close(self) -> None:
        """No new connections, and no new calls on those there are."""
        if self._server is not None:
            self._server.close()
            self._calls.drain()

    async def stop(self, grace: float) -> None:
        self.close()
        await self._calls.shutdown(grace)
