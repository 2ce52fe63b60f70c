"""TTFT of `predicted` compared with simpler scorers on two engines: 300 requests each, eight at a time.

All scorers run in rounds of a third each, in a rotating order, so that a busy moment of the machine affects all.
"""

from __future__ import annotations

import asyncio
import random
from statistics import mean
from typing import Any

import pytest

from tests.programs.vllm import fleet
from tests.programs.vllm.figures import Figures
from tests.programs.vllm.fleet import Server
from tests.programs.vllm.talks import BLOCK, Talk, run_talks, share

RULES = ("predicted", "round_robin", "least_request", "prefix_hash")
ROUNDS = 3


def routes() -> dict[str, Any]:
    """Without a TPOT budget: a CPU keeps none, and holding prefills back for TPOT is a different trade-off."""
    same = {"tiers": ["small"], "ttft": {"budget": "30s"}, "tpot": "off", "hedge": "off"}
    return {rule: {**same, "scorer": rule} for rule in RULES}


def talks(name: str) -> list[Talk]:
    """A third of the workload: nine conversations of six turns, 15 documents asked about twice, 16 short questions."""
    turns = [Talk("turn", f"{name}-turn-{i}", f"{name}-system-{i // 3}", 6) for i in range(9)]
    documents = [Talk("long", f"{name}-long-{i}", "", 2) for i in range(15)]
    return turns + documents + [Talk("short", f"{name}-short-{i}", "", 1) for i in range(16)]


@pytest.fixture(scope="module")
def records_by_rule(engines: list[Server]) -> dict[str, list[dict[str, Any]]]:
    """Records by scorer."""

    async def all_of(gateway: fleet.Gateway) -> dict[str, list[dict[str, Any]]]:
        found: dict[str, list[dict[str, Any]]] = {rule: [] for rule in RULES}
        for turn in range(ROUNDS):
            for rule in RULES[turn:] + RULES[:turn]:
                name = f"{rule}-{turn}"
                answers = await run_talks(gateway.base_url, rule, talks(name), random.Random(name))
                found[rule] += await gateway.records_of([answer.request_id for answer in answers])
        return found

    with fleet.serving(fleet.config({"small": engines}, routes(), events=True)) as gateway:
        return asyncio.run(all_of(gateway))


def test_the_mean_ttft_is_well_below_the_simpler_rules(
    records_by_rule: dict[str, list[dict[str, Any]]], figures: Figures
) -> None:
    """At most 0.6 of round robin's, and below least_request's and prefix_hash's."""
    ttft = {rule: mean(record["ttft_ms"] for record in records) for rule, records in records_by_rule.items()}
    for rule, records in records_by_rule.items():
        assert [record["end"] for record in records] == ["completed"] * 300
        hit = sum(r["cached_tokens_reported"] or 0 for r in records) / sum(r["prompt_tokens_reported"] for r in records)
        figures.note(f"mean TTFT, {rule}", ttft[rule], "ms")
        figures.note(f"hit rate, {rule}", 100 * hit, "%")
        figures.note(f"held back, {rule}", mean(r["stages_ms"].get("queue", 0.0) for r in records), "ms")
    figures.at_most("mean TTFT, ours / round robin", ttft["predicted"] / ttft["round_robin"], "", 0.6)
    figures.at_most("mean TTFT, ours / least_request", ttft["predicted"] / ttft["least_request"], "", 1.0)
    figures.at_most("mean TTFT, ours / prefix_hash", ttft["predicted"] / ttft["prefix_hash"], "", 1.0)


def test_predicted_hits_equal_reported_hits_under_every_rule(
    records_by_rule: dict[str, list[dict[str, Any]]], figures: Figures
) -> None:
    """Within one block."""
    pairs = [(r["cached_tokens_predicted"], r["cached_tokens_reported"]) for s in records_by_rule.values() for r in s]
    figures.note("hits within one block, all rules", share([abs(a - b) <= BLOCK for a, b in pairs]), "%")
