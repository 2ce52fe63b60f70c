"""The pace of a replay against a real address, in virtual time."""

from __future__ import annotations

import asyncio

import pytest

from gateway.config.models import Config
from lab.live.live_player import POOL, LiveAnswer, LivePlayer, ReplayAborted, live_server
from lab.live.trace_prompts import TracePrompts
from lab.traffic.traces import Arrival
from tests.support.builders import STREAMED
from tests.support.scripted_fleet import dead_url
from tests.support.simulated import engines
from tests.support.upstream import HANG, Received, Script, Upstream, reply

pytestmark = pytest.mark.virtual_time


async def played(url: str, arrivals: list[Arrival], timeout: float = 5.0) -> list[LiveAnswer]:
    pool = {"backend": "compatible", "model": POOL, "endpoints": [url]}
    answers: list[LiveAnswer] = []
    async with live_server(Config.model_validate({"pools": {POOL: pool}}), timeout) as server:
        await LivePlayer(server, TracePrompts(), answers, "served").play(arrivals)
    return answers


def every(seconds: float, count: int, prompt: int = 100) -> list[Arrival]:
    return [Arrival(number * seconds, prompt, 3, route="chat") for number in range(count)]


class Clocked(Upstream):
    """Notes when requests come."""

    def __init__(self, *scripts: Script) -> None:
        super().__init__(*scripts)
        self.came: list[float] = []

    def script(self, received: Received) -> Script:
        self.came.append(asyncio.get_running_loop().time())
        return super().script(received)


async def test_requests_are_sent_at_their_recorded_times() -> None:
    """An open loop: the first request hangs, and no later one waits for it."""
    async with Clocked([HANG], *[[STREAMED]] * 3) as server:
        answers = await played(server.url, every(1.0, 4))
    assert [came - server.came[0] for came in server.came] == pytest.approx([0.0, 1.0, 2.0, 3.0], abs=0.1)
    assert [answer.failure for answer in answers] == ["", "", "", "no token within 5 s"]
    assert max(answer.late for answer in answers) < 0.1


async def test_times_are_those_of_the_first_tokens() -> None:
    """Of an engine on its own clock: a prompt of 8,000 tokens takes longer than one of 100."""
    async with engines() as [engine]:
        short, long = await played(engine.url, [*every(1.0, 1), Arrival(2.0, 8_000, 3, route="chat")])
    assert short.first is not None
    assert long.first is not None
    assert 0.01 < short.first < 0.1 < 0.2 < long.first < 0.5
    assert (short.output_tokens, long.output_tokens) == (3, 3)
    assert long.prompt_tokens == pytest.approx(8_000, rel=0.01)


@pytest.mark.parametrize(
    ("script", "cause"),
    [
        ([reply(b'{"error":{"message":"no"}}', "401 Unauthorized")], "401"),
        ([reply(b"Not Found", "404 Not Found")], "path"),
        ([b"SSH-2.0-OpenSSH_9.9\r\n"], "HTTP"),
    ],
)
async def test_what_every_request_would_meet_ends_the_replay(script: list[bytes], cause: str) -> None:
    """With the first request: the next one, an hour later, is not waited for."""
    async with Upstream(script) as server:
        with pytest.raises(ReplayAborted, match=cause):
            await played(server.url, every(3_600.0, 3))
        assert len(server.requests) == 1


async def test_a_refused_connection_ends_the_replay() -> None:
    with pytest.raises(ReplayAborted, match=r"^connection refused$"):
        await played(dead_url(), every(3_600.0, 3))


@pytest.mark.parametrize("status", ["401 Unauthorized", "503 Busy", "404 Not Found"])
async def test_failures_after_an_answer_are_misses(status: str) -> None:
    """The replay goes on."""
    failing = [reply(b"{}", status)]
    async with Upstream([STREAMED], failing, [STREAMED], failing) as server:
        answers = await played(server.url, every(1.0, 4))
    assert [(answer.first is None, bool(answer.failure)) for answer in answers] == [(False, False), (True, True)] * 2


async def test_a_busy_server_does_not_end_the_replay() -> None:
    """Be it with the very first request."""
    async with Upstream([reply(b"{}", "503 Busy")], [STREAMED]) as server:
        answers = await played(server.url, every(1.0, 2))
    assert [answer.first is None for answer in answers] == [True, False]


async def test_no_more_requests_than_places_are_in_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """The third of two places waits until one hangs no longer, and is told as late."""
    monkeypatch.setattr("lab.live.live_player.MAX_IN_FLIGHT", 2)
    async with Clocked([HANG], [HANG], [STREAMED]) as server:
        answers = await played(server.url, every(0.0, 3), timeout=5.0)
    assert server.came[2] - server.came[0] == pytest.approx(5.0, abs=0.1)
    assert answers[-1].late == pytest.approx(5.0, abs=0.1)
