"""Reads a directory of Records, while gateways write there or after."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing
from heapq import merge
from pathlib import Path
from typing import Any
from urllib.parse import quote

from gateway.records.packed_record import UNREADABLE, unpacked
from gateway.records.record_file import FORMAT, PATTERN

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
