"""Reads prompts: prefix blocks and token counts of known text, estimates of text that was not counted yet.

Rules:
- Known text is not read again. A part is known by its digest over the digests of all parts before: a conversation's
  next turn costs its new text. So does a part that has grown, as where a client writes the whole conversation into one
  message: its beginning is known by the digests of its segments. A segment of text that was counted is known behind any
  beginning.
- What nobody has counted is estimated (`gateway.tokenize.text_tokens`), short text apart, which is counted at once.
- `count` counts a prompt exactly, segment by segment, and teaches the estimates. A prompt read again is known as
  counted.
- Cache groups share nothing, not even counts of equal text: the time to read would tell a tenant which text another
  tenant has sent. Kept are digests, block hashes and counts, bounded in bytes, never text.

Prefix blocks are chained hashes of a prompt's text, by which a prefix in an engine's cache is found. A block is
BLOCK_BYTES consecutive bytes of the rendered prompt; its hash covers the hash of the block before, so equal hash means
equal prompt up to there. Blocks are of text, not of tokens: a prompt that nobody has sent before has its blocks at
once, whatever the tokenizer. Rules:
- The first block covers a hash of the cache group, so tenants of different groups share no block, and of the model's
  variant, which engines hash into their blocks too. Hashes depend on nothing else: replicas of the gateway agree on
  them.
- A message opens with its role. Token ids, and media, count by their ids. The bytes that mark both occur in no UTF-8.
- The hash is BLAKE2b with 8 bytes of digest; a block and the hash before it fill one of its input blocks.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from hashlib import blake2b
from struct import iter_unpack
from typing import Any, NamedTuple

import msgspec

from gateway.caches import GenerationalCache
from gateway.strict_json import encode
from gateway.tokenize.media import TILES, MediaFamily
from gateway.tokenize.prompt import Piece, Prompt
from gateway.tokenize.text_tokens import TextModels, TextShape
from gateway.tokenize.tokenizers import ID_BYTES, Encoder
from policies.latency.token_counts import PER_MESSAGE
from policies.prompt_outline import (
    EMPTY,
    ROLES,
    SYSTEM,
    TOOLS,
    USER,
    Composition,
    PartOutline,
    PartRole,
    PromptOutline,
    TextWindow,
)
from policies.types import PartEnds, PrefixBlocks

BLOCK_BYTES = 120
HASH_BYTES = 8
BLOCK_TOKENS = BLOCK_BYTES // 4  # in round figures: the measure of a block before anything is known of its text
ROLE, IDS = b"\xff", b"\xfe"

_hash = partial(blake2b, digest_size=HASH_BYTES)  # 0.35 us, a tenth less than within a function


@dataclass(frozen=True, slots=True)
class BlockChain:
    """The text of a prompt up to some place."""

    blocks: bytes  # hashes of the blocks that end in the last part
    parent: bytes  # hash of the last block so far
    tail: bytes = b""  # text after the last block: less than a block
    size: int = 0  # bytes so far


@lru_cache(maxsize=256)
def start(cache_group: str, variant: str = "") -> BlockChain:
    """The empty prompt. A process serves few groups and variants at a time."""
    seed = f"{cache_group}\0{variant}" if variant else cache_group
    return BlockChain(b"", _hash(seed.encode()).digest())


def extend(chain: BlockChain, text: bytes, known: bytes = b"") -> BlockChain:
    """Append the text of a part. `known`: hashes of its first blocks, which are not computed again."""
    pending, parent = chain.tail + text, known[-HASH_BYTES:] or chain.parent
    full = len(pending) - len(pending) % BLOCK_BYTES
    cut = iter_unpack(f"{BLOCK_BYTES}s", pending[len(known) // HASH_BYTES * BLOCK_BYTES : full])
    blocks = [parent := _hash(parent + block).digest() for (block,) in cut]
    return BlockChain(known + b"".join(blocks), parent, pending[full:], chain.size + len(text))


def opening(chain: BlockChain, blocks: bytes, size: int) -> bytes:
    """Of the `blocks` of a part appended to `chain`, those that end in the first `size` bytes of the part."""
    return blocks[: (len(chain.tail) + size) // BLOCK_BYTES * HASH_BYTES]


SHORT = 256  # bytes: a count takes 10 us, an estimate 5
OPENED = 300_000  # bytes of a prompt whose next text is cut on the event loop: 0.2 ms of common text, 40 without spaces
KNOWN_SAVES = 0.75  # of the time to read text
TEMPLATE_END = 96  # bytes at the end of a system message by which it is known again
PREFIX_OVERHEAD = 760  # bytes of a cache entry besides hashes, tail and ends (tracemalloc)
END_BYTES = 140  # of the end of a piece (tracemalloc)
COUNT_BYTES = 170  # of a cache entry (tracemalloc)


class TokenizerConfig(NamedTuple):
    """Settings of a pool. Pools with equal settings see a prompt alike."""

    tokenizer: str = "o200k_base"
    template: int = int(PER_MESSAGE)  # tokens which the chat template adds to a message
    media: MediaFamily | None = None  # of the model; None for prompts without media, on which pools agree then
    variant: str = ""  # of the model


@dataclass(slots=True)
class PromptText:
    """A prompt to be read for some pools of a route."""

    prompt: Prompt
    pools: Sequence[str]
    cache_group: str = ""  # digests and counts are shared within the group
    key: str = ""  # API key: name of the learned weights
    variants: Mapping[str, str] = field(default_factory=dict)  # of the model, by pool
    job_class: str = ""  # of the request


@dataclass(slots=True)
class Prefix:
    """A prompt up to the end of a part. Shared by requests: nothing is assigned to after construction."""

    chain: BlockChain
    tokens: float = 0.0  # so far
    text: float = 0.0  # so far, without template tokens
    margin: float = 0.0  # of both; 0: counted
    ends: Sequence[tuple[int, float]] = ()  # bytes and tokens so far, at the end of each piece of the last part
    role: PartRole = USER  # of the last part
    part: int = 0  # digest of the last part's text
    composition: Composition = EMPTY  # so far
    opening: int = 0  # digest of the first message of the user
    template: int = 0  # of the end of the last system message before it


@dataclass(slots=True)
class OpenedPart:
    """A part that is cut into pieces. `known`: hashes of the blocks of its beginning, where that was read before."""

    pieces: Sequence[Piece]
    digest: int = 0  # of all pieces but the last, behind the parts before; 0: there is one piece
    known: bytes = b""


@dataclass(slots=True)
class Position:
    """A place between two parts of a prompt."""

    config: TokenizerConfig
    digest: int  # of the chain of parts
    end: Prefix
    parts: list[Prefix]
    opened: OpenedPart | None = None  # the next part

    def add(self, digest: int, prefix: Prefix) -> None:
        self.digest, self.end = digest, prefix
        self.parts.append(prefix)

    def blocks(self, tokens: int) -> PrefixBlocks:
        """`tokens`: of the prompt, by the engine's count."""
        hashes, depths, found = array("Q"), list[float](), list[float]()
        for part in self.parts:
            hashes.frombytes(part.chain.blocks)
            for size, so_far in part.ends:
                depths.append(size / BLOCK_BYTES)
                found.append(so_far)
        if not self.end.chain.size:
            return PrefixBlocks(hashes, BLOCK_TOKENS)
        return PrefixBlocks(hashes, BLOCK_TOKENS, tokens / (depths[-1] * BLOCK_TOKENS), PartEnds(depths, found))


class PromptReader:
    """Safe for several threads."""

    def __init__(self, encoders: Callable[[str], Encoder], cache_bytes: int) -> None:
        self._encoders = encoders
        self._models = TextModels()
        self._prefixes: GenerationalCache[Prefix] = GenerationalCache(cache_bytes * 5 // 8, _prefix_bytes)
        self._openings: GenerationalCache[bytes] = GenerationalCache(cache_bytes // 8, _opening_bytes)
        self._counts: GenerationalCache[int] = GenerationalCache(cache_bytes // 4, lambda count: COUNT_BYTES)

    @property
    def cached_bytes(self) -> int:
        return self._prefixes.size + self._openings.size + self._counts.size

    def recognise(self, config: TokenizerConfig, text: PromptText, *, counted: bool = False) -> Position:
        """The end of the longest run of known parts. `counted`: of parts that were counted."""
        found, end, parts = hash((config, text.cache_group)), None, list[Prefix]()
        for part in text.prompt.digests:
            digest = hash((found, part))
            known = self._prefixes.get(digest)
            if known is None or (counted and known.margin):
                break
            found, end = digest, known
            parts.append(known)
        return Position(config, found, end or Prefix(start(text.cache_group, config.variant)), parts)

    def unread(self, position: Position, text: PromptText) -> int:
        """Work of `read`, in bytes of long text. Opens the next part if it is one text, whose end alone may be new."""
        part, prompt = len(position.parts), text.prompt
        effort = prompt.effort_from(part)
        if 0 < effort <= OPENED and prompt.is_text(part):
            position.opened = self._open(position, prompt.pieces(part))
            effort -= round(len(position.opened.known) // HASH_BYTES * BLOCK_BYTES * KNOWN_SAVES)
        return effort

    def read(self, position: Position, text: PromptText) -> None:
        """Go on to the end of the prompt, and remember it."""
        if len(position.parts) < len(text.prompt.digests):
            for part, opened in self._rest(position, text):
                self._append(position, part, opened, text)

    def count(self, position: Position, text: PromptText) -> Iterator[None]:
        """The same, after an exact count: yields after each segment and each part."""
        tokenizer = position.config.tokenizer
        for part, opened in self._rest(position, text):
            for segment in [piece.span for piece in opened.pieces if isinstance(piece.span, str)]:
                if segment and self._counts.get(hash((tokenizer, text.cache_group, segment))) is None:
                    found = self._count(tokenizer, segment, text.cache_group)
                    self._models.learn(text.key, tokenizer, TextShape(segment.encode()), found)
                    yield
            self._append(position, part, opened, text)
            yield

    def counted_text(self, digest: int) -> int:
        """Tokens of the text of a prompt that was counted; 0: it was not, or is forgotten."""
        end = self._prefixes.get(digest)
        return 0 if end is None or end.margin else round(end.text)

    def outline(self, position: Position, text: PromptText, tokens: int, blocks: PrefixBlocks) -> PromptOutline:
        """The outline of a prompt that was read; by an exact count, where there is one by now. `tokens`: of the prompt
        as the engine counts, by the estimate."""
        if position.end.margin and (counted := self.counted_text(position.digest)):
            tokens = round(tokens * counted / position.end.text)
            position = self.recognise(position.config, text)
            blocks = position.blocks(tokens)
        parts, digests, end = list[PartOutline](), array("q"), position.end
        for each in position.parts:
            parts.append(PartOutline(each.part, each.role, each.tokens, each.chain.size))
            digests.append(each.part)
        known = end.composition, end.opening, end.template
        read = partial(read_window, text.prompt)
        return PromptOutline(parts, digests, *known, blocks.hashes, blocks.tokens, tokens, read)

    def _rest(self, position: Position, text: PromptText) -> Iterator[tuple[int, OpenedPart]]:
        """The parts from a position on, with their digests."""
        prompt, family = text.prompt, position.config.media or TILES
        prompt.rewind()
        for part in range(len(position.parts), len(prompt.digests)):
            opened, position.opened = position.opened, None
            yield prompt.digests[part], opened or self._open(position, prompt.pieces(part, family))

    def _open(self, position: Position, pieces: Sequence[Piece]) -> OpenedPart:
        if len(pieces) == 1:
            return OpenedPart(pieces)
        digests, found = list[int](), position.digest
        for piece in pieces[:-1]:  # the last one may grow
            digests.append(found := hash((found, piece.role, type(piece.span), piece.span)))
        known = next(filter(None, map(self._openings.get, reversed(digests))), b"")
        return OpenedPart(pieces, found, known)

    def _append(self, position: Position, part: int, opened: OpenedPart, text: PromptText) -> None:
        digest, end = hash((position.digest, part)), position.end
        tokens, counted, margin, written = end.tokens, end.text, end.margin, list[bytes]()
        size, ends, media = end.chain.size, list[tuple[int, float]](), 0.0
        for piece in opened.pieces:
            if piece.role is not None:
                tokens += position.config.template
                written.append(ROLE + piece.role.encode())
                size += len(written[-1])
            raw = piece.span.encode() if isinstance(piece.span, str) else IDS + piece.span
            found, doubt = self._size(position.config.tokenizer, piece.span, raw, text)
            tokens, counted, margin = tokens + found, counted + found, margin + doubt
            if isinstance(piece.span, bytes) and text.prompt.messages:
                media += found
            written.append(raw)
            size += len(raw)
            ends.append((size, tokens))
        known, whole = self._prefixes.get(digest), b"".join(written)
        chain = self._extended(end.chain, whole, opened, ends) if known is None else known.chain
        role, named = _role(opened.pieces[0].role, text.prompt), hash(whole)
        first, template = _names(end, role, named, whole)
        composition = end.composition.with_part(role, tokens - end.tokens - media, media)
        prefix = Prefix(chain, tokens, counted, margin, ends, role, named, composition, first, template)
        self._prefixes.put(digest, prefix)
        position.add(digest, prefix)

    def _extended(
        self, chain: BlockChain, text: bytes, opened: OpenedPart, ends: Sequence[tuple[int, float]]
    ) -> BlockChain:
        """The chain with the text of a part, and the beginning of the part known from now on."""
        found = extend(chain, text, opened.known)
        if opened.digest:
            self._openings.put(opened.digest, opening(chain, found.blocks, ends[-2][0] - chain.size))
        return found

    def _size(self, tokenizer: str, span: str | bytes, raw: bytes, text: PromptText) -> tuple[float, float]:
        """Tokens of a piece, and the margin of the count. `raw`: bytes of the piece."""
        if isinstance(span, bytes):
            return len(span) // ID_BYTES, 0.0
        known = self._counts.get(hash((tokenizer, text.cache_group, span))) if span else 0
        if known is not None:
            return known, 0.0
        if len(raw) <= SHORT:
            return self._count(tokenizer, span, text.cache_group), 0.0
        return self._models.estimate(text.key, tokenizer, TextShape(raw))

    def _count(self, tokenizer: str, text: str, cache_group: str) -> int:
        found = self._encoders(tokenizer).count(text)
        self._counts.put(hash((tokenizer, cache_group, text)), found)
        return found


def _role(name: str | None, prompt: Prompt) -> PartRole:
    """Of a part whose first piece has this role. Definitions have none, and neither has a prompt without messages."""
    if name is None:
        return TOOLS if prompt.messages else USER
    return ROLES.get(name, USER)


def _names(before: Prefix, role: PartRole, digest: int, text: bytes) -> tuple[int, int]:
    """`opening` and `template` with one more part."""
    if before.opening:
        return before.opening, before.template
    template = hash(text[-TEMPLATE_END:]) if role is SYSTEM and len(text) > TEMPLATE_END else before.template
    return digest if role is USER else 0, template


def _opening_bytes(blocks: bytes) -> int:
    return COUNT_BYTES + len(blocks)


def _prefix_bytes(prefix: Prefix) -> int:
    return PREFIX_OVERHEAD + len(prefix.chain.blocks) + len(prefix.chain.tail) + END_BYTES * len(prefix.ends)


# -- windows of a prompt -----------------------------------------------------------------------------


LARGEST = 1_000_000  # bytes of a prompt of which windows are read: 3 ms
LARGEST_TOOLS = 200_000  # bytes of tool definitions whose order is told: 10 ms


def read_window(prompt: Prompt, part: int, start: int, block: int, before: int, size: int) -> TextWindow | None:
    """Read `size` bytes of a part that begins at byte `start`, from `before` bytes before `block` on. None: the prompt
    is too large."""
    if prompt.size > LARGEST:
        return None
    pieces = replace(prompt, decoded={}).pieces(part)  # of a copy: media are counted once
    role = b"" if pieces[0].role is None else ROLE + pieces[0].role.encode()
    spans = (piece.span.encode() if isinstance(piece.span, str) else b"\0" * ID_BYTES for piece in pieces)
    at = max(block * BLOCK_BYTES - start - before, 0)
    text = role + b"".join(spans)
    is_definitions = part < len(prompt.sources) - prompt.messages and prompt.messages > 0
    has_order = is_definitions and len(text) <= LARGEST_TOOLS
    tools = tool_set(prompt.sources[part]) if has_order else 0
    return TextWindow(text[at : at + size].decode(errors="replace"), tools)


def tool_set(source: Any) -> int:
    """Digest of tool definitions, whatever their order; 0: they are no list."""
    tools = msgspec.json.decode(encode(source))
    return hash(tuple(sorted(hash(encode(tool)) for tool in tools))) or 1 if isinstance(tools, list) else 0
