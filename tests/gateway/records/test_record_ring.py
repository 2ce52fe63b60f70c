"""Records on disk: whole, bounded, read while they are written; trouble costs records, never a request."""

from __future__ import annotations

import errno
import json
import logging
import os
import resource
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import fields
from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest

from gateway.admin.admin_views import request_view
from gateway.observe.record import AttemptRecord, Record, RequestOutcome
from gateway.observe.record_writer import BATCH
from gateway.parts.records.part import RecordsPart
from gateway.records import record_file
from gateway.records.packed_record import packed
from gateway.records.record_file import RecordFile, UnreadableRecords, stored_records
from gateway.records.record_ring import RecordRing
from policies.diagnosis.causes import Cause, CauseVerdict
from policies.diagnosis.diagnosis_report import Alternatives, Diagnosis
from policies.diagnosis.usual import Usual
from policies.types import AttemptKind, AttemptOutcome
from tests.support.builders import CHAT, STREAMED, calling, get, post, record
from tests.support.gateways import pool, running
from tests.support.upstream import Upstream

SIZE = 16_000_000  # bytes
VERDICT = CauseVerdict(Cause.QUEUED, "behind 3 requests", "add an engine", "queue", 0.3)
KILLED = """
import asyncio, os, signal, sys
from pathlib import Path
from shutil import rmtree
from gateway.records.record_file import RecordFile
from gateway.records.packed_record import packed
from tests.support.builders import record
file = RecordFile(Path(sys.argv[1]), 16_000_000)
for number in range(10):
    file.append([packed(record(request_id=f"r{number}", wall=float(number)))])
print("stored", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def full_record() -> Record:
    """With a value for all that the JSON shows."""
    attempt = AttemptRecord(1, AttemptKind.PRIMARY, "small/a", "small", 0.01, 0.9, AttemptOutcome.COMPLETED)
    lost = AttemptRecord(0, AttemptKind.PRIMARY, "small/b", "small", 0.0, 0.01, AttemptOutcome.REFUSED, cause="é\x1b")
    told = record(
        attempts=[lost, attempt],
        prefix=[1, 2**64 - 1],
        tags=("team",),
        held={"prefill": 0.25},
        left_out={"seed": "seed"},
        prompt_changes=("sort_tools",),
        diagnosis=Diagnosis(VERDICT, Usual(), Alternatives()),
    )
    told.spent = [0.0123456 * number for number in range(len(told.spent) - 1)] + [None]
    return told


def stored(folder: Path, **given: Any) -> list[dict[str, Any]]:
    return [*stored_records(folder, **given)]


def ids(folder: Path, **given: Any) -> list[str]:
    return [view["request_id"] for view in stored(folder, **given)]


def rows(*names: str, error: str = "") -> list[record_file.Row]:
    return [packed(record(request_id=name, error=error)) for name in names]


@pytest.fixture
def ring(tmp_path: Path) -> Iterator[RecordRing]:
    """Stores in `tmp_path`."""
    opened = RecordRing(RecordFile(tmp_path / "records-0.sqlite", SIZE))
    yield opened
    opened.close()


def overfill(file: RecordFile) -> None:
    """With 10 MB."""
    for batch in range(100):
        file.append(rows(*(f"{batch}-{number}" for number in range(100)), error="x" * 1000))


def bytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if not path.name.endswith("-shm"))


# --------------------------------------------------------------------------- what is stored


async def test_a_stored_record_is_the_line_of_the_access_log_with_its_verdict(ring: RecordRing, tmp_path: Path) -> None:
    """Every member, in the same order, to the last digit; also where a server's message is no text."""
    broken = record(request_id="req-2", wall=1.8e9, error="\ud800", max_tokens=2**70)
    for told in (full_record(), broken):
        ring(told)
    ring.close()
    expected = [json.dumps(request_view(told)) for told in (full_record(), broken)]
    assert [json.dumps(view) for view in stored(tmp_path)] == expected


async def test_requests_of_a_gateway_are_stored(tmp_path: Path) -> None:
    """From the configuration to the reader, without a word of the prompt."""
    async with Upstream([STREAMED]) as engine:
        told = {"dir": str(tmp_path / "kept")}
        async with running({"a": pool(engine.url)}, {CHAT["model"]: {"tiers": ["a"]}}, records=told) as gateway:
            secret = {**CHAT, "stream": True, "messages": [{"role": "user", "content": "wherefore-art-thou"}]}
            async with calling(gateway.url) as caller:
                assert (await caller.ask(post(secret, "connection: close")))[0] == 200
                await caller.rest()
    (view,) = stored(tmp_path / "kept")
    assert (view["route"], view["status"], view["end"]) == (CHAT["model"], 200, "completed")
    raw = b"".join(path.read_bytes() for path in (tmp_path / "kept").iterdir())
    assert b"wherefore" not in raw
    assert {path.stat().st_mode & 0o077 for path in (tmp_path / "kept").iterdir()} == {0}


def test_names_of_another_release_are_kept_with_their_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A release that packs other members writes on in the same file."""
    path = tmp_path / "records-0.sqlite"
    names = [["old_" + name, *others] for name, *others in json.loads(record_file.names_json())]
    monkeypatch.setattr(record_file, "names_json", lambda: json.dumps(names))
    earlier = RecordFile(path, SIZE)
    earlier.append(rows("before"))
    earlier.close()
    monkeypatch.undo()
    RecordFile(path, SIZE).append(rows("after"))
    before, after = stored(tmp_path)
    assert (before["old_request_id"], after["request_id"]) == ("before", "after")


# --------------------------------------------------------------------------- what is found


def test_files_of_all_workers_are_read_in_order_of_arrival(tmp_path: Path) -> None:
    """By time, route and request id."""
    for worker in (0, 1):
        file = RecordFile(tmp_path / f"records-{worker}.sqlite", SIZE)
        route = ("chat", "batch")[worker]
        each = [record(request_id=f"{worker}-{at}", wall=at * 2.0 + worker, route=route) for at in range(3)]
        file.append([packed(told) for told in reversed(each)])
    assert ids(tmp_path) == ["0-0", "1-0", "0-1", "1-1", "0-2", "1-2"]
    assert ids(tmp_path, since=1.0, until=4.0) == ["1-0", "0-1", "1-1"]
    assert ids(tmp_path, route="batch") == ["1-0", "1-1", "1-2"]
    assert ids(tmp_path, request_id="0-2") == ["0-2"]


def test_more_rows_than_one_read_are_read_once_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those with the same time of arrival."""
    monkeypatch.setattr("gateway.records.record_file.MANY", 3)
    names = [f"r{number}" for number in range(10)]
    RecordFile(tmp_path / "records-0.sqlite", SIZE).append(rows(*names))
    assert ids(tmp_path) == names


def test_a_directory_that_cannot_be_written_to_is_read(tmp_path: Path) -> None:
    """As a copy on a medium without write access, after the gateway."""
    folder = tmp_path / "kept"
    file = RecordFile(folder / "records-0.sqlite", SIZE)
    file.append(rows("a"))
    file.close()
    before = sorted(folder.iterdir())
    assert ids(folder) == ["a"]
    assert sorted(folder.iterdir()) == before


def test_a_directory_that_cannot_be_listed_is_an_error_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records are for the user of the gateway alone: another one reads why there are none. Root may list anything."""
    with pytest.raises(UnreadableRecords, match=r"missing: No such file or directory"):
        stored(tmp_path / "missing")

    def denied(_: Path) -> Iterator[Path]:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "iterdir", denied)
    with pytest.raises(UnreadableRecords, match=r"Permission denied"):
        stored(tmp_path)


def test_a_directory_without_records_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UnreadableRecords, match=r"no file records-\*\.sqlite"):
        stored(tmp_path)
    (tmp_path / "records-0.sqlite").write_text("no database at all, but long enough")
    with pytest.raises(UnreadableRecords, match="not a database"):
        stored(tmp_path)


# --------------------------------------------------------------------------- bounds


def test_the_oldest_records_go_beyond_the_size(tmp_path: Path) -> None:
    """File and write-ahead log together, at all times; the latest rows are there."""
    file, most = RecordFile(tmp_path / "records-0.sqlite", 6_000_000), 0
    for batch in range(120):
        file.append(rows(*(f"{batch}-{number}" for number in range(100)), error="x" * 1000))
        most = max(most, bytes_of(tmp_path))
    kept = ids(tmp_path)
    assert most <= 6_000_000
    assert kept[-1] == "119-99"
    assert "0-0" not in kept
    assert len(kept) > 1000


def test_a_smaller_size_shrinks_the_file(tmp_path: Path) -> None:
    path = tmp_path / "records-0.sqlite"
    large = RecordFile(path, 30_000_000)
    overfill(large)
    large.close()
    assert bytes_of(tmp_path) > 10_000_000
    small = RecordFile(path, 6_000_000)
    small.append(rows("last"))
    small.append(rows("after"))
    small.close()
    assert bytes_of(tmp_path) <= 6_000_000
    assert ids(tmp_path)[-1] == "after"


def test_a_reader_that_holds_the_log_back_costs_records_and_no_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The write-ahead log cannot shrink while somebody reads what was before; afterwards it goes on."""
    monkeypatch.setattr(record_file, "PATIENCE", 0.01)
    path = tmp_path / "records-0.sqlite"
    file = RecordFile(path, 8_000_000)
    file.append(rows("a"))
    with closing(sqlite3.connect(path, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM records").fetchone()
        with pytest.raises(record_file.LogHeldBack):
            overfill(file)
        assert bytes_of(tmp_path) <= 8_000_000
    file.append(rows("b"))
    assert ids(tmp_path)[-1] == "b"


def test_a_file_that_shrinks_under_a_reader_takes_no_more_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every page that goes is written to the write-ahead log first: 174 MB became 900 MB, on the way to 16 MB."""
    monkeypatch.setattr(record_file, "PATIENCE", 0.01)
    path = tmp_path / "records-0.sqlite"
    large = RecordFile(path, 30_000_000)
    overfill(large)
    large.close()
    before, small = bytes_of(tmp_path), RecordFile(path, 6_000_000)
    with closing(sqlite3.connect(path, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM records").fetchone()
        with pytest.raises(record_file.LogHeldBack):
            small.append(rows("lost"))
        assert bytes_of(tmp_path) < before + 3_000_000
    small.append(rows("kept"))
    small.close()
    assert bytes_of(tmp_path) <= 6_000_000
    assert ids(tmp_path)[-1] == "kept"


async def test_rows_beyond_the_queue_are_lost_and_counted(ring: RecordRing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring, "most", BATCH + 1)
    for _ in range(2 * BATCH):
        ring(record())
    assert ring.lost == BATCH


# --------------------------------------------------------------------------- trouble


def test_records_survive_a_killed_process(tmp_path: Path) -> None:
    path = tmp_path / "records-0.sqlite"
    done = subprocess.run([sys.executable, "-c", KILLED, path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "stored\n")
    assert ids(tmp_path) == [f"r{number}" for number in range(10)]
    RecordFile(path, SIZE).append(rows("after"))
    assert len(ids(tmp_path)) == 11


async def test_a_full_disk_costs_records_and_a_line_on_stderr(
    ring: RecordRing, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One line when it begins and one when it is over, however many batches fail."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 13, before[1]))  # Python ignores the signal: EFBIG
    try:
        for number in range(3):
            await give(ring, record(request_id=f"lost-{number}", error="x" * 10_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert ring.lost == 3
    await give(ring, record(request_id="kept"))
    assert ids(tmp_path) == ["kept"]
    said = [told.getMessage() for told in caplog.records if told.levelno == logging.WARNING]
    assert len(said) == 2
    assert said[0].startswith(f"records are lost: {tmp_path}/records-0.sqlite: ")
    assert said[1] == "records are stored again: 3 were lost"


@pytest.mark.parametrize("content", [b"no database " * 1000, b"", b"SQLite format 3\0" + b"\xff" * 9000])
async def test_a_damaged_file_is_set_aside(ring: RecordRing, tmp_path: Path, content: bytes) -> None:
    """Its records are lost at most, and the batch that found out."""
    path = tmp_path / "records-0.sqlite"
    path.write_bytes(content)
    await give(ring, record(request_id="a"))
    await give(ring, record(request_id="b"))
    assert ids(tmp_path)[-1] == "b"
    aside = tmp_path / "records-0.sqlite.broken"
    assert (aside.read_bytes() if aside.exists() else b"") == content


async def test_a_file_damaged_in_use_is_set_aside(ring: RecordRing, tmp_path: Path) -> None:
    for number in range(60):
        ring(record(request_id=f"{number}", error="x" * 1000))
    await give(ring)
    ring._file.close()  # all pages are in the file
    with (tmp_path / "records-0.sqlite").open("r+b") as damaged:
        damaged.seek(4096)
        damaged.write(os.urandom(40_000))
    for number in range(3):
        await give(ring, record(request_id=f"after-{number}"))
    assert ids(tmp_path)[-1] == "after-2"


async def test_a_file_of_another_format_is_set_aside(ring: RecordRing, tmp_path: Path) -> None:
    path = tmp_path / "records-0.sqlite"
    with closing(sqlite3.connect(path)) as other:
        other.executescript("PRAGMA user_version=99; CREATE TABLE theirs (x)")
    await give(ring, record(request_id="a"))
    await give(ring, record(request_id="b"))
    assert ids(tmp_path) == ["b"]
    with closing(sqlite3.connect(path.with_name(f"{path.name}.broken"))) as aside:
        assert aside.execute("SELECT count(*) FROM theirs").fetchone() == (0,)


async def test_a_locked_file_costs_the_records_meanwhile(
    ring: RecordRing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_file, "PATIENCE", 0.01)
    await give(ring, record(request_id="before"))
    ring._file.close()
    with closing(sqlite3.connect(tmp_path / "records-0.sqlite", isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        await give(ring, record(request_id="lost"))
        assert ring.lost == 1
        other.execute("ROLLBACK")
    await give(ring, record(request_id="after"))
    assert ids(tmp_path) == ["before", "after"]


async def test_a_removed_directory_is_made_again(ring: RecordRing, tmp_path: Path) -> None:
    """An open database would go on in a file that nobody can read."""
    await give(ring, record(request_id="before"))
    rmtree(tmp_path)
    await give(ring, record(request_id="after"))
    assert ids(tmp_path) == ["after"]


async def test_a_directory_that_cannot_be_made_delays_and_fails_no_request(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    async with Upstream([STREAMED]) as engine:
        told = {"dir": str(tmp_path / "file")}
        async with running({"a": pool(engine.url)}, {CHAT["model"]: {"tiers": ["a"]}}, records=told) as gateway:
            async with calling(gateway.url) as caller:
                assert (await caller.ask(post({**CHAT, "stream": True}, "connection: close")))[0] == 200
                await caller.rest()
            gateway.recorder.flush()
            await gateway.part(RecordsPart).close()
            page = (await get(gateway.admin_url, "/metrics"))[2].decode()
    assert "firsttoken_records_lost_total 1.0" in page


async def give(ring: RecordRing, *told: Record) -> None:
    """Hands rows to the writer, and waits for it."""
    for each in told:
        ring(each)
    ring.flush()
    while ring.behind:
        pass


def test_the_full_record_is_full() -> None:
    """A member of a container kind that a Record gains needs a value there: it is packed, too."""
    told, plain = full_record(), Record()
    containers = {each.name for each in fields(Record) if isinstance(getattr(plain, each.name), list | dict | tuple)}
    assert [name for name in containers if not getattr(told, name)] == []
    assert told.end is RequestOutcome.COMPLETED


async def test_a_record_that_cannot_be_packed_loses_itself_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A bug of the gateway: the other callers' Records of the batch are stored, and the lost one is counted."""
    ring = RecordRing(RecordFile(tmp_path / "records-0.sqlite", SIZE))
    broken = record(request_id="broken", held={"queue": "long"})
    for each in (record(request_id="before"), broken, record(request_id="after")):
        ring(each)
    with caplog.at_level(logging.ERROR, "firsttoken"):
        ring.close()
    assert [each["request_id"] for each in stored(tmp_path)] == ["before", "after"]
    assert ring.lost == 1
    assert [entry.message for entry in caplog.records] == ["a Record could not be encoded (records)"]
