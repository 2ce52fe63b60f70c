"""Several workers behind one port, with real processes and sockets: deaths, drains and shared state."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.cli.main import main
from tests.support.builders import CHAT, DONE, FINISH, STREAMED, TOKEN, USAGE, Caller, calling, get, post
from tests.support.served import ROOT, Served, serving, write_config
from tests.support.simulated import engines
from tests.support.upstream import GATE, LAST_CHUNK, STREAM_HEAD, Script, Upstream, chunk

STREAM = {**CHAT, "stream": True}
SLOW: Script = [STREAM_HEAD + chunk(TOKEN), GATE, chunk(USAGE + FINISH + DONE) + LAST_CHUNK]
STREAMS = 16  # over two workers: all on one with a probability of 1 in 30,000
READY = b"GET /ready HTTP/1.1\r\nhost: localhost\r\n\r\n"


def workers_of(served: Served) -> list[int]:
    """Process ids, the youngest last: workers, the admin process, and replacement workers."""
    pid = served.process.pid
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def admin_json(served: Served, path: str) -> Any:
    return json.loads((await get(served.admin, path))[2])


async def total(served: Served, name: str) -> float:
    """Sum of a counter over all labels."""
    page = (await get(served.admin, "/metrics"))[2].decode()
    return sum(float(line.rpartition(" ")[2]) for line in page.splitlines() if line.startswith(name + "{"))


async def completed(served: Served, count: int) -> None:
    """Waits until the Records of `count` requests have been counted."""
    async with asyncio.timeout(60):
        while await total(served, "firsttoken_requests_total") < count:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


@asynccontextmanager
async def streaming(served: Served, count: int) -> AsyncIterator[list[Caller]]:
    """Callers with the first token of a stream each."""
    async with AsyncExitStack() as stack:
        callers = [await stack.enter_async_context(calling(served.url)) for _ in range(count)]
        for caller in callers:
            assert (await caller.ask(post(STREAM)))[0] == 200
        yield callers


async def accepts_connections(served: Served) -> bool:
    try:
        async with calling(served.url):
            return True
    except ConnectionError:  # refused; reset where the worker has closed its socket meanwhile
        return False


async def completes(caller: Caller) -> bool:
    """True if the rest of the answer arrives."""
    try:
        async with asyncio.timeout(60):
            rest = await caller.reader.readuntil(LAST_CHUNK)
        return rest == chunk(TOKEN) + chunk(FINISH + DONE) + LAST_CHUNK
    except (asyncio.IncompleteReadError, ConnectionError):
        return False


async def ask(served: Served, **more: Any) -> None:
    async with calling(served.url) as caller:
        await caller.ask(post({**STREAM, **more}))
        assert await caller.chunks()


async def test_a_killed_worker_loses_only_its_own_streams_and_is_replaced(tmp_path: Path) -> None:
    """With two lines on stderr. Counters are kept, and the port refuses no connection."""
    async with (
        Upstream(*[[STREAMED]] * 4, SLOW) as upstream,
        serving(write_config(tmp_path / "f.yaml", upstream.url), "--workers", "2") as served,
    ):
        for _ in range(4):
            await ask(served)
        await completed(served, 4)
        async with streaming(served, STREAMS) as callers:
            victim, *others = workers_of(served)
            os.kill(victim, signal.SIGKILL)
            received = [await served.line(), await served.line()]
            assert f"worker 1 (pid {victim}) was killed by signal 9 (Killed); restarting it" in received[0]
            assert "worker 1 is serving again" in received[1]
            for _ in range(8):  # on both
                assert (await get(served.url, "/ready"))[0] == 200
            for _ in callers:
                upstream.proceed()
            whole = [await completes(caller) for caller in callers]
        assert 0 < sum(whole) < STREAMS
        assert set(others) < set(workers_of(served))
        await completed(served, 4 + sum(whole))
        assert await total(served, "firsttoken_worker_starts_total") == 3
        served.process.send_signal(signal.SIGTERM)
        assert (await served.ends())[0] == 0


async def test_a_crash_looping_worker_backs_off_while_the_others_serve(tmp_path: Path) -> None:
    """A crash loop must not exhaust the machine, nor collect connections without a worker. A supervisor that is stopped
    meanwhile, by Ctrl-Z or a debugger, takes its delay for no signal to end."""
    async with serving(write_config(tmp_path / "f.yaml", "http://127.0.0.1:9"), "--workers", "2") as served:
        for victim, ending in (
            (0, "; restarting it"),
            (-1, ", repeatedly; restarting it in 0.5 s"),
        ):
            os.kill(workers_of(served)[victim], signal.SIGKILL)
            assert (await served.line()).rstrip().endswith("was killed by signal 9 (Killed)" + ending)
            served.process.send_signal(signal.SIGSTOP)
            for _ in range(20):
                assert (await get(served.url, "/health"))[0] == 200
            await asyncio.sleep(0.6)
            served.process.send_signal(signal.SIGCONT)
            assert "worker 1 is serving again" in await served.line()


async def test_a_drain_under_load_loses_no_stream(tmp_path: Path) -> None:
    """Streams on all workers complete, new connections are refused, the admin port answers; exit code 0."""
    async with (
        Upstream(SLOW) as upstream,
        serving(write_config(tmp_path / "f.yaml", upstream.url), "--workers", "2") as served,
        streaming(served, STREAMS) as callers,
        calling(served.url) as idle,
    ):
        assert (await idle.whole(READY))[0] == 200
        served.process.send_signal(signal.SIGTERM)
        assert (await served.line()).startswith("firsttoken: draining")
        async with asyncio.timeout(60):  # until both drain
            while (await idle.whole(READY))[0] == 200:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            while await accepts_connections(served):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert (await get(served.admin, "/metrics"))[0] == 200
        for _ in callers:
            upstream.proceed()
        assert all([await completes(caller) for caller in callers])
        code, out, err = await served.ends()
    assert (code, err) == (0, "")
    assert [json.loads(line)["end"] for line in out.splitlines()] == ["completed"] * STREAMS


async def test_a_second_signal_aborts_running_requests_of_all_workers(tmp_path: Path) -> None:
    """Aborted requests are in the access log."""
    async with (
        Upstream(SLOW) as upstream,
        serving(write_config(tmp_path / "f.yaml", upstream.url), "--workers", "2") as served,
        streaming(served, STREAMS) as callers,
    ):
        served.process.send_signal(signal.SIGTERM)
        assert (await served.line()).startswith("firsttoken: draining")
        served.process.send_signal(signal.SIGTERM)
        code, out, _ = await served.ends()
        assert not any([await completes(caller) for caller in callers])
    assert code == 0
    assert [json.loads(line)["end"] for line in out.splitlines()] == ["cut"] * STREAMS


async def test_no_worker_outlives_its_supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After SIGKILL of the supervisor, workers drain by themselves, release the port and leave no files."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    async with (
        Upstream(SLOW) as upstream,
        serving(write_config(tmp_path / "f.yaml", upstream.url), "--workers", "2") as served,
        streaming(served, 2) as callers,
    ):
        orphans = workers_of(served)
        served.process.kill()
        for _ in callers:
            upstream.proceed()
        assert [await completes(caller) for caller in callers] == [True, True]
        async with asyncio.timeout(60):
            while any(map(alive, orphans)):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert os.listdir(tmp_path) == ["f.yaml"]


def alive(pid: int) -> bool:
    """False for zombies."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_workers_share_their_prefix_index(tmp_path: Path) -> None:
    """The next request of a conversation goes to the engine with its prefix, on any worker."""
    long = [{"role": "user", "content": "word " * 2000}]
    async with engines(2) as both:
        config = write_config(tmp_path / "f.yaml", ", ".join(engine.url for engine in both), backend="simulated")
        async with serving(config, "--workers", "2") as served:
            asked, told = 0, set[int]()
            async with asyncio.timeout(
                60
            ):  # the other worker hears of a prompt within 20 ms, or later on a busy machine
                while told != {1, 2}:
                    await ask(served, messages=long, max_tokens=1)
                    await completed(served, asked := asked + 1)
                    records = await admin_json(served, "/requests")
                    told = {record["worker"] for record in records if record["cached_tokens_predicted"] > 0}
            for _ in range(STREAMS):
                await ask(served, messages=long, max_tokens=1)
            await completed(served, asked + STREAMS)
            records = await admin_json(served, "/requests")
            assert [record["request_id"] for record in await admin_json(served, "/requests?last=1")] == [
                records[-1]["request_id"]
            ]
            assert all(record["cached_tokens_predicted"] > 0 for record in records[-STREAMS:])
            assert records[0]["cached_tokens_predicted"] == 0


async def test_the_admin_port_merges_all_workers(tmp_path: Path) -> None:
    """Load of one worker is visible to all; all admin requests work as with a single gateway."""
    async with (
        Upstream(SLOW) as upstream,
        serving(write_config(tmp_path / "f.yaml", upstream.url), "--workers", "2") as served,
        streaming(served, STREAMS),
    ):
        async with asyncio.timeout(60):  # workers exchange load within a tenth of a second
            while (await admin_json(served, "/fleet"))[0]["load"]["in_flight"] != STREAMS:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert await total(served, "firsttoken_endpoint_in_flight") == STREAMS
        assert (await admin_json(served, "/config"))["server"]["workers"] == 2
        assert (await get(served.admin, "/requests?last=x"))[0] == 400
        async with calling(served.admin) as caller:
            status, _, received = await caller.whole(post(CHAT, path="/explain"))
            assert (status, json.loads(received)["outcome"]) == (200, "place")
            status, _, received = await caller.whole(post({**CHAT, "model": "nope"}, path="/explain"))
            assert (status, json.loads(received)["error"]["param"]) == (404, "model")
        *_, admin_process = workers_of(served)
        os.kill(admin_process, signal.SIGKILL)
        assert (
            f"the admin port (pid {admin_process}) was killed by signal 9 (Killed); restarting" in await served.line()
        )
        assert (await get(served.admin, "/metrics"))[0] == 200


async def test_the_live_views_merge_all_workers(tmp_path: Path) -> None:
    """Counts are summed; a Record is found on any worker; a beacon reaches its request's worker."""
    async with (
        engines(2) as two,
        serving(
            write_config(tmp_path / "f.yaml", ", ".join(engine.url for engine in two), "simulated"), "--workers", "2"
        ) as served,
    ):
        ids = [f"id-{number}" for number in range(STREAMS)]
        for name in ids:
            async with calling(served.url) as caller:
                await caller.ask(post({**STREAM, "max_tokens": 3}, f"x-request-id: {name}"))
                assert await caller.chunks()
        await completed(served, STREAMS)
        (chat,) = (await admin_json(served, "/routes"))["routes"]
        assert (chat["requests"], sum(chat["ttft_ms"]["counts"])) == ({"completed": STREAMS}, STREAMS)
        assert len({record["worker"] for record in await admin_json(served, "/requests")}) == 2
        assert [r["request_id"] for r in await admin_json(served, "/requests?id=id-3")] == ["id-3"]
        assert [r["request_id"] for r in await admin_json(served, "/requests?last=2")] == ids[-2:]
        slowest = [r["ttft_ms"] for r in await admin_json(served, "/requests?slowest=5")]
        assert (slowest, len(slowest)) == (sorted(slowest, reverse=True), 5)
        status, _, body = await get(served.admin, "/requests?route=chatt")
        assert (status, json.loads(body)["error"]["param"]) == (400, "route")
        for name, expected in ((ids[0], 204), (ids[0], 409), (ids[1], 204), ("nobody", 404)):
            async with calling(served.admin) as caller:
                found, _ = await caller.ask(post({"request_id": name, "ttft_ms": 77}, path="/ttft"))
            assert (name, found) == (name, expected)
        on_screen = {r["request_id"] for r in await admin_json(served, "/requests") if r["on_screen_ms"] == 77.0}
        assert on_screen == set(ids[:2])
        (chat,) = (await admin_json(served, "/routes"))["routes"]
        assert sum(chat["on_screen_ms"]["counts"]) == 2
        async with calling(served.admin) as caller:
            status, _, received = await caller.whole(post(CHAT, path="/explain"))
        explained = json.loads(received)
        considered = [one["endpoint"] for one in (*explained["candidates"], *explained["rejected"])]
        assert (status, sorted(considered)) == (200, sorted(f"only/{engine.host}:{engine.port}" for engine in two))
        assert all(entry["health_by_worker"] == {"1": "up", "2": "up"} for entry in await admin_json(served, "/fleet"))
        assert (await get(served.admin, "/dashboard"))[0] == 200
        assert await asyncio.to_thread(main, ["top", "--once", "--interval", "0.2", "--admin", served.admin]) == 0


async def test_a_worker_that_cannot_start_ends_the_start(tmp_path: Path) -> None:
    """Exit code 1: whoever runs the service tries again. The log has the cause, and the worker."""
    config = write_config(tmp_path / "f.yaml", "http://127.0.0.1:9")
    config.write_text(config.read_text().replace("access_log: stdout", f"access_log: {tmp_path}/none/access.jsonl"))
    command = (sys.executable, "-m", "gateway.cli", "serve", "--config", str(config), "--workers", "2")
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stderr=PIPE)
    async with asyncio.timeout(60):
        _, err = await process.communicate()
    assert process.returncode == 1
    text = err.decode()
    assert re.match(r".*worker \d: internal error\n", text)
    assert len(re.findall(r"worker \d \(pid \d+\) exited with code 1 before it was serving\n", text)) == 1
    assert "please report" not in text  # the supervisor has not failed


async def test_a_worker_that_stands_still_is_told_killed_and_replaced(tmp_path: Path) -> None:
    """Meanwhile the admin port answers, and names it; POST /reload does not wait for it."""
    async with (
        Upstream(*[[STREAMED]] * 8) as upstream,
        serving(write_config(tmp_path / "f.yaml", upstream.url), "--workers", "2") as served,
    ):
        victim, *_ = workers_of(served)
        os.kill(victim, signal.SIGSTOP)
        assert f"worker 1 (pid {victim}) has stood still for 5 s" in await served.line()
        _, headers, page = await get(served.admin, "/metrics")
        assert headers["x-firsttoken-stalled-workers"] == "1"
        assert b"\nfirsttoken_workers_stalled 1.0\n" in page
        text = (tmp_path / "f.yaml").read_text()
        (tmp_path / "f.yaml").write_text(text.replace("{chat: ", "{other: {tiers: [only]}, chat: "))
        async with asyncio.timeout(20):
            status, _, _ = await get(served.admin, "/reload", method="POST")
        assert status == 200
        lines = [await served.line()]
        while "is serving again" not in lines[-1]:
            lines.append(await served.line())
        assert any("worker 1 has not applied the configuration" in line for line in lines)
        assert any(f"worker 1 (pid {victim}) has stood still for 30 s; killing it" in line for line in lines)
        for _ in range(8):
            assert (await get(served.url, "/ready"))[0] == 200
        assert b"\nfirsttoken_workers_stalled 0.0\n" in (await get(served.admin, "/metrics"))[2]


async def test_a_worker_that_goes_on_is_not_killed(tmp_path: Path) -> None:
    """And an admin process that stands still is told too."""
    async with serving(write_config(tmp_path / "f.yaml", "http://127.0.0.1:9"), "--workers", "2") as served:
        everyone = workers_of(served)
        victim = everyone[1]
        os.kill(victim, signal.SIGSTOP)
        assert f"worker 2 (pid {victim}) has stood still for 5 s" in await served.line()
        os.kill(victim, signal.SIGCONT)
        assert f"worker 2 (pid {victim}) goes on after it stood still for" in await served.line()
        assert workers_of(served) == everyone
