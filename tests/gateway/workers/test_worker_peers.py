"""Messages between workers over Unix sockets: load, prompts, polls, and workers that exit, start late or hang."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic

import pytest

from gateway.cluster.gossip import PEER_TIMEOUT, PeerUpdate, ages_to_times
from gateway.fleet.endpoint_poll import PollFinding, PollResult
from gateway.workers.worker_peers import POLL, SIZE, UNREAD, WorkerPeers
from policies.fleet.engine_load import EngineLoad
from policies.fleet.peers import NO_LOAD, PeerLoad
from tests.support.simulated import eventually

pytestmark = pytest.mark.virtual_time

NAMES = ("small/a", "small/b")
BUSY = replace(NO_LOAD, in_flight=3, prefilling=1, queued_tokens=500, decode_tokens=20.0, tpot_limit=0.05)
POLLED = PollResult(12.5, PollFinding.UNWELL, EngineLoad(3, 2, 0.25, 16, 1000, 1.7e9, 10.0, None), "served", True)


@dataclass
class Worker:
    """A worker's peers, and what it has read of them."""

    peers: WorkerPeers
    loads: dict[str, PeerLoad] = field(default_factory=dict)
    prompts: list[tuple[str, list[int]]] = field(default_factory=list)

    def on_peer_load(self, endpoint_id: str, load: PeerLoad, now: float) -> None:
        self.loads[endpoint_id] = load

    def on_peer_prompt(self, endpoint_id: str, hashes: Sequence[int], now: float) -> None:
        self.prompts.append((endpoint_id, list(hashes)))

    def read(self) -> Worker:
        self.peers.merge(self, monotonic())
        return self

    def in_flight(self, endpoint: str) -> int:
        return self.read().loads.get(endpoint, NO_LOAD).in_flight


class Gateway:
    """Workers in one process, with real sockets."""

    def __init__(self, home: Path, count: int) -> None:
        self.paths = [home / f"{number}.sock" for number in range(count)]

    def worker(self, number: int) -> Worker:
        return Worker(WorkerPeers(number, self.paths))

    async def start(self, number: int, endpoints: Sequence[str] = NAMES) -> Worker:
        made = self.worker(number)
        await made.peers.start(endpoints.__contains__)
        return made


@asynccontextmanager
async def started(
    home: Path, count: int, endpoints: Sequence[str] = NAMES
) -> AsyncIterator[tuple[Gateway, list[Worker]]]:
    """Workers, each connected to all others."""
    gateway = Gateway(home, count)
    workers = [await gateway.start(number, endpoints) for number in range(count)]
    try:
        await eventually(lambda: all(len(each.peers._outgoing) == count - 1 for each in workers))
        yield gateway, workers
    finally:
        for each in workers:
            await each.peers.close()


async def test_a_load_arrives_at_all_other_workers(tmp_path: Path) -> None:
    """Whole, with past times; not at the sender."""
    began = monotonic()
    async with started(tmp_path, 3) as (_, (sender, *others)):
        sent = replace(BUSY, queued_since=began - 0.25, last_used_at=began - 0.5)
        sender.peers.publish(NAMES[1], sent)
        for each in others:
            await eventually(lambda each=each: each.in_flight(NAMES[1]) == 3)
            found = each.loads[NAMES[1]]
            assert (found.queued_since, found.last_used_at) == pytest.approx((began - 0.25, began - 0.5), abs=0.2)
            assert replace(found, queued_since=0.0, last_used_at=0.0) == replace(
                sent, queued_since=0.0, last_used_at=0.0
            )
        assert sender.read().loads == {}


async def test_loads_of_several_workers_are_added_up(tmp_path: Path) -> None:
    async with started(tmp_path, 3) as (_, (reader, *others)):
        for each in others:
            each.peers.publish(NAMES[0], BUSY)
        await eventually(lambda: reader.in_flight(NAMES[0]) == 6)


async def test_prompts_arrive_once_and_in_order(tmp_path: Path) -> None:
    """Those of unknown endpoints are left out."""
    async with started(tmp_path, 2) as (_, (sender, reader)):
        sent = [(NAMES[number % 2], list(range(number, number + 20))) for number in range(200)]
        for name, hashes in sent:
            sender.peers.publish_prompt(name, hashes)
            sender.peers.publish_prompt("unknown/a", hashes)
        await eventually(lambda: len(reader.read().prompts) >= len(sent))
        assert reader.prompts == sent
        assert sender.read().prompts == []


async def test_a_worker_that_has_exited_has_no_load_at_once(tmp_path: Path) -> None:
    """Long before the time after which a silent worker is given up."""
    async with started(tmp_path, 3) as (_, (exits, stays, reader)):
        for each in (exits, stays):
            each.peers.publish(NAMES[0], BUSY)
        await eventually(lambda: reader.in_flight(NAMES[0]) == 6)
        ended = monotonic()
        await exits.peers.close()
        await eventually(lambda: reader.in_flight(NAMES[0]) == 3)
        assert monotonic() - ended < PEER_TIMEOUT / 2


async def test_a_successor_gets_the_loads_of_the_others(tmp_path: Path) -> None:
    """With their next full messages; and the others get its loads."""
    async with started(tmp_path, 2) as (gateway, (stays, exits)):
        stays.peers.publish(NAMES[0], BUSY)
        await eventually(lambda: exits.in_flight(NAMES[0]) == 3)
        await exits.peers.close()
        successor = await gateway.start(1)
        try:
            await eventually(lambda: successor.in_flight(NAMES[0]) == 3)
            successor.peers.publish(NAMES[1], BUSY)
            await eventually(lambda: stays.in_flight(NAMES[1]) == 3)
        finally:
            await successor.peers.close()


async def test_thousands_of_endpoints_are_shared(tmp_path: Path) -> None:
    """A message may be larger than the buffer of a socket."""
    endpoints = [f"small/engine-{number}.model-servers.internal:8000" for number in range(3000)]
    async with started(tmp_path, 2, endpoints) as (_, (sender, reader)):
        for name in endpoints:
            sender.peers.publish(name, BUSY)
        await eventually(lambda: all(reader.in_flight(name) == 3 for name in (endpoints[0], endpoints[-1])))
        assert reader.loads.keys() == {*endpoints}


async def test_messages_for_a_worker_that_hangs_are_bounded_and_made_up_for(tmp_path: Path) -> None:
    """The latest load arrives once the worker reads again."""
    gateway, connected = Gateway(tmp_path, 2), asyncio.get_running_loop().create_future()
    hung = await asyncio.start_unix_server(lambda *both: connected.set_result(both), gateway.paths[1])
    sender = await gateway.start(0)
    reader, writer = await connected  # without `writer` the connection ends
    [connection] = sender.peers._outgoing
    own = next(name for name in map(str, range(99)) if sender.peers.in_charge(name))
    for _ in range(200):
        sender.peers.put_poll(own, replace(POLLED, model="x" * 50_000))
        await asyncio.sleep(0)
    assert UNREAD <= connection.transport.get_write_buffer_size() < UNREAD + 60_000
    sender.peers.publish(NAMES[0], BUSY)
    async with asyncio.timeout(10):
        while (await next_update(reader)).get(NAMES[0]) != BUSY:
            pass
    await sender.peers.close()
    writer.close()
    hung.close()


async def next_update(reader: asyncio.StreamReader) -> dict[str, PeerLoad]:
    """Loads of the next message; of a poll none. Times of BUSY are at an infinite age."""
    message = await reader.readexactly(int.from_bytes(await reader.readexactly(SIZE), "little"))
    if message.startswith(POLL):
        return {}
    return {name: ages_to_times(load, 0.0) for name, load in PeerUpdate.decode(message).loads.items()}


async def test_a_poll_arrives_unchanged(tmp_path: Path) -> None:
    """From the worker in charge of the endpoint alone: one that stands in for it polls for itself."""
    async with started(tmp_path, 3) as (_, workers):
        in_charge, *others = sorted(workers, key=lambda each: not each.peers.in_charge(NAMES[0]))
        assert others[0].peers.latest_poll(NAMES[0]) is None
        in_charge.peers.put_poll(NAMES[0], POLLED)
        await eventually(lambda: others[0].peers.latest_poll(NAMES[0]) is not None)
        others[1].peers.put_poll(NAMES[0], replace(POLLED, found=PollFinding.GONE))
        others[1].peers.publish(NAMES[1], BUSY)
        await eventually(lambda: others[0].in_flight(NAMES[1]) == 3)
        assert others[0].peers.latest_poll(NAMES[0]) == POLLED


async def test_one_worker_is_in_charge_of_an_endpoint(tmp_path: Path) -> None:
    """Every worker of some, by the endpoint's id alone."""
    workers = [Gateway(tmp_path, 3).worker(number).peers for number in range(3)]
    in_charge = [[each.in_charge(f"small/{number}") for each in workers] for number in range(60)]
    assert {sum(found) for found in in_charge} == {1}
    assert {found.index(True) for found in in_charge} == {0, 1, 2}
