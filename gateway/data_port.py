"""The data port of a gateway: opened when everything is ready, closed to new callers first, then to all."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from socket import socket
from typing import Any

from gateway.downstream.http_server import HttpServer
from gateway.downstream.limits import Intake
from gateway.process import BACKLOG, HANDLER_GRACE
from gateway.proxy import Proxy
from gateway.server_certificate import ServerCertificate

log = logging.getLogger("firsttoken")


@dataclass(slots=True, eq=False)
class DataPort:
    """`certificate` None: plain HTTP. `server`: once open."""

    proxy: Proxy
    intake: Intake
    certificate: ServerCertificate | None
    server: HttpServer | None = None
    _listener: asyncio.Server | None = field(default=None, init=False)

    async def open(self, bound: socket, max_body: int) -> None:
        """`max_body`: bytes of a request body."""
        proxy = self.proxy
        self.server = HttpServer(proxy.handle, max_body=max_body, precheck=proxy.precheck, intake=self.intake)
        tls: dict[str, Any] = {}
        if self.certificate is not None:
            self.certificate.start()
            timeouts = self.server.bounds.timeouts
            tls = {"ssl": self.certificate.context, "ssl_handshake_timeout": timeouts.head}
            tls["ssl_shutdown_timeout"] = timeouts.unread  # which includes the time to read the last answer
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(self.server, sock=bound, backlog=BACKLOG, **tls)

    def reload(self, max_body: int) -> None:
        if self.server is not None:
            self.server.bounds.max_body = max_body

    def close(self) -> None:
        """No new connections."""
        if self._listener is not None:
            self._listener.close()

    async def abort(self) -> None:
        """Requests without an answer yet get an error reply; streams end unfinished."""
        if self.server is None:
            return
        await asyncio.sleep(0)  # requests that waited in the queue are about to answer
        if live := self.proxy.recorder.live:
            log.warning("shutdown grace expired: aborting %d running requests", live)
        self.proxy.stopping = True
        await self.server.shutdown(HANDLER_GRACE)
