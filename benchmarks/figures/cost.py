"""CPU of the proxy per request and per streamed chunk, in microseconds."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat

from benchmarks.client import closed_loop, request, text, texts
from benchmarks.figures.figure import Engines, Figure, Measured, Scenario
from benchmarks.peers import Proxy
from benchmarks.processes import cpu_seconds

TURNS, TURN = 50, 2_000  # of a conversation of 100 KB, and bytes of each
NEW = 1_000  # bytes of the new turn
SMALL, LARGE, UNSEEN = 3_000, 400, 60  # requests
SHORT, LONG = 10, 200  # tokens
AT_ONCE = 64  # streams
QUESTION = ["Tell me a short story about a gateway that routes requests to engines. " * 2]


async def cost(proxy: Proxy, requests: Iterable[bytes], at_once: int) -> float:
    """Microseconds of each."""
    before = cpu_seconds(proxy.pid)
    done = await closed_loop(proxy.port, requests, at_once)
    return (cpu_seconds(proxy.pid) - before) * 1e6 / done


async def small(proxy: Proxy, _engines: Engines) -> Measured:
    asked = request("whole", QUESTION)
    await closed_loop(proxy.port, repeat(asked, 200), 32)
    return {"small": await cost(proxy, repeat(asked, SMALL), 32)}


async def unseen(proxy: Proxy, _engines: Engines) -> Measured:
    return {"unseen": await cost(proxy, [request("whole", texts([TURN] * TURNS)) for _ in range(UNSEEN)], 4)}


def continued(count: int) -> list[bytes]:
    """A conversation, again and again with another last turn."""
    history = texts([TURN] * (TURNS - 1))
    return [request("whole", [*history, text(NEW)]) for _ in range(count)]


async def seen(proxy: Proxy, _engines: Engines) -> Measured:
    asked = continued(LARGE + 16)
    await closed_loop(proxy.port, asked[:16], 4)
    return {"seen": await cost(proxy, asked[16:], 16)}


async def chunk(proxy: Proxy, _engines: Engines) -> Measured:
    """The difference between long and short streams is the cost of their chunks."""
    short, long = (request(f"stream-{tokens}-5", ["Go on."]) for tokens in (SHORT, LONG))
    await closed_loop(proxy.port, repeat(short, AT_ONCE), AT_ONCE)
    few = await cost(proxy, repeat(short, 4 * AT_ONCE), AT_ONCE)
    many = await cost(proxy, repeat(long, 2 * AT_ONCE), AT_ONCE)
    return {"stream": few, "chunk": (many - few) / (LONG - SHORT)}


SCENARIOS = (
    Scenario("small", (Figure("small", "request of 200 B, us", 200),), small),
    Scenario("unseen", (Figure("unseen", "request of 100 KB, never seen, us", 900),), unseen),
    Scenario("seen", (Figure("seen", "request of 100 KB, all but 1 KB seen before, us", 450),), seen),
    Scenario(
        "chunk",
        (
            Figure("stream", f"stream of {SHORT} tokens, us"),
            Figure("chunk", "streamed chunk, us", 1.15, times_nginx=True, digits=1),
        ),
        chunk,
    ),
)
