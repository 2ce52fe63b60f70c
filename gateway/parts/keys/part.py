"""Keys of callers that are made and revoked while the gateway runs, in Redis or in a file (`state.keys`)."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.admission.key_file import FileKeys
from gateway.admission.key_store import KeyStore
from gateway.admission.keyring import Keyring
from gateway.admission.redis_keys import RedisKeys
from gateway.cluster.redis_client import RedisClient
from gateway.config.models import Key, StateSection
from gateway.core.part import Part
from gateway.runtime import Runtime
from gateway.wiring import Core


class KeysPart(Part):
    name = "keys"

    def __init__(self, core: Core) -> None:
        self._core = core
        self.keyring: Keyring | None = None
        redis = core.find(RedisClient)
        if (store := key_store(core.config.state, redis)) is not None:
            self.keyring = Keyring(store, self._on_change, lambda: core.config.keys)
            core.admin.stored_keys = self._known
            if redis is not None and core.config.state.keys == "redis":
                redis.on_up(self.keyring.check_soon)

    async def _on_change(self, stored: Sequence[Key]) -> None:
        await self._core.extend()

    def _known(self) -> Sequence[Key]:
        return () if self.keyring is None else self.keyring.known

    async def start(self) -> None:
        if self.keyring is not None:
            self.keyring.start()

    def extended(self, runtime: Runtime) -> Runtime:
        return runtime if self.keyring is None else runtime.with_stored_keys(self.keyring.known)

    def reload(self) -> None:
        if self.keyring is not None:
            self.keyring.check_soon()

    async def close(self) -> None:
        if self.keyring is not None:
            await self.keyring.close()


def key_store(state: StateSection, redis: RedisClient | None) -> KeyStore | None:
    """The store that the configuration names; None: there is none."""
    if state.keys == "redis" and redis is not None:
        return RedisKeys(redis.call, redis.url, redis.timeout, state.namespace)
    return FileKeys(state.dir) if state.keys == "dir" and state.dir is not None else None
