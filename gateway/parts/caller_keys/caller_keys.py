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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256

from backends.scrubbing import is_secret
from gateway.admission.auth import SALT_CHARACTERS, Keys, named_keys, unauthorized
from gateway.api.api_error import ApiError
from gateway.api.inference_request import GATEWAY_KEY
from gateway.core.hooks import NO_HOOKS, Ask, Hooks, RoutePlan
from gateway.core.part import Part
from gateway.downstream.http_request import HttpRequest
from gateway.upstream.routed_request import Upstream
from gateway.wiring import Core

NO_KEY = "it takes the caller's own key, and there is none"


class CallerKeys(Part):
    """Of routes with a pool that takes callers' own keys. Knows the gateway's keys by the Runtime in force."""

    def __init__(self, core: Core) -> None:
        self._runtime = core.runtime

    def on(self, plan: RoutePlan) -> Hooks:
        pools = plan.runtime.config.pools
        taking = frozenset(pool for pool in plan.route.pools if pools[pool].caller_keys)
        return Hooks(fit=partial(fit, taking), sends=self.upstreams) if taking else NO_HOOKS

    def upstreams(self, http: HttpRequest, upstreams: Mapping[str, Upstream]) -> Mapping[str, Upstream]:
        """With the caller's own key for the pools that take it."""
        key = caller_key(http.headers, self._runtime.current.keys)
        return upstreams if key is None else KeyedUpstreams(upstreams, key.header, key.secret)


def fit(taking: frozenset[str], ask: Ask) -> None:
    """Keep the caches of the caller's own key apart; without one, leave out the pools that take it. Raises ApiError
    (401) where no other pool is left."""
    request, keys = ask.request, ask.runtime.keys
    if (key := caller_key(ask.http.headers, keys)) is not None:
        request.cache_groups = dict.fromkeys(taking, key.cache_group(ask.tenant.cache_group))
    elif taking.issuperset(ask.route.pools):
        raise key_missing(keys)
    else:
        request.unfit = {**request.unfit, **dict.fromkeys(taking, NO_KEY)}


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


class KeyedUpstreams(Mapping[str, Upstream]):
    """The upstreams of a request with a caller's own key, by endpoint id. `header`: in which the caller has sent it."""

    def __init__(self, upstreams: Mapping[str, Upstream], header: str, key: str) -> None:
        self._upstreams = upstreams
        self._header, self._key = header, key
        self._keyed: dict[str, Upstream] = {}

    def __getitem__(self, endpoint: str) -> Upstream:
        if (known := self._keyed.get(endpoint)) is not None:
            return known
        found = self._upstreams[endpoint]
        if not found.backend.keyed_by_callers:
            return found
        keyed = replace(found, backend=found.backend.with_key(self._header, self._key))
        return self._keyed.setdefault(endpoint, keyed)

    def __iter__(self) -> Iterator[str]:
        return iter(self._upstreams)

    def __len__(self) -> int:
        return len(self._upstreams)
