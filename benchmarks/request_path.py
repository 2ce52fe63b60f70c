"""Counts the product files entered by one small streamed request: `python -m benchmarks.request_path`.

A gateway runs in this process, a simulated engine in another. After WARM_UP requests, which warm every cache and end
the cold start of the engine's predictor, RECORDED streamed chat completions of eight tokens are recorded by
`sys.setprofile`: each call of a Python function of `gateway`, `policies` or `backends` counts, including calls by
timers meanwhile. A move is a call into another file than the call before. Reads of the socket and timers fall
differently: the request with the median of calls is shown, and the calls of the read that ends its answer. `--list`
prints its calls by folder, and the files in order of first entry.
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
WARM_UP = 40  # requests: from MATURE_SAMPLES first tokens on, an endpoint learns in batches
RECORDED = 9  # requests
PAUSE = 0.3  # s in which work after the end of a request is done, before the next is recorded
LINGER = 0.05  # s after the end of a request that are recorded with it
Call = tuple[str, int, str]  # file, depth below the loop, and function
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


async def record(engine: str) -> list[list[Call]]:
    """The calls of some requests."""
    gateway = Gateway(configuration(engine))
    await gateway.start()
    try:
        for _ in range(WARM_UP):
            await ask(gateway.url)
        return [await recorded(gateway.url) for _ in range(RECORDED)]
    finally:
        await gateway.stop()


async def recorded(url: str) -> list[Call]:
    calls: list[Call] = []

    def on_event(frame: FrameType, event: str, _argument: Any) -> None:
        if event == "call" and (path := frame.f_code.co_filename).startswith(PACKAGES):
            calls.append((path.removeprefix(f"{ROOT}/"), depth(frame), frame.f_code.co_qualname))

    await asyncio.sleep(PAUSE)
    sys.setprofile(on_event)
    await ask(url)
    await asyncio.sleep(LINGER)
    sys.setprofile(None)
    return calls


def depth(frame: FrameType) -> int:
    """Calls of the product around this one."""
    found, around = 0, frame.f_back
    while around is not None:
        found += around.f_code.co_filename.startswith(PACKAGES)
        around = around.f_back
    return found


def last_read(calls: list[Call]) -> int:
    """Calls within the read that ends the answer."""
    end = max(place for place, call in enumerate(calls) if call[2] == "Answer.end")
    begin = max(place for place in range(end) if calls[place][1] == 0)
    return next((place for place in range(end, len(calls)) if calls[place][1] == 0), len(calls)) - begin


def report(requests: list[list[Call]], everything: bool) -> Iterable[str]:
    calls = sorted(requests, key=len)[len(requests) // 2]
    paths = [path for path, _, _ in calls]
    counts = Counter(paths)
    moves = sum(before != after for before, after in pairwise(paths))
    yield f"{len(counts)} files, {len(calls)} calls, {moves} moves; {last_read(calls)} calls in the answer's last read"
    if everything:
        folders = Counter(path.rpartition("/")[0] for path in paths)
        yield from (f"{calls:5} {folder}/" for folder, calls in folders.most_common())
        yield ""
        yield from (f"{counts[path]:5} {path}" for path in dict.fromkeys(paths))


def measured() -> list[list[Call]]:
    """The calls of some requests to a gateway before a simulated engine."""
    command = [sys.executable, "-m", "lab", "simulate", "--profile", "8b-h100", "--port", "0", "--model", "m"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            line = process.stderr.readline()
            url = next(word for word in line.replace(",", " ").split() if word.startswith("http://"))
            return asyncio.run(record(url))
        finally:
            process.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="print the folders and files")
    arguments = parser.parse_args()
    print("\n".join(report(measured(), arguments.list)))


if __name__ == "__main__":
    main()
