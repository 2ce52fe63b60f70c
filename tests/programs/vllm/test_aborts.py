"""A client that disconnects frees the engine: within 300 ms the engine neither runs nor queues the request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest
from openai import AsyncOpenAI

from tests.programs.vllm.figures import Figures
from tests.programs.vllm.fleet import POLL, Gateway, Server
from tests.programs.vllm.traffic import client, text, user

BOUND = 300.0  # ms
GIVE_UP = 10.0  # s
ROUNDS = 5


@pytest.fixture
async def sdk(pair: Gateway, engines: list[Server]) -> AsyncIterator[AsyncOpenAI]:
    """A client with idle engines; afterwards no request is left in flight."""
    await until(lambda: busy(engines) == 0)
    async with client(pair.base_url) as sdk:
        yield sdk
    await until(lambda: busy(engines) == 0)
    await until(lambda: pair.in_flight() == 0)


def busy(engines: list[Server]) -> int:
    return sum(engine.busy() for engine in engines)


async def until(condition: Callable[[], bool]) -> float:
    """Milliseconds until the condition is true."""
    began = time.monotonic()
    while not await asyncio.to_thread(condition):
        assert time.monotonic() - began < GIVE_UP, "it never came true"
        await asyncio.sleep(POLL)
    return 1e3 * (time.monotonic() - began)


async def leave(call: asyncio.Task[Any]) -> None:
    """Cancels the call; the SDK closes the connection."""
    call.cancel()
    with suppress(asyncio.CancelledError):
        await call


async def worst_of(rounds: int, once: Callable[[int], Awaitable[float]]) -> float:
    return max([await once(n) for n in range(rounds)])


def starts(sdk: AsyncOpenAI, prompt: str, *, stream: bool) -> asyncio.Task[Any]:
    call = sdk.chat.completions.create(
        model="chat", messages=[user(prompt)], max_tokens=4000, stream=stream, extra_body={"ignore_eos": True}
    )
    return asyncio.create_task(call)


async def test_an_abort_during_prefill_frees_the_engine(
    sdk: AsyncOpenAI, engines: list[Server], figures: Figures
) -> None:
    """In the middle of a long prompt."""

    async def once(n: int) -> float:
        call = starts(sdk, text(4000, f"before-{n}"), stream=True)
        await until(lambda: busy(engines) > 0)
        assert not call.done()
        await leave(call)
        return await until(lambda: busy(engines) == 0)

    figures.at_most(
        "engine idle after abort before the first token, worst of 5", await worst_of(ROUNDS, once), "ms", BOUND
    )


async def test_an_abort_mid_stream_frees_the_engine(sdk: AsyncOpenAI, engines: list[Server], figures: Figures) -> None:
    """After five chunks of four thousand."""

    async def once(n: int) -> float:
        stream = await starts(sdk, text(60, f"mid-{n}"), stream=True)
        for _ in range(5):
            await anext(stream)
        await stream.close()
        return await until(lambda: busy(engines) == 0)

    figures.at_most("engine idle after abort mid-stream, worst of 5", await worst_of(ROUNDS, once), "ms", BOUND)


async def test_an_abort_of_a_whole_answer_frees_the_engine(
    sdk: AsyncOpenAI, engines: list[Server], figures: Figures
) -> None:
    """Before any byte is written to the client."""

    async def once(n: int) -> float:
        call = starts(sdk, text(60, f"whole-{n}"), stream=False)
        await until(lambda: busy(engines) > 0)
        await asyncio.sleep(0.2)  # into the decode
        assert not call.done()
        await leave(call)
        return await until(lambda: busy(engines) == 0)

    figures.at_most(
        "engine idle after abort of a non-streamed answer, worst of 5", await worst_of(ROUNDS, once), "ms", BOUND
    )


async def test_an_abort_in_the_engines_queue_frees_the_engine(
    sdk: AsyncOpenAI, engines: list[Server], figures: Figures
) -> None:
    """Both engines are filled past the gateway, so the request waits behind a prefill."""

    async def once(n: int) -> float:
        others = [client(f"{engine.url}/v1") for engine in engines]
        messages = [user(text(6000, f"ahead-{n}"))]
        fill = [
            asyncio.create_task(other.chat.completions.create(model="small", messages=messages, max_tokens=1))
            for other in others
        ]
        await until(lambda: all(engine.busy() == 1 for engine in engines))
        call = starts(sdk, text(2000, f"queued-{n}"), stream=True)
        await until(lambda: any(engine.waiting() == 1 for engine in engines))
        await leave(call)
        took = await until(lambda: all(engine.waiting() == 0 for engine in engines))
        assert not all(task.done() for task in fill)  # the abort emptied the queue, not the end of the prefill
        await asyncio.gather(*fill)
        for other in others:
            await other.close()
        return took

    figures.at_most("engine queue empty after abort in it, worst of 3", await worst_of(3, once), "ms", BOUND)
