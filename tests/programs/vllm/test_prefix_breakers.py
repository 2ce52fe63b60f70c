"""An agent's session with Claude Code's changing head hits vLLM's prefix cache as one without."""

from __future__ import annotations

from dataclasses import replace

from tests.programs.vllm.figures import Figures
from tests.programs.vllm.fleet import Gateway
from tests.programs.vllm.traffic import Asked, ask, client, conversation

LINE = "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch={:05x};\n"


def with_head(turn: int, asked: Asked) -> Asked:
    system, *rest = asked.messages
    return replace(asked, messages=[{**system, "content": LINE.format(turn * 7919) + system["content"]}, *rest])


async def cached_share(pair: Gateway, asked: list[Asked]) -> float:
    """Of the prompt tokens of a session, those that the engine had cached."""
    async with client(pair.base_url) as sdk:
        answers = [await ask(sdk, "chat", one) for one in asked]
    records = await pair.records_of([answer.request_id for answer in answers])
    cached = sum(record["cached_tokens_reported"] or 0 for record in records)
    return float(cached / sum(record["prompt_tokens_reported"] for record in records))


async def test_a_changing_head_costs_no_hit(pair: Gateway, figures: Figures) -> None:
    """Sessions with system prompts of their own, asked turn by turn."""
    still = await cached_share(pair, conversation(1005))
    changing = await cached_share(pair, [with_head(turn, asked) for turn, asked in enumerate(conversation(2005))])
    figures.at_least("hits with a changing head, of those without", changing / still, "", 0.9)
