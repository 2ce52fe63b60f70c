"""Ends of answers by Envoy's access log, before the real Envoy with the configuration of deploy/envoy: `make envoy`."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp

from gateway.app import Gateway
from gateway.observe.part_notes import SIGHT, AnswerSight
from gateway.observe.record import RequestOutcome
from tests.programs.envoy.test_envoy import BOTH_MODES, EVERY_VERSION, ask, chat, picked
from tests.support.simulated import eventually


async def begin_log(session: aiohttp.ClientSession, url: str, gateway: Gateway) -> None:
    """Envoy opens its log behind the first answer, which the picker has read whole."""
    await ask(session, url, chat("hello"))
    await eventually(lambda: gateway.recorder.live == 0)
    while SIGHT.of(gateway.recorder.recent[-1]) is not AnswerSight.ACCESS_LOG:
        await ask(session, url, chat("hello"))
        await eventually(lambda: gateway.recorder.live == 0)
    gateway.recorder.recent.clear()


@EVERY_VERSION
async def test_an_answer_is_read_to_its_first_token_and_arrives_whole(tmp_path: Path, version: str) -> None:
    """Tokens are counted by bytes, within 5%."""
    async with picked(tmp_path, version) as (url, session, _, gateway):
        await begin_log(session, url, gateway)
        body = {**chat("hello"), "max_tokens": 100}
        for _ in range(5):
            status, answer = await ask(session, url, body)
            assert (status, answer.count(b"data: ") > 100, answer.endswith(b"data: [DONE]\n\n")) == (200, True, True)
        await eventually(lambda: gateway.recorder.live == 0)
        found = [each for each in gateway.recorder.recent if SIGHT.of(each) is AnswerSight.ACCESS_LOG]
        assert len(found) >= 4
        for record in found:
            assert record.end is RequestOutcome.COMPLETED
            assert 95 <= (record.answer.output_tokens or 0) <= 105
            assert record.ttft is not None
            assert record.total > record.ttft
        assert not any(load.in_flight for load in gateway.monitor.loads().values())


@EVERY_VERSION
async def test_a_caller_who_leaves_later_frees_the_engine(tmp_path: Path, version: str) -> None:
    async with picked(tmp_path, version) as (url, session, _, gateway):
        await begin_log(session, url, gateway)
        async with session.post(f"{url}/v1/chat/completions", json={**chat("hello"), "max_tokens": 5_000}) as reply:
            for _ in range(20):
                await reply.content.readline()
            assert sum(load.in_flight for load in gateway.monitor.loads().values()) == 1
            reply.close()
        await eventually(lambda: [each.end for each in gateway.recorder.recent] == [RequestOutcome.CLIENT_GONE])
        assert SIGHT.of(gateway.recorder.recent[-1]) is AnswerSight.ACCESS_LOG
        assert not any(load.in_flight for load in gateway.monitor.loads().values())


@EVERY_VERSION
@BOTH_MODES
async def test_answers_of_many_callers_at_once_arrive_whole(tmp_path: Path, version: str, duplex: bool) -> None:
    async with picked(tmp_path, version, duplex=duplex) as (url, session, _, gateway):
        for _ in range(4):
            for status, answer in await asyncio.gather(*(ask(session, url, chat("hello")) for _ in range(20))):
                assert (status, answer.endswith(b"data: [DONE]\n\n")) == (200, True)
        await eventually(lambda: gateway.recorder.live == 0)
        sights = {SIGHT.of(each) for each in gateway.recorder.recent}
        assert (AnswerSight.ACCESS_LOG in sights) is not duplex
