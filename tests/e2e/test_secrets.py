"""Keys, prompts and passwords appear nowhere, for any failure of a request or the gateway.

Every secret is a canary (tests/support/canaries.py): the caller's key and headers, prompt and answer, the backend's
key, Redis' password, the cache secret. After each failure all output of the gateway is searched for canaries, and all
commands that a real Redis received; Redis holds the caller's key and quota, and carries messages between replicas. A
backend's message about a request may go to that request's own caller; secrets of the gateway or of other callers may
not.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.observe.logs import unhandled
from gateway.observe.record import RequestOutcome
from gateway.proxy import Proxy
from gateway.upstream.answer import Relay
from tests.support.builders import Caller, calling, get, last, post
from tests.support.canaries import (
    ANSWER,
    BACKEND,
    CALLER,
    CANARIES,
    HEADERS,
    OWN,
    PROMPT,
    REDIS,
    TOOL,
    CanaryGateway,
    canary_request,
    gateway_with_canaries,
    leaks_in,
)
from tests.support.failure_cases import DONE, JSON, PATHS, STREAM, TOKEN, WRONG
from tests.support.simulated import eventually
from tests.support.upstream import CLOSE, HANG, LAST_CHUNK, STREAM_HEAD, Script, chunk, reply


@pytest.fixture
def found(capfd: pytest.CaptureFixture[str]) -> list[str]:
    """Canaries found so far, with locations."""
    return []


def assert_nothing(found: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    out, err = capfd.readouterr()
    assert found + leaks_in("standard output", out) + leaks_in("standard error", err) == []


async def ask(world: CanaryGateway, raw: bytes) -> tuple[int, str]:
    """Status and complete reply of a request."""
    async with calling(world.gateway.url) as caller:
        caller.writer.write(raw.replace(b"host: localhost", b"host: localhost\r\nconnection: close", 1))
        answer = (await caller.rest()).decode("latin-1")
    await eventually(lambda: world.gateway.recorder.live == 0)
    return int(answer.split()[1]), answer


@pytest.mark.parametrize("name", PATHS)
async def test_a_failed_request_leaks_no_secret(
    name: str, tmp_path: Path, found: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    """In logs, metrics, the admin port and other callers' replies. The request's own reply has no secret of the
    gateway."""
    path = PATHS[name]
    async with gateway_with_canaries(tmp_path, path.script or [CLOSE], found=found, **path.config) as world:
        status, answer = await ask(world, path.raw)
        assert status == path.status
        if path.end is None:
            assert not world.gateway.recorder.recent
        else:
            assert last(world.gateway).end is path.end
        assert bool(world.upstream.requests) is bool(path.script)
        found += leaks_in("its own reply", answer, set(CANARIES) - set(path.own))
    assert_nothing(found, capfd)


def test_at_least_thirty_failures_are_covered() -> None:
    """Guards against accidental removal of cases."""
    assert len(PATHS) >= 30


async def test_a_successful_request_carries_the_canaries(
    tmp_path: Path, found: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    """To the backend in the request, to the caller in the answer."""
    whole = json.dumps({"choices": [{"message": {"content": ANSWER}, "finish_reason": "stop"}]}).encode()
    async with gateway_with_canaries(tmp_path, [reply(whole, "200 OK", JSON)], found=found) as world:
        _, answer = await ask(world, canary_request())
        assert ANSWER in answer
        assert all(secret in world.sent for secret in (PROMPT, TOOL, BACKEND))
        await assert_redis_was_used(world)
    assert (tmp_path / "access.jsonl").read_text().count('"end":"completed"') == 1
    assert world.collector.spans
    assert_nothing(found, capfd)


async def assert_redis_was_used(world: CanaryGateway) -> None:
    """Checks that Redis received the key, quota and load, so that the recording is known to work."""
    digest = hashlib.sha256(CALLER.encode()).hexdigest()
    used = f"firsttoken:{{caller}}:{digest[:8]}"
    async with asyncio.timeout(60):
        while '"PUBLISH" "firsttoken:replicas:1"' not in await world.redis.commands():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        while f"{used}:spent" not in (contents := await world.redis.contents()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert digest in contents
    assert f"{used}:minute" in contents
    assert "lua" in await world.redis.commands()


# --------------------------------------------------------------------------- disconnected callers


@pytest.mark.parametrize("script", [[HANG], [STREAM_HEAD + chunk(TOKEN), HANG]], ids=["before", "after"])
async def test_a_disconnected_caller_leaks_no_secret(
    script: Script, tmp_path: Path, found: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    """Before the first token, and after."""
    async with gateway_with_canaries(tmp_path, script, found=found) as world:
        async with calling(world.gateway.url) as caller:
            caller.writer.write(STREAM)
            await world.upstream.until(lambda upstream: bool(upstream.requests))
            if len(script) > 1:
                await caller.head()
        await eventually(lambda: world.gateway.recorder.recent)
        assert last(world.gateway).end is RequestOutcome.CLIENT_GONE
    assert_nothing(found, capfd)


# --------------------------------------------------------------------------- internal errors


async def failing_sink(world: CanaryGateway, patch: pytest.MonkeyPatch) -> None:
    def sink(record: Any) -> None:
        raise ValueError(f"cannot take {PROMPT} of {CALLER}")

    world.gateway.recorder.sinks.append(sink)


async def failing_stage(world: CanaryGateway, patch: pytest.MonkeyPatch) -> None:
    async def estimate(request: Any, *_: Any, **__: Any) -> Any:
        raise KeyError(str(request.body))

    patch.setattr(world.gateway.decider, "estimate", estimate)


async def failing_stage_with_a_cause(world: CanaryGateway, patch: pytest.MonkeyPatch) -> None:
    async def estimate(request: Any, *_: Any, **__: Any) -> Any:
        try:
            int(PROMPT)
        except ValueError as error:
            raise RuntimeError(f"bad {CALLER}") from error

    patch.setattr(world.gateway.decider, "estimate", estimate)


async def failing_relay(world: CanaryGateway, patch: pytest.MonkeyPatch) -> None:
    def begin(relay: Relay, *_: Any) -> None:
        raise UnicodeEncodeError("latin-1", PROMPT, 0, 1, f"{PROMPT} {REDIS}")

    patch.setattr(Relay, "begin", begin)


async def failing_handler(world: CanaryGateway, patch: pytest.MonkeyPatch) -> None:
    async def infer(proxy: Proxy, http: Any, *_: Any) -> None:
        raise RuntimeError(f"{http.headers} {http.body!r}")

    patch.setattr(Proxy, "infer", infer)


async def failing_task(world: CanaryGateway, patch: pytest.MonkeyPatch) -> None:
    """An exception that no coroutine awaits reaches the loop's handler."""
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(unhandled)  # as `serve` does

    async def work() -> None:
        raise RuntimeError(f"{PROMPT} {REDIS}")

    task = loop.create_task(work(), name="background")
    await asyncio.wait([task])
    del task


async def failing_page(world: CanaryGateway, patch: pytest.MonkeyPatch) -> None:
    """A page of the admin port fails."""

    def statistics(*_: Any) -> Any:
        raise RuntimeError(f"{PROMPT} {REDIS}")

    with pytest.MonkeyPatch.context() as for_now:
        for_now.setattr(world.gateway.monitor.fleet.view, "statistics", statistics)
        status, _, body = await get(world.gateway.admin_url, "/fleet")
    assert status == 500
    assert leaks_in("/fleet", body.decode()) == []


BUGS: list[Callable[[CanaryGateway, pytest.MonkeyPatch], Awaitable[None]]] = [
    failing_sink,
    failing_stage,
    failing_stage_with_a_cause,
    failing_relay,
    failing_handler,
    failing_task,
    failing_page,
]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
async def test_an_internal_error_is_logged_without_its_message(
    bug: Callable[[CanaryGateway, pytest.MonkeyPatch], Awaitable[None]],
    tmp_path: Path,
    found: list[str],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Frames and the exception's type are logged; its message may quote anything."""
    async with gateway_with_canaries(tmp_path, [STREAM_HEAD + chunk(TOKEN + DONE) + LAST_CHUNK], found=found) as world:
        await bug(world, monkeypatch)
        async with calling(world.gateway.url) as caller:
            caller.writer.write(STREAM.replace(b"host: localhost", b"host: localhost\r\nconnection: close", 1))
            answer = (await caller.rest()).decode()
        await eventually(lambda: world.gateway.recorder.live == 0)
        found += leaks_in("its own reply", answer, set(CANARIES) - set(OWN))
        monkeypatch.undo()
        logged = world.logged.getvalue()
        assert "test_secrets.py" in logged  # the frame
        assert any(kind in logged for kind in ("ValueError", "KeyError", "RuntimeError", "UnicodeEncodeError"))
    assert_nothing(found, capfd)


# --------------------------------------------------------------------------- admin port and shutdown


async def test_invalid_admin_requests_leak_no_secret(
    tmp_path: Path, found: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    """/explain receives prompts and keys; its errors go to the sender only."""
    async with gateway_with_canaries(tmp_path, [CLOSE], found=found) as world:
        for raw in (
            canary_request(WRONG),
            canary_request(messages=PROMPT),
            canary_request(model=PROMPT),
            post(PROMPT.encode(), *HEADERS),
        ):
            async with calling(world.gateway.admin_url) as caller:
                status, _, body = await caller.whole(raw.replace(b"/v1/chat/completions", b"/explain", 1))
            assert 400 <= status < 500
            found += leaks_in("/explain", body.decode(), set(CANARIES) - set(OWN))
        for path in (f"/requests?last={PROMPT}", f"/explain?path={CALLER}", f"/{CALLER}"):
            status, _, body = await get(world.gateway.admin_url, path)
            assert 400 <= status < 500
            found += leaks_in(path, body.decode())
    assert_nothing(found, capfd)


async def test_a_shutdown_within_a_stream_leaks_no_secret(
    tmp_path: Path, found: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    """Running requests are aborted."""
    async with gateway_with_canaries(tmp_path, [STREAM_HEAD + chunk(TOKEN), HANG], found=found) as world:
        caller = await open_stream(world)
        await world.gateway.stop()
        await caller.rest()
        await eventually(lambda: world.gateway.recorder.recent)
        assert last(world.gateway).end is RequestOutcome.CUT
        await world.gateway.start()  # for inspection
    assert_nothing(found, capfd)


async def open_stream(world: CanaryGateway) -> Caller:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(world.gateway.url.rpartition(":")[2]))
    caller = Caller(reader, writer)
    assert (await caller.ask(STREAM))[0] == 200
    return caller
