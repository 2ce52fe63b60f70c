"""One JSON line per request, written without delaying requests.

Log lines show the place of an error, and no data of requests."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from gateway.observe import logs, record_writer
from gateway.observe import logs as accesslog
from gateway.observe.logs import AccessLog, Formatter, described, unhandled
from gateway.observe.record import Record, RequestOutcome
from gateway.observe.record_columns import RECORD
from gateway.observe.record_writer import BATCH
from gateway.parts.records.part import RecordsPart
from gateway.records.record_file import stored_records
from tests.support.builders import ANSWER, CHAT, STREAMED, calling, get, post, record
from tests.support.gateways import pool, running
from tests.support.simulated import eventually
from tests.support.upstream import CLOSE, LAST_CHUNK, STREAM_HEAD, Upstream, chunk

HOSTILE = "a\r\nb\tc\0d\x1b[31me\x7ff\x85g\x9b31mh\u2028i\u2029j\ud800k"


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().split(b"\n") if line]


@contextmanager
def stuck(log_lines: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[AccessLog, int]]:
    """A log on a full disk, and the reading end."""
    monkeypatch.setattr(accesslog, "QUEUE", log_lines)
    monkeypatch.setattr(record_writer, "CLOSING", 0.05)
    out, into = os.pipe()
    log = AccessLog(f"/dev/fd/{into}")
    os.close(into)
    try:
        yield log, out
    finally:
        os.close(out)


def fill(log: AccessLog) -> int:
    """Records, until the pipe, the writer and the queue hold no more; how many there were."""
    large = record(error="x" * 100_000)  # more than a pipe takes
    give(log, large)
    while not log._queue.empty():
        pass
    for taken in range(1, 1000):
        if log.lost:
            return taken
        give(log, record())
    raise AssertionError("the queue has no end")


def give(log: AccessLog, *records: Record) -> None:
    """Hands a line to the writer without waiting for a batch."""
    for each in records:
        log(each)
        log.flush()


def read_all(out: int, into: bytearray) -> None:
    while part := os.read(out, 1 << 16):
        into += part


async def test_a_record_is_a_line(tmp_path: Path) -> None:
    """In the order in which requests ended, appended to existing lines."""
    path = tmp_path / "access.jsonl"
    path.write_text('{"before":1}\n')
    log = AccessLog(str(path))
    for i in range(500):
        log(record(request_id=str(i)))
    log.close()
    before, *found = lines(path)
    assert before == {"before": 1}
    assert [line["request_id"] for line in found] == [str(i) for i in range(500)]
    assert found[0] == json.loads(json.dumps(RECORD.view(record(request_id="0"))))
    assert log.lost == 0


async def test_any_text_in_a_line_is_escaped_to_one_line(tmp_path: Path) -> None:
    """To every reader: control characters and Unicode's line ends are escaped, and can be read again."""
    path = tmp_path / "access.jsonl"
    log = AccessLog(str(path))
    errors = [HOSTILE, HOSTILE.replace("\ud800", ""), "plain"]
    for error in errors:
        log(record(error=error, request_id=error, model=error))
    log.close()
    text = path.read_text("ascii")
    assert len(text.splitlines()) == 3
    assert not [c for c in text if c < " " and c != "\n"]
    assert [line["error"] for line in lines(path)] == errors


async def test_a_line_waits_for_others_but_not_for_long(tmp_path: Path) -> None:
    """The writer wakes once for all waiting lines; the last lines need no further request."""
    path = tmp_path / "access.jsonl"
    log = AccessLog(str(path))
    for i in range(3 * BATCH + 1):
        log(record(request_id=str(i)))
    assert lines(path) == []
    await eventually(lambda: len(lines(path)) == 3 * BATCH + 1)
    log(record())
    await eventually(lambda: len(lines(path)) == 3 * BATCH + 2)
    log.close()


async def test_close_writes_buffered_lines(tmp_path: Path) -> None:
    """Closing loses nothing."""
    path = tmp_path / "access.jsonl"
    log = AccessLog(str(path))
    log(record())
    log.close()
    assert len(lines(path)) == 1


async def test_a_renamed_file_is_opened_again_and_no_line_is_lost(tmp_path: Path) -> None:
    """As `logrotate` does: lines up to the signal are in the renamed file, later lines in the new one."""
    path, renamed = tmp_path / "access.jsonl", tmp_path / "access.jsonl.1"
    log = AccessLog(str(path))
    for i in range(100):
        log(record(request_id=str(i)))
    log.flush()
    await eventually(lambda: log.behind == 0)
    path.rename(renamed)
    log(record(request_id="100"))
    log.reopen()
    log(record(request_id="101"))
    log.close()
    assert [line["request_id"] for line in lines(renamed)] == [str(i) for i in range(101)]
    assert [line["request_id"] for line in lines(path)] == ["101"]
    assert log.lost == 0


async def test_a_file_that_cannot_be_opened_again_leaves_the_log_as_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The error is logged; later lines follow the earlier ones."""
    (tmp_path / "logs").mkdir()
    log = AccessLog(str(tmp_path / "logs" / "access.jsonl"))
    (tmp_path / "logs").rename(tmp_path / "old")
    log.reopen()
    log(record())
    log.close()
    assert len(lines(tmp_path / "old" / "access.jsonl")) == 1
    assert "access log could not be opened again" in caplog.text


async def test_standard_output_is_never_closed(capfd: pytest.CaptureFixture[str]) -> None:
    """It has no name to be opened by."""
    log = AccessLog("stdout")
    log.reopen()
    log(record())
    log.close()
    assert json.loads(capfd.readouterr().out)["request_id"] == "req-1"


def test_the_access_log_is_written_by_its_own_thread(tmp_path: Path) -> None:
    """The thread ends on close, and keeps no process alive."""
    before = set(threading.enumerate())
    log = AccessLog(str(tmp_path / "access.jsonl"))
    (thread,) = set(threading.enumerate()) - before
    assert (thread.name, thread.daemon) == ("access-log", True)
    log.close()
    assert not thread.is_alive()


async def test_a_stuck_disk_delays_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines beyond the queue are dropped and counted; closing gives up in bounded time."""
    with stuck(10, monkeypatch) as (log, _):
        fill(log)
        start = monotonic()
        give(log, *[record()] * 1000)
        assert log.lost == 1001
        log.close()
        assert monotonic() - start < 20


async def test_lost_lines_are_logged_with_the_next_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log itself has the number: written and lost lines add up to all lines."""
    with stuck(10, monkeypatch) as (log, out):
        monkeypatch.setattr(record_writer, "CLOSING", 5.0)
        offered = fill(log) + 20
        give(log, *[record()] * 20)
        text = bytearray()
        reader = threading.Thread(target=read_all, args=(out, text))
        reader.start()
        log.close()
        log._out.close()
        reader.join()
        found = [json.loads(line) for line in text.splitlines()]
    said = [line["access_log_lines_lost"] for line in found if "access_log_lines_lost" in line]
    assert said
    assert sum(said) == log.lost
    assert len(found) - len(said) + sum(said) == offered


async def test_a_full_disk_is_logged_once_and_writing_continues(caplog: pytest.LogCaptureFixture) -> None:
    """A full disk costs lines, never the log itself."""
    log = AccessLog("/dev/full")
    with caplog.at_level(logging.ERROR, "firsttoken"):
        for i in range(1, 4):
            give(log, record())
            await eventually(lambda i=i: log.lost == i)
        assert log._thread.is_alive()
        log.close()
    assert [entry.message for entry in caplog.records] == [
        "access log write failed: [Errno 28] No space left on device"
    ]


async def test_a_bug_of_the_writer_costs_its_lines_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The log goes on; of an error that is no operating system's only the type is shown."""
    path = tmp_path / "access.jsonl"
    log = AccessLog(str(path))
    log._out.close()  # a later write raises ValueError
    with caplog.at_level(logging.ERROR, "firsttoken"):
        give(log, record())
        await eventually(lambda: log.lost == 1)
    log.reopen()
    give(log, record(request_id="after"))
    log.close()
    written, told = lines(path)
    assert (written["request_id"], told) == ("after", {"access_log_lines_lost": 1})
    assert [entry.message for entry in caplog.records] == ["access log write failed: ValueError"]


BREAKING = (
    "\n",
    "\r\n",
    "\x1b[31mred",
    "\x9b31m",
    "\u2028",
    "\u2029",
    "\x85",
    "\x0b",
    "\x0c",
    "\0",
    "\x7f",
    "\u202e",
    '"}\n{"forged":"',
)
HEADERS = ("x-request-id", "traceparent", "x-session-id", "x-priority", "authorization", "x-slo-ttft-ms", "user-agent")


@pytest.mark.parametrize("more", [{}, {"passthrough": "only"}], ids=["routes", "passthrough"])
async def test_callers_cannot_forge_log_lines(tmp_path: Path, more: dict[str, Any]) -> None:
    """Over sockets: line ends, terminal commands and forged lines in ids, models, headers and fields give one line
    of printable ASCII per request."""
    path = tmp_path / "access.jsonl"
    more = {**more, "telemetry": {"access_log": str(path)}}
    async with Upstream(*[[STREAMED]] * 300) as upstream, running({"only": pool(upstream.url)}, **more) as gateway:
        seen: list[Record] = []
        gateway.recorder.sinks.append(seen.append)
        for text in BREAKING:
            for header in HEADERS:
                for body in ({"model": f"a{text}b"}, {"user": text, "stop": text}, {"max_tokens": text}):
                    await say(gateway.url, header, text, {**CHAT, "stream": True, **body})
        await eventually(lambda: not gateway.recorder.live)
    text = path.read_bytes()
    assert len(text.split(b"\n")) - 1 == len(text.decode("ascii").splitlines()) == len(seen) > 200
    assert not [byte for byte in set(text) if not 0x20 <= byte < 0x7F and byte != 0x0A]
    assert {"forged"}.isdisjoint(key for line in lines(path) for key in line)


async def say(url: str, header: str, text: str, body: dict[str, Any]) -> None:
    """Sends one request with the header value as given except for line ends, and once more in UTF-8."""
    for raw in (text.encode("latin-1", "ignore"), text.encode()):
        async with calling(url) as caller:
            asked = post(body, "connection: close", f"{header}: PUT_HERE")
            caller.writer.write(asked.replace(b"PUT_HERE", b"x" + raw.translate(None, b"\r\n\0")))
            await caller.rest()


async def test_lost_lines_are_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """firsttoken_access_log_lines_lost_total in a scrape."""
    async with running({"only": pool("http://127.0.0.1:9")}, telemetry={"access_log": "/dev/full"}) as gateway:
        async with calling(gateway.url) as caller:
            await caller.ask(post({**CHAT, "model": "nope"}, "connection: close"))
        gateway.recorder.flush()
        await gateway.part(RecordsPart).close()
        page = (await get(gateway.admin_url, "/metrics"))[2]
    assert b"\nfirsttoken_access_log_lines_lost_total 1.0\n" in page


async def test_no_prompt_or_answer_is_ever_in_it(tmp_path: Path) -> None:
    """For every end of a request: answered, broken off, refused for fields, model or JSON."""
    path = tmp_path / "access.jsonl"
    canary = {**CHAT, "messages": [{"role": "user", "content": "CANARY prompt"}], "stream": True, "user": "CANARY user"}
    answer = STREAM_HEAD + chunk(ANSWER.replace(b"hi", b"CANARY answer"))
    bodies: list[Any] = [
        canary,
        canary,
        {**canary, "model": "nope"},
        {**canary, "n": "CANARY"},
        {**canary, "messages": ["CANARY"]},
        {**canary, "max_tokens": "CANARY"},
        b'{"CANARY',
        b'{"messages":"CANARY","messages":"CANARY"}',
    ]
    async with Upstream(
        [answer + LAST_CHUNK], [answer.partition(b"data: [DONE]")[0].replace(b"stop", b""), CLOSE]
    ) as upstream:
        more = {"telemetry": {"access_log": str(path)}, "records": {"dir": str(tmp_path / "records")}}
        async with running({"only": pool(upstream.url)}, **more) as gateway:
            for body in bodies:
                async with calling(gateway.url) as caller:
                    await caller.ask(post(body, "connection: close", "authorization: Bearer CANARY", "cookie: CANARY"))
                    await caller.rest()
    found = lines(path)
    assert [line["end"] for line in found] == [
        RequestOutcome.COMPLETED.value,
        *[RequestOutcome.UPSTREAM_BROKE.value],
        *["refused"] * 6,
    ]
    assert "CANARY" not in path.read_text()
    assert [view["end"] for view in stored_records(tmp_path / "records")] == [line["end"] for line in found]
    assert not [kept for kept in (tmp_path / "records").iterdir() if b"CANARY" in kept.read_bytes()]


SECRET = "sk-secret"


@contextmanager
def logged() -> Iterator[io.StringIO]:
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(Formatter(logs.FORMAT))
    log = logging.getLogger("firsttoken")
    log.addHandler(handler)
    try:
        yield out
    finally:
        log.removeHandler(handler)


def fail() -> None:
    try:
        int(SECRET)
    except ValueError as error:
        raise RuntimeError(SECRET) from error


def test_exceptions_are_logged_by_type_and_frames() -> None:
    """Messages may quote data, so messages are hidden, causes too."""
    with logged() as out:
        try:
            fail()
        except RuntimeError:
            logging.getLogger("firsttoken").exception("internal error on request %s", "req-1")
    said = out.getvalue()
    assert "internal error on request req-1" in said
    assert said.index("ValueError") < said.index("which led to:") < said.index("RuntimeError")
    assert "in fail" in said
    assert SECRET not in said


def test_firsttoken_debug_shows_complete_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """FIRSTTOKEN_DEBUG=1, on a machine of one's own."""
    monkeypatch.setattr(logs, "DEBUG", True)
    with logged() as out:
        try:
            fail()
        except RuntimeError:
            logging.getLogger("firsttoken").exception("internal error")
    assert SECRET in out.getvalue()


def test_groups_and_circles_are_described_too() -> None:
    """Of a group each; a circle once."""
    one, other = ValueError(SECRET), KeyError(SECRET)
    one.__cause__, other.__cause__ = other, one
    said = described(ExceptionGroup(SECRET, [one, RuntimeError(SECRET)]))
    assert [kind in said for kind in ("ExceptionGroup", "ValueError", "KeyError", "RuntimeError")] == [True] * 4
    assert SECRET not in said


async def test_an_unawaited_task_error_is_logged_without_its_message() -> None:
    """asyncio's own handler shows the task, and the task shows the exception."""

    async def work() -> None:
        raise RuntimeError(SECRET)

    asyncio.get_running_loop().set_exception_handler(unhandled)
    with logged() as out:
        task = asyncio.get_running_loop().create_task(work())
        await asyncio.wait([task])
        del task
    assert "Task exception was never retrieved" in out.getvalue()
    assert "in work" in out.getvalue()
    assert SECRET not in out.getvalue()


async def test_a_record_that_cannot_be_written_loses_its_own_line_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A bug of the gateway: the other callers' lines of the batch are written, and the lost line is counted."""
    log = AccessLog(str(tmp_path / "log"))
    broken = record(request_id="broken", held={"queue": "long"})
    for each in (record(request_id="before"), broken, record(request_id="after")):
        log(each)
    with caplog.at_level(logging.ERROR, "firsttoken"):
        log.close()
    found = lines(tmp_path / "log")
    assert [each["request_id"] for each in found[:2]] == ["before", "after"]
    assert (log.lost, found[2:]) == (1, [{"access_log_lines_lost": 1}])
    assert [entry.message for entry in caplog.records] == ["a Record could not be encoded (access-log)"]
