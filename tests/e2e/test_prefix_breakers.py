"""An agent's session with a changing head hits the prefix cache as one without."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.builders import calling, post
from tests.support.gateways import pool, running
from tests.support.simulated import engine_pool, engines, eventually
from tests.support.upstream import Upstream, reply

pytestmark = pytest.mark.virtual_time

SYSTEM = " ".join(f"rule{number}" for number in range(1500))
TURNS = 8


def session(head: bool) -> list[list[dict[str, Any]]]:
    """The messages of each turn of an agent, with a result of a tool of some 100 tokens a turn."""
    turns: list[list[dict[str, Any]]] = []
    said: list[dict[str, Any]] = []
    for turn in range(TURNS):
        said = [*said, {"role": "user", "content": f"result {turn}: " + "word " * 100}]
        line = f"x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch={turn * 7919:05x};\n"
        turns.append([{"role": "system", "content": (line if head else "") + SYSTEM}, *said])
        said = [*said, {"role": "assistant", "content": "go on"}]
    return turns


async def hit_share(head: bool) -> tuple[float, float]:
    """Share of the prompt tokens of all turns that the engine had cached, and that were predicted."""
    async with engines(2) as servers, running({"engines": engine_pool(*servers)}) as gateway:
        async with calling(gateway.url) as caller:
            for number, messages in enumerate(session(head), 1):
                await caller.ask(post({"model": "chat", "messages": messages, "max_tokens": 2, "stream": True}))
                await caller.chunks()
                await eventually(lambda count=number: len(gateway.recorder.recent) == count)
        records = list(gateway.recorder.recent)
    prompt = sum(record.answer.prompt_tokens or 0 for record in records)
    reported = sum(record.answer.cached_tokens or 0 for record in records)
    return reported / prompt, sum(record.placed.cached_tokens or 0 for record in records) / prompt


async def test_a_changing_head_costs_no_hit() -> None:
    """Of engines that do not leave the line out themselves."""
    (changing, predicted), (still, _) = await hit_share(head=True), await hit_share(head=False)
    assert still > 0.7
    assert changing >= 0.9 * still
    assert predicted == pytest.approx(changing, abs=0.1)


LINE = "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch=36ee5;"
RULES = {"type": "text", "text": "You are Claude Code.", "cache_control": {"type": "ephemeral"}}
MESSAGE = {
    "type": "message",
    "role": "assistant",
    "content": [{"type": "text", "text": "hi"}],
    "stop_reason": "end_turn",
}
MESSAGES = {
    "model": "chat",
    "max_tokens": 9,
    "system": [{"type": "text", "text": LINE}, RULES],
    "messages": [{"role": "user", "content": "hello"}],
}


@pytest.mark.parametrize(("backend", "kept"), [("anthropic", True), ("vllm", False)])
async def test_the_line_reaches_no_server_but_anthropics(backend: str, kept: bool) -> None:
    """Anthropic's API reads it; any other would compute the whole prompt anew each time."""
    answer = reply(json.dumps(MESSAGE).encode(), "200 OK", "content-type: application/json")
    async with (
        Upstream([answer]) as upstream,
        running({"only": pool(upstream.url, backend=backend)}) as gateway,
        calling(gateway.url) as caller,
    ):
        status, _, body = await caller.whole(post(MESSAGES, path="/v1/messages"))
        (sent,) = (json.loads(asked.body) for asked in upstream.requests if asked.target.startswith("/v1/messages"))
    assert (status, json.loads(body)["content"]) == (200, MESSAGE["content"])
    assert sent["system"] == (MESSAGES["system"] if kept else [RULES])
