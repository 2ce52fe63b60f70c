"""CPU of the proxy per request without a long answer, in microseconds: small requests, and prompts by themselves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache, partial
from itertools import repeat

from benchmarks.client import closed_loop, request
from benchmarks.figures.figure import Engines, Figure, Goal, Measured, Scenario
from benchmarks.figures.users import SHORT, Prompts
from benchmarks.peers import Proxy
from benchmarks.processes import cpu_seconds

SMALL, STREAMS, WHOLE = 3_000, 256, 96  # requests
AT_ONCE = 64  # streams
WHOLE_GOALS = {"100k-new": [Goal(900)], "100k-seen": [Goal(450)]}
QUESTION = ["Tell me a short story about a gateway that routes requests to engines. " * 2]


async def cost(proxy: Proxy, requests: Iterable[bytes], at_once: int) -> float:
    """Microseconds of each."""
    before = cpu_seconds(proxy.pid)
    done = await closed_loop(proxy.port, requests, at_once)
    return (cpu_seconds(proxy.pid) - before) * 1e6 / done


async def small(proxy: Proxy, _engines: Engines) -> Measured:
    asked = request("whole", QUESTION)
    await closed_loop(proxy.port, repeat(asked, 200 // proxy.slowness), 32)
    return {"small": await cost(proxy, repeat(asked, SMALL // proxy.slowness), 32)}


async def stream(proxy: Proxy, _engines: Engines) -> Measured:
    asked = request(f"stream-{SHORT}-5", ["Go on."])
    await closed_loop(proxy.port, repeat(asked, AT_ONCE // proxy.slowness), AT_ONCE)
    return {"stream": await cost(proxy, repeat(asked, STREAMS // proxy.slowness), AT_ONCE)}


@lru_cache(maxsize=1)
def asked(prompts: Prompts, turn: int) -> tuple[Sequence[bytes], Sequence[bytes]]:
    return prompts.ask(WHOLE, f"{prompts.name} whole {turn}", "whole")


async def whole(prompts: Prompts, proxy: Proxy, engines: Engines) -> Measured:
    first, requests = asked(prompts, engines.turn)
    await closed_loop(proxy.port, first, 4)
    return {f"whole-{prompts.name}": await cost(proxy, requests[: WHOLE // proxy.slowness], 16)}


def whole_scenario(prompts: Prompts) -> Scenario:
    name = f"whole-{prompts.name}"
    figure = Figure(name, f"{prompts.title}, answered whole, us", WHOLE_GOALS.get(prompts.name, ()))
    return Scenario(name, [figure], partial(whole, prompts))


SCENARIOS = (
    *(whole_scenario(Prompts(size, seen)) for size in (8_000, 100_000) for seen in (False, True)),
    Scenario("small", [Figure("small", "request of 200 B, us", [Goal(200)])], small),
    Scenario("stream", [Figure("stream", f"stream of {SHORT} tokens, us")], stream),
)
