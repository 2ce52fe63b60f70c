"""Samples of a trace by session, for replays that are cheaper than the traffic, and for loads above the recorded one.

Rules:
- A session is sampled as a whole: its turns share a prefix, and a part of them would find other caches.
- Samples are nested: the sessions of a smaller share are among those of a larger one, so that fleets of different sizes
  are compared on the same callers.
- A share above 1 adds copies. A copy has content of its own, but for blocks that several sessions share, and begins up
  to COPY_DELAY later.
- What continues a session is found by `lab.traffic.session_chains`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from hashlib import blake2b
from math import ceil
from zlib import crc32

from lab.traffic.session_chains import SessionChains
from lab.traffic.traces import Arrival

COPY_DELAY = 10.0  # s
_SCALE = 1 << 32


def with_sessions(arrivals: Iterable[Arrival]) -> list[Arrival]:
    """The same arrivals, in order, each with a session. A turn that follows another one stays in its session."""
    chains, latest, found = SessionChains(), dict[int, int](), list[Arrival]()
    for arrival in arrivals:
        session = chains.session(arrival.tenant, arrival.session, arrival.hashes, arrival.prompt_tokens)
        session = latest[arrival.session] = latest[arrival.session] if arrival.follows else session
        found.append(arrival if session == arrival.session else replace(arrival, session=session))
    return found


def sampled(arrivals: Sequence[Arrival], share: float, seed: int = 0) -> list[Arrival]:
    """About `share` of the sessions, all their turns, in order of time. Every arrival has a session."""
    if share == 1.0:
        return list(arrivals)
    shared = _shared_blocks(arrivals) if share > 1 else frozenset[int]()
    found = [
        arrival
        for copy in range(ceil(share))
        for arrival in _copied(arrivals, copy, min(share - copy, 1.0), seed, shared)
    ]
    return sorted(found, key=lambda arrival: arrival.at)


def _copied(
    arrivals: Iterable[Arrival], copy: int, share: float, seed: int, shared: frozenset[int]
) -> Iterator[Arrival]:
    """`copy` 0: the sessions themselves."""
    mark = crc32(b"copy %d" % copy) << 31
    for arrival in arrivals:
        drawn = _drawn(arrival.session, seed + copy)
        if drawn >= share:
            continue
        if copy:
            own, answer = (_marked(blocks, mark, shared) for blocks in (arrival.hashes, arrival.answer_hashes))
            at = arrival.at + COPY_DELAY * _drawn(arrival.session, ~copy)
            arrival = replace(arrival, at=at, hashes=own, answer_hashes=answer, session=arrival.session ^ mark)
        yield arrival


def _marked(blocks: Iterable[int], mark: int, shared: frozenset[int]) -> array[int]:
    return array("Q", (block if block in shared else block ^ mark for block in blocks))


def _drawn(session: int, seed: int) -> float:
    """The place of a session in [0, 1), the same in every replay. A CRC is linear: of numbers in sequence it draws a
    half where it should draw a third."""
    return int.from_bytes(blake2b(b"%d %d" % (session, seed), digest_size=4).digest()) / _SCALE


def _shared_blocks(arrivals: Iterable[Arrival]) -> frozenset[int]:
    first, shared = dict[int, int](), set[int]()
    for arrival in arrivals:
        for block in arrival.hashes:
            if first.setdefault(block, arrival.session) != arrival.session:
                shared.add(block)
    return frozenset(shared)
