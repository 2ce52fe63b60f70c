"""A file of Records: an SQLite database of bounded size, written by one thread and read by other processes.

Rules:
- Rows are appended in transactions, to a write-ahead log: a reader never waits, and a killed process leaves whole rows.
- The file and its write-ahead log are at most `most` bytes: the oldest rows go first. Where a reader holds the log
  back, or rows grow faster than others go, the file takes none.
- A file that is damaged, or of another format, is renamed to `.broken`, over the one before.
- The file is readable for this user alone.

A directory of them is read while gateways write there, or after.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from heapq import merge
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import quote

from gateway.records.packed_record import UNREADABLE, Row, names_json, unpacked

FORMAT = 2
PATTERN = "records-*.sqlite"  # of a directory: one file for each worker
PAGE = 4096  # bytes
LOG_PAGES = 256  # of the write-ahead log, after which its pages go to the file
SLICE = 512  # rows or pages removed by one transaction
PATIENCE = 1.0  # s to wait for a lock of another process
BROKEN = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
SCHEMA = f"""
PRAGMA page_size={PAGE};
PRAGMA auto_vacuum=INCREMENTAL;
PRAGMA journal_mode=WAL;
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS names (id INTEGER PRIMARY KEY, names TEXT UNIQUE NOT NULL);
CREATE TABLE IF NOT EXISTS records (
    id INTEGER PRIMARY KEY, at REAL NOT NULL, route TEXT NOT NULL, request_id TEXT NOT NULL, outcome TEXT NOT NULL,
    names INTEGER NOT NULL, row BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS records_at ON records (at);
CREATE INDEX IF NOT EXISTS records_request_id ON records (request_id);
PRAGMA user_version={FORMAT};
COMMIT;
"""
SETTINGS = f"""
PRAGMA synchronous=NORMAL;
PRAGMA wal_autocheckpoint={LOG_PAGES};
PRAGMA journal_size_limit={LOG_PAGES * PAGE};
"""
TOGETHER = 128  # rows of one statement: for each, the thread gives the interpreter to the loop and waits for it again
ADD = "INSERT INTO records (names, at, route, request_id, outcome, row) VALUES "
OLDEST = "DELETE FROM records WHERE id < (SELECT min(id) FROM records) + ?"


class UnknownFormat(sqlite3.DatabaseError):
    """The file is of another release, whose format differs."""


class LogHeldBack(sqlite3.OperationalError):
    """The write-ahead log cannot shrink."""


class RecordFile:
    """For one thread. `path`: opened at the first rows."""

    def __init__(self, path: Path, most: int) -> None:
        self.path = path
        self._log = path.with_name(f"{path.name}-wal")
        self._log_most = most // 8
        self._pages = (most - self._log_most) // PAGE
        self._db: sqlite3.Connection | None = None
        self._inode = self._names = 0

    def append(self, rows: Sequence[Row]) -> None:
        """Store all rows, or none: raises sqlite3.Error or OSError then, and opens the file again the next time."""
        try:
            db = self._opened()
            self._make_room(db)
            with db:
                db.execute("BEGIN IMMEDIATE")
                for start in range(0, len(rows), TOGETHER):
                    part = rows[start : start + TOGETHER]
                    places = ", ".join([f"({self._names}, ?, ?, ?, ?, ?)"] * len(part))
                    db.execute(ADD + places, [*chain.from_iterable(part)])
        except (sqlite3.Error, OSError) as error:
            self.close()
            if isinstance(error, UnknownFormat) or getattr(error, "sqlite_errorcode", 0) & 0xFF in BROKEN:
                self._set_aside()
            raise

    def close(self) -> None:
        db, self._db = self._db, None
        if db is not None:
            with suppress(sqlite3.Error):
                db.close()

    def _opened(self) -> sqlite3.Connection:
        """Opens a new file where somebody removed or replaced the one before."""
        if self._db is not None and self._is_in_place():
            return self._db
        self.close()
        self.path.parent.mkdir(mode=0o700, exist_ok=True)
        self.path.touch(mode=0o600)
        if not self.path.is_file():
            raise OSError(f"{self.path} is not a regular file")
        self._db = db = sqlite3.connect(self.path, timeout=PATIENCE, isolation_level=None)
        self._inode = self.path.stat().st_ino
        if _value(db, "PRAGMA user_version") != FORMAT and _value(db, "PRAGMA page_count") > 1:
            raise UnknownFormat(f"{self.path} has another format")
        db.executescript(SCHEMA + SETTINGS + f"PRAGMA max_page_count={self._pages};")
        names = names_json()
        db.execute("INSERT OR IGNORE INTO names (names) VALUES (?)", (names,))
        self._names = _value(db, "SELECT id FROM names WHERE names = ?", names)
        return db

    def _is_in_place(self) -> bool:
        try:
            return self.path.stat().st_ino == self._inode
        except FileNotFoundError:
            return False

    def _make_room(self, db: sqlite3.Connection) -> None:
        """Room for the next rows: twice the pages of the write-ahead log. Removals are written to that log too."""
        self._shrink_log(db)
        while self._used(db) > self._pages - 2 * LOG_PAGES and db.execute(OLDEST, (SLICE,)).rowcount:
            self._shrink_log(db)
        while _value(db, "PRAGMA page_count") > self._pages and _value(db, "PRAGMA freelist_count"):
            db.execute(f"PRAGMA incremental_vacuum({SLICE})").fetchall()
            self._shrink_log(db)

    def _shrink_log(self, db: sqlite3.Connection) -> None:
        """Raises LogHeldBack."""
        if self._log.stat().st_size > self._log_most and _value(db, "PRAGMA wal_checkpoint(TRUNCATE)"):
            raise LogHeldBack(f"another process has read {self.path} for long")

    def _used(self, db: sqlite3.Connection) -> int:
        return _value(db, "PRAGMA page_count") - _value(db, "PRAGMA freelist_count")

    def _set_aside(self) -> None:
        with suppress(OSError):
            self.path.replace(self.path.with_name(f"{self.path.name}.broken"))
        for ending in ("-wal", "-shm"):
            with suppress(OSError):
                self.path.with_name(self.path.name + ending).unlink()


def _value(db: sqlite3.Connection, query: str, *given: str) -> int:
    return int(db.execute(query, given).fetchone()[0])


MANY = 1000  # rows of one read, after which a writer may shrink its log
FOREVER = float("inf")
NEXT = (
    "SELECT at, records.id, names.names, row FROM records JOIN names ON names.id = records.names"
    " WHERE at >= ? AND at < ? AND (at, records.id) > (?, ?) {further} ORDER BY at, records.id LIMIT ?"
)


class UnreadableRecords(Exception):
    """str() names the file and the reason."""


def stored_records(
    folder: Path,
    *,
    since: float = 0.0,
    until: float = FOREVER,
    request_id: str | None = None,
    route: str | None = None,
) -> Iterator[dict[str, Any]]:
    """Records that arrived from `since` to before `until` (Unix time), in order of arrival, as in the answer of
    GET /requests. Raises UnreadableRecords."""
    equal = {"request_id": request_id, "route": route}
    given = {column: value for column, value in equal.items() if value is not None}
    try:
        files = sorted(file for file in folder.iterdir() if file.match(PATTERN) and file.stat().st_size)
    except OSError as error:
        raise UnreadableRecords(f"{folder}: {error.strerror}; name the directory of `records.dir`") from None
    if not files:
        raise UnreadableRecords(f"{folder}: no file {PATTERN}; name the directory of `records.dir`")
    for _, _, view in merge(*(_rows(file, (since, until), given) for file in files), key=lambda row: row[:2]):
        yield view


def _rows(
    file: Path, window: tuple[float, float], given: Mapping[str, str]
) -> Iterator[tuple[float, str, dict[str, Any]]]:
    query = NEXT.format(further="".join(f" AND {column} = ?" for column in given))
    last: tuple[float, int] = (-FOREVER, 0)
    try:
        with closing(_opened(file)) as db:
            while rows := db.execute(query, (*window, *last, *given.values(), MANY)).fetchall():
                for at, _, names, values in rows:
                    yield at, file.name, unpacked(names, values)
                last = rows[-1][:2]
    except (sqlite3.Error, OSError) as error:
        raise UnreadableRecords(f"{file}: {error}") from None
    except UNREADABLE:
        raise UnreadableRecords(f"{file}: a row cannot be read") from None


def _opened(file: Path) -> sqlite3.Connection:
    """Without a write-ahead log nobody writes, and SQLite is told so: it would make one, which takes a directory that
    this user can write to."""
    is_written = file.with_name(f"{file.name}-wal").exists()
    how = "mode=ro" if is_written else "mode=ro&immutable=1"
    db = sqlite3.connect(f"file:{quote(str(file.absolute()))}?{how}", uri=True, isolation_level=None)
    try:
        if (found := db.execute("PRAGMA user_version").fetchone()[0]) != FORMAT:
            raise UnreadableRecords(f"{file}: format {found}; this release reads {FORMAT}")
    except BaseException:
        db.close()
        raise
    return db
