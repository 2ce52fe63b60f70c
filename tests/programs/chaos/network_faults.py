"""Rows 6 to 12 and 15: broken networks, nonsense replies, limits of providers, and names.

The engine is a mock or scripted server, behind a fault proxy for broken networks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

from tests.programs.chaos.callers import Reply, ask, chat, ms, quantile
from tests.programs.chaos.engine_faults import engine_pool, errors, failed, paced
from tests.programs.chaos.lab import Lab
from tests.programs.chaos.provider import Provider, ProviderFault
from tests.programs.chaos.rows import Result, row
from tests.support import resolver
from tests.support.builders import DONE, FINISH, TOKEN
from tests.support.fault_proxy import BlackHole, Fault, FaultProxy, Kind
from tests.support.gateways import pool, running
from tests.support.resolver import Resolver
from tests.support.simulated import eventually
from tests.support.upstream import LAST_CHUNK, STREAM_HEAD, Script, Upstream, chunk


@row(6, "faults", "SYNs are dropped", "2 s at most; p99 of the others within 1.1 times", quick=True)
async def black_hole(lab: Lab) -> Result:
    """The kernel drops all SYNs to the first of two endpoints (a full listen queue: no privilege needed)."""
    number, got = lab.size(100, 30), dict[str, list[Reply]]()
    async with lab.engines(1) as engines:
        with BlackHole() as hole:
            for name, urls in (("alone", engines[0].url), ("chat", f"{hole.url} {engines[0].url}")):
                async with lab.gateway({"both": engine_pool(*urls.split())}) as gateway:
                    got[name] = await paced(gateway, number, 20.0)
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
    return Result(
        figures, events == len(replies) and max(seconds) <= (10 if lab.quick else 3.3) and min(seconds) >= 1.0
    )


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
    """A reply of two tokens is reset after each byte; a good request goes between two faults."""
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
    """Close kept connections: the next request meets the next fault."""
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
    """The provider ends every stream after `finish_reason`, without [DONE]."""
    async with (
        Provider("served", ProviderFault(no_done=True)) as provider,
        running({"only": pool(provider.url)}) as gateway,
    ):
        replies = [await ask(int(gateway.url.rpartition(":")[2]), chat(stream=True)) for _ in range(lab.size(20, 3))]
        await eventually(lambda: len(gateway.recorder.recent) == len(replies))
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
            Provider("served", ProviderFault(status=429, retry_after=header)) as limited,
            Provider("served") as peer,
        ):
            pools = {"first": pool(limited.url), "second": pool(peer.url)}
            async with lab.gateway(pools, check=False) as gateway:
                replies = await paced(gateway, 70, 20.0)
        calls = limited.called_at
        waited = calls[1] - calls[0] if len(calls) > 1 else float("inf")
        good &= not failed(replies) and waited >= least
        said.append(f"{name}: " + (f"{waited:.1f} s" if len(calls) > 1 else "not asked again"))
    return Result("; ".join(said), good)


@row(15, "faults", "a name that does not resolve", "the event loop never blocked for 50 ms", quick=True)
async def unknown_name(lab: Lab) -> Result:
    """The host name of the first of two endpoints does not exist; 100 requests."""
    async with Provider("served") as provider:
        pools = {"both": pool("http://no-such-host.invalid:8000", provider.url)}
        async with lab.gateway(pools) as gateway:
            await gateway.metrics()  # resets the maximum
            replies = await paced(gateway, lab.size(100, 30), 20.0)
            lag = (await gateway.metrics())["firsttoken_loop_lag_max_seconds"]
    figures = f"{len(failed(replies))} of {len(replies)} failed; longest stall {ms(lag)}"
    return Result(figures, not failed(replies) and lag <= 0.05, errors(replies))


@row(15, "faults", "a slow resolver, and a name that changes", "the event loop never blocked for 50 ms; no failure")
async def slow_resolver(lab: Lab) -> Result:
    """With `resolve: 1s`: answers take 1.5 s; then the address changes and the old server vanishes 3 s later."""
    if not resolver.possible():
        return Result("not run: the machine gives no process a resolver of its own", True)
    async with Resolver() as names, AsyncExitStack() as stack:
        old = await stack.enter_async_context(Provider("served"))
        port = int(old.url.rpartition(":")[2])
        await stack.enter_async_context(Provider("served", host="127.0.0.2", port=port))
        endpoint = {"url": f"http://engine.localhost:{port}", "resolve": "1s"}
        pools = {"only": {"backend": "compatible", "model": "served", "endpoints": [endpoint]}}
        gateway = await stack.enter_async_context(lab.gateway(pools, prefix=resolver.prefix(lab.home), check=False))
        await gateway.metrics()
        names.delay = 1.5
        slow = await paced(gateway, lab.size(200, 60), 20.0)
        names.delay, names.answer = 0.0, "127.0.0.2"
        flip = asyncio.create_task(paced(gateway, lab.size(200, 120), 20.0))
        await asyncio.sleep(3.0)
        await old.__aexit__()
        replies = slow + await flip
        lag = (await gateway.metrics())["firsttoken_loop_lag_max_seconds"]
    lost = failed(replies)
    figures = f"{len(lost)} of {len(replies)} failed; {names.queries} queries; longest stall {ms(lag)}"
    return Result(figures, not lost and lag <= 0.05 and names.queries > 0, errors(lost))
