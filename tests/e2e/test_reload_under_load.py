"""Reloads under load, with real processes, files and sockets: no request fails.

FIRSTTOKEN_RELOADS sets the number of reloads; 100 take half a minute.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from itertools import cycle
from pathlib import Path
from random import Random

import pytest

from lab.servers.simulated_server import SimulatedServer
from tests.support.builders import CHAT, Caller, calling, post
from tests.support.served import Served, serving
from tests.support.simulated import engines

RELOADS = int(os.environ.get("FIRSTTOKEN_RELOADS", "24"))
CALLERS = 12
RELOAD = b"POST /reload HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n"
MESSAGE = [{"role": "user", "content": "word " * 50}]


def configuration(servers: list[SimulatedServer], number: int) -> str:
    """A different configuration per number: endpoints, budgets, prices, keep-warm, another pool and route."""
    rng = Random(number)
    chosen = rng.sample(servers, rng.randint(1, len(servers)))
    urls, spare = ", ".join(server.url for server in chosen), rng.choice(servers).url
    second = f"  b: {{backend: simulated, model: served, endpoints: [{spare}]}}\n" if number % 3 else ""
    route = f"  talk-{number % 5}: {{tiers: [a]}}\n" if number % 2 else ""
    return (
        "server: {listen: 127.0.0.1:0, admin: 127.0.0.1:0}\n"
        f"pools:\n  a: {{backend: simulated, model: served, endpoints: [{urls}], price: {{input: {number}}}"
        f"{', keep_warm: {idle: 100ms}' if number % 4 == 0 else ''}}}\n{second}"
        f"defaults: {{scrape: {50 + number % 2 * 50}ms, connect: {2 + number % 2}s}}\n"
        f"routes:\n  chat: {{ttft: {{budget: {500 + number * 10}ms}}, tiers: [a{', b' if second else ''}]}}\n{route}"
    )


def broken(text: str, number: int) -> str:
    """Typical editing errors."""
    return (text[: len(text) // 2] + "]", text.replace("tiers: [a", "tiers: [x"), "", text + "\n\tx")[number % 4]


async def request_result(caller: Caller, number: int) -> str:
    """Sends a request; returns `ok`, or the deviation."""
    stream = number % 3 != 0
    body = {**CHAT, "stream": stream, "messages": MESSAGE, "max_tokens": 1 + number % 40}
    if not stream:
        status, _, received = await caller.whole(post(body))
        return "ok" if status == 200 and json.loads(received)["choices"] else f"{status} {received!r}"
    status, headers = await caller.ask(post(body))
    if status != 200:
        return f"{status} {await caller.body(headers)!r}"
    received = b"".join(await caller.chunks())
    return "ok" if received.endswith(b"data: [DONE]\n\n") and b'"error"' not in received else repr(received[-200:])


async def run_caller(served: Served, number: int, over: asyncio.Event, ends: Counter[str]) -> None:
    """A caller, with a new connection for every request."""
    while not over.is_set():
        async with calling(served.url) as caller:
            for turn in range(5):
                try:
                    ends[await request_result(caller, number + turn)] += 1
                except (OSError, asyncio.IncompleteReadError) as error:
                    ends[type(error).__name__] += 1
                    break


async def reload(served: Served) -> int:
    async with calling(served.admin) as caller:
        return (await caller.whole(RELOAD))[0]


@pytest.mark.parametrize("workers", ["1", "2"])
async def test_reloads_under_load_fail_no_request(workers: str, tmp_path: Path) -> None:
    """Valid and invalid files in turn, endpoints removed and added."""
    file, ends, over = tmp_path / "f.yaml", Counter[str](), asyncio.Event()
    async with engines(4) as servers:
        file.write_text(configuration(servers, 0))
        async with serving(file, "--workers", workers) as served:
            callers = [asyncio.create_task(run_caller(served, number, over, ends)) for number in range(CALLERS)]
            for number, bad in zip(range(1, RELOADS + 1), cycle([False, True, False]), strict=False):
                text = configuration(servers, number)
                file.write_text(broken(text, number) if bad else text)
                assert await reload(served) == (400 if bad else 200)
                before = ends["ok"]
                async with asyncio.timeout(60):
                    while ends["ok"] < before + CALLERS:  # noqa: ASYNC110 - one round of all callers
                        await asyncio.sleep(0.01)
            over.set()
            await asyncio.gather(*callers)
            code = await stopped(served)
    assert dict(ends) == {"ok": ends["ok"]}
    assert ends["ok"] > RELOADS * CALLERS
    assert code == 0


async def stopped(served: Served) -> int:
    served.process.terminate()
    code, out, _ = await served.ends()
    records = [json.loads(line) for line in out.splitlines()]
    assert {record["end"] for record in records} == {"completed"}
    return code


RENAMES, WAITING = 15, 30
SHORT = [{"role": "user", "content": "word"}]


def renamed(servers: list[SimulatedServer], number: int) -> str:
    """A configuration whose only pool has a name of its own. Two requests run at a time; the others queue."""
    urls = ", ".join(server.url for server in servers)
    return (
        "server: {listen: 127.0.0.1:0, admin: 127.0.0.1:0}\n"
        f"pools: {{p{number}: {{backend: simulated, model: served, concurrent_requests: 1, endpoints: [{urls}]}}}}\n"
        f"routes: {{chat: {{ttft: {{budget: 20s}}, tpot: 'off', tiers: [p{number}]}}}}\n"
    )


async def ask_until(served: Served, over: asyncio.Event, ends: Counter[str]) -> None:
    async with calling(served.url) as caller:
        while not over.is_set():
            status, _, received = await caller.whole(post({**CHAT, "messages": SHORT, "max_tokens": 3}))
            ends["ok" if status == 200 else f"{status} {received!r}"] += 1


@pytest.mark.parametrize("workers", ["1", "2"])
async def test_reloads_that_rename_the_pool_refuse_no_queued_request(workers: str, tmp_path: Path) -> None:
    """The queue is never empty: each of its requests is decided again, by the new route of the same name."""
    file, ends, over = tmp_path / "f.yaml", Counter[str](), asyncio.Event()
    async with engines(2) as servers:
        file.write_text(renamed(servers, 0))
        async with serving(file, "--workers", workers) as served:
            callers = [asyncio.create_task(ask_until(served, over, ends)) for _ in range(WAITING)]
            for number in range(1, RENAMES + 1):
                file.write_text(renamed(servers, number))
                assert await reload(served) == 200
                before = ends["ok"]
                async with asyncio.timeout(60):
                    while ends["ok"] < before + WAITING:  # noqa: ASYNC110 - one round of all callers
                        await asyncio.sleep(0.01)
            over.set()
            await asyncio.gather(*callers)
            code = await stopped(served)
    assert dict(ends) == {"ok": ends["ok"]}
    assert code == 0
