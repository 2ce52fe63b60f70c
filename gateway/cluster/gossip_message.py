"""What one replica tells the others, as bytes: its burdens by endpoint, and the prompts that it sent. Pure.

Rules:
- Endpoints go by id, burdens as packed numbers, prompts as the hashes of their blocks. No text of anybody.
- A time is told as an age: clocks of two machines have nothing in common. NEVER and FOREVER are infinite ages.
- A message is read whole or not at all: a checksum, exact lengths, and numbers that can be. What is not is Malformed.
- `full`: all that the teller has under way; what it does not name has ended. `last`: the teller is gone.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isfinite, isnan
from struct import Struct, error
from typing import NamedTuple
from zlib import crc32

from policies.fleet.decode_interference import NO_MISSES, STALL_GRID
from policies.fleet.peers import PEER_LOAD_COUNTS as COUNTS
from policies.fleet.peers import PEER_LOAD_FLOATS, PeerLoad
from policies.types import FOREVER, NEVER

MAGIC = b"ftr1"
HEAD = Struct(
    "<4sI8s8sdBHHH"
)  # magic, checksum of all after it, group, teller, its clock, flags, names, burdens, prompts
CHECKED = 8  # bytes that are not in the checksum
NAME = Struct("<H")
BURDEN = Struct(f"<{COUNTS}qB{PEER_LOAD_FLOATS}d")  # counts, whether harm follows, the rest
HARM = Struct(f"<{len(STALL_GRID)}d")
PROMPT = Struct("<HI")  # its endpoint among the names, its blocks
TIMES = slice(COUNTS, COUNTS + 5)  # of a Burden: since, heard_at, used_at, blocked_until, down_at
FULL, LAST = 1, 2  # flags

LARGEST = 4 << 20  # bytes of a message
MOST = 1 << 48  # of a count
AHEAD = 60.0  # s that a provider's rate limit may lie ahead (policies.fleet.circuit_breaker)


class MalformedUpdate(ValueError):
    """Not a message of ours, or not whole."""


class PeerUpdate(NamedTuple):
    """`clock`: the teller's, when it told. Ages in burdens are relative to it."""

    group: bytes
    teller: bytes
    clock: float
    full: bool
    last: bool
    burdens: Mapping[str, PeerLoad]  # with ages, to be translated by `at`
    prompts: Sequence[tuple[str, array[int]]]


def packed(
    group: bytes,
    teller: bytes,
    now: float,
    burdens: Mapping[str, PeerLoad],
    prompts: Sequence[tuple[str, array[int]]],
    *,
    full: bool = False,
    last: bool = False,
) -> bytes:
    """Everything that is told at once. Times of the burdens are of the clock that `now` is read from."""
    names = list(dict.fromkeys([*burdens, *(name for name, _ in prompts)]))
    places = {name: place for place, name in enumerate(names)}
    parts = [_text(name) for name in names]
    parts += [_burden(burden, now) for burden in burdens.values()]
    parts += [PROMPT.pack(places[name], len(hashes)) + hashes.tobytes() for name, hashes in prompts]
    counts = len(names), len(burdens), len(prompts)
    whole = HEAD.pack(MAGIC, 0, group, teller, now, FULL * full | LAST * last, *counts)[CHECKED:] + b"".join(parts)
    return MAGIC + crc32(whole).to_bytes(4, "little") + whole


def _text(name: str) -> bytes:
    raw = name.encode()
    return NAME.pack(len(raw)) + raw


def _burden(burden: PeerLoad, now: float) -> bytes:
    fields, harm = [*burden.numbers()], burden.expected_tpot_misses
    fields[TIMES] = [now - time for time in fields[TIMES]]
    told = BURDEN.pack(*fields[:COUNTS], bool(harm), *fields[COUNTS:])
    return told + HARM.pack(*harm) if harm else told


# --------------------------------------------------------------------------- reading


def teller_of(raw: bytes) -> tuple[bytes, bytes]:
    """Group and teller, before anything else is looked at. Raises Malformed."""
    if not HEAD.size <= len(raw) <= LARGEST or raw[:4] != MAGIC:
        raise MalformedUpdate
    return raw[8:16], raw[16:24]


def read(raw: bytes) -> PeerUpdate:
    """Raises Malformed."""
    teller_of(raw)
    _, checksum, group, teller, clock, flags, names, burdens, prompts = HEAD.unpack_from(raw)
    if checksum != crc32(memoryview(raw)[CHECKED:]) or not isfinite(clock) or burdens > names:
        raise MalformedUpdate
    reader = _MessageReader(raw)
    try:
        known = [reader.text() for _ in range(names)]
        said = {name: reader.burden() for name in known[:burdens]}
        sent = [reader.prompt(known) for _ in range(prompts)]
    except (error, ValueError, IndexError):
        raise MalformedUpdate from None
    if reader.at != len(raw) or len(said) != burdens:
        raise MalformedUpdate
    return PeerUpdate(group, teller, clock, bool(flags & FULL), bool(flags & LAST), said, sent)


class _MessageReader:
    def __init__(self, raw: bytes) -> None:
        self.raw, self.at = raw, HEAD.size

    def _take(self, size: int) -> bytes:
        taken = self.raw[self.at : self.at + size]
        if len(taken) != size:
            raise MalformedUpdate
        self.at += size
        return taken

    def text(self) -> str:
        (size,) = NAME.unpack(self._take(NAME.size))
        return self._take(size).decode()

    def burden(self) -> PeerLoad:
        fields = BURDEN.unpack(self._take(BURDEN.size))
        counts, harmed, rest = fields[:COUNTS], fields[COUNTS], fields[COUNTS + 1 :]
        harm = HARM.unpack(self._take(HARM.size)) if harmed else NO_MISSES
        burden = PeerLoad.from_numbers((*counts, *rest), harm)
        if not _can_be(burden):
            raise MalformedUpdate
        return burden

    def prompt(self, names: Sequence[str]) -> tuple[str, array[int]]:
        place, blocks = PROMPT.unpack(self._take(PROMPT.size))
        hashes = array("Q")
        hashes.frombytes(self._take(8 * blocks))
        return names[place], hashes


def _can_be(burden: PeerLoad) -> bool:
    numbers = burden.numbers()
    amounts = burden.prefill_s, burden.decode_s, burden.decode_tokens, *burden.expected_tpot_misses
    return (
        all(0 <= count <= MOST for count in numbers[:COUNTS])
        and burden.warming <= 1
        and burden.prefilling <= burden.in_flight
        and all(0 <= amount < FOREVER for amount in amounts)
        and burden.tpot_budget > 0
        and not any(map(isnan, numbers))
    )


def at(burden: PeerLoad, told_at: float) -> PeerLoad:
    """With times of our clock: it was told at `told_at`. What has happened lies before that."""
    return replace(
        burden,
        queued_since=FOREVER if burden.queued_since == NEVER else told_at - max(burden.queued_since, 0.0),
        last_token_at=told_at - max(burden.last_token_at, 0.0),
        last_used_at=told_at - max(burden.last_used_at, 0.0),
        blocked_until=told_at - max(burden.blocked_until, -AHEAD),
        down_since=told_at - max(burden.down_since, 0.0),
    )
