"""A server killed in the middle of an answer: the other one writes the rest. The last test of all: a server is gone."""

from __future__ import annotations

import asyncio
import os
import signal

from tests.programs.vllm import fleet
from tests.programs.vllm.figures import Figures
from tests.programs.vllm.fleet import Server
from tests.programs.vllm.traffic import client, user
from tests.support.simulated import eventually

STREAMS = 6
TOKENS = 120


async def test_a_server_killed_in_the_middle_of_its_answers_loses_none(engines: list[Server], figures: Figures) -> None:
    """Streams on both servers; every one is whole: one id, one role, one finish_reason, usage of the whole."""
    routes = {"chat": {"tiers": ["small"], "ttft": {"budget": "30s"}, "rescue": "on", "hedge": "off"}}
    with fleet.serving(fleet.config({"small": engines}, routes)) as gateway:
        async with client(gateway.base_url) as sdk:

            async def one(number: int) -> tuple[set[str], int, list[str], int, int]:
                stream = await sdk.chat.completions.create(
                    model="chat",
                    messages=[user(f"{number}: tell me a story")],
                    max_tokens=TOKENS,
                    temperature=0,
                    stream=True,
                    stream_options={"include_usage": True},
                    extra_body={"ignore_eos": True},
                )
                ids, roles, ends, counts = set[str](), 0, list[str](), (0, 0)
                async for event in stream:
                    ids.add(event.id)
                    if event.usage is not None:
                        counts = event.usage.prompt_tokens, event.usage.completion_tokens
                    for choice in event.choices:
                        roles += choice.delta.role is not None
                        ends += [choice.finish_reason] if choice.finish_reason else []
                        if choice.delta.content:
                            begun.add(number)
                return ids, roles, ends, *counts

            begun: set[int] = set()
            uncut = await asyncio.gather(*(one(number) for number in range(STREAMS)))
            begun.clear()
            calls = [asyncio.create_task(one(number)) for number in range(STREAMS)]
            await eventually(lambda: len(begun) == STREAMS, within=60.0)
            os.kill(engines[0].pid, signal.SIGKILL)
            answers = await asyncio.gather(*calls)
        records = gateway.records()[-STREAMS:]
    rescued = [record for record in records if record["rescue"] == "rescued"]
    assert [record["end"] for record in records] == ["completed"] * STREAMS
    assert rescued
    for (ids, roles, ends, prompt, output), before in zip(answers, uncut, strict=True):
        assert (len(ids), roles, ends, prompt) == (1, 1, ["length"], before[3])
        assert abs(output - TOKENS) <= 3  # text is cut into tokens anew, and the cut of a model without training varies
    figures.at_least("streams rescued from a killed server", len(rescued), "", 1)
