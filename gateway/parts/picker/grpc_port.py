"""The connections of a gRPC port: calls of all of them together, checks, and their end."""

from __future__ import annotations

import asyncio

from gateway.downstream.limits import Intake
from gateway.parts.picker.connection_table import ConnectionTable
from gateway.parts.picker.grpc_server import CHECK, UNAVAILABLE, Call, GrpcConnection, GrpcError, Handler

MAX_CONNECTIONS = 1_000
MAX_ALL_CALLS = 20_000  # of all connections at a time, some 10 KB each


class GrpcServer:
    """Makes connections for `loop.create_server`."""

    def __init__(self, handler: Handler, intake: Intake) -> None:
        self._handler = handler
        self._intake = intake
        self._calls = 0
        self._connections: ConnectionTable[GrpcConnection]
        self._connections = ConnectionTable(MAX_CONNECTIONS, GrpcConnection.abort)
        self._check: asyncio.TimerHandle | None = None

    def __call__(self) -> GrpcConnection:
        if self._check is None:
            self._check_later()
        return GrpcConnection(self._serve, self._connections, self._intake)

    async def _serve(self, call: Call) -> None:
        """Raises GrpcError."""
        if self._calls >= MAX_ALL_CALLS:
            raise GrpcError(UNAVAILABLE, f"all {MAX_ALL_CALLS} calls are in use")
        self._calls += 1
        try:
            await self._handler(call)
        finally:
            self._calls -= 1

    def _check_later(self) -> None:
        self._check = asyncio.get_running_loop().call_later(CHECK, self._check_all)

    def _check_all(self) -> None:
        for connection in self._connections:
            connection.check()
        self._check_later()

    def drain(self) -> None:
        """New calls go elsewhere; calls in progress end."""
        for connection in self._connections:
            connection.drain()

    async def shutdown(self, grace: float) -> None:
        """Calls in progress have `grace` seconds."""
        self.drain()
        if tasks := [task for connection in self._connections for task in connection.tasks]:
            await asyncio.wait(tasks, timeout=grace)
        if self._check is not None:
            self._check.cancel()
        for connection in self._connections:
            connection.close()
