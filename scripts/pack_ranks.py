"""Packs a published rank file of tiktoken for `gateway/tokenize/data`.

    python -m scripts.pack_ranks < o200k_base.tiktoken > gateway/tokenize/data/o200k_base.ranks.gz

A published file lists tokens in order of rank, base64, one a line. Packed: a gzip of the number of tokens (4 bytes,
little endian), their lengths (1 byte each) and the tokens. Half the size of the compressed text, and loads in a third
of the time.
"""

from __future__ import annotations

import gzip
import sys
from base64 import b64decode, b64encode


def pack_ranks(published: bytes) -> bytes:
    """The packed file: equal bytes for equal text."""
    tokens = []
    for rank, line in enumerate(published.splitlines()):
        token, number = line.split()
        if int(number) != rank:
            raise ValueError(f"line {rank + 1} has rank {int(number)}; ranks must count up from 0")
        tokens.append(b64decode(token))
    lengths = bytes(map(len, tokens))
    return gzip.compress(len(tokens).to_bytes(4, "little") + lengths + b"".join(tokens), compresslevel=9, mtime=0)


def published_ranks(ranks: dict[bytes, int]) -> bytes:
    """The rank file byte for byte as published, for comparison with its published SHA-256."""
    return b"".join(b"%s %d\n" % (b64encode(token), rank) for token, rank in ranks.items())


if __name__ == "__main__":
    sys.stdout.buffer.write(pack_ranks(sys.stdin.buffer.read()))
