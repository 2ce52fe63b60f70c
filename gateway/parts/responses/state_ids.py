"""Ids of state that a backend keeps for a caller: responses, conversations, encrypted reasoning.

Such state lives at one endpoint, or with the provider behind it. The id that a caller gets names the endpoint, sealed:

    resp_<8 hex digits: the endpoint><24 hex digits: HMAC-SHA256 over endpoint and id><the backend's id without `resp_`>

Rules:
- The seal suffices to find the endpoint. Nothing is stored: every replica with the same keys and endpoints opens an id,
  also after a restart.
- The key of the seals belongs to a key of a caller (a tenant): an id of another tenant is as unknown as a forged one.
- Nothing of an endpoint's name can be read from an id: its digits are an HMAC too.
- A seal depends on nothing else: the same id of a backend always gets the same seal.
- A session may change models at any step: encrypted reasoning pins no request to a pool. Unknown reasoning (of a
  backend that the request cannot use, or forged) is left out like that of another maker. Unknown ids and compactions
  are refused, as the answer depends on them.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from typing import Any

from backends.translation.turn_state.seals import FOREIGN, is_seal, sealed
from gateway.api.api_error import ApiError

SEAL = 32  # hex digits, of which the endpoint's are
TAG = 8
KNOWN_TAGS = 1 << 14  # by tenant and endpoint
_PREFIX = re.compile(r"[a-z]{1,16}_")
_IDS, _CONTENTS = b"id", b"encrypted content"  # what is sealed


@dataclass(frozen=True, slots=True)
class StateHolder:
    """A backend's own id, and the endpoint with the state."""

    endpoint: str
    id: str


def seal_key(secret: bytes, tenant: str) -> bytes:
    """Key of the ids of a tenant. `secret`: configured, or the digest of the tenant's key; open gateways have none."""
    return hmac.digest(secret, b"state ids of " + tenant.encode(), "sha256")


class StateIds:
    """Seals and opens the ids of a tenant."""

    __slots__ = ("_key",)

    def __init__(self, key: bytes) -> None:
        self._key = key

    def seal(self, backend_id: str, endpoint: str) -> str:
        prefix = _prefix(backend_id)
        return prefix + self._mac(_IDS, endpoint, backend_id) + backend_id[len(prefix) :]

    def open(self, sealed: str, endpoints: Iterable[str]) -> StateHolder | None:
        """None for an id not sealed by this gateway for this tenant, and for an id of a removed endpoint."""
        prefix = _prefix(sealed)
        seal, rest = sealed[len(prefix) : len(prefix) + SEAL], sealed[len(prefix) + SEAL :]
        return self._find(_IDS, seal, prefix + rest, endpoints)

    def seal_content(self, content: str, endpoint: str) -> str:
        """Seal encrypted content, of which only the endpoint's provider has the key."""
        return self._mac(_CONTENTS, endpoint, content) + content

    def open_content(self, sealed: str, endpoints: Iterable[str]) -> StateHolder | None:
        return self._find(_CONTENTS, sealed[:SEAL], sealed[SEAL:], endpoints)

    def _find(self, kind: bytes, seal: str, backend_id: str, endpoints: Iterable[str]) -> StateHolder | None:
        if len(seal) < SEAL or not backend_id:
            return None
        given, digest = _bytes(seal), _digest(backend_id)
        for endpoint in endpoints:
            if seal.startswith(_tag(self._key, endpoint)) and hmac.compare_digest(
                given, self._mac_of(kind, endpoint, digest).encode()
            ):
                return StateHolder(endpoint, backend_id)
        return None

    def _mac(self, kind: bytes, endpoint: str, backend_id: str) -> str:
        return self._mac_of(kind, endpoint, _digest(backend_id))

    def _mac_of(self, kind: bytes, endpoint: str, digest: bytes) -> str:
        message = b"%b\0%b\0%b" % (kind, endpoint.encode(), digest)
        return _tag(self._key, endpoint) + hmac.digest(self._key, message, "sha256").hex()[: SEAL - TAG]


@lru_cache(KNOWN_TAGS)
def _tag(key: bytes, endpoint: str) -> str:
    return hmac.digest(key, b"endpoint\0" + endpoint.encode(), "sha256").hex()[:TAG]


# -- requests --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Home:
    """The pool of an endpoint, and the digest of the account and the model there."""

    pool: str
    maker: str


@dataclass(frozen=True, slots=True)
class OpenedState:
    """A body with the backends' own ids. `pinned`: the endpoint with the state; empty: any endpoint may serve.
    `readers`: by pool, the endpoint that can read the encrypted reasoning. `has_turns`: the body has sealed encrypted
    reasoning."""

    body: Mapping[str, Any]
    pinned: str = ""
    readers: Mapping[str, str] = field(default_factory=dict)
    has_turns: bool = False


def open_request(body: Mapping[str, Any], ids: StateIds, homes: Mapping[str, Home]) -> OpenedState:
    """`homes`: of all endpoints that may serve the request. Raises ApiError (404) for an unknown id."""
    opener = _Opener(ids, homes)
    changed: dict[str, Any] = {}
    if isinstance(given := body.get("previous_response_id"), str):
        changed["previous_response_id"] = opener.id(given, "previous_response_id", "Previous response")
    conversation = body.get("conversation")
    if isinstance(conversation, str):
        changed["conversation"] = opener.id(conversation, "conversation", "Conversation")
    elif isinstance(conversation, dict) and isinstance(given := conversation.get("id"), str):
        changed["conversation"] = {**conversation, "id": opener.id(given, "conversation", "Conversation")}
    items = body.get("input")
    if not isinstance(items, list) or not any(map(_encrypted, items)):
        return OpenedState({**body, **changed} if changed else body, opener.endpoint)
    items = [opener.compaction(item, f"input[{place}]") for place, item in enumerate(items)]
    reasoning = _Reasoning(ids, homes, opener.endpoint)
    changed["input"] = reasoning.opened(items)
    return OpenedState({**body, **changed}, opener.endpoint, reasoning.readers, reasoning.found)


def _encrypted(item: Any) -> bool:
    """True for encrypted content of a backend, not sealed by a translation."""
    content = item.get("encrypted_content") if isinstance(item, dict) else None
    return isinstance(content, str) and not is_seal(content)


def _is_reasoning(item: Any) -> bool:
    return _encrypted(item) and item.get("type") == "reasoning"


class _Opener:
    """Opens required state ids of a request, all of which must belong to a single endpoint."""

    def __init__(self, ids: StateIds, endpoints: Collection[str]) -> None:
        self.endpoint = ""
        self._ids, self._endpoints = ids, endpoints

    def id(self, sealed: str, param: str, what: str) -> str:
        code = f"{what.lower().replace(' ', '_')}_not_found"
        message = f"{what} with id '{sealed[:100]}' not found."
        return self._opened(self._ids.open, sealed, ApiError(404, message, code=code, param=param, logged=code))

    def compaction(self, item: Any, place: str) -> Any:
        """An item with a compacted history in the place of its turns, and any other than reasoning."""
        if not _encrypted(item) or _is_reasoning(item):
            return item
        code, param = "invalid_encrypted_content", f"{place}.encrypted_content"
        message = f"'{param}' was not given out by a backend that the request may use."
        unknown = ApiError(404, message, code=code, param=param, logged=code)
        return {**item, "encrypted_content": self._opened(self._ids.open_content, item["encrypted_content"], unknown)}

    def _opened(
        self, opened: Callable[[str, Iterable[str]], StateHolder | None], sealed: str, unknown: ApiError
    ) -> str:
        holder = opened(sealed, self._endpoints)
        if holder is None:
            raise unknown
        if self.endpoint not in ("", holder.endpoint):
            message = f"'{unknown.param}' belongs to another backend than what the request refers to before."
            raise ApiError(400, message, code="state_of_two_backends", param=unknown.param)
        self.endpoint = holder.endpoint
        return holder.id


class _Reasoning:
    """Seals encrypted reasoning for its maker; other pools get none (`backends.translation.turn_state.history`).
    Endpoints of a pool may not read each other's reasoning: the endpoint of the latest item gets its own. `pinned`: the
    only endpoint that can serve the request."""

    def __init__(self, ids: StateIds, homes: Mapping[str, Home], pinned: str) -> None:
        self.readers: dict[str, str] = {homes[pinned].pool: pinned} if pinned else {}
        self.found = False
        self._ids, self._homes = ids, homes

    def opened(self, items: Sequence[Any]) -> list[Any]:
        latest_first = [self._item(item) if _is_reasoning(item) else item for item in reversed(items)]
        return latest_first[::-1]

    def _item(self, item: Mapping[str, Any]) -> Mapping[str, Any]:
        self.found = True
        holder = self._ids.open_content(item["encrypted_content"], self._homes)
        home = self._homes[holder.endpoint] if holder is not None else None
        if holder is None or home is None or self.readers.setdefault(home.pool, holder.endpoint) != holder.endpoint:
            return {**item, "encrypted_content": FOREIGN}
        return {**item, "encrypted_content": sealed(home.maker, holder.id)}


def _prefix(backend_id: str) -> str:
    found = _PREFIX.match(backend_id)
    return found[0] if found else ""


def _digest(text: str) -> bytes:
    return sha256(_bytes(text)).digest()


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
