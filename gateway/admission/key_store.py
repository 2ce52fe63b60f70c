"""Stores of callers' keys that are made and revoked while gateways run: Redis, or a file of `state.dir`.

Rules:
- A key is stored as JSON with the digest of the key, never the key.
- `firsttoken keys` and the admin port write; gateways read (`gateway.admission.keyring`).
- A store holds MAX_KEYS, so that what a gateway reads after a change is bounded.
- In Redis a hash holds the keys by name; a separate field counts the changes.
- The file is replaced as a whole under a lock, which processes of one machine share. What is not as written here is
  never overwritten.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
from collections.abc import Awaitable, Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec
from pydantic import ValidationError

from gateway.atomic_file import NotAFile, read_regular, replace_file
from gateway.cluster.redis_client import PREFIX, Unavailable, create_client, error_text
from gateway.config.field_types import RedisUrl, parse_redis_url
from gateway.config.models import Key, StateSection

if TYPE_CHECKING:
    from redis.asyncio import Redis

T = TypeVar("T")

log = logging.getLogger("firsttoken")

MAX_KEYS = 5_000
READ_TIMEOUT = 1.0  # s, of all keys
PATIENCE = 5.0  # s of an operator, for a store to answer
HASH = PREFIX + "keys"
CHANGES = " changes"  # a key's name has no space
FILE = "keys.json"
VERSION = 1  # of the file
MAX_BYTES = 32 << 20  # of the file
LOCK_PAUSE = 0.01  # s

_ADD = """
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 1 then return 0 end
if redis.call('HLEN', KEYS[1]) > tonumber(ARGV[3]) then return -1 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('HINCRBY', KEYS[1], ' changes', 1)
return 1
"""
_REPLACE = """
if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
redis.call('HINCRBY', KEYS[1], ' changes', 1)
return 1
"""
_REVOKE = """
if redis.call('HDEL', KEYS[1], ARGV[1]) == 0 then return 0 end
redis.call('HINCRBY', KEYS[1], ' changes', 1)
return 1
"""

Ask = Callable[[Callable[["Redis"], Any], float], Awaitable[Any]]  # of Redis, in some seconds; may raise Unavailable


class StoreFull(Exception):
    """Refuses one more than MAX_KEYS."""


class UnusableFile(Unavailable):
    """The file of keys cannot be read or written, or is none of ours."""


@dataclass(frozen=True, slots=True)
class KeyDocument:
    """Contents of the file. `keys`: JSON of each key, by name."""

    version: int
    keys: dict[str, str]


_document = msgspec.json.Decoder(KeyDocument).decode


class KeyStore(Protocol):
    """Every method may raise Unavailable: the store cannot be asked now."""

    name: str

    async def version(self) -> Hashable:
        """Differs after every change. None: nothing is stored."""
        ...

    async def read(self) -> list[Key]:
        """Keys in order of name."""
        ...

    async def add(self, key: Key) -> bool:
        """False if the name is taken. Raises StoreFull."""
        ...

    async def replace(self, before: Key, after: Key) -> bool:
        """False if the key is not `before` any more."""
        ...

    async def revoke(self, name: str) -> bool:
        """False if there is no key of this name."""
        ...


def operator_store(state: StateSection) -> KeyStore:
    """The store that `state.keys` names, for a rare question that may take PATIENCE."""
    if state.keys == "dir":
        assert state.dir is not None  # by `gateway.config.loading`
        return FileKeys(state.dir)
    assert state.redis is not None
    url = parse_redis_url(state.redis.get_secret_value())
    return RedisKeys(one_connection(url), url, PATIENCE)


def one_connection(url: RedisUrl) -> Ask:
    """A connection for each question. Raises Unavailable, without the password."""

    async def ask(question: Callable[[Redis], Any], timeout: float) -> Any:
        client = create_client(url)
        try:
            async with asyncio.timeout(timeout):
                return await question(client)
        except Exception as error:  # of redis-py, TLS, DNS
            raise Unavailable(f"redis {url.redacted}: {error_text(error, url)}") from None
        finally:
            await client.aclose()

    return ask


class RedisKeys:
    """`timeout`: s for one key; all keys have a second at least."""

    def __init__(self, ask: Ask, url: RedisUrl, timeout: float) -> None:
        self._ask, self._timeout = ask, timeout
        self.name = f"redis {url.redacted}"

    async def version(self) -> Hashable:
        count: bytes | None = await self._ask(lambda redis: redis.hget(HASH, CHANGES), self._timeout)
        return count

    async def read(self) -> list[Key]:
        found = await self._ask(lambda redis: redis.hgetall(HASH), max(READ_TIMEOUT, self._timeout))
        found.pop(CHANGES.encode(), None)
        return await asyncio.to_thread(parse_keys, {name.decode("ascii", "replace"): found[name] for name in found})

    async def add(self, key: Key) -> bool:
        added = await self._script(_ADD, key.name, _text(key), MAX_KEYS)
        if added < 0:
            raise StoreFull
        return added == 1

    async def replace(self, before: Key, after: Key) -> bool:
        text = await self._ask(lambda redis: redis.hget(HASH, before.name), self._timeout)
        if text is None or _parse(before.name, text) != before:
            return False
        return await self._script(_REPLACE, before.name, text, _text(after)) == 1

    async def revoke(self, name: str) -> bool:
        return await self._script(_REVOKE, name) == 1

    async def _script(self, script: str, *args: str | bytes | int) -> int:
        return int(await self._ask(lambda redis: redis.eval(script, 1, HASH, *args), self._timeout))


class FileKeys:
    """Waits PATIENCE for the lock, at most."""

    def __init__(self, directory: str) -> None:
        self._path = Path(directory) / FILE
        self.name = str(self._path)

    async def version(self) -> Hashable:
        return await self._in_thread(self._version)

    async def read(self) -> list[Key]:
        return await self._in_thread(lambda: parse_keys(self._read()))

    async def add(self, key: Key) -> bool:
        def added(keys: dict[str, str]) -> bool:
            if key.name in keys:
                return False
            if len(keys) >= MAX_KEYS:
                raise StoreFull
            keys[key.name] = _text(key)
            return True

        return await self._changed(added)

    async def replace(self, before: Key, after: Key) -> bool:
        def replaced(keys: dict[str, str]) -> bool:
            if (text := keys.get(before.name)) is None or _parse(before.name, text) != before:
                return False
            keys[before.name] = _text(after)
            return True

        return await self._changed(replaced)

    async def revoke(self, name: str) -> bool:
        return await self._changed(lambda keys: keys.pop(name, None) is not None)

    async def _changed(self, change: Callable[[dict[str, str]], bool]) -> bool:
        def change_file() -> bool:
            with self._locked():
                keys = self._read()
                if changed := change(keys):
                    replace_file(self._path, msgspec.json.encode(KeyDocument(VERSION, keys)))
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

    def _read(self) -> dict[str, str]:
        """The stored texts by name. Raises UnusableFile for a file that is none of ours."""
        raw = read_regular(self._path, MAX_BYTES)
        if raw is None:
            return {}
        try:
            document = _document(raw)
        except (msgspec.DecodeError, ValueError, RecursionError):
            document = None
        if document is None or document.version != VERSION or len(raw) > MAX_BYTES:
            raise UnusableFile(f"{self.name}: not a file of keys of this version")
        return document.keys

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Raises TimeoutError: another process has stopped with the lock."""
        self._path.parent.mkdir(mode=0o700, exist_ok=True)
        ends = monotonic() + PATIENCE
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


def _text(key: Key) -> str:
    return key.model_dump_json(exclude_defaults=True)


def parse_keys(stored: Mapping[str, str | bytes]) -> list[Key]:
    return [key for name in sorted(stored) if (key := _parse(name, stored[name])) is not None]


def _parse(name: str, text: str | bytes) -> Key | None:
    try:
        key = Key.model_validate_json(text)
    except ValidationError:
        log.warning("keys: the stored key '%s' is not a valid key of this version; ignored", name)
        return None
    return key if key.name == name else None
