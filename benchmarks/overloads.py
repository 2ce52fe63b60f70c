"""Ten overloads of a gateway over real sockets, recorded in its access log: what a replay is held against.

Engines are simulated ones of altered speed, of no profile that a replay knows. `record(NAME, FOLDER)` plays one and
leaves `NAME.jsonl`, the access log, and `NAME.yaml`, the configuration, without profiles.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

import aiohttp

from backends.server_profiles import PROFILES, ApiProfile, EngineProfile, Profile
from gateway.app import Gateway
from gateway.config.models import Config
from gateway.observe.logs import AccessLog
from gateway.process import loop_factory
from gateway.tokenize.tokenizers import encoder
from lab.demo.scene import WORDS
from lab.servers.simulated_server import SimulatedServer

LEAVING = 0.5  # s
CALM = 8.0  # s before the overload, at a third of the rate: engines are known by then
SECONDS = 44.0  # of arrivals
SETTLE = 12.0  # s after these for the last answers; then callers leave
MODEL = "served"
SEEDS = 100  # of the callers and servers of one overload, at most


def altered(name: str, prefill: float, decode: float, **more: Any) -> Profile:
    """An engine whose prompts take `prefill` times, whose answers `decode` times as long."""
    profile = PROFILES[name]
    assert isinstance(profile, EngineProfile)
    scaled = {
        "tokens_per_ms": profile.tokens_per_ms / prefill,
        "attention_ns": profile.attention_ns * prefill,
        "weights_ms": profile.weights_ms * decode,
        "step_ms": profile.step_ms * decode,
        "context_us": profile.context_us * decode,
    }
    return replace(profile, **{**scaled, **more})


L4, L4_SLOW = altered("8b-l4", 1.35, 0.8), altered("8b-l4", 2.2, 1.5)
A100 = altered("8b-a100", 2.6, 1.4, kv_tokens=120_000)
SMALL_KV = altered("8b-l4", 0.8, 0.6, kv_tokens=24_000)
API = replace(PROFILES["api"], ttft=0.55, tpot=0.02, requests_per_minute=60)


@dataclass(frozen=True, slots=True)
class Callers:
    """Conversations of a route: `rate` begin per second, times `burst` in the middle third."""

    rate: float
    route: str = "chat"
    turns: int = 1
    system: int = 600  # words: about as many tokens
    opening: int = 300
    turn: int = 80  # words of each further turn
    answer: int = 40  # tokens, median
    pause: float = 1.5  # s between turns, mean
    burst: float = 1.0
    key: str = "team-a"
    returns: int = 0  # times that a refused caller comes back


@dataclass(frozen=True, slots=True)
class Overload:
    """`pools`: servers by pool; `routes`: as configured."""

    pools: Mapping[str, Sequence[Profile]]
    routes: Mapping[str, Mapping[str, Any]]
    callers: Sequence[Callers]


def _chat(ttft: str = "1s", tiers: Sequence[str] = ("main",), **more: Any) -> dict[str, Any]:
    return {"tiers": list(tiers), "ttft": {"budget": ttft}, "tpot": "off", **more}


BEST = {"on_miss": "best_effort"}
OVERLOADS: Mapping[str, Overload] = {
    "one-engine": Overload({"main": [L4]}, {"chat": _chat()}, [Callers(6.5, opening=500)]),
    "two-engines-turns": Overload(
        {"main": [L4, L4]}, {"chat": _chat("1.5s", **BEST)}, [Callers(3.5, turns=4, opening=700)]
    ),
    "one-slower": Overload({"main": [L4, L4_SLOW]}, {"chat": _chat("1.2s")}, [Callers(9.0, opening=500)]),
    "burst": Overload({"main": [A100]}, {"chat": _chat("600ms", **BEST)}, [Callers(4.0, opening=500, burst=3.0)]),
    "long-prompts": Overload({"main": [A100]}, {"chat": _chat("2s")}, [Callers(2.6, opening=2_500)]),
    "behind-batch": Overload(
        {"main": [L4]},
        {"chat": _chat("1.2s"), "batch": {"workload": "batch", "tiers": ["main"]}},
        [Callers(5.0), Callers(1.0, "batch", opening=1_500, answer=60)],
    ),
    "long-answers": Overload(
        {"main": [SMALL_KV]}, {"chat": _chat("1.5s", tpot={"budget": "120ms"}, **BEST)}, [Callers(5.0, answer=160)]
    ),
    "to-an-api": Overload({"main": [L4_SLOW], "api": [API]}, {"chat": _chat("1.2s", ("main", "api"))}, [Callers(7.0)]),
    "two-callers": Overload(
        {"main": [L4]}, {"chat": _chat("1.5s")}, [Callers(1.2), Callers(4.0, key="team-b", opening=500)]
    ),
    "callers-return": Overload(
        {"main": [L4, L4]}, {"chat": _chat("800ms")}, [Callers(4.5, turns=3, opening=600, returns=2)]
    ),
}


def configuration(overload: Overload, urls: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    pools = {}
    for name, profiles in overload.pools.items():
        hosted = isinstance(profiles[0], ApiProfile)
        kind = {"backend": "compatible", "api_key": "none"} if hosted else {"backend": "simulated"}
        pools[name] = {**kind, "model": MODEL, "endpoints": list(urls[name])}
    keys = sorted({callers.key for callers in overload.callers})
    return {
        "server": {"listen": "127.0.0.1:0", "admin": "127.0.0.1:0", "drain": {"grace": "100ms"}},
        "pools": pools,
        "routes": dict(overload.routes),
        "keys": [{"name": key, "sha256": sha256(key.encode()).hexdigest()} for key in keys],
        "telemetry": {"access_log": "off"},
    }


class Conversations:
    """Callers of one overload. Each conversation ends with a refused turn."""

    def __init__(self, session: aiohttp.ClientSession, spec: Callers, seed: int) -> None:
        self._session = session
        self._spec = spec
        self._random = Random(seed)
        self._system = self._words(spec.system)

    async def arrive(self) -> None:
        spec, loop = self._spec, asyncio.get_running_loop()
        began = loop.time()
        async with asyncio.TaskGroup() as conversations:
            while (at := loop.time() - began) < SECONDS:
                busy = 1 / 3 if at < CALM else spec.burst if SECONDS / 3 < at < SECONDS * 2 / 3 else 1.0
                await asyncio.sleep(self._random.expovariate(spec.rate * busy))
                conversations.create_task(self._converse())

    async def _converse(self) -> None:
        messages = [{"role": "system", "content": self._system}]
        for turn in range(self._spec.turns):
            words = self._spec.turn if turn else int(self._spec.opening * self._random.lognormvariate(0.0, 0.5))
            messages.append({"role": "user", "content": self._words(words)})
            if (answer := await self._persist(messages)) is None:
                return
            messages.append({"role": "assistant", "content": answer})
            await asyncio.sleep(self._random.expovariate(1 / self._spec.pause))

    async def _persist(self, messages: Sequence[Mapping[str, str]]) -> str | None:
        """The answer; None: refused, after all returns."""
        for _ in range(self._spec.returns + 1):
            answer, after = await self._ask(messages)
            if answer is not None:
                return answer
            await asyncio.sleep(after)
        return None

    async def _ask(self, messages: Sequence[Mapping[str, str]]) -> tuple[str | None, float]:
        """The answer, or the seconds of Retry-After."""
        tokens = max(int(self._spec.answer * self._random.lognormvariate(0.0, 0.4)), 2)
        body = {"model": self._spec.route, "messages": messages, "stream": True}
        body |= {"max_tokens": tokens, "min_tokens": tokens}
        headers = {"authorization": f"Bearer {self._spec.key}"}
        async with self._session.post("/v1/chat/completions", json=body, headers=headers) as reply:
            raw = await reply.text()
            if reply.status != 200:
                return None, float(reply.headers.get("retry-after", 1))
        events = [json.loads(line[6:]) for line in raw.splitlines() if line.startswith("data: {")]
        return "".join(event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"]), 0.0

    def _words(self, count: int) -> str:
        return " ".join(self._random.choices(WORDS, k=count))


async def _record(name: str, folder: Path, seed: int) -> None:
    overload, encode = OVERLOADS[name], encoder("o200k_base").encode
    async with AsyncExitStack() as stack:
        urls: dict[str, list[str]] = {}
        for pool, profiles in overload.pools.items():
            for number, profile in enumerate(profiles):
                server = SimulatedServer(profile, model=MODEL, encode=encode, seed=SEEDS * seed + number)
                await server.start()
                stack.push_async_callback(server.stop)
                urls.setdefault(pool, []).append(server.url)
        document = configuration(overload, urls)
        (folder / f"{name}.yaml").write_text(json.dumps(document))  # JSON is YAML
        gateway = Gateway(Config.model_validate(json.loads(json.dumps(document))))
        log = AccessLog(str(folder / f"{name}.jsonl"))
        gateway.recorder.batch_sinks.append(log)
        await gateway.start()
        stack.callback(log.close)
        stack.push_async_callback(gateway.stop)
        options: dict[str, Any] = {"timeout": aiohttp.ClientTimeout(total=None)}
        session = aiohttp.ClientSession(gateway.url, connector=aiohttp.TCPConnector(limit=0), **options)
        await stack.enter_async_context(session)
        callers = enumerate(overload.callers, SEEDS * seed)
        crowd = [Conversations(session, spec, number).arrive() for number, spec in callers]
        with suppress(TimeoutError):  # of the last answers
            await asyncio.wait_for(asyncio.gather(*crowd), SECONDS + SETTLE)
        await session.close()
        await asyncio.sleep(LEAVING)  # until the gateway has seen who left


def record(name: str, folder: Path, seed: int = 0) -> None:
    """Plays one overload. The log of a run before is replaced. `seed`: of callers and engines."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.jsonl").unlink(missing_ok=True)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(_record(name, folder, seed))
