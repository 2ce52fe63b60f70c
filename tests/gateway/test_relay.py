"""Bytes to the client: the body as it came, the framing ours, and never an end in silence."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.http import HttpVersion10, HttpVersion11

from backends.interface import Failure, FailureKind
from gateway import relay
from gateway.frontend import ClientConnection, FrontServer, Written
from gateway.observe.record import End, Life, Stage
from gateway.relay import SILENT, TRUNCATED, pump
from policies.facts import Ending
from tests.gateway.builders import (
    ANSWER,
    CHAT,
    DONE,
    ERROR,
    FINISH,
    PREAMBLE,
    TOKEN,
    USAGE,
    WHOLE,
    Caller,
    Hearing,
    Owner,
    Steered,
    conversing,
    last,
    post,
    record,
    run,
)
from tests.kit.simulated import eventually
from tests.kit.upstream import CLOSE, GATE, HANG, LAST_CHUNK, STREAM_HEAD, Pause, Script, Upstream, chunk, reply

RESET = Failure(FailureKind.RESET, "The backend closed the connection before its reply was complete.")


class Wire(asyncio.Transport):
    """The client's end: what was written, in which writes."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.gone = False

    def write(self, data: bytes) -> None:  # type: ignore[override]
        assert not self.gone
        self.writes.append(data)

    def is_closing(self) -> bool:
        return self.gone

    def abort(self) -> None:
        self.gone = True

    @property
    def head(self) -> dict[str, str]:
        first, *lines = self.writes[0].partition(b"\r\n\r\n")[0].decode().split("\r\n")
        return {"": first, **{name: value for name, _, value in (line.partition(": ") for line in lines)}}

    @property
    def body(self) -> bytes:
        return b"".join(self.writes).partition(b"\r\n\r\n")[2]


class Relaying:
    """A committed attempt on its way to a client: what the backend says is the test's to say."""

    def __init__(self, *held: bytes, stream: bool = True, **headers: str) -> None:
        self.wire, self.monitor = Wire(), Hearing()
        self.run = run(self.monitor, Owner(), stream=stream)
        self.life = Life(record(ttft=None, total=0.0, arrival=monotonic()))
        self.run.on_head(200, {"content-type": "text/event-stream", **headers})
        for data in held:
            self.run.on_body(data)

    async def to(self, *, http10: bool = False, keep_alive: bool = True, strip: bool = False, idle: float = 30) -> None:
        """Begin to relay."""
        connection = FrontServer(_nobody)()
        assert isinstance(connection, ClientConnection)
        self.connection = connection
        self.connection.transport = self.wire
        version = HttpVersion10 if http10 else HttpVersion11
        http: Any = SimpleNamespace(protocol=self.connection, version=version, keep_alive=keep_alive)
        self.task = asyncio.create_task(pump(self.run, http, self.life, strip_usage=strip, idle=idle, close=False))
        await asyncio.sleep(0)

    async def written(self) -> Written:
        """To its end."""
        async with asyncio.timeout(5):
            response: Any = await self.task
        assert isinstance(response, Written)
        assert self.connection.reader is None
        return response

    @property
    def outcome(self) -> tuple[End, str]:
        return self.life.record.end, self.life.record.error


async def _nobody(http: web.BaseRequest) -> web.StreamResponse:
    raise AssertionError("no request comes this way")


def error_event(failure: Failure) -> bytes:
    error = {"message": failure.message, "type": failure.type, "param": None, "code": failure.code}
    return b"data: " + json.dumps({"error": error}, separators=(",", ":")).encode() + b"\n\n"


# --------------------------------------------------------------------------- framing


async def test_the_head_goes_out_with_the_first_token_in_one_write() -> None:
    """And with all that was held before it: one packet, nothing for a proxy to act on in between."""
    talk = Relaying(PREAMBLE, TOKEN)
    await talk.to()
    (first,) = talk.wire.writes
    assert first.endswith(b"\r\n\r\n" + chunk(PREAMBLE + TOKEN))
    assert talk.wire.head[""] == "HTTP/1.1 200 OK"
    assert talk.wire.head["transfer-encoding"] == "chunked"
    assert talk.life.record.ttft == pytest.approx(monotonic() - talk.life.record.arrival, abs=1.0)
    talk.run.cancel()
    talk.task.cancel()


async def test_every_read_of_the_upstream_is_one_chunk_in_its_own_call() -> None:
    """Verbatim, wherever it was cut; nothing waits for the loop to turn."""
    talk = Relaying(TOKEN)
    await talk.to()
    for i, part in enumerate([b": x\n\n", *[TOKEN[:20], TOKEN[20:21], TOKEN[21:]], FINISH, DONE], 1):
        talk.run.on_body(part)
        assert talk.wire.writes[i] == chunk(part)
    talk.run.on_end()
    assert talk.wire.writes[-1] == LAST_CHUNK
    assert (await talk.written()).keep_alive
    assert talk.outcome == (End.COMPLETED, "")


async def test_a_whole_answer_keeps_its_length() -> None:
    """It may come in several reads all the same."""
    talk = Relaying(WHOLE[:30], stream=False, **{"content-length": str(len(WHOLE)), "content-type": "application/json"})
    await talk.to()
    talk.run.on_body(WHOLE[30:])
    talk.run.on_end()
    assert (await talk.written()).keep_alive
    assert (talk.wire.head["content-length"], talk.wire.body) == (str(len(WHOLE)), WHOLE)
    assert "transfer-encoding" not in talk.wire.head
    assert talk.outcome == (End.COMPLETED, "")


async def test_a_whole_answer_without_a_length_is_chunked() -> None:
    """As the backend sent it."""
    talk = Relaying(WHOLE, stream=False)
    await talk.to()
    talk.run.on_end()
    await talk.written()
    assert talk.wire.body == chunk(WHOLE) + LAST_CHUNK


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_of_http_1_0_gets_a_body_that_ends_with_the_connection(stream: bool) -> None:
    """It knows no chunks (RFC 9112 section 7.1)."""
    body = ANSWER if stream else WHOLE
    talk = Relaying(body, stream=stream)
    await talk.to(http10=True)
    talk.run.on_end()
    assert not (await talk.written()).keep_alive
    assert (talk.wire.head["connection"], talk.wire.body) == ("close", body)
    assert "transfer-encoding" not in talk.wire.head


async def test_a_client_that_wants_no_more_is_told_that_the_connection_closes() -> None:
    """`connection: close` is answered with it."""
    talk = Relaying(ANSWER)
    await talk.to(keep_alive=False)
    talk.run.on_end()
    assert not (await talk.written()).keep_alive
    assert talk.wire.head["connection"] == "close"


async def test_what_had_ended_before_the_relay_began_goes_out_whole() -> None:
    """A short answer may be complete before its handler runs again."""
    talk = Relaying(ANSWER)
    talk.run.on_end()
    await talk.to()
    await talk.written()
    assert talk.wire.body == chunk(ANSWER) + LAST_CHUNK
    assert talk.outcome == (End.COMPLETED, "")


async def test_stages_follow_the_first_and_the_last_byte_out() -> None:
    """`relay` up to the first token's write, `stream` up to the end."""
    talk = Relaying(TOKEN)
    await talk.to()
    talk.run.on_body(FINISH)
    talk.run.on_end()
    await talk.written()
    found = talk.life.record
    assert set(found.stages) == {Stage.RELAY, Stage.STREAM}
    assert sum(found.stages.values()) == pytest.approx(found.total)
    assert found.status == 200


# --------------------------------------------------------------------------- usage


async def test_usage_is_stripped_from_a_stream_whose_caller_did_not_ask() -> None:
    """The gateway meters by it all the same; every other byte passes as it came."""
    talk = Relaying(PREAMBLE, TOKEN)
    await talk.to(strip=True)
    for part in (TOKEN, FINISH + USAGE[:25], USAGE[25:] + DONE):
        talk.run.on_body(part)
    talk.run.on_end()
    await talk.written()
    assert talk.wire.body == chunk(PREAMBLE + TOKEN) + chunk(TOKEN) + chunk(FINISH) + chunk(DONE) + LAST_CHUNK
    assert talk.run.reported().prompt_tokens == 7


async def test_a_stripped_stream_loses_nothing_at_its_end() -> None:
    """What the stripper held back, and was no usage, goes out with the last chunk."""
    talk = Relaying(TOKEN)
    await talk.to(strip=True)
    talk.run.on_body(FINISH + b"data: [DONE]")
    talk.run.on_end()
    await talk.written()
    assert talk.wire.body.endswith(chunk(b"data: [DONE]") + LAST_CHUNK)


# --------------------------------------------------------------------------- ends that are none


@pytest.mark.parametrize(
    ("so_far", "between"),
    [(TOKEN, b""), (TOKEN + TOKEN[:30], b"\n\n"), (TOKEN[:-1], b"\n\n"), (TOKEN.replace(b"\n", b"\r\n"), b"\n\n")],
)
@pytest.mark.parametrize("after", [False, True])
async def test_a_stream_that_is_cut_ends_with_an_error_event_of_its_own(
    so_far: bytes, between: bytes, after: bool
) -> None:
    """On an event boundary, wherever the bytes so far end; never inside somebody's token."""
    talk = Relaying(TOKEN, *([] if after else [so_far]))
    await talk.to()
    if after:
        talk.run.on_body(so_far)
    talk.run.on_failure(RESET)
    assert not (await talk.written()).keep_alive
    assert talk.wire.writes[-1] == chunk(between + error_event(RESET)) + LAST_CHUNK
    assert talk.outcome == (End.UPSTREAM_BROKE, RESET.message)


async def test_a_stripped_stream_that_is_cut_ends_on_a_boundary_too() -> None:
    """The half event that was held back is dropped: nobody could have used it."""
    talk = Relaying(TOKEN)
    await talk.to(strip=True)
    talk.run.on_body(TOKEN + TOKEN[:30])
    talk.run.on_failure(RESET)
    await talk.written()
    assert talk.wire.body == chunk(TOKEN) + chunk(TOKEN) + chunk(error_event(RESET)) + LAST_CHUNK


async def test_a_stream_that_ends_without_saying_so_is_an_error() -> None:
    """A clean end of body is no end of answer."""
    talk = Relaying(TOKEN)
    await talk.to()
    talk.run.on_end()
    await talk.written()
    assert talk.wire.body == chunk(TOKEN) + chunk(error_event(TRUNCATED)) + LAST_CHUNK
    assert talk.outcome == (End.UPSTREAM_BROKE, TRUNCATED.message)


async def test_a_finish_reason_without_done_is_success() -> None:
    """Not every server sends [DONE], and what it did not send is not made up."""
    talk = Relaying(TOKEN)
    await talk.to()
    talk.run.on_body(FINISH)
    talk.run.on_end()
    assert (await talk.written()).keep_alive
    assert talk.wire.body == chunk(TOKEN) + chunk(FINISH) + LAST_CHUNK
    assert talk.outcome == (End.COMPLETED, "")


async def test_a_stream_that_broke_before_the_relay_began_says_so() -> None:
    """After what had come of it."""
    talk = Relaying(TOKEN)
    talk.run.on_failure(RESET)
    await talk.to()
    await talk.written()
    assert talk.wire.body == chunk(TOKEN) + chunk(error_event(RESET)) + LAST_CHUNK


async def test_the_backends_own_error_event_is_the_explicit_end() -> None:
    """One is enough; the [DONE] that some send after it would say that all was well."""
    talk = Relaying(TOKEN)
    await talk.to()
    talk.run.on_body(ERROR + DONE)
    assert not (await talk.written()).keep_alive
    assert talk.wire.body == chunk(TOKEN) + chunk(ERROR) + LAST_CHUNK
    assert talk.outcome == (End.UPSTREAM_BROKE, "the backend's own error: server")


async def test_a_whole_answer_that_is_cut_stays_unfinished() -> None:
    """JSON has no error event: a body shorter than its length is the only honest sign left."""
    talk = Relaying(WHOLE[:30], stream=False, **{"content-length": str(len(WHOLE))})
    await talk.to()
    talk.run.on_failure(RESET)
    assert not (await talk.written()).keep_alive
    assert (talk.wire.body, talk.wire.gone) == (WHOLE[:30], True)
    assert talk.outcome == (End.UPSTREAM_BROKE, RESET.message)


async def test_silence_in_mid_stream_is_given_up() -> None:
    """The engine is let go, and the caller told."""
    talk = Relaying(TOKEN)
    await talk.to(idle=0.1)
    await talk.written()
    assert talk.wire.body == chunk(TOKEN) + chunk(error_event(SILENT)) + LAST_CHUNK
    assert (talk.outcome, talk.monitor.endings) == ((End.UPSTREAM_BROKE, SILENT.message), [Ending.CANCELLED])


async def test_every_byte_puts_the_silence_off() -> None:
    """Also one that is no token: a comment says that somebody is there."""
    talk = Relaying(TOKEN)
    await talk.to(idle=0.4)
    start = monotonic()
    while monotonic() - start < 0.6:
        talk.run.on_body(b": x\n\n")
        await asyncio.sleep(0.01)
    assert not talk.task.done()
    talk.run.on_body(FINISH)
    talk.run.on_end()
    await talk.written()
    assert talk.outcome == (End.COMPLETED, "")


# --------------------------------------------------------------------------- the client


async def test_a_client_that_leaves_ends_the_attempt_at_once() -> None:
    """Its handler is cancelled; the engine hears of it by the connection's end."""
    talk = Relaying(TOKEN)
    await talk.to()
    talk.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await talk.task
    assert (talk.outcome, talk.monitor.endings) == ((End.CLIENT_GONE, ""), [Ending.CANCELLED])
    assert talk.connection.reader is None


async def test_nothing_is_written_to_a_client_that_has_just_gone() -> None:
    """Its handler has not heard of it yet; the bytes have nowhere to go."""
    talk = Relaying(TOKEN)
    await talk.to()
    talk.wire.abort()
    talk.run.on_body(FINISH)
    talk.run.on_end()
    await talk.written()
    assert talk.wire.body == chunk(TOKEN)


async def test_a_client_that_reads_too_slowly_pauses_its_upstream() -> None:
    """From a full buffer until it has drained; bytes that nobody reads are not worth holding."""
    talk = Relaying(TOKEN)
    talk.run.sent_on(exchange := Steered())
    await talk.to()
    talk.connection.pause_writing()
    assert exchange.steps == ["pause"]
    talk.connection.resume_writing()
    assert exchange.steps == ["pause", "resume"]
    talk.run.on_body(FINISH)
    talk.run.on_end()
    await talk.written()
    assert exchange.steps == ["pause", "resume"]


@asynccontextmanager
async def stalled(*script: Any) -> AsyncIterator[tuple[Any, Caller, Upstream]]:
    """A gateway whose caller has asked for a stream and reads no more of it than its head."""
    async with conversing([STREAM_HEAD, *script]) as (gateway, caller, upstream):
        await caller.ask(post({**CHAT, "stream": True}))
        caller.writer.transport.pause_reading()  # type: ignore[attr-defined]
        yield gateway, caller, upstream


async def test_a_reader_that_stalls_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """After STALL seconds with a full buffer; its engine is let go, and the Record says why."""
    monkeypatch.setattr(relay, "STALL", 0.2)
    plenty = chunk(TOKEN.replace(b"hi", b"x" * 60_000))
    async with stalled(*[plenty] * 500, HANG) as (gateway, _, upstream):
        await eventually(lambda: gateway.recorder.recent)
        await upstream.until(lambda seen: seen.hangups == 1)
    found = last(gateway)
    assert (found.end, found.error) == (End.CLIENT_GONE, "the client read nothing for 0.2 s")
    assert found.attempts[-1].ending is Ending.CANCELLED


async def test_a_reader_that_catches_up_gets_every_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its upstream was paused, not cut; a pause shorter than STALL costs nothing."""
    monkeypatch.setattr(relay, "STALL", 5.0)
    event = TOKEN.replace(b"hi", b"x" * 60_000)
    async with stalled(*[chunk(event)] * 100, chunk(ANSWER), LAST_CHUNK) as (gateway, caller, _):
        await eventually(lambda: any(c.full for c in gateway.front.connections))
        caller.writer.transport.resume_reading()  # type: ignore[attr-defined]
        body = b"".join(await caller.chunks())
    assert body == event * 100 + ANSWER
    assert last(gateway).end is End.COMPLETED


# --------------------------------------------------------------------------- on the wire


@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_a_stream_that_dies_is_said_to_either_version(version: str) -> None:
    """Over real sockets: an error event, then the connection's end."""
    async with conversing([STREAM_HEAD + chunk(TOKEN), CLOSE]) as (_, caller, _):
        status, headers = await caller.ask(post({**CHAT, "stream": True}, version=version))
        rest = await caller.rest()
    assert (status, headers.get("transfer-encoding")) == (200, "chunked" if version == "1.1" else None)
    body = TOKEN + error_event(RESET)
    assert rest == (body if version == "1.0" else chunk(TOKEN) + chunk(error_event(RESET)) + LAST_CHUNK)


async def test_a_kept_connection_serves_answer_after_answer() -> None:
    """Streams and whole answers in turn; a relay leaves nothing behind on the connection."""
    streamed: Script = [STREAM_HEAD + chunk(TOKEN), GATE, chunk(FINISH + DONE) + LAST_CHUNK]
    async with conversing(streamed, [reply(WHOLE)], streamed, [reply(WHOLE)]) as (gateway, caller, upstream):
        for _ in range(2):
            await caller.ask(post({**CHAT, "stream": True}))
            upstream.proceed()
            assert b"".join(await caller.chunks()) == ANSWER
            assert (await caller.whole(post(CHAT)))[2] == WHOLE
        assert len(gateway.front.connections) == 1
    assert [found.end for found in gateway.recorder.recent] == [End.COMPLETED] * 4


async def test_a_whole_answer_that_is_cut_is_cut_for_the_caller() -> None:
    """Fewer bytes than its content-length, and the connection's end."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(WHOLE)
    async with conversing([head + WHOLE[:40], Pause(0.05), CLOSE]) as (gateway, caller, _):
        _, headers = await caller.ask(post(CHAT))
        rest = b""
        with suppress(ConnectionResetError):
            rest = await caller.rest()
        assert len(rest) < int(headers["content-length"])
        await eventually(lambda: gateway.recorder.recent)
    assert last(gateway).end is End.UPSTREAM_BROKE
