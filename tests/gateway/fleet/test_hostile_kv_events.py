"""Engines whose event ports send too much, too long, for another rank, or another protocol: over real sockets."""

from __future__ import annotations

import asyncio
import logging
import resource
import time
from collections.abc import Awaitable, Callable
from itertools import pairwise
from time import process_time
from typing import Any

import msgspec
import pytest
import zmq.asyncio

from backends.kv_events import MAX_EVENTS, MAX_HASHES, MAX_MESSAGE, PIECE, PublisherRank
from gateway.parts.kv_events import kv_event_connection, kv_event_listener
from gateway.parts.kv_events.kv_event_listener import CLOCK_EVERY, KvEvents
from policies.fleet.fleet import Fleet
from policies.prefix_cache.residency import Residency
from policies.types import Endpoint, Pool
from tests.gateway.fleet.test_kv_event_listener import E, Engine, Source, pack, removed, stored, wired

BLOCKS = 6_000
TIMES = 20  # what chosen hashes may take, of the time of random ones


def cpu_time(work: Callable[[], object]) -> float:
    before = process_time()
    work()
    return process_time() - before


@pytest.mark.parametrize(
    "chosen",
    [
        lambda number: number << 32 | 5,  # equal low bits
        lambda number: number << 40,
        lambda number: 5 << 60 | number,  # equal high bits
        lambda number: number,
        lambda number: number * 0x1_0001_0001 & (1 << 64) - 1,
    ],
)
def test_hashes_that_an_engine_chooses_cost_what_random_ones_do(chosen: Callable[[int], int]) -> None:
    """As one event, and removed again. Linear probing by the low bits took 500 times as long."""
    numbers = range(1, BLOCKS + 1)

    def stored_and_removed(blocks: list[int]) -> None:
        residency = Residency()
        residency.on_stored(blocks, None, 16)
        assert residency.statistics().blocks == BLOCKS
        residency.on_removed(blocks)

    usual = cpu_time(lambda: stored_and_removed([hash(str(number)) & (1 << 64) - 1 for number in numbers]))
    assert cpu_time(lambda: stored_and_removed([chosen(number) for number in numbers])) < TIMES * usual + 0.05


def test_removals_in_any_order_and_branches_anywhere_cost_no_search_of_the_whole_prompt() -> None:
    """A prompt of 40,000 blocks. The search for a block and the cut of a run are bounded."""
    blocks = [hash(str(number)) & (1 << 64) - 1 for number in range(40_000)]
    residency = Residency()
    usual = cpu_time(lambda: residency.on_stored(blocks, None, 16))
    branches = [*range(39_999, 36_000, -1)]
    took = cpu_time(lambda: [residency.on_stored([at + 1], blocks[at], 16) for at in branches])
    assert took < TIMES * usual + 0.05
    took = cpu_time(lambda: residency.on_removed([blocks[at * 7_919 % 40_000] for at in range(40_000)]))
    assert took < TIMES * usual + 0.05
    assert residency.statistics().blocks == len(branches)


def test_runs_of_an_engine_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks without parents are runs of their own, which take more memory than blocks."""
    monkeypatch.setattr("policies.prefix_cache.residency.MAX_RUNS", 100)
    residency = Residency()
    for block in range(1, 500):
        residency.on_stored([block], None, 16)
        assert residency.statistics().runs <= 100


async def turns_while(work: Awaitable[object], known: Callable[[], int]) -> list[int]:
    """Known blocks at each turn of the event loop meanwhile."""
    seen: list[int] = []

    async def count() -> None:
        while True:
            seen.append(known())
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    await work
    counting.cancel()
    return seen


@pytest.mark.parametrize("event", [stored, removed])
async def test_one_event_of_many_blocks_does_not_hold_the_event_loop(
    event: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """100,000 blocks: with a clock that is always late, the loop turns after each piece."""
    looks = iter(range(1_000_000))
    monkeypatch.setattr(kv_event_listener, "perf_counter", lambda: float(next(looks)))
    blocks = [hash(str(number)) & (1 << 64) - 1 or 1 for number in range(100_000)]
    async with wired() as link:
        if event is removed:
            link.known.on_stored(blocks, None, 16)
        message = [b"kv", bytes(8), pack([1.0, [event(*blocks)], 0])]
        seen = await turns_while(link.listener.hear(message), link.blocks)
        assert link.blocks() == (100_000 if event is stored else 0)
        assert max(abs(after - before) for before, after in pairwise(seen)) <= PIECE + CLOCK_EVERY


def test_an_event_in_pieces_is_one_chain() -> None:
    """Its last block is found by depth, and no earlier one."""
    blocks = [*range(1, 601)]
    whole, pieces = Residency(), Residency()
    for residency in (whole, pieces):
        residency.on_sent("key", "", 1)
    whole.on_stored(blocks, None, 16)
    for at in range(0, 600, PIECE):
        parent = blocks[at - 1] if at else None
        pieces.on_stored(blocks[at : at + PIECE], parent, 16, is_last=at + PIECE >= 600)
    for tokens in (9_600, 9_605, PIECE * 16, PIECE * 16 + 7):
        found, expected = (residency.chain("key", tokens, 0) for residency in (pieces, whole))
        assert (found is None) is (expected is None)
        assert found is None or expected is None or found.depth == expected.depth


@pytest.mark.parametrize(
    "frame",
    [
        b"\xcb" + bytes(8) + b"\xdd" + (MAX_EVENTS + 1).to_bytes(4, "big") + b"\xc0" * (MAX_EVENTS + 1),
        b"\xcb" + bytes(8) + b"\x91" + pack(stored(*range(1, MAX_HASHES + 2))),
        b"\xcb" + bytes(8) + b"\x91" + pack(stored(1, session_id=[[]] * 1_000_000)),
        b"\xcb" + bytes(8) + b"\x91" + pack(stored(1, lora_name=[{}] * 1_000_000)),
        b"\xcb" + bytes(8) + b"\x91" + pack(["BlockStored", *[None] * 1_000_000]),
    ],
    ids=["events", "hashes", "session", "adapter", "fields"],
)
async def test_long_lists_are_refused_before_they_are_made(frame: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """Each of their members would take 60 to 100 bytes here."""
    async with wired() as link:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        await link.engine.pub.send_multipart([b"kv", bytes(8), b"\x92" + frame])
        await link.until(lambda: any("malformed batch" in line for line in caplog.messages))
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 40_000  # kB
        await link.engine.publish(stored(1))
        await link.until(lambda: link.blocks() == 1)


async def test_a_message_beyond_the_bound_is_never_held(caplog: pytest.LogCaptureFixture) -> None:
    """The connection ends by its length; the next batches are applied, and the loss is told."""
    async with wired(replays=False) as link:
        await link.engine.publish(stored(1))
        await link.applied()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        await link.engine.pub.send_multipart([b"kv", bytes(8), bytes(4 * MAX_MESSAGE)])
        await link.until(lambda: not link.listener.connected)
        await link.subscribed()
        await link.engine.publish(stored(2), delivered=False)
        await link.engine.publish(stored(3))
        await link.applied()
        assert link.blocks() == 1
        # The publisher of this test holds one copy of the message, in the same process.
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1.6 * 4 * MAX_MESSAGE / 1024
    assert f"cache events of {E}: 1 batches are lost" in caplog.messages


async def test_connections_that_end_before_any_event_are_told_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "firsttoken")
    async with wired() as link:
        for _ in range(6):
            await link.engine.pub.send_multipart([b"kv", bytes(8), bytes(MAX_MESSAGE + 1)])
            await link.until(lambda: not link.listener.connected)
            await link.subscribed()
        await link.engine.publish(stored(1))
        await link.applied()
    assert sum("again and again" in line for line in caplog.messages) == 1
    assert len(caplog.messages) <= 2 * 3 + 1


async def test_few_messages_wait_here_during_a_replay() -> None:
    """The publisher's own mark counts: what is beyond stays with the engine."""
    async with wired() as link:
        assert link.listener._socket.getsockopt(zmq.RCVHWM) <= 32


@pytest.mark.parametrize("kind", ["endless", "silent"])
async def test_a_replay_that_brings_nothing_ends(
    kind: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It repeats an old batch for ever, or says nothing: what came by itself is applied."""
    monkeypatch.setattr(kv_event_listener, "REPLAY_TIMEOUT", 0.3)
    async with wired() as link:
        await link.engine.publish(stored(1, 2))
        await link.applied()

        async def send_old() -> None:
            client, _, _ = await link.engine.router.recv_multipart()
            while kind == "endless":
                await link.engine.router.send_multipart([client, b"", b"kv", bytes(8), link.engine.kept[0]])
                await asyncio.sleep(0.05)

        link.replay.cancel()
        sending = asyncio.create_task(send_old())
        await link.engine.publish(stored(3), delivered=False)
        await link.engine.publish(stored(4))
        await link.applied()
        sending.cancel()
        assert link.blocks() == 1
    assert f"cache events of {E}: the replay from {link.engine.replay_url} has not ended in time" in caplog.messages


async def test_a_replay_with_news_ends_at_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_event_listener, "REPLAY_LIMIT", 0.5)
    async with wired() as link:
        await link.engine.publish(stored(1))
        await link.applied()

        async def send_slowly() -> None:
            client, _, _ = await link.engine.router.recv_multipart()
            for number in range(1, 1_000):
                frame = pack([float(number), [stored(number + 1)], 0])
                await link.engine.router.send_multipart([client, b"", b"kv", number.to_bytes(8, "big"), frame])
                await asyncio.sleep(0.05)

        link.replay.cancel()
        sending = asyncio.create_task(send_slowly())
        link.engine.next = 900
        await link.engine.publish(stored(5_000))
        await link.until(lambda: link.listener.expected == 901)
        assert not sending.done()
        sending.cancel()


@pytest.mark.parametrize("message", [[b"kv"], [b"kv", bytes(8), b"\x93\x00\x90\x00"]], ids=["junk", "without events"])
async def test_a_flood_of_messages_without_events_does_not_hold_the_event_loop(
    message: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a clock that is always late, the loop turns after each message."""
    looks = iter(range(1_000_000))
    monkeypatch.setattr(kv_event_listener, "perf_counter", lambda: float(next(looks)))
    heard = 0
    async with wired() as link:
        hear = link.listener.hear

        async def counted(frames: list[bytes]) -> None:
            nonlocal heard
            heard += 1
            await hear(frames)

        monkeypatch.setattr(link.listener, "hear", counted)

        async def flood() -> None:
            for _ in range(500):
                await link.engine.pub.send_multipart(message)
            await link.until(lambda: heard >= 500)

        seen = await turns_while(flood(), lambda: heard)
        assert max(after - before for before, after in pairwise(seen)) <= 2


async def test_lines_of_one_kind_are_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    """An engine that loses every second batch, or starts anew with each."""
    caplog.set_level(logging.INFO, "firsttoken")
    async with wired(replays=False) as link:
        for number in range(0, 100, 2):
            link.engine.next = number
            await link.engine.publish(stored(number + 1))
        for number in range(100, 0, -2):
            link.engine.next = number
            await link.engine.publish(stored(number + 1))
        await link.until(lambda: link.listener.expected == 3)
    assert sum("batches are lost" in line for line in caplog.messages) == 1
    assert sum("restarted" in line for line in caplog.messages) == 1


# -- another protocol -------------------------------------------------------------------------


async def http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """As uvicorn answers what is no HTTP."""
    await reader.read(1_000)
    writer.write(b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\n\r\nInvalid HTTP request received.")
    writer.close()


async def http_kept_open(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(1_000)
    writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    await reader.read()
    writer.close()


async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()
    writer.close()


async def ssh(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"SSH-2.0-OpenSSH_9.0\r\n")
    await silent(reader, writer)


async def told(url: str, caplog: pytest.LogCaptureFixture, text: str) -> None:
    fleet = Fleet([Pool("p", "m", (Endpoint(E, "p"),))])
    events = KvEvents(fleet, {E: Source(url, None)})
    events.start()
    try:
        deadline = time.monotonic() + 30
        while not any(text in line for line in caplog.messages):
            assert time.monotonic() < deadline, caplog.messages
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.5)
        assert sum(text in line for line in caplog.messages) == 1
    finally:
        await events.close()


@pytest.mark.parametrize("server", [http, http_kept_open, silent, ssh])
async def test_an_address_with_another_protocol_is_told_once(
    server: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_event_connection, "SETTLE", 0.3)
    listener = await asyncio.start_server(server, "127.0.0.1", 0)
    url = f"tcp://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    await told(url, caplog, f"{url} accepts connections, but is no publisher of ZMQ")
    listener.close()


async def test_a_port_of_zmq_that_publishes_nothing_is_told(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kv_replay written as kv_events."""
    monkeypatch.setattr(kv_event_connection, "SETTLE", 0.3)
    context = zmq.asyncio.Context()
    engine = Engine(context)
    assert engine.replay_url is not None
    await told(engine.replay_url, caplog, "is no publisher of ZMQ")
    engine.close()
    context.destroy(linger=0)


async def test_an_address_without_a_listener_is_told(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_event_connection, "SETTLE", 0.3)
    await told("tcp://127.0.0.1:1", caplog, "nobody accepts connections at tcp://127.0.0.1:1")


# -- data-parallel ranks -----------------------------------------------------------------------


def of_rank(sequence: int, rank: Any, *events: Any) -> list[bytes]:
    return [b"kv", sequence.to_bytes(8, "big"), pack([1.0 + sequence, events, rank])]


async def test_events_of_another_rank_are_not_used_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """Two entries of a server with the address of rank 0: rank 1 would be taken to hold what rank 0 holds."""
    async with wired() as link:
        link.listener.rank = PublisherRank(1, 2)
        for sequence in range(5):
            await link.engine.pub.send_multipart(of_rank(sequence, 0, stored(sequence + 1)))
        await link.engine.pub.send_multipart(of_rank(5, 1, stored(77)))
        await link.until(lambda: link.blocks() == 1)
    assert [line for line in caplog.messages if "rank" in line] == [
        f"cache events of {E}: {link.engine.url} publishes those of data-parallel rank 0, not of rank 1: they are not"
        " used; each rank has a port of its own"
    ]


async def test_a_replay_of_another_rank_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    async with wired() as link:
        link.listener.rank = PublisherRank(1, 2)
        await link.engine.pub.send_multipart(of_rank(0, 1, stored(1)))
        await link.until(lambda: link.blocks() == 1)
        link.engine.kept = {1: msgspec.msgpack.encode([2.0, [stored(2)], 0])}
        await link.engine.pub.send_multipart(of_rank(2, 1, stored(3)))
        await link.until(lambda: link.listener.expected == 3)
        assert link.blocks() == 1  # those before the gap are forgotten
    assert any("of data-parallel rank 0, not of rank 1" in line for line in caplog.messages)


@pytest.mark.parametrize(
    ("own", "count", "named", "is_own"),
    [
        (0, 1, 0, True),
        (0, 1, 1, False),
        (5, 1, 5, True),
        (5, 1, 1, False),
        (1, 2, 1, True),
        (1, 2, 0, False),
        (0, 2, 1, False),
        (1, 4, 5, True),  # the second node of two, which counts its own ranks
        (1, 4, 6, False),
        (1, 4, None, True),  # a publisher without ranks
    ],
)
def test_a_rank_is_named_by_its_number_at_the_server_or_of_all(
    own: int, count: int, named: int | None, is_own: bool
) -> None:
    assert PublisherRank(own, count).is_named_by(named) is is_own


@pytest.mark.parametrize("rank", ["0", None, [0], True, {}])
async def test_a_rank_of_another_type_is_none(rank: Any) -> None:
    async with wired() as link:
        link.listener.rank = PublisherRank(1, 2)
        await link.engine.pub.send_multipart(of_rank(0, rank, stored(1)))
        await link.until(lambda: link.blocks() == 1)
