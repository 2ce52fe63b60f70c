"""Keys, prompts and passwords turn up nowhere, however a request or the gateway fails.

Every secret here is a canary (tests/kit/canaries.py): the caller's key and headers, prompt and answer, the backend's
key, Redis' password, the cache secret. After each failure all that the gateway writes or shows is searched for them.
What a backend says of a request may be told to that request's own caller: it is about their own words. Nothing that is
ours or another's is.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gateway.observe.logs import unhandled
from gateway.observe.record import End
from gateway.proxy import Proxy
from gateway.relay import Relay
from tests.gateway.builders import Caller, calling, get, last, post
from tests.kit.canaries import (
    ANSWER,
    BACKEND,
    CALLER,
    CANARIES,
    HEADER,
    HEADERS,
    OWN,
    PROMPT,
    REDIS,
    TOOL,
    UNKNOWN,
    World,
    asking,
    seen,
    watched,
)  # fmt: skip
from tests.kit.simulated import eventually
from tests.kit.upstream import CLOSE, HANG, LAST_CHUNK, RESET, STREAM_HEAD, Script, chunk, reply

TOKEN = f'data: {{"choices":[{{"index":0,"delta":{{"content":"{ANSWER}"}}}}]}}\n\n'.encode()
DONE = b"data: [DONE]\n\n"
BEGUN = STREAM_HEAD + chunk(TOKEN)
ECHO = f"you sent {PROMPT} {TOOL} with {HEADER} and our key {BACKEND}"
LEAKY = f"x-leak: {ECHO}"
JSON = "content-type: application/json"


def error(status: str, message: str = ECHO, **more: Any) -> Script:
    body = {"error": {"message": message, "type": "invalid_request_error", **more}}
    return [reply(json.dumps(body).encode(), status, JSON, LEAKY)]


def event(data: str) -> bytes:
    return f"data: {data}\n\n".encode()


@dataclass
class Failing:
    """A request that fails. `status` of its reply, None where there is none; `end` of its Record, if it has one."""

    status: int | None
    end: End | None
    script: Script = ()
    raw: bytes = field(default_factory=asking)
    config: dict[str, Any] = field(default_factory=dict)
    own: tuple[str, ...] = OWN


STREAM = asking(stream=True)
SOON = {"defaults": {"first_token": "100ms", "stream_idle": "100ms", "max_attempts": 1}}
SMALL = {"defaults": {"max_body": "1KB"}}
REFUSED, FAILED, BROKE, COMPLETED = End.REFUSED, End.FAILED, End.UPSTREAM_BROKE, End.COMPLETED
QUERY = asking().replace(b"/completions ", f"/completions?api_key={CALLER}&q={PROMPT} ".encode(), 1)
WRONG = (f"authorization: Bearer {UNKNOWN}", *HEADERS[1:])

PATHS = {
    # the request's own fault
    "bad JSON": Failing(400, REFUSED, raw=post(f'{{"model":"chat","messages":["{PROMPT}"'.encode(), *HEADERS)),
    "a field given twice": Failing(400, REFUSED, raw=post(f'{{"{PROMPT}":1,"{PROMPT}":2}}'.encode(), *HEADERS)),
    "a field of the wrong type": Failing(400, REFUSED, raw=asking(messages=PROMPT)),
    "an unknown key": Failing(401, REFUSED, raw=asking(WRONG)),
    "a key of another scheme": Failing(401, REFUSED, raw=asking((f"authorization: Basic {CALLER}", *HEADERS[1:]))),
    "the key in the query": Failing(200, COMPLETED, [reply(b"{}", "200 OK", JSON)], QUERY),
    "the key in the path": Failing(404, None, raw=asking().replace(b"/v1/chat", f"/v1/{CALLER}".encode(), 1)),
    "an unknown model": Failing(404, REFUSED, raw=asking(model=f"{PROMPT}-{CALLER}"), own=(*OWN, CALLER)),
    "a body that is too large": Failing(413, REFUSED, raw=asking(more=PROMPT * 100), config=SMALL),
    "a compressed body": Failing(415, REFUSED, raw=asking((*HEADERS, "content-encoding: gzip"))),
    "a header that is no number": Failing(400, REFUSED, raw=asking((*HEADERS, f"x-priority: {HEADER}"))),
    "a budget that is none": Failing(400, REFUSED, raw=asking((*HEADERS, f"x-slo-ttft-ms: {HEADER}"))),
    "no HTTP": Failing(400, None, raw=f"{PROMPT} {CALLER}\r\n{HEADER}\r\n\r\n".encode()),
    "a head that is too large": Failing(431, None, raw=asking((*HEADERS, f"x-more: {PROMPT * 40_000}"))),
    # the backend's
    "401 with our key": Failing(502, FAILED, error("401 Unauthorized", f"Incorrect API key provided: {BACKEND}")),
    "403 with our key": Failing(502, FAILED, error("403 Forbidden")),
    "400 with the prompt": Failing(400, REFUSED, error("400 Bad Request")),
    "400 with the prompt as a code": Failing(400, REFUSED, error("400 Bad Request", code=PROMPT, param=BACKEND)),
    "500 with the prompt": Failing(502, FAILED, error("500 Internal Server Error")),
    "429 with the prompt": Failing(429, FAILED, error("429 Too Many Requests")),
    "503 as a page": Failing(503, FAILED, [reply(f"<html>{ECHO}".encode(), "503 Service Unavailable", LEAKY)]),
    "a context overflow": Failing(
        400, REFUSED, error("400 Bad Request", f"This model's maximum context length is 8 tokens: {PROMPT}")
    ),
    "a content policy": Failing(400, REFUSED, error("400 Bad Request", code="content_policy_violation")),
    "a redirect": Failing(502, FAILED, [reply(b"", "301 Moved Permanently", f"location: http://{PROMPT}.example/")]),
    "garbage in place of HTTP": Failing(502, FAILED, [f"{ECHO}\r\n\r\n".encode(), CLOSE]),
    "garbage in a header": Failing(502, FAILED, [f"HTTP/1.1 200 OK\r\n{ECHO}\r\n\r\n".encode(), CLOSE]),
    "garbage in place of JSON": Failing(200, BROKE, [reply(f"{{{ECHO}".encode(), "200 OK", JSON)]),
    "an error in place of an answer": Failing(
        200, BROKE, [reply(json.dumps({"error": {"message": ECHO}}).encode(), "200 OK", JSON)]
    ),
    "a reset before the head": Failing(502, FAILED, [RESET]),
    "a reset in the head": Failing(502, FAILED, [f"HTTP/1.1 200 OK\r\n{LEAKY}\r\nx-mo".encode(), RESET]),
    "a reset in the stream": Failing(200, BROKE, [STREAM_HEAD + chunk(TOKEN), RESET], STREAM),
    "an error before the first token": Failing(
        502, FAILED, [STREAM_HEAD + chunk(event(json.dumps({"error": {"message": ECHO}}))) + LAST_CHUNK], STREAM
    ),
    "an error in the stream": Failing(
        200, BROKE, [BEGUN, chunk(event(json.dumps({"error": {"message": ECHO}}))), CLOSE], STREAM
    ),
    "an error with the first token": Failing(
        200, BROKE, [STREAM_HEAD + chunk(TOKEN + event(json.dumps({"error": {"message": ECHO}}))), CLOSE], STREAM
    ),
    "garbage in the stream": Failing(200, BROKE, [BEGUN, chunk(event(f"{{{ECHO}")), CLOSE], STREAM),
    "an end without [DONE]": Failing(200, BROKE, [STREAM_HEAD + chunk(TOKEN) + LAST_CHUNK], STREAM),
    "silence before the first token": Failing(504, FAILED, [HANG], STREAM, SOON),
    "silence in the stream": Failing(200, BROKE, [STREAM_HEAD + chunk(TOKEN), HANG], STREAM, SOON),
    # nobody's in particular
    "shed": Failing(429, End.SHED, raw=asking((*HEADERS, "x-slo-ttft-ms: 0.001"), stream=True), config={
        "routes": {"chat": {"tiers": ["only"], "ttft": {"budget": "1s"}, "on_miss": "shed"}}}),
}  # fmt: skip


@pytest.fixture
def found(capfd: pytest.CaptureFixture[str]) -> list[str]:
    """What turned up, and where."""
    return []


def assert_nothing(found: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    out, err = capfd.readouterr()
    assert found + seen("standard output", out) + seen("standard error", err) == []


async def told(world: World, raw: bytes) -> tuple[int, str]:
    """Status and all else that the caller of this very request is told."""
    async with calling(world.gateway.url) as caller:
        caller.writer.write(raw.replace(b"host: x", b"host: x\r\nconnection: close", 1))
        said = (await caller.rest()).decode("latin-1")
    await eventually(lambda: world.gateway.recorder.live == 0)
    return int(said.split()[1]), said


@pytest.mark.parametrize("name", PATHS)
async def test_a_request_that_fails_leaves_nothing(
    name: str, tmp_path: Path, found: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    """In logs, metrics, on the admin port, before other callers; and of ours, not before its own."""
    path = PATHS[name]
    async with watched(tmp_path, path.script or [CLOSE], found=found, **path.config) as world:
        status, said = await told(world, path.raw)
        assert status == path.status
        if path.end is None:
            assert not world.gateway.recorder.recent
        else:
            assert last(world.gateway).end is path.end
        assert bool(world.upstream.requests) is bool(path.script)
        found += seen("its own reply", said, set(CANARIES) - set(path.own))
    assert_nothing(found, capfd)


def test_there_are_thirty_of_them_and_more() -> None:
    """As many as are promised."""
    assert len(PATHS) >= 30


async def test_the_canaries_are_really_there(
    tmp_path: Path, found: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    """A request that succeeds has them at the backend, where they belong, and its answer in its caller's hands."""
    whole = json.dumps({"choices": [{"message": {"content": ANSWER}, "finish_reason": "stop"}]}).encode()
    async with watched(tmp_path, [reply(whole, "200 OK", JSON)], found=found) as world:
        _, said = await told(world, asking())
        assert ANSWER in said
        assert all(secret in world.sent for secret in (PROMPT, TOOL, BACKEND))
    assert (tmp_path / "access.jsonl").read_text().count('"end":"completed"') == 1
    assert_nothing(found, capfd)


# --------------------------------------------------------------------------- callers who leave


@pytest.mark.parametrize("script", [[HANG], [STREAM_HEAD + chunk(TOKEN), HANG]], ids=["before", "after"])
async def test_a_caller_that_leaves_leaves_nothing(
    script: Script, tmp_path: Path, found: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    """Before its first token, and after it."""
    async with watched(tmp_path, script, found=found) as world:
        async with calling(world.gateway.url) as caller:
            caller.writer.write(STREAM)
            await world.upstream.until(lambda upstream: bool(upstream.requests))
            if len(script) > 1:
                await caller.head()
        await eventually(lambda: world.gateway.recorder.recent)
        assert last(world.gateway).end is End.CLIENT_GONE
    assert_nothing(found, capfd)


# --------------------------------------------------------------------------- our own bugs


async def failing_sink(world: World, patch: pytest.MonkeyPatch) -> None:
    def sink(record: Any) -> None:
        raise ValueError(f"cannot take {PROMPT} of {CALLER}")

    world.gateway.recorder.sinks.append(sink)


async def failing_stage(world: World, patch: pytest.MonkeyPatch) -> None:
    async def estimate(request: Any, *_: Any) -> Any:
        raise KeyError(str(request.body))

    patch.setattr(world.gateway.decider, "estimate", estimate)


async def failing_stage_with_a_cause(world: World, patch: pytest.MonkeyPatch) -> None:
    async def estimate(request: Any, *_: Any) -> Any:
        try:
            int(PROMPT)
        except ValueError as error:
            raise RuntimeError(f"bad {CALLER}") from error

    patch.setattr(world.gateway.decider, "estimate", estimate)


async def failing_relay(world: World, patch: pytest.MonkeyPatch) -> None:
    def begin(relay: Relay, run: Any) -> None:
        raise UnicodeEncodeError("latin-1", PROMPT, 0, 1, f"{PROMPT} {REDIS}")

    patch.setattr(Relay, "begin", begin)


async def failing_handler(world: World, patch: pytest.MonkeyPatch) -> None:
    async def infer(proxy: Proxy, http: Any, *_: Any) -> None:
        raise RuntimeError(f"{http.headers} {http.body!r}")

    patch.setattr(Proxy, "infer", infer)


async def failing_task(world: World, patch: pytest.MonkeyPatch) -> None:
    """Nobody awaits it, so the loop is told of its exception."""
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(unhandled)  # as `serve` does

    async def work() -> None:
        raise RuntimeError(f"{PROMPT} {REDIS}")

    task = loop.create_task(work(), name="background")
    await asyncio.wait([task])
    del task


async def failing_page(world: World, patch: pytest.MonkeyPatch) -> None:
    """On the admin port."""

    def statistics(*_: Any) -> Any:
        raise RuntimeError(f"{PROMPT} {REDIS}")

    with pytest.MonkeyPatch.context() as for_now:
        for_now.setattr(world.gateway.monitor.fleet, "statistics", statistics)
        status, _, body = await get(world.gateway.admin_url, "/fleet")
    assert status == 500
    assert seen("/fleet", body.decode()) == []


BUGS: list[Callable[[World, pytest.MonkeyPatch], Awaitable[None]]] = [
    failing_sink, failing_stage, failing_stage_with_a_cause, failing_relay, failing_handler, failing_task, failing_page,
]  # fmt: skip


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
async def test_a_bug_of_ours_tells_where_it_is_and_not_of_whose_request(
    bug: Callable[[World, pytest.MonkeyPatch], Awaitable[None]], tmp_path: Path, found: list[str],
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Frames and the kind of exception are logged; its message may quote anything."""
    async with watched(tmp_path, [STREAM_HEAD + chunk(TOKEN + DONE) + LAST_CHUNK], found=found) as world:
        await bug(world, monkeypatch)
        async with calling(world.gateway.url) as caller:
            caller.writer.write(STREAM.replace(b"host: x", b"host: x\r\nconnection: close", 1))
            said = (await caller.rest()).decode()
        await eventually(lambda: world.gateway.recorder.live == 0)
        found += seen("its own reply", said, set(CANARIES) - set(OWN))
        monkeypatch.undo()
        logged = world.logged.getvalue()
        assert "test_secrets.py" in logged  # the frame
        assert any(kind in logged for kind in ("ValueError", "KeyError", "RuntimeError", "UnicodeEncodeError"))
    assert_nothing(found, capfd)


# --------------------------------------------------------------------------- the admin port, and the end


async def test_wrong_questions_to_the_admin_port_leave_nothing(
    tmp_path: Path, found: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    """/explain is asked with prompts and keys; its refusals are the asker's alone."""
    async with watched(tmp_path, [CLOSE], found=found) as world:
        for raw in (asking(WRONG), asking(messages=PROMPT), asking(model=PROMPT), post(PROMPT.encode(), *HEADERS)):
            async with calling(world.gateway.admin_url) as caller:
                status, _, body = await caller.whole(raw.replace(b"/v1/chat/completions", b"/explain", 1))
            assert 400 <= status < 500
            found += seen("/explain", body.decode(), set(CANARIES) - set(OWN))
        for path in (f"/requests?last={PROMPT}", f"/explain?path={CALLER}", f"/{CALLER}"):
            status, _, body = await get(world.gateway.admin_url, path)
            assert 400 <= status < 500
            found += seen(path, body.decode())
    assert_nothing(found, capfd)


async def test_a_stop_in_the_middle_of_a_stream_leaves_nothing(
    tmp_path: Path, found: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    """What runs is cut."""
    async with watched(tmp_path, [STREAM_HEAD + chunk(TOKEN), HANG], found=found) as world:
        caller = await begun(world)
        await world.gateway.stop()
        await caller.rest()
        await eventually(lambda: world.gateway.recorder.recent)
        assert last(world.gateway).end is End.CLIENT_GONE
        await world.gateway.start()  # so that it can be looked at
    assert_nothing(found, capfd)


async def begun(world: World) -> Caller:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(world.gateway.url.rpartition(":")[2]))
    caller = Caller(reader, writer)
    assert (await caller.ask(STREAM))[0] == 200
    return caller
