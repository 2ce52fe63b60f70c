"""Engines with random faults behind a route with all that leaves and continues streams: no word of an answer is
lost, altered or there twice."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from contextlib import AsyncExitStack
from random import Random
from time import monotonic
from typing import Any

import openai
import pytest

from gateway.app import Gateway
from gateway.observe.record import RequestOutcome
from gateway.parts.rescue.rescue import Rescues
from gateway.upstream.race import Race
from tests.support.gateways import running
from tests.support.rescued_answers import END, Answer, read, scripted
from tests.support.upstream import (
    CLOSE,
    HANG,
    RESET,
    STREAM_HEAD,
    Pause,
    Received,
    Script,
    ScriptedEngine,
    Step,
    chunk,
    reply,
)

pytestmark = pytest.mark.virtual_time

SEEDS = int(os.environ.get("WHOLE_TEXTS", "3"))
WORDS = tuple(f" {number}" for number in range(30))
NO, BROKEN = reply(b'{"error":{"message":"no"}}', "400 Bad Request"), reply(b"{}", "500 Internal Server Error")
ERROR = chunk(b'data: {"error":{"message":"x"}}\n\n')
FAULTS = ("none", "none", "hang", "reset", "close", "error", "pause", "drip")
ROUTE: dict[str, Any] = {
    "tiers": ["small", "large"],
    "rescue": "on",
    "gap": {"budget": "1s"},
    "tpot": {"budget": "50ms"},
}


class Faulty(ScriptedEngine):
    """An engine that counts, continues a text that it is given, and fails in every way."""

    def __init__(self, random: Random) -> None:
        super().__init__(answered=[])
        self.random = random

    def script(self, received: Received) -> Script:
        if received.target == "/tokenize" or received.method == "GET":
            return super().script(received)
        self.answered.append(received)
        message, random = json.loads(received.body)["messages"][-1], self.random
        given = message["content"] if message["role"] == "assistant" else ""
        if random.random() < 0.1:
            return [NO if given else BROKEN]
        words = [*WORDS]
        if random.random() < 0.8:  # else it begins anew
            while given and given.startswith(words[0]):
                given = given.removeprefix(words.pop(0))
        return [STREAM_HEAD, chunk(scripted({"role": "assistant", "content": ""})), *self._faulty(words)]

    def _faulty(self, words: list[str]) -> Iterator[Step]:
        random = self.random
        fault, at, torn = random.choice(FAULTS), random.randrange(len(words) or 1), random.choice((0, 30))
        for number, word in enumerate(words):
            event = scripted({"content": word})
            if fault == "drip" and number >= at:
                yield Pause(random.uniform(0.2, 0.8))
            if number == at and fault not in ("none", "drip"):
                if torn:
                    yield chunk(event[:torn])
                yield from {"hang": (HANG,), "reset": (RESET,), "close": (CLOSE,), "error": (ERROR, HANG)}.get(
                    fault, ()
                )
                yield Pause(random.uniform(0.3, 9.0))
                event = event[torn:]
            yield chunk(event)
        yield from END


async def ask(gateway: Gateway, client: openai.AsyncOpenAI, random: Random, number: int) -> Answer | None:
    """Some callers leave, and some do not read for a while."""
    asked = asyncio.create_task(read(client, f"why {number}?", max_tokens=200))
    await asyncio.sleep(random.uniform(0.0, 3.0))
    if number % 7 == 3:
        asked.cancel()
        return None
    for race in [*gateway.proxy.dispatcher.races.values()] if number % 3 == 1 else ():
        assert isinstance(race, Race)
        if race.relay.begun and not race.answer.done.done():
            race.on_write_paused()
            await asyncio.sleep(random.uniform(0.0, 1.5))
            if not race.answer.done.done():
                race.on_write_resumed()
    return await asked


@pytest.mark.parametrize("seed", range(SEEDS))
async def test_whatever_fails_the_text_of_an_answer_is_whole(seed: int) -> None:
    """Or an explicit error follows a part of it. Nothing leaves the regions of the route; nothing is left behind."""
    random = Random(seed)
    async with AsyncExitStack() as stack:
        small, large = [[await stack.enter_async_context(Faulty(random)) for _ in range(3)] for _ in range(2)]
        places = {
            name: zip(group, ("eu", "eu", "us"), strict=True) for name, group in (("small", small), ("large", large))
        }
        pools = {
            name: {"backend": "vllm", "model": name, "endpoints": [{"url": each.url, "region": at} for each, at in own]}
            for name, own in places.items()
        }
        budget = random.choice([{"ttft": "off"}, {"ttft": {"budget": "900ms", "of": "answer"}}])
        limit = random.choice([{}, {"total": {"budget": "5s", "limit": "8s"}}])
        more = {**budget, **limit, "max_attempts": random.choice((3, 5, 8)), "region": {"only": ["eu"]}}
        defaults = {"stream_idle": "6s", "first_token": "3s"}
        gateway = await stack.enter_async_context(running(pools, {"chat": {**ROUTE, **more}}, defaults=defaults))
        client = openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0)
        await stack.enter_async_context(client)
        for _ in range(4):
            for answer in await asyncio.gather(*(ask(gateway, client, random, number) for number in range(8))):
                if answer is not None:
                    whole = "".join(WORDS)
                    assert whole.startswith(answer.text)
                    assert answer.error or (answer.text, answer.finish_reasons) == (whole, ["stop"])
            await asyncio.sleep(15.0)
        assert not any(each.answered for each in (small[2], large[2]))
        assert all(record.end is not RequestOutcome.INTERNAL for record in gateway.recorder.recent)
        dispatcher = gateway.proxy.dispatcher
        left = (
            dispatcher.retries.retrying,
            dispatcher.retries.active,
            len(dispatcher.races),
            gateway.part(Rescues).texts.used,
        )
        assert left == (0, 0, 0, 0)
        assert not any(load.in_flight for load in gateway.fleet.snapshot(monotonic()).loads.values())
