"""The data port: callers' connections, watched and ended together.

One sweep watches the time of all connections: a timer each would cost more than most of them do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from time import monotonic

from backends.http.write_coalescer import WriteCoalescer
from gateway.api.api_error import ApiError
from gateway.downstream.downstream_connection import DownstreamConnection
from gateway.downstream.http_request import HttpRequest

MAX_BODY = 32 * 1024 * 1024  # bytes, unless the server is told otherwise
SWEEP = 1.0  # s between two looks at the time of all connections
CLOSING = 0.01  # s between two looks at whether all connections are closed

Handler = Callable[[HttpRequest], Awaitable[None]]
Screen = Callable[[HttpRequest], ApiError | None]


class HttpServer:
    """A factory of connections for `loop.create_server`. `handler` answers a request, and may be cancelled at any time;
    `screen` may refuse one by its head while its body is still on the way."""

    def __init__(
        self, handler: Handler, *, max_body: Callable[[], int] = lambda: MAX_BODY, screen: Screen = lambda request: None
    ) -> None:
        self.handler, self.max_body, self.screen = handler, max_body, screen
        self.connections: set[DownstreamConnection] = set()
        self.outbox = WriteCoalescer()
        self.loop = asyncio.get_running_loop()
        self._sweep_later()

    def __call__(self) -> DownstreamConnection:
        return DownstreamConnection(self)

    def _sweep_later(self) -> None:
        self._sweeping = self.loop.call_later(SWEEP, self._sweep)

    def _sweep(self) -> None:
        now = monotonic()
        for connection in tuple(self.connections):
            connection.look(now)
        self._sweep_later()

    async def shutdown(self, timeout: float) -> None:
        """Answers end here. Requests in hand, and what is not read yet, get `timeout` seconds; then all is cut."""
        self._sweeping.cancel()
        for connection in tuple(self.connections):
            connection.end_answer()
            connection.close_if_idle()
        tasks = [connection.task for connection in self.connections if connection.task is not None]
        late = (await asyncio.wait(tasks, timeout=timeout))[1] if tasks else set()
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        ends = monotonic() + timeout
        while self.connections and monotonic() < ends:
            for connection in tuple(self.connections):
                connection.close_if_idle()
            await asyncio.sleep(CLOSING)
        for connection in tuple(self.connections):
            connection.cut()
        await asyncio.sleep(0)  # the loop tells each of its end
