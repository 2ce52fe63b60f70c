"""API keys of callers, and the salts of their prefix caches.

Rules:
- Keys are kept as SHA-256 digests, from the configuration or from Redis, and compared in constant time.
- Without configured keys the port is open, which the configuration allows on loopback only. With keys in Redis the
  port
  is never open.
- A cache salt names the caches of a key, for engines (`cache_salt`, mixed into block hashes) and for our prefix
  index.
  Keys with one salt share prefixes. A key has a salt of its own unless a `cache_group` is configured; a group with
  the
  name of a key is a different one.
- A salt is an HMAC-SHA256, so no caller can guess another's: 128 bits in hex, which every engine takes (vLLM
  refuses `@ / \\ NUL` and more than 128 characters) and `backends.failures.scrub` recognizes as a secret.
- Without `state.cache_secret` the secret is made of the digests of the group's keys: gateways with one configuration
  agree, also after a restart, and a new or revoked key empties the caches of its own group alone.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass

from gateway.api.api_error import ApiError
from policies.quota.key_limits import KeyLimits

SALT_CHARACTERS = 32


@dataclass(frozen=True, slots=True)
class Tenant:
    """Owner of a key. `routes` None: every route. `cache_group`: the salt of its caches; empty: one cache for all."""

    name: str
    digest: bytes = b""
    routes: frozenset[str] | None = None
    cache_group: str = ""
    limits: KeyLimits | None = None

    def may_use(self, route: str) -> bool:
        return self.routes is None or route in self.routes


ANYONE = Tenant("-")


class Keys:
    """Finds the Tenant of an authorization header. `closed`: no request is admitted while there are no keys."""

    def __init__(self, tenants: Iterable[Tenant] = (), closed: bool = False) -> None:
        self.tenants, self.closed = tuple(tenants), closed

    def tenant(self, authorization: str | None) -> Tenant:
        """Raises ApiError (401), which does not tell which keys exist."""
        if not (self.tenants or self.closed):
            return ANYONE
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise _unauthorized("No API key was given. Send 'authorization: Bearer <key>'.")
        digest = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        found = ANYONE
        for tenant in self.tenants:  # all digests: the time must not depend on the key
            if hmac.compare_digest(tenant.digest, digest):
                found = tenant
        if found is ANYONE:
            raise _unauthorized("The API key is not known here.")
        return found


def _unauthorized(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})


@dataclass(frozen=True, slots=True)
class GroupMember:
    """A key with its SHA-256 digest and its configured cache group."""

    name: str
    digest: bytes
    group: str | None = None

    @property
    def label(self) -> str:
        return f"key {self.name}" if self.group is None else f"group {self.group}"


class CacheSalts:
    """`secret`: as configured, or empty. `members`: all keys."""

    def __init__(self, secret: str, members: Iterable[GroupMember]) -> None:
        self._secret = secret.encode()
        self._digests: dict[str, list[bytes]] = {}
        for member in members:
            self._digests.setdefault(member.label, []).append(member.digest)

    def salt(self, member: GroupMember) -> str:
        secret = self._secret or b"".join(sorted(self._digests.get(member.label, [member.digest])))
        return hmac.new(secret, member.label.encode(), hashlib.sha256).hexdigest()[:SALT_CHARACTERS]
