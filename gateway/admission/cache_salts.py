"""Under which name a key's prompts are cached: by engines, which mix it into the hashes of their blocks (`cache_salt`),
and by our own index of what was sent where. Keys of one name find each other's prefixes; others cannot.

Rules:
- A key has a name of its own, unless it says `cache_group`. A group that is called as a key is another name.
- A name is an HMAC-SHA256, so nobody can guess another's: of 128 bits, in hex, which every engine takes (vLLM refuses
  `@ / \\ NUL` and more than 128 characters) and which `backends.failures.scrub` takes for the key that it is.
- Without `state.cache_secret` it is keyed by the digests of the keys that share it: gateways of one configuration
  agree, today and after a restart, and a key that comes or goes empties the caches of its own group alone.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from typing import NamedTuple

CHARACTERS = 32


class GroupMember(NamedTuple):
    """A key. `digest`: its SHA-256, 32 bytes. `group`: the configured one."""

    name: str
    digest: bytes
    group: str | None = None


class CacheSalts:
    """`secret`: configured; empty: there is none. `members`: all keys of which a group's name is made."""

    def __init__(self, secret: str, members: Iterable[GroupMember]) -> None:
        self._secret = secret.encode()
        self._digests: dict[str, list[bytes]] = {}
        for member in members:
            self._digests.setdefault(_label(member), []).append(member.digest)

    def name(self, member: GroupMember) -> str:
        """Of the caches of this key, and of those that it shares them with."""
        label = _label(member)
        secret = self._secret or b"".join(sorted(self._digests.get(label, [member.digest])))
        return hmac.new(secret, label.encode(), hashlib.sha256).hexdigest()[:CHARACTERS]


def _label(member: GroupMember) -> str:
    return f"key {member.name}" if member.group is None else f"group {member.group}"
