"""Files that are written whole, by several writers too."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from gateway import files
from gateway.files import ORPHAN_AGE, replace_file


def test_two_writers_of_one_process_id_do_not_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in containers that share a volume, and as two threads: each writes its whole file."""
    path, both = tmp_path / "kept", threading.Barrier(2)
    written: list[str] = []
    sync = os.fsync

    def meet(file: int) -> None:
        if os.path.isfile(f"/proc/self/fd/{file}"):
            both.wait(10)
            written.append(os.path.basename(os.readlink(f"/proc/self/fd/{file}")))
        sync(file)

    monkeypatch.setattr(files.os, "fsync", meet)
    texts = [b"a" * 100_000, b"b" * 100_000]
    writers = [threading.Thread(target=replace_file, args=(path, text)) for text in texts]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert len(set(written)) == 2
    assert path.read_bytes() in texts
    assert [each.name for each in tmp_path.iterdir()] == ["kept"]
    assert path.stat().st_mode & 0o777 == 0o600


def test_files_of_writers_that_were_killed_are_removed_later(tmp_path: Path) -> None:
    """Of this file, once no writer can be at work on them."""
    old, new, other = (tmp_path / name for name in (".kept.old", ".kept.new", ".other.old"))
    for each in (old, new, other):
        each.touch()
    for each in (old, other):
        os.utime(each, (each.stat().st_mtime - ORPHAN_AGE - 1,) * 2)
    replace_file(tmp_path / "kept", b"text")
    assert sorted(each.name for each in tmp_path.iterdir()) == [".kept.new", ".other.old", "kept"]


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The former file stays."""
    replace_file(tmp_path / "kept", b"former")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        replace_file(tmp_path / "kept", b"text")
    assert [each.name for each in tmp_path.iterdir()] == ["kept"]
    assert (tmp_path / "kept").read_bytes() == b"former"
