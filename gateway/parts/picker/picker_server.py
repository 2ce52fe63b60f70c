"""The port of the endpoint picker."""

from __future__ import annotations

import asyncio

from gateway.config.models import PickSection
from gateway.downstream.intake import Intake
from gateway.parts.picker.grpc_port import GrpcServer
from gateway.parts.picker.picker_service import PickerService
from gateway.process import BACKLOG, PICK_KEY, bind, naming, url_of


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
