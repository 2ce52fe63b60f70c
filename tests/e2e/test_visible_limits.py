"""A provider's limit that shuts an endpoint is visible: GET /fleet, the log, and the times that callers read."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.app import Gateway
from policies.rate_limit.endpoint_limits import SavedLimits
from tests.support.builders import CHAT, STREAMED, calling, get, post
from tests.support.gateways import pool, running
from tests.support.redis import redis_server
from tests.support.served import serving
from tests.support.simulated import eventually
from tests.support.upstream import Received, Script, Upstream, reply

pytestmark = pytest.mark.virtual_time

JSON = "content-type: application/json"
ROUTES = {"chat": {"tiers": ["api"], "ttft": {"budget": "2s"}, "max_attempts": 1}}
NONE_LEFT = "x-ratelimit-remaining-requests: 0", "x-ratelimit-reset-requests: 9999h"


def refused(*headers: str, status: str = "429 Too Many Requests") -> Script:
    return [reply(b"{}", status, JSON, *headers)]


async def asked(gateway: Gateway) -> tuple[int, str | None]:
    """Status and `retry-after` of a request."""
    async with calling(gateway.url) as caller:
        status, headers = await caller.ask(post({**CHAT, "stream": True}))
        await caller.body(headers) if status != 200 else await caller.chunks()
        return status, headers.get("retry-after")


async def shown(gateway: Gateway) -> dict[str, Any]:
    [found] = json.loads((await get(gateway.admin_url, "/fleet"))[2])
    return dict(found)


CASES = {
    "a time named": (refused("retry-after: 45"), 45, "rate limit reached"),
    "in milliseconds": (refused("retry-after-ms: 44700"), 45, "rate limit reached"),
    "a limit reported": (refused(*NONE_LEFT), 60, "rate limit of requests reached"),
    "an engine without room": (refused("retry-after: 30", status="503 Service Unavailable"), 30, "503"),
}


async def test_callers_of_an_engine_that_asks_for_time_read_its_time() -> None:
    """Beyond the half minute that is told where nothing is known."""

    class Engine(Upstream):
        def script(self, received: Received) -> Script:
            busy = refused("retry-after: 55", status="503 Service Unavailable")
            return busy if received.method == "POST" else [reply(b"", "200 OK", "content-type: text/plain")]

    async with Engine([STREAMED]) as engine:
        async with running({"api": pool(engine.url, backend="vllm")}, ROUTES) as gateway:
            told = [await asked(gateway) for _ in range(3)]
        assert told[0] == (503, "55")
        assert all(status == 503 and 50 <= int(again or 0) <= 55 for status, again in told)


@pytest.mark.parametrize("case", CASES)
async def test_the_page_the_log_and_the_callers_say_the_same(case: str, caplog: pytest.LogCaptureFixture) -> None:
    """Whose limit it is, and until when. A line at the beginning and at the end, none for each request."""
    script, seconds, why = CASES[case]
    async with Upstream(script, [STREAMED]) as api, running({"api": pool(api.url)}, ROUTES) as gateway:
        first, *later = [await asked(gateway) for _ in range(4)]
        assert first == (int(script[0].split()[1]), str(seconds))  # type: ignore[union-attr, operator]
        for status, again in later:
            assert status == 429
            assert seconds - 2 <= int(again or 0) <= seconds
        assert len(api.requests) == 1
        found = await shown(gateway)
        assert seconds - 2 <= found["limited_for_s"] <= seconds
        assert found["why"].startswith("limited by its provider for ")
        assert why in found["why"]
        await eventually(lambda: "is limited by its provider" in caplog.text)
        await asyncio.sleep(seconds)
        assert await asked(gateway) == (200, None)
        await eventually(lambda: "is no longer limited by its provider" in caplog.text)
        assert ((found := await shown(gateway))["limited_for_s"], found["why"]) == (None, None)
    told = [message for message in caplog.messages if "limited by" in message]
    assert len(told) == 2
    assert told[0].startswith(f"endpoint api/{api.url.removeprefix('http://')} is limited by its provider for ")


async def test_a_limit_reached_again_and_again_is_one_pair_of_lines_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    """A provider at its limit for long, refusing for two seconds each time."""
    async with Upstream(refused("retry-after: 2")) as api, running({"api": pool(api.url)}, ROUTES) as gateway:
        for _ in range(30):
            await asked(gateway)
            await asyncio.sleep(3.0)
        assert len(api.requests) > 20
    assert 2 <= len([message for message in caplog.messages if "limited by" in message]) <= 4


async def test_a_caller_hears_the_time_of_the_endpoint_that_opens_first(caplog: pytest.LogCaptureFixture) -> None:
    """Not that of the last one asked."""
    routes = {"chat": {"tiers": ["one", "two"], "ttft": {"budget": "2s"}}}
    async with (
        Upstream(refused("retry-after: 7")) as one,
        Upstream(refused("retry-after: 50")) as two,
        running({"one": pool(one.url), "two": pool(two.url)}, routes) as gateway,
    ):
        assert await asked(gateway) == (429, "7")
        assert (await asked(gateway))[1] in ("6", "7")


async def test_a_limit_of_the_configuration_is_told_as_such(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "firsttoken")
    limited = pool("", requests_per_minute=1)
    async with (
        Upstream([STREAMED]) as api,
        running({"api": {**limited, "endpoints": [api.url]}}, ROUTES) as gateway,
    ):
        assert [(await asked(gateway))[0] for _ in range(2)] == [200, 429]
        assert (await shown(gateway))["why"].startswith("limited by the configuration for ")
        await eventually(lambda: "limited by the configuration" in caplog.text)


# --------------------------------------------------------------------------- over a restart

LASTING: dict[str, tuple[Script, dict[str, Any]]] = {
    "a time named": (refused("retry-after: 45"), {}),
    "a limit reported": (refused(*NONE_LEFT), {}),
    "the configuration's": ([STREAMED], {"requests_per_minute": 1}),
}


@pytest.mark.parametrize("case", LASTING)
async def test_a_limit_outlives_a_restart(case: str, tmp_path: Path) -> None:
    """What is left of it: the next process asks nobody whom the last one was told to leave alone."""
    script, more = LASTING[case]
    state = {"state": {"dir": str(tmp_path)}}
    async with Upstream(script, [STREAMED]) as api:
        for _ in range(2):
            async with running({"api": pool(api.url, **more)}, ROUTES, **state) as gateway:
                await asked(gateway)
                limited = (await shown(gateway))["limited_for_s"]
                assert 35 < limited <= 60
                assert len(api.requests) == 1
                await asyncio.sleep(4.0)
        async with running({"api": pool(api.url, **more)}, ROUTES, **state) as gateway:
            await asyncio.sleep(limited)
            assert (await asked(gateway))[0] == 200


async def test_a_limit_of_one_server_is_not_restored_for_another(tmp_path: Path) -> None:
    """Another model at the server has it."""
    state = {"state": {"dir": str(tmp_path)}}
    async with Upstream(refused("retry-after: 45")) as api, Upstream([STREAMED]) as other:
        async with running({"api": pool(api.url)}, ROUTES, **state) as gateway:
            assert (await asked(gateway))[0] == 429
        async with running({"api": pool(api.url, model="another")}, ROUTES, **state) as gateway:
            assert (await asked(gateway))[0] == 429
            assert len(api.requests) == 1
        async with running({"api": pool(other.url)}, ROUTES, **state) as gateway:
            assert (await asked(gateway))[0] == 200


@pytest.mark.real_time
async def test_a_limit_outlives_a_killed_process_and_one_with_redis_alone(tmp_path: Path) -> None:
    """Saved as it begins, and not at the next interval alone."""
    async with redis_server() as redis, Upstream(refused("retry-after: 58")) as api:
        for number, state in enumerate((f"dir: {tmp_path / 'state'}", f"redis: {redis.url}")):
            file = tmp_path / "f.yaml"
            file.write_text(
                "server: {listen: 127.0.0.1:0, admin: 127.0.0.1:0}\ntelemetry: {access_log: 'off'}\n"
                f"pools:\n  api: {{backend: compatible, model: m, endpoints: [{api.url}]}}\n"
                f"routes: {{chat: {{tiers: [api], ttft: {{budget: 1s}}, max_attempts: 1}}}}\nstate: {{{state}}}\n"
            )
            async with serving(file) as served, calling(served.url) as caller:
                assert (await caller.whole(post(CHAT)))[0] == 429
                kept = tmp_path / "state" / "learned.json"
                if number == 0:
                    await eventually(lambda kept=kept: kept.exists() and b'"limits":{"api/' in kept.read_bytes(), 30)
                    served.process.kill()
                else:
                    served.process.terminate()
                await served.process.wait()
            async with serving(file) as served, calling(served.url) as caller:
                status, headers, _ = await caller.whole(post(CHAT))
                assert status == 429
                assert 0 < int(headers["retry-after"]) <= 58
            assert len(api.requests) == number + 1


@pytest.mark.parametrize(
    "hostile",
    [
        {"refusal": {"left": 1e9}},
        {"callers": {"a": {"left": -1}}},
        {"callers": {str(number): {"left": 1} for number in range(65)}},
        {"reported": [[]]},
        {"reported": [{"counts_tokens": True, "remaining": 0, "limit": 1, "rate": 0, "full_in": 9e9, "believed": 60}]},
        {"reported": [{"counts_tokens": True, "remaining": 0, "limit": 1, "rate": 0, "full_in": 9, "believed": None}]},
    ],
)
def test_no_file_shuts_an_endpoint_for_longer_than_a_provider_can(hostile: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(hostile, SavedLimits)
