"""Counts the product files entered by one small streamed request: `python -m benchmarks.request_path`.

A gateway runs in this process, a simulated engine in another. After a few requests which warm every cache, one streamed
chat completion of eight tokens is recorded by `sys.setprofile`: each call of a Python function of `gateway`, `policies`
or `backends` counts, including calls by timers meanwhile. A move is a call into another file than the call before.
`--list` prints the files with their calls, in order of first entry.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

from gateway.app import Gateway
from gateway.config.models import Config

ROOT = Path(__file__).parents[1]
PACKAGES = tuple(f"{ROOT / package}/" for package in ("gateway", "policies", "backends"))
WARM_UP = 5  # requests
QUESTION = {
    "model": "chat",
    "stream": True,
    "max_tokens": 8,
    "messages": [{"role": "user", "content": "Say something short, please."}],
}


def configuration(engine: str) -> Config:
    """One vLLM pool behind one route, scraped so rarely that no scrape falls into the recorded request."""
    return Config.model_validate(
        {
            "server": {"listen": "127.0.0.1:0", "admin": "127.0.0.1:0"},
            "defaults": {"scrape": "60s"},
            "pools": {"small": {"backend": "vllm", "model": "m", "endpoints": [engine]}},
            "routes": {"chat": {"tiers": ["small"], "ttft": {"budget": "2s"}}},
            "telemetry": {"access_log": "off"},
        }
    )


async def ask(url: str) -> int:
    """Sends one request on a connection of its own; returns the bytes of the reply."""
    host, port = url.removeprefix("http://").split(":")
    body = json.dumps(QUESTION).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\ncontent-length: {len(body)}"
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(head.encode() + b"\r\n\r\n" + body)
    reply = await reader.read(-1)
    writer.close()
    assert reply.startswith(b"HTTP/1.1 200"), reply[:500]
    return len(reply)


async def record(engine: str) -> list[str]:
    """Paths of the product's files in the order of the calls of one request."""
    calls: list[str] = []

    def on_event(frame: FrameType, event: str, _argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGES):
            calls.append(frame.f_code.co_filename.removeprefix(f"{ROOT}/"))

    gateway = Gateway(configuration(engine))
    await gateway.start()
    try:
        for _ in range(WARM_UP):
            await ask(gateway.url)
        await asyncio.sleep(0.3)  # let background work after a request end before the next is recorded
        sys.setprofile(on_event)
        await ask(gateway.url)
        await asyncio.sleep(0.05)
        sys.setprofile(None)
    finally:
        await gateway.stop()
    return calls


def report(calls: list[str], everything: bool) -> Iterable[str]:
    counts = Counter(calls)
    moves = sum(before != after for before, after in pairwise(calls))
    yield f"{len(counts)} files, {len(calls)} calls, {moves} moves"
    if everything:
        yield from (f"{counts[path]:5} {path}" for path in dict.fromkeys(calls))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="print the files")
    arguments = parser.parse_args()
    command = [sys.executable, "-m", "lab", "simulate", "--profile", "8b-h100", "--port", "0", "--model", "m"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            line = process.stderr.readline()
            url = next(word for word in line.replace(",", " ").split() if word.startswith("http://"))
            print("\n".join(report(asyncio.run(record(url)), arguments.list)))
        finally:
            process.terminate()


if __name__ == "__main__":
    main()
