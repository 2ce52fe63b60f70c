"""Decodes the prefix cache events of vLLM and SGLang. No I/O.

A message is three frames: topic, sequence number (8 bytes, big-endian), and a msgpack batch `[ts, events, rank]`.
Rules:
- An event is a map with a `type`, or (vLLM until 0.11) an array beginning with the type. Unknown fields and kinds of
  events of newer engines are skipped.
- Token ids are prompts: skipped, not decoded.
- An engine is not trusted with sizes: lists have a bound that is checked before they are made, an event of many blocks
  is told in pieces, and a field of another type than its own is not built.
- Each data-parallel rank of a server publishes on a port of its own and names itself in its batches.
- A block's name is the low 64 bits of the hash, sent as a number or as bytes; never 0.
- Media have one name for all engines (`MEDIA`); events of an unknown medium are skipped. Below the GPU, an event may
  tell the block alone, with a size of 0 and no parent (vLLM without `self_describing_kv_events`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec

NAME_BITS = (1 << 64) - 1
GPU = "gpu"  # medium of hits without a transfer; the default of engines without names for media
CPU, DISK, REMOTE = "cpu", "disk", "remote"  # media from which an engine loads blocks
MEDIA = {  # by the name in an event: of vLLM 0.32, its Mooncake and LMCache connectors, SGLang, and Dynamo's workers
    **dict.fromkeys(("GPU", "DEVICE"), GPU),
    **dict.fromkeys(("CPU", "CPU_PINNED", "CPU_TIER1", "HOST"), CPU),
    **dict.fromkeys(("STORAGE", "CPU_TIER2", "DISK", "NVME"), DISK),
    **dict.fromkeys(("EXTERNAL", "NETWORK", "REMOTE", "SHARED"), REMOTE),
}
UNNAMED = "\0"  # adapter: vLLM until 0.11 and others tell a number, which the engine has given
MAX_MESSAGE = 8 << 20  # bytes: 128k tokens with a block each, as SGLang tells them
MAX_EVENTS = 1 << 18  # of a batch
MAX_HASHES = 1 << 17  # of an event: 2 M tokens in blocks of 16
MAX_FIELDS = 64  # of an event that is an array
PIECE = 256  # blocks of an event that are told at once
MAX_ADAPTER = 1024  # characters of a name: names of past events are kept
END = -1  # sequence number at the end of a replay
_SEQUENCE_BYTES = 8


class MalformedKvEvents(ValueError):
    """Not a message of an engine's cache events."""


@dataclass(frozen=True, slots=True)
class PublisherRank:
    """The data-parallel rank whose events an endpoint is to hear: `rank` of `count` at its server."""

    rank: int
    count: int = 1

    def is_named_by(self, named: int | None) -> bool:
        """`named`: in a batch, counted over all servers, where `rank` may count those of one server, from 0. None: the
        publisher has no ranks."""
        if named is None or named == self.rank:
            return True
        return self.count > 1 and named >= self.count and named % self.count == self.rank


@dataclass(frozen=True, slots=True)
class Stored:
    """Consecutive blocks were stored. `parent` None: they begin a prompt. `is_last`: of the pieces of an event."""

    hashes: Sequence[int]
    parent: int | None
    block_size: int  # tokens
    medium: str = GPU
    group: int = 0  # of layers, in models with several kinds of attention
    kind: str | None = None  # of attention
    session: str = ""  # named by the request, where known
    adapter: str = ""  # LoRA adapter of the request; UNNAMED: an engine without a name for it
    is_last: bool = True


@dataclass(frozen=True, slots=True)
class Removed:
    hashes: Sequence[int]
    medium: str = GPU
    group: int = 0


@dataclass(frozen=True, slots=True)
class Cleared:
    """The cache is empty."""


Event = Stored | Removed | Cleared

_Hash = int | bytes
_NONE = msgspec.Raw(b"\xc0")


class _Fields(msgspec.Struct):
    """Fields in use, of any kind of event, as they were sent."""

    type: msgspec.Raw = _NONE
    block_hashes: msgspec.Raw = _NONE
    block_size: msgspec.Raw = _NONE
    parent_block_hash: msgspec.Raw = _NONE
    medium: msgspec.Raw = _NONE
    locality: msgspec.Raw = _NONE
    group_idx: msgspec.Raw = _NONE
    kv_cache_spec_kind: msgspec.Raw = _NONE
    session_id: msgspec.Raw = _NONE
    lora_id: msgspec.Raw = _NONE
    lora_name: msgspec.Raw = _NONE


# Fields of an event by kind, in the order of an array after the kind.
_ORDER = {
    "BlockStored": (
        "block_hashes parent_block_hash token_ids block_size lora_id medium lora_name extra_keys group_idx "
        "kv_cache_spec_kind kv_cache_spec_sliding_window locality ownership session_id"
    ).split(),
    "BlockRemoved": ["block_hashes", "medium", "group_idx", "locality"],
    "AllBlocksCleared": [],
}
_USED = frozenset(_Fields.__struct_fields__)


class _Batch(msgspec.Struct, array_like=True):
    ts: float
    events: Annotated[list[msgspec.Raw], msgspec.Meta(max_length=MAX_EVENTS)]
    rank: msgspec.Raw = _NONE


@dataclass(frozen=True, slots=True)
class KvEventBatch:
    """Cache changes of an engine step. `at`: the engine's wall clock, s; `rank`: data-parallel, None where the engine
    has none."""

    sequence: int
    at: float
    raw: Sequence[msgspec.Raw]
    rank: int | None = None

    def events(self) -> Iterator[Event]:
        """Decode events in order, lazily, those of many blocks in pieces. Raises MalformedKvEvents."""
        try:
            for raw in self.raw:
                yield from _events(raw)
        except (ValueError, RecursionError) as error:
            raise MalformedKvEvents(f"batch {self.sequence}: {error}") from None


_decoder = msgspec.msgpack.Decoder
_batch = _decoder(_Batch).decode
_map = _decoder(_Fields).decode
_array = _decoder(Annotated[list[msgspec.Raw], msgspec.Meta(max_length=MAX_FIELDS)]).decode
_text = _decoder(str).decode
_optional_text = _decoder(str | None).decode
_number = _decoder(int | None).decode
_hash = _decoder(_Hash | None).decode
_hashes = _decoder(Annotated[list[_Hash], msgspec.Meta(max_length=MAX_HASHES)]).decode
_ARRAYS = range(0x90, 0xA0), range(0xDC, 0xDE)  # first bytes of an array


def sequence_of(frame: bytes) -> int:
    """END where a replay is over."""
    if len(frame) != _SEQUENCE_BYTES:
        raise MalformedKvEvents(f"a sequence number of {len(frame)} bytes instead of {_SEQUENCE_BYTES}")
    return int.from_bytes(frame, "big", signed=True)


def decode(frames: Sequence[bytes]) -> KvEventBatch:
    """Decode a message. Raises MalformedKvEvents."""
    if len(frames) != 3:
        raise MalformedKvEvents(f"{len(frames)} frames instead of topic, sequence number and events")
    sequence = sequence_of(frames[1])
    try:
        batch = _batch(frames[2])
    except (ValueError, RecursionError) as error:
        raise MalformedKvEvents(f"batch {sequence}: {error}") from None
    return KvEventBatch(sequence, batch.ts, batch.events, _rank(batch.rank))


def _rank(raw: msgspec.Raw) -> int | None:
    try:
        named: int | None = _number(raw)
        return named
    except ValueError:
        return None


def _events(raw: msgspec.Raw) -> Iterator[Event]:
    """Decode an event; nothing for an unknown kind or medium."""
    said, kind = _said(raw)
    if kind == "AllBlocksCleared":
        yield Cleared()
    elif kind in _ORDER and (medium := _medium(said)) is not None:
        pieces = _pieces(_hashes(said.block_hashes))
        group = _number(said.group_idx) or 0
        if kind == "BlockRemoved":
            yield from (Removed(names, medium, group) for names, _ in pieces)
        else:
            yield from _stored(said, medium, group, pieces)


def _said(raw: msgspec.Raw) -> tuple[_Fields, str]:
    """Fields and kind; "" for no kind."""
    first = memoryview(raw)[0]
    if not any(first in firsts for firsts in _ARRAYS):
        said = _map(raw)
        return said, _kind(said.type)
    values = _array(raw)
    kind = _kind(values[0]) if values else ""
    named = zip(_ORDER.get(kind, ()), values[1:], strict=False)
    return _Fields(**{name: value for name, value in named if name in _USED}), kind


def _kind(raw: msgspec.Raw) -> str:
    try:
        return _text(raw)
    except msgspec.ValidationError:
        return ""


def _stored(said: _Fields, medium: str, group: int, pieces: Iterator[tuple[Sequence[int], bool]]) -> Iterator[Stored]:
    """Each piece follows the one before."""
    size = _number(said.block_size)
    if size is None or size < (medium == GPU):
        raise msgspec.ValidationError(f"a block of {size} tokens")
    told = _hash(said.parent_block_hash)
    parent = None if told is None else _name(told)
    kind, session = _optional_text(said.kv_cache_spec_kind), _optional_text(said.session_id) or ""
    adapter = _adapter(said)
    for names, is_last in pieces:
        yield Stored(names, parent, size, medium, group, kind, session, adapter, is_last)
        parent = names[-1] if names else parent


def _pieces(hashes: Sequence[_Hash]) -> Iterator[tuple[Sequence[int], bool]]:
    """Names of blocks, and whether they are the last."""
    for at in range(0, len(hashes), PIECE) or (0,):
        yield [_name(block) for block in hashes[at : at + PIECE]], at + PIECE >= len(hashes)


def _medium(said: _Fields) -> str | None:
    medium = MEDIA.get((_optional_text(said.medium) or "GPU").upper())
    return REMOTE if medium == DISK and _optional_text(said.locality) == "REMOTE" else medium


def _adapter(said: _Fields) -> str:
    name = _optional_text(said.lora_name) or (UNNAMED if _number(said.lora_id) else "")
    return name if len(name) <= MAX_ADAPTER else UNNAMED


def _name(block: _Hash) -> int:
    return (int.from_bytes(block[-8:], "big") if isinstance(block, bytes) else block) & NAME_BITS or 1
