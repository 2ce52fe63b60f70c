"""Quotas in memory, in shared memory of workers and in Redis follow equal rules.

On a virtual clock, which is set in Redis too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from gateway.admission.local_quotas import LocalQuotas, SharedQuotaMemory, SteadyWall, month
from gateway.admission.redis_quotas import RedisQuotas
from gateway.cluster.redis_client import RedisClient
from gateway.cluster.redis_names import redis_name
from gateway.parts.quotas.quotas import Quotas
from policies.quota.key_limits import NANO, Claim, KeyLimits, QuotaLimit, RefusalCause, Reservation
from tests.support.redis import redis_server
from tests.support.simulated import eventually

OCTOBER, NOVEMBER = 1_790_899_200.0, 1_793_577_600.0  # 2026-10-02, 2026-11-02
VIRTUAL = "redis.call('HMGET', 'clock', 's', 'us')"
LEASE = 60.0  # s


class Clock:
    """`at`: seconds, of the monotonic clock. `wall_at`: seconds since the epoch."""

    def __init__(self) -> None:
        self.at, self.wall_at = 1000.0, OCTOBER

    def monotonic(self) -> float:
        return self.at

    def wall(self) -> float:
        return self.wall_at


class QuotaStore:
    """One or several quotas with common state. `turn`: index of the quota to use."""

    def __init__(self, clock: Clock, quotas: list[Quotas], synchronize: Callable[[], Any]) -> None:
        self.clock, self.quotas, self._synchronize = clock, quotas, synchronize

    async def pass_time(self, seconds: float) -> None:
        self.clock.at += seconds
        await self._synchronize()

    async def ask(
        self,
        limits: KeyLimits,
        tokens: int = 1,
        cost: int = 0,
        turn: int = 0,
        name: str = "web",
        most: tuple[int, int] = (0, 0),
    ) -> Reservation:
        """`most`: tokens and cost that the request may use."""
        await self._synchronize()
        return await self.quotas[turn % len(self.quotas)].reserve(name, limits, Claim(tokens, cost, 0, *most))

    async def enter(self, limits: KeyLimits, turn: int = 0) -> Reservation:
        await self._synchronize()
        return self.quotas[turn % len(self.quotas)].enter("web", limits)

    async def claim(self, limits: KeyLimits, tokens: int, head: Reservation) -> Reservation:
        return await self.quotas[0].reserve("web", limits, Claim(tokens), head)

    async def settle(self, reservation: Reservation, tokens: int = 1, cost: int = 0, turn: int = 0) -> None:
        self.quotas[turn % len(self.quotas)].settle(reservation, tokens, cost)
        await self._synchronize()


async def nothing() -> None: ...


@asynccontextmanager
async def in_memory() -> AsyncIterator[QuotaStore]:
    clock = Clock()
    yield QuotaStore(clock, [LocalQuotas(clock=clock.monotonic, wall=clock.wall)], nothing)


@asynccontextmanager
async def in_workers() -> AsyncIterator[QuotaStore]:
    clock, shared = Clock(), SharedQuotaMemory(["web", "other"], 3)
    yield QuotaStore(clock, [LocalQuotas(shared, n, clock.monotonic, clock.wall) for n in range(3)], nothing)


@asynccontextmanager
async def in_redis() -> AsyncIterator[QuotaStore]:
    """Two replicas."""
    clock = Clock()
    async with redis_server() as server, server.client() as client:
        links = [RedisClient(server.url, timeout=60.0) for _ in range(2)]
        quotas = [RedisQuotas(link, 1, clock.monotonic, clock.wall, VIRTUAL) for link in links]

        async def synchronize() -> None:
            await client.hset("clock", mapping={"s": str(int(clock.at)), "us": str(round(clock.at % 1 * 1e6))})
            for one in quotas:
                one.send_pending()
                await one.pipeline.close()

        for link in links:
            link.start()
        await eventually(lambda: all(link.up for link in links))
        try:
            yield QuotaStore(clock, list(quotas), synchronize)
        finally:
            for one in quotas:
                await one.close()
            for link in links:
                await link.close()


STORES = {"memory": in_memory, "workers": in_workers, "redis": in_redis}


@pytest.fixture(params=STORES)
async def store(request: pytest.FixtureRequest) -> AsyncIterator[QuotaStore]:
    async with STORES[request.param]() as made:
        yield made


async def test_requests_are_admitted_up_to_the_limit_by_any_process(store: QuotaStore) -> None:
    limits = KeyLimits(requests=4)
    asked = [await store.ask(limits, turn=n) for n in range(6)]
    assert [one.verdict.limit for one in asked] == [None] * 4 + [QuotaLimit.REQUESTS] * 2
    assert [one.verdict.requests_left for one in asked] == [3, 2, 1, 0, 0, 0]


async def test_the_announced_wait_is_exact(store: QuotaStore) -> None:
    """Just before its end a request is refused, at its end admitted."""
    limits = KeyLimits(requests=2)
    await store.ask(limits)
    await store.pass_time(10.25)
    await store.ask(limits, turn=1)
    refused = (await store.ask(limits)).verdict
    assert refused.wait == pytest.approx(50.75)
    assert refused.requests_reset == pytest.approx(60.75)
    assert refused.wait is not None
    await store.pass_time(refused.wait - 0.01)
    assert (await store.ask(limits)).verdict.limit is QuotaLimit.REQUESTS
    await store.pass_time(0.01)
    assert (await store.ask(limits)).verdict.limit is None


async def test_keys_do_not_count_for_each_other(store: QuotaStore) -> None:
    limits = KeyLimits(requests=1)
    assert (await store.ask(limits)).verdict.limit is None
    assert (await store.ask(limits, name="other")).verdict.limit is None


async def test_a_refused_request_claims_nothing(store: QuotaStore) -> None:
    """From no limit."""
    limits = KeyLimits(requests=10, tokens=100, concurrent=10, cost=10)
    assert (await store.ask(limits, 60, 5)).verdict.limit is None
    for n in range(5):
        assert (await store.ask(limits, 60, 1, n)).verdict.limit is QuotaLimit.TOKENS
    again = (await store.ask(limits, 40, 5)).verdict
    assert (again.limit, again.requests_left, again.tokens_left) == (None, 8, 0)


async def test_a_head_holds_a_place_until_it_is_settled_and_counts_as_a_request(store: QuotaStore) -> None:
    limits = KeyLimits(requests=2, concurrent=1)
    head = await store.enter(limits)
    assert head.verdict.limit is None
    assert (await store.enter(limits)).verdict.limit is QuotaLimit.CONCURRENT
    await store.settle(head, 0)
    made = await store.ask(limits)
    assert (made.verdict.limit, made.verdict.requests_left) == (None, 0)
    await store.settle(made)
    assert (await store.ask(limits, turn=1)).verdict.limit is QuotaLimit.REQUESTS


async def test_a_claim_replaces_that_of_the_head(store: QuotaStore) -> None:
    limits = KeyLimits(requests=2, tokens=100, concurrent=1)
    made = await store.claim(limits, 100, await store.enter(limits))
    assert (made.verdict.limit, made.verdict.requests_left, made.verdict.tokens_left) == (None, 1, 0)
    assert (await store.ask(limits, 0)).verdict.limit is QuotaLimit.CONCURRENT
    await store.settle(made, 40)
    found = (await store.ask(limits, 60)).verdict
    assert (found.limit, found.requests_left, found.tokens_left) == (None, 0, 0)


async def test_a_refused_claim_takes_that_of_the_head_back(store: QuotaStore) -> None:
    """Also in a later second than the head's."""
    limits = KeyLimits(requests=1, tokens=100, concurrent=1)
    head = await store.enter(limits)
    await store.pass_time(2.5)
    assert (await store.claim(limits, 101, head)).verdict.limit is QuotaLimit.TOKENS
    again = await store.enter(limits)
    assert again.verdict.limit is None
    made = await store.claim(limits, 100, again)
    assert (made.verdict.limit, made.verdict.requests_left, made.verdict.tokens_left) == (None, 0, 0)


async def test_no_head_is_admitted_without_tokens_left(store: QuotaStore) -> None:
    limits = KeyLimits(tokens=10)
    await store.ask(limits, 10)
    assert (await store.enter(limits)).verdict.limit is QuotaLimit.TOKENS


async def test_a_check_claims_nothing(store: QuotaStore) -> None:
    limits = KeyLimits(requests=1)
    assert [store.quotas[0].check("web", limits).limit for _ in range(2)] == [None, None]
    await store.ask(limits)
    checked = store.quotas[0].check("web", limits)
    assert (checked.limit, checked.wait) == (QuotaLimit.REQUESTS, pytest.approx(61.0))


async def test_unused_tokens_are_refunded(store: QuotaStore) -> None:
    limits = KeyLimits(tokens=100)
    first = await store.ask(limits, 90)
    assert (await store.ask(limits, 50, turn=1)).verdict.limit is QuotaLimit.TOKENS
    await store.pass_time(5)
    await store.settle(first, 10)
    found = (await store.ask(limits, 50, turn=1)).verdict
    assert (found.limit, found.tokens_left) == (None, 40)


async def test_usage_beyond_the_claim_counts_from_settlement(store: QuotaStore) -> None:
    limits = KeyLimits(tokens=100)
    first = await store.ask(limits, 10)
    await store.pass_time(200)  # a long stream
    await store.settle(first, 80)
    assert (await store.ask(limits, 50)).verdict.limit is QuotaLimit.TOKENS
    assert (await store.ask(limits, 20)).verdict.limit is None


async def test_claims_outside_the_window_are_not_refunded(store: QuotaStore) -> None:
    limits = KeyLimits(tokens=100)
    long = await store.ask(limits, 90)
    await store.pass_time(100)
    await store.ask(limits, 60)
    await store.settle(long, 0)
    assert (await store.ask(limits, 60)).verdict.limit is QuotaLimit.TOKENS


async def test_a_claim_above_the_limit_has_no_wait(store: QuotaStore) -> None:
    verdict = (await store.ask(KeyLimits(tokens=100), 101)).verdict
    assert (verdict.limit, verdict.wait) == (QuotaLimit.TOKENS, None)


async def test_a_concurrency_slot_is_free_after_settlement(store: QuotaStore) -> None:
    limits = KeyLimits(concurrent=2)
    first, second = [await store.ask(limits, turn=n) for n in range(2)]
    refused = (await store.ask(limits)).verdict
    assert (refused.limit, refused.wait) == (QuotaLimit.CONCURRENT, 1.0)
    await store.settle(first)
    assert (await store.ask(limits, turn=1)).verdict.limit is None
    await store.settle(second, turn=1)


async def test_the_monthly_cost_restarts_each_month(store: QuotaStore) -> None:
    limits = KeyLimits(cost=NANO)
    first = await store.ask(limits, cost=NANO // 2)
    await store.settle(first, cost=NANO * 9 // 10)
    refused = (await store.ask(limits, cost=NANO // 5, turn=1)).verdict
    assert (refused.limit, refused.wait) == (QuotaLimit.COST, None)
    store.clock.wall_at = NOVEMBER
    assert (await store.ask(limits, cost=NANO // 5)).verdict.limit is None


async def test_a_clock_that_is_wrong_for_a_while_opens_no_month_and_forgets_none() -> None:
    """A jump counts after an hour; small adjustments count at once."""
    clock = Clock()
    quotas, limits = (
        LocalQuotas(clock=clock.monotonic, wall=SteadyWall(clock.wall, clock.monotonic)),
        KeyLimits(cost=10),
    )

    async def may(cost: int) -> bool:
        reservation = await quotas.reserve("web", limits, Claim(1, cost))
        if reservation.verdict.limit is None:
            quotas.settle(reservation, 1, cost)
        return reservation.verdict.limit is None

    assert [await may(9), await may(9)] == [True, False]
    for wrong in (NOVEMBER, 0.0, OCTOBER):
        clock.wall_at = wrong
        clock.at += 600.0
        assert [await may(9), await may(1)] == [False, wrong == NOVEMBER]
    clock.wall_at = NOVEMBER
    assert not await may(9)
    clock.at += 3601.0
    assert await may(9)


async def test_running_requests_reserve_their_maximum_cost(store: QuotaStore) -> None:
    limits = KeyLimits(cost=10)
    first = await store.ask(limits, cost=6)
    assert (await store.ask(limits, cost=6, turn=1)).verdict.limit is QuotaLimit.COST
    await store.settle(first, cost=1)
    assert (await store.ask(limits, cost=6, turn=1)).verdict.limit is None


async def test_what_requests_in_progress_hold_is_no_use_of_the_budget(store: QuotaStore) -> None:
    """Held: over in a second, perhaps. Spent: final. A request above the whole budget: never, whatever is spent."""
    limits, causes = KeyLimits(cost=10), RefusalCause

    async def refused(cost: int) -> tuple[RefusalCause, float | None]:
        verdict = (await store.ask(limits, cost=cost, turn=1)).verdict
        assert verdict.limit is QuotaLimit.COST
        return verdict.cause, verdict.wait

    first = await store.ask(limits, cost=6)
    assert [await refused(6), await refused(11)] == [(causes.HELD, 1.0), (causes.TOO_LARGE, None)]
    await store.settle(first, cost=7)
    assert [await refused(4), await refused(11)] == [(causes.SPENT, None), (causes.TOO_LARGE, None)]
    await store.settle(await store.ask(limits, cost=3), cost=3)
    assert [await refused(1), await refused(11)] == [(causes.SPENT, None)] * 2


async def test_tokens_that_requests_in_progress_hold_are_not_used(store: QuotaStore) -> None:
    """The wait is for an end of one of them; for used tokens it is until they are a minute old. A request whose minute
    is over holds nothing of this one."""
    limits = KeyLimits(tokens=100)
    long = await store.ask(limits, 60)
    await store.pass_time(70)
    first = await store.ask(limits, 60)
    await store.pass_time(5)
    held = (await store.ask(limits, 60, turn=1)).verdict
    assert (held.limit, held.cause, held.wait) == (QuotaLimit.TOKENS, RefusalCause.HELD, 1.0)
    await store.settle(first, 60)
    used = (await store.ask(limits, 60, turn=1)).verdict
    assert (used.cause, used.wait) == (RefusalCause.REACHED, pytest.approx(56, abs=0.002))
    await store.settle(long, 60)
    assert (await store.ask(limits, 101)).verdict.cause is RefusalCause.TOO_LARGE


async def test_a_request_holds_what_it_may_use_as_far_as_there_is_room(store: QuotaStore) -> None:
    """Its usual size has to fit, no more; what it has not used is given back."""
    limits = KeyLimits(tokens=100, cost=10)
    small = await store.ask(limits, 10, 1, most=(30, 3))
    all_left = await store.ask(limits, 10, 1, turn=1, most=(300, 30))
    assert [(each.claim.tokens, each.claim.cost) for each in (small, all_left)] == [(30, 3), (70, 7)]
    assert all_left.verdict.tokens_left == 0
    assert (await store.ask(limits, 10, 1, most=(30, 3))).verdict.cause is RefusalCause.HELD
    await store.settle(all_left, 10, 1, turn=1)
    again = await store.ask(limits, 10, 1, turn=1, most=(30, 3))
    assert (again.verdict.limit, again.claim.tokens, again.claim.cost) == (None, 30, 3)


async def test_many_requests_at_once_spend_no_more_than_one_beyond_the_budget(store: QuotaStore) -> None:
    """40 of 3 USD each, a budget of 1 USD, and nothing known of the key's answers but a usual price of 0.01."""
    limits, asked = KeyLimits(cost=NANO), [(NANO // 100, 131 * NANO)] * 40
    made = [await store.ask(limits, 1, cost, turn=n, most=(0, most)) for n, (cost, most) in enumerate(asked)]
    admitted = [one for one in made if one.verdict.limit is None]
    assert [one.verdict.cause for one in made[1:]] == [RefusalCause.HELD] * 39
    for one in admitted:
        await store.settle(one, 1, 3 * NANO)
    assert len(admitted) == 1
    assert (await store.ask(limits, 1, 1)).verdict.cause is RefusalCause.SPENT


async def test_the_costs_of_a_clock_before_the_product_go_to_the_true_month(store: QuotaStore) -> None:
    """A machine that boots in 1970 has one budget until its clock is set, and after."""
    limits = KeyLimits(cost=10)
    store.clock.wall_at = 100.0
    await store.settle(await store.ask(limits, cost=8), cost=8)
    assert (await store.ask(limits, cost=5)).verdict.cause is RefusalCause.SPENT
    store.clock.wall_at = OCTOBER
    assert (await store.ask(limits, cost=5)).verdict.cause is RefusalCause.SPENT
    await store.settle(await store.ask(limits, cost=2), cost=2)
    store.clock.wall_at = 200.0  # booted again
    assert (await store.ask(limits, cost=1)).verdict.cause is RefusalCause.SPENT
    store.clock.wall_at = NOVEMBER
    assert (await store.ask(limits, cost=5)).verdict.limit is None


@pytest.mark.parametrize(("began", "jumped"), [(100.0, OCTOBER), (OCTOBER, 100.0)])
def test_a_clock_before_the_product_is_never_believed_beside_another(began: float, jumped: float) -> None:
    """The true time holds at once, without the hour that a jump has to last; and back to 1970 never."""
    clock = Clock()
    clock.wall_at = began
    wall = SteadyWall(clock.wall, clock.monotonic)
    assert wall() == began
    clock.wall_at = jumped
    for _ in range(3):
        assert month(wall()) == 202610
        clock.at += 4000.0
        clock.wall_at += 4000.0


async def test_a_refusal_names_the_limit_with_the_longest_wait(store: QuotaStore) -> None:
    limits = KeyLimits(requests=1, tokens=10, concurrent=1)
    await store.ask(limits, 10)
    await store.pass_time(5)
    verdict = (await store.ask(limits, 1)).verdict
    assert verdict.limit in (QuotaLimit.REQUESTS, QuotaLimit.TOKENS)
    assert verdict.wait == pytest.approx(56)


Step = tuple[str, float, int, int, int, tuple[int, int]]
MOST = st.just((0, 0)) | st.tuples(st.integers(0, 90), st.integers(0, 20))
STEPS = st.lists(
    st.tuples(
        *(st.sampled_from(["ask", "settle"]), st.floats(0, 25), st.integers(0, 5), st.integers(1, 60)),
        *(st.integers(0, 9), MOST),
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
async def test_all_quota_stores_give_equal_verdicts(steps: list[Step], limits: KeyLimits) -> None:
    """The scripts in Redis, local memory and shared memory, for the same requests."""
    async with in_memory() as one, in_workers() as several, in_redis() as shared:
        verdicts = [await played(store, steps, limits) for store in (one, several, shared)]
    assert verdicts[0] == verdicts[1]
    assert verdicts[0] == verdicts[2]


async def played(store: QuotaStore, steps: list[Step], limits: KeyLimits) -> list[Any]:
    """Replays the steps; settles within LEASE, since leases expire in Redis only."""
    open_: list[tuple[Reservation, int]] = []
    said: list[Any] = []
    for act, pause, turn, tokens, cost, most in steps:
        await store.pass_time(min(pause, 25.0))
        if act == "ask":
            made = await store.ask(limits, tokens, cost, turn, most=most)
            verdict = made.verdict
            said.append(
                (
                    verdict.limit,
                    verdict.limit and verdict.cause,
                    made.claim.tokens,
                    made.claim.cost,
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
            await store.settle(made, tokens, cost, asked)
        while open_ and store.clock.at - open_[0][0].at > LEASE - 26:
            made, asked = open_.pop(0)
            await store.settle(made, tokens, cost, asked)
    return said


# --------------------------------------------------------------------------- crashes and lost messages


def is_synchronized(quotas: RedisQuotas) -> bool:
    """No update to Redis is pending or in flight."""
    return quotas.idle


async def test_a_restarted_worker_frees_the_reservations_of_its_predecessor() -> None:
    clock, shared = Clock(), SharedQuotaMemory(["web"], 2)
    limits = KeyLimits(concurrent=1, requests=5, cost=10)
    workers = [LocalQuotas(shared, n, clock.monotonic, clock.wall) for n in range(2)]
    assert workers[0].claim("web", limits, Claim(1, 10)).verdict.limit is None
    assert workers[1].claim("web", limits, Claim(1, 1)).verdict.limit is not None
    shared.member(0)
    again = workers[1].claim("web", limits, Claim(1, 10)).verdict
    assert (again.limit, again.requests_left) == (None, 3)


async def test_the_limit_of_a_later_key_is_divided_among_workers() -> None:
    clock, shared = Clock(), SharedQuotaMemory(["web"], 4)
    workers = [LocalQuotas(shared, n, clock.monotonic, clock.wall) for n in range(4)]
    admitted = [w.claim("new", KeyLimits(requests=8), Claim()).verdict.limit is None for w in workers for _ in range(5)]
    assert sum(admitted) == 8


async def test_in_redis_a_reservation_expires_unless_renewed() -> None:
    """A dead gateway frees its slots within a minute; a live gateway keeps the slot of a stream of half an hour."""
    async with in_redis() as store:
        limits = KeyLimits(concurrent=1, cost=10)
        await store.ask(limits, cost=10)
        living: Any = store.quotas[0]
        for _ in range(40):
            await store.pass_time(45)
            await living._renew_leases()
            assert (await store.ask(limits, turn=1)).verdict.limit is not None
        await store.pass_time(LEASE + 0.1)
        assert (await store.ask(limits, cost=10, turn=1)).verdict.limit is None


async def test_in_redis_a_refusal_for_requests_refuses_heads_until_its_wait_is_over() -> None:
    """Without a round trip, though another replica has admitted the requests. Not for other limits."""
    async with in_redis() as store:
        limits = KeyLimits(requests=2)
        for _ in range(2):
            await store.ask(limits, turn=1)
        assert (await store.enter(limits)).verdict.limit is None
        assert (await store.ask(limits)).verdict.limit is QuotaLimit.REQUESTS
        await store.pass_time(20)
        refused = (await store.enter(limits)).verdict
        assert (refused.limit, refused.wait, refused.requests_reset) == (QuotaLimit.REQUESTS, 41.0, 41.0)
        assert (await store.enter(KeyLimits(requests=3))).verdict.limit is None
        await store.pass_time(41)
        assert (await store.enter(limits)).verdict.limit is None


async def test_in_redis_everything_expires() -> None:
    async with redis_server() as server, server.client() as client:
        link = RedisClient(server.url, timeout=60.0)
        link.start()
        await eventually(lambda: link.up)
        quotas = RedisQuotas(link)
        quotas.start()
        first = await quotas.reserve("web", KeyLimits(1, 10, 1, 10), Claim(1, 1))
        await quotas.reserve("web", KeyLimits(9, 10, 9, 10), Claim(1, 1))
        quotas.settle(first, 1, 1)
        await eventually(lambda: is_synchronized(quotas))
        found = await client.keys("*")
        left = {key: await client.pttl(key) for key in found}
        kept = {f"firsttoken:{{web}}:-:{kind}" for kind in ("minute", "running", "held", "spent")}
        assert {*found} == {*kept, "firsttoken:members", "firsttoken:probe"}
        assert all(ttl > 0 for ttl in left.values()), left
        await quotas.close()
        await link.close()


async def test_a_cancelled_reservation_is_released() -> None:
    async with redis_server() as server:
        link = RedisClient(server.url, timeout=60.0)
        link.start()
        await eventually(lambda: link.up)
        quotas = RedisQuotas(link)
        limits = KeyLimits(concurrent=1, tokens=10)
        asking = asyncio.create_task(quotas.reserve("web", limits, Claim(10)))
        await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait([asking])
        assert asking.cancelled()
        await eventually(lambda: is_synchronized(quotas))
        assert (await quotas.reserve("web", limits, Claim(10))).verdict.limit is None
        await quotas.close()
        await link.close()


async def test_scripts_lost_by_redis_are_loaded_again() -> None:
    async with in_redis() as store:
        assert (await store.ask(KeyLimits(requests=9))).verdict.limit is None
        redis: Any = store.quotas[0]
        await redis.redis.call(lambda client: client.script_flush())
        asked = await asyncio.gather(*(store.ask(KeyLimits(requests=9)) for _ in range(3)))
        assert [one.verdict.limit for one in asked] == [None] * 3
        assert redis.redis.errors == 0
        assert all(one.second for one in asked)  # admitted by Redis itself


@pytest.mark.parametrize("kind", ["minute", "running", "held", "spent"])
async def test_a_broken_value_of_one_key_takes_redis_from_no_other(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """Its own limits hold in this process until the value is deleted; its costs are counted in Redis then."""
    async with in_redis() as store:
        limits, quotas = KeyLimits(requests=99, tokens=99, concurrent=9, cost=10), store.quotas[0]
        assert isinstance(quotas, RedisQuotas)
        name = redis_name("firsttoken", "-", kind, slot="web")
        await quotas.redis.call(lambda redis: redis.set(name, "text"))
        for _ in range(5):
            await store.settle(await store.ask(limits, cost=1), cost=1)
            await store.settle(await store.ask(limits, name="other"))
        assert (await store.ask(limits, cost=6)).verdict.limit is QuotaLimit.COST
        assert quotas.redis.up
        other = redis_name("firsttoken", "-", "minute", slot="other")
        assert await quotas.redis.call(lambda redis: redis.exists(other)) == 1
        await quotas.redis.call(lambda redis: redis.delete(name))
        quotas.start()
        await eventually(lambda: quotas.idle, LEASE)
        await eventually(lambda: not quotas.withholds, LEASE)
        await eventually(lambda: quotas.idle, LEASE)
        assert (await store.ask(limits, cost=6, turn=1)).verdict.cause is RefusalCause.SPENT
    assert caplog.text.count(f"{name}") == 1
    assert "unavailable" not in caplog.text


async def test_costs_that_redis_has_lost_are_named(caplog: pytest.LogCaptureFixture) -> None:
    async with in_redis() as store:
        limits, quotas = KeyLimits(cost=10 * NANO), store.quotas[0]
        assert isinstance(quotas, RedisQuotas)
        await store.settle(await store.ask(limits), cost=2 * NANO)
        await store.settle(await store.ask(limits))
        await quotas.redis.call(lambda redis: redis.delete(redis_name("firsttoken", "-", "spent", slot="web")))
        await store.ask(limits)
    assert "has lost costs of this month: key 'web' had spent 2 USD, and now 0 USD" in caplog.text


async def test_a_reservation_made_in_redis_and_locally_counts_once() -> None:
    """The reply of Redis came too late, so the gateway decided alone. After settlement one request counts."""
    async with in_redis() as store:
        limits = KeyLimits(requests=10, tokens=100, concurrent=1)
        redis: Any = store.quotas[0]
        first = await store.ask(limits, 30)
        redis.local.settle(first.local, 30, 0)
        alone = redis.reserve_locally("web", limits, Claim(30), first.lease)
        assert alone.verdict.limit is None
        await redis._renew_leases()
        await store.settle(alone, 10)
        verdict = (await store.ask(limits, 90, turn=1)).verdict
        assert (verdict.limit, verdict.requests_left, verdict.tokens_left) == (None, 8, 0)


async def test_local_reservations_are_counted_in_redis_after_synchronization() -> None:
    """Even if renewed before the end: one slot, one request."""
    async with in_redis() as store:
        limits = KeyLimits(requests=10, tokens=100, concurrent=1)
        redis: Any = store.quotas[0]
        await store.pass_time(1)
        alone = redis.reserve_locally("web", limits, Claim(30), "unheard")
        await redis._renew_leases()
        assert (await store.ask(limits, turn=1)).verdict.limit is QuotaLimit.CONCURRENT
        await store.pass_time(10)
        await store.settle(alone, 10)
        verdict = (await store.ask(limits, 90, turn=1)).verdict
        assert (verdict.limit, verdict.requests_left, verdict.tokens_left) == (None, 8, 0)
