"""Answers from the cache: for equal requests of one cache group alone, as they were, and told apart from others."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from typing import Any

import msgspec
import pytest
from pydantic import SecretStr

from gateway.app import Gateway
from gateway.cluster.redis_client import RedisClient
from gateway.config.models import Config
from gateway.observe.part_notes import CACHE
from gateway.parts.answers import answer_stores
from gateway.parts.answers.answer_cache import AnswerCache
from gateway.parts.answers.answer_copy import MAX_ANSWER
from gateway.parts.answers.answer_stores import LOOKS, AnswerKey, KeptAnswer, RedisAnswers
from tests.support.builders import CHAT, DONE, FINISH, STREAMED, TOKEN, USAGE, calling, get, last, post
from tests.support.gateways import document, pool, running
from tests.support.redis import RedisServer, redis_server
from tests.support.simulated import eventually
from tests.support.upstream import CLOSE, GATE, LAST_CHUNK, STREAM_HEAD, Script, Upstream, chunk, reply

COLD = {**CHAT, "temperature": 0}
JSON = "content-type: application/json"
PRICE = {"input": 2.0, "output": 8.0}
HEADER = "x-firsttoken-cache"
LARGE = b'data: {"choices":[{"index":0,"delta":{"content":"' + b"x" * MAX_ANSWER + b'"}}]}\n\n'


PATIENCE = 60.0  # s until Redis has answered, on a machine of any load


@pytest.fixture(autouse=True)
def _no_time_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ages are those of a clock that stands still, and Redis has time to answer."""
    monkeypatch.setattr("gateway.parts.answers.answer_cache.time", lambda: 1.8e9)
    monkeypatch.setattr(answer_stores, "LOOK_TIMEOUT", PATIENCE)
    monkeypatch.setattr(answer_stores, "STORE_TIMEOUT", PATIENCE)


def whole(text: str) -> Script:
    usage = {"prompt_tokens": 10, "completion_tokens": 5}
    body = {"choices": [{"message": {"content": text}, "finish_reason": "stop"}], "usage": usage}
    return [reply(json.dumps(body).encode(), "200 OK", JSON)]


@asynccontextmanager
async def caching(
    *scripts: Script, rule: dict[str, Any] | None = None, **more: Any
) -> AsyncIterator[tuple[Gateway, Upstream]]:
    """A gateway with a route that caches, and a second route over the same pool that does too."""
    rule = {"ttl": "10m"} if rule is None else rule
    route = {"tiers": ["api"], "ttft": {"budget": "5s"}, "total": {"budget": "60s"}, "cache": rule}
    async with (
        Upstream(*scripts) as api,
        running({"api": pool(api.url, price=PRICE)}, {"chat": route, "other": route}, **more) as gateway,
    ):
        yield gateway, api


async def sent(gateway: Gateway, body: Any, *headers: str, path: str = "") -> tuple[str, bytes]:
    """The header of the cache, and the body as written, framing included for streams."""
    async with calling(gateway.url) as caller:
        status, found = await caller.ask(post(body, *headers, path=path))
        assert status == 200
        chunked = found.get("transfer-encoding") == "chunked"
        raw = (
            b"".join(await caller.chunks())
            if chunked
            else await caller.reader.readexactly(int(found["content-length"]))
        )
    return found.get(HEADER, ""), raw


async def results(gateway: Gateway, *bodies: Any) -> list[str]:
    return [(await sent(gateway, body))[0].partition(";")[0] for body in bodies]


async def test_an_equal_request_gets_the_same_bytes_and_no_engine_is_asked() -> None:
    """The headers say so, with the age; the Record has no cost, no first token, no attempt and no verdict."""
    async with caching(whole("one"), whole("two")) as (gateway, api):
        first, second = await sent(gateway, COLD), await sent(gateway, COLD)
        assert (first[0], second[0]) == ("miss", "hit; age=0")
        assert first[1] == second[1]
        assert len(api.requests) == 1
        miss, hit = gateway.recorder.recent
        assert (CACHE.of(miss), miss.cost_usd > 0, miss.ttft is not None) == ("miss", True, True)
        assert (CACHE.of(hit), hit.cost_usd, hit.ttft, hit.attempts, hit.end.value) == (
            "hit",
            0.0,
            None,
            [],
            "completed",
        )
        assert (hit.ttft_met, hit.tpot_met, hit.total_met) == (None, None, None)
        page = (await get(gateway.admin_url, "/metrics"))[2].decode()
    assert 'firsttoken_answer_cache_total{result="hit",route="chat"} 1.0' in page
    assert 'firsttoken_ttft_seconds_count{pool="-"' not in page


async def test_a_stream_is_repeated_event_by_event() -> None:
    """As it went to this caller: without the usage that another one asks for."""
    stream = {**COLD, "stream": True}
    async with caching([STREAM_HEAD, *map(chunk, (TOKEN, FINISH, USAGE, DONE)), LAST_CHUNK]) as (gateway, api):
        first, second = await sent(gateway, stream), await sent(gateway, stream)
        assert (first[0], second[0].partition(";")[0], first[1]) == ("miss", "hit", second[1])
        assert (USAGE in first[1], first[1].endswith(DONE)) == (False, True)
        with_usage = await sent(gateway, {**stream, "stream_options": {"include_usage": True}})
        assert (with_usage[0], USAGE in with_usage[1], len(api.requests)) == ("miss", True, 2)
        async with calling(gateway.url) as caller:
            _, headers = await caller.ask(post(stream))
            assert headers["content-type"] == "text/event-stream"
            assert (headers["x-firsttoken-attempts"], headers["x-firsttoken-cost-usd"]) == ("0", "0.00000000")


async def test_a_repeated_answer_tells_what_was_changed_in_its_request() -> None:
    """The lowered limit, and the members left out in translation, as the first answer did."""
    labels = {"user_id": "me", "team": "a"}
    asked = {**COLD, "max_tokens": 50_000, "metadata": labels}
    route = {"tiers": ["api"], "cache": {"ttl": "10m"}}
    async with (
        Upstream(whole("one")) as api,
        running({"api": pool(api.url, context_window=8000)}, {"chat": route}) as gateway,
        calling(gateway.url) as caller,
    ):
        heads = [(await caller.whole(post(asked, path="/v1/messages")))[1] for _ in range(2)]
        assert len(api.requests) == 1
    told = [{name: head[name] for name in ("x-firsttoken-max-tokens", "x-firsttoken-left-out")} for head in heads]
    assert told[0] == told[1]
    assert (told[0]["x-firsttoken-left-out"], int(told[0]["x-firsttoken-max-tokens"]) < 8000) == ("metadata", True)
    assert heads[1][HEADER] == "hit; age=0"


@pytest.mark.parametrize(
    "other",
    [
        {**COLD, "messages": [{"role": "user", "content": "another"}]},
        {**COLD, "model": "other"},
        {**COLD, "max_tokens": 7},
        {**COLD, "seed": 1},
        json.dumps(COLD, indent=1).encode(),
    ],
)
async def test_another_request_is_sent(other: Any) -> None:
    """Bytes are compared: equal members in another form are another request."""
    async with caching(whole("one"), whole("two")) as (gateway, api):
        assert await results(gateway, COLD, other) == ["miss", "miss"]
        assert len(api.requests) == 2


async def test_another_cache_group_never_gets_the_answer() -> None:
    """Two keys of one group share answers; a key without a group has its own, whatever it sends."""
    groups = {"a": "g", "b": "g", "c": None, "g": None}
    keys = [
        {
            "name": name,
            "sha256": sha256(f"key-{name}".encode()).hexdigest(),
            **({"cache_group": group} if group else {}),
        }
        for name, group in groups.items()
    ]
    async with caching(*[whole(f"{i}") for i in range(4)], keys=keys) as (gateway, api):
        found = [(await sent(gateway, COLD, f"authorization: Bearer key-{name}"))[0] for name in "abcgc"]
        assert found == ["miss", "hit; age=0", "miss", "miss", "hit; age=0"]
        assert len(api.requests) == 3


async def test_a_hit_counts_as_a_request_of_its_key() -> None:
    """The limit of requests refuses the third; tokens and cost of hits are none."""
    keys = [{"name": "a", "sha256": sha256(b"key-a").hexdigest(), "requests_per_minute": 2, "tokens_per_minute": 9_000}]
    async with caching(whole("one"), keys=keys) as (gateway, _):
        for _ in range(2):
            await sent(gateway, COLD, "authorization: Bearer key-a")
        async with calling(gateway.url) as caller:
            status, headers, _ = await caller.whole(post(COLD, "authorization: Bearer key-a"))
        assert status == 429
        assert int(headers["x-ratelimit-remaining-tokens"]) == 9_000 - 15


@pytest.mark.parametrize(
    ("body", "rule", "path"),
    [
        (CHAT, {"ttl": "1m"}, ""),
        ({**CHAT, "temperature": 0.7}, {"ttl": "1m"}, ""),
        ({**CHAT, "temperature": None}, {"ttl": "1m"}, ""),
        ({"model": "chat", "input": "hi", "temperature": 0}, {"ttl": "1m", "any_temperature": True}, "/v1/responses"),
    ],
)
async def test_requests_whose_answers_differ_are_not_looked_up(body: Any, rule: dict[str, Any], path: str) -> None:
    """Samples unless the route says so; Responses never, which name state of an engine."""
    async with caching(whole("one"), rule=rule) as (gateway, _):
        for _ in range(2):
            async with calling(gateway.url) as caller:
                _, headers, _ = await caller.whole(post(body, path=path))
                assert HEADER not in headers
        assert CACHE.of(last(gateway)) == ""


async def test_any_temperature_and_embeddings_are_looked_up() -> None:
    async with caching(whole("one"), rule={"ttl": "1m", "any_temperature": True}) as (gateway, _):
        assert await results(gateway, CHAT, CHAT) == ["miss", "hit"]
    vector = [reply(b'{"data":[{"embedding":[0.5]}],"usage":{"prompt_tokens":1}}', "200 OK", JSON)]
    async with caching(vector) as (gateway, _):
        body = {"model": "chat", "input": "hi"}
        found = [(await sent(gateway, body, path="/v1/embeddings"))[0] for _ in range(2)]
        assert found == ["miss", "hit; age=0"]


async def test_a_caller_can_ask_for_a_new_answer_or_for_none_to_be_kept() -> None:
    """`cache-control` as in HTTP."""
    async with caching(*map(whole, "abcde")) as (gateway, _):

        async def text(*headers: str) -> str:
            content = json.loads((await sent(gateway, COLD, *headers))[1])["choices"][0]["message"]["content"]
            return str(content)

        controls = ("", "no-store", "", "no-cache", "", "No-Store", "")
        asked = [[f"cache-control: {control}"] if control else [] for control in controls]
        assert [await text(*headers) for headers in asked] == ["a", "b", "a", "c", "c", "d", "c"]


@pytest.mark.parametrize(
    "broken",
    [
        [STREAM_HEAD, chunk(TOKEN), CLOSE],
        [STREAM_HEAD, chunk(TOKEN + b'data: {"error":{"message":"no","code":500}}\n\n'), LAST_CHUNK],
        [
            STREAM_HEAD,
            chunk(
                b'data: {"choices":[{"index":0,"delta":{"content":"' + b"x" * MAX_ANSWER + b'"}}]}\n\n' + FINISH + DONE
            ),
            LAST_CHUNK,
        ],
    ],
    ids=["connection lost", "error event", "too large"],
)
async def test_an_answer_that_is_incomplete_or_too_large_is_not_kept(broken: Script) -> None:
    stream = {**COLD, "stream": True}
    async with caching(broken, [STREAMED]) as (gateway, api):
        found = [(await sent(gateway, stream))[0] for _ in range(3)]
        assert found == ["miss", "miss", "hit; age=0"]
        assert gateway.part(AnswerCache).copies.left == gateway.config.state.answer_bytes
        assert len(api.requests) == 2


async def test_an_answer_whose_caller_has_left_is_not_kept() -> None:
    stream = {**COLD, "stream": True}
    held: Script = [STREAM_HEAD + chunk(TOKEN), GATE, chunk(FINISH + DONE) + LAST_CHUNK]
    async with caching(held, [STREAMED]) as (gateway, api):
        async with calling(gateway.url) as caller:
            await caller.ask(post(stream))
        await eventually(lambda: len(gateway.recorder.recent) == 1)
        api.proceed()
        assert (await sent(gateway, stream))[0] == "miss"


async def test_an_error_is_not_kept() -> None:
    refused = [reply(b'{"error":{"message":"bad seed"}}', "400 Bad Request", JSON)]
    async with caching(refused, whole("one")) as (gateway, _):
        async with calling(gateway.url) as caller:
            assert (await caller.whole(post(COLD)))[0] == 400
        assert await results(gateway, COLD, COLD) == ["miss", "hit"]


async def test_a_route_that_a_reload_has_changed_has_no_answers() -> None:
    """Nor has one whose pool has another model or sends other members; a reload that changes neither keeps them."""
    async with caching(*map(whole, "abcdefg")) as (gateway, _):
        assert await results(gateway, COLD, COLD) == ["miss", "hit"]
        await gateway.apply_config(gateway.config)
        assert await results(gateway, COLD) == ["hit"]
        for change in (
            {"model": "newer"},
            {"drop": frozenset({"temperature"})},
            {"headers": {"x-variant": SecretStr("one")}},
            {"headers": {"x-variant": SecretStr("two")}},
            {"query": {"version": SecretStr("3")}},
        ):
            changed = gateway.config.pools["api"].model_copy(update=change)
            await gateway.apply_config(gateway.config.model_copy(update={"pools": {"api": changed}}))
            assert await results(gateway, COLD, COLD) == ["miss", "hit"]


async def test_a_route_that_keeps_to_a_region_gets_no_answer_from_before() -> None:
    """It may have been made elsewhere."""
    async with caching(*map(whole, "abc")) as (gateway, api):
        placed = {"api": {**pool(), "endpoints": [{"url": api.url, "region": "eu"}]}}
        for region in ({"prefer": ["eu"]}, {"only": ["eu"]}):
            route = {"tiers": ["api"], "cache": {"ttl": "10m"}, "region": region}
            await gateway.apply_config(Config.model_validate(document(placed, {"chat": route})))
            assert await results(gateway, COLD, COLD) == ["miss", "hit"]


async def test_replicas_share_answers_through_redis() -> None:
    """Without Redis every request is a miss."""
    async with redis_server() as server:
        state = {"redis": server.url, "answers": "redis"}
        async with caching(whole("one"), state=state) as (one, _), caching(whole("two"), state=state) as (two, api):
            for gateway in (one, two):
                await eventually(lambda gateway=gateway: gateway.part(AnswerCache).store._redis.up)
            first = await sent(one, COLD)
            await eventually(lambda: not one.answers._pipeline.busy)  # type: ignore[attr-defined]
            second = await sent(two, COLD)
            assert (first[0], second[0].partition(";")[0], len(api.requests)) == ("miss", "hit", 0)
            assert first[1] == second[1]
            server.kill()
            await asyncio.sleep(0)
            assert (await sent(two, COLD))[0] == "miss"


async def test_a_large_answer_is_written_as_the_caller_reads_it() -> None:
    """A caller that does not read holds a slice of it in memory, and gets the rest when it does."""
    text = "y" * 900_000
    async with caching(whole(text)) as (gateway, _):
        first = await sent(gateway, COLD)
        async with calling(gateway.url) as caller:
            status, headers = await caller.ask(post(COLD))
            raw = await caller.reader.readexactly(int(headers["content-length"]))
        assert (status, raw) == (200, first[1])


async def test_large_answers_that_nobody_reads_are_bounded() -> None:
    """Beyond the bound, a large answer is asked of an engine again, which waits for its caller; a small one is not."""
    text, state = "y" * 900_000, {"answer_bytes": 2_000_000}
    async with caching(whole(text), whole("small"), whole("again"), state=state) as (gateway, _):
        small = {**COLD, "seed": 1}
        assert await results(gateway, COLD, small) == ["miss", "miss"]
        async with calling(gateway.url) as one, calling(gateway.url) as two:
            for caller in (one, two):
                _, headers = await caller.ask(post(COLD))
                assert headers[HEADER] == "hit; age=0"
            assert await results(gateway, small, COLD) == ["hit", "miss"]
        await eventually(lambda: gateway.part(AnswerCache).copies.left == gateway.config.state.answer_bytes)


@asynccontextmanager
async def in_redis(server: RedisServer) -> AsyncIterator[RedisAnswers]:
    store = RedisAnswers(RedisClient(server.url, PATIENCE), "space", 1 << 20)
    store.start()
    await eventually(lambda: store._redis.up)
    yield store
    await store.close()


async def test_a_thousand_requests_at_once_open_no_circuit_breaker(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than the connections to Redis: those that cannot look in time are sent to engines."""
    key, answer = AnswerKey("group", "digest"), KeptAnswer(1.0, "application/json", b"{}")
    async with redis_server() as server, in_redis(server) as store:
        store.put(key, answer, 600.0)
        await eventually(lambda: not store._pipeline.busy)
        assert {*await asyncio.gather(*(store.find(key) for _ in range(1000)))} == {answer}
        monkeypatch.setattr(answer_stores, "LOOK_TIMEOUT", 0.01)
        for _ in range(LOOKS):
            await store._looks.acquire()  # as many others look
        assert {*await asyncio.gather(*(store.find(key) for _ in range(1000)))} == {None}
        assert (store._redis.errors, store._redis.up) == (0, True)


@pytest.mark.parametrize(
    "stored",
    [
        [1.0, "application/json\r\nset-cookie: a=b", b"{}"],
        [1.0, "\u4e2d", b"{}"],
        [math.nan, "application/json", b"{}"],
        [math.inf, "application/json", b"{}"],
        [1.0, "application/json"],
        ["now", "application/json", b"{}"],
    ],
)
async def test_what_is_no_answer_in_redis_is_not_found(stored: list[Any]) -> None:
    """No header can come from there, and no error."""
    async with redis_server() as server, in_redis(server) as store:
        await store._redis.client.set(store._name("digest"), msgspec.msgpack.encode(stored))
        assert await store.find(AnswerKey("group", "digest")) is None
        assert store._redis.errors == 0
