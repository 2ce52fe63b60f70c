"""Keys in a file of `state.dir`: whole or not at all, of several processes, bounded."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gateway.admission import key_store
from gateway.admission.key_file import FILE, FileKeys
from gateway.admission.key_store import StoreFull, UnusableFile
from gateway.admission.keyring import Keyring
from gateway.admission.new_keys import operator_store
from gateway.config.models import Key, StateSection
from tests.support.redis import redis_server
from tests.support.simulated import eventually


def key(name: str, **more: Any) -> Key:
    return Key(name=name, sha256=hashlib.sha256(name.encode()).hexdigest(), **more)


async def test_a_key_is_added_changed_and_revoked(tmp_path: Path) -> None:
    """A second object, as of another process, sees each change and another version."""
    store, other = FileKeys(str(tmp_path / "state")), FileKeys(str(tmp_path / "state"))
    versions = [await other.version()]
    assert (await store.add(key("a")), await store.add(key("a"))) == (True, False)
    versions.append(await other.version())
    limited = key("a", requests_per_minute=5)
    assert (await store.replace(key("a"), limited), await store.replace(key("a"), limited)) == (True, False)
    versions.append(await other.version())
    assert (await other.read()).keys == [limited]
    assert (await store.revoke("a"), await store.revoke("a")) == (True, False)
    versions.append(await other.version())
    assert ((await other.read()).keys, len(set(versions)), versions[0]) == ([], 4, None)
    assert oct(os.stat(tmp_path / "state" / FILE).st_mode & 0o777) == "0o600"


async def test_changes_at_the_same_time_are_all_kept(tmp_path: Path) -> None:
    """Read, change and replacement are one step under a lock."""
    names = [f"k{i:02}" for i in range(30)]
    await asyncio.gather(*(FileKeys(str(tmp_path)).add(key(name)) for name in names))
    assert [each.name for each in (await FileKeys(str(tmp_path)).read()).keys] == names


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[" * 100_000, b'{"version": 2, "keys": {}}', b'{"version": 1, "keys": [1]}']
)
async def test_a_file_that_is_none_of_ours_is_neither_read_nor_overwritten(raw: bytes, tmp_path: Path) -> None:
    """It may be of a newer version, or hold keys that a mistake has broken."""
    store = FileKeys(str(tmp_path))
    (tmp_path / FILE).write_bytes(raw)
    for work in (store.read(), store.add(key("a")), store.revoke("a")):
        with pytest.raises(UnusableFile, match=r"keys\.json: not a file of keys of this version"):
            await work
    assert (tmp_path / FILE).read_bytes() == raw


async def test_a_broken_file_revokes_no_key_and_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last known keys hold until the file is mended."""
    monkeypatch.setattr("gateway.admission.keyring.CHECK_INTERVAL", 0.01)
    store = FileKeys(str(tmp_path))
    await store.add(key("a"))
    good, file = (tmp_path / FILE).read_bytes(), tmp_path / FILE
    changes: list[list[str]] = []

    async def on_change(keys: Sequence[Key]) -> None:
        changes.append([each.name for each in keys])

    ring = Keyring(store, on_change)
    ring.start()
    await eventually(lambda: changes == [["a"]])
    file.write_bytes(b"broken")
    await eventually(lambda: "the last known keys stay valid" in caplog.text)
    file.unlink()
    await eventually(lambda: "has lost the keys" in caplog.text)
    assert [each.name for each in ring.known] == ["a"]
    file.write_bytes(good)
    await eventually(lambda: len(changes) == 2)
    await ring.close()
    assert caplog.text.count("the last known keys stay valid") == 2


async def test_a_process_that_stops_with_the_lock_is_waited_for_in_vain_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_store, "PATIENCE", 0.05)
    store = FileKeys(str(tmp_path))
    with (tmp_path / "keys.lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UnusableFile, match="another process holds the lock"):
            await store.add(key("a"))
    assert await store.add(key("a"))


@pytest.mark.parametrize("kind", ["file", "redis"])
async def test_the_number_of_stored_keys_is_bounded(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every gateway reads all of them after a change."""
    monkeypatch.setattr(key_store, "MAX_KEYS", 2)
    async with redis_server(start=kind == "redis") as server:
        state = {"dir": str(tmp_path), "redis": server.url, "keys": "dir" if kind == "file" else "redis"}
        store = operator_store(StateSection.model_validate(state))
        assert [await store.add(key(name)) for name in "aab"] == [True, False, True]
        with pytest.raises(StoreFull):
            await store.add(key("c"))
        assert await store.revoke("a")
        assert await store.add(key("c"))
        assert [each.name for each in (await store.read()).keys] == ["b", "c"]
        assert not await store.replace(key("b", weight=2), key("b", weight=3))
        assert await store.replace(key("b"), key("b", weight=3))
        assert (await store.read()).keys[0].weight == 3
