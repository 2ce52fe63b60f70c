"""The document of what was learned: what is refused, and how it is stored."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from errno import ENOSPC
from pathlib import Path
from time import monotonic, time
from typing import Any

import msgspec
import pytest

from gateway.cluster.redis_client import Unavailable
from gateway.config.models import Config
from gateway.fleet.learned_keeper import (
    FILE,
    MAX_AGE,
    VERSION,
    LearnedKeeper,
    StateFile,
    UnusableState,
    decode_state,
)
from gateway.runtime import RuntimeHolder, build_runtime
from policies.fleet.fleet import AttemptReport, Fleet
from policies.types import AttemptOutcome, PoolEstimate
from tests.support.gateways import document, pool
from tests.support.simulated import eventually

pytestmark = pytest.mark.virtual_time

ENGINE = "http://10.0.0.1:8000"
ID = "small/10.0.0.1:8000"


class Process:
    """The parts of a gateway that learn and keep."""

    def __init__(self, home: Path, model: str = "served", url: str = ENGINE, kind: str = "vllm") -> None:
        pools = {"small": {**pool(url), "backend": kind, "model": model}}
        if kind == "vllm":
            del pools["small"]["api_key"]
        config = Config.model_validate(document(pools))
        self.runtime = RuntimeHolder(build_runtime(config))
        self.fleet = Fleet(self.runtime.current.pools.values())
        self.keeper = LearnedKeeper(StateFile(str(home)), self.fleet, self.runtime)

    def learn(self, samples: int = 40, ttft: float = 3.0) -> None:
        prompt, at = PoolEstimate(1_000, text_tokens=700), monotonic() - 10 * samples
        for key in range(samples):
            at += 5.0
            load = self.fleet.snapshot(at).loads[ID]
            [chosen] = self.fleet.view.candidates({ID: load}, prompt, 0, 0.0, at, 60.0)
            self.fleet.on_sent(key, chosen, prompt, at, stream=True)
            self.fleet.on_first_token(key, at + ttft)
            done = AttemptReport(1_000, 0, 20, 0.09)
            self.fleet.on_ended(key, AttemptOutcome.COMPLETED, at + ttft + 1, done)
        self.fleet.answer_lengths.observe_output("chat", 900)

    @property
    def p50(self) -> float:
        now, prompt = monotonic(), PoolEstimate(1_000)
        [found] = self.fleet.view.candidates(self.fleet.snapshot(now).loads, prompt, 0, 0.0, now, 60.0)
        return found.forecast.p50

    @property
    def samples(self) -> int:
        return self.fleet.view.statistics(ID, monotonic()).samples


async def saved(home: Path) -> Process:
    process = Process(home)
    await process.keeper.start()
    process.learn()
    await process.keeper.close()
    return process


async def started(home: Path, **more: str) -> Process:
    process = Process(home, **more)
    await process.keeper.start()
    return process


async def test_a_process_begins_where_the_last_one_ended(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its directory is made; only its user can read the file."""
    caplog.set_level(logging.INFO)
    home = tmp_path / "state"
    before, after, cold = await saved(home), await started(home), Process(home)
    assert after.p50 == pytest.approx(before.p50, rel=0.02)
    assert cold.p50 < before.p50 / 5
    assert after.fleet.view.token_scale("small").scale > 1.2
    assert after.fleet.answer_lengths.expected_output("chat") == before.fleet.answer_lengths.expected_output("chat")
    assert [entry.name for entry in home.iterdir()] == [FILE]
    assert (home / FILE).stat().st_mode & 0o777 == 0o600
    assert "learned state of 1 of 1 endpoints restored from" in caplog.text
    await after.keeper.close()


@pytest.mark.parametrize(
    "changed",
    [{"model": "another"}, {"url": "https://10.0.0.1:8000"}, {"url": f"{ENGINE}/other"}, {"kind": "compatible"}],
)
async def test_another_server_inherits_nothing(tmp_path: Path, changed: dict[str, str]) -> None:
    """Another model, another URL of the same host and port, an API in place of an engine."""
    await saved(tmp_path)
    after = await started(tmp_path, **changed)
    assert after.samples == 0
    assert after.p50 == pytest.approx(Process(tmp_path, **changed).p50)
    await after.keeper.close()


async def test_an_engine_that_serves_another_model_now_is_learned_anew(tmp_path: Path) -> None:
    """The name that the engine gave is kept too: a model changed behind our back shows as soon as it is named."""
    before = Process(tmp_path)
    before.fleet.on_model(ID, "weights-1")
    before.learn()
    await before.keeper.start()
    await before.keeper.close()
    same, other = Process(tmp_path), Process(tmp_path)
    for process in (same, other):
        process.keeper._apply(decode_state((tmp_path / FILE).read_bytes(), time()))
    assert same.fleet.on_model(ID, "weights-1") == ""
    assert other.fleet.on_model(ID, "weights-2") == "weights-1"
    assert (same.samples > 30, other.samples) == (True, 0)


def edited(raw: bytes, **changes: Any) -> bytes:
    return json.dumps({**json.loads(raw), **changes}).encode()


def with_engine(raw: bytes, **changes: Any) -> bytes:
    state = json.loads(raw)
    state["endpoints"][ID]["engine"].update(changes)
    return json.dumps(state).encode()


BROKEN = {
    "empty": lambda raw: b"",
    "truncated": lambda raw: raw[: len(raw) // 2],
    "one byte short": lambda raw: raw[:-1],
    "binary": lambda raw: bytes(range(256)) * 100,
    "not an object": lambda raw: b"[1, 2, 3]",
    "deep": lambda raw: b'{"version": 1, "saved_at": %d, "x": ' % time() + b"[" * 200_000,
    "of a later version": lambda raw: edited(raw, version=VERSION + 1),
    "without a version": lambda raw: raw.replace(b'"version"', b'"revision"'),
    "ancient": lambda raw: edited(raw, saved_at=time() - MAX_AGE - 60),
    "from the future": lambda raw: edited(raw, saved_at=time() + 3600),
    "of no time": lambda raw: raw.replace(b'"saved_at":', b'"saved_at":1e999,"was":'),
    "not a number": lambda raw: with_engine(raw, samples=float("nan")),
    "infinite": lambda raw: with_engine(raw, changes={"mean_error": float("inf"), "samples": 3}),
    "a huge number": lambda raw: with_engine(raw, samples=10**40),
    "another type": lambda raw: with_engine(raw, samples="many"),
    "negative": lambda raw: with_engine(raw, samples=-5),
    "no covariance": lambda raw: with_engine(
        raw, regression={"coefficients": [1.0, 1.0], "covariance": [[1.0, 9.0], [9.0, 1.0]]}
    ),
    "many errors": lambda raw: with_engine(
        raw, idle_errors={"recent": [0.1] * 10_000, "prior": [0.0] * 14, "age": 0.0}
    ),
}


@pytest.mark.parametrize(
    "hostile",
    [
        b'"lengths":{"r":{"mean":1,"answers":' + b"9" * 400 + b"}}",
        b'"scales":{"p":{"coefficients":[1,1,1],"covariance":[' + b",".join([b"[5e-324,5e-324,5e-324]"] * 3) + b"]}}",
    ],
    ids=["an integer beyond all floats", "a covariance that vanishes"],
)
def test_numbers_that_no_float_holds_are_a_broken_document(hostile: bytes) -> None:
    with pytest.raises(UnusableState, match="broken"):
        decode_state(b'{"version":1,"saved_at":100,' + hostile + b"}", 100.0)


@pytest.mark.parametrize("fault", BROKEN)
async def test_a_broken_document_is_ignored_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    """The start is that of a cold gateway, and the next save replaces the document."""
    await saved(tmp_path)
    path = tmp_path / FILE
    path.write_bytes(BROKEN[fault](path.read_bytes()))
    caplog.clear()
    after = await started(tmp_path)
    [line] = caplog.messages
    assert line.startswith(f"learned state in {path} is ignored: ")
    assert len(line) < 400
    assert (after.samples, after.p50) == (0, pytest.approx(Process(tmp_path).p50))
    after.learn()
    await after.keeper.close()
    assert (await started(tmp_path)).samples > 30


async def test_terms_of_another_model_of_engines_are_not_restored(tmp_path: Path) -> None:
    """A valid document, with another number of coefficients."""
    await saved(tmp_path)
    path = tmp_path / FILE
    two = {"coefficients": [1.0, 1.0], "covariance": [[1.0, 0.0], [0.0, 1.0]]}
    path.write_bytes(with_engine(path.read_bytes(), regression=two))
    after = await started(tmp_path)
    assert (after.samples, after.p50) == (0, pytest.approx(Process(tmp_path).p50))
    await after.keeper.close()


async def test_only_a_regular_file_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A pipe without a writer would block, a directory cannot be read."""
    os.mkfifo(tmp_path / FILE)
    await started(tmp_path)
    assert "is ignored: not a regular file" in caplog.text
    (tmp_path / FILE).unlink()
    (tmp_path / FILE).mkdir()
    await started(tmp_path)
    assert len(caplog.messages) == 2


async def test_a_document_beyond_the_limit_is_not_decoded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Memory is bounded for any file."""
    await saved(tmp_path)
    raw = (tmp_path / FILE).read_bytes()
    monkeypatch.setattr("gateway.fleet.learned_keeper.MAX_BYTES", len(raw) - 1)
    found = await StateFile(str(tmp_path)).read()
    assert found is not None
    assert len(found) == len(raw)
    with pytest.raises(UnusableState, match="larger than"):
        decode_state(found, time())


async def test_a_save_that_fails_leaves_the_file_and_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a full disk."""
    process = await saved(tmp_path)
    before = (tmp_path / FILE).read_bytes()

    def full(_: int) -> None:
        raise OSError(ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    assert [await process.keeper.save() for _ in range(3)] == [False] * 3
    assert (tmp_path / FILE).read_bytes() == before
    assert sum("cannot be saved" in line for line in caplog.messages) == 1
    monkeypatch.undo()
    assert await process.keeper.save()
    msgspec.json.decode((tmp_path / FILE).read_bytes())


async def test_a_process_that_is_killed_has_saved_at_intervals(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And nothing while nothing is learned."""
    monkeypatch.setattr("gateway.fleet.learned_keeper.SAVE_INTERVAL", 0.02)
    process = await started(tmp_path)
    await asyncio.sleep(0.1)
    assert not (tmp_path / FILE).exists()
    process.learn()
    await eventually((tmp_path / FILE).exists)
    first = (tmp_path / FILE).stat().st_mtime_ns
    await asyncio.sleep(0.1)
    assert (tmp_path / FILE).stat().st_mtime_ns == first
    assert (await started(tmp_path)).samples > 30
    await process.keeper.close()


async def test_a_process_that_does_not_write_reads(tmp_path: Path) -> None:
    """As every worker but the leader."""
    await saved(tmp_path)
    before = (tmp_path / FILE).stat().st_mtime_ns
    reader = Process(tmp_path)
    reader.keeper._writes = False
    await reader.keeper.start()
    reader.learn()
    await reader.keeper.close()
    assert reader.samples > 30
    assert (tmp_path / FILE).stat().st_mtime_ns == before


async def test_nothing_is_saved_over_state_that_could_not_be_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A store that does not answer at the start keeps what it has."""
    await saved(tmp_path)
    before = (tmp_path / FILE).read_bytes()
    late = Process(tmp_path)

    async def unavailable(store: StateFile) -> bytes | None:
        raise Unavailable("no answer")

    monkeypatch.setattr(StateFile, "read", unavailable)
    await late.keeper.start()
    late.learn(samples=5)
    await late.keeper.close()
    assert (tmp_path / FILE).read_bytes() == before
