"""The prior of an API's first token, by kind of backend and family of model."""

from __future__ import annotations

import pytest

from backends.catalog import KINDS
from backends.facts.priors import prior_ttft


@pytest.mark.parametrize(
    ("kind", "small", "large"),
    [
        ("openai", ["gpt-4.1-mini", "gpt-4.1-nano", "gpt-4o-mini-2024-07-18"], ["gpt-4o", "gpt-4.1", "gpt-5.4"]),
        ("anthropic", ["claude-haiku-4-5"], ["claude-sonnet-4-6", "claude-opus-4-7"]),
        ("gemini", ["gemini-2.5-flash", "gemini-2.5-flash-lite"], ["gemini-2.5-pro"]),
        ("groq", ["llama-3.1-8b-instant"], ["llama-3.3-70b-versatile", "qwq-32b"]),
        ("openrouter", ["qwen/qwen3-8b", "a-name"], ["qwen/qwen3-235b", "meta/llama-3.1-405b", "x/some-thinking"]),
        ("compatible", ["qwen2.5-1.5b", "phi-14b", "served"], ["deepseek-r1-distill-8b", "magistral-small"]),
    ],
)
def test_a_small_model_starts_sooner_than_a_large_one(kind: str, small: list[str], large: list[str]) -> None:
    """A model that shows its reasoning counts as large: its first token is of that. An unknown name is small."""
    of_small, of_large = ({prior_ttft(kind, model)[""] for model in models} for models in (small, large))
    assert len(of_small) == len(of_large) == 1
    assert max(of_small) < min(of_large)


@pytest.mark.parametrize(
    "model", ["o3", "o4-mini", "o3-mini-2025-01-31", "gpt-5", "gpt-5-mini", "openai/o1-pro", "gpt-6-luna"]
)
def test_hidden_reasoning_grows_with_the_effort(model: str) -> None:
    """Without a word for it, these think with medium effort."""
    prior = prior_ttft("openai", model)
    in_order = [prior[effort] for effort in ("none", "minimal", "low", "medium", "high")]
    assert in_order == sorted(set(in_order))
    assert prior[""] == prior["medium"]


@pytest.mark.parametrize(
    ("kind", "model", "unasked"),
    [
        ("openai", "gpt-6-luna", "medium"),
        ("openai", "gpt-6.1-terra", "medium"),
        ("openai", "gpt-5.4-mini", "none"),
        ("openai", "gpt-9-somewhat", "medium"),
        ("anthropic", "claude-opus-5-5", "medium"),
        ("anthropic", "claude-sonnet-5-5", "high"),
        ("anthropic", "claude-opus-4-8", "none"),
        ("gemini", "gemini-3.1-pro-preview", "high"),
        ("azure", "gpt-6-sol", "medium"),
    ],
)
def test_without_an_effort_the_default_of_the_model_decides(kind: str, model: str, unasked: str) -> None:
    """A model of a line that has no row of its own has those of the newest of its family."""
    prior = prior_ttft(kind, model)
    assert prior[""] == prior[unasked]
    assert prior["none"] < prior["high"]


def test_no_effort_is_sooner_than_none() -> None:
    prior = prior_ttft("xai", "grok-4.5")
    assert min(prior.values()) == prior["none"] == prior["low"]


def test_efforts_above_high_take_longer() -> None:
    """`xhigh` and `max` are classes of their own."""
    prior = prior_ttft("openai", "gpt-6-astra")
    assert prior["high"] < prior["xhigh"] < prior["max"]


def test_a_published_figure_holds_before_the_rule() -> None:
    """The one of the default effort holds without an effort."""
    prior = prior_ttft("openai", "gpt-5.5")
    assert prior[""] == prior["medium"] < prior_ttft("openai", "gpt-5")[""]


def test_every_kind_has_a_prior() -> None:
    """Whatever the model is called."""
    assert all(0.1 <= prior_ttft(kind, model)[""] <= 5.0 for kind in KINDS for model in ("", "m", "o3", "pro"))
