"""Wakes sleeping engines for requests that no other endpoint can take.

Rules:
- One request to wake an engine at a time, whoever waits for it. Its end does not depend on those who wait.
- A failure to wake is logged, and is the failure of the requests that have waited.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from time import monotonic

from backends.failures import NOT_WOKEN, TransportError
from backends.interface import Failure
from gateway.upstream.routed_request import Upstream
from policies.fleet.fleet import Fleet

log = logging.getLogger("firsttoken")

TIMEOUT = 300.0  # s: weights of hundreds of GB may come from a disk


class Waker:
    """The wakings in progress, by endpoint."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._tasks: dict[str, asyncio.Task[Failure | None]] = {}

    def wake(self, endpoint: str, upstreams: Mapping[str, Upstream]) -> asyncio.Task[Failure | None]:
        """Wake an engine, or join a waking. The task ends once it is awake, or with a failure."""
        if (task := self._tasks.get(endpoint)) is None:
            task = asyncio.get_running_loop().create_task(self._wake(endpoint, upstreams[endpoint]))
            self._tasks[endpoint] = task
            task.add_done_callback(lambda done: self._tasks.pop(endpoint, None))
        return task

    async def close(self) -> None:
        tasks = [*self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _wake(self, endpoint: str, upstream: Upstream) -> Failure | None:
        began, call = monotonic(), upstream.backend.wake()
        if call is None:
            return None
        log.warning("endpoint %s is being woken", endpoint)
        try:
            reply = await upstream.connections.fetch(call, TIMEOUT)
            said = "" if reply.status < 300 else f"its {call.path} answers {reply.status}"
        except TransportError as error:
            said = error.failure.said
        if said:
            log.error("endpoint %s could not be woken: %s", endpoint, said)
            return NOT_WOKEN
        now = monotonic()
        self._fleet.on_woken(endpoint, now - began, now)
        log.warning("endpoint %s was woken in %.1f s", endpoint, now - began)
        return None
