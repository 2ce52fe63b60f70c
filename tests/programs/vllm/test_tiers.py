"""A large model first, a small model where the large would be late: learned from measured times alone."""

from __future__ import annotations

from typing import Any

from tests.programs.vllm.figures import Figures
from tests.programs.vllm.fleet import Gateway
from tests.programs.vllm.traffic import Asked, ask, client, text, user

LEARNING = 24  # requests
MEASURED = 40


def asked(i: int) -> Asked:
    """Every other prompt is long: about 6 s on the large model, 1.1 s on the small one."""
    tokens = 4000 if i % 2 else 100
    return Asked("long" if i % 2 else "short", "", [user(text(tokens, f"tier-{i}"))], 8, repeats=False)


async def test_long_prompts_go_to_the_tier_that_makes_the_budget(tiers: Gateway, figures: Figures) -> None:
    """Short prompts keep the preferred tier; all meet the budget."""
    async with client(tiers.base_url) as sdk:
        answers = [await ask(sdk, "chat", asked(i)) for i in range(LEARNING + MEASURED)]
    records = await tiers.records_of([answer.request_id for answer in answers])
    assert [record["end"] for record in records] == ["completed"] * len(records)
    short, long = records[LEARNING::2], records[LEARNING + 1 :: 2]
    figures.note(f"TTFT budget met, first {LEARNING} requests over two tiers", met(records[:LEARNING]), "%")
    figures.at_least("short prompts on the large model", on("large", short), "%", 90)
    figures.at_least("4k-token prompts on the small model", on("small", long), "%", 90)
    figures.at_least(f"TTFT budget (2.5 s) met, next {MEASURED} requests", met(records[LEARNING:]), "%", 90)


def on(pool: str, records: list[dict[str, Any]]) -> float:
    return 100 * [record["pool"] for record in records].count(pool) / len(records)


def met(records: list[dict[str, Any]]) -> float:
    return 100 * [record["ttft_met"] for record in records].count(True) / len(records)
