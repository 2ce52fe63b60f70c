"""Estimates prompt tokens and prefix blocks for every pool of a route, before any engine sees the prompt.

recognise -> encode -> hash, once for all pools with equal tokenizer settings. Rules:
- Known text is not read again. A conversation's next turn costs its new text; known text behind a new beginning costs
  its block hashes, not its encoding.
- Small new text is encoded here and now, with no task switch; large new text in a thread, segment by segment. What is
  small follows the measured speed of the encoder.
- A known prefix is named by a chain of digests: a part by its digest over the digests of all parts before, a piece by
  its digest over the part's pieces before. The last piece of a part goes by the part's digest. Kept are digests, block
  hashes and token ids, bounded in bytes, never text.
- Cache groups share nothing, not even token ids of equal text: the time to tokenize would tell a tenant which text
  another tenant has sent.

A block is `block_size` consecutive token ids; its hash covers the hash of the block before, as in vLLM's
`hash_block_tokens`: equal hash, equal prompt up to there. The first block covers a hash of the cache group, so tenants
of different groups share no block, and of the LoRA adapter, which engines hash into their blocks too. Hashes depend on
nothing else: replicas of the gateway agree on them. The hash is SipHash-1-3 under a fixed key, as CPython computes it
for .pyc files (PEP 552): 0.12 us a block against 0.45 of blake2b.
"""

from __future__ import annotations

import asyncio
from _imp import source_hash
from array import array
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from struct import iter_unpack
from typing import Generic, TypeVar
from zlib import crc32

from gateway.tokenize.media import NOT_TEXT, TILES, MediaFamily
from gateway.tokenize.prompt import Piece, Prompt
from gateway.tokenize.tokenizers import ID_BYTES, Encoder, encoder
from policies.latency.token_counts import PER_MESSAGE, TokenScale
from policies.types import PoolEstimate, PrefixBlocks, PromptEstimate

INLINE = 0.0006  # s of encoding on the event loop: 10,000 bytes by tiktoken
OPEN = 200_000  # bytes of JSON to be decoded: 0.6 ms
PART_EFFORT = 500  # bytes of JSON decoded in the time which a part takes besides
CACHE = 64_000_000  # bytes
WORKERS = 2  # threads
PIECE_EFFORT = 4e-6  # s which a piece takes besides its encoding
PREFIX_OVERHEAD = 300  # bytes of a cache entry besides hashes and tail (tracemalloc)
IDS_OVERHEAD = 150  # bytes of a cache entry besides ids (tracemalloc)
_KEY = 0x66697273_74746F6B  # "firsttok"
NO_ADAPTERS: Mapping[str, str] = {}

Value = TypeVar("Value")


# -- known parts -------------------------------------------------------------------------------


class GenerationalCache(Generic[Value]):
    """Holds values of at most `limit` in total, measured by `size` (default: the number of entries).

    A full young generation becomes the old one, and a hit in the old generation moves the entry to the young: a hit
    costs one dict lookup. Safe for several threads without a lock: of two changes at once one may be lost or miscounted
    until the next generation, and is then computed again.
    """

    def __init__(self, limit: int, size: Callable[[Value], int] = lambda value: 1) -> None:
        self._limit = limit // 2
        self._size_of = size
        self.clear()

    def clear(self) -> None:
        self._young: dict[int, Value] = {}
        self._old: dict[int, Value] = {}
        self._young_size = self._old_size = 0

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    @property
    def size(self) -> int:
        return self._young_size + self._old_size

    def get(self, key: int) -> Value | None:
        value = self._young.get(key)
        if value is None and (value := self._old.pop(key, None)) is not None:
            self._old_size -= self._size_of(value)
            self.put(key, value)
        return value

    def get_all(self, keys: Sequence[int]) -> list[Value | None]:
        """The values in order of `keys`; None for an unknown key."""
        found = list(map(self._young.get, keys))
        if self._old and None in found:
            return list(map(self.get, keys))
        return found

    def put(self, key: int, value: Value) -> None:
        """Add or replace an entry; a value larger than a generation is not kept."""
        size = self._size_of(value)
        if size > self._limit:
            return
        replaced = self._young.pop(key, None)
        if replaced is not None:
            self._young_size -= self._size_of(replaced)
        if self._young_size + size > self._limit:
            self._old = self._young
            self._old_size = self._young_size
            self._young = {}
            self._young_size = 0
        self._young[key] = value
        self._young_size += size


@dataclass(slots=True)
class Prefix:
    """A prompt up to the end of a piece or part."""

    blocks: bytes  # hashes of the blocks which end within this piece or part, 8 bytes each
    parent: bytes  # hash of the last block so far
    tail: bytes  # ids after the last block: less than a block
    tokens: int  # so far
    text: int  # so far, without template tokens


def start(cache_group: str, adapter: str = "") -> Prefix:
    """The empty prefix."""
    seed = f"{cache_group}\0{adapter}" if adapter else cache_group
    return Prefix(b"", source_hash(_KEY, seed.encode()), b"", 0, 0)


def extend(prefix: Prefix, template: bytes, ids: bytes, block_size: int) -> Prefix:
    """Append the template's ids of a message opening (may be empty) and the ids of a piece."""
    pending, parent, width = prefix.tail + template + ids, prefix.parent, block_size * ID_BYTES
    full = len(pending) - len(pending) % width
    blocks = [parent := source_hash(_KEY, parent + block) for (block,) in iter_unpack(f"{width}s", pending[:full])]
    return Prefix(
        blocks=b"".join(blocks),
        parent=parent,
        tail=pending[full:],
        tokens=prefix.tokens + (len(template) + len(ids)) // ID_BYTES,
        text=prefix.text + len(ids) // ID_BYTES,
    )


@dataclass(frozen=True, slots=True)
class TokenizerConfig:
    """Settings of a pool. Pools with equal settings see a prompt alike."""

    tokenizer: str = "o200k_base"
    block_size: int = 16
    template: int = int(PER_MESSAGE)  # tokens which the chat template adds to a message
    media: MediaFamily | None = None  # of the model; None for prompts without media, on which pools agree then
    adapter: str = ""  # LoRA adapter


@dataclass(slots=True)
class Position:
    """The end of the known parts of a prompt."""

    config: TokenizerConfig
    digest: int  # of the chain of parts
    blocks: list[bytes]  # block hashes by part
    prefix: Prefix


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

    def effort(self, speed: float) -> float:
        """Seconds to read the tail by an encoder of this speed (an upper bound where not all is ASCII)."""
        texts = [step.piece.span for step in self.steps if step.ids is None]
        size = sum(len(text) * (1 if text.isascii() else 3) for text in texts)
        return PIECE_EFFORT * len(self.steps) + size / speed


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
        digest = hash((config, cache_group))
        prefix: Prefix | None = None
        blocks: list[bytes] = []
        for part in prompt.digests:
            key = hash((digest, part))
            found = self._prefixes.get(key)
            if found is None:
                break
            digest, prefix = key, found
            blocks.append(found.blocks)
        return Position(config, digest, blocks, prefix or start(cache_group, config.adapter))

    def open(self, position: Position, prompt: Prompt, cache_group: str) -> Tail:
        """Split the unknown parts into pieces, and recognise those at the beginning of the first."""
        digest, prefix = position.digest, position.prefix
        blocks: list[bytes] = []
        steps: list[TokenizeStep] = []
        for part in range(len(position.blocks), len(prompt.digests)):
            chain, digest = digest, hash((digest, prompt.digests[part]))
            *pieces, last = prompt.pieces(part, position.config.media or TILES)
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

    def read(self, tail: Tail, cache_group: str) -> Position:
        """Encode and hash the tail, and remember it. Returns the end of the prompt."""
        config, prefix = tail.position.config, tail.prefix
        if not tail.steps:
            return tail.position
        # all of the tail first: encoding evicts our data from CPU caches
        packed = self._encoded(tail.steps, self._encoders(config.tokenizer), cache_group)
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

    def _encoded(self, steps: Sequence[TokenizeStep], encoder: Encoder, cache_group: str) -> list[bytes]:
        """The ids of each step. Equal texts are encoded once."""
        unknown = {step.ids_key: step.piece.span for step in steps if step.ids is None}
        found = {key: self._ids.get(key) for key in unknown}  # encoded since, for another pool
        new = {key: span for key, span in unknown.items() if found[key] is None and isinstance(span, str)}
        for key, ids in zip(new, encoder.pack_segments([*new.values()], cache_group), strict=True):
            found[key] = ids
            self._ids.put(key, ids)
        return [step.ids or found.get(step.ids_key) or b"" for step in steps]


@lru_cache(maxsize=256)
def _opening(role: str, tokens: int) -> bytes:
    """Ids for the tokens which a chat template puts around a message of this role."""
    return array("I", [NOT_TEXT | crc32(role.encode())]).tobytes() * tokens


def _prefix_bytes(prefix: Prefix) -> int:
    return PREFIX_OVERHEAD + len(prefix.blocks) + len(prefix.tail)


def _ids_bytes(ids: bytes) -> int:
    return IDS_OVERHEAD + len(ids)


class Estimator:
    """Shared by a worker's requests. `scale` gives a pool's correction of counts, learned from reported usage."""

    def __init__(
        self,
        pools: Mapping[str, TokenizerConfig],
        scale: Callable[[str], TokenScale],
        *,
        encoders: Callable[[str], Encoder] = encoder,
        inline: float = INLINE,
        open_bytes: int = OPEN,
        cache_bytes: int = CACHE,
        executor: Executor | None = None,
    ) -> None:
        self._pools: dict[str, TokenizerConfig] = {}  # as configured
        self._configs: dict[str, TokenizerConfig] = {}  # with the block sizes reported by engines
        self._text_configs: dict[str, TokenizerConfig] = {}  # the same for prompts without media
        self.reload(pools)
        self._scale = scale
        self._encoders = encoders
        self._inline_effort = inline
        self._open_bytes = open_bytes
        self._tokenizer = IncrementalTokenizer(encoders, cache_bytes)
        self.executor = executor or ThreadPoolExecutor(WORKERS, "estimator")

    def reload(self, pools: Mapping[str, TokenizerConfig]) -> None:
        """Apply another configuration. An unchanged pool keeps the block size reported by its engines; a removed pool
        stays known to requests already routed."""
        changed = {name: config for name, config in pools.items() if self._pools.get(name) != config}
        self._pools.update(changed)
        self._configs.update(changed)
        self._text_configs.update({name: replace(config, media=None) for name, config in changed.items()})

    def set_block_size(self, pool: str, tokens: int) -> None:
        """Apply the block size reported by the pool's engines."""
        for configs in (self._configs, self._text_configs):
            configs[pool] = replace(configs[pool], block_size=tokens)

    def warm(self) -> None:
        """Load every tokenizer (0.2 s for o200k_base, 0.6 s with the fast one), so no request has to."""
        for config in self._configs.values():
            self._encoders(config.tokenizer).count("warm")

    def close(self) -> None:
        self.executor.shutdown(wait=False, cancel_futures=True)

    @property
    def cached_bytes(self) -> int:
        return self._tokenizer.cached_bytes

    async def estimate(
        self,
        prompt: Prompt,
        pools: Sequence[str],
        cache_group: str,
        output_tokens: int,
        adapters: Mapping[str, str] = NO_ADAPTERS,
    ) -> PromptEstimate:
        """The prompt as each of these pools sees it. Does not yield to the loop unless much of the prompt is new.
        `adapters`: LoRA adapter by pool."""
        names: dict[TokenizerConfig, list[str]] = {}
        configs = self._configs if prompt.media else self._text_configs
        if adapters:
            configs = {**configs, **{pool: replace(configs[pool], adapter=adapters[pool]) for pool in adapters}}
        for pool in pools:
            names.setdefault(configs[pool], []).append(pool)
        ends = [self._tokenizer.recognise(config, prompt, cache_group) for config in names]
        if min([len(end.blocks) for end in ends]) < len(prompt.digests):
            ends = await self._read_rest(ends, prompt, cache_group)
        prompt.decoded = {}  # a request outlives the estimate, and holds the text in the body
        estimates: dict[str, PoolEstimate] = {}
        for end, alike in zip(ends, names.values(), strict=True):
            counted, text, hashes = end.prefix.tokens, end.prefix.text, array("Q", b"".join(end.blocks))
            for pool in alike:
                tokens = self._scale(pool).correct(text, prompt.messages)
                scale = tokens / counted if counted else 1.0
                blocks = PrefixBlocks(hashes, end.config.block_size, scale)
                estimates[pool] = PoolEstimate(tokens, blocks, text, prompt.messages, end.config.adapter)
        return PromptEstimate(estimates, output_tokens)

    async def _read_rest(self, positions: list[Position], prompt: Prompt, cache_group: str) -> list[Position]:
        """Read to the end of the prompt, in a thread where that would hold the loop."""
        loop = asyncio.get_running_loop()
        known, parts = min(len(position.blocks) for position in positions), len(prompt.digests)
        effort = prompt.size + PART_EFFORT * parts  # an upper bound, nearly always low enough
        if effort > self._open_bytes:
            effort = prompt.size_from(known) + PART_EFFORT * (parts - known)
        if effort > self._open_bytes:
            return await loop.run_in_executor(self.executor, self._open_and_read, positions, prompt, cache_group)
        tails = self._open(positions, prompt, cache_group)
        if sum([self._effort(tail, cache_group) for tail in tails]) > self._inline_effort:
            return await loop.run_in_executor(self.executor, self._read, tails, cache_group)
        return self._read(tails, cache_group)

    def _open(self, positions: list[Position], prompt: Prompt, cache_group: str) -> list[Tail]:
        return [self._tokenizer.open(position, prompt, cache_group) for position in positions]

    def _read(self, tails: list[Tail], cache_group: str) -> list[Position]:
        return [self._tokenizer.read(tail, cache_group) for tail in tails]

    def _open_and_read(self, positions: list[Position], prompt: Prompt, cache_group: str) -> list[Position]:
        return self._read(self._open(positions, prompt, cache_group), cache_group)

    def _effort(self, tail: Tail, cache_group: str) -> float:
        return tail.effort(self._encoders(tail.position.config.tokenizer).speed(cache_group))
