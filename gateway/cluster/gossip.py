"""Load and prompt updates between workers and between replicas: messages, pending updates, view of the peers. Pure.

Rules:
- A message holds loads by endpoint id and prompts as hashes of their blocks: never text.
- Times travel as ages, because clocks of two machines have nothing in common. The fastest message of each sender
  counts as immediate, and the extra delay of any other message is added to the ages in it.
- A message is decoded whole or not at all: checksum, exact lengths, plausible numbers.
- A `full` message holds every load of its sender: one per FULL_INTERVAL makes up for lost messages.
- A peer silent for PEER_TIMEOUT has no load. Repeated messages, and messages as late as this, are dropped.
- Prefill seconds are summed from the increments of each sender since its first message, so the sum never jumps.
- Memory is bounded: MAX_PEERS, endpoints known to the reader, MAX_PENDING_BLOCKS.
- Messages of the own group are ignored. Over Redis the workers of one gateway are a group, as they have sockets among
  themselves (`gateway.workers.worker_peers`); over these sockets each worker is a group of its own.
"""

from __future__ import annotations

import os
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import BytesIO
from math import isfinite, isnan
from struct import Struct
from typing import Any
from zlib import crc32

from policies.fleet.peers import NO_LOAD, PEER_LOAD_COUNTS, PEER_LOAD_FLOATS, PeerLoad, PeerReader, combined
from policies.latency.tpot import NO_MISSES, STALL_GRID
from policies.types import FOREVER, NEVER

MAGIC = b"ftr1"
HEAD = Struct("<4sI8s8sdBHHH")  # magic, checksum, group, sender, clock, flags, counts of names, loads and prompts
CHECKED_FROM = 8  # bytes before the checksummed part
NAME = Struct("<H")  # bytes of an endpoint id, which follows
LOAD = Struct(f"<{PEER_LOAD_COUNTS}qB{PEER_LOAD_FLOATS}d")  # counts, whether a miss curve follows, floats
MISSES = Struct(f"<{len(STALL_GRID)}d")
PROMPT = Struct("<HI")  # index of the endpoint id, number of blocks; the blocks follow
TIMES = slice(PEER_LOAD_COUNTS, PEER_LOAD_COUNTS + 5)  # queued_since .. down_since
FULL, LAST = 1, 2  # flags

MAX_MESSAGE = 4 << 20  # bytes
MAX_COUNT = 1 << 48
MAX_BLOCKED = 60.0  # s ahead, of a provider's rate limit (policies.fleet.circuit_breaker)

SEND_INTERVAL = 0.02  # s between two messages
FULL_INTERVAL = 1.0  # s
MESSAGE_BLOCKS = 8_192  # in a message: 64 KiB
BLOCK_RATE = 131_072.0  # blocks a second: 1 MiB

PEER_TIMEOUT = 3.0  # s
MERGE_INTERVAL = 0.005  # s: changes within are applied together
CLOCK_DRIFT = 2e-4  # s per s between two clocks: several times the drift of crystals
MAX_PEERS = 1024
MAX_PENDING_BLOCKS = 1 << 20  # 8 MiB

Prompts = Collection[tuple[str, "array[int]"]]


class MalformedUpdate(ValueError):
    """Not a whole message of this format."""


def new_group() -> bytes:
    """A random name for one gateway."""
    return os.urandom(8)


# -- message --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PeerUpdate:
    """One message. Times in `loads` are of the sender's `clock` before encoding, and ages after decoding.

    `full`: `loads` is complete. `last`: the sender is stopping.
    """

    group: bytes
    sender: bytes
    clock: float
    loads: Mapping[str, PeerLoad] = field(default_factory=dict)
    prompts: Prompts = ()
    full: bool = False
    last: bool = False

    def encode(self) -> bytes:
        names = list(dict.fromkeys([*self.loads, *(name for name, _ in self.prompts)]))
        index = {name: at for at, name in enumerate(names)}
        parts = [NAME.pack(len(raw := name.encode())) + raw for name in names]
        parts += [_encode_load(load, self.clock) for load in self.loads.values()]
        parts += [PROMPT.pack(index[name], len(hashes)) + hashes.tobytes() for name, hashes in self.prompts]
        counts = len(names), len(self.loads), len(self.prompts)
        flags = FULL * self.full | LAST * self.last
        head = HEAD.pack(MAGIC, 0, self.group, self.sender, self.clock, flags, *counts)
        checked = head[CHECKED_FROM:] + b"".join(parts)
        return MAGIC + crc32(checked).to_bytes(4, "little") + checked

    @classmethod
    def decode(cls, raw: bytes) -> PeerUpdate:
        """Raises MalformedUpdate."""
        group_of(raw)
        _, checksum, group, sender, clock, flags, names, loads, prompts = HEAD.unpack_from(raw)
        if checksum != crc32(memoryview(raw)[CHECKED_FROM:]) or not isfinite(clock) or loads > names:
            raise MalformedUpdate
        stream = BytesIO(raw)
        stream.seek(HEAD.size)
        try:
            known = [_read(stream, *_unpack(stream, NAME)).decode() for _ in range(names)]
            by_name = {name: _read_load(stream) for name in known[:loads]}
            sent = [_read_prompt(stream, known) for _ in range(prompts)]
        except (ValueError, IndexError):
            raise MalformedUpdate from None
        if stream.tell() != len(raw) or len(by_name) != loads:
            raise MalformedUpdate
        return cls(group, sender, clock, by_name, sent, full=bool(flags & FULL), last=bool(flags & LAST))


def group_of(raw: bytes) -> bytes:
    """Reads the group without decoding the rest. Raises MalformedUpdate."""
    if not HEAD.size <= len(raw) <= MAX_MESSAGE or raw[:4] != MAGIC:
        raise MalformedUpdate
    return raw[8:16]


def sender_of(raw: bytes) -> bytes:
    """Reads the sender of a message of this format."""
    return raw[16:24]


def _encode_load(load: PeerLoad, now: float) -> bytes:
    numbers, misses = [*load.numbers()], load.expected_tpot_misses
    numbers[TIMES] = [now - time for time in numbers[TIMES]]
    encoded = LOAD.pack(*numbers[:PEER_LOAD_COUNTS], bool(misses), *numbers[PEER_LOAD_COUNTS:])
    return encoded + MISSES.pack(*misses) if misses else encoded


def _read(stream: BytesIO, size: int) -> bytes:
    read = stream.read(size)
    if len(read) != size:
        raise MalformedUpdate
    return read


def _unpack(stream: BytesIO, layout: Struct) -> tuple[Any, ...]:
    return layout.unpack(_read(stream, layout.size))


def _read_load(stream: BytesIO) -> PeerLoad:
    fields = _unpack(stream, LOAD)
    counts, has_misses, floats = fields[:PEER_LOAD_COUNTS], fields[PEER_LOAD_COUNTS], fields[PEER_LOAD_COUNTS + 1 :]
    load = PeerLoad.from_numbers((*counts, *floats), _unpack(stream, MISSES) if has_misses else NO_MISSES)
    if not _is_plausible(load):
        raise MalformedUpdate
    return load


def _read_prompt(stream: BytesIO, names: Sequence[str]) -> tuple[str, array[int]]:
    index, blocks = _unpack(stream, PROMPT)
    return names[index], array("Q", _read(stream, 8 * blocks))


def _is_plausible(load: PeerLoad) -> bool:
    numbers = load.numbers()
    amounts = load.prefill_s, load.decode_s, load.decode_tokens, *load.expected_tpot_misses
    return (
        all(0 <= count <= MAX_COUNT for count in numbers[:PEER_LOAD_COUNTS])
        and load.warming <= 1
        and load.prefilling <= load.in_flight
        and all(0 <= amount < FOREVER for amount in amounts)
        and load.tpot_limit > 0
        and not any(map(isnan, numbers))
    )


def ages_to_times(load: PeerLoad, sent_at: float) -> PeerLoad:
    """A decoded load, with times of our clock. `sent_at`: by our clock; past events lie before."""
    return replace(
        load,
        queued_since=FOREVER if load.queued_since == NEVER else sent_at - max(load.queued_since, 0.0),
        last_token_at=sent_at - max(load.last_token_at, 0.0),
        last_used_at=sent_at - max(load.last_used_at, 0.0),
        blocked_until=sent_at - max(load.blocked_until, -MAX_BLOCKED),
        down_since=sent_at - max(load.down_since, 0.0),
    )


# -- sending --------------------------------------------------------------------------------


class PendingUpdates:
    """Updates to send: of each endpoint the latest load; prompts once, cut beyond MESSAGE_BLOCKS or BLOCK_RATE.

    `group`: name of the processes that ignore the messages.
    """

    def __init__(self, group: bytes, sender: bytes | None = None) -> None:
        self._group, self._sender = group, sender or os.urandom(8)
        self._loads: dict[str, PeerLoad] = {}
        self._changed: dict[str, None] = {}
        self._prompts: list[tuple[str, array[int]]] = []
        self._room = MESSAGE_BLOCKS
        self._allowance, self._allowance_at = BLOCK_RATE, NEVER
        self._full_at = NEVER

    def publish(self, endpoint_id: str, load: PeerLoad) -> None:
        self._loads[endpoint_id] = load
        self._changed[endpoint_id] = None

    def publish_prompt(self, endpoint_id: str, hashes: Sequence[int]) -> None:
        if self._room:
            taken = array("Q", hashes[: self._room])
            self._prompts.append((endpoint_id, taken))
            self._room -= len(taken)

    def message(self, now: float) -> bytes | None:
        """The next message; None if nothing is new."""
        full = now >= self._full_at
        if not (full or self._changed or self._prompts):
            return None
        loads = self._loads if full else {name: self._loads[name] for name in self._changed}
        message = PeerUpdate(self._group, self._sender, now, loads, self._affordable_prompts(now), full=full).encode()
        self._changed.clear()
        if full:
            self._full_at = now + FULL_INTERVAL
            self._loads = {name: load for name, load in loads.items() if load != NO_LOAD}
        return message

    def farewell(self, now: float) -> bytes:
        return PeerUpdate(self._group, self._sender, now, full=True, last=True).encode()

    def forget(self) -> None:
        """Drops the prompts while nothing can be sent, and makes the next message a full one."""
        self._full_at = NEVER
        self._prompts, self._room = [], MESSAGE_BLOCKS

    def _affordable_prompts(self, now: float) -> Prompts:
        self._allowance = min(self._allowance + BLOCK_RATE * max(now - self._allowance_at, 0.0), BLOCK_RATE)
        self._allowance_at = now
        found = []
        for name, hashes in self._prompts:
            if blocks := hashes[: int(self._allowance)]:
                found.append((name, blocks))
                self._allowance -= len(blocks)
        self._prompts, self._room = [], MESSAGE_BLOCKS
        return found


# -- receiving ------------------------------------------------------------------------------


class Peers:
    """Loads and prompts of other groups. `knows`: True for endpoints of the reader."""

    def __init__(self, group: bytes, knows: Callable[[str], bool]) -> None:
        self.malformed = 0  # messages
        self._group, self._knows = group, knows
        self._peers: dict[bytes, PeerState] = {}
        self._changed: dict[str, None] = {}  # in order of change: a replay gives the same result every time
        self._prompts: deque[tuple[str, array[int]]] = deque()
        self._pending_blocks = 0
        self._prefill_s = defaultdict[str, float](float)
        self._merge_at, self._expires_at = NEVER, FOREVER

    def on_message(self, raw: bytes, now: float) -> None:
        try:
            if group_of(raw) == self._group:
                return
            update = PeerUpdate.decode(raw)
        except MalformedUpdate:
            self.malformed += 1
            return
        self._expire(now)
        peer = self._peers.get(update.sender)
        if peer is None:
            if update.last or len(self._peers) >= MAX_PEERS:
                return
            peer = self._peers[update.sender] = PeerState(update.group)
        sent_at = peer.local_time_of(update.clock, now)
        if sent_at is None:
            return
        peer.received_at = now
        self._expires_at = min(self._expires_at, now + PEER_TIMEOUT)
        self._apply(peer, update, sent_at)
        if update.last:
            self.remove(update.sender)

    def merge(self, reader: PeerReader, now: float) -> None:
        """Passes changes on to the reader."""
        if now < self._merge_at:
            return
        self._merge_at = now + MERGE_INTERVAL
        self._expire(now)
        changed, self._changed = self._changed, {}
        for name in changed:
            load = combined(peer.loads[name] for peer in self._peers.values() if name in peer.loads)
            reader.on_peer_load(name, replace(load, prefill_s=self._prefill_s[name]), now)
        while self._prompts:
            reader.on_peer_prompt(*self._prompts.popleft(), now)
        self._pending_blocks = 0

    def replicas(self, now: float) -> int:
        """Number of live gateways, including this gateway."""
        return 1 + len({peer.group for peer in self._peers.values() if now < peer.received_at + PEER_TIMEOUT})

    def remove(self, sender: bytes) -> None:
        """A peer that is gone has no load."""
        if (gone := self._peers.pop(sender, None)) is not None:
            self._changed |= dict.fromkeys(gone.loads)

    def _apply(self, peer: PeerState, update: PeerUpdate, sent_at: float) -> None:
        loads = {name: ages_to_times(load, sent_at) for name, load in update.loads.items() if self._knows(name)}
        for name, load in loads.items():
            if (before := peer.loads.get(name)) is not None:
                self._prefill_s[name] += max(load.prefill_s - before.prefill_s, 0.0)
        self._changed |= dict.fromkeys([*(peer.loads if update.full else ()), *loads])
        peer.loads = loads if update.full else peer.loads | loads
        for name, hashes in update.prompts:
            if hashes and self._knows(name):
                self._prompts.append((name, hashes))
                self._pending_blocks += len(hashes)
        while self._pending_blocks > MAX_PENDING_BLOCKS:
            self._pending_blocks -= len(self._prompts.popleft()[1])

    def _expire(self, now: float) -> None:
        if now < self._expires_at:
            return
        for sender in [sender for sender, peer in self._peers.items() if peer.received_at + PEER_TIMEOUT <= now]:
            self.remove(sender)
        self._expires_at = min((peer.received_at for peer in self._peers.values()), default=FOREVER) + PEER_TIMEOUT


@dataclass(slots=True)
class PeerState:
    """One process of another group."""

    group: bytes
    loads: dict[str, PeerLoad] = field(default_factory=dict)
    received_at: float = NEVER
    clock: float = NEVER  # of the last message, by the peer's clock
    least_skew: float = FOREVER  # recent minimum, of our clock against the peer's
    skew_at: float = NEVER

    def local_time_of(self, clock: float, now: float) -> float | None:
        """Our time of sending; None if the message is repeated or too late."""
        if clock <= self.clock:
            return None
        skew = now - clock
        drift = CLOCK_DRIFT * (now - self.skew_at) if self.skew_at > NEVER else 0.0
        self.clock = clock
        self.least_skew = min(self.least_skew + drift, skew)
        self.skew_at = now
        delay = skew - self.least_skew
        return now - delay if delay < PEER_TIMEOUT else None
