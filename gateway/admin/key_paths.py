"""`/keys` of the admin port: makes, lists, limits and revokes the stored keys of callers.

Rules:
- Every request needs the admin key, checked before anything else is said. Without `server.admin_key` nothing is here.
- A key is in one reply, that of its making. No reply has a digest.
- Every change has a line in the log: what changed, of which key, from which address.
- Gateways, workers and replicas apply a change within 2 s (`gateway.admission.keyring`). Requests in progress go on.
- Keys of the configuration file are listed and never changed. A stored key of the same name is listed beside, and can
  be revoked.
- A key that the store has lost, and gateways still know, is listed and can be revoked.
"""

from __future__ import annotations

import hmac
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from hashlib import sha256
from time import monotonic
from typing import Any

from aiohttp import web

from gateway.admin.admin_replies import json_response, lowercase_headers, read_body
from gateway.admission.key_store import MAX_KEYS, KeyStore, StoredKeys, StoreFull
from gateway.admission.new_keys import SETTINGS, InvalidKey, changed_key, in_file, is_hidden, new_key, operator_store
from gateway.api.api_error import ApiError, bad_request, retry_later
from gateway.cluster.redis_client import Unavailable
from gateway.config.config_errors import did_you_mean, nearest, sentence
from gateway.config.models import Config, Key
from gateway.downstream.http_request import caller_address
from gateway.strict_json import BadJson, decode, encode
from policies.rate_limit.send_limits import RateLimit

log = logging.getLogger("firsttoken")

MAX_BODY = 64 * 1024  # bytes of the settings of a key
Reply = tuple[int, Mapping[str, Any]]  # status and document
Known = Callable[[], Awaitable[Sequence[Key]]]


class KeyPaths:
    """`config`: the configuration in force; `server` and `state` never change. `known`: stored keys as gateways know
    them."""

    def __init__(self, config: Callable[[], Config], known: Known) -> None:
        self._config, self._known = config, known
        self._key: AdminKey | None = None

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/keys", self.list_keys),
            web.post("/keys", self.make),
            web.patch("/keys/{name:.+}", self.change),
            web.delete("/keys/{name:.+}", self.revoke),
        ]

    async def list_keys(self, http: web.Request) -> web.StreamResponse:
        return await reply(self.authorized(http).list_keys())

    async def make(self, http: web.Request) -> web.StreamResponse:
        work = self.authorized(http)
        return await reply(work.make(settings_in(await read_body(http, MAX_BODY), ("name", *SETTINGS))))

    async def change(self, http: web.Request) -> web.StreamResponse:
        work = self.authorized(http)
        settings = settings_in(await read_body(http, MAX_BODY), SETTINGS)
        return await reply(work.change(http.match_info["name"], settings))

    async def revoke(self, http: web.Request) -> web.StreamResponse:
        return await reply(self.authorized(http).revoke(http.match_info["name"]))

    def authorized(self, http: web.Request) -> KeyWork:
        """Raises ApiError, before a body is read."""
        config, address = self._config(), caller_address(http.transport)
        if config.server.admin_key is None:
            raise ApiError(404, "Keys are managed here once server.admin_key is configured.", code="not_configured")
        if self._key is None:
            self._key = AdminKey(config.server.admin_key.get_secret_value())
        self._key.check(lowercase_headers(http), address)
        return KeyWork(config, operator_store(config.state), address, self._known)


async def reply(work: Awaitable[Reply]) -> web.Response:
    """Raises ApiError."""
    try:
        status, document = await work
    except InvalidKey as error:
        raise bad_request(str(error), param=error.problems[0][0], code="invalid_key_settings") from None
    except StoreFull:
        raise ApiError(409, f"There are {MAX_KEYS} keys; revoke some.", code="too_many_keys") from None
    except Unavailable as error:
        log.error("admin port: keys: %s", error)
        text = "The store of keys cannot be asked now; the log has the reason."
        raise ApiError(503, text, type="server_error", code="unavailable") from None
    return json_response(status, encode(document), {"cache-control": "no-store"})


class KeyWork:
    """One operation of an operator at `address`. Every method may raise Unavailable."""

    def __init__(self, config: Config, store: KeyStore, address: str, known: Known) -> None:
        self._config, self._known = config, known
        self._store, self._address = store, address

    async def list_keys(self) -> Reply:
        stored = await self._store.read()
        views = [view(key, "file") for key in self._config.keys]
        views += [view(key, "store", self._is_valid(key, stored)) for key in stored.keys]
        views += [view(key, "lost") for key in await self._lost(stored)]
        return 200, {"keys": views}

    def _is_valid(self, key: Key, stored: StoredKeys) -> bool:
        return key.sha256 not in stored.refused and not is_hidden(self._config, key)

    async def _lost(self, stored: StoredKeys) -> list[Key]:
        """Keys that gateways know and the store does not, where it has none."""
        if stored.keys:
            return []
        of_file = {key.name for key in self._config.keys}
        known = await self._known()
        return [key for key in known if key.sha256 not in stored.refused and key.name not in of_file]

    async def make(self, settings: dict[str, Any]) -> Reply:
        """Raises InvalidKey, StoreFull, ApiError."""
        text, key = new_key(self._config, settings.pop("name", None), settings)
        if in_file(self._config, key.name) or not await self._store.add(key):
            raise ApiError(409, f"There is a key '{key.name}' already.", param="name", code="name_taken")
        self._audit("made", key)
        return 201, {"key": text, **view(key, "store")}

    async def change(self, name: str, settings: dict[str, Any]) -> Reply:
        """Raises InvalidKey, ApiError."""
        if in_file(self._config, name):
            raise of_file(name)
        stored = await self._store.read()
        if (before := stored.by_name.get(name)) is None:
            raise unknown(name, stored.by_name)
        if before.sha256 in stored.refused:
            text = f"The key '{name}' is refused for good: revoke it, and make another."
            raise ApiError(409, text, code="revoked")
        after = changed_key(self._config, before, settings)
        if not await self._store.replace(before, after):
            raise ApiError(409, f"The key '{name}' was changed at the same time; try again.", code="conflict")
        self._audit("changed", after)
        return 200, view(after, "store")

    async def revoke(self, name: str) -> Reply:
        """Raises ApiError."""
        stored = await self._store.read()
        if (key := stored.by_name.get(name)) is not None:
            if not await self._store.revoke(name):
                raise unknown(name)
        elif in_file(self._config, name):
            raise of_file(name)
        else:
            key = await self._known_only(name, stored)
            await self._store.refuse([key])
        self._audit("revoked", key)
        return 200, {"revoked": name}

    async def _known_only(self, name: str, stored: StoredKeys) -> Key:
        """A key that gateways know and the store does not. Raises ApiError."""
        known = {key.name: key for key in await self._known() if key.sha256 not in stored.refused}
        if name not in known:
            raise unknown(name, {**stored.by_name, **known})
        return known[name]

    def _audit(self, done: str, key: Key) -> None:
        settings = encode(key.model_dump(exclude={"name", "sha256"}, exclude_defaults=True)).decode()
        log.info("admin port: key '%s' %s from %s: %s", key.name, done, self._address, settings)


def view(key: Key, source: str, valid: bool = True) -> dict[str, Any]:
    """All but the digest. `valid` False: refused, since the file has the name or the key was revoked."""
    return {"name": key.name, "source": source, "valid": valid, **{name: getattr(key, name) for name in SETTINGS}}


def settings_in(body: bytes, known: Sequence[str]) -> dict[str, Any]:
    """Raises ApiError."""
    try:
        settings = decode(body)
    except BadJson as error:
        raise bad_request(f"The body is no JSON: {error}") from None
    if not isinstance(settings, dict):
        raise bad_request("The body must be a JSON object: the settings of a key.")
    for name in settings:
        if name not in known:
            raise bad_request(sentence(f"There is no setting '{name}'{did_you_mean(name, known)}"), param=name)
    return settings


def unknown(name: str, known: Iterable[str] = ()) -> ApiError:
    return ApiError(404, sentence(f"There is no key '{name}'{nearest(name, known)}"), code="unknown_key")


def of_file(name: str) -> ApiError:
    return ApiError(409, f"The key '{name}' is in the configuration file: change it there.", code="in_file")


# -- the admin key ---------------------------------------------------------------------------------
#
# The check of `server.admin_key`, which the paths that change callers' keys require.
#
# Rules:
# - Keys are compared by digest, in constant time. An absent and a wrong key get the same answer.
# - An address has ATTEMPTS wrong keys a minute. Beyond, its requests are refused without a look at the key, so that the
#   answer tells nothing of it. A right key from another address is not delayed.
# - Addresses are those of connections, of IPv6 networks. The ADDRESSES that failed last are remembered.


ATTEMPTS = 6
ADDRESSES = 1_024


class AdminKey:
    def __init__(self, key: str, clock: Callable[[], float] = monotonic) -> None:
        self._digest, self._clock = _digest(key), clock
        self._failed: OrderedDict[str, RateLimit] = OrderedDict()  # by address

    def check(self, headers: Mapping[str, str], address: str) -> None:
        """Raises ApiError (401, 429). `headers`: names in lower case."""
        now = self._clock()
        attempts = self._failed.get(address) or RateLimit.configured(False, ATTEMPTS)
        if (wait := attempts.wait(0, now)) > 0:
            text = "Too many wrong admin keys came from this address."
            raise ApiError(429, text, type="rate_limit_error", code="rate_limit_exceeded", headers=retry_later(wait))
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and hmac.compare_digest(_digest(key.strip()), self._digest):
            return
        self._failed[address] = attempts.after(0, now)
        self._failed.move_to_end(address)
        if len(self._failed) > ADDRESSES:
            self._failed.popitem(last=False)
        log.warning("admin port: a wrong admin key, or none, from %s", address)
        text = "This path requires the admin key: authorization: Bearer <server.admin_key>."
        raise ApiError(401, text, code="invalid_admin_key", headers={"www-authenticate": "Bearer"})


def _digest(key: str) -> bytes:
    return sha256(key.encode("utf-8", "surrogateescape")).digest()
