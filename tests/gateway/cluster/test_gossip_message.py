"""Updates between replicas: every field arrives, and malformed messages are recognized."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.cluster.gossip import HEAD, MAX_BLOCKED, MalformedUpdate, PeerUpdate, ages_to_times, group_of
from policies.fleet.peers import NO_LOAD, PeerLoad
from policies.latency.tpot import STALL_GRID
from policies.types import FOREVER, NEVER

GROUP, SENDER = b"group..1", b"sender.1"
PAST = st.just(NEVER) | st.integers(-100, 50).map(float)
AMOUNTS = st.integers(0, 1000).map(float)
MISS_CURVES = st.just(()) | st.tuples(*[st.sampled_from([0.0, 0.5, 2.0])] * len(STALL_GRID))
LOADS = st.builds(
    lambda answering, prefilling, *rest: PeerLoad(answering + prefilling, prefilling, *rest),
    st.integers(0, 99),
    st.integers(0, 99),
    *[st.integers(0, 1 << 40)] * 4,
    st.integers(0, 1),
    PAST.filter(lambda time: time > NEVER) | st.just(FOREVER),
    PAST,
    PAST,
    st.just(NEVER) | st.integers(-50, 99).map(float),
    PAST,
    AMOUNTS,
    AMOUNTS,
    AMOUNTS,
    st.sampled_from([0.02, FOREVER]),
    MISS_CURVES,
)
NAMES = st.text(max_size=20)
HASHES = st.lists(st.integers(0, 2**64 - 1), max_size=9).map(lambda hashes: array("Q", hashes))
BUSY = replace(NO_LOAD, in_flight=2, prefilling=1, queued_tokens=500, queued_since=49.5, last_used_at=49.5)
MESSAGE = PeerUpdate(GROUP, SENDER, 50.0, {"small/a": BUSY}, [("small/b", array("Q", [1, 2]))], full=True).encode()


@given(st.dictionaries(NAMES, LOADS, max_size=4), st.lists(st.tuples(NAMES, HASHES), max_size=4), *[st.booleans()] * 2)
def test_an_update_is_decoded_unchanged(
    loads: dict[str, PeerLoad], prompts: list[tuple[str, array[int]]], full: bool, last: bool
) -> None:
    """Every field, with times converted to the receiver's clock."""
    raw = PeerUpdate(GROUP, SENDER, 50.0, loads, prompts, full=full, last=last).encode()
    assert group_of(raw) == GROUP
    update = PeerUpdate.decode(raw)
    assert (update.group, update.sender) == (GROUP, SENDER)
    assert (update.clock, update.full, update.last, update.prompts) == (50.0, full, last, prompts)
    assert {name: ages_to_times(load, 50.0) for name, load in update.loads.items()} == loads
    for name, load in update.loads.items():
        elsewhere, here = ages_to_times(load, 1050.0), loads[name]
        assert elsewhere.queued_since == here.queued_since + 1000.0
        assert elsewhere.blocked_until == here.blocked_until + 1000.0


@given(st.binary(max_size=300) | st.binary(max_size=300).map(lambda rest: MESSAGE[: HEAD.size] + rest))
def test_random_bytes_are_malformed(raw: bytes) -> None:
    """With a valid head too."""
    with pytest.raises(MalformedUpdate):
        PeerUpdate.decode(raw)


@given(st.integers(0, len(MESSAGE) - 1), st.integers(1, 255))
def test_a_truncated_or_changed_message_is_malformed(place: int, change: int) -> None:
    """At any byte: counts, numbers, names."""
    changed = bytearray(MESSAGE)
    changed[place] ^= change
    for raw in (MESSAGE[:place], bytes(changed), MESSAGE + b"\0"):
        with pytest.raises(MalformedUpdate):
            PeerUpdate.decode(raw)


@pytest.mark.parametrize(
    "wrong",
    [
        {"in_flight": -1},
        {"queued_tokens": 1 << 50},
        {"prefilling": 3},
        {"warming": 2},
        {"prefill_s": float("nan")},
        {"prefill_s": FOREVER},
        {"last_used_at": float("nan")},
        {"tpot_limit": 0.0},
        {"decode_s": -1.0},
        {"expected_tpot_misses": (-1.0,) * len(STALL_GRID)},
    ],
)
def test_impossible_numbers_are_malformed(wrong: dict[str, float]) -> None:
    """An infinite value, added to local counts, would never go away."""
    raw = PeerUpdate(GROUP, SENDER, 50.0, {"small/a": replace(BUSY, **wrong)}, []).encode()
    with pytest.raises(MalformedUpdate):
        PeerUpdate.decode(raw)


def test_past_times_are_never_in_the_future() -> None:
    """For any sender. The end of a rate limit may be, up to MAX_BLOCKED seconds."""
    load = replace(
        NO_LOAD, last_token_at=90.0, last_used_at=FOREVER, down_since=90.0, queued_since=90.0, blocked_until=1e9
    )
    found = ages_to_times(PeerUpdate.decode(PeerUpdate(GROUP, SENDER, 50.0, {"a": load}).encode()).loads["a"], 10.0)
    assert (found.last_token_at, found.last_used_at, found.down_since, found.queued_since) == (10.0,) * 4
    assert found.blocked_until == 10.0 + MAX_BLOCKED
