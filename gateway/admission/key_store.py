"""Callers' keys that are made and revoked while gateways run: what every store of them keeps, Redis or a file.

Rules:
- A key is stored as JSON with the digest of the key, never the key. It is its name and its digest.
- `firsttoken keys` and the admin port write; gateways read (`gateway.admission.keyring`).
- A store holds MAX_KEYS, so that what a gateway reads after a change is bounded.
- A store counts its changes, and has a random name since its birth: one that was lost and begun again is another one.
  One that went back and was changed since may have as many changes as before, and another latest one.
- A revocation is kept for REVOKED_FOR, and as long as the revoked key is stored: gateways refuse its digest, also where
  a failover or a restore brings the key back.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from secrets import token_hex
from time import time
from typing import Protocol

from pydantic import ValidationError

from gateway.cluster.redis_client import Unavailable
from gateway.config.models import Key

log = logging.getLogger("firsttoken")

MAX_KEYS = 5_000
MAX_REVOKED = 5_000
REVOKED_FOR = 30 * 86_400.0  # s
PATIENCE = 5.0  # s of an operator, for a store to answer


class StoreFull(Exception):
    """Refuses one more than MAX_KEYS."""


class UnusableFile(Unavailable):
    """The file of keys cannot be read or written, or is none of ours."""


@dataclass(frozen=True, slots=True)
class Revocation:
    """A digest that opens nothing any more. `until`: Unix time, s."""

    name: str
    sha256: str
    until: float


@dataclass(frozen=True, slots=True)
class StoredKeys:
    """`keys` in order of name. `birth`: random name of the store; empty: made before 0.2.0. `changes`: since then;
    `latest`: random name of the last one, where the store has it."""

    keys: Sequence[Key] = ()
    revoked: Sequence[Revocation] = ()
    birth: str = ""
    changes: int = 0
    latest: str = ""
    refused: frozenset[str] = field(init=False, default=frozenset())  # digests

    def __post_init__(self) -> None:
        object.__setattr__(self, "refused", frozenset(each.sha256 for each in self.revoked))

    @property
    def by_name(self) -> Mapping[str, Key]:
        return {key.name: key for key in self.keys}


class KeyStore(Protocol):
    """Every method may raise Unavailable: the store cannot be asked now."""

    name: str

    async def version(self) -> Hashable:
        """Differs after every change. None: nothing is stored."""
        ...

    async def read(self) -> StoredKeys: ...

    async def add(self, key: Key) -> bool:
        """False if the name is taken. Raises StoreFull."""
        ...

    async def replace(self, before: Key, after: Key) -> bool:
        """False if the key is not `before` any more."""
        ...

    async def revoke(self, name: str) -> bool:
        """Deletes a stored key, whose digest is refused from now on. False if there is no key of this name."""
        ...

    async def refuse(self, keys: Iterable[Key]) -> None:
        """Refuses the digests of these keys from now on, stored or not."""
        ...


def new_birth() -> str:
    return token_hex(8)


def revocation(name: str, sha256: str) -> Revocation:
    return Revocation(name, sha256, time() + REVOKED_FOR)


def text_of(key: Key) -> str:
    return key.model_dump_json(exclude_defaults=True)


def parse_keys(stored: Mapping[str, str | bytes]) -> list[Key]:
    return [key for name in sorted(stored) if (key := parse_key(name, stored[name])) is not None]


def parse_key(name: str, text: str | bytes) -> Key | None:
    try:
        key = Key.model_validate_json(text)
    except ValidationError:
        log.warning("keys: the stored key '%s' is not a valid key of this version; ignored", name)
        return None
    return key if key.name == name else None
