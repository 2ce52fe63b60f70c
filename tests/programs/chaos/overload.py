"""Rows 23 to 28: load beyond the engines' capacity, a greedy tenant, stalled readers and senders.

Capacity: two simulated L4 engines, with prefill as the bottleneck: PROMPT tokens each request, none cached.
Load is open loop. Callers retry a 429 or 503 after Retry-After, twice, like the SDKs. A good answer has the first token
within the budget, counted from the caller's (last) attempt; goodput is good answers per second.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import socket
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import aiohttp

from benchmarks.processes import child
from tests.programs.chaos.callers import Reply, ask, chat, ms, post, quantile, words
from tests.programs.chaos.engine_faults import engine_pool
from tests.programs.chaos.lab import GatewayProcess, Lab
from tests.programs.chaos.operation import WHOLE, cheap_engine
from tests.programs.chaos.rows import Result, row

PROMPT = 1000  # tokens
SPEED = 2.0
CAPACITY = 2 * 4.33 * SPEED * 1000 / PROMPT  # requests/s prefilled by two engines, decoding apart
BUDGET = 1.0  # s to the first token
RETRIES = 2
LONGEST_RETRY = 10.0  # s
PATIENCE = 8.0  # s
ROUTE = {"ttft": {"budget": f"{BUDGET:g}s"}, "hedge": "off"}


@dataclass
class Load:
    """Replies of an open loop, each with the end in s after the start. A request may have several replies."""

    began: float = field(default_factory=monotonic)
    offered: int = 0
    replies: list[Reply] = field(default_factory=list)

    @property
    def good(self) -> list[Reply]:
        return [r for r in self.replies if r.completed and r.ttft is not None and r.ttft <= BUDGET]

    @property
    def refused(self) -> list[Reply]:
        return [r for r in self.replies if r.status in (429, 503)]

    def goodput(self, since: float, until: float) -> float:
        """Good answers per second between two times (s after the start)."""
        times = (r.ended_at - self.began for r in self.good)
        return sum(since <= at < until for at in times) / (until - since)

    def ttft(self, share: float) -> float:
        return quantile([r.ttft for r in self.replies if r.completed and r.ttft is not None], share)


async def offer(
    gateway: GatewayProcess, rate: float, seconds: float, headers: Mapping[str, str] | None = None, seed: int = 0
) -> Load:
    """Offer Poisson arrivals of retrying callers. PATIENCE s after the last arrival, waiting callers leave."""
    load, rng, callers = Load(), random.Random(seed), set[asyncio.Task[None]]()
    due = load.began
    try:
        while (due := due + rng.expovariate(rate)) < load.began + seconds:
            await asyncio.sleep(max(due - monotonic(), 0))
            load.offered += 1
            callers.add(asyncio.create_task(_caller(gateway, load, headers, rng)))
        await asyncio.wait(callers, timeout=PATIENCE)
    finally:
        for caller in callers:
            caller.cancel()
        await asyncio.gather(*callers, return_exceptions=True)
    return load


async def _caller(gateway: GatewayProcess, load: Load, headers: Mapping[str, str] | None, rng: random.Random) -> None:
    body = chat(words(PROMPT, rng.random()), stream=True, max_tokens=16)
    for _ in range(1 + RETRIES):
        reply = await ask(gateway.port, body, headers, sent=gateway.sent, patience=90.0)
        load.replies.append(reply)
        if reply.status not in (429, 503):
            return
        wait = float(reply.headers.get("retry-after", 1))
        await asyncio.sleep(min(wait, LONGEST_RETRY) * rng.uniform(1.0, 1.25))


@asynccontextmanager
async def overloaded(lab: Lab, on_miss: str, **sections: Any) -> AsyncIterator[GatewayProcess]:
    """A warm gateway before two engines."""
    async with lab.engines(2, "8b-l4", SPEED) as engines:
        routes = {"chat": {"tiers": ["both"], "on_miss": on_miss, **ROUTE}}
        probe = sections.pop("probe", None)
        pools = {"both": engine_pool(*(e.url for e in engines))}
        async with lab.gateway(pools, routes, probe=probe, **sections) as gateway:
            yield gateway


async def sweep(lab: Lab, on_miss: str, multiples: tuple[float, ...]) -> tuple[dict[float, Load], float]:
    """Loads by multiple of the capacity, after a warm-up; seconds of each."""
    seconds = float(lab.size(20, 5))
    async with overloaded(lab, on_miss) as gateway:
        await offer(gateway, 0.5 * CAPACITY, seconds / 2)
        loads = {}
        for multiple in multiples if not lab.quick else (0.8, 5.0):
            loads[multiple] = await offer(gateway, multiple * CAPACITY, seconds, seed=int(multiple * 100))
            await asyncio.sleep(3.0)
    return loads, seconds


GOALS = {2.0: 0.95, 5.0: 0.90, 10.0: 0.80}


@row(
    23, "overload", "open loop at 2, 5 and 10 times the capacity", "goodput 95, 90, 80% of the peak; TTFT p99 1.2 times"
)
async def overload_shed(lab: Lab) -> Result:
    """Retrying callers, 20 s each, on a route with `on_miss: shed`. Row 24 looks at the refusals of the same load."""
    loads, seconds = await sweep(lab, "shed", (0.5, 0.7, 0.85, 1.0, 2.0, 5.0, 10.0))
    return _overload_result(loads, seconds)


@row(23, "overload", "the same with `on_miss: queue`", "goodput 95, 90, 80% of the peak; TTFT p99 1.2 times")
async def overload_queue(lab: Lab) -> Result:
    """As above, on a route with a queue for late requests: late answers count as not good."""
    loads, seconds = await sweep(lab, "queue", (0.7, 1.0, 2.0, 5.0, 10.0))
    return _overload_result(loads, seconds, late=True)


def _overload_result(loads: dict[float, Load], seconds: float, late: bool = False) -> Result:
    share = {multiple: load.goodput(seconds * 0.2, seconds) for multiple, load in loads.items()}
    peak = max(rate for multiple, rate in share.items() if multiple <= 1.0)
    normal = max(load.ttft(0.99) for multiple, load in loads.items() if multiple <= 1.0)
    over = {multiple: load for multiple, load in loads.items() if multiple > 1.0}
    parts = [f"{m:g}x {share[m] / peak:.0%}, TTFT p99 {ms(load.ttft(0.99))}" for m, load in over.items()]
    good = all(share[m] >= GOALS[m] * peak for m in over)
    in_time = late or all(load.ttft(0.99) <= 1.2 * max(normal, BUDGET) for load in over.values())
    hung = sum(r.ended in ("hang", "cut", "refused") for load in loads.values() for r in load.replies)
    figures = f"peak {peak:.1f}/s (TTFT p99 {ms(normal)}); {'; '.join(parts)}; {hung} hangs or lost connections"
    return Result(figures, good and in_time and not hung)


@row(24, "overload", "refusals", "all 429 or 503 with Retry-After; p99 50 ms")
async def refusals(lab: Lab) -> Result:
    """Five times the capacity for 20 s on a shedding route; latency of the refusals, measured by the callers."""
    async with overloaded(lab, "shed") as gateway:
        await offer(gateway, 0.5 * CAPACITY, 5.0)
        load = await offer(gateway, 5 * CAPACITY, float(lab.size(20, 5)), seed=24)
    bad = [r for r in load.replies if not r.completed and r.status not in (429, 503)]
    without = [r for r in load.refused if "retry-after" not in r.headers]
    waits = [float(r.headers.get("retry-after", 0)) for r in load.refused]
    p99 = quantile([r.total for r in load.refused], 0.99)
    queued = sum(r.total > 0.05 for r in load.refused)
    figures = f"{len(load.refused)} refusals, {len(bad)} other failures, {len(without)} without Retry-After; "
    figures += f"p50 {ms(quantile([r.total for r in load.refused], 0.5))}, p99 {ms(p99)}; "
    figures += f"Retry-After {quantile(waits, 0.0):g} to {quantile(waits, 1.0):g} s"
    note = "" if p99 <= 0.05 else f"{queued} were queued first, and refused when the budget was out of reach"
    return Result(figures, not bad and not without and bool(load.refused) and p99 <= 0.05, note)


def _key(name: str) -> dict[str, str]:
    return {"name": name, "sha256": hashlib.sha256(f"sk-{name}".encode()).hexdigest()}


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer sk-{name}"}


LIMITED = {"concurrent_requests": 8}  # an operator's limits for a key


@row(25, "overload", "one tenant at 10 times the capacity", "goodput of the other at least 98%")
async def greedy_tenant(lab: Lab) -> Result:
    """A key sends 10 times the capacity, without limits and with 8 requests at a time; a second key sends a fifth."""
    share = {
        "queue": await _beside_greedy(lab, "queue", {}),
        "shed": await _beside_greedy(lab, "shed", {}),
        "queue, greedy key limited": await _beside_greedy(lab, "queue", LIMITED),
    }
    figures = "; ".join(f"{name}: {each:.0%} of the modest tenant's requests good" for name, each in share.items())
    short = [name for name, each in share.items() if each < 0.98]
    return Result(figures, not short, ", ".join(short))


async def _beside_greedy(lab: Lab, on_miss: str, limits: dict[str, int]) -> float:
    """Share of good answers of a modest tenant."""
    seconds = float(lab.size(30, 6))
    keys = [{**_key("greedy"), **limits}, _key("modest")]
    async with overloaded(lab, on_miss, keys=keys, check=False) as gateway:
        await offer(gateway, 0.5 * CAPACITY, 5.0, bearer("modest"))
        greedy = asyncio.create_task(offer(gateway, 10 * CAPACITY, seconds + 2, bearer("greedy"), 1))
        await asyncio.sleep(2.0)
        modest = await offer(gateway, 0.2 * CAPACITY, seconds, bearer("modest"), 2)
        greedy.cancel()
        await asyncio.wait([greedy])
    return len(modest.good) / max(modest.offered, 1)


@row(26, "overload", "retrying callers after a burst", "back at the baseline within 10 s")
async def metastability(lab: Lab) -> Result:
    """Half the capacity, then five times for 20 s, then half again; callers of the burst still retry."""
    burst, after = float(lab.size(20, 5)), 20.0
    async with overloaded(lab, "queue") as gateway:
        before = await offer(gateway, 0.5 * CAPACITY, 10.0)
        storm = asyncio.create_task(offer(gateway, 5 * CAPACITY, burst, seed=26))
        await asyncio.sleep(burst)
        calm = await offer(gateway, 0.5 * CAPACITY, after, seed=27)
        await storm
    usual = len(before.good) / before.offered
    seconds = next((s for s in range(int(after) - 2) if _good_since(calm, s) >= 0.95 * usual), float("inf"))
    figures = f"{usual:.0%} good before; 95% of that again {seconds:g} s after the burst"
    return Result(figures, seconds <= 10)


def _good_since(load: Load, seconds: float) -> float:
    """Share of good answers among requests sent after this time."""
    late = [r for r in load.replies if r.ended_at - r.total - load.began >= seconds]
    return sum(r in load.good for r in late) / max(len(late), 1)


# --------------------------------------------------------------------------- stalled readers, slow senders


@row(27, "overload", "readers that stall", "at most 128 KiB each; cut after 60 s; the upstream paused")
async def stalled_readers(lab: Lab) -> Result:
    """Readers of an endless answer read the first bytes and stop."""
    number = lab.size(2000, 50)
    async with (
        cheap_engine() as url,
        lab.gateway({"only": {"backend": "compatible", "model": "m", "endpoints": [url]}}, probe=WHOLE) as g,
    ):
        before = g.rss
        readers = await asyncio.gather(*(_stall(g.port) for _ in range(number)))
        await asyncio.sleep(5.0)
        each, taken = (g.rss - before) / number / 1024, await _taken(url) / number / 1024
        await asyncio.sleep(1.0)
        more = await _taken(url) / number / 1024 - taken
        began = monotonic()
        cut = 0 if lab.quick else await _cut(g, began + 70.0)
        seconds = monotonic() - began + 6.0
        for sock in readers:
            sock.close()
    figures = (
        f"{number} readers: {each:.0f} KiB each; the upstream wrote {taken:.0f} KiB each and then {more:.0f} more; "
    )
    figures += f"gauge at zero after {seconds:.0f} s"
    return Result(figures, each <= 128 and more < 1 and (lab.quick or bool(cut)))


async def _stall(port: int) -> socket.socket:
    loop = asyncio.get_running_loop()
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    await loop.sock_connect(sock, ("127.0.0.1", port))
    await loop.sock_sendall(sock, post(chat("[hose]", stream=True)))
    await loop.sock_recv(sock, 16)
    return sock


async def _taken(url: str) -> float:
    async with aiohttp.ClientSession() as session, session.get(url + "/taken") as reply:
        return float(await reply.text())


async def _cut(gateway: GatewayProcess, until: float) -> bool:
    """True once no request is in progress."""
    while monotonic() < until:
        if not (await gateway.metrics())["firsttoken_requests_in_progress"]:
            return True
        await asyncio.sleep(0.5)
    return False


@row(28, "overload", "2,000 slow senders", "p99 of healthy callers at most 1.2 times")
async def slow_senders(lab: Lab) -> Result:
    """2,000 connections send a byte of the head every second, beside 50 healthy requests/s."""
    number, seconds = lab.size(2000, 200), float(lab.size(20, 3))
    async with (
        cheap_engine() as url,
        lab.gateway({"only": {"backend": "compatible", "model": "m", "endpoints": [url]}}, probe=WHOLE) as g,
    ):
        alone = await healthy(g, seconds)
        command = [sys.executable, "-m", "tests.programs.chaos.slow_senders", str(g.port), str(number)]
        before = g.rss
        with child(command, g.port):
            await asyncio.sleep(4.0)
            beside = await healthy(g, seconds)
            each = (g.rss - before) / number / 1024
    p99, usual = (quantile([r.total for r in each], 0.99) for each in (beside, alone))
    lost = sum(not r.completed for r in beside)
    figures = f"{lost} of {len(beside)} failed; p99 {p99 * 1e3:.1f} ms, without them {usual * 1e3:.1f} ms; "
    figures += f"{each:.0f} KiB a sender"
    return Result(figures, not lost and p99 <= 1.2 * usual + 0.002, "2 ms of noise are allowed")


async def healthy(gateway: GatewayProcess, seconds: float, headers: Mapping[str, str] | None = None) -> list[Reply]:
    """50 small requests/s."""
    tasks, began = [], monotonic()
    for i in range(int(seconds * 50)):
        await asyncio.sleep(max(began + i / 50 - monotonic(), 0))
        tasks.append(asyncio.create_task(ask(gateway.port, chat(f"{i}"), headers, sent=gateway.sent)))
    return list(await asyncio.gather(*tasks))
