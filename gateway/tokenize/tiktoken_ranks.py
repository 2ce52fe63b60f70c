"""The rank files of the bundled tiktoken encodings, packed: nothing is downloaded, ever.

A rank file lists a vocabulary's tokens in order of rank, base64, one a line. Packed, it is a gzip of
three runs of bytes: the number of tokens (4, little endian), their lengths (1 each), the tokens. That
is half the size of the compressed text and loads in a third of the time. `text` gives the original
back, byte for byte, so that its published SHA-256 can be held against it.
"""

from __future__ import annotations

import gzip
from base64 import b64decode, b64encode
from importlib import resources
from itertools import accumulate, pairwise


def load(name: str) -> dict[bytes, int]:
    """Rank by token, of a bundled encoding."""
    return unpack(resources.files("gateway.tokenize").joinpath("data", f"{name}.ranks.gz").read_bytes())


def unpack(packed: bytes) -> dict[bytes, int]:
    """Rank by token, in order of rank."""
    raw = gzip.decompress(packed)
    count = int.from_bytes(raw[:4], "little")
    ends = accumulate(raw[4 : 4 + count], initial=4 + count)
    return {raw[start:end]: rank for rank, (start, end) in enumerate(pairwise(ends))}


def pack(text: bytes) -> bytes:
    """A rank file, packed. The same text gives the same bytes."""
    tokens = []
    for rank, line in enumerate(text.splitlines()):
        token, number = line.split()
        if int(number) != rank:
            raise ValueError(f"line {rank + 1} has rank {int(number)}; ranks must count up from 0")
        tokens.append(b64decode(token))
    lengths = bytes(len(token) for token in tokens)
    return gzip.compress(len(tokens).to_bytes(4, "little") + lengths + b"".join(tokens), compresslevel=9, mtime=0)


def text(ranks: dict[bytes, int]) -> bytes:
    """The rank file as published."""
    return b"".join(b"%s %d\n" % (b64encode(token), rank) for token, rank in ranks.items())
