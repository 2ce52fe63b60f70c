"""The store of callers' keys in a file of `state.dir`.

The file is replaced as a whole under a lock, which processes of one machine share. What is not as written here is never
overwritten.
"""

from __future__ import annotations

import asyncio
import fcntl
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, sleep, time
from typing import TypeVar

import msgspec

from gateway.admission import key_store
from gateway.admission.key_store import (
    MAX_REVOKED,
    Revocation,
    StoredKeys,
    StoreFull,
    UnusableFile,
    new_birth,
    parse_key,
    parse_keys,
    revocation,
    text_of,
)
from gateway.config.models import Key
from gateway.files import NotAFile, read_regular, replace_file

T = TypeVar("T")

FILE = "keys.json"
VERSION = 1  # of the file
MAX_BYTES = 32 << 20  # of the file
LOCK_PAUSE = 0.01  # s


@dataclass(slots=True)
class KeyDocument:
    """Contents of the file. `keys`: JSON of each key, by name. `revoked`: by digest."""

    version: int
    keys: dict[str, str]
    revoked: dict[str, Revocation] = field(default_factory=dict)
    birth: str = ""
    changes: int = 0

    def refuse(self, key: Key) -> None:
        self.revoked[key.sha256] = revocation(key.name, key.sha256)

    def close(self) -> None:
        """Called before the document is written: counts the change, and drops old revocations."""
        self.birth, self.changes = self.birth or new_birth(), self.changes + 1
        stored, now = {key.sha256 for key in parse_keys(self.keys)}, time()
        kept = [each for each in self.revoked.values() if each.until > now or each.sha256 in stored]
        kept.sort(key=lambda each: (each.sha256 in stored, each.until))
        self.revoked = {each.sha256: each for each in kept[-MAX_REVOKED:]}


_document = msgspec.json.Decoder(KeyDocument).decode


class FileKeys:
    """Waits PATIENCE for the lock, at most."""

    def __init__(self, directory: str) -> None:
        self._path = Path(directory) / FILE
        self.name = str(self._path)

    async def version(self) -> Hashable:
        return await self._in_thread(self._version)

    async def read(self) -> StoredKeys:
        def stored() -> StoredKeys:
            found = self._read()
            return StoredKeys(parse_keys(found.keys), [*found.revoked.values()], found.birth, found.changes)

        return await self._in_thread(stored)

    async def add(self, key: Key) -> bool:
        def added(found: KeyDocument) -> bool:
            if key.name in found.keys:
                return False
            if len(found.keys) >= key_store.MAX_KEYS:
                raise StoreFull
            found.keys[key.name] = text_of(key)
            return True

        return await self._changed(added)

    async def replace(self, before: Key, after: Key) -> bool:
        def replaced(found: KeyDocument) -> bool:
            if (text := found.keys.get(before.name)) is None or parse_key(before.name, text) != before:
                return False
            found.keys[before.name] = text_of(after)
            return True

        return await self._changed(replaced)

    async def revoke(self, name: str) -> bool:
        def revoked(found: KeyDocument) -> bool:
            if (text := found.keys.pop(name, None)) is None:
                return False
            if (key := parse_key(name, text)) is not None:
                found.refuse(key)
            return True

        return await self._changed(revoked)

    async def refuse(self, keys: Iterable[Key]) -> None:
        def refused(found: KeyDocument) -> bool:
            for key in keys:
                found.refuse(key)
            return True

        await self._changed(refused)

    async def _changed(self, change: Callable[[KeyDocument], bool]) -> bool:
        def change_file() -> bool:
            with self._locked():
                found = self._read()
                if changed := change(found):
                    found.close()
                    replace_file(self._path, msgspec.json.encode(found))
                return changed

        return await self._in_thread(change_file)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.to_thread(work)
        except (OSError, NotAFile) as error:
            raise UnusableFile(f"{self.name}: {error}") from None

    def _version(self) -> Hashable:
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return None
        return found.st_mtime_ns, found.st_ino, found.st_size

    def _read(self) -> KeyDocument:
        """Raises UnusableFile for a file that is none of ours."""
        raw = read_regular(self._path, MAX_BYTES)
        if raw is None:
            return KeyDocument(VERSION, {})
        try:
            document = _document(raw)
        except (msgspec.DecodeError, ValueError, RecursionError):
            document = None
        if document is None or document.version != VERSION or len(raw) > MAX_BYTES:
            raise UnusableFile(f"{self.name}: not a file of keys of this version")
        return document

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Raises TimeoutError: another process has stopped with the lock."""
        self._path.parent.mkdir(mode=0o700, exist_ok=True)
        ends = monotonic() + key_store.PATIENCE
        with open(self._path.with_suffix(".lock"), "ab") as lock:
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if monotonic() > ends:
                        raise TimeoutError("another process holds the lock") from None
                    sleep(LOCK_PAUSE)
            yield  # the lock ends with the file
