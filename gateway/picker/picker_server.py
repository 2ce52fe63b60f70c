"""The picker's port."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gateway.config.models import PickSection
from gateway.downstream.intake import Intake
from gateway.observe.timeline import Recorder
from gateway.picker.grpc_server import GrpcServer
from gateway.picker.picker import Picker
from gateway.picker.picker_service import PickerService
from gateway.process import BACKLOG, bind, url_of


class PickerServer:
    """Listens from `start` to `stop`. `url`: of the port, once it listens. `shared`: with the other workers."""

    def __init__(
        self,
        picker: Picker,
        recorder: Recorder,
        max_body: Callable[[], int],
        is_ready: Callable[[], bool],
        intake: Intake,
    ) -> None:
        self.url = ""
        self._calls = GrpcServer(PickerService(picker, recorder, max_body, is_ready, intake).serve, intake)
        self._server: asyncio.Server | None = None

    async def start(self, settings: PickSection, *, shared: bool) -> None:
        """Raises OSError if the port is taken."""
        listener = bind(settings.listen, shared=shared)
        self.url = url_of(listener, settings.listen.host)
        self._server = await asyncio.get_running_loop().create_server(self._calls, sock=listener, backlog=BACKLOG)

    async def stop(self, grace: float) -> None:
        if self._server is not None:
            self._server.close()
            await self._calls.shutdown(grace)
