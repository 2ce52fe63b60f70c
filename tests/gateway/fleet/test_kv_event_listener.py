"""Cache events over real ZMQ sockets: order, gaps, replay, restarts."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import monotonic
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from gateway.fleet.kv_event_listener import KvEvents, Listener
from policies.fleet.fleet import Fleet
from policies.prefix_cache.endpoint_cache import EndpointCache
from policies.prefix_cache.residency import Residency
from policies.types import Endpoint, Pool, PoolEstimate, PrefixBlocks

E = "p/a"
WITHIN = 3.0  # s
pack = msgspec.msgpack.Encoder().encode


def cache_of(fleet: Fleet) -> EndpointCache:
    cache = fleet.cache(E)
    assert cache is not None
    return cache


@dataclass(frozen=True)
class Source:
    kv_events: str
    kv_replay: str | None


class Engine:
    """Publishes as vLLM does: PUB, and a ROUTER that sends kept batches again, whole from a number on."""

    def __init__(self, context: zmq.asyncio.Context, port: int = 0, replays: bool = True) -> None:
        self.pub, self.router = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        self.url = self._bind(self.pub, port)
        self.replay_url = self._bind(self.router, 0) if replays else None
        self.kept: dict[int, bytes] = {}
        self.clock, self.next = monotonic(), 0
        self.asked: list[int] = []

    @staticmethod
    def _bind(socket: zmq.asyncio.Socket, port: int) -> str:
        if port:
            socket.bind(f"tcp://127.0.0.1:{port}")
            return f"tcp://127.0.0.1:{port}"
        return f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"

    async def publish(self, *events: Any, heard: bool = True) -> None:
        """One step's events. Not `heard`: lost on the way."""
        number, self.next, self.clock = self.next, self.next + 1, self.clock + 1
        self.kept[number] = pack([self.clock, events, 0])
        if heard:
            await self.pub.send_multipart([b"kv", number.to_bytes(8, "big"), self.kept[number]])

    async def replay(self) -> None:
        while True:
            client, _, start = await self.router.recv_multipart()
            self.asked.append(int.from_bytes(start, "big"))
            for number, payload in self.kept.items():
                if number >= self.asked[-1]:
                    await self.router.send_multipart([client, b"", b"kv", number.to_bytes(8, "big"), payload])
            await self.router.send_multipart([client, b"", b"", (-1).to_bytes(8, "big", signed=True), b""])

    def close(self) -> None:
        self.pub.close(linger=0)
        self.router.close(linger=0)


def stored(*blocks: int, parent: int | None = None, **more: Any) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": blocks,
        "parent_block_hash": parent,
        "token_ids": [7] * 16 * len(blocks),
        "block_size": 16,
        "medium": "GPU",
    } | more


def removed(*blocks: int, **more: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": blocks, "medium": "GPU"} | more


CLEARED = {"type": "AllBlocksCleared"}


@dataclass
class Wired:
    """An engine, and the gateway's side."""

    context: zmq.asyncio.Context
    engine: Engine
    fleet: Fleet
    events: KvEvents
    listener: Listener

    @property
    def known(self) -> Residency:
        engine = cache_of(self.fleet).residency
        assert engine is not None
        return engine

    async def until(self, true: Callable[[], bool]) -> None:
        deadline = monotonic() + WITHIN
        while not true():
            assert monotonic() < deadline, "it did not come to that"
            await asyncio.sleep(0.005)

    async def applied(self) -> None:
        """All that was published has been taken in."""
        await self.until(lambda: self.listener.expected == self.engine.next)

    def blocks(self) -> int:
        return self.known.statistics().blocks


@asynccontextmanager
async def wired(replays: bool = True) -> AsyncIterator[Wired]:
    context = zmq.asyncio.Context()
    engine = Engine(context, replays=replays)
    fleet = Fleet([Pool("p", "m", (Endpoint(E, "p"),))])
    events = KvEvents(fleet, {E: Source(engine.url, engine.replay_url)})
    events.start()
    replay = asyncio.create_task(engine.replay())
    there = Wired(context, engine, fleet, events, events.listeners[0])
    try:
        await there.until(lambda: there.listener.connected)
        yield there
    finally:
        replay.cancel()
        await events.close()
        context.destroy(linger=0)


async def test_blocks_come_and_go() -> None:
    """As the engine says; those that lie on another medium than the GPU are none."""
    async with wired() as there:
        await there.engine.publish(stored(1, 2, 3), stored(4, parent=3), stored(9, medium="CPU"))
        await there.engine.publish(removed(4), removed(1, medium="CPU"))
        await there.applied()
        assert there.blocks() == 3


async def test_a_gap_is_asked_for_again() -> None:
    """From the first number that is missing; what comes twice is taken once."""
    async with wired() as there:
        await there.engine.publish(stored(1, 2))
        await there.applied()
        await there.engine.publish(stored(3, parent=2), heard=False)
        await there.engine.publish(removed(3), heard=False)
        await there.engine.publish(stored(5, parent=2))
        await there.applied()
        assert (there.engine.asked, there.blocks()) == ([1], 3)


@pytest.mark.parametrize("replays", [False, True])
async def test_a_gap_that_stays_voids_what_was_known(replays: bool, caplog: pytest.LogCaptureFixture) -> None:
    """No replay, or one that does not reach back so far: what was removed meanwhile is not known."""
    async with wired(replays) as there:
        await there.engine.publish(stored(1, 2))
        await there.applied()
        await there.engine.publish(removed(2), heard=False)
        del there.engine.kept[1]
        await there.engine.publish(stored(5, 6, 7))
        await there.applied()
        assert there.blocks() == 3
    assert [r.message for r in caplog.records] == [f"cache events of {E}: 1 batches are lost"]


async def test_whoever_comes_late_asks_for_the_beginning() -> None:
    """A gateway that starts before a warm engine."""
    async with wired() as there:
        for block in range(50):
            await there.engine.publish(stored(block + 1, parent=block or None), heard=False)
        await there.engine.publish(stored(51, parent=50))
        await there.applied()
        assert (there.engine.asked, there.blocks()) == ([0], 51)


async def test_without_a_replay_whoever_comes_late_begins_there(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing was built on what came before, so nothing is void; the block before is there."""
    async with wired(replays=False) as there:
        await there.engine.publish(stored(1, 2), heard=False)
        await there.engine.publish(stored(3, parent=2))
        await there.applied()
        assert there.blocks() == 2
    assert not caplog.records


async def test_a_restarted_engine_holds_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """It counts from 0 again, at a later time; ZMQ finds it where the old one was."""
    caplog.set_level(logging.INFO, "firsttoken")
    async with wired() as there:
        prompt = PoolEstimate(50, PrefixBlocks([1, 2, 3]))
        sent = cache_of(there.fleet).on_sent("key", prompt, "s")
        for block in (1, 2, 3):
            await there.engine.publish(stored(block, parent=block - 1 or None, session_id="s"))
        await there.applied()
        cache_of(there.fleet).on_answered("key", sent, 50, 0)
        assert there.fleet.hit(Endpoint(E, "p"), prompt) == 48
        old, there.engine = there.engine, None  # type: ignore[assignment]
        old.close()
        await there.until(lambda: not there.listener.connected)
        there.engine = Engine(there.context, port=int(old.url.rpartition(":")[2]))
        there.engine.clock = old.clock + 5
        await there.until(lambda: there.listener.connected)
        await there.engine.publish(stored(4))
        await there.applied()
        assert (there.blocks(), there.fleet.hit(Endpoint(E, "p"), prompt)) == (1, 0)
    said = [record.message.partition(": ")[2] for record in caplog.records]
    assert said == ["connected", "the engine is gone", "connected", "the engine has restarted"]


async def test_a_cleared_cache_holds_nothing() -> None:
    """AllBlocksCleared: what was sent there counts no more either."""
    async with wired() as there:
        prompt = PoolEstimate(50, PrefixBlocks([1, 2, 3]))
        cache_of(there.fleet).on_sent("key", prompt, "")
        await there.engine.publish(stored(1, 2, 3), CLEARED)
        await there.applied()
        assert (there.blocks(), there.fleet.hit(Endpoint(E, "p"), prompt)) == (0, 0)


async def test_garbage_is_said_once_and_survived(caplog: pytest.LogCaptureFixture) -> None:
    """A stranger on the port; the next good batch counts."""
    async with wired() as there:
        await there.engine.publish(stored(1, 2))
        await there.applied()
        for junk in ([b"kv"], [b"kv", b"12", b""], [b"kv", bytes(8), b"\xc1"]):
            await there.engine.pub.send_multipart(junk)
        await there.engine.publish(stored(5))
        await there.applied()
        assert there.blocks() == 1
    assert len(caplog.records) == 1
    assert "what came is none" in caplog.records[0].message


async def test_a_replay_of_garbage_is_survived(caplog: pytest.LogCaptureFixture) -> None:
    """What was known is void, and the next batch counts."""
    async with wired() as there:
        await there.engine.publish(stored(1, 2))
        await there.applied()
        await there.engine.publish(removed(1), heard=False)
        there.engine.kept[1] = b"\xc1"
        await there.engine.publish(stored(5))
        await there.until(lambda: there.engine.asked == [1] and there.blocks() == 0)
        there.engine.kept.clear()
        await there.engine.publish(stored(6))
        await there.until(lambda: there.blocks() == 1)
    assert "what came is none" in caplog.records[0].message


async def test_who_is_told_of_the_same_source_again_listens_on() -> None:
    """What was heard stands: no event is missed, and none is asked for again."""
    async with wired() as there:
        await there.engine.publish(stored(1, 2))
        await there.applied()
        there.events.listen({E: Source(there.engine.url, there.engine.replay_url)})
        assert there.events.listeners == [there.listener]
        await there.engine.publish(stored(3, parent=2))
        await there.applied()
        assert (there.blocks(), there.engine.asked) == (3, [])


async def test_a_source_that_is_gone_is_heard_no_more_and_its_word_is_void() -> None:
    """What was sent there still counts. It may come back."""
    async with wired() as there:
        await there.engine.publish(stored(1, 2))
        await there.applied()
        there.events.listen({})
        assert cache_of(there.fleet).residency is None
        there.events.listen({E: Source(there.engine.url, there.engine.replay_url)})
        [there.listener] = there.events.listeners
        await there.until(lambda: there.listener.connected)
        await there.engine.publish(stored(3, parent=2))
        await there.applied()
        assert there.blocks() == 3  # with what it was sent again


async def test_another_model_behind_the_same_source_begins_anew() -> None:
    """The fleet has forgotten the one before, and so must whoever listens."""
    async with wired() as there:
        await there.engine.publish(stored(1, 2))
        await there.applied()
        there.fleet.reload([Pool("p", "other", (Endpoint(E, "p"),))])
        there.events.listen({E: Source(there.engine.url, there.engine.replay_url)})
        [listener] = there.events.listeners
        assert listener is not there.listener
        there.listener = listener
        await there.until(lambda: listener.connected)
        assert there.blocks() == 0


async def test_much_at_once_does_not_hold_up_the_loop() -> None:
    """50,000 events in one batch: others get their turn every few milliseconds."""
    async with wired() as there:
        message = [b"kv", bytes(8), pack([1.0, many(50_000), 0])]
        gc.collect()
        longest = asyncio.create_task(longest_pause())
        await asyncio.sleep(0.01)
        await there.listener.hear(message)
        longest.cancel()
        assert (there.blocks(), await longest < 0.05) == (50_000, True)


def many(events: int) -> Sequence[dict[str, Any]]:
    return [stored(block, parent=block - 1 if block % 100 != 1 else None) for block in range(1, events + 1)]


async def longest_pause() -> float:
    longest, last = 0.0, monotonic()
    try:
        while True:
            await asyncio.sleep(0)
            now = monotonic()
            longest, last = max(longest, now - last), now
    except asyncio.CancelledError:
        return longest
