"""Incidents, one for each common cause of a slow first token: `firsttoken demo --incident NAME`.

An incident begins after calm traffic, marks the requests that it slows as victims, and names the cause that the gateway
should find.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from lab.demo.incident_stage import ANSWER, OURS, THEIRS, IncidentFleet, IncidentStage
from policies.diagnosis.causes import Cause

LONG_WORDS = 7_000  # of a document: 2 s of prefill
HISTORY_WORDS = 5_000  # of a session
TWO_ENGINES = IncidentFleet()
Play = Callable[[IncidentStage], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True)
class Incident:
    """`cause`: expected of each victim."""

    cause: Cause
    play: Play
    fleet: IncidentFleet = TWO_ENGINES


def _session(stage: IncidentStage, words: int = HISTORY_WORDS) -> list[dict[str, str]]:
    """A conversation with a long history, as of an agent."""
    return stage.question(words)


def _next_turn(stage: IncidentStage, messages: list[dict[str, str]]) -> list[dict[str, str]]:
    answer = {"role": "assistant", "content": stage.words(ANSWER)}
    return [*messages, answer, {"role": "user", "content": stage.words(40)}]


async def _long_prompt(stage: IncidentStage) -> None:
    await stage.calm()
    await stage.ask(stage.question(LONG_WORDS), victim=True)


async def _cold_cache(stage: IncidentStage) -> None:
    """The engine that holds a session dies between two turns."""
    await stage.calm()
    messages = _session(stage)
    record = await stage.record(await stage.ask(messages))
    dead = next(
        server for server in stage.servers if record is not None and record.endpoint.id.endswith(str(server.port))
    )
    await dead.kill()
    await asyncio.sleep(1.5)  # for the gateway to notice
    await stage.ask(_next_turn(stage, messages), victim=True)
    await dead.start()


async def _broken_cache(stage: IncidentStage) -> None:
    """A caller puts a time before its prompt, from one turn to the next."""
    await stage.calm()
    messages, session = _session(stage), f"session-{stage.random.random()}"
    await stage.ask(messages, session=session)
    await stage.ask(messages := _next_turn(stage, messages), session=session)
    turn = _next_turn(stage, messages)
    turn[0] = {"role": "system", "content": f"Today is {stage.random.random()}. {turn[0]['content']}"}
    await stage.ask(turn, session=session, victim=True)


async def _evicted(stage: IncidentStage) -> None:
    """Other sessions fill the cache of the engine between two turns."""
    await stage.calm()
    messages = _session(stage)
    await stage.ask(messages)
    for _ in range(12):
        await stage.ask(_session(stage), key=THEIRS)
    await stage.ask(_next_turn(stage, messages), victim=True)


async def _rate_limit(stage: IncidentStage) -> None:
    await stage.calm()
    for server in stage.servers:
        server.faults.status, server.faults.retry_after = 429, stage.random.uniform(2.0, 4.0)
    for _ in range(3):
        asyncio.get_running_loop().call_later(2.0, _heal, stage)
        await stage.ask(stage.question(), victim=True)


def _heal(stage: IncidentStage) -> None:
    for server in stage.servers:
        server.faults.status = None


async def _queued(stage: IncidentStage) -> None:
    """A burst of the same caller's usual prompts: those at its end are late."""
    await stage.calm()
    burst = [asyncio.create_task(stage.ask(stage.question(900))) for _ in range(16)]
    for request_id in await asyncio.gather(*burst):
        found = await stage.record(request_id)
        if found is not None and found.ttft_met is False:
            stage.victims.append(request_id)


async def _noisy_neighbour(stage: IncidentStage) -> None:
    """Another key sends long documents; then a usual request comes."""
    await stage.calm()
    async with asyncio.TaskGroup() as others:
        for _ in range(4):
            others.create_task(stage.ask(stage.question(LONG_WORDS), key=THEIRS))
        await asyncio.sleep(stage.random.uniform(0.1, 0.4))
        await stage.ask(stage.question(), victim=True)


async def _endpoint_failed(stage: IncidentStage) -> None:
    await stage.calm()
    for server in stage.servers:
        server.faults.status = 500
    await stage.ask(stage.question(), victim=True)


async def _silent(stage: IncidentStage) -> None:
    await stage.calm()
    for server in stage.servers:
        server.faults.silent = True
    await stage.ask(stage.question(), victim=True)


async def _connection(stage: IncidentStage) -> None:
    await stage.calm()
    for server in stage.servers:
        await server.stop()
    await stage.ask(stage.question(), victim=True)


async def _gateway_stalled(stage: IncidentStage) -> None:
    await stage.calm()
    asking = asyncio.create_task(stage.ask(stage.question(), victim=True))
    await asyncio.sleep(stage.random.uniform(0.02, 0.1))
    stage.stall(stage.random.uniform(1.2, 2.0))
    await asking


async def _caller_slow(stage: IncidentStage) -> None:
    """A caller sends its body in two halves."""
    await stage.calm()
    host, port = stage.gateway.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = b'{"model":"chat","stream":true,"max_tokens":4,"messages":[{"role":"user","content":"hello"}]}'
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}:{port}\r\nauthorization: Bearer {OURS}\r\n"
    head += f"content-type: application/json\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body[:30])
    await asyncio.sleep(stage.random.uniform(1.5, 3.0))
    writer.write(body[30:])
    answer = await reader.read()
    writer.close()
    lines = answer.partition(b"\r\n\r\n")[0].decode().lower().split("\r\n")
    stage.victims.append(next(line for line in lines if line.startswith("x-request-id:")).partition(": ")[2])


async def _model_thinks(stage: IncidentStage) -> None:
    for server in stage.servers:
        server.faults.thinking_tokens = 3
    await stage.calm()
    for server in stage.servers:
        server.faults.thinking_tokens = 60
    await stage.ask(stage.question(), victim=True, tokens=70)


async def _decode_bound(stage: IncidentStage) -> None:
    """A caller asks for an answer ten times as long."""
    await stage.calm()
    await stage.ask(stage.question(), victim=True, tokens=stage.random.randrange(80, 120))


async def _calm(stage: IncidentStage) -> None:
    await stage.calm(30)


API = IncidentFleet(engines=1, profile="api", ttft="2s")
QUICK: Mapping[str, Any] = {"first_token": "4s"}

INCIDENTS: Mapping[str, Incident] = {
    "long-prompt": Incident(Cause.LONG_PROMPT, _long_prompt),
    "cold-cache": Incident(Cause.COLD_CACHE, _cold_cache),
    "cache-broken": Incident(Cause.CACHE_BROKEN, _broken_cache),
    "evicted-session": Incident(Cause.EVICTED_SESSION, _evicted, IncidentFleet(engines=1)),
    "rate-limit": Incident(Cause.RATE_LIMIT, _rate_limit, API),
    "queued": Incident(Cause.QUEUED, _queued),
    "noisy-neighbour": Incident(Cause.NOISY_NEIGHBOUR, _noisy_neighbour),
    "endpoint-failed": Incident(Cause.ENDPOINT_FAILED, _endpoint_failed),
    "endpoint-silent": Incident(Cause.ENDPOINT_FAILED, _silent, IncidentFleet(defaults=dict(QUICK))),
    "connection": Incident(Cause.CONNECTION, _connection),
    "gateway-stalled": Incident(Cause.GATEWAY_STALLED, _gateway_stalled),
    "caller-slow": Incident(Cause.CALLER_SLOW, _caller_slow),
    "model-thinks": Incident(
        Cause.MODEL_THINKS, _model_thinks, IncidentFleet(route={"ttft": {"budget": "1s", "of": "answer"}})
    ),
    "decode-bound": Incident(
        Cause.DECODE_BOUND, _decode_bound, IncidentFleet(route={"total": {"budget": "3s"}, "ttft": {"budget": "1s"}})
    ),
}
CALM = Incident(Cause.UNKNOWN, _calm)  # no request is slow
