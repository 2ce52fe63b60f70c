"""Decodes the prefix cache events of vLLM and SGLang. No I/O.

A message is three frames: topic, sequence number (8 bytes, big-endian), and a msgpack batch `[ts, events, rank]`.
Rules:
- An event is a map with a `type`, or (vLLM until 0.11) an array beginning with the type. Unknown fields and kinds of
  events of newer engines are skipped.
- Token ids are prompts: skipped, not decoded.
- A block's name is the low 64 bits of the hash, sent as a number or as bytes; never 0.
- Media have one name for all engines (`MEDIA`); events of an unknown medium are skipped. Below the GPU, an event may
  tell the block alone, with a size of 0 and no parent (vLLM without `self_describing_kv_events`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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
MAX_ADAPTER = 1024  # characters of a name: names of past events are kept
END = -1  # sequence number at the end of a replay
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
    group: int = 0  # of layers, in models with several kinds of attention
    kind: str | None = None  # of attention
    session: str = ""  # named by the request, where known
    adapter: str = ""  # LoRA adapter of the request; UNNAMED: an engine without a name for it


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


class _Fields(msgspec.Struct):
    """Fields in use, of any kind of event."""

    block_hashes: list[_Hash]
    block_size: int | None = None
    parent_block_hash: _Hash | None = None
    medium: str | None = None
    locality: str | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    session_id: str | None = None
    lora_id: int | None = None
    lora_name: str | None = None


# Fields of an event by kind, in the order of an array after the kind.
_ORDER = {
    "BlockStored": (
        "block_hashes parent_block_hash token_ids block_size lora_id medium lora_name extra_keys group_idx "
        "kv_cache_spec_kind kv_cache_spec_sliding_window locality ownership session_id"
    ).split(),
    "BlockRemoved": ["block_hashes", "medium", "group_idx", "locality"],
    "AllBlocksCleared": [],
}
_USED = {kind: [name for name in names if name in _Fields.__struct_fields__] for kind, names in _ORDER.items()}


class _Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[msgspec.Raw]


@dataclass(frozen=True, slots=True)
class KvEventBatch:
    """Cache changes of an engine step. `at`: the engine's wall clock, s."""

    sequence: int
    at: float
    raw: Sequence[msgspec.Raw]

    def events(self) -> Iterator[Event]:
        """Decode events in order, lazily. Raises MalformedKvEvents."""
        try:
            for raw in self.raw:
                if (event := _event(raw)) is not None:
                    yield event
        except (ValueError, RecursionError) as error:
            raise MalformedKvEvents(f"batch {self.sequence}: {error}") from None


_batch = msgspec.msgpack.Decoder(_Batch).decode
_raw_values = msgspec.msgpack.Decoder(dict[str, msgspec.Raw] | list[msgspec.Raw]).decode
_value = msgspec.msgpack.Decoder().decode


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
    return KvEventBatch(sequence, batch.ts, batch.events)


def _medium(said: _Fields) -> str | None:
    medium = MEDIA.get((said.medium or "GPU").upper())
    return REMOTE if medium == DISK and said.locality == "REMOTE" else medium


def _adapter(said: _Fields) -> str:
    name = said.lora_name or (UNNAMED if said.lora_id else "")
    return name if len(name) <= MAX_ADAPTER else UNNAMED


def _event(raw: msgspec.Raw) -> Event | None:
    """Decode an event; None for an unknown kind."""
    values = _raw_values(raw)
    tag = values.get("type") if isinstance(values, dict) else next(iter(values), None)
    kind = None if tag is None else _value(tag)
    if not isinstance(kind, str) or kind not in _ORDER:
        return None
    if kind == "AllBlocksCleared":
        return Cleared()
    if isinstance(values, list):
        values = dict(zip(_ORDER[kind], values[1:], strict=False))
    fields = {name: _value(values[name]) for name in _USED[kind] if name in values}
    said = msgspec.convert(fields, _Fields)
    names = [_name(block) for block in said.block_hashes]
    if (medium := _medium(said)) is None:
        return None
    if kind == "BlockRemoved":
        return Removed(names, medium, said.group_idx or 0)
    if said.block_size is None or said.block_size < (medium == GPU):
        raise msgspec.ValidationError(f"a block of {said.block_size} tokens")
    return Stored(
        names,
        None if said.parent_block_hash is None else _name(said.parent_block_hash),
        said.block_size,
        medium,
        said.group_idx or 0,
        said.kv_cache_spec_kind,
        said.session_id or "",
        _adapter(said),
    )


def _name(block: _Hash) -> int:
    return (int.from_bytes(block[-8:], "big") if isinstance(block, bytes) else block) & NAME_BITS or 1
