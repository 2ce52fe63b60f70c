"""Models of the routes `best`, `balanced` and `fast`."""

from __future__ import annotations

import pytest

from gateway.cli.up.known_servers import FoundServer, KnownServer, Reach
from gateway.cli.up.written_config import tier_models


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
        ("mistral", "mistral-large-latest mistral-small-latest", "mistral-large-latest", "mistral-small-latest"),
    ],
)
def test_the_newest_large_and_small_model_of_an_api_are_tiers(kind: str, models: str, large: str, small: str) -> None:
    """By the numbers in the provider's names."""
    assert tier_models(api(kind, *models.split())) == {"-best": large, "-fast": small}


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
