"""Imported files beside the real LiteLLM: the same requests, before the same providers with the same faults.

    python -m tests.programs.importing [--only WORDS] [--keep]

Both are processes of their own, one after the other. `--keep` writes the groups with which LiteLLM has answered
the files that are alike; the tests of every day compare with these.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import socket
import sys
import tempfile
from asyncio.subprocess import DEVNULL, PIPE
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp

from scripts.litellm_setup import PROGRAM, VERSION
from tests.support.fake_providers import FakeProviders
from tests.support.litellm_files import FILES, MASTER_KEY, LitellmFile
from tests.support.served import serving
from tests.support.side_by_side import answered_by, groups, keep, unlike

PATIENCE = 300.0  # s until LiteLLM listens
ENVIRONMENT = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # none from the network
    "LITELLM_LOG": "ERROR",
    "OPENAI_API_KEY": "sk-openai-0123456789abcdef",
    "LITELLM_MASTER_KEY": MASTER_KEY,
}


@contextlib.asynccontextmanager
async def litellm(config: Path, log: Path) -> AsyncIterator[str]:
    """URL of a proxy that listens."""
    with socket.socket() as held:  # a port that was free just now
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    command = [
        str(PROGRAM),
        "--config",
        str(config),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--telemetry",
        "False",
    ]
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(*command, stdout=out, stderr=out, env=os.environ | ENVIRONMENT)
    try:
        await _until_listening(f"http://127.0.0.1:{port}/health/liveliness", process, log)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        if process.returncode is None:
            process.terminate()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), 10)
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _until_listening(url: str, process: asyncio.subprocess.Process, log: Path) -> None:
    async with asyncio.timeout(PATIENCE), aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as session:
        while process.returncode is None:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with session.get(url) as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(0.3)
    said = await asyncio.to_thread(log.read_text)
    raise RuntimeError(f"LiteLLM ended before it listened: {said[-2000:]}")


async def by_litellm(file: LitellmFile, folder: Path) -> list[str]:
    async with FakeProviders(file.providers, file.faults) as providers:
        config = folder / "litellm.yaml"
        config.write_text(file.written(providers.ports))
        async with litellm(config, folder / "litellm.log") as url:
            return await answered_by(url, file)


async def by_firsttoken(file: LitellmFile, folder: Path) -> list[str]:
    """`firsttoken import`, and `firsttoken serve` with what it has written."""
    async with FakeProviders(file.providers, file.faults) as providers:
        source, ports, written = folder / "source.yaml", folder / "ports.yaml", folder / "fleet.yaml"
        source.write_text(file.written(providers.ports))
        ports.write_text("server: {listen: 127.0.0.1:0, admin: 127.0.0.1:0}\ntelemetry: {access_log: off}\n")
        command = [sys.executable, "-m", "gateway.cli", "import", "litellm", str(source), "-o", str(written)]
        done = await asyncio.create_subprocess_exec(*command, stdout=DEVNULL, stderr=PIPE)
        _, errors = await done.communicate()
        if done.returncode:
            raise RuntimeError(errors.decode())
        os.environ.update(
            {name: ENVIRONMENT.get(name, f"sk-{name.lower()}-0123456789") for name in _variables(written)}
        )
        async with serving(written, str(ports)) as served:
            if not served.url:
                raise RuntimeError(served.first_line)
            return await answered_by(f"{served.url}/v1", file)


def _variables(written: Path) -> list[str]:
    """Names in the comment above an imported configuration."""
    line = next((each for each in written.read_text().splitlines() if each.startswith("# Environment variables")), ":")
    return [name.strip() for name in line.partition(":")[2].split(",") if name.strip()]


async def main(only: str, is_kept: bool) -> int:
    seen, alike = {}, 0
    files = [file for file in FILES if only in file.name]
    for file in files:
        with tempfile.TemporaryDirectory() as folder:
            theirs = await by_litellm(file, Path(folder))
            ours = await by_firsttoken(file, Path(folder))
        found = [f"LiteLLM itself: {each}" for each in unlike(file, groups(theirs), theirs)]
        found += unlike(file, groups(theirs), ours)
        alike += not found
        if not found:
            seen[file.name] = groups(theirs)
        print(f"{'alike ' if not found else 'UNLIKE'} {file.name}", flush=True)
        print(f"       LiteLLM {_counted(theirs)}\n       ours    {_counted(ours)}", flush=True)
        for line in found[:8]:
            print(f"       {line}", flush=True)
    print(f"{alike} of {len(files)} files alike, LiteLLM {VERSION}")
    if is_kept:
        keep(VERSION, seen)
    return 0 if alike == len(files) else 1


def _counted(answers: list[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(Counter(answers).items()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.programs.importing")
    parser.add_argument("--only", default="", help="a part of the name of a file")
    parser.add_argument("--keep", action="store_true", help="write the groups that LiteLLM answered with")
    args = parser.parse_args()
    sys.exit(asyncio.run(main(args.only, args.keep)))
