"""Decodes the prefix cache events of vLLM and SGLang. No I/O.

A message is three frames: topic, sequence number (8 bytes, big-endian), and a msgpack batch `[ts, events, rank]`.
Rules:
- An event is a map with a `type`, or an array that begins with its name, as vLLM wrote until 0.11. Unknown fields and
  kinds of events of newer engines are skipped.
- Token ids are prompts: skipped, not decoded.
- A block's name is the low 64 bits of its hash, sent as a number or as bytes; never 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

NAME_BITS = (1 << 64) - 1
GPU = "GPU"  # the medium whose hits need no transfer; the default of engines that name no medium
END = -1  # the sequence number that ends a replay
_SEQUENCE_BYTES = 8


class MalformedKvEvents(ValueError):
    """Not a message of an engine's cache events."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Consecutive blocks were stored. `parent` None: the blocks begin a prompt."""

    hashes: Sequence[int]
    parent: int | None
    block_size: int  # tokens
    medium: str = GPU
    group: int = 0  # of layers, in models that mix kinds of attention
    kind: str | None = None  # of attention
    session: str = ""  # named by the request that stored the blocks


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


class _StoredMap(msgspec.Struct, tag="BlockStored"):
    block_hashes: list[_Hash]
    block_size: int
    parent_block_hash: _Hash | None = None
    medium: str | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    session_id: str | None = None


class _RemovedMap(msgspec.Struct, tag="BlockRemoved"):
    block_hashes: list[_Hash]
    medium: str | None = None
    group_idx: int | None = None


class _ClearedMap(msgspec.Struct, tag="AllBlocksCleared"):
    pass


class _StoredArray(msgspec.Struct, tag="BlockStored", array_like=True):
    block_hashes: list[_Hash]
    parent_block_hash: _Hash | None
    token_ids: msgspec.Raw
    block_size: int
    lora_id: msgspec.Raw = msgspec.Raw(b"")
    medium: str | None = None
    lora_name: msgspec.Raw = msgspec.Raw(b"")
    extra_keys: msgspec.Raw = msgspec.Raw(b"")
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: msgspec.Raw = msgspec.Raw(b"")
    locality: msgspec.Raw = msgspec.Raw(b"")
    ownership: msgspec.Raw = msgspec.Raw(b"")
    session_id: str | None = None


class _RemovedArray(msgspec.Struct, tag="BlockRemoved", array_like=True):
    block_hashes: list[_Hash]
    medium: str | None = None
    group_idx: int | None = None


class _ClearedArray(msgspec.Struct, tag="AllBlocksCleared", array_like=True):
    pass


class _Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[msgspec.Raw]


@dataclass(frozen=True, slots=True)
class KvEventBatch:
    """Cache changes of one engine step. `at`: the engine's wall clock, s."""

    sequence: int
    at: float
    raw: Sequence[msgspec.Raw]

    def events(self) -> Iterator[Event]:
        """Decode events in order, lazily. Raises MalformedKvEvents."""
        try:
            for raw in self.raw:
                if (event := _event(raw)) is not None:
                    yield event
        except (msgspec.MsgspecError, RecursionError) as error:
            raise MalformedKvEvents(f"batch {self.sequence}: {error}") from None


_batch = msgspec.msgpack.Decoder(_Batch).decode
_map = msgspec.msgpack.Decoder(_StoredMap | _RemovedMap | _ClearedMap).decode
_array = msgspec.msgpack.Decoder(_StoredArray | _RemovedArray | _ClearedArray).decode
_name_of_map = msgspec.msgpack.Decoder(dict[str, Any]).decode
_name_of_array = msgspec.msgpack.Decoder(list[Any]).decode
KNOWN = frozenset({"BlockStored", "BlockRemoved", "AllBlocksCleared"})


def sequence_of(frame: bytes) -> int:
    """END where a replay is over."""
    if len(frame) != _SEQUENCE_BYTES:
        raise MalformedKvEvents(f"a sequence number of {len(frame)} bytes instead of {_SEQUENCE_BYTES}")
    return int.from_bytes(frame, "big", signed=True)


def decode(frames: Sequence[bytes]) -> KvEventBatch:
    """Decode one message. Raises MalformedKvEvents."""
    if len(frames) != 3:
        raise MalformedKvEvents(f"{len(frames)} frames instead of topic, sequence number and events")
    sequence = sequence_of(frames[1])
    try:
        batch = _batch(frames[2])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise MalformedKvEvents(f"batch {sequence}: {error}") from None
    return KvEventBatch(sequence, batch.ts, batch.events)


def _event(raw: msgspec.Raw) -> Event | None:
    """Decode one event; None for an unknown kind."""
    tagged = _is_array(raw)
    try:
        said = _array(raw) if tagged else _map(raw)
    except msgspec.ValidationError:
        if _kind(raw, tagged) in KNOWN:
            raise
        return None
    match said:
        case _StoredMap() | _StoredArray():
            return _stored(said)
        case _RemovedMap() | _RemovedArray():
            return Removed(_names(said.block_hashes), said.medium or GPU, said.group_idx or 0)
        case _:
            return Cleared()


def _stored(said: _StoredMap | _StoredArray) -> Stored:
    if said.block_size <= 0:
        raise msgspec.ValidationError(f"a block of {said.block_size} tokens")
    parent = said.parent_block_hash
    return Stored(
        _names(said.block_hashes),
        None if parent is None else _name(parent),
        said.block_size,
        said.medium or GPU,
        said.group_idx or 0,
        said.kv_cache_spec_kind,
        said.session_id or "",
    )


def _is_array(raw: msgspec.Raw) -> bool:
    first = memoryview(raw)[0]
    return first & 0xF0 == 0x90 or first in (0xDC, 0xDD)


def _kind(raw: msgspec.Raw, tagged: bool) -> object:
    if tagged:
        return next(iter(_name_of_array(raw)), None)
    return _name_of_map(raw).get("type")


def _name(block: _Hash) -> int:
    return (int.from_bytes(block[-8:], "big") if isinstance(block, bytes) else block) & NAME_BITS or 1


def _names(hashes: Sequence[_Hash]) -> list[int]:
    return [_name(block) for block in hashes]
