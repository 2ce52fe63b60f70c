"""The store of callers' keys in Redis: a hash, NAMESPACE:keys, which never expires.

Fields: the name of a key (JSON of the key); ` birth` and ` changes` of the store, and the random name of the ` latest`
change; ` revoked NAME DIGEST` (JSON of a revocation). A key's name has no space.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from gateway.admission import key_store
from gateway.admission.auth import account
from gateway.admission.key_store import (
    MAX_REVOKED,
    REVOKED_FOR,
    Revocation,
    StoredKeys,
    StoreFull,
    new_birth,
    parse_key,
    parse_keys,
    revocation,
    text_of,
)
from gateway.cluster.redis_client import Unavailable, create_client, error_text
from gateway.cluster.redis_names import redis_name
from gateway.config.field_types import RedisUrl
from gateway.config.models import Key

if TYPE_CHECKING:
    from redis.asyncio import Redis

READ_TIMEOUT = 1.0  # s, of all keys
BIRTH, CHANGES, LATEST, REVOKED = " birth", " changes", " latest", " revoked "

# ARGV[1]: name of this change, and of a store that begins with it.
_CHANGED = """
local function changed()
  if redis.call('HEXISTS', KEYS[1], ' birth') == 0 then redis.call('HSET', KEYS[1], ' birth', ARGV[1]) end
  redis.call('HINCRBY', KEYS[1], ' changes', 1)
  redis.call('HSET', KEYS[1], ' latest', ARGV[1])
  return 1
end
local function digest_of(name)
  local text = redis.call('HGET', KEYS[1], name)
  local read, key = pcall(cjson.decode, text or '')
  return read and type(key) == 'table' and key.sha256 or ''
end
"""
_ADD = """
if redis.call('HEXISTS', KEYS[1], ARGV[2]) == 1 then return 0 end
local count = 0
for _, name in ipairs(redis.call('HKEYS', KEYS[1])) do
  if string.sub(name, 1, 1) ~= ' ' then count = count + 1 end
end
if count >= tonumber(ARGV[4]) then return -1 end
redis.call('HSET', KEYS[1], ARGV[2], ARGV[3])
return changed()
"""
_REPLACE = """
if redis.call('HGET', KEYS[1], ARGV[2]) ~= ARGV[3] then return 0 end
redis.call('HSET', KEYS[1], ARGV[2], ARGV[4])
return changed()
"""
# Drops revocations that are over, and the oldest ones above a number. That of a stored key stays.
_DROP_OLD = """
local time, kept = tonumber(redis.call('TIME')[1]), {}
for _, field in ipairs(redis.call('HKEYS', KEYS[1])) do
  if string.sub(field, 1, 9) == ' revoked ' then
    local read, mark = pcall(cjson.decode, redis.call('HGET', KEYS[1], field))
    if not read or mark.sha256 ~= digest_of(mark.name) then
      if read and mark['until'] > time then kept[#kept + 1] = {mark['until'], field}
      else redis.call('HDEL', KEYS[1], field) end
    end
  end
end
table.sort(kept, function(one, other) return one[1] < other[1] end)
for i = 1, #kept - tonumber(ARGV[2]) do redis.call('HDEL', KEYS[1], kept[i][2]) end
"""
_REVOKE = """
if redis.call('HEXISTS', KEYS[1], ARGV[3]) == 0 then return 0 end
local digest = digest_of(ARGV[3])
redis.call('HDEL', KEYS[1], ARGV[3])
if digest ~= '' then
  local mark = {name = ARGV[3], sha256 = digest, ['until'] = tonumber(redis.call('TIME')[1]) + tonumber(ARGV[4])}
  redis.call('HSET', KEYS[1], ' revoked ' .. ARGV[3] .. ' ' .. string.sub(digest, 1, 8), cjson.encode(mark))
end
"""
_REFUSE = """
for i = 3, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
"""
ADD, REPLACE = _CHANGED + _ADD, _CHANGED + _REPLACE
REVOKE, REFUSE = (f"{_CHANGED}{work}{_DROP_OLD}return changed()" for work in (_REVOKE, _REFUSE))

Ask = Callable[[Callable[["Redis"], Any], float], Awaitable[Any]]  # of Redis, in some seconds; may raise Unavailable

_revocation = msgspec.json.Decoder(Revocation).decode


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

    def __init__(self, ask: Ask, url: RedisUrl, timeout: float, namespace: str) -> None:
        self._ask, self._timeout = ask, timeout
        self._hash = redis_name(namespace, "keys")
        self.name = f"redis {url.redacted}: {self._hash}"

    async def version(self) -> Hashable:
        fields = [BIRTH, CHANGES, LATEST]
        birth, changes, latest = await self._ask(lambda redis: redis.hmget(self._hash, fields), self._timeout)
        return None if changes is None else (birth, changes, latest)

    async def read(self) -> StoredKeys:
        found = await self._ask(lambda redis: redis.hgetall(self._hash), max(READ_TIMEOUT, self._timeout))
        return await asyncio.to_thread(stored_keys, {name.decode("utf-8", "replace"): found[name] for name in found})

    async def add(self, key: Key) -> bool:
        added = await self._script(ADD, new_birth(), key.name, text_of(key), key_store.MAX_KEYS)
        if added < 0:
            raise StoreFull
        return added == 1

    async def replace(self, before: Key, after: Key) -> bool:
        text = await self._ask(lambda redis: redis.hget(self._hash, before.name), self._timeout)
        if text is None or parse_key(before.name, text) != before:
            return False
        return await self._script(REPLACE, new_birth(), before.name, text, text_of(after)) == 1

    async def revoke(self, name: str) -> bool:
        return await self._script(REVOKE, new_birth(), MAX_REVOKED, name, int(REVOKED_FOR)) == 1

    async def refuse(self, keys: Iterable[Key]) -> None:
        marks: list[str | bytes] = []
        for key in keys:
            mark = msgspec.json.encode(revocation(key.name, key.sha256))
            marks += [REVOKED + account(key.name, key.sha256), mark]
        await self._script(REFUSE, new_birth(), MAX_REVOKED, *marks)

    async def _script(self, script: str, *args: str | bytes | int) -> int:
        return int(await self._ask(lambda redis: redis.eval(script, 1, self._hash, *args), self._timeout))


def stored_keys(fields: dict[str, bytes]) -> StoredKeys:
    """The contents of the hash."""
    keys = {name: text for name, text in fields.items() if not name.startswith(" ")}
    birth, changes, latest = (fields.get(name, b"").decode("ascii", "replace") for name in (BIRTH, CHANGES, LATEST))
    revoked = [mark for name, text in fields.items() if name.startswith(REVOKED) and (mark := _mark(text)) is not None]
    return StoredKeys(parse_keys(keys), revoked, birth, int(changes) if changes.isdecimal() else 0, latest)


def _mark(text: bytes) -> Revocation | None:
    try:
        return _revocation(text)
    except (msgspec.DecodeError, ValueError):
        return None
