"""A gateway's copy of the stored keys.

Rules:
- A gateway asks the store for its version once a second, and for all keys after a change. Requests are checked against
  this copy: no request waits for the store.
- While the store is unavailable, or after it has lost all keys, the last known keys stay valid: no revocation.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Hashable, Sequence
from contextlib import suppress

from gateway.admission.key_store import KeyStore, UnusableFile
from gateway.cluster.redis_client import Unavailable
from gateway.config.models import Key

log = logging.getLogger("firsttoken")

CHECK_INTERVAL = 1.0  # s


class Keyring:
    """`known`: the keys as last read. `on_change` is called with another set of keys."""

    def __init__(self, store: KeyStore, on_change: Callable[[Sequence[Key]], Awaitable[None]]) -> None:
        self._store, self._on_change = store, on_change
        self.known: Sequence[Key] = ()
        self._seen: Hashable = None  # version
        self._lost = self._failing = self._closed = False
        self._checking: asyncio.Task[None] | None = None
        self._check_now = asyncio.Event()

    def start(self) -> None:
        self._checking = asyncio.get_running_loop().create_task(self._check_forever())

    def check_soon(self) -> None:
        self._check_now.set()

    async def close(self) -> None:
        if self._checking is not None:
            self._closed = True
            self._checking.cancel()
            await asyncio.wait([self._checking])

    async def _check_forever(self) -> None:
        while not self._closed:  # a cancellation may be lost within redis-py (python/cpython#86296)
            try:
                await self._check()
                self._failing = False
            except UnusableFile as error:
                self._on_unusable(error)
            except Unavailable:
                pass  # logged by the client of Redis
            with suppress(TimeoutError):
                async with asyncio.timeout(CHECK_INTERVAL):
                    await self._check_now.wait()
            self._check_now.clear()

    async def _check(self) -> None:
        version = await self._store.version()
        if version is not None and version != self._seen:
            self.known = await self._store.read()
            await self._on_change(self.known)
            self._seen, self._lost = version, False
        elif version is None and self._seen is not None and not self._lost:
            self._lost = True
            log.warning("%s: has lost the keys; the last known keys stay valid", self._store.name)

    def _on_unusable(self, error: UnusableFile) -> None:
        if not self._failing:
            log.warning("keys: the last known keys stay valid: %s", error)
        self._failing = True
