"""CPU of a whole answer, and the time to notice a hang: `python -m benchmarks.whole_answers [ROUTE...]`.

Engines that write a token every GAP ms, streamed or whole as they are asked, behind a gateway in a process of its own.
Rows: a route, its number of endpoints and the tokens of an answer. Columns: CPU of the gateway by answer as the route
asks for it, the same with `upstream_stream: off`, their ratio, the time from the engine's last token to the caller's
last byte, and seconds until an endpoint that took the request and says nothing is left for the next one, with
`first_token: 2s` (`-`: there is no other; `>`: not within HANG s).
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any

import yaml

from benchmarks.processes import child, cpu_seconds, free_port

GAP = 5.0  # ms between two tokens
AT_ONCE, TOKENS = 20, 12_000  # tokens of all answers of a row
HANG = 20.0  # s
HUNG = "[hang]"
ROUTES: dict[str, dict[str, Any]] = {
    "chat": {"workload": "chat"},
    "no promise": {"workload": "chat", "ttft": "off", "tpot": "off", "hedge": "off"},
    "batch": {"workload": "batch"},
}
LENGTHS = (200, 1000)  # tokens


# --------------------------------------------------------------------------- the engine: `whole_answers engine PORT`


def _event(choices: str, more: str = "") -> bytes:
    head = '"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","created":1760000000,"model":"m"'
    return f'data: {{{head},"choices":[{choices}]{more}}}\n\n'.encode()


def _delta(delta: str, finish: str = "null") -> bytes:
    return _event(f'{{"index":0,"delta":{delta},"logprobs":null,"finish_reason":{finish}}}')


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _usage(tokens: int) -> str:
    return f'"usage":{{"prompt_tokens":9,"total_tokens":{9 + tokens},"completion_tokens":{tokens}}}'


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while not reader.at_eof():
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return
        length = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
        body = await reader.readexactly(int(length or 0))
        if not head.startswith(b"POST"):
            writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
            continue
        given = json.loads(body)
        if HUNG in body.decode() and await _is_first(given):
            await asyncio.sleep(3600)
        await _answer(writer, given["max_tokens"], bool(given.get("stream")))


_met: set[str] = set()


async def _is_first(given: dict[str, Any]) -> bool:
    """Of all engines of the process: the first one asked hangs."""
    known = given["messages"][0]["content"] in _met
    _met.add(given["messages"][0]["content"])
    return not known


async def _answer(writer: asyncio.StreamWriter, tokens: int, stream: bool) -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    if stream:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        writer.write(_chunk(_delta('{"role":"assistant","content":""}')))
        token = _chunk(_delta('{"content":" token"}'))
        for number in range(tokens):
            await asyncio.sleep(began + number * GAP / 1e3 - loop.time())
            writer.write(token)
        end = _delta("{}", '"stop"') + _event("", f",{_usage(tokens)}") + b"data: [DONE]\n\n"
        writer.write(_chunk(end) + b"0\r\n\r\n")
        return
    await asyncio.sleep(tokens * GAP / 1e3)
    message = json.dumps({"role": "assistant", "content": " token" * tokens})
    whole = (
        '{"id":"chatcmpl-0123456789abcdef","object":"chat.completion","created":1760000000,"model":"m","choices":'
        f'[{{"index":0,"message":{message},"logprobs":null,"finish_reason":"stop"}}],{_usage(tokens)}}}'
    ).encode()
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(whole))
    writer.write(whole)


async def engine(ports: list[int]) -> None:
    for port in ports:
        await asyncio.start_server(_serve, "127.0.0.1", port)
    await asyncio.Event().wait()


# --------------------------------------------------------------------------- the measurement


@dataclass(frozen=True, slots=True)
class Figures:
    """`cpu`: ms of an answer; `late`: ms from the engine's last token to the caller's last byte."""

    cpu: float
    late: float


def configuration(port: int, engines: list[int], name: str, plain: bool) -> dict[str, Any]:
    route = {**ROUTES[name], "tiers": ["p"], **({"upstream_stream": "off"} if plain else {})}
    urls = [f"http://127.0.0.1:{each}" for each in engines]
    return {
        "server": {"listen": f"127.0.0.1:{port}", "admin": f"127.0.0.1:{free_port()}"},
        "defaults": {"first_token": "2s"},
        "pools": {"p": {"backend": "vllm", "model": "m", "endpoints": urls}},
        "routes": {"chat": route},
        "telemetry": {"access_log": "off"},
    }


@contextmanager
def gateway(engines: list[int], name: str, plain: bool) -> Iterator[tuple[int, int]]:
    """Port and process id."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        file, port = Path(folder, "bench.yaml"), free_port()
        file.write_text(yaml.safe_dump(configuration(port, engines, name, plain)))
        command = [sys.executable, "-m", "gateway.cli", "serve", "--config", str(file)]
        yield port, stack.enter_context(child(command, port, quiet=True))


async def ask(port: int, prompt: str, tokens: int) -> None:
    given = {"model": "chat", "max_tokens": tokens, "messages": [{"role": "user", "content": prompt}]}
    body = json.dumps(given).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    reply = await reader.read(-1)
    writer.close()
    assert reply.startswith(b"HTTP/1.1 200"), reply[:300]
    assert reply.count(b" token") == tokens


async def cost(port: int, pid: int, tokens: int) -> Figures:
    answers = TOKENS // tokens
    left, late = iter(range(answers)), list[float]()

    async def caller() -> None:
        for number in left:
            began = monotonic()
            await ask(port, f"question {number}", tokens)
            late.append((monotonic() - began) * 1e3 - tokens * GAP)

    await asyncio.gather(*(ask(port, "warm up", 8) for _ in range(AT_ONCE)))
    idle, began = cpu_seconds(pid), monotonic()
    await asyncio.sleep(2.0)
    idle = (cpu_seconds(pid) - idle) / (monotonic() - began)
    before, began = cpu_seconds(pid), monotonic()
    await asyncio.gather(*(caller() for _ in range(AT_ONCE)))
    await asyncio.sleep(0.2)  # Records are written
    used = cpu_seconds(pid) - before - idle * (monotonic() - began)
    return Figures(used / answers * 1e3, median(late))


async def notice(port: int) -> str:
    began = monotonic()
    try:
        async with asyncio.timeout(HANG):
            await ask(port, f"{HUNG} {began}", 8)
    except TimeoutError:
        return f">{HANG:.0f}"
    return f"{monotonic() - began:.1f}"


async def row(name: str, count: int, tokens: int, engines: list[int]) -> str:
    found = {}
    hang = "-"
    for plain in (False, True):
        with gateway(engines[:count], name, plain) as (port, pid):
            found[plain] = await cost(port, pid, tokens)
            if not plain and count > 1 and tokens == LENGTHS[0]:
                hang = await notice(port)
    ours, whole = found[False], found[True]
    return (
        f"{name:<11}{count:>3}{tokens:>7}{ours.cpu:>9.2f}{whole.cpu:>9.2f}{ours.cpu / whole.cpu:>7.1f}"
        f"{ours.late:>9.0f}{whole.late:>7.0f}{hang:>7}"
    )


async def main(names: list[str]) -> None:
    engines = [free_port() for _ in range(4)]
    with child([sys.executable, "-m", "benchmarks.whole_answers", "engine", *map(str, engines)], engines[-1]):
        print("route      ends tokens   cpu ms plain ms  ratio  late ms  plain hang s")
        for name in names:
            for count in (1, 4):
                for tokens in LENGTHS:
                    print(await row(name, count, tokens, engines), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["engine"]:
        asyncio.run(engine([int(port) for port in sys.argv[2:]]))
    else:
        asyncio.run(main(sys.argv[1:] or [*ROUTES]))
