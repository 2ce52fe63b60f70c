"""Ports of `firsttoken serve` and `pick`, as processes: those that were asked for, and the words about them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from gateway.config.field_types import ListenAddress
from gateway.process import bind
from tests.support.forked import ForkedProcess, forked
from tests.support.served import read_line

FLEET = "pools: {only: {backend: vllm, model: m, endpoints: [http://127.0.0.1:9]}}\nroutes: {chat: {tiers: [only]}}\n"
ADMIN = "server: {admin: 127.0.0.1:0}\n"
PICKING = re.compile(r"firsttoken: picking endpoints for Envoy on 127\.0\.0\.1:[1-9]\d*, admin http://127\.0\.0\.1:\d+")


@asynccontextmanager
async def process(*arguments: str) -> AsyncIterator[tuple[ForkedProcess, str]]:
    """The command, and its line about ports, or the last line of all."""
    started = await forked(*arguments)
    try:
        async with asyncio.timeout(120):
            line = await read_line(started.stderr)
            while line and "admin http" not in line and "cannot" not in line and "name a file" not in line:
                line = await read_line(started.stderr)
        yield started, line
    finally:
        if started.returncode is None:
            started.terminate()
            async with asyncio.timeout(60):
                await started.wait()
        started.close()


def listening(pid: int) -> int:
    """TCP sockets of a process that listen."""
    inodes = set[str]()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed since it was listed
            inodes.add(str(link.readlink()).removeprefix("socket:[")[:-1])
    rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(row[3] == "0A" and row[9] in inodes for row in rows)


async def test_pick_prints_its_port_and_opens_no_other_unasked(tmp_path: Path) -> None:
    """The data port of the example beside it belongs to Envoy."""
    file = tmp_path / "f.yaml"
    file.write_text(f"{ADMIN}pick: {{listen: 127.0.0.1:0}}\n{FLEET}")
    async with process("pick", str(file)) as (started, line):
        assert PICKING.match(line), line
        assert listening(started.pid) == 2
    async with process("pick", "--config", str(file), "--port", "0") as (started, line):
        assert re.match(r"firsttoken: serving http://127\.0\.0\.1:\d+/v1, picking endpoints for Envoy on ", line), line
        assert listening(started.pid) == 3
    file.write_text(f"server: {{listen: 127.0.0.1:0, admin: 127.0.0.1:0}}\npick: {{listen: 127.0.0.1:0}}\n{FLEET}")
    async with process("pick", str(file)) as (started, line):
        assert listening(started.pid) == 3


@pytest.mark.parametrize("workers", ["1", "2"])
async def test_a_pickers_port_in_use_is_named(tmp_path: Path, workers: str) -> None:
    """With its key; the exit code is 2."""
    with bind(ListenAddress("127.0.0.1", 0)) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        (tmp_path / "f.yaml").write_text(f"{ADMIN}pick: {{listen: 127.0.0.1:{port}}}\n{FLEET}")
        async with process("pick", str(tmp_path / "f.yaml"), "--workers", workers) as (started, line):
            assert line.startswith(f"firsttoken: cannot listen on 127.0.0.1:{port} (pick.listen): ")
            async with asyncio.timeout(60):
                assert await started.wait() == 2


async def test_workers_of_a_picker_open_no_data_port(tmp_path: Path) -> None:
    """The line has their number."""
    with bind(ListenAddress("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (tmp_path / "f.yaml").write_text(f"{ADMIN}pick: {{listen: 127.0.0.1:{port}}}\n{FLEET}")
    async with process("pick", str(tmp_path / "f.yaml"), "--workers", "2") as (_, line):
        assert line.startswith(f"firsttoken: picking endpoints for Envoy on 127.0.0.1:{port}, admin http://"), line
        assert line.endswith(", 2 workers\n")
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.close()


async def test_serve_takes_files_as_check_does(tmp_path: Path) -> None:
    """In this order, with or without `--config`; `pick` needs one."""
    (tmp_path / "a.yaml").write_text(FLEET)
    (tmp_path / "b.yaml").write_text("server: {listen: 127.0.0.1:0, admin: 127.0.0.1:0}\n")
    files = [str(tmp_path / name) for name in ("a.yaml", "b.yaml")]
    for arguments in (files, [files[0], "--config", files[1]], ["--config", *files]):
        async with process("serve", *arguments) as (_, line):
            assert re.match(r"firsttoken: serving http://127\.0\.0\.1:\d+/v1, admin ", line), line
    async with process("pick") as (_, line):
        assert line == "firsttoken: name a file: firsttoken pick FILE\n"
