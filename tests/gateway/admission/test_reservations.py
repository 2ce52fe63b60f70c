"""Quotas, wherever they are kept: in memory, in memory that workers share, and in Redis they are one set of rules.

On a virtual clock, which Redis is told too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from gateway.admission.local_quotas import LocalQuotas, SharedQuotaMemory
from gateway.admission.quotas import Quotas
from gateway.admission.redis_quotas import RedisQuotas
from gateway.cluster.redis_client import RedisClient
from policies.quota.key_limits import NANO, Claim, KeyLimits, QuotaLimit, Reservation
from tests.support.redis import redis_server
from tests.support.simulated import eventually

OCTOBER, NOVEMBER = 1_790_899_200.0, 1_793_577_600.0  # 2026-10-02, 2026-11-02
VIRTUAL = "redis.call('HMGET', 'clock', 's', 'us')"
LEASE = 60.0  # s


class Clock:
    """`at`: seconds. Monotonic and wall clock at once."""

    def __init__(self) -> None:
        self.at, self.wall_at = 1000.0, OCTOBER

    def monotonic(self) -> float:
        return self.at

    def wall(self) -> float:
        return self.wall_at


class Place:
    """One or several that share a quota. `turn(n)`: the n-th of them."""

    def __init__(self, clock: Clock, quotas: list[Quotas], tell: Callable[[], Any]) -> None:
        self.clock, self.quotas, self._tell = clock, quotas, tell

    async def pass_time(self, seconds: float) -> None:
        self.clock.at += seconds
        await self._tell()

    async def ask(
        self, limits: KeyLimits, tokens: int = 1, cost: int = 0, turn: int = 0, name: str = "web"
    ) -> Reservation:
        await self._tell()
        return await self.quotas[turn % len(self.quotas)].reserve(name, limits, Claim(tokens, cost))

    async def settle(self, reservation: Reservation, tokens: int = 1, cost: int = 0, turn: int = 0) -> None:
        self.quotas[turn % len(self.quotas)].settle(reservation, tokens, cost)
        await self._tell()


async def nothing() -> None: ...


@asynccontextmanager
async def in_memory() -> AsyncIterator[Place]:
    clock = Clock()
    yield Place(clock, [LocalQuotas(clock=clock.monotonic, wall=clock.wall)], nothing)


@asynccontextmanager
async def in_workers() -> AsyncIterator[Place]:
    clock, shared = Clock(), SharedQuotaMemory(["web", "other"], 3)
    yield Place(clock, [LocalQuotas(shared, n, clock.monotonic, clock.wall) for n in range(3)], nothing)


@asynccontextmanager
async def in_redis() -> AsyncIterator[Place]:
    """Two replicas."""
    clock = Clock()
    async with redis_server() as server, server.client() as client:
        links = [RedisClient(server.url, timeout=2.0) for _ in range(2)]
        quotas = [RedisQuotas(link, 1, clock.monotonic, clock.wall, VIRTUAL) for link in links]

        async def tell() -> None:
            await client.hset("clock", mapping={"s": str(int(clock.at)), "us": str(round(clock.at % 1 * 1e6))})
            for one in quotas:
                one.send_pending()
                await one.pipeline.close()

        for link in links:
            link.start()
        await eventually(lambda: all(link.up for link in links))
        try:
            yield Place(clock, list(quotas), tell)
        finally:
            for one in quotas:
                await one.close()
            for link in links:
                await link.close()


PLACES = {"memory": in_memory, "workers": in_workers, "redis": in_redis}


@pytest.fixture(params=PLACES)
async def place(request: pytest.FixtureRequest) -> AsyncIterator[Place]:
    async with PLACES[request.param]() as made:
        yield made


async def test_requests_are_let_in_up_to_the_limit_whoever_is_asked(place: Place) -> None:
    limits = KeyLimits(requests=4)
    asked = [await place.ask(limits, turn=n) for n in range(6)]
    assert [one.verdict.limit for one in asked] == [None] * 4 + [QuotaLimit.REQUESTS] * 2
    assert [one.verdict.requests_left for one in asked] == [3, 2, 1, 0, 0, 0]


async def test_what_it_says_of_waiting_is_true(place: Place) -> None:
    """A moment sooner it is still refused; then it is let in."""
    limits = KeyLimits(requests=2)
    await place.ask(limits)
    await place.pass_time(10.25)
    await place.ask(limits, turn=1)
    refused = (await place.ask(limits)).verdict
    assert refused.wait == pytest.approx(50.75)
    assert refused.requests_reset == pytest.approx(60.75)
    assert refused.wait is not None
    await place.pass_time(refused.wait - 0.01)
    assert (await place.ask(limits)).verdict.limit is QuotaLimit.REQUESTS
    await place.pass_time(0.01)
    assert (await place.ask(limits)).verdict.limit is None


async def test_keys_do_not_count_for_each_other(place: Place) -> None:
    limits = KeyLimits(requests=1)
    assert (await place.ask(limits)).verdict.limit is None
    assert (await place.ask(limits, name="other")).verdict.limit is None


async def test_what_is_refused_has_claimed_nothing(place: Place) -> None:
    """Neither of the limit that refused it, nor of another."""
    limits = KeyLimits(requests=10, tokens=100, concurrent=10, cost=10)
    assert (await place.ask(limits, 60, 5)).verdict.limit is None
    for n in range(5):
        assert (await place.ask(limits, 60, 1, n)).verdict.limit is QuotaLimit.TOKENS
    again = (await place.ask(limits, 40, 5)).verdict
    assert (again.limit, again.requests_left, again.tokens_left) == (None, 8, 0)


async def test_what_was_not_used_is_given_back(place: Place) -> None:
    limits = KeyLimits(tokens=100)
    first = await place.ask(limits, 90)
    assert (await place.ask(limits, 50, turn=1)).verdict.limit is QuotaLimit.TOKENS
    await place.pass_time(5)
    await place.settle(first, 10)
    found = (await place.ask(limits, 50, turn=1)).verdict
    assert (found.limit, found.tokens_left) == (None, 40)


async def test_what_was_used_beyond_the_claim_counts_from_when_it_is_known(place: Place) -> None:
    limits = KeyLimits(tokens=100)
    first = await place.ask(limits, 10)
    await place.pass_time(200)  # a long stream
    await place.settle(first, 80)
    assert (await place.ask(limits, 50)).verdict.limit is QuotaLimit.TOKENS
    assert (await place.ask(limits, 20)).verdict.limit is None


async def test_nothing_is_given_back_of_what_no_longer_counts(place: Place) -> None:
    limits = KeyLimits(tokens=100)
    long = await place.ask(limits, 90)
    await place.pass_time(100)
    await place.ask(limits, 60)
    await place.settle(long, 0)
    assert (await place.ask(limits, 60)).verdict.limit is QuotaLimit.TOKENS


async def test_a_claim_above_the_whole_limit_is_not_told_to_wait(place: Place) -> None:
    verdict = (await place.ask(KeyLimits(tokens=100), 101)).verdict
    assert (verdict.limit, verdict.wait) == (QuotaLimit.TOKENS, None)


async def test_a_place_is_free_again_when_its_request_is_settled(place: Place) -> None:
    limits = KeyLimits(concurrent=2)
    first, second = [await place.ask(limits, turn=n) for n in range(2)]
    refused = (await place.ask(limits)).verdict
    assert (refused.limit, refused.wait) == (QuotaLimit.CONCURRENT, 1.0)
    await place.settle(first)
    assert (await place.ask(limits, turn=1)).verdict.limit is None
    await place.settle(second, turn=1)


async def test_a_month_has_its_cost_and_the_next_month_another(place: Place) -> None:
    limits = KeyLimits(cost=NANO)
    first = await place.ask(limits, cost=NANO // 2)
    await place.settle(first, cost=NANO * 9 // 10)
    refused = (await place.ask(limits, cost=NANO // 5, turn=1)).verdict
    assert (refused.limit, refused.wait) == (QuotaLimit.COST, None)
    place.clock.wall_at = NOVEMBER
    assert (await place.ask(limits, cost=NANO // 5)).verdict.limit is None


async def test_requests_that_run_hold_what_they_may_cost(place: Place) -> None:
    limits = KeyLimits(cost=10)
    first = await place.ask(limits, cost=6)
    assert (await place.ask(limits, cost=6, turn=1)).verdict.limit is QuotaLimit.COST
    await place.settle(first, cost=1)
    assert (await place.ask(limits, cost=6, turn=1)).verdict.limit is None


async def test_the_limit_that_takes_longest_is_the_one_that_is_named(place: Place) -> None:
    limits = KeyLimits(requests=1, tokens=10, concurrent=1)
    await place.ask(limits, 10)
    await place.pass_time(5)
    verdict = (await place.ask(limits, 1)).verdict
    assert verdict.limit in (QuotaLimit.REQUESTS, QuotaLimit.TOKENS)
    assert verdict.wait == pytest.approx(56)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["ask", "settle"]), st.floats(0, 25), st.integers(0, 5), st.integers(1, 60), st.integers(0, 9)
    ),
    max_size=25,
)
LIMITS = st.builds(
    KeyLimits,
    requests=st.none() | st.integers(1, 8),
    tokens=st.none() | st.integers(30, 120),
    concurrent=st.none() | st.integers(1, 4),
    cost=st.none() | st.integers(5, 30),
)


@settings(max_examples=60, deadline=None, phases=(Phase.generate,), suppress_health_check=list(HealthCheck))
@given(steps=STEPS, limits=LIMITS)
async def test_all_places_judge_alike(steps: list[tuple[str, float, int, int, int]], limits: KeyLimits) -> None:
    """The scripts in Redis, and the memory of one and of several, on the same requests."""
    async with in_memory() as one, in_workers() as several, in_redis() as shared:
        verdicts = [await played(place, steps, limits) for place in (one, several, shared)]
    assert verdicts[0] == verdicts[1]
    assert verdicts[0] == verdicts[2]


async def played(place: Place, steps: list[tuple[str, float, int, int, int]], limits: KeyLimits) -> list[Any]:
    """Leases lapse in Redis alone: within their time."""
    open_: list[tuple[Reservation, int]] = []
    said: list[Any] = []
    for act, pause, turn, tokens, cost in steps:
        await place.pass_time(min(pause, 25.0))
        if act == "ask":
            made = await place.ask(limits, tokens, cost, turn)
            verdict = made.verdict
            said.append(
                (
                    verdict.limit,
                    None if verdict.wait is None else pytest.approx(verdict.wait, abs=0.002),
                    verdict.requests_left,
                    verdict.tokens_left,
                    pytest.approx(verdict.tokens_reset, abs=0.002),
                )
            )
            if made.verdict.limit is None:
                open_.append((made, turn))
        elif open_:
            made, asked = open_.pop(0)
            await place.settle(made, tokens, cost, asked)
        while open_ and place.clock.at - open_[0][0].at > LEASE - 26:
            made, asked = open_.pop(0)
            await place.settle(made, tokens, cost, asked)
    return said


# --------------------------------------------------------------------------- what ends without a word


def told(quotas: RedisQuotas) -> bool:
    """Nothing is to be told to Redis, or on its way."""
    return quotas.idle


async def test_what_a_dead_worker_had_running_is_free_when_its_successor_begins() -> None:
    clock, shared = Clock(), SharedQuotaMemory(["web"], 2)
    limits = KeyLimits(concurrent=1, requests=5, cost=10)
    workers = [LocalQuotas(shared, n, clock.monotonic, clock.wall) for n in range(2)]
    assert workers[0].claim("web", limits, Claim(1, 10)).verdict.limit is None
    assert workers[1].claim("web", limits, Claim(1, 1)).verdict.limit is not None
    shared.member(0)
    again = workers[1].claim("web", limits, Claim(1, 10)).verdict
    assert (again.limit, again.requests_left) == (None, 3)


async def test_a_key_that_came_later_is_shared_out_among_the_workers() -> None:
    clock, shared = Clock(), SharedQuotaMemory(["web"], 4)
    workers = [LocalQuotas(shared, n, clock.monotonic, clock.wall) for n in range(4)]
    let_in = [w.claim("new", KeyLimits(requests=8), Claim()).verdict.limit is None for w in workers for _ in range(5)]
    assert sum(let_in) == 8


async def test_in_redis_a_reservation_lapses_unless_it_is_renewed() -> None:
    """A gateway that died frees its places within a minute; one that lives keeps those of a stream of half an hour."""
    async with in_redis() as place:
        limits = KeyLimits(concurrent=1, cost=10)
        await place.ask(limits, cost=10)
        living: Any = place.quotas[0]
        for _ in range(40):
            await place.pass_time(45)
            await living._renew_leases()
            assert (await place.ask(limits, turn=1)).verdict.limit is not None
        await place.pass_time(LEASE + 0.1)
        assert (await place.ask(limits, cost=10, turn=1)).verdict.limit is None


async def test_in_redis_everything_expires() -> None:
    async with redis_server() as server, server.client() as client:
        link = RedisClient(server.url, timeout=2.0)
        link.start()
        await eventually(lambda: link.up)
        quotas = RedisQuotas(link)
        quotas.start()
        first = await quotas.reserve("web", KeyLimits(1, 10, 1, 10), Claim(1, 1))
        await quotas.reserve("web", KeyLimits(9, 10, 9, 10), Claim(1, 1))
        quotas.settle(first, 1, 1)
        await eventually(lambda: told(quotas))
        found = await client.keys("*")
        left = {key: await client.pttl(key) for key in found}
        assert {"minute", "running", "held", "spent", "firsttoken:members", "firsttoken:probe"} == {
            key.rpartition("}:")[2] for key in found
        }
        assert all(ttl > 0 for ttl in left.values()), left
        await quotas.close()
        await link.close()


async def test_a_caller_that_leaves_while_its_reservation_is_made_leaves_none() -> None:
    async with redis_server() as server:
        link = RedisClient(server.url, timeout=2.0)
        link.start()
        await eventually(lambda: link.up)
        quotas = RedisQuotas(link)
        limits = KeyLimits(concurrent=1, tokens=10)
        asking = asyncio.create_task(quotas.reserve("web", limits, Claim(10)))
        await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait([asking])
        assert asking.cancelled()
        await eventually(lambda: told(quotas))
        assert (await quotas.reserve("web", limits, Claim(10))).verdict.limit is None
        await quotas.close()
        await link.close()


async def test_scripts_that_redis_has_forgotten_are_loaded_again() -> None:
    async with in_redis() as place:
        assert (await place.ask(KeyLimits(requests=9))).verdict.limit is None
        redis: Any = place.quotas[0]
        await redis.redis.call(lambda client: client.script_flush())
        asked = await asyncio.gather(*(place.ask(KeyLimits(requests=9)) for _ in range(3)))
        assert [one.verdict.limit for one in asked] == [None] * 3
        assert redis.redis.errors == 0
        assert all(one.second for one in asked)  # Redis itself let them in


async def test_what_redis_let_in_and_was_not_heard_counts_once() -> None:
    """Its answer came too late: we decided alone. Settled, it is one request, and one that ended."""
    async with in_redis() as place:
        limits = KeyLimits(requests=10, tokens=100, concurrent=1)
        redis: Any = place.quotas[0]
        first = await place.ask(limits, 30)
        redis.local.settle(first.local, 30, 0)
        alone = redis.reserve_locally("web", limits, Claim(30), first.lease)
        assert alone.verdict.limit is None
        await redis._renew_leases()
        await place.settle(alone, 10)
        verdict = (await place.ask(limits, 90, turn=1)).verdict
        assert (verdict.limit, verdict.requests_left, verdict.tokens_left) == (None, 8, 0)


async def test_what_was_let_in_without_redis_is_counted_when_it_is_told() -> None:
    """Also one that is renewed before it ends: it holds a place, and counts once."""
    async with in_redis() as place:
        limits = KeyLimits(requests=10, tokens=100, concurrent=1)
        redis: Any = place.quotas[0]
        await place.pass_time(1)
        alone = redis.reserve_locally("web", limits, Claim(30), "unheard")
        await redis._renew_leases()
        assert (await place.ask(limits, turn=1)).verdict.limit is QuotaLimit.CONCURRENT
        await place.pass_time(10)
        await place.settle(alone, 10)
        verdict = (await place.ask(limits, 90, turn=1)).verdict
        assert (verdict.limit, verdict.requests_left, verdict.tokens_left) == (None, 8, 0)
