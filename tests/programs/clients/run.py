"""Runs the checks of clients against a gateway process, in front of a rehearsed engine or of real vLLM engines."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import tempfile
from asyncio.subprocess import DEVNULL, PIPE
from base64 import b64encode
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from gateway.cli.agents.command import asked
from gateway.cli.agents.recipes import AGENTS, GatewayFacts, settings
from tests.programs.clients import vllm_engines, windowed_model
from tests.programs.clients.manifest import FOLDER, Client, node
from tests.programs.clients.rehearsed_model import REASONING, TEXT
from tests.programs.clients.rehearsed_server import RehearsedServer
from tests.support.responses_server import ResponsesServer
from tests.support.served import serving

KEY = "sk-clients-0123456789"
MODEL = "chat"
AGENT = "agent"  # route of coding agents, before an engine of 32k
VLLM = "vllm"  # real engines
KNOWN = ("gpt-4.1-mini", "o4-mini", "text-embedding-3-small")  # LlamaIndex takes no other names: routes may be named so
FAULTS = ("limited", "down", "flaky", "breaks")  # models of the rehearsed engine, and routes
WITHIN = 240.0  # s for all checks of a client
IMAGE = b64encode(
    bytes.fromhex(
        "89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c4890000000d49444154789c6360606060"
        "000000050001a5f645400000000049454e44ae426082"
    )
).decode()


@dataclass(slots=True)
class ClientRun:
    """Results of a client. `failed`, `left_out`: the reason by check; `ended`: the reason of the script's early end."""

    versions: dict[str, str] = field(default_factory=dict)
    passed: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    ended: str = ""

    def green(self, engine: str) -> bool:
        """All checks pass, except for operations unknown to the engine."""
        return bool(self.passed) and self.failed.keys() <= LACKING[engine] and not self.ended

    def read(self, line: str) -> None:
        """Add a line of the script's output; ignore the client's own lines: no JSON objects."""
        try:
            found = json.loads(line)
        except ValueError:
            return
        if not isinstance(found, dict):
            return
        self.versions.update(found.get("versions", {}))
        if "left_out" in found:
            self.left_out[found["check"]] = found["left_out"]
        elif found.get("passed"):
            self.passed.append(found["check"])
        elif "check" in found:
            self.failed[found["check"]] = found["reason"]


ENGINES: Mapping[str, dict[str, Any]] = {  # dialects to which the engine can be limited
    "chat": {"backend": "compatible"},
    "messages": {"backend": "anthropic", "api_key": "sk-engine"},
}
LACKING: Mapping[str, frozenset[str]] = {  # checks of features absent from the dialect: refused by name
    VLLM: frozenset(),
    "chat": frozenset(),
    "messages": frozenset(
        {"completions", "embeddings", "azure: embeddings", "chat: JSON", "compatible: structured output"}
    ),
}


@dataclass(frozen=True, slots=True)
class Behind:
    """Engines of a gateway: a pool for each route, and what they add to the environment of the scripts."""

    pools: Mapping[str, dict[str, Any]]
    settings: Mapping[str, str]


def configuration(pools: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """A route for each pool. JSON is valid YAML."""
    return {
        "server": {"listen": "127.0.0.1:0", "admin": "127.0.0.1:0"},
        "pools": {f"{route}-pool": pool for route, pool in pools.items()},
        "routes": {route: {"tiers": [f"{route}-pool"], "ttft": {"budget": "10s"}} for route in pools},
        "keys": [{"name": "clients", "sha256": hashlib.sha256(KEY.encode()).hexdigest()}],
        "telemetry": {"access_log": "off"},
    }


@asynccontextmanager
async def rehearsed(engine_dialect: str) -> AsyncIterator[Behind]:
    """A rehearsed engine, with a pool for each fault, and two stateful engines."""
    async with AsyncExitStack() as stack:
        engine = RehearsedServer()
        await engine.start()
        stack.push_async_callback(engine.stop)
        stateful = [(await stack.enter_async_context(ResponsesServer(name))).url for name in "ab"]
        served = {
            **ENGINES[engine_dialect],
            "endpoints": [engine.url],
            "capabilities": ["tools", "json_schema", "images"],
        }
        names = {MODEL: "rehearsed", **dict.fromkeys(KNOWN, "rehearsed"), **{name: name for name in FAULTS}}
        pools: dict[str, dict[str, Any]] = {route: {**served, "model": model} for route, model in names.items()}
        pools[AGENT] = {**served, "model": windowed_model.MODEL, "context_window": windowed_model.WINDOW}
        pools["stateful"] = {"backend": "vllm", "model": "stateful", "endpoints": stateful}
        words = {"TEXT_TOKENS": TEXT, "REASONING_TOKENS": REASONING}
        counts = {name: str(len(text.split())) for name, text in words.items()}
        yield Behind(pools, {"ENGINE": engine.url, **counts})


@asynccontextmanager
async def real() -> AsyncIterator[Behind]:
    """Two vLLM engines, of all routes."""
    async with vllm_engines.engines() as servers, vllm_engines.watching(servers) as url:
        pool = vllm_engines.pool(servers)
        pools = dict.fromkeys((MODEL, *KNOWN, AGENT, "stateful"), pool)
        yield Behind(pools, {"ENGINE": url, **vllm_engines.settings(servers)})


@asynccontextmanager
async def gateway(engine: str = "chat") -> AsyncIterator[dict[str, str]]:
    """Run a gateway in front of these engines. Yields the environment of the scripts."""
    async with AsyncExitStack() as stack:
        behind = await stack.enter_async_context(real() if engine == VLLM else rehearsed(engine))
        config = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "gateway.yaml"
        config.write_text(json.dumps(configuration(behind.pools)), "utf-8")
        served = await stack.enter_async_context(serving(config))
        assert served.url, served.first_line
        for pipe in (served.process.stdout, served.process.stderr):
            stack.callback(asyncio.create_task(_drain(pipe)).cancel)
        facts = await asyncio.to_thread(asked, served.url, KEY, AGENT)
        yield environment(served.url) | behind.settings | agent_settings(replace(facts, key=KEY))


async def _drain(pipe: asyncio.StreamReader | None) -> None:
    """A full pipe would stop the gateway."""
    assert pipe is not None
    while await pipe.readline():
        pass


def agent_settings(facts: GatewayFacts) -> dict[str, str]:
    """Settings of all agents, as docs/agents.md shows them: the only ones that their checks use."""
    return {"AGENTS": json.dumps({name: asdict(settings(agent, facts)) for name, agent in AGENTS.items()})}


def environment(gateway_url: str) -> dict[str, str]:
    return {
        "BASE_URL": f"{gateway_url}/v1",
        "API_KEY": KEY,
        "MODEL": MODEL,
        "IMAGE": IMAGE,
        "IMAGE_SEEN": f"I see data:image/png, {len(IMAGE) * 3 // 4 - IMAGE.count('=')} bytes",
        "TEXT": TEXT,
        "REASONING": REASONING,
    }


def prepare(client: Client) -> list[str]:
    """Command for the checks of an installed client. Node resolves imports relative to a file: scripts are copied
    beside the packages."""
    if client.language == "python":
        return [str(client.folder / "bin" / "python"), str(client.source)]
    for source in (client.source, FOLDER / "node" / "harness.mjs"):
        shutil.copyfile(source, client.folder / source.name)
    return [str(node()), str(client.folder / client.script)]


async def run(command: Sequence[str], settings: Mapping[str, str], within: float = WITHIN) -> ClientRun:
    """Run a script of checks. Of this process's environment, the script sees PATH alone."""
    found = ClientRun()
    with tempfile.TemporaryDirectory() as home:
        path = f"{node().parent}{os.pathsep}{os.environ['PATH']}"
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd=home,
            env={"PATH": path, "HOME": home, **settings},
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=PIPE,
        )
        await _read(process, found, within)
    return found


async def _read(process: asyncio.subprocess.Process, found: ClientRun, within: float) -> None:
    try:
        async with asyncio.timeout(within):
            out, err = await process.communicate()
    except TimeoutError:
        process.kill()
        out, err = await process.communicate()
        found.ended = f"not done within {within:g} s"
    for line in out.decode(errors="replace").splitlines():
        found.read(line)
    if process.returncode and not found.ended:
        words = err.decode(errors="replace").strip().splitlines()
        found.ended = f"the script ended with exit code {process.returncode}: {' '.join(words[-3:])}"[:900]
