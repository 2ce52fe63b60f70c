"""Runs the OpenAI SDK for Node against a gateway before two simulated engines: `make node`.

The engines run in this process, the gateway in a child as started by a user, node in another. npm installs into
.cache/node.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from backends.simulated.profiles import profile_named
from backends.simulated.simulated_server import SimulatedServer
from gateway.tokenize.tokenizers import encoder

ROOT = Path(__file__).parent.parent
SUITE = ROOT / "tests/node"
INSTALLED = ROOT / ".cache/node"
STARTS_WITHIN = 20.0  # s
SERVING = re.compile(r"serving (http://\S+),")


def install() -> None:
    """The suite beside its packages: node resolves imports relative to a file."""
    INSTALLED.mkdir(parents=True, exist_ok=True)
    for name in ("package.json", "sdk.test.mjs"):
        shutil.copyfile(SUITE / name, INSTALLED / name)
    subprocess.run(["npm", "install", "--silent", "--no-audit", "--no-fund"], cwd=INSTALLED, check=True)


def configuration(urls: list[str]) -> str:
    """JSON is YAML."""
    return json.dumps(
        {
            "server": {"listen": "127.0.0.1:0", "admin": "127.0.0.1:0"},
            "pools": {"small": {"backend": "simulated", "model": "qwen3-8b", "endpoints": urls}},
            "routes": {"chat": {"workload": "chat", "tiers": ["small"]}},
            "telemetry": {"access_log": "off"},
        }
    )


async def engines(stack: AsyncExitStack) -> list[str]:
    """Two, as fast as an 8B model on an H100; stopped when the stack closes."""
    encode = encoder("o200k_base").encode
    servers = [
        SimulatedServer(profile_named("8b-h100"), model="qwen3-8b", encode=encode, seed=seed) for seed in range(2)
    ]
    for server in servers:
        await server.start()
        stack.push_async_callback(server.stop)
    return [server.url for server in servers]


@asynccontextmanager
async def gateway(config: Path) -> AsyncIterator[str]:
    """A gateway on a free port: its base URL for SDKs."""
    command = [sys.executable, "-m", "gateway.cli", "serve", "--config", str(config)]
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stderr=asyncio.subprocess.PIPE)
    try:
        assert process.stderr is not None
        async with asyncio.timeout(STARTS_WITHIN):
            base_url = await _base_url(process.stderr)
        yield base_url
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def _base_url(stderr: asyncio.StreamReader) -> str:
    said = ""
    while line := (await stderr.readline()).decode():
        said += line
        if match := SERVING.search(line):
            return match[1]
    raise SystemExit(f"the gateway did not start:\n{said}")


async def main() -> int:
    install()
    async with AsyncExitStack() as stack:
        config = INSTALLED / "gateway.yaml"
        config.write_text(configuration(await engines(stack)), "utf-8")
        base_url = await stack.enter_async_context(gateway(config))
        environment = {**os.environ, "BASE_URL": base_url, "MODEL": "chat"}
        node = await asyncio.create_subprocess_exec("npm", "test", "--silent", cwd=INSTALLED, env=environment)
        return await node.wait()


if __name__ == "__main__":
    if missing := [tool for tool in ("node", "npm") if shutil.which(tool) is None]:
        sys.exit(f"{' and '.join(missing)} not found; install Node.js 20 or newer")
    sys.exit(asyncio.run(main()))
