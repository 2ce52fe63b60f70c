"""`accepts` and `reasoning` of a pool: facts of its servers in place of the known ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from backends.catalog import build
from backends.facts.lookup import facts_of
from backends.facts.model_facts import Facts, Reasoning
from gateway.config.loading import load
from tests.support.loading_cases import refusal


def believed(pool: str) -> Facts:
    """Facts of the model of a pool, by the backend that the configuration makes."""
    Path("facts.yaml").write_text(f"pools:\n  p: {{{pool}}}\npassthrough: p\n", "utf-8")
    section = load([Path("facts.yaml")], {}).pools["p"]
    return build(section.backend_config()).facts(section.model)


def test_a_pool_without_a_word_has_the_facts_of_its_server_and_model() -> None:
    """A `compatible` server by the host of its address."""
    assert believed("backend: compatible, base_url: 'https://api.moonshot.ai/v1', model: kimi-k3") == facts_of(
        "moonshot", "kimi-k3"
    )
    assert believed("backend: vllm, model: m, endpoints: ['http://a:1']") == facts_of("vllm", "m")


def test_the_pool_says_what_differs() -> None:
    """Members and facts, by `yes` and `no`, bare or quoted, and by values."""
    facts = believed(
        "backend: vllm, model: m, endpoints: ['http://a:1'], reasoning: refused, "
        "accepts: {logit_bias: no, seed: 'no', prefill: no, stops: 2}"
    )
    known = facts_of("vllm", "m")
    refused = known.refused | {"logit_bias", "seed"}
    assert facts == replace(known, refused=refused, prefill=False, stops=2, reasoning=Reasoning.REFUSED)


def test_a_deployment_is_like_a_model() -> None:
    azure = "backend: azure, base_url: 'https://our.openai.azure.com', api_key: x, model: prod-large"
    assert believed(f"{azure}, accepts: {{like: gpt-6.1-sol}}") == facts_of("azure", "gpt-6.1-sol")


@pytest.mark.parametrize(
    ("accepts", "told"),
    [
        ("{seed: maybe}", "write yes or no"),
        ("{prefill: never}", "accepts.prefill: write yes or no"),
        ("{tools: everywhere}", "Invalid enum value 'everywhere'"),
        ("{like: 5}", "accepts.like: write the name of a model"),
        ("{like: gtp-6.1-sol}", "nothing is known of 'gtp-6.1-sol' at azure"),
    ],
)
def test_a_mistake_is_told_with_its_line(accepts: str, told: str) -> None:
    """A `like` without a row would have no effect."""
    azure = "backend: azure, base_url: 'https://our.openai.azure.com', api_key: x, model: prod-large"
    problems = refusal(f"pools:\n  p: {{{azure}, accepts: {accepts}}}\npassthrough: p\n")
    assert told in problems[0]
    assert problems[0].startswith("f.yaml:2")
