"""The prefix blocks of a prompt, computed piece by piece.

A block is so many consecutive token ids; its hash covers the hash of the block before it, as in vLLM's
`hash_block_tokens`: equal hash, equal prompt up to there. The first block covers a hash of the cache
group, so tenants of different groups share none. Hashes depend on nothing else: replicas of the gateway
agree on them. blake2b, 0.5 us a block: Python's own hash of a tuple takes 0.2, but promises nothing
across versions, and a hash of text is salted per process.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple

from gateway.estimate.prompt import ID_BYTES

HASH_BYTES = 8


class Prefix(NamedTuple):
    """A prompt up to the end of one piece."""

    blocks: bytes  # hashes of the blocks that end within this piece
    parent: bytes  # hash of the last block so far
    tail: bytes  # ids after it: less than a block
    tokens: int  # so far
    text: int  # of these, not template


@lru_cache(maxsize=4096)
def start(cache_group: str) -> Prefix:
    """Before the first piece."""
    return Prefix(b"", blake2b(cache_group.encode(), digest_size=HASH_BYTES).digest(), b"", 0, 0)


def extend(prefix: Prefix, template: bytes, ids: bytes, block_size: int) -> Prefix:
    """The prefix, the template's tokens that open a message (or none), and the piece's own."""
    pending = prefix.tail + template + ids
    width, parent, blocks = block_size * ID_BYTES, prefix.parent, []
    full = len(pending) - len(pending) % width
    for at in range(0, full, width):
        parent = blake2b(parent + pending[at : at + width], digest_size=HASH_BYTES).digest()
        blocks.append(parent)
    text = len(ids) // ID_BYTES
    tokens = prefix.tokens + len(template) // ID_BYTES + text
    return Prefix(b"".join(blocks), parent, pending[full:], tokens, prefix.text + text)
