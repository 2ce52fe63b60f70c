"""Tokenizes a prompt incrementally: recognise known parts, encode new text, hash blocks from there on.

A known prefix is named by a chain of digests: a part by its digest over the digests of all parts before, a piece by its
digest over the part's pieces before. The last piece of a part goes by the part's digest. Kept are digests, block hashes
and token ids, bounded in bytes, never text.

Cache groups share nothing, not even token ids of equal text: the time to tokenize would tell a tenant which text
another tenant has sent.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from zlib import crc32

from gateway.tokenize.generational_cache import GenerationalCache
from gateway.tokenize.prefix_blocks import Prefix, extend, start
from gateway.tokenize.prompt import NOT_TEXT, Piece, Prompt
from gateway.tokenize.tokenizers import Encoder
from policies.latency.token_counts import PER_MESSAGE

PIECE_EFFORT = 100  # bytes encoded in the time which a piece takes besides
PREFIX_OVERHEAD = 300  # bytes of a cache entry besides hashes and tail (tracemalloc)
IDS_OVERHEAD = 150  # bytes of a cache entry besides ids (tracemalloc)


@dataclass(frozen=True, slots=True)
class TokenizerConfig:
    """Settings of a pool. Pools with equal settings see a prompt alike."""

    tokenizer: str = "o200k_base"
    block_size: int = 16
    template: int = int(PER_MESSAGE)  # tokens which the chat template adds to a message


@dataclass(slots=True)
class Position:
    """The end of the known parts of a prompt."""

    config: TokenizerConfig
    digest: int  # of the chain of parts
    blocks: list[bytes]  # block hashes by part
    prefix: Prefix

    @property
    def parts(self) -> int:
        return len(self.blocks)


@dataclass(slots=True)
class TokenizeStep:
    """A piece to be appended. `ids` None: the text must be encoded first."""

    piece: Piece
    ids: bytes | None
    ids_key: int  # digest of tokenizer, cache group and text
    digest: int
    ends_part: bool


@dataclass(slots=True)
class Tail:
    """The rest of a prompt after a position. `blocks`: of the pieces already known in the first unknown part."""

    position: Position
    prefix: Prefix
    blocks: list[bytes]
    steps: list[TokenizeStep]

    def effort(self) -> int:
        """Time to read the tail, in bytes of text to be encoded (an upper bound where not all is ASCII)."""
        texts = [step.piece.span for step in self.steps if step.ids is None]
        return PIECE_EFFORT * len(self.steps) + sum(len(text) * (1 if text.isascii() else 3) for text in texts)


class IncrementalTokenizer:
    """Tokenizes and remembers prompts. Safe for several threads."""

    def __init__(self, encoders: Callable[[str], Encoder], cache_bytes: int) -> None:
        self._encoders = encoders
        self._prefixes: GenerationalCache[Prefix] = GenerationalCache(cache_bytes // 2, _prefix_bytes)
        self._ids: GenerationalCache[bytes] = GenerationalCache(cache_bytes // 2, _ids_bytes)

    @property
    def cached_bytes(self) -> int:
        return self._prefixes.size + self._ids.size

    def recognise(self, config: TokenizerConfig, prompt: Prompt, cache_group: str) -> Position:
        """The end of the longest run of known parts."""
        digest, prefix = hash((config, cache_group)), start(cache_group)
        blocks: list[bytes] = []
        for part in prompt.digests:
            key = hash((digest, part))
            found = self._prefixes.get(key)
            if found is None:
                break
            digest, prefix = key, found
            blocks.append(found.blocks)
        return Position(config, digest, blocks, prefix)

    def open(self, position: Position, prompt: Prompt, cache_group: str) -> Tail:
        """Split the unknown parts into pieces, and recognise those at the beginning of the first."""
        digest, prefix = position.digest, position.prefix
        blocks: list[bytes] = []
        steps: list[TokenizeStep] = []
        for part in range(position.parts, len(prompt.digests)):
            chain, digest = digest, hash((digest, prompt.digests[part]))
            *pieces, last = prompt.pieces(part)
            for piece in pieces:
                chain = hash((chain, type(piece.span), piece.role, piece.span))  # equal bytes and text hash alike
                found = None if steps else self._prefixes.get(chain)
                if found is None:
                    steps.append(self._step(piece, position.config, cache_group, chain, ends_part=False))
                else:
                    prefix = found
                    blocks.append(found.blocks)
            steps.append(self._step(last, position.config, cache_group, digest, ends_part=True))
        return Tail(position, prefix, blocks, steps)

    def read(self, tail: Tail) -> Position:
        """Encode and hash the tail, and remember it. Returns the end of the prompt."""
        config, prefix = tail.position.config, tail.prefix
        if not tail.steps:
            return tail.position
        encoder = self._encoders(config.tokenizer)
        packed = [
            self._encoded(step, encoder) for step in tail.steps
        ]  # first: encoding evicts our data from CPU caches
        parts, pieces = tail.position.blocks.copy(), tail.blocks.copy()
        for step, ids in zip(tail.steps, packed, strict=True):
            role = step.piece.role
            opening = b"" if role is None else _opening(role, config.template)
            prefix = extend(prefix, opening, ids, config.block_size)
            pieces.append(prefix.blocks)
            if step.ends_part:
                if len(pieces) > 1:
                    prefix = replace(prefix, blocks=b"".join(pieces))
                parts.append(prefix.blocks)
                pieces.clear()
            self._prefixes.put(step.digest, prefix)
        return Position(config, tail.steps[-1].digest, parts, prefix)

    def _step(
        self, piece: Piece, config: TokenizerConfig, cache_group: str, digest: int, *, ends_part: bool
    ) -> TokenizeStep:
        if isinstance(piece.span, bytes):
            return TokenizeStep(piece, piece.span, 0, digest, ends_part)
        key = hash((config.tokenizer, cache_group, piece.span))
        return TokenizeStep(piece, self._ids.get(key), key, digest, ends_part)

    def _encoded(self, step: TokenizeStep, encoder: Encoder) -> bytes:
        ids = (
            self._ids.get(step.ids_key) if step.ids is None else step.ids
        )  # an equal piece may have been encoded since
        if ids is None:
            assert isinstance(step.piece.span, str)
            ids = encoder.pack(step.piece.span)
            self._ids.put(step.ids_key, ids)
        return ids


@lru_cache(maxsize=256)
def _opening(role: str, tokens: int) -> bytes:
    """Ids for the tokens which a chat template puts around a message of this role."""
    return array("I", [NOT_TEXT | crc32(role.encode())]).tobytes() * tokens


def _prefix_bytes(prefix: Prefix) -> int:
    return PREFIX_OVERHEAD + len(prefix.blocks) + len(prefix.tail)


def _ids_bytes(ids: bytes) -> int:
    return IDS_OVERHEAD + len(ids)
