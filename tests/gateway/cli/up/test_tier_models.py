"""Models of the routes `best`, `balanced` and `fast`."""

from __future__ import annotations

from datetime import date

import pytest

from gateway.cli.up.known_servers import FoundServer, KnownServer, Reach
from gateway.cli.up.tier_models import tier_models

NOVEMBER = date(2026, 11, 29)
LISTS = {  # by kind, as the APIs list them in November 2026
    "openai": """gpt-3.5-turbo gpt-4o gpt-4o-mini gpt-4.1 gpt-4.1-mini gpt-5 gpt-5-mini gpt-5-nano gpt-5-pro gpt-5.1
        gpt-5.1-codex-max gpt-5.2 gpt-5.3-codex gpt-5.4 gpt-5.4-mini gpt-5.4-nano gpt-5.5 gpt-5.5-2026-04-23 gpt-5.6
        gpt-5.6-sol gpt-5.6-terra gpt-5.6-luna gpt-6-sol gpt-6-luna gpt-6-luna-2026-09-22 gpt-6-astra gpt-6.1-sol
        gpt-6.1-terra gpt-realtime-2 gpt-image-2 o3 o3-pro sora-2 text-embedding-3-large""",
    "anthropic": """claude-fable-5-1 claude-opus-5-5 claude-sonnet-5-5 claude-haiku-5-5 claude-opus-5 claude-sonnet-5
        claude-opus-4-8 claude-opus-4-7 claude-sonnet-4-6 claude-opus-4-5-20251101 claude-haiku-4-5-20251001
        claude-sonnet-4-5-20250929""",
    "gemini": """gemini-2.5-pro gemini-2.5-flash gemini-2.5-flash-lite gemini-3.1-pro-preview gemini-3.5-flash
        gemini-3.5-flash-lite gemini-3.6-flash gemini-3.8-flash gemini-3.8-flash-image gemini-embedding-001""",
    "xai": "grok-4.3 grok-4.5 grok-4.6 grok-4.7 grok-4.20-reasoning grok-4.20-multi-agent grok-3 grok-imagine-image",
    "deepseek": "deepseek-v4-pro deepseek-flash",
    "mistral": """mistral-large-2512 mistral-large-latest mistral-medium-3.5 mistral-medium-latest mistral-small-2603
        mistral-small-latest codestral-latest ministral-8b-latest magistral-medium-latest mistral-embed""",
    "groq": "openai/gpt-oss-120b openai/gpt-oss-20b qwen/qwen3-32b llama-3.3-70b-versatile whisper-large-v3",
}


def api(kind: str, *models: str, reach: Reach = Reach.OK) -> FoundServer:
    return FoundServer(KnownServer(kind, kind, "https://a", "key", "KEY"), kind, reach, models)


def local(*models: str, loaded: str = "") -> FoundServer:
    return FoundServer(KnownServer("ollama", "", "http://127.0.0.1:1"), "ollama", Reach.OK, models, loaded=loaded)


@pytest.mark.parametrize(
    ("kind", "models", "large", "small"),
    [
        (
            "openai",
            "gpt-4o gpt-5 gpt-5.1 gpt-5.1-mini gpt-5-mini gpt-5-pro",
            "gpt-5.1",
            "gpt-5.1-mini",
        ),
        ("openai", "gpt-4o gpt-4o-mini gpt-3.5-turbo", "gpt-4o", "gpt-4o-mini"),
        (
            "anthropic",
            "claude-opus-4-1-20250805 claude-opus-4-5 claude-sonnet-5 claude-haiku-4-5-20251001",
            "claude-opus-4-5",
            "claude-haiku-4-5-20251001",
        ),
        ("gemini", "gemini-2.5-pro gemini-3-pro gemini-3-flash gemini-3-flash-lite", "gemini-3-pro", "gemini-3-flash"),
        (
            "gemini",
            "gemini-pro-latest gemini-3-pro gemini-flash-latest gemini-3.8-flash",
            "gemini-3-pro",
            "gemini-3.8-flash",
        ),
        ("gemini", "gemini-pro-latest gemini-flash-latest", "gemini-pro-latest", "gemini-flash-latest"),
        ("mistral", "mistral-large-latest mistral-small-latest", "mistral-large-latest", "mistral-small-latest"),
    ],
)
def test_the_newest_large_and_small_model_of_an_api_are_tiers(kind: str, models: str, large: str, small: str) -> None:
    """By the numbers in the provider's names."""
    assert tier_models(api(kind, *models.split())) == {"-best": large, "-fast": small}


@pytest.mark.parametrize(
    ("kind", "large", "small"),
    [
        ("openai", "gpt-6.1-sol", "gpt-6-luna"),
        ("anthropic", "claude-opus-5-5", "claude-haiku-5-5"),
        ("gemini", "gemini-3.1-pro-preview", "gemini-3.8-flash"),
        ("xai", "grok-4.7", ""),
        ("deepseek", "deepseek-flash", ""),
        ("mistral", "mistral-large-latest", "mistral-small-latest"),
        ("groq", "openai/gpt-oss-120b", "openai/gpt-oss-20b"),
    ],
)
def test_tiers_of_the_lists_of_november_2026(kind: str, large: str, small: str) -> None:
    """Neither last year's, nor one that leaves soon, nor one at several times the price."""
    for models in (LISTS[kind].split(), LISTS[kind].split()[::-1]):
        chosen = tier_models(api(kind, *models), NOVEMBER)
        assert (chosen.get("-best", ""), chosen.get("-fast", "")) == (large, small)


@pytest.mark.parametrize(
    ("kind", "new", "ending"),
    [
        ("openai", "gpt-6.2-sol", "-best"),
        ("openai", "gpt-7", "-best"),
        ("openai", "gpt-7-luna", "-fast"),
        ("anthropic", "claude-opus-6", "-best"),
        ("anthropic", "claude-haiku-6-1-20270301", "-fast"),
        ("gemini", "gemini-4", "-best"),
        ("gemini", "gemini-4-pro", "-best"),
        ("gemini", "gemini-4-flash", "-fast"),
        ("xai", "grok-5", "-best"),
    ],
)
def test_a_new_model_of_a_known_family_is_a_tier(kind: str, new: str, ending: str) -> None:
    """Without a row of its own: by its version, and the place of its line."""
    assert tier_models(api(kind, *LISTS[kind].split(), new), NOVEMBER)[ending] == new


def test_a_preview_or_a_model_that_leaves_is_a_tier_only_where_there_is_no_other() -> None:
    """One that is gone never is. A model leaves soon from 90 days before its end."""
    leaving = api("openai", "gpt-5", "gpt-4.1", "gpt-5-mini", "gpt-4.1-nano")
    assert tier_models(leaving, NOVEMBER) == {"-best": "gpt-5", "-fast": "gpt-5-mini"}
    assert tier_models(leaving, date(2026, 12, 11)) == {"-best": "gpt-4.1"}
    gemini = api("gemini", "gemini-2.5-pro", "gemini-4-pro-preview", "gemini-3-pro")
    assert tier_models(gemini, NOVEMBER) == {"-best": "gemini-3-pro"}
    assert tier_models(api("gemini", *gemini.models[:2]), NOVEMBER) == {"-best": "gemini-4-pro-preview"}


def test_an_api_with_names_of_no_known_form_is_a_tier_if_it_lists_few() -> None:
    assert tier_models(api("openrouter", "text-embedding-x", "a/b")) == {"-best": "a/b"}
    assert tier_models(api("openrouter", *(f"a/{i}" for i in range(300)))) == {}


def test_a_server_of_this_machine_is_a_tier_with_the_model_in_its_memory() -> None:
    """Another one would have to be loaded first; a model of embeddings answers nobody."""
    assert tier_models(local("nomic-embed-text", "llama3.2", "qwen3")) == {"": "llama3.2"}
    assert tier_models(local("llama3.2", "qwen3", loaded="qwen3")) == {"": "qwen3"}
    assert tier_models(local("nomic-embed-text")) == {}


def test_a_server_that_refuses_is_no_tier() -> None:
    assert tier_models(api("openai", reach=Reach.REFUSED)) == {}
