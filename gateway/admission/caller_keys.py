"""A caller's own key for a provider, passed on to pools with `api_key: caller`.

Rules:
- The key lives as long as its request, in the headers of the request and in the backends made for it. It is in no repr,
  and no name of a cache, a label or a log line is made of it but by `cache_group`, a keyed hash.
- A caller's own key is in `authorization`, `x-api-key` or `api-key`. Where the gateway itself has keys, its key is in
  `x-firsttoken-key` then: without that header, the key in the others is the gateway's, and is never passed on. Nor is a
  key that the gateway knows as one of its own, nor a placeholder.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256

from backends.secrets import is_secret
from gateway.admission.auth import SALT_CHARACTERS, Keys, named_keys, unauthorized
from gateway.api.api_error import ApiError
from gateway.api.inference_request import GATEWAY_KEY

NO_KEY = "it takes the caller's own key, and there is none"


@dataclass(frozen=True, slots=True)
class CallerKey:
    """`header`: in which the caller has sent the key."""

    header: str
    secret: str = field(repr=False)

    def cache_group(self, group: str) -> str:
        """The name of a provider's caches for this key, within a tenant's group. An API's cache has no index here."""
        return hmac.new(self.secret.encode(), group.encode(), sha256).hexdigest()[:SALT_CHARACTERS]


def caller_key(headers: Mapping[str, str], keys: Keys) -> CallerKey | None:
    """The caller's own key; None: there is none, or more than one."""
    if keys.required and GATEWAY_KEY not in headers:
        return None
    given = {name: key for name, key in named_keys(headers).items() if is_secret(key) and not keys.owner(key)}
    return CallerKey(*next(iter(given.items()))) if len({*given.values()}) == 1 else None


def key_missing(keys: Keys) -> ApiError:
    """401 for a caller without an own key, where every server wants one."""
    beside = f", and the gateway's key in {GATEWAY_KEY}" if keys.required else ""
    return unauthorized(
        f"send your own key for the provider, and one alone, in 'authorization: Bearer <key>' or x-api-key{beside}."
    )
