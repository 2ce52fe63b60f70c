"""Rows 16 to 22: Redis, workers, drains, reloads, the keep-alive race, and disconnecting callers."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from time import monotonic
from typing import Any

import aiohttp

from benchmarks.chaos import FAULTS, HEADING, run_fault
from benchmarks.processes import ROOT, child, free_port
from benchmarks.redis_chaos import Quotas
from tests.programs.chaos.callers import Reply, ask, chat, ms, quantile
from tests.programs.chaos.engine_faults import engine_pool, errors, failed
from tests.programs.chaos.lab import GatewayProcess, Lab, within
from tests.programs.chaos.provider import Provider
from tests.programs.chaos.rows import Result, row
from tests.support.builders import DONE, FINISH, TOKEN, get
from tests.support.gateways import pool
from tests.support.redis import redis_server
from tests.support.upstream import LAST_CHUNK, STREAM_HEAD, chunk

WHOLE = {"stream": False}  # a healthy probe of a non-streaming upstream
CHECK = 0.05  # s between two health checks of a balancer
SERVER_IDLE = 4.0, 0.05  # s after which the upstream of row 21 closes an idle connection, +-


@asynccontextmanager
async def cheap_engine() -> AsyncIterator[str]:
    """An engine of negligible cost; the prompt selects the answer, see benchmarks/engine.py."""
    port = free_port()
    with child([sys.executable, "-m", "benchmarks.engine", str(port)], port):
        yield f"http://127.0.0.1:{port}"


def stream_body(tokens: int, gap: int) -> bytes:
    """`gap`: ms between two tokens."""
    return chat(f"[stream-{tokens}-{gap}]", stream=True)


@row(16, "faults", "Redis killed, frozen, slow, absent", "no failure; p99 +10 ms; memory 1.1, CPU 1.2 times at most")
async def redis_faults(lab: Lab) -> Result:
    """benchmarks/redis_chaos.py, which explains the columns: 50 requests/s, 30 s with and without Redis."""
    lines = [await run_fault(fault, float(lab.size(30, 4)), 50.0, Quotas) for fault in FAULTS]
    table = "\n".join(["### Redis", "", "```", HEADING + "  verdict", *lines, "```"])
    bad = [line.split()[0] for line in lines if not line.endswith("  ok")]
    return Result(f"{len(lines) - len(bad)} of {len(lines)} faults", not bad, ", ".join(bad), table)


@row(17, "faults", "Redis absent at the start, then up", "used within 5 s; overshoot of a quota at most one allowance")
async def redis_appears(lab: Lab) -> Result:
    """A key with 60 requests/min; 100 requests before Redis is there, and 100 after."""
    key = {"name": "k", "sha256": hashlib.sha256(b"sk-chaos").hexdigest(), "requests_per_minute": 60}
    bearer = {"authorization": "Bearer sk-chaos"}
    async with Provider("served") as provider, redis_server(start=False) as redis:
        sections = {"keys": [key], "state": {"redis": redis.url}}
        async with lab.gateway({"only": pool(provider.url)}, check=False, **sections) as gateway:
            before = [await ask(gateway.port, chat(), bearer) for _ in range(100)]
            await redis.start()
            began = monotonic()
            up = await within(30.0, lambda: _redis_up(gateway))
            seconds = monotonic() - began
            after = [await ask(gateway.port, chat(), bearer) for _ in range(100)]
    admitted = sum(r.status == 200 for r in before + after)
    odd = sum(r.status not in (200, 429) for r in before + after)
    figures = f"Redis used after {seconds:.1f} s; {admitted} of 60 admitted within a minute; {odd} other replies"
    return Result(figures, up and seconds <= 5 and 60 <= admitted <= 120 and not odd)


async def _redis_up(gateway: GatewayProcess) -> bool:
    return (await gateway.metrics())["firsttoken_redis_up"] == 1


# --------------------------------------------------------------------------- workers, drains, reloads


def workers_of(gateway: GatewayProcess) -> list[int]:
    children = Path(f"/proc/{gateway.pid}/task/{gateway.pid}/children").read_text()
    return [int(each) for each in children.split()]


@row(18, "faults", "kill -9 of a worker", "only its streams are lost; replaced within 2 s", quick=True)
async def killed_worker(lab: Lab) -> Result:
    """Two workers with 64 streams; a worker is killed. Streams of the other complete, and new callers are served."""
    async with (
        cheap_engine() as url,
        lab.gateway({"only": pool(url)}, arguments=("--workers", "2"), check=False) as gateway,
    ):
        streams = [asyncio.create_task(ask(gateway.port, stream_body(40, 50))) for _ in range(64)]
        await asyncio.sleep(0.7)
        os.kill(workers_of(gateway)[0], signal.SIGKILL)
        began = monotonic()
        during = [await ask(gateway.port, stream_body(2, 1)) for _ in range(20)]
        replaced = await within(5.0, lambda: _says(gateway, "is serving again"))
        seconds = monotonic() - began
        replies = await asyncio.gather(*streams)
    lost = failed(list(replies))
    refused = failed(during)
    figures = f"{len(lost)} of 64 streams lost; replaced after {seconds:.1f} s; {len(refused)} of 20 new callers failed"
    return Result(figures, replaced and seconds <= 2 and 0 < len(lost) < 64 and not refused, errors(refused))


async def _says(gateway: GatewayProcess, text: str) -> bool:
    return text in gateway.stderr


@row(19, "faults", "SIGTERM with 500 streams", "none lost; none refused before a balancer has deregistered")
async def drain(lab: Lab) -> Result:
    """A balancer checks /ready every 50 ms and gives up after two failures; callers keep coming until then."""
    number = lab.size(500, 100)
    async with cheap_engine() as url:
        server = {"drain": {"wait": "1s", "grace": "30s"}}
        async with lab.gateway({"only": pool(url)}, server=server, check=False) as gateway:
            tasks = [asyncio.create_task(ask(gateway.port, stream_body(50, 100))) for _ in range(number)]
            await asyncio.sleep(2.0)
            gateway.process.send_signal(signal.SIGTERM)
            late = await _until_deregistered(gateway)
            replies = await asyncio.gather(*tasks)
            code = await asyncio.wait_for(gateway.process.wait(), 20)
    lost, refused = failed(list(replies)), failed(late)
    figures = (
        f"{len(lost)} of {number} streams lost; {len(refused)} of {len(late)} new callers refused; exit code {code}"
    )
    return Result(figures, not lost and not refused and not code and bool(late), errors(lost or refused))


async def _until_deregistered(gateway: GatewayProcess) -> list[Reply]:
    """Replies to new callers until two health checks in a row have failed."""
    bad, replies = 0, []
    while bad < 2:
        replies.append(await ask(gateway.port, stream_body(2, 1)))
        bad = bad + 1 if (await get(gateway.url, "/ready"))[0] == 503 else 0
        await asyncio.sleep(CHECK)
    return replies


@row(20, "faults", "100 reloads under load; a bad configuration", "no error; the old one stays, exit code not 0")
async def reloads(lab: Lab) -> Result:
    """Ten callers in a loop while the budget and the endpoints change; every fifth file is broken."""
    number, replies, over = lab.size(100, 10), list[Reply](), asyncio.Event()
    async with lab.engines(2) as engines:
        pools = {"both": engine_pool(*(e.url for e in engines))}
        async with lab.gateway(pools) as gateway:
            callers = [asyncio.create_task(_loop(gateway, over, replies)) for _ in range(10)]
            statuses = [await _reload(gateway, i, [e.url for e in engines]) for i in range(number)]
            over.set()
            await asyncio.gather(*callers)
            code = await _serve_broken(gateway.home)
    expected = [400 if i % 5 == 4 else 200 for i in range(number)]
    wrong = sum(a != b for a, b in zip(statuses, expected, strict=True))
    lost = failed(replies)
    figures = f"{len(lost)} of {len(replies)} requests failed; {wrong} of {number} reloads answered wrongly; "
    return Result(f"{figures}exit code of a bad file {code}", not lost and not wrong and code == 2, errors(lost))


async def _loop(gateway: GatewayProcess, over: asyncio.Event, into: list[Reply]) -> None:
    while not over.is_set():
        body = chat(f"{len(into)} hi", stream=len(into) % 2 == 0, max_tokens=8)
        into.append(await ask(gateway.port, body, sent=gateway.sent))


async def _reload(gateway: GatewayProcess, number: int, urls: list[str]) -> int:
    file = gateway.home / "config.yaml"
    good = file.read_text()
    document = json.loads(good)
    document["pools"]["both"]["endpoints"] = urls if number % 2 else urls[:1]
    document["routes"]["chat"]["ttft"] = {"budget": f"{500 + number}ms"}
    file.write_text(json.dumps(document) if number % 5 != 4 else good[: len(good) // 2])
    async with aiohttp.ClientSession() as session, session.post(gateway.admin + "/reload") as reply:
        status = reply.status
    file.write_text(json.dumps(document))
    await asyncio.sleep(0.1)
    return status


async def _serve_broken(home: Path) -> int | None:
    (home / "bad.yaml").write_text("pools: [")
    command = (sys.executable, "-m", "gateway.cli", "serve", "--config", str(home / "bad.yaml"))
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stderr=asyncio.subprocess.DEVNULL)
    return await asyncio.wait_for(process.wait(), 30)


# --------------------------------------------------------------------------- connections


@asynccontextmanager
async def closing_upstream() -> AsyncIterator[str]:
    """Answers whole; closes a connection idle for SERVER_IDLE seconds."""
    reply = b'{"choices":[{"message":{"content":"hi"}}],"usage":{"prompt_tokens":1,"completion_tokens":1}}'
    reply = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(reply), reply)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        middle, spread = SERVER_IDLE
        try:
            while True:
                async with asyncio.timeout(middle + random.uniform(-spread, spread)):
                    head = await reader.readuntil(b"\r\n\r\n")
                found = re.search(rb"content-length: (\d+)", head)
                await reader.readexactly(int(found[1]) if found else 0)
                writer.write(reply)
        except (TimeoutError, OSError, asyncio.IncompleteReadError):
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, backlog=4096)
    yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()


@row(21, "faults", "the keep-alive race", "no error in 10,000 requests")
async def keep_alive_race(lab: Lab) -> Result:
    """The server closes idle connections after 4 s +-50 ms; each caller sends the next request 4 s +-50 ms later."""
    callers, rounds = lab.size(200, 20), lab.size(50, 2)
    replies = list[Reply]()
    async with closing_upstream() as url, lab.gateway({"only": pool(url)}, probe=WHOLE) as gateway:

        async def caller(number: int) -> None:
            for _ in range(rounds):
                replies.append(await ask(gateway.port, chat(f"{number}"), sent=gateway.sent))
                await asyncio.sleep(SERVER_IDLE[0] + random.uniform(-SERVER_IDLE[1], SERVER_IDLE[1]))

        await asyncio.gather(*(caller(number) for number in range(callers)))
        metrics = await gateway.metrics()
    lost = failed(replies)
    attempts = metrics["firsttoken_attempts_total"]
    figures = f"{len(lost)} of {len(replies)} failed; {attempts - len(replies):.0f} attempts repeated unseen"
    return Result(figures, not lost, errors(lost))


class Witness:
    """Streams slowly, and notes the time at which the connection of a request is closed. The prompt identifies a
    request."""

    def __init__(self) -> None:
        self.opened: set[str] = set()
        self.answered: set[str] = set()
        self.closed_at: dict[str, float] = {}
        self.url = ""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Witness]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=4096)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield self
        server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        name = ""
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
                body = json.loads(await reader.readexactly(int(_header(head, "content-length") or 0)))
                name = body["messages"][0]["content"]
                self.opened.add(name)
                await self._answer(reader, writer, body)
                self.answered.add(name)
                name = ""
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            if name:
                self.closed_at[name] = monotonic()
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        """First token after 0.15 s, an end after 0.4 s; raises when the peer leaves."""
        await self._wait(reader, 0.15)
        if body.get("stream"):
            writer.write(STREAM_HEAD + chunk(TOKEN))
        await self._wait(reader, 0.25)
        whole = b'{"choices":[{"message":{"content":"hi"}}]}'
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(whole)
        writer.write(chunk(FINISH + DONE) + LAST_CHUNK if body.get("stream") else head + whole)

    async def _wait(self, reader: asyncio.StreamReader, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await reader.readexactly(1)
        except TimeoutError:
            return
        raise ConnectionResetError


def _header(head: str, name: str) -> str:
    found = re.search(rf"^{name}: *(.*)\r$", head, re.MULTILINE)
    return found[1] if found else ""


@row(22, "faults", "callers that leave at any moment", "closed upstream within 200 ms p99; gauges at zero")
async def leaving_callers(lab: Lab) -> Result:
    """Callers disconnect after 0 to 450 ms: before, during and after the answer; streams and whole answers."""
    number, at_once = lab.size(10_000, 300), 30
    witness, left = Witness(), dict[str, float]()
    gate, rng = asyncio.Semaphore(at_once), random.Random(22)
    async with witness.serving(), lab.gateway({"only": pool(witness.url)}) as gateway:

        async def caller(i: int) -> None:
            async with gate:
                name = f"leaves-{i}"
                reply = await ask(gateway.port, chat(name, stream=i % 2 == 0), abort_after=rng.uniform(0, 0.45))
                if reply.ended == "aborted":
                    left[name] = reply.ended_at

        await asyncio.gather(*(caller(i) for i in range(number)))
        await asyncio.sleep(1.0)
        metrics = await gateway.metrics()
        flying, ahead = (metrics[f"firsttoken_endpoint_{name}"] for name in ("in_flight", "uncached_tokens_ahead"))
    upstream = witness.opened - witness.answered
    late = [witness.closed_at.get(name, 1e9) - at for name, at in left.items() if name in upstream]
    p99, never = quantile(late, 0.99), sum(each > 1e6 for each in late)
    figures = f"{len(left)} of {number} left early, {len(late)} with a request upstream: closed after {ms(p99)} p99; "
    figures += f"{never} never; in flight {flying:g}, queued tokens {ahead:g}"
    return Result(figures, p99 <= 0.2 and not never and not flying and not ahead)
