"""Rows 2 to 15: engines that die, freeze, vanish or talk nonsense, and networks that break.

Engines are processes of their own where they are killed or frozen; behind a fault proxy where the network breaks.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from time import monotonic
from typing import Any

from tests.chaos.callers import Reply, ask, chat, ms, quantile, words
from tests.chaos.lab import EngineProcess, GatewayProcess, Lab
from tests.chaos.provider import Provider, ProviderFault
from tests.chaos.rows import Result, row
from tests.gateway.builders import DONE, FINISH, TOKEN
from tests.support.fault_proxy import BlackHole, Fault, FaultProxy, Kind
from tests.support.gateways import pool, running
from tests.support.upstream import LAST_CHUNK, STREAM_HEAD, Script, Upstream, chunk

CALLERS = 8  # at a time, when an engine is killed
ADDED = 0.1  # s that a kill may add to the first token, p99
PATIENT = {"ttft": {"budget": "20s"}, "hedge": "off"}  # silence is not the fault here


def engine_pool(*urls: str) -> dict[str, Any]:
    return {"backend": "simulated", "model": "served", "endpoints": list(urls)}


def failed(replies: list[Reply]) -> list[Reply]:
    return [reply for reply in replies if not reply.completed]


def errors(replies: list[Reply]) -> str:
    """The first failure, for the note."""
    return next((f"{r.status} {r.ended} {r.body[-160:]!r}" for r in replies if not r.completed), "")


@dataclass
class Kills:
    """Replies without a fault and with one; of the latter, s from the request to the kill."""

    healthy: list[Reply] = field(default_factory=list)
    faulty: list[Reply] = field(default_factory=list)
    killed: list[float] = field(default_factory=list)

    @property
    def added(self) -> float:
        """p99 of the first token after the kill, less a healthy p50; s."""
        pairs = zip(self.faulty, self.killed, strict=True)
        after = [reply.ttft - at for reply, at in pairs if reply.ttft is not None and reply.ttft > at]
        return quantile(after, 0.99) - quantile([r.ttft for r in self.healthy if r.ttft is not None], 0.5)


async def kills(lab: Lab, freeze: bool, body: Callable[[int], bytes]) -> Kills:
    """Kill the engine that has the request, again and again; the next request is healthy and measures the peer."""
    seen = Kills()
    async with lab.engines(2, "8b-l4", 2.0) as engines:
        routes = {"chat": {"tiers": ["both"], **PATIENT}}
        async with lab.gateway({"both": engine_pool(*(e.url for e in engines))}, routes) as gateway:
            for number in range(lab.size(20, 3)):
                await asyncio.sleep(7.0 if number else 0.0)  # until an ejection has ended
                seen.healthy.append(await ask(gateway.port, body(2 * number), sent=gateway.sent))
                for engine in engines:
                    engine.signal(signal.SIGSTOP if freeze else signal.SIGCONT)
                began = monotonic()
                task = asyncio.create_task(ask(gateway.port, body(2 * number + 1), sent=gateway.sent))
                await asyncio.sleep(0.2)
                victim = await _busy(gateway, engines)
                for engine in engines:
                    engine.signal(signal.SIGCONT if engine is not victim else signal.SIGSTOP)
                seen.killed.append(monotonic() - began)
                await victim.kill()
                seen.faulty.append(await task)
                await victim.restart()
    return seen


async def _busy(gateway: GatewayProcess, engines: list[EngineProcess]) -> EngineProcess:
    """The engine with a request in flight."""
    busy = [each["endpoint"]["id"] for each in await gateway.fleet() if each["load"]["in_flight"]]
    return next(engine for engine in engines if any(str(engine.port) in name for name in busy))


def _fail_over_result(seen: Kills) -> Result:
    lost = failed(seen.faulty)
    figures = f"{len(seen.faulty) - len(lost)} of {len(seen.faulty)} answered; +{ms(max(seen.added, 0))} p99"
    return Result(figures, not lost and not failed(seen.healthy) and seen.added <= ADDED, errors(lost))


@row(2, "faults", "kill -9 before the head", "all answered by the peer; +100 ms p99 at most")
async def kill_before_head(lab: Lab) -> Result:
    """The engine that has the request is frozen, and killed before it sent a byte."""
    return _fail_over_result(await kills(lab, True, lambda seed: chat(words(20, seed), stream=True, max_tokens=8)))


@row(3, "faults", "kill -9 after the head, before a token", "all answered by the peer; +100 ms p99 at most")
async def kill_after_head(lab: Lab) -> Result:
    """The engine that has the request is killed 200 ms into a prefill of half a second; it has sent its head."""
    return _fail_over_result(await kills(lab, False, lambda seed: chat(words(4000, seed), stream=True, max_tokens=8)))


@row(4, "faults", "kill -9 in mid-stream", "no false end; an error event within 100 ms")
async def kill_mid_stream(lab: Lab) -> Result:
    """One of two engines is killed while it writes answers of 400 tokens."""
    replies, ends, false = list[Reply](), list[float](), 0
    async with lab.engines(2) as engines, lab.gateway({"both": engine_pool(*(e.url for e in engines))}) as gateway:
        for number in range(lab.size(12, 2)):
            tasks = [asyncio.create_task(_long_answer(gateway, number * 100 + i)) for i in range(CALLERS)]
            await asyncio.sleep(1.0)
            victim, at = engines[number % 2], monotonic()
            await victim.kill()
            got = await asyncio.gather(*tasks)
            replies += got
            ends += [r.ended_at - at for r in got if r.error_event]
            await victim.restart()
            await asyncio.sleep(6.0)
    false = sum(r.false_end or r.ended == "hang" for r in replies)
    broken = [r for r in replies if not r.completed]
    silent = [r for r in broken if not r.error_event]
    figures = f"{len(broken)} of {len(replies)} streams hit: {false} false ends, {len(silent)} without an error event; "
    figures += f"event after {ms(quantile(ends, 0.99))} p99"
    return Result(figures, not false and not silent and bool(ends) and quantile(ends, 0.99) <= 0.1, errors(silent))


async def _long_answer(gateway: GatewayProcess, seed: int) -> Reply:
    body = chat(f"{seed} tell", stream=True, max_tokens=400, min_tokens=400, ignore_eos=True)
    return await ask(gateway.port, body, sent=gateway.sent)


@row(5, "faults", "an engine accepts and is silent", "first token by the budget + 50 ms; one more attempt")
async def frozen_engine(lab: Lab) -> Result:
    """One of two engines is frozen (SIGSTOP); requests come one by one, a second apart, with a budget of 1 s."""
    async with lab.engines(2) as engines:
        routes = {"chat": {"tiers": ["both"], "ttft": {"budget": "1s"}}}
        async with lab.gateway({"both": engine_pool(*(e.url for e in engines))}, routes) as gateway:
            for i in range(10):
                await ask(gateway.port, chat(f"{i} warm", stream=True, max_tokens=4), sent=gateway.sent)
            engines[0].signal(signal.SIGSTOP)
            replies = [
                await ask(gateway.port, chat(f"{i} hello", stream=True, max_tokens=4), sent=gateway.sent)
                for i in range(lab.size(40, 10))
            ]
            engines[0].signal(signal.SIGCONT)
    attempts = max(int(r.headers.get("x-firsttoken-attempts", 0)) for r in replies)
    slowest = max((r.ttft or 99.0) for r in replies)
    figures = f"{len(failed(replies))} of {len(replies)} failed; slowest first token {ms(slowest)}; {attempts} attempts"
    return Result(figures, not failed(replies) and slowest <= 1.05 and attempts <= 2, errors(replies))


@row(6, "faults", "SYNs are dropped", "2 s at most; p99 of the others within 1.1 times", quick=True)
async def black_hole(lab: Lab) -> Result:
    """One of two endpoints is an address whose SYNs the kernel drops (a full listen queue: no privilege needed)."""
    number = lab.size(200, 30)
    async with lab.engines(1) as engines:
        with BlackHole() as hole:
            routes = {"alone": {"tiers": ["good"]}, "chat": {"tiers": ["both"]}}
            pools = {"good": engine_pool(engines[0].url), "both": engine_pool(engines[0].url, hole.url)}
            async with lab.gateway(pools, routes) as gateway:
                got = {}
                for model in ("alone", "chat"):
                    got[model] = await _paced(gateway, number, 20.0, model)
    hit = [r for r in got["chat"] if int(r.headers.get("x-firsttoken-attempts", 1)) > 1]
    others = [r.ttft or 99.0 for r in got["chat"] if r not in hit]
    alone, slowest = quantile([r.ttft or 99.0 for r in got["alone"]], 0.99), max((r.ttft or 99.0) for r in got["chat"])
    lost = failed(got["chat"])
    figures = (
        f"{len(lost)} of {number} failed; {len(hit)} met the hole, slowest {ms(slowest)}; "
        f"others' p99 {ms(quantile(others, 0.99))}, alone {ms(alone)}"
    )
    good = not lost and slowest <= 2.1 and quantile(others, 0.99) <= 1.1 * alone + 0.02
    return Result(figures, good, errors(lost) or "20 ms of the machine's noise are allowed")


async def _paced(gateway: GatewayProcess, number: int, rate: float, model: str = "chat", **more: Any) -> list[Reply]:
    """Open loop: a request every 1/rate s."""
    tasks, began = list[asyncio.Task[Reply]](), monotonic()
    for i in range(number):
        await asyncio.sleep(max(began + i / rate - monotonic(), 0))
        body = chat(f"{model} {i} hello", model, **{"stream": True, "max_tokens": 8, **more})
        tasks.append(asyncio.create_task(ask(gateway.port, body, sent=gateway.sent)))
    return list(await asyncio.gather(*tasks))


@row(7, "faults", "half-open in mid-stream", "ends at the idle limit, +-1 s", quick=True)
async def half_open(lab: Lab) -> Result:
    """The engine's machine vanishes after 5 kB of a stream: no FIN, no RST. `stream_idle` is 2 s."""
    async with Provider("served") as provider, FaultProxy(int(provider.url.rpartition(":")[2])) as proxy:
        pools = {"only": {"backend": "compatible", "model": "served", "endpoints": [proxy.url]}}
        async with lab.gateway(pools, defaults={"stream_idle": "2s"}) as gateway:
            proxy.fault = Fault(Kind.STALL, at=5000)
            replies = await asyncio.gather(
                *(ask(gateway.port, chat(f"{i}", stream=True), sent=gateway.sent) for i in range(lab.size(50, 10)))
            )
            proxy.fault = Fault()
            await asyncio.sleep(5.0)  # until no connection with the fault is kept
    seconds = [r.total for r in replies]
    events = sum(r.error_event for r in replies)
    figures = f"{events} of {len(replies)} with an error event; after {min(seconds):.1f} to {max(seconds):.1f} s"
    return Result(figures, events == len(replies) and max(seconds) <= 3.3 and min(seconds) >= 1.0)


@row(8, "faults", "an upstream that drips its head", "bounded by the budget", quick=True)
async def dripping_head(lab: Lab) -> Result:
    """The preferred of two endpoints answers at 1 byte/s. Budget 1 s."""
    async with (
        Provider("served") as good,
        Provider("served") as slow,
        FaultProxy(int(slow.url.rpartition(":")[2])) as proxy,
    ):
        proxy.fault = Fault(Kind.DRIP, rate=1.0)
        pools = {"slow": pool(proxy.url), "good": pool(good.url)}
        routes = {"chat": {"tiers": ["slow", "good"], "ttft": {"budget": "1s"}}}
        async with lab.gateway(pools, routes) as gateway:
            replies = [
                await ask(gateway.port, chat(f"{i}", stream=True), sent=gateway.sent) for i in range(lab.size(30, 6))
            ]
    slowest = max(r.ttft or 99.0 for r in replies)
    figures = f"{len(failed(replies))} of {len(replies)} failed; slowest first token {ms(slowest)}"
    return Result(figures, not failed(replies) and slowest <= 1.1, errors(replies))


ANSWER: Script = [STREAM_HEAD + chunk(TOKEN) + chunk(TOKEN) + chunk(FINISH + DONE) + LAST_CHUNK]


@row(9, "faults", "RST at every byte of a reply", "no hang, no false end", quick=True)
async def reset_at_every_byte(lab: Lab) -> Result:
    """A reply of two tokens is reset after each of its bytes; a good request goes between two faults."""
    total = len(ANSWER[0])  # type: ignore[arg-type]
    replies = list[Reply]()
    async with (
        Upstream(ANSWER) as upstream,
        FaultProxy(int(upstream.url.rpartition(":")[2])) as proxy,
        lab.gateway({"only": pool(proxy.url)}, defaults={"first_token": "5s", "stream_idle": "5s"}) as gateway,
    ):
        for at in range(0, total, lab.size(1, 7)):
            for fault in (Fault(Kind.RESET, at), Fault()):
                proxy.fault = fault
                body = chat(stream=True)
                reply = await ask(gateway.port, body, {"connection": "close"}, sent=gateway.sent)
                replies += [reply] if fault.kind is Kind.RESET else []
                await _drop_connections(proxy)
    hangs, false = sum(r.ended == "hang" for r in replies), sum(r.false_end for r in replies)
    figures = f"{len(replies)} offsets: {hangs} hangs, {false} false ends"
    return Result(figures, not hangs and not false)


async def _drop_connections(proxy: FaultProxy) -> None:
    """Close kept connections, so that the next request meets the next fault."""
    for task in tuple(proxy._tasks):
        task.cancel()
    await asyncio.sleep(0.002)


def _event(text: bytes) -> bytes:
    return b'data: {"choices":[{"index":0,"delta":{"content":"' + text + b'"}}]}\n\n'


def split(data: bytes, size: int) -> bytes:
    return b"".join(chunk(data[i : i + size]) for i in range(0, len(data), size))


GARBAGE: dict[str, Script] = {
    "UTF-8 split over chunks": [
        STREAM_HEAD + split(_event("猫\N{GRINNING FACE}".encode()) + FINISH + DONE, 1) + LAST_CHUNK
    ],
    "a line of 10 MiB": [STREAM_HEAD + chunk(TOKEN) + chunk(_event(b"x" * (10 << 20)) + FINISH + DONE) + LAST_CHUNK],
    "a line of 10 MiB without an end": [STREAM_HEAD + chunk(TOKEN) + chunk(b"data: " + b"x" * (10 << 20)) + LAST_CHUNK],
    "10 MiB before the first token": [STREAM_HEAD + chunk(b": " + b"x" * (10 << 20)) + LAST_CHUNK],
    "random bytes": [STREAM_HEAD + chunk(TOKEN) + chunk(bytes(range(256)) * 64) + LAST_CHUNK],
    "invalid UTF-8": [STREAM_HEAD + chunk(TOKEN) + chunk(_event(b"\xff\xfe\x80")) + chunk(FINISH + DONE) + LAST_CHUNK],
    "no HTTP": [b"\x00\x01\x02" * 4000],
    "a chunk size that is none": [STREAM_HEAD + chunk(TOKEN) + b"zz\r\n"],
}


def route(name: str) -> str:
    return name.replace(" ", "-")


@row(10, "faults", "garbage, split UTF-8, a line of 10 MiB", "bounded memory, no crash", quick=True)
async def garbage(lab: Lab) -> Result:
    """Eight kinds of nonsense in place of a stream, ten times each; memory is the peak of the process."""
    grown, wrong = dict[str, float](), list[str]()
    async with AsyncExitStack() as stack:
        servers = {name: await stack.enter_async_context(Upstream(script)) for name, script in GARBAGE.items()}
        pools = {route(name): pool(server.url) for name, server in servers.items()}
        routes = {name: {"tiers": [name]} for name in pools}
        defaults = {"first_token": "5s", "stream_idle": "3s"}
        gateway = await stack.enter_async_context(lab.gateway(pools, routes, defaults=defaults, check=False))
        for name in servers:
            gateway.reset_peak()
            before = gateway.rss
            body = chat(model=route(name), stream=True)
            replies = [await ask(gateway.port, body, sent=gateway.sent) for _ in range(lab.size(10, 2))]
            grown[name] = (gateway.peak_rss - before) / 1e6
            wrong += [f"{name}: {r.ended}" for r in replies if r.ended == "hang" or r.false_end]
        ended = gateway.process.returncode is not None
    most = max(grown, key=lambda name: grown[name])
    figures = f"{len(wrong)} hangs or false ends; memory +{grown[most]:.0f} MB at most ({most})"
    return Result(figures, not wrong and grown[most] <= 64 and not ended, "; ".join(wrong[:3]))


@row(11, "faults", "finish_reason without [DONE]", "a success", quick=True)
async def no_done(lab: Lab) -> Result:
    """A provider that ends its streams after `finish_reason`, as some do."""
    async with (
        Provider("served", ProviderFault(no_done=True)) as provider,
        running({"only": pool(provider.url)}) as gateway,
    ):
        replies = [await ask(int(gateway.url.rpartition(":")[2]), chat(stream=True)) for _ in range(lab.size(20, 3))]
        ends = {record.end.value for record in gateway.recorder.recent}
    good = ends == {"completed"} and not any(r.error_event for r in replies)
    return Result(f"{len(replies)} of {len(replies)} {', '.join(ends)}" if good else str(ends), good)


# The header, and s for which the provider must be left alone.
RETRY_AFTERS: dict[str, tuple[Callable[[], str], float]] = {
    "2 s": (lambda: "2", 2.0),
    "a date 3 s ahead": (lambda: format_datetime(datetime.now(UTC) + timedelta(seconds=3), usegmt=True), 1.9),
    "1e9": (lambda: "1000000000", 3.5),
    "junk": (lambda: "soon", 0.5),
}


@row(
    12,
    "faults",
    "429 with a Retry-After of any form",
    "honoured, and within the budget answered by the peer",
    quick=True,
)
async def retry_after(lab: Lab) -> Result:
    """The preferred pool answers 429; requests come every 50 ms for 3.5 s."""
    said, good = [], True
    for name, (header, least) in RETRY_AFTERS.items():
        async with (
            Provider("served", ProviderFault(status=429, retry_after=header())) as limited,
            Provider("served") as peer,
        ):
            pools = {"first": pool(limited.url), "second": pool(peer.url)}
            async with lab.gateway(pools, check=False) as gateway:
                replies = await _paced(gateway, 70, 20.0)
        calls = limited.called_at
        waited = calls[1] - calls[0] if len(calls) > 1 else float("inf")
        good &= not failed(replies) and waited >= least
        said.append(f"{name}: " + (f"{waited:.1f} s" if len(calls) > 1 else "not asked again"))
    return Result("; ".join(said), good)


@row(13, "faults", "half of all replies are 500", "attempts at most 1.10 times the requests")
async def half_of_replies_fail(lab: Lab) -> Result:
    """Two engines refuse half of their requests with 500, for 60 s at 20 requests/s."""
    async with lab.engines(2) as engines:
        for engine in engines:
            await engine.faults(status=500, status_share=0.5)
        async with lab.gateway({"both": engine_pool(*(e.url for e in engines))}) as gateway:
            replies = await _paced(gateway, lab.size(1200, 100), 20.0)
            metrics = await gateway.metrics()
            for engine in engines:
                await engine.faults()
            await asyncio.sleep(10.0)
    ratio = metrics["firsttoken_attempts_total"] / len(replies)
    answered = 1 - len(failed(replies)) / len(replies)
    figures = f"{ratio:.2f} attempts a request; {answered:.0%} answered"
    return Result(figures, ratio <= 1.10, "" if ratio <= 1.10 else "see the note below")


@row(14, "faults", "all engines down for 60 s, then back", "recovered within 10 s; no peak above 1.2 times the load")
async def all_down(lab: Lab) -> Result:
    """Both engines are killed under 20 requests/s and restarted together."""
    rate, down, replies = 20.0, float(lab.size(60, 6)), list[tuple[float, Reply]]()
    async with lab.engines(2) as engines, lab.gateway({"both": engine_pool(*(e.url for e in engines))}) as gateway:
        load = asyncio.create_task(_record_times(gateway, rate, down + 25.0, replies))
        await asyncio.sleep(3.0)
        for engine in engines:
            await engine.kill()
        await asyncio.sleep(down)
        await asyncio.gather(*(engine.restart() for engine in engines))
        back = monotonic()
        await load
    good = [at for at, reply in replies if reply.completed and at > back]
    recovered = min(good, default=float("inf")) - back
    peak = _peak([at for at, reply in replies if reply.completed and at > back])
    hung = sum(reply.ended == "hang" for _, reply in replies)
    after = [reply for at, reply in replies if at > back + 10]
    figures = f"first answer {recovered:.1f} s after; {len(failed(after))} failures from 10 s on; "
    figures += f"peak {peak / rate:.2f} times the load; {hung} hangs"
    return Result(figures, recovered <= 10 and not failed(after) and not hung and peak <= 1.2 * rate, errors(after))


async def _record_times(gateway: GatewayProcess, rate: float, seconds: float, into: list[tuple[float, Reply]]) -> None:
    async def one(i: int) -> None:
        reply = await ask(gateway.port, chat(f"{i} hi", stream=True, max_tokens=4), sent=gateway.sent)
        into.append((reply.ended_at, reply))

    async with asyncio.TaskGroup() as group:
        began = monotonic()
        for i in range(int(rate * seconds)):
            await asyncio.sleep(max(began + i / rate - monotonic(), 0))
            group.create_task(one(i))


def _peak(times: list[float]) -> float:
    """Answers per second, in the fullest second."""
    ordered = sorted(times)
    return float(max((sum(at <= other < at + 1 for other in ordered) for at in ordered), default=0))


@row(15, "faults", "a name that does not resolve", "the event loop never blocked for 50 ms", quick=True)
async def unknown_name(lab: Lab) -> Result:
    """One of two endpoints has a host name that does not exist; 100 requests."""
    async with Provider("served") as provider:
        pools = {"both": pool("http://no-such-host.invalid:8000", provider.url)}
        async with lab.gateway(pools) as gateway:
            await gateway.metrics()  # resets the maximum
            replies = await _paced(gateway, lab.size(100, 30), 20.0)
            lag = (await gateway.metrics())["firsttoken_loop_lag_max_seconds"]
    figures = f"{len(failed(replies))} of {len(replies)} failed; longest stall {ms(lag)}"
    note = "A slow resolver and a name that changes are not tried: they need a resolver of one's own."
    return Result(figures, not failed(replies) and lag <= 0.05, errors(replies) or note)
