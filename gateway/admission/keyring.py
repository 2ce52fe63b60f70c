"""A gateway's copy of the stored keys.

Rules:
- A gateway asks the store for its version once a second, and for all keys after a change. Requests are checked against
  this copy: no request waits for the store.
- While the store is unavailable, or after it has lost all keys, the last known keys stay valid, but for those that are
  revoked meanwhile. The first key that is made again ends that: whatever is stored then is what holds.
- A digest that was seen revoked is refused until the revocation is over, whatever the store says: a failover to a
  replica that lags, or a restore, brings no revoked key back. A store that went back is told in the log.
- A stored key behind a key of the configuration file with its name, and another digest, is refused from then on, also
  once the file's key is gone: it is the key that was replaced.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from time import time

from gateway.admission.key_store import KeyStore, Revocation, StoredKeys, UnusableFile, revocation
from gateway.cluster.redis_client import Unavailable
from gateway.config.models import Key

log = logging.getLogger("firsttoken")

CHECK_INTERVAL = 1.0  # s


class Keyring:
    """`known`: the keys as last read, without refused ones. `on_change` is called with another set of keys. `of_file`:
    keys of the configuration in force."""

    def __init__(
        self,
        store: KeyStore,
        on_change: Callable[[Sequence[Key]], Awaitable[None]],
        of_file: Callable[[], Sequence[Key]] = tuple,
    ) -> None:
        self._store, self._of_file = store, of_file
        self._on_change = on_change
        self.known: Sequence[Key] = ()
        self._seen: Hashable = None  # version
        self._stored: StoredKeys | None = None  # as last read
        self._refused: dict[str, Revocation] = {}  # by digest
        self._unwritten: dict[str, Key] = {}  # by digest: refused here, and not yet in the store
        self._judged: tuple[object, ...] = ()  # the stored and the file's keys that were compared
        self._lost = self._failing = self._closed = False
        self._was_empty = False  # at the start, which is in the log
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
        if version is None:
            self._on_nothing()
        elif version != self._seen:
            await self._take(await self._store.read())
            self._seen = version
        await self._refuse_hidden()
        if self._unwritten:
            await self._store.refuse(self._unwritten.values())
            self._unwritten.clear()

    def _on_nothing(self) -> None:
        if self._seen is not None:
            self._seen, self._lost = None, True  # at its next version it is read, whatever the version is
            log.warning("%s: has lost the keys; the last known keys stay valid", self._store.name)
        elif not self._lost and not self._was_empty:
            self._was_empty = True
            log.info("%s: no keys are stored yet", self._store.name)

    async def _take(self, stored: StoredKeys) -> None:
        before, self._stored = self._stored, stored
        begun_again = before is not None and before.birth not in ("", stored.birth)
        older = before is not None and before.birth == stored.birth and _is_before(stored, before)
        self._refused |= {each.sha256: each for each in stored.revoked}
        self._refused = {digest: each for digest, each in self._refused.items() if self._holds(each)}
        again = [key for key in stored.keys if key.sha256 in self._refused and key.sha256 not in stored.refused]
        again = [key for key in again if key.sha256 not in self._unwritten]
        if begun_again or older or again:
            self._on_older(again)
        keys = stored.keys
        if self._lost or begun_again:
            keys = keys or self.known
        self._lost = (self._lost or begun_again) and not stored.keys
        await self._change(keys)

    def _holds(self, revoked: Revocation) -> bool:
        """A revocation that is over holds as long as the store keeps it: the key is stored."""
        return revoked.until > time() or (self._stored is not None and revoked.sha256 in self._stored.refused)

    def _on_older(self, again: Sequence[Key]) -> None:
        """After a failover, a restore or a loss: the store does not know all that was seen. `again`: keys in it that
        were revoked."""
        names = ", ".join(key.name for key in again)
        text = (
            "%s: the keys are older than those known here (a failover or a restore?); revoke again what was revoked%s"
        )
        log.warning(text, self._store.name, f"; still refused: {names}" if names else "")
        self._unwritten |= {key.sha256: key for key in again}

    async def _refuse_hidden(self) -> None:
        """Refuses stored keys whose names the configuration file has given to other digests."""
        file = self._of_file()
        compared = self._stored, file
        if self._stored is None or [*map(id, compared)] == [*map(id, self._judged)]:
            return
        self._judged = compared
        digests = {key.name: key.sha256 for key in file}
        hidden = [
            key
            for key in self._stored.keys
            if digests.get(key.name, key.sha256) != key.sha256 and key.sha256 not in self._refused
        ]
        if not hidden:
            return
        for key in hidden:
            text = "keys: the stored key '%s' is refused for good: the file has another key of this name; revoke it"
            log.warning(text, key.name)
            self._refused[key.sha256] = revocation(key.name, key.sha256)
            self._unwritten[key.sha256] = key
        await self._change(self.known)

    async def _change(self, keys: Iterable[Key]) -> None:
        self.known = tuple(key for key in keys if key.sha256 not in self._refused)
        await self._on_change(self.known)

    def _on_unusable(self, error: UnusableFile) -> None:
        if not self._failing:
            log.warning("keys: the last known keys stay valid: %s", error)
        self._failing = True


def _is_before(stored: StoredKeys, seen: StoredKeys) -> bool:
    """The store went back behind what was seen. With more changes since, only its keys tell."""
    return stored.changes < seen.changes or (stored.changes == seen.changes and stored.latest != seen.latest)
