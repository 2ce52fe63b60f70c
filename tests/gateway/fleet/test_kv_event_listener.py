"""KV events over real ZMQ sockets: order, gaps, replay, restarts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count, pairwise
from time import monotonic
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from backends.kv_events import PublisherRank
from gateway.parts.kv_events import kv_event_listener
from gateway.parts.kv_events.kv_event_listener import CLOCK_EVERY, TIME_SLICE, KvEvents, Listener
from policies.fleet.fleet import Fleet
from policies.prefix_cache.endpoint_cache import EndpointCache
from policies.prefix_cache.residency import Residency
from policies.types import Endpoint, Pool, PoolEstimate, PrefixBlocks

E = "p/a"
WITHIN = 30.0  # s
pack = msgspec.msgpack.Encoder().encode


def cache_of(fleet: Fleet) -> EndpointCache:
    cache = fleet.cache(E)
    assert cache is not None
    return cache


@dataclass(frozen=True)
class Source:
    kv_events: str
    kv_replay: str | None
    kv_rank: PublisherRank | None = None


class Engine:
    """Publishes like vLLM: on a PUB socket (XPUB tells of subscribers). A ROUTER socket replays kept batches."""

    def __init__(self, context: zmq.asyncio.Context, port: int = 0, replays: bool = True) -> None:
        self.pub, self.router = context.socket(zmq.XPUB), context.socket(zmq.ROUTER)
        self.pub.setsockopt(zmq.XPUB_VERBOSER, 1)  # each subscription, even of a topic that another has
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

    async def publish(self, *events: Any, delivered: bool = True) -> None:
        """Publishes the events of one step. Not `delivered`: lost on the way."""
        number, self.next, self.clock = self.next, self.next + 1, self.clock + 1
        self.kept[number] = pack([self.clock, events, 0])
        if delivered:
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
class Connection:
    """An engine and the gateway's listener."""

    context: zmq.asyncio.Context
    engine: Engine
    fleet: Fleet
    events: KvEvents
    listener: Listener
    replay: asyncio.Task[None]

    @property
    def known(self) -> Residency:
        engine = cache_of(self.fleet).residency
        assert engine is not None
        return engine

    async def until(self, condition: Callable[[], bool]) -> None:
        deadline = monotonic() + WITHIN
        while not condition():
            assert monotonic() < deadline, "it did not come to that"
            await asyncio.sleep(0.005)

    async def subscribed(self) -> None:
        """Waits until the engine has the listener's subscription: a batch published before is lost."""
        await self.until(lambda: self.listener.connected)
        while not (await self.engine.pub.recv()).startswith(b"\x01"):
            pass  # 0: the end of an earlier one

    async def applied(self) -> None:
        """Waits until all published batches are applied."""
        await self.until(lambda: self.listener.expected == self.engine.next)

    def blocks(self) -> int:
        return self.known.statistics().blocks


@asynccontextmanager
async def wired(replays: bool = True) -> AsyncIterator[Connection]:
    context = zmq.asyncio.Context()
    engine = Engine(context, replays=replays)
    fleet = Fleet([Pool("p", "m", (Endpoint(E, "p"),))])
    events = KvEvents(fleet, {E: Source(engine.url, engine.replay_url)})
    events.start()
    replay = asyncio.create_task(engine.replay())
    link = Connection(context, engine, fleet, events, events.listeners[0], replay)
    try:
        await link.subscribed()
        yield link
    finally:
        replay.cancel()
        await events.close()
        context.destroy(linger=0)


async def test_stored_and_removed_blocks_are_applied() -> None:
    """A block that was never in the GPU is ignored."""
    async with wired() as link:
        await link.engine.publish(stored(1, 2, 3), stored(4, parent=3), stored(9, medium="CPU"))
        await link.engine.publish(removed(4), removed(1, medium="CPU"))
        await link.applied()
        assert link.blocks() == 3


async def test_a_block_that_was_moved_to_a_slower_tier_is_held() -> None:
    """Told by the hash alone, as vLLM's offloading connector does, and then dropped there too."""
    async with wired() as link:
        await link.engine.publish(stored(1, 2), stored(1, 2, medium="CPU", block_size=0, token_ids=[]), removed(2))
        await link.applied()
        assert (link.blocks(), link.known.statistics().slower_tokens) == (2, 16)
        await link.engine.publish(removed(2, medium="CPU"))
        await link.applied()
        assert (link.blocks(), link.known.statistics().slower_tokens) == (1, 0)


async def test_a_gap_is_replayed() -> None:
    """From the first missing number; repeated batches are applied once."""
    async with wired() as link:
        await link.engine.publish(stored(1, 2))
        await link.applied()
        await link.engine.publish(stored(3, parent=2), delivered=False)
        await link.engine.publish(removed(3), delivered=False)
        await link.engine.publish(stored(5, parent=2))
        await link.applied()
        assert (link.engine.asked, link.blocks()) == ([1], 3)


@pytest.mark.parametrize("replays", [False, True])
async def test_an_unrecoverable_gap_clears_the_known_blocks(replays: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Without a replay, or with a replay that begins too late, removals are unknown."""
    async with wired(replays) as link:
        await link.engine.publish(stored(1, 2))
        await link.applied()
        await link.engine.publish(removed(2), delivered=False)
        del link.engine.kept[1]
        await link.engine.publish(stored(5, 6, 7))
        await link.applied()
        assert link.blocks() == 3
    assert [r.message for r in caplog.records] == [f"cache events of {E}: 1 batches are lost"]


async def test_a_late_listener_asks_for_a_replay_from_the_first_batch() -> None:
    """A gateway that starts after a warm engine."""
    async with wired() as link:
        for block in range(50):
            await link.engine.publish(stored(block + 1, parent=block or None), delivered=False)
        await link.engine.publish(stored(51, parent=50))
        await link.applied()
        assert (link.engine.asked, link.blocks()) == ([0], 51)


async def test_without_a_replay_a_late_listener_starts_at_the_current_batch(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing was known before, so no state is dropped; the parent block counts as resident."""
    async with wired(replays=False) as link:
        await link.engine.publish(stored(1, 2), delivered=False)
        await link.engine.publish(stored(3, parent=2))
        await link.applied()
        assert link.blocks() == 2
    assert not caplog.records


@pytest.mark.parametrize("jump", [5, -100_000])
async def test_a_restarted_engine_has_an_empty_cache(jump: int, caplog: pytest.LogCaptureFixture) -> None:
    """Batch numbers restart from 0, whatever the engine's clock shows then; ZMQ reconnects by itself."""
    caplog.set_level(logging.INFO, "firsttoken")
    async with wired() as link:
        prompt = PoolEstimate(50, PrefixBlocks([1, 2, 3]))
        sent = cache_of(link.fleet).on_sent("key", prompt, "s")
        for block in (1, 2, 3):
            await link.engine.publish(stored(block, parent=block - 1 or None, session_id="s"))
        await link.applied()
        cache_of(link.fleet).on_answered("key", sent, 50, 0)
        assert link.fleet.view.hit(Endpoint(E, "p"), prompt) == 48
        old, link.engine = link.engine, None  # type: ignore[assignment]
        old.close()
        await link.until(lambda: not link.listener.connected)
        link.engine = Engine(link.context, port=int(old.url.rpartition(":")[2]))
        link.engine.clock = old.clock + jump
        await link.subscribed()
        await link.engine.publish(stored(4))
        await link.applied()
        assert (link.blocks(), link.fleet.view.hit(Endpoint(E, "p"), prompt)) == (1, 0)
    said = [record.message.partition(": ")[2] for record in caplog.records]
    assert said == ["connected", "the engine is gone", "connected", "the engine has restarted"]


async def test_all_blocks_cleared_empties_the_cache() -> None:
    """Prompts sent before do not count any more either."""
    async with wired() as link:
        prompt = PoolEstimate(50, PrefixBlocks([1, 2, 3]))
        cache_of(link.fleet).on_sent("key", prompt, "")
        await link.engine.publish(stored(1, 2, 3), CLEARED)
        await link.applied()
        assert (link.blocks(), link.fleet.view.hit(Endpoint(E, "p"), prompt)) == (0, 0)


async def test_malformed_batches_are_logged_once_and_skipped(caplog: pytest.LogCaptureFixture) -> None:
    """Another sender on the port; the next valid batch is applied."""
    async with wired() as link:
        await link.engine.publish(stored(1, 2))
        await link.applied()
        for junk in ([b"kv"], [b"kv", b"12", b""], [b"kv", bytes(8), b"\xc1"]):
            await link.engine.pub.send_multipart(junk)
        await link.engine.publish(stored(5))
        await link.applied()
        assert link.blocks() == 1
    assert len(caplog.records) == 1
    assert "malformed batch" in caplog.records[0].message


async def test_a_malformed_replay_clears_the_known_blocks(caplog: pytest.LogCaptureFixture) -> None:
    """The next batch is applied."""
    async with wired() as link:
        await link.engine.publish(stored(1, 2))
        await link.applied()
        await link.engine.publish(removed(1), delivered=False)
        link.engine.kept[1] = b"\xc1"
        await link.engine.publish(stored(5))
        await link.until(lambda: link.engine.asked == [1] and link.blocks() == 0)
        link.engine.kept.clear()
        await link.engine.publish(stored(6))
        await link.until(lambda: link.blocks() == 1)
    assert "malformed batch" in caplog.records[0].message


async def test_an_error_of_our_own_is_logged_once_and_the_listener_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    """A replay cannot be asked for: ZMQ has no socket left, or refuses the address."""
    async with wired() as link:
        await link.engine.publish(stored(1, 2))
        await link.applied()
        replay_url, link.listener.replay_url = link.listener.replay_url, "tcp://no-port"
        for _ in range(2):
            await link.engine.publish(stored(3), delivered=False)
            await link.engine.publish(stored(4))
        await link.until(lambda: bool(caplog.records))
        link.listener.replay_url = replay_url
        await link.engine.publish(stored(5))
        await link.applied()
        assert link.blocks() == 3
    assert [record.message for record in caplog.records] == [f"cache events of {E}: a message could not be applied"]


async def test_listening_to_an_unchanged_source_continues() -> None:
    """Known blocks stay; no event is missed or replayed."""
    async with wired() as link:
        await link.engine.publish(stored(1, 2))
        await link.applied()
        link.events.listen({E: Source(link.engine.url, link.engine.replay_url)})
        assert link.events.listeners == [link.listener]
        await link.engine.publish(stored(3, parent=2))
        await link.applied()
        assert (link.blocks(), link.engine.asked) == (3, [])


async def test_a_removed_source_clears_its_blocks() -> None:
    """Sent prompts still count. The source may come back."""
    async with wired() as link:
        await link.engine.publish(stored(1, 2))
        await link.applied()
        link.events.listen({})
        assert cache_of(link.fleet).residency is None
        link.events.listen({E: Source(link.engine.url, link.engine.replay_url)})
        [link.listener] = link.events.listeners
        await link.subscribed()
        await link.engine.publish(stored(3, parent=2))
        await link.applied()
        assert link.blocks() == 3  # with the replayed batches


async def test_another_model_at_the_same_source_starts_empty() -> None:
    """The fleet has dropped the old cache, so the listener starts anew."""
    async with wired() as link:
        await link.engine.publish(stored(1, 2))
        await link.applied()
        link.fleet.reload([Pool("p", "other", (Endpoint(E, "p"),))])
        link.events.listen({E: Source(link.engine.url, link.engine.replay_url)})
        [listener] = link.events.listeners
        assert listener is not link.listener
        link.listener = listener
        await link.until(lambda: listener.connected)
        assert link.blocks() == 0


async def test_a_large_batch_does_not_block_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """50,000 events in one batch: other tasks run whenever a time slice is used up, here at every fourth look."""
    looks = count(0.0, TIME_SLICE * 0.3)
    monkeypatch.setattr(kv_event_listener, "perf_counter", lambda: next(looks))
    async with wired() as link:
        message = [b"kv", bytes(8), pack([1.0, many(50_000), 0])]
        turns: list[int] = []
        counting = asyncio.create_task(count_turns(turns, link))
        await link.listener.hear(message)
        counting.cancel()
        assert link.blocks() == 50_000
        assert len(turns) > 50_000 / CLOCK_EVERY / 5
        assert max(after - before for before, after in pairwise(turns)) <= 5 * CLOCK_EVERY


def many(events: int) -> Sequence[dict[str, Any]]:
    return [stored(block, parent=block - 1 if block % 100 != 1 else None) for block in range(1, events + 1)]


async def count_turns(turns: list[int], link: Connection) -> None:
    """Add the number of known blocks, at each turn of the event loop."""
    while True:
        turns.append(link.blocks())
        await asyncio.sleep(0)
