"""Real vLLM engines behind the gateway of the clients: started here, and what each check finds there."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import time
import urllib.request
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from scripts import vllm_servers
from scripts.vllm_servers import Server
from tests.programs.clients.manifest import ROOT
from tests.programs.clients.rehearsed_model import REASONING, TEXT

MODEL = "rehearsed"
NAMES = "ab"
CONTEXT = 131_072  # tokens
FLAGS = (
    "--logits-processors=tests.programs.clients.rehearsed_logits:RehearsedLogits",
    "--reasoning-parser=qwen3",
    f"--max-model-len={CONTEXT}",
)
FINISHED = ("stop", "length")
LEFT_OUT: Mapping[str, str] = {  # reason by the end of a check's name
    "images": "The model has no vision.",
    "embeddings": "vLLM serves no embeddings of a model that generates text.",
    "error 429": "A real engine has no fault on demand.",
    "error 503": "A real engine has no fault on demand.",
    "error inside a stream": "A real engine has no fault on demand.",
    "retry after a 429": "A real engine has no fault on demand.",
}
LEFT_OUT_OF: Mapping[str, dict[str, str]] = {  # by client
    "claude-code": dict.fromkeys(
        ("a full context window is compacted", "a refused prompt is compacted"),
        "A window of prompts takes minutes on a CPU.",
    ),
    "openai-python": {"responses: delete": "vLLM deletes no response: refused by name."},
    "vercel-ai": {"responses: reasoning": "vLLM gives the reasoning itself; the library reads summaries alone."},
}


@asynccontextmanager
async def engines() -> AsyncIterator[list[Server]]:
    """One for each name, with a store of responses. Raises FileNotFoundError, which names the setup step to run."""
    vllm_servers.ready([MODEL])
    vllm_servers.LOGS.mkdir(parents=True, exist_ok=True)
    cores = sorted(os.sched_getaffinity(0))
    deadline = time.monotonic() + vllm_servers.READY_WITHIN
    started: list[tuple[subprocess.Popen[bytes], Server]] = []
    try:
        for place, name in enumerate(NAMES):
            started.append(_start(name, cores[place % len(cores)]))
        for process, server in started:
            await asyncio.to_thread(vllm_servers.wait_until_healthy, process, server, deadline)
        yield [server for _, server in started]
    finally:
        await asyncio.to_thread(vllm_servers.stop, [process for process, _ in started])


def _start(name: str, core: int) -> tuple[subprocess.Popen[bytes], Server]:
    settings = {
        "FIRSTTOKEN_REHEARSED_NAME": name,
        "PYTHONPATH": str(ROOT),
        "VLLM_ENABLE_RESPONSES_API_STORE": "1",
    }
    return vllm_servers.start(MODEL, f"{MODEL}-{name}", core, *FLAGS, settings=settings)


def pool(servers: list[Server]) -> dict[str, Any]:
    return {
        "backend": "vllm",
        "model": MODEL,
        "endpoints": [
            {"url": server.url, "kv_events": server.kv_events, "kv_replay": server.kv_replay} for server in servers
        ],
        "tokenizer": servers[0].tokenizer,
        "context_window": CONTEXT,
        "capabilities": ["tools", "json_schema"],
    }


def settings(servers: list[Server]) -> dict[str, str]:
    """Tokens of the texts in the engine's count."""
    return {
        "TEXT_TOKENS": str(_count(servers[0], f"<think></think>{TEXT}") + 1),  # and the token at the end
        "REASONING_TOKENS": str(_count(servers[0], REASONING)),
    }


def _count(server: Server, text: str) -> int:
    body = json.dumps({"model": MODEL, "prompt": text, "add_special_tokens": False}).encode()
    request = urllib.request.Request(f"{server.url}/tokenize", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=10) as reply:
        return int(json.load(reply)["count"])


@asynccontextmanager
async def watching(servers: list[Server]) -> AsyncIterator[str]:
    """Serve `/seen` of all engines; yields the URL."""

    async def seen(_: web.Request) -> web.Response:
        found = [await asyncio.to_thread(_seen, server) for server in servers]
        return web.json_response({key: sum(one[key] for one in found) for key in found[0]})

    app = web.Application()
    app.add_routes([web.get("/seen", seen)])
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0]
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


def _seen(server: Server) -> Mapping[str, int]:
    """Requests with a first token, and how many of them neither run nor have finished: from the engine's metrics."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=10) as reply:
        lines = reply.read().decode().splitlines()

    def total(name: str, *labels: str) -> int:
        found = [line for line in lines if line.startswith(name + "{") and all(label in line for label in labels)]
        return int(sum(float(line.rsplit(" ", 1)[1]) for line in found))

    requests = total("vllm:time_to_first_token_seconds_count")
    finished = sum(total("vllm:request_success_total", f'finished_reason="{reason}"') for reason in FINISHED)
    return {"requests": requests, "aborts": requests - finished - total("vllm:num_requests_running")}


def left_out(client: str) -> dict[str, str]:
    """For the environment of a client's script: checks that these engines cannot serve."""
    return {"LEFT_OUT": json.dumps(LEFT_OUT | LEFT_OUT_OF.get(client, {}))}
