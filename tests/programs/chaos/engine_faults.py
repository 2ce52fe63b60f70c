"""Rows 2 to 5, 13 and 14: killed, frozen or broken engines, each in a separate process."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from tests.programs.chaos.callers import Reply, ask, chat, ms, quantile, words
from tests.programs.chaos.lab import EngineProcess, GatewayProcess, Lab, within
from tests.programs.chaos.rows import Result, row

CALLERS = 8  # at a time, when an engine is killed
ADDED = 0.1  # s: maximum delay of the first token by a kill, p99
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
    """Replies without a fault and with a fault; `killed`: s from the request to the kill."""

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
    """Kill the engine with the request, again and again; the next request is healthy and measures the peer."""
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
    """The engine with the request is frozen, and killed before the first byte of the reply."""
    return _fail_over_result(await kills(lab, True, lambda seed: chat(words(20, seed), stream=True, max_tokens=8)))


@row(3, "faults", "kill -9 after the head, before a token", "all answered by the peer; +100 ms p99 at most")
async def kill_after_head(lab: Lab) -> Result:
    """The engine with the request is killed 200 ms into a prefill of 0.5 s, after the head of the reply."""
    return _fail_over_result(await kills(lab, False, lambda seed: chat(words(4000, seed), stream=True, max_tokens=8)))


@row(4, "faults", "kill -9 in mid-stream", "no false end; an error event within 100 ms")
async def kill_mid_stream(lab: Lab) -> Result:
    """Of two engines, each in turn is killed in the middle of answers of 400 tokens, and restarted."""
    replies, ends, back = list[Reply](), list[float](), list[float]()
    async with lab.engines(2) as engines, lab.gateway({"both": engine_pool(*(e.url for e in engines))}) as gateway:
        for number in range(lab.size(6, 2)):
            tasks = [asyncio.create_task(_long_answer(gateway, number * 100 + i)) for i in range(CALLERS)]
            await asyncio.sleep(1.0)
            victim, at = engines[number % 2], monotonic()
            await victim.kill()
            replies += await asyncio.gather(*tasks)
            ends += [r.ended_at - at for r in replies[-CALLERS:] if r.error_event]
            await victim.restart()
            back.append(await _until_up(gateway, len(engines)))
    false = sum(r.false_end or r.ended == "hang" for r in replies)
    hit = [r for r in replies if not r.completed]
    silent = [r for r in hit if not r.error_event]
    figures = f"{len(hit)} of {len(replies)} streams hit: {false} false ends, {len(silent)} without an error event; "
    figures += f"event after {ms(quantile(ends, 0.99))} p99; a restarted engine in use after {max(back):.0f} s at most"
    return Result(figures, not false and not silent and bool(ends) and quantile(ends, 0.99) <= 0.1, errors(silent))


async def _until_up(gateway: GatewayProcess, endpoints: int) -> float:
    """s until all endpoints are up, under a request every 0.2 s."""
    began = monotonic()

    async def up() -> bool:
        await ask(gateway.port, chat(f"{monotonic()}", stream=True, max_tokens=2), sent=gateway.sent)
        return (await gateway.metrics())["firsttoken_endpoint_state"] == endpoints

    await within(120.0, up)
    return monotonic() - began


async def _long_answer(gateway: GatewayProcess, seed: int) -> Reply:
    body = chat(f"{seed} tell", stream=True, max_tokens=400, min_tokens=400, ignore_eos=True)
    return await ask(gateway.port, body, sent=gateway.sent)


@row(5, "faults", "an engine accepts and is silent", "first token by the budget + 50 ms; one more attempt")
async def frozen_engine(lab: Lab) -> Result:
    """The first of two engines is frozen (SIGSTOP); sequential requests, a second apart, with a budget of 1 s."""
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


async def paced(gateway: GatewayProcess, number: int, rate: float, model: str = "chat", **more: Any) -> list[Reply]:
    """Open loop: a request every 1/rate s."""
    tasks, began = list[asyncio.Task[Reply]](), monotonic()
    for i in range(number):
        await asyncio.sleep(max(began + i / rate - monotonic(), 0))
        body = chat(f"{model} {i} hello", model, **{"stream": True, "max_tokens": 8, **more})
        tasks.append(asyncio.create_task(ask(gateway.port, body, sent=gateway.sent)))
    return list(await asyncio.gather(*tasks))


RETRIES = "a short run counts the ten retries that the budget holds at the start"


@row(13, "faults", "half of all replies are 500", "attempts at most 1.10 times the requests")
async def half_of_replies_fail(lab: Lab) -> Result:
    """Two engines refuse half of all requests with 500, for 60 s at 20 requests/s."""
    async with lab.engines(2) as engines:
        for engine in engines:
            await engine.faults(status=500, status_share=0.5)
        async with lab.gateway({"both": engine_pool(*(e.url for e in engines))}) as gateway:
            replies = await paced(gateway, lab.size(1200, 100), 20.0)
            metrics = await gateway.metrics()
            for engine in engines:
                await engine.faults()
            await asyncio.sleep(10.0)
    ratio = metrics["firsttoken_attempts_total"] / len(replies)
    answered = 1 - len(failed(replies)) / len(replies)
    figures = f"{ratio:.2f} attempts a request; {answered:.0%} answered"
    return Result(figures, ratio <= 1.10, "" if ratio <= 1.10 else RETRIES)


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
    answered = _peak([at for at, reply in replies if reply.completed and at > back])
    sent = _peak([at - reply.total for at, reply in replies if at > back])
    peak = answered / max(sent, rate)
    hung = sum(reply.ended == "hang" for _, reply in replies)
    after = [reply for at, reply in replies if at > back + 10]
    figures = f"first answer {recovered:.1f} s after; {len(failed(after))} failures from 10 s on; "
    figures += f"fullest second {peak:.2f} times the load; {hung} hangs"
    return Result(figures, recovered <= 10 and not failed(after) and not hung and peak <= 1.2, errors(after))


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
    """Times within the fullest second."""
    ordered = sorted(times)
    return float(max((sum(at <= other < at + 1 for other in ordered) for at in ordered), default=0))
