"""What one caller's key costs all others: `python -m benchmarks.one_caller [SECONDS [ROW...]]`.

A modest key asks for a small chat every 20 ms, in an open loop, through a gateway of one process. Meanwhile another key
does the worst that a row names, in a process of its own. The rows give the latency of the modest key's answers in ms,
what the other key was answered, and the memory of the gateway. `quiet` is the modest key alone. Processes share the
cores of the machine: compare rows of one run.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from time import perf_counter
from typing import Any

from benchmarks.client import HOST, KEY, BadAnswer, Connection, connect, request
from benchmarks.processes import child, free_port, resident
from gateway.config.models import Config
from gateway.serve import serve

SECONDS, WARM_UP, PACE = 6.0, 1.0, 0.02  # s
LARGE = 12_000_000  # bytes of body
STORED = 43_000_000  # bytes of a stored response
GREEDY, CAPPED = "sk-greedy-0123456789abcdef", "sk-capped-0123456789abcdef"
USER = '{"role":"user","content":"x"}'
CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"


# --------------------------------------------------------------------------- what the other key does


@dataclass(frozen=True)
class Row:
    """`body`: sent to `path` in a loop by each of `senders`; None: read the stored response in a loop."""

    name: str
    body: Callable[[], str] | None = None
    path: str = CHAT
    key: str = GREEDY
    senders: int = 1


def filled(element: str, size: int = LARGE) -> str:
    """So many equal elements that they have `size` bytes."""
    return ",".join([element] * (size // (len(element) + 1)))


def chat(more: str = "", messages: str = USER) -> str:
    return f'{{"model":"bench","max_tokens":9,"messages":[{messages}]{more}}}'


ROWS = (
    Row("stop: 3 M strings", lambda: chat(f',"stop":[{filled(json.dumps("x"))}]')),
    Row("1 M members", lambda: chat("," + ",".join(f'"k{i}":1' for i in range(1_000_000)))),
    Row("400,000 messages", lambda: chat(messages=filled(USER))),
    Row("parts", lambda: chat(messages=f'{{"role":"user","content":[{filled(json.dumps({"type": "text"}))}]}}')),
    Row("Responses items", lambda: f'{{"model":"kept","input":[{filled(USER)}]}}', RESPONSES),
    Row("60 KB of arrays", lambda: chat(f',"stop":[{filled("[]", 60_000)}]')),
    Row("20,000 messages", lambda: chat(messages=filled(USER, 590_000))),
    Row("20,000 Responses items", lambda: f'{{"model":"kept","input":[{filled(USER, 590_000)}]}}', RESPONSES),
    Row("250,000 numbers", lambda: chat(f',"ids":[{filled("12345", 1_500_000)}]')),
    Row("12 MB of text", lambda: chat(messages=json.dumps({"role": "user", "content": "one, two; " * 1_200_000}))),
    Row("28 MB above the quota", lambda: chat(messages=filled(USER, 28_000_000)), key=CAPPED),
    Row("stored response", senders=6),
)


def head(method: str, path: str, key: str, size: int = 0) -> bytes:
    return (
        f"{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"authorization: Bearer {key}\r\ncontent-length: {size}\r\n\r\n"
    ).encode()


async def exchange(port: int, asked: bytes) -> tuple[int, bytes]:
    """Status and body. A reply that comes before all is sent ends the sending."""
    reader, writer = await asyncio.open_connection(HOST, port, limit=1 << 20)
    try:
        writer.write(asked)
        status = int((await reader.readline()).split()[1])
        length = 0
        while line := (await reader.readline()).strip().lower():
            name, _, value = line.partition(b":")
            length = int(value) if name == b"content-length" else length
        return status, await reader.readexactly(length)
    finally:
        writer.transport.abort()


async def send_forever(row: Row, port: int, seen: Counter[str]) -> None:
    if row.body is None:
        created = json.dumps({"model": "kept", "input": "x"}).encode()
        _, body = await exchange(port, head("POST", RESPONSES, row.key, len(created)) + created)
        asked = head("GET", f"{RESPONSES}/{json.loads(body)['id']}", row.key)
    else:
        body = row.body().encode()
        asked = head("POST", row.path, row.key, len(body)) + body
    while True:
        try:
            status, _ = await exchange(port, asked)
            seen[str(status)] += 1
        except (OSError, asyncio.IncompleteReadError, IndexError):
            seen["reset"] += 1


async def attack(row: Row, port: int) -> None:
    """Send until terminated, with counts of statuses to stdout each second.

    Takes only the CPU that other processes leave, as if on another machine.
    """
    os.nice(19)
    seen: Counter[str] = Counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(row.senders):
            group.create_task(send_forever(row, port, seen))
        while True:
            await asyncio.sleep(1.0)
            print(json.dumps(seen), flush=True)


# --------------------------------------------------------------------------- the modest key


async def ask_at_pace(port: int, seconds: float) -> list[float]:
    """Seconds from the due time of each request to the end of its answer."""
    asked, free, took = request("whole", ["hi"]), list[Connection](), list[float]()

    async def one(due: float) -> None:
        connection = free.pop() if free else await connect(port)
        try:
            await connection.ask(asked)
            free.append(connection)
        except BadAnswer:
            connection.disconnect()
            print("  the modest key was refused", flush=True)
        took.append(perf_counter() - due)

    began = perf_counter()
    async with asyncio.TaskGroup() as group:
        for n in range(int(seconds / PACE)):
            due = began + n * PACE
            await asyncio.sleep(max(due - perf_counter(), 0.0))
            group.create_task(one(due))
    for connection in free:
        connection.disconnect()
    return took


async def measure(row: Row | None, port: int, seconds: float) -> tuple[list[float], str]:
    if row is None:
        return await ask_at_pace(port, seconds), ""
    command = [sys.executable, "-m", "benchmarks.one_caller", "--attack", row.name, str(port)]
    attacker = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert attacker.stdout is not None
    try:
        await attacker.stdout.readline()
        took = await ask_at_pace(port, seconds)
    finally:
        with suppress(ProcessLookupError):
            attacker.terminate()
        told, _ = await attacker.communicate()
    last = (told.decode().splitlines() or ["{}"])[-1]
    return took, ", ".join(f"{status}: {count}" for status, count in json.loads(last).items())


def shown(name: str, took: Sequence[float], answered: str, memory: int) -> str:
    p50, p99, most = (sorted(took)[min(int(len(took) * share), len(took) - 1)] * 1e3 for share in (0.5, 0.99, 1.0))
    return f"{name:24}{p50:8.1f}{p99:9.1f}{most:9.1f}{memory / 1e6:9.0f}  {answered}"


# --------------------------------------------------------------------------- the processes


def gateway_config(port: int, engine: int, store: int) -> dict[str, Any]:
    keys = {"modest": KEY, "greedy": GREEDY, "capped": CAPPED}
    limits = {"capped": {"requests_per_minute": 1}}
    urls = {"engines": engine, "kept": store}
    return {
        "server": {"listen": f"{HOST}:{port}", "admin": f"{HOST}:0"},
        "pools": {
            name: {"backend": "vllm", "model": "bench", "endpoints": [f"http://{HOST}:{at}"]}
            for name, at in urls.items()
        },
        "routes": {  # without a target nothing is shed
            "bench": {"tiers": ["engines"], "workload": "batch"},
            "kept": {"tiers": ["kept"], "workload": "batch"},
        },
        "keys": [
            {"name": name, "sha256": sha256(key.encode()).hexdigest(), **limits.get(name, {})}
            for name, key in keys.items()
        ],
        "telemetry": {"access_log": "off"},
    }


async def keep_one_response(port: int) -> None:
    """A server with one large stored response."""
    small = {"id": "resp_1", "object": "response", "status": "completed", "model": "bench", "output": []}
    item = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "x" * STORED}]}
    replies = {b"POST": json.dumps(small).encode(), b"GET": json.dumps({**small, "output": [item]}).encode()}

    async def serve_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while lines := (await reader.readuntil(b"\r\n\r\n")).lower().split(b"\r\n"):
            length = sum(int(line[15:]) for line in lines if line.startswith(b"content-length:"))
            await reader.readexactly(length)
            is_response = RESPONSES.encode() in lines[0]
            body = replies[lines[0].partition(b" ")[0].upper()] if is_response else b"{}"
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body))
            writer.write(body)
            await writer.drain()

    async def forgiving(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve_one(reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            writer.transport.abort()

    async with await asyncio.start_server(forgiving, HOST, port) as server:
        await server.serve_forever()


def main(seconds: float, names: Sequence[str]) -> None:
    module = [sys.executable, "-m", "benchmarks.one_caller"]
    rows = [None, *(row for row in ROWS if not names or row.name in names)]
    print(f"{'':24}{'p50':>8}{'p99':>9}{'most':>9}{'MB':>9}  what the other key was answered")
    for row in rows:  # a gateway each: none inherits another's memory
        port, engine, store = free_port(), free_port(), free_port()
        with (
            child([sys.executable, "-m", "benchmarks.engine", str(engine)], engine),
            child([*module, "--store", str(store)], store),
            child([*module, "--gateway", *map(str, (port, engine, store))], port, quiet=True) as pid,
        ):
            asyncio.run(ask_at_pace(port, WARM_UP))
            took, answered = asyncio.run(measure(row, port, seconds))
            print(shown("quiet" if row is None else row.name, took, answered, resident(pid)), flush=True)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--attack", name, port]:
            asyncio.run(attack(next(row for row in ROWS if row.name == name), int(port)))
        case ["--store", port]:
            asyncio.run(keep_one_response(int(port)))
        case ["--gateway", *ports]:
            sys.exit(serve(Config.model_validate(gateway_config(*map(int, ports)))))
        case [seconds, *names]:
            main(float(seconds), names)
        case _:
            main(SECONDS, ())
