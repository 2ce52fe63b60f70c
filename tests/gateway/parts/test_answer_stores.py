"""Stores of kept answers: bounded, apart by group, and gone after their time."""

from __future__ import annotations

import asyncio

import pytest

from gateway.cluster.redis_client import RedisClient
from gateway.parts.answers import answer_stores
from gateway.parts.answers.answer_stores import OVERHEAD, AnswerKey, KeptAnswer, MemoryAnswers, RedisAnswers
from tests.support.redis import redis_server
from tests.support.simulated import eventually

KB = 1_000 - OVERHEAD  # bytes of body of an entry of a kilobyte
PATIENCE = 60.0  # s until Redis has answered, on a machine of any load


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_stores, "LOOK_TIMEOUT", PATIENCE)


def kept(text: str = "x", size: int = KB) -> KeptAnswer:
    return KeptAnswer(0.0, "application/json", (text * size)[:size].encode())


def key(group: str, digest: str) -> AnswerKey:
    return AnswerKey(group, digest)


async def test_an_answer_is_found_until_its_time_is_over() -> None:
    now = 100.0
    store = MemoryAnswers(10_000, lambda: now)
    store.put(key("g", "a"), kept("a"), 5.0)
    assert await store.find(key("g", "a")) == kept("a")
    assert await store.find(key("h", "a")) is None
    now = 105.0
    assert (await store.find(key("g", "a")), store.size) == (None, 0)


async def test_a_full_memory_gives_up_the_oldest_of_the_group_with_most() -> None:
    """A caller that fills the memory loses answers of its own group, and no others."""
    store = MemoryAnswers(4_000)
    store.put(key("small", "s"), kept("s"), 60.0)
    for name in "abcdef":
        store.put(key("large", name), kept(name), 60.0)
    found = [name for name in "abcdef" if await store.find(key("large", name)) is not None]
    assert (found, store.size) == (["d", "e", "f"], 4_000)
    assert await store.find(key("small", "s")) == kept("s")


async def test_an_answer_kept_again_is_counted_once() -> None:
    store = MemoryAnswers(4_000)
    for text in "ab":
        store.put(key("g", "a"), kept(text), 60.0)
    assert (store.size, await store.find(key("g", "a"))) == (1_000, kept("b"))
    store.put(key("g", "b"), kept("b", 5_000), 60.0)  # larger than all: nothing stays
    assert store.size == 0


async def test_redis_keeps_answers_within_the_bound_and_by_group() -> None:
    """The same rules, in one script; expired answers give their bytes back."""
    async with redis_server() as server, server.client() as client:
        redis = RedisClient(server.url, PATIENCE)
        store = RedisAnswers(redis, "ns", 4_200)
        store.start()
        await eventually(lambda: redis.up)
        size = len(kept().body) + 35 + OVERHEAD  # with time, type, no lines, pool and model, as encoded

        async def put(group: str, name: str, ttl: float = 60.0) -> None:
            store.put(key(group, name), kept(name), ttl)
            await eventually(lambda: not store._pipeline.busy)

        await put("small", "s")
        for name in "abcdef":
            await put("large", name)
        found = [name for name in "abcdef" if await store.find(key("large", name)) is not None]
        assert found == ["d", "e", "f"]
        assert await store.find(key("small", "s")) == kept("s")
        assert await store.find(key("small", "d")) == kept("d")  # the digest alone names the answer: the group is in it
        base = "ns:{answers}"
        sizes = await client.hgetall(f"{base}:sizes")
        assert {int(value) for name, value in sizes.items() if name != "all"} == {size}
        assert (
            int(sizes["all"])
            == 4 * size
            == sum(int(value) for _, value in await client.zrange(f"{base}:groups", 0, -1, withscores=True))
        )
        await put("small", "s", 0.05)
        await asyncio.sleep(0.1)  # Redis has no virtual time
        assert await store.find(key("small", "s")) is None
        await put("small", "t")
        assert int(await client.hget(f"{base}:sizes", "all")) == 4 * size
        assert all([await client.pttl(name) > 0 for name in await client.keys(f"{base}:*")])
        await store.close()


@pytest.mark.parametrize("raw", [b"", b"\xff", b"junk"])
async def test_what_redis_holds_that_is_no_answer_is_a_miss(raw: bytes) -> None:
    """So is a Redis that is gone: no request fails or waits for it."""
    async with redis_server() as server, server.client() as client:
        redis = RedisClient(server.url, PATIENCE)
        store = RedisAnswers(redis, "ns", 4_000)
        assert await store.find(key("g", "a")) is None
        store.start()
        await eventually(lambda: redis.up)
        await client.set("ns:{answers}:a", raw)
        assert await store.find(key("g", "a")) is None
        server.kill()
        store.put(key("g", "b"), kept(), 60.0)
        assert await store.find(key("g", "b")) is None
        await store.close()
