"""KV event messages as vLLM's publisher encodes them."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.kv_events import (
    CPU,
    DISK,
    END,
    GPU,
    REMOTE,
    UNNAMED,
    Cleared,
    MalformedKvEvents,
    Removed,
    Stored,
    decode,
    sequence_of,
)

pack = msgspec.msgpack.Encoder().encode


def message(*events: Any, sequence: int = 7, at: float = 12.5) -> list[bytes]:
    return [b"kv@a", sequence.to_bytes(8, "big"), pack([at, events, 0])]


def one(event: Any) -> Any:
    (found,) = decode(message(event)).events()
    return found


# As sent by vLLM 0.32, with shorter lists.
FROM_VLLM = {
    "type": "BlockStored",
    "block_hashes": [3, 4],
    "parent_block_hash": 2,
    "token_ids": [9] * 64,
    "block_size": 32,
    "lora_id": None,
    "medium": "GPU",
    "lora_name": None,
    "extra_keys": [["salt"], None],
    "group_idx": 0,
    "kv_cache_spec_kind": "full_attention",
    "session_id": "req_1",
}


STORED = Stored([3, 4], 2, 32, GPU, 0, "full_attention", "req_1")


def test_a_batch_has_a_number_and_a_time() -> None:
    """The number is the publisher's, the time the engine's."""
    batch = decode(message(FROM_VLLM, sequence=7, at=12.5))
    assert (batch.sequence, batch.at) == (7, 12.5)


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (FROM_VLLM, STORED),
        ({"type": "BlockRemoved", "block_hashes": [4], "medium": "CPU", "group_idx": 1}, Removed([4], CPU, 1)),
        (FROM_VLLM | {"lora_id": 1, "lora_name": "sql"}, replace(STORED, adapter="sql")),
        (FROM_VLLM | {"lora_id": 1}, replace(STORED, adapter=UNNAMED)),
        (FROM_VLLM | {"lora_id": 1, "lora_name": "a" * 1_000_000}, replace(STORED, adapter=UNNAMED)),
        (["BlockStored", [3], None, [1] * 16, 16, 1, "GPU", "sql"], Stored([3], None, 16, adapter="sql")),
        ({"type": "AllBlocksCleared"}, Cleared()),
        (["BlockStored", [3], None, [1] * 16, 16, None], Stored([3], None, 16)),
        (["BlockStored", [3], 2, [1] * 16, 16, None, "CPU", None, None, 1], Stored([3], 2, 16, CPU, 1)),
        (["BlockRemoved", [3]], Removed([3])),
        (["AllBlocksCleared"], Cleared()),
    ],
)
def test_maps_and_arrays_decode_alike(event: Any, expected: Any) -> None:
    """vLLM sent arrays before maps."""
    assert one(event) == expected


# As vLLM's offloading connector tells a block by default: its hash alone.
OFFLOADED = FROM_VLLM | {"parent_block_hash": None, "token_ids": [], "block_size": 0, "medium": "CPU"}


@pytest.mark.parametrize(
    ("told", "medium"),
    [
        ({"medium": None}, GPU),
        ({"medium": "cpu"}, CPU),
        ({"medium": "CPU_PINNED"}, CPU),
        ({"medium": "STORAGE"}, DISK),
        ({"medium": "STORAGE", "locality": "LOCAL"}, DISK),
        ({"medium": "STORAGE", "locality": "REMOTE"}, REMOTE),
        ({"medium": "EXTERNAL"}, REMOTE),
    ],
)
def test_media_of_all_engines_have_one_name(told: dict[str, Any], medium: str) -> None:
    assert one(FROM_VLLM | told).medium == medium
    assert one({"type": "BlockRemoved", "block_hashes": [4], "medium": None} | told) == Removed([4], medium)


def test_a_block_of_a_slower_medium_may_be_told_by_its_hash_alone() -> None:
    """The events of the same batch are not lost."""
    first, second = decode(message(OFFLOADED, FROM_VLLM)).events()
    assert (first, second) == (Stored([3, 4], None, 0, CPU, 0, "full_attention", "req_1"), STORED)


def test_events_of_an_unknown_medium_are_skipped() -> None:
    assert list(decode(message(FROM_VLLM | {"medium": "TAPE"}, FROM_VLLM)).events()) == [STORED]


def test_a_block_hash_is_the_low_64_bits() -> None:
    """Of a number, a negative number or 32 bytes: all name the same block. 0 is no valid name."""
    low = 0xFBCD_EF01_2345_6789
    for written in (low, low - 2**64, b"\1" * 24 + low.to_bytes(8, "big")):
        assert one({"type": "BlockRemoved", "block_hashes": [written]}) == Removed([low])
    assert one({"type": "BlockRemoved", "block_hashes": [0]}) == Removed([1])


def test_unknown_fields_and_events_are_skipped() -> None:
    """Fields of events, kinds of events and fields of the batch of newer engines."""
    newer = {"type": "BlockMoved", "block_hashes": "elsewhere"}
    frames = message(newer, ["BlockMoved", 1], FROM_VLLM | {"temperature": "hot"})
    frames[2] = pack([*msgspec.msgpack.decode(frames[2]), "more"])
    assert [event.block_size for event in decode(frames).events() if isinstance(event, Stored)] == [32]


@pytest.mark.parametrize(
    ("frames", "said"),
    [
        ([b"kv", bytes(8)], "2 frames instead of topic, sequence number and events"),
        ([b"kv", b"12", b""], "a sequence number of 2 bytes instead of 8"),
        ([b"kv", bytes(8), b"\xc1"], "batch 0: "),
        (message({"type": "BlockStored"}), "batch 7: "),
        (message({"type": "BlockRemoved", "block_hashes": ["x"]}), "batch 7: "),
        (message(FROM_VLLM | {"block_size": 0}), "batch 7: a block of 0 tokens"),
        (message(3), "batch 7: "),
        ([b"kv", bytes(8), b"\x92\x00\x91\x91\xa2\xff\xfe"], "batch 0: "),  # a kind in no UTF-8
    ],
)
def test_a_malformed_message_raises_one_kind_of_error(frames: list[bytes], said: str) -> None:
    """The message names the batch."""
    with pytest.raises(MalformedKvEvents) as raised:
        list(decode(frames).events())
    assert str(raised.value).startswith(said)


@given(st.lists(st.binary(max_size=60), min_size=3, max_size=3) | st.binary().map(lambda b: [b"", bytes(8), b]))
def test_any_bytes_are_events_or_malformed(frames: list[bytes]) -> None:
    """Another sender on the port cannot end the listener."""
    with suppress(MalformedKvEvents):
        assert all(isinstance(event, Stored | Removed | Cleared) for event in decode(frames).events())


def test_a_replay_ends_with_minus_one() -> None:
    """Eight bytes, signed."""
    assert sequence_of(b"\xff" * 8) == END
