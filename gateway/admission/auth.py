"""Who is asking: API keys as SHA-256 digests from the config or from Redis, compared in constant time.

With no keys configured the port is open, which the config allows on loopback only. Where keys are in Redis it never is.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass

from gateway.api.api_error import ApiError
from policies.quota.key_limits import KeyLimits


@dataclass(frozen=True, slots=True)
class Tenant:
    """A key's owner. `routes` None: every route. `cache_group`: the name of its caches
    (`gateway.admission.cache_salts`), which
    engines are given as salt; empty: one cache for everybody."""

    name: str
    digest: bytes = b""
    routes: frozenset[str] | None = None
    cache_group: str = ""
    limits: KeyLimits | None = None

    def may_use(self, route: str) -> bool:
        return self.routes is None or route in self.routes


ANYONE = Tenant("-")


class Keys:
    """Turns an authorization header into a Tenant. `closed`: nobody gets in where there are no keys yet."""

    def __init__(self, tenants: Iterable[Tenant] = (), closed: bool = False) -> None:
        self.tenants, self.closed = tuple(tenants), closed

    def tenant(self, authorization: str | None) -> Tenant:
        """Raises Refusal (401) that says nothing about which keys exist."""
        if not (self.tenants or self.closed):
            return ANYONE
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise _refused("No API key was given. Send 'authorization: Bearer <key>'.")
        digest = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        found = ANYONE
        for tenant in self.tenants:  # every digest is compared, so that time tells nothing
            if hmac.compare_digest(tenant.digest, digest):
                found = tenant
        if found is ANYONE:
            raise _refused("The API key is not known here.")
        return found


def _refused(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
