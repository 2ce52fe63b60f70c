"""How a prompt is read in one lane: recognised part by part, opened where that ends, and read on from there. Pure.

What was read is named by a chain of digests: of a part, over those of all parts before it; of a piece, over those
of the part's pieces before it. The last piece of a part goes by the part's digest.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import NamedTuple
from zlib import crc32

from gateway.tokenize.prefix_blocks import Prefix, extend, start
from gateway.tokenize.prompt import NOT_TEXT, Piece, Prompt
from gateway.tokenize.tokenizers import Encoder

PIECE = 100  # bytes that could be tokenised while a piece is read whose ids are known

Find = Callable[[int], Prefix | None]  # by digest
FindIds = Callable[[int], bytes | None]  # packed token ids, by digest of tokenizer, cache group and text


@dataclass(eq=False, slots=True)
class TokenizerConfig:
    """Pools that see a prompt the same way; one object for all of them (`lane_of`)."""

    tokenizer: str
    block_size: int
    template: int
    digest: int


@cache
def lane_of(tokenizer: str, block_size: int, template: int) -> TokenizerConfig:
    return TokenizerConfig(tokenizer, block_size, template, hash((tokenizer, block_size, template)))


class Position(NamedTuple):
    """How far a prompt is known, in whole parts: the blocks of each, and where they end."""

    lane: TokenizerConfig
    digest: int
    blocks: list[bytes]
    end: Prefix


class TokenizeStep(NamedTuple):
    """A piece to be read. `ids` None: its text is to be tokenised, and its ids kept under `key`."""

    role: str | None
    text: str
    key: int
    ids: bytes | None
    digest: int
    ends: bool  # the part


class Tail(NamedTuple):
    """What is left behind a place. `blocks`: of the pieces that are known in the first part of it."""

    place: Position
    prefix: Prefix
    blocks: list[bytes]
    steps: list[TokenizeStep]


class Read(NamedTuple):
    """A place at the end of the prompt; and by digest what had not been known of it."""

    place: Position
    added: list[tuple[int, Prefix]]


def recognise(lane: TokenizerConfig, prompt: Prompt, cache_group: str, find: Find) -> Position:
    """As many parts as are known."""
    digest, end = hash((lane.digest, cache_group)), start(cache_group)
    blocks: list[bytes] = []
    for part in prompt.digests:
        key = hash((digest, part))
        found = find(key)
        if found is None:
            break
        digest, end = key, found
        blocks.append(found.blocks)
    return Position(lane, digest, blocks, end)


def open_rest(place: Position, prompt: Prompt, cache_group: str, find: Find, find_ids: FindIds) -> Tail:
    """The pieces of all other parts, but for those at their beginning that are known."""
    lane, digest, known, prefix = place
    blocks: list[bytes] = []
    steps: list[TokenizeStep] = []
    for part in range(len(known), len(prompt.digests)):
        chain, digest = digest, hash((digest, prompt.digests[part]))
        *pieces, last = prompt.pieces(part)
        for piece in pieces:
            chain = hash((chain, type(piece[1]), piece))  # bytes hash as the text does that they spell
            found = None if steps else find(chain)
            if found is None:
                steps.append(_step(piece, lane, cache_group, find_ids, chain, False))
            else:
                prefix = found
                blocks.append(found.blocks)
        steps.append(_step(last, lane, cache_group, find_ids, digest, True))
    return Tail(place, prefix, blocks, steps)


def _step(
    piece: Piece, lane: TokenizerConfig, cache_group: str, find_ids: FindIds, digest: int, ends: bool
) -> TokenizeStep:
    role, span = piece
    if isinstance(span, bytes):
        return TokenizeStep(role, "", 0, span, digest, ends)
    key = hash((lane.tokenizer, cache_group, span))
    return TokenizeStep(role, span, key, find_ids(key), digest, ends)


def effort(opened: Tail) -> int:
    """What it takes to read this, in bytes of text to be tokenised: those, of UTF-8 at most, and so many a piece."""
    found = PIECE * len(opened.steps)
    for step in opened.steps:
        if step.ids is None:
            found += len(step.text) if step.text.isascii() else 3 * len(step.text)
    return found


def read_on(opened: Tail, encoder: Encoder, texts: dict[int, bytes]) -> Read:
    """To the end. Changes nothing but `texts`, by key: what had to be tokenised."""
    (lane, digest, known, _), prefix, begun, steps = opened
    for step in steps:  # first all of it: the tokenizer leaves nothing of ours in the processor's caches
        if step.ids is None and step.key not in texts:
            texts[step.key] = encoder.pack(step.text)
    parts, pieces = known.copy(), begun.copy()
    added: list[tuple[int, Prefix]] = []
    for role, _, key, ids, digest, ends in steps:
        packed = texts[key] if ids is None else ids
        prefix = extend(prefix, b"" if role is None else _opening(role, lane.template), packed, lane.block_size)
        if not ends:
            pieces.append(prefix.blocks)
        else:
            if pieces:
                prefix = Prefix(b"".join((*pieces, prefix.blocks)), *prefix[1:])
                pieces.clear()
            parts.append(prefix.blocks)
        added.append((digest, prefix))
    return Read(Position(lane, digest, parts, prefix), added)


@lru_cache(maxsize=256)
def _opening(role: str, tokens: int) -> bytes:
    """Ids that stand for what a chat template puts around a message of this role."""
    return array("I", [NOT_TEXT | crc32(role.encode())]).tobytes() * tokens
