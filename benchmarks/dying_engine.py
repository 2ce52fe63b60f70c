"""Death of an engine under many long streams.

    python -m benchmarks.dying_engine [STREAMS [TOKENS]] [--paced] [--profile]

A gateway with `rescue: on` before two tiers of one engine each; the second is PEERS endpoints by its addresses. STREAMS
streams (1,000) have TOKENS tokens (6,000) when the first engine is killed: all its connections are reset at once. It
writes these tokens as fast as they are read. This saturates the gateway: each turn of its loop reads all streams, and
the stalls before the death are such turns. With `--paced` it writes BATCH tokens to a stream every PACE s, as a fast
engine does. From then on it writes a token every TRICKLE s: a silent stream would be left before. The second engine
checks the text that it is sent, byte for byte, counts its tokens (/tokenize), and writes REST tokens more, at the same
pace; asked anew, it writes all. Gateway, engines and callers have a process each.

Printed:

- Longest stalls of the gateway's event loop, ms: lateness of a timer of 1 ms, while the tokens pass and from the death
  on. `cpu`: CPU time of the loop within the stall; the rest is a wait for a core, which other processes have taken.
- Resident memory of the gateway, MB: idle, at the death, and the peak after it.
- Answers: whole, where the caller has every token of both engines once, in order, a finish_reason and the usage of all.

`--profile` adds where the loop was in stalls above LIMIT: a stack for each SAMPLE, which makes stalls longer.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import struct
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from heapq import heappush, heappushpop
from pathlib import Path
from time import monotonic, thread_time
from types import FrameType
from typing import Any

import uvloop

from benchmarks import engine
from benchmarks.client import HOST
from benchmarks.engine import HEAD, ROLE, event, framed, whole
from benchmarks.processes import ROOT, child, free_port, resident
from gateway.app import Gateway
from gateway.config.models import Config
from gateway.process import loop_factory, raise_file_limit, tune_gc

STREAMS, TOKENS = 1_000, 6_000
TRICKLE = 0.5  # s between two tokens of a stream that waits for the death
LATER = 1_000  # tokens of such a stream, at most
REST = 5  # tokens of the second engine
PEERS = 64  # addresses of the second engine, each an endpoint
PROMPT_TOKENS = 10
BATCH = 20  # tokens in a write of the first engine
PACE = 0.25  # s between two writes to a stream, where it is paced: 80 tokens/s
LIMIT = 0.02  # s: the longest stall wanted
LAST = 1_000  # bytes at the end of an answer: finish_reason, usage, [DONE]
TICK = 0.001  # s
SAMPLE = 0.002  # s
SHOWN = 5  # stalls
PATIENCE = 600.0  # s for all tokens of the first engine, and for all answers
MODEL = "bench"
WORD_SIZE = 7  # bytes
WORD = re.compile(rb'"content":"w(\d{5}) "')


def word(number: int) -> bytes:
    return b"w%05d " % number


# -- the engines ---------------------------------------------------------------------------


class Script(engine.Connection):
    """A stream of `tokens` tokens and a few more, or the rest of such an answer."""

    tokens = TOKENS
    pace = 0.0  # s
    events: Sequence[bytes] = ()
    text = ""

    @classmethod
    def prepare(cls, tokens: int, pace: float) -> None:
        cls.tokens, cls.pace, numbers = tokens, pace, range(tokens + LATER + REST)
        cls.events = [event(b'{"content":"%b"}' % word(number)) for number in numbers]
        cls.text = b"".join(map(word, numbers)).decode()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # reset at the end of the process
        self.known = self.written = 0  # tokens: given with the request; written after these
        self.end = len(self.events)
        self.paused = False

    def on_message_complete(self) -> None:
        if self.path == b"/tokenize":
            self.count(json.loads(b"".join(self.parts)))
        elif self.path == b"/v1/chat/completions":
            self.chat(json.loads(b"".join(self.parts)))
        else:
            super().on_message_complete()

    def count(self, asked: dict[str, Any]) -> None:
        tokens = PROMPT_TOKENS if "messages" in asked else asked["prompt"].count("w")
        self.transport.write(whole(b'{"count":%d}' % tokens))

    def chat(self, asked: dict[str, Any]) -> None:
        given = asked["messages"][-1]["content"] if asked.get("continue_final_message") else ""
        known = given.count("w")
        if given.rstrip() != self.text[: known * WORD_SIZE].rstrip():
            self.transport.write(whole(b'{"error":{"message":"not the text"}}').replace(b"200 OK", b"400 Bad Request"))
            return
        self.known, self.written, self.end = known, 0, known + REST if given else len(self.events)
        self.transport.write(HEAD + ROLE)
        self.write()

    def write(self) -> None:
        """A write in a turn of the loop, or at the pace: all streams advance together."""
        if self.paused or self.transport.is_closing():
            return
        at = self.known + self.written
        size = BATCH if at < self.tokens else 1
        self.transport.write(b"".join(self.events[at : at + size]))
        self.written += size
        if at + size < self.tokens:
            self.timer = self.loop.call_later(self.pace, self.write)
        elif at + size < self.end:
            self.timer = self.loop.call_later(TRICKLE, self.write)
        else:
            self.transport.write(ending(self.known, self.written))

    def pause_writing(self) -> None:
        self.paused = True
        if self.timer is not None:
            self.timer.cancel()

    def resume_writing(self) -> None:
        self.paused = False
        self.timer = self.loop.call_later(self.pace, self.write)


def ending(known: int, written: int) -> bytes:
    """Usage as vLLM counts it: a text that was given is of the prompt."""
    prompt = PROMPT_TOKENS + known
    usage = b'"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}' % (
        (prompt, written, prompt + written)
    )
    last = b'data: {"id":"x","object":"chat.completion.chunk","created":1,"model":"m","choices":[],%b}\n\n' % usage
    return event(b"{}", b'"stop"') + framed(last) + framed(b"data: [DONE]\n\n") + b"0\r\n\r\n"


async def serve_engine(port: int, tokens: int, pace: float) -> None:
    raise_file_limit()
    Script.prepare(tokens, pace)
    server = await asyncio.get_running_loop().create_server(Script, "0.0.0.0", port, backlog=4096)
    await server.serve_forever()


# -- the gateway ---------------------------------------------------------------------------


def configuration(port: int, engines: Sequence[int]) -> dict[str, Any]:
    tiers = [f"tier{number}" for number in range(len(engines))]
    return {
        "server": {"listen": f"{HOST}:{port}", "admin": f"{HOST}:0"},
        "pools": {
            tier: {
                "backend": "vllm",
                "model": MODEL,
                "endpoints": [f"http://127.0.0.{n + 1}:{engine}" for n in range(each)],
            }
            for tier, engine, each in zip(tiers, engines, (1, PEERS), strict=True)
        },
        "routes": {MODEL: {"tiers": tiers, "rescue": "on", "workload": "batch"}},
        "defaults": {"stream_idle": f"{PATIENCE:g}s"},
        "telemetry": {"access_log": "off"},
    }


class Ticker:
    """Measures stalls of the loop. SIGUSR1 writes the longest ones to `path`, and starts anew."""

    def __init__(self, path: Path, profiled: bool) -> None:
        self.path = path
        self.longest: list[tuple[float, float]] = []  # lateness and CPU time of the loop in it, s; a heap
        self.stacks: Counter[tuple[str, ...]] = Counter()  # samples in stalls
        self.sampled: list[tuple[str, ...]] = []  # since the last tick
        self.profiled = profiled

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.due, self.cpu = monotonic(), thread_time()
        loop.add_signal_handler(signal.SIGUSR1, self.write)
        if self.profiled:
            signal.signal(signal.SIGALRM, self.sample)
            signal.setitimer(signal.ITIMER_REAL, SAMPLE, SAMPLE)
        self.tick()

    def tick(self) -> None:
        now, cpu = monotonic(), thread_time()
        stall = now - self.due, cpu - self.cpu
        (heappush if len(self.longest) < SHOWN else heappushpop)(self.longest, stall)
        if stall[0] > LIMIT:
            self.stacks.update(self.sampled)
        self.sampled.clear()
        self.due, self.cpu = now + TICK, cpu
        self.loop.call_later(TICK, self.tick)

    def sample(self, _signal: int, frame: FrameType | None) -> None:
        stack = []
        while frame is not None:
            stack.append(f"{os.path.relpath(frame.f_code.co_filename, ROOT)}:{frame.f_code.co_qualname}")
            frame = frame.f_back
        self.sampled.append(tuple(stack))

    def write(self) -> None:
        ready = self.path.with_suffix(".ready")
        found = {"stalls": sorted(self.longest, reverse=True), "stacks": self.stacks.most_common()}
        ready.write_text(json.dumps(found))
        ready.replace(self.path)
        self.longest, self.stacks = [], Counter()
        self.due = monotonic() + TICK  # writing is no stall


async def serve_gateway(path: Path, profiled: bool, port: int, *engines: int) -> None:
    gateway = Gateway(Config.model_validate(configuration(port, engines)))
    await gateway.start(tune_gc)
    Ticker(path, profiled).start(asyncio.get_running_loop())
    await asyncio.Event().wait()


# -- the callers ---------------------------------------------------------------------------


class Caller(asyncio.Protocol):
    """One answer, of which the numbers of its tokens are read alone. `wanted`: the numbers, in order."""

    wanted: Sequence[bytes] = ()

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens  # of the first engine
        self.received = 0
        self.reached: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()  # empty: whole; else the reason
        self.tail = self.last = b""  # the begun event, and the end of all before

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": "count"}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": 2 * len(self.wanted),
        }
        raw = json.dumps(body).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        self.transport.write(f"{head}content-length: {len(raw)}\r\n\r\n".encode() + raw)

    def data_received(self, data: bytes) -> None:
        whole_events, _, self.tail = (self.tail + data).rpartition(b"\n\n")
        found = WORD.findall(whole_events)
        if found != self.wanted[self.received : self.received + len(found)]:
            return self.end(f"a token is missing or twice, after {self.received}")
        self.received += len(found)
        if self.received >= self.tokens and not self.reached.done():
            self.reached.set_result(None)
        self.last = (self.last + whole_events)[-LAST:]
        if whole_events.endswith(b"[DONE]"):
            self.end(self.shortcoming())
        return None

    def shortcoming(self) -> str:
        if self.received < self.tokens + REST:
            return f"{self.received} tokens"
        usage = b'"completion_tokens":%d' % self.received
        ended = usage in self.last and b'"finish_reason":"stop"' in self.last
        return "" if ended else f"other usage: {self.last[-300:]!r}"

    def connection_lost(self, exc: Exception | None) -> None:
        self.end(f"closed after {self.received} tokens")

    def end(self, reason: str) -> None:
        for future in (self.reached, self.ended):
            if not future.done():
                future.set_result(reason if future is self.ended else None)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Measured:
    """Stalls are (lateness, CPU), s; sizes bytes; `ends`: reasons of answers that are not whole, empty: whole."""

    before: Sequence[Sequence[float]]
    after: Sequence[Sequence[float]]
    sizes: Sequence[int]
    ends: Sequence[str]
    seconds: tuple[float, float]
    stacks: Sequence[tuple[Sequence[str], int]]

    @property
    def longest(self) -> float:
        """s"""
        return self.after[0][0]


async def play(streams: int, tokens: int, port: int, gateway: int, dying: int, ticks: Path) -> Measured:
    raise_file_limit()
    loop = asyncio.get_running_loop()
    Caller.wanted = [b"%05d" % number for number in range(tokens + LATER + REST)]
    idle, began = resident(gateway), monotonic()
    callers = [(await loop.create_connection(lambda: Caller(tokens), HOST, port))[1] for _ in range(streams)]
    await asyncio.wait_for(asyncio.gather(*(caller.reached for caller in callers)), PATIENCE)
    await asyncio.sleep(1.0)
    before, held, reached = await stalls(gateway, ticks), resident(gateway), monotonic()
    begin_peak(gateway)
    os.kill(dying, signal.SIGKILL)
    ends = await asyncio.wait_for(asyncio.gather(*(caller.ended for caller in callers)), PATIENCE)
    ended = monotonic()
    await asyncio.sleep(1.0)
    after = await stalls(gateway, ticks)
    seconds = reached - began, ended - reached
    sizes = idle, held, peak(gateway)
    return Measured(before["stalls"], after["stalls"], sizes, ends, seconds, after["stacks"])


async def stalls(gateway: int, path: Path) -> dict[str, Any]:
    """What the ticker has found since the last call."""
    os.kill(gateway, signal.SIGUSR1)
    async with asyncio.timeout(30):
        while not os.path.exists(path):  # noqa: ASYNC110, ASYNC240
            await asyncio.sleep(0.01)
    return taken(path)


def taken(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    path.unlink()
    return found


def begin_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def peak(pid: int) -> int:
    """Bytes, since `begin_peak`."""
    return int(Path(f"/proc/{pid}/status").read_text().partition("VmHWM:")[2].split()[0]) * 1024


def measure(streams: int, tokens: int, pace: float, profiled: bool) -> Measured:
    module = [sys.executable, "-m", "benchmarks.dying_engine"]
    with tempfile.TemporaryDirectory() as home, ExitStack() as stack:
        ticks, ports = Path(home) / "ticks", [free_port() for _ in range(3)]
        script = [str(tokens), str(pace)]
        pids = [stack.enter_context(child([*module, "engine", str(port), *script], port)) for port in ports[1:]]
        options = [str(ticks), str(int(profiled)), *map(str, ports)]
        gateway = stack.enter_context(child([*module, "gateway", *options], ports[0], quiet=True))
        return uvloop.run(play(streams, tokens, ports[0], gateway, pids[0], ticks))


def report(found: Measured) -> str:
    lines = []
    for name, longest in (("tokens pass", found.before), ("from the death on", found.after)):
        each = ", ".join(f"{late * 1e3:.0f} (cpu {cpu * 1e3:.0f})" for late, cpu in longest)
        lines.append(f"longest stalls, ms, {name}: {each}")
    idle, held, most = (size / 1e6 for size in found.sizes)
    lines.append(f"memory, MB: idle {idle:.0f}, at the death {held:.0f}, peak after it {most:.0f}")
    bad = Counter(filter(None, found.ends))
    lines.append(f"answers: {len(found.ends) - bad.total()} of {len(found.ends)} whole {dict(bad) or ''}")
    lines.append(f"seconds: {found.seconds[0]:.1f} to the death, {found.seconds[1]:.1f} from it to the last answer")
    return "\n".join(lines)


def profile(found: Measured) -> str:
    """Shares of the samples in stalls: by function with all that it calls, and by the innermost function."""
    total = sum(count for _, count in found.stacks) or 1
    inner, outer = Counter[str](), Counter[str]()
    for stack, count in found.stacks:
        inner[stack[0]] += count
        for name in set(stack):
            outer[name] += count
    lines = [f"{total} samples in stalls above {LIMIT * 1e3:g} ms"]
    for title, counts in (("own", inner), ("with all that it calls", outer)):
        lines += [f"-- {title}", *(f"{count / total:6.1%} {name}" for name, count in counts.most_common(40))]
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    match arguments:
        case ["engine", port, tokens, pace]:
            uvloop.run(serve_engine(int(port), int(tokens), float(pace)))
        case ["gateway", path, profiled, *ports]:
            raise_file_limit()
            with asyncio.Runner(loop_factory=loop_factory()) as runner:
                runner.run(serve_gateway(Path(path), profiled == "1", *map(int, ports)))
        case _:
            given = [int(each) for each in arguments if not each.startswith("--")]
            pace = PACE if "--paced" in arguments else 0.0
            numbers = [*given, *(STREAMS, TOKENS)[len(given) :]]
            found = measure(numbers[0], numbers[1], pace, "--profile" in arguments)
            print(report(found))
            if "--profile" in arguments:
                print(profile(found))
            return 0 if found.longest <= LIMIT and not any(found.ends) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
