"""API keys of callers, and the salts of their prefix caches.

Rules:
- Keys are kept as SHA-256 digests, from the configuration or from Redis, and looked up by digest. The time of a lookup
  depends on the digest of the presented key, in which nobody can choose a byte: knowing how much of it equals a known
  digest, a caller would still have to find a key with that digest (a preimage). Nor can a caller tell which known
  digest is meant: the table is hashed with a secret of the process, and compares bytes of equal hashes alone.
- A key may come in any header of the three dialects, or in `x-firsttoken-key`, beside which the others are the caller's
  own (`gateway.parts.caller_keys`). Two headers with different keys are refused: a proxy in front may
  have checked the other one.
- Without configured keys the port is open, which the configuration allows on loopback only. With keys in Redis the port
  is never open.
- A cache salt names the caches of a key, for engines (`cache_salt`, mixed into block hashes) and for our prefix index.
  Keys with the same salt share prefixes. A key without a configured `cache_group` has an own salt, and so has a later
  key of the same name; a group with the name of a key is a different group.
- A salt is an HMAC-SHA256, so no caller can guess another salt: 128 bits in hex, accepted by every engine (vLLM refuses
  `@ / \\ NUL` and more than 128 characters) and recognized as a secret by `backends.scrubbing.scrub`.
- Without `state.cache_secret` the secret is made of the digests of the group's keys: gateways with the same
  configuration agree, also after a restart, and a new or revoked key empties the caches of the key's group alone.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gateway.api.api_error import ApiError
from gateway.api.inference_request import GATEWAY_KEY, KEY_HEADERS
from policies.quota.key_limits import KeyLimits

SALT_CHARACTERS = 32
DIGEST_SHOWN = 8  # hex digits of a digest that tell keys of one name apart


@dataclass(frozen=True, slots=True)
class Tenant:
    """Owner of a key. `routes` None: every route. `cache_group`: the salt of its caches; empty: one cache for all."""

    name: str
    digest: bytes = b""
    routes: frozenset[str] | None = None
    cache_group: str = ""
    limits: KeyLimits | None = None
    weight: float = 1.0  # share of engine time in relation to other tenants

    def may_use(self, route: str) -> bool:
        return self.routes is None or route in self.routes

    @property
    def account(self) -> str:
        """Under which the use of the key's limits counts."""
        return account(self.name, self.digest.hex())


def account(name: str, digest: str) -> str:
    """A key is its name and its digest (in hex): one that is made again under an old name has used nothing. No name has
    a space."""
    return f"{name} {digest[:DIGEST_SHOWN] or '-'}"


def account_parts(account: str) -> tuple[str, str]:
    """Name, and the part of the digest."""
    name, _, digest = account.partition(" ")
    return name, digest or "-"


ANYONE = Tenant("-")


class Keys:
    """Finds the Tenant of a caller's headers. `closed`: no request is admitted while there are no keys."""

    def __init__(self, tenants: Iterable[Tenant] = (), closed: bool = False) -> None:
        self.tenants, self.closed = tuple(tenants), closed
        self.required = bool(self.tenants) or closed
        self.limited = any(tenant.limits is not None for tenant in self.tenants)
        self._by_digest = {tenant.digest: tenant for tenant in self.tenants}

    def tenant(self, headers: Mapping[str, str]) -> Tenant:
        """Raises ApiError (401), which does not tell which keys exist. `headers`: names in lower case."""
        if not self.required:
            return ANYONE
        found = self.owner(presented_key(headers))
        if found is None:
            raise unauthorized("it is not known here.")
        return found

    def owner(self, key: str) -> Tenant | None:
        """None: the key is not known."""
        return self._by_digest.get(hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest())


def presented_key(headers: Mapping[str, str]) -> str:
    """The one key in the headers. Raises ApiError (401). An authorization by another scheme is no key."""
    if own := headers.get(GATEWAY_KEY, "").strip():
        return own
    given = named_keys(headers)
    if len({*given.values()}) > 1:
        raise unauthorized(f"the headers {' and '.join(given)} have different keys; send one.")
    if not given:
        raise unauthorized("there is none. Send 'authorization: Bearer <key>', x-api-key or api-key.")
    return next(iter(given.values()))


def named_keys(headers: Mapping[str, str]) -> Mapping[str, str]:
    """Keys in the headers of the three dialects, by name."""
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    found = {"authorization": bearer.strip()} if scheme.lower() == "bearer" else {}
    found |= {name: headers[name].strip() for name in ("x-api-key", "api-key") if name in headers}
    return {name: key for name, key in found.items() if key}


def sent_keys(headers: Mapping[str, str]) -> list[str]:
    """Texts in the headers of keys, whatever they are."""
    return [headers[name].rpartition(" ")[2] for name in KEY_HEADERS if name in headers]


def unauthorized(reason: str) -> ApiError:
    """Claude Code (2.1) repeats a 401 ten times, for minutes, unless told not to. LiteLLM (1.81) knows a wrong key by
    OpenAI's first words alone."""
    headers = {"www-authenticate": "Bearer", "x-should-retry": "false"}
    return ApiError(401, f"Incorrect API key provided: {reason}", code="invalid_api_key", headers=headers)


@dataclass(frozen=True, slots=True)
class GroupMember:
    """A key: name, SHA-256 digest and configured cache group."""

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
        secret, named = self._secret, member.label.encode()
        if not secret:
            secret = b"".join(sorted(self._digests.get(member.label, [member.digest])))
        elif member.group is None:
            named += member.digest
        return hmac.new(secret, named, hashlib.sha256).hexdigest()[:SALT_CHARACTERS]
