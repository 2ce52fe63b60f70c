"""The configuration that `up` writes: it loads, holds no secret, and no text of a server becomes syntax."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from gateway.cli.up.known_servers import FoundServer, Reach
from gateway.cli.up.written_config import config_text, named
from gateway.config.loading import validated
from gateway.config.models import Config
from gateway.config.yaml_source import parse
from tests.gateway.cli.up.test_tier_models import api, local

ENVIRON = {"KEY": "sk-0123456789abcdef", "SECRET": "a secret"}
ROUTES = ("best", "balanced", "fast")
TIERS = ["openai-best", "openai-fast", "ollama"]


def text(found: Sequence[FoundServer]) -> str:
    return config_text(named(found), "127.0.0.1:0", "127.0.0.1:0", "off", "f.yaml")


def loaded(*found: FoundServer) -> Config:
    return validated(parse(text(found), "f.yaml", ENVIRON))


def test_every_model_answers_under_its_pool() -> None:
    """And any other name of an API; the models of tiers have pools, and so times, of their own."""
    config = loaded(api("openai", "gpt-5", "gpt-5-mini"), local("llama3.2"))
    assert {name: pool.models for name, pool in config.pools.items()} == {
        "openai": ("gpt-5", "gpt-5-mini", "*"),
        "openai-best": (),
        "openai-fast": (),
        "ollama": ("llama3.2", "*"),
    }
    assert config.pools["openai"].keys == (ENVIRON["KEY"],)


def test_the_routes_exist_wherever_there_is_a_model() -> None:
    """Best first; `fast` leaves the large models out, unless there is no other."""
    config = loaded(local("llama3.2"), api("openai", "gpt-5", "gpt-5-mini"))
    assert {name: list(route.pools) for name, route in config.routes.items()} == {
        "best": TIERS,
        "balanced": TIERS,
        "fast": TIERS[1:],
    }
    many = api("openrouter", "text-embedding-x", *(f"a/{i}" for i in range(300)))
    for found, only in (
        ([local("llama3.2")], "ollama"),
        ([api("openai", "gpt-5")], "openai-best"),
        ([api("openai", "gpt-5-mini"), api("groq", reach=Reach.REFUSED)], "openai-fast"),
        ([many], "openrouter-best"),
    ):
        config = loaded(*found)
        assert {name: list(route.pools) for name, route in config.routes.items()} == {key: [only] for key in ROUTES}
    assert loaded(many).pools["openrouter-best"].model == "a/0"
    assert list(loaded(many, local("llama3.2")).routes["best"].pools) == ["ollama"]
    assert dict(loaded(local("nomic-embed-text")).routes) == {}


@pytest.mark.parametrize(
    ("found", "passthrough"),
    [
        ([api("openai", reach=Reach.DOWN)], "openai"),
        ([api("openai", reach=Reach.REFUSED), api("groq", reach=Reach.UNLISTED)], "groq"),
        ([api("openai", "gpt-5")], None),
        ([api("openai", reach=Reach.DOWN), local("llama3.2")], None),
    ],
)
def test_unlisted_names_go_to_an_api_without_a_list(found: list[FoundServer], passthrough: str | None) -> None:
    """Not beside a server of this machine: a misspelt name of its models must not send a prompt out."""
    assert loaded(*found).passthrough == passthrough


def test_no_key_is_written() -> None:
    written = text([api("openai", "gpt-5")])
    assert '"${KEY}"' in written
    assert ENVIRON["KEY"] not in written


@pytest.mark.parametrize(
    "name",
    [
        "${SECRET}",
        "$SECRET",
        "1e5",
        "08",
        "off",
        "null",
        "~",
        '"',
        "'",
        "#x",
        "a:",
        "{a}",
        "[a]",
        "&a",
        "!!x",
        "\\x41",
        "-",
    ],
)
def test_a_models_name_is_a_name_whatever_it_looks_like(name: str) -> None:
    """No number, no syntax, and no variable of the environment."""
    config = loaded(local(name))
    assert (config.pools["ollama"].model, config.pools["ollama"].models) == (name, (name, "*"))


def test_two_servers_of_a_kind_are_named_by_their_ports() -> None:
    assert [each.server.name for each in named([local("a"), local("b"), api("openai", "c")])] == [
        "ollama-1",
        "ollama-1",
        "openai",
    ]


def test_the_context_window_that_a_server_tells_is_written() -> None:
    """So that an agent's limits are lowered to what fits. Nothing is guessed where the server tells none."""
    told, silent = replace(local("qwen3"), window=32_768), local("llama3.2")
    assert loaded(told).pools["ollama"].context_window == 32_768
    assert loaded(silent).pools["ollama"].context_window is None
