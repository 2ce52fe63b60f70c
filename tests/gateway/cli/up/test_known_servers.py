"""Which servers are asked, and what is believed of their answers."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.cli.up.known_servers import (
    LOCAL_PORTS,
    MOST_MODELS,
    ListedModels,
    apis,
    identified,
    listed_models,
    loaded_model,
    local_servers,
)
from gateway.config.config_errors import ConfigError
from tests.support.local_servers import models


def asked(environ: dict[str, str], own_port: int = 8080) -> dict[str, str]:
    return {server.name: server.url for server in apis(environ, own_port)}


def test_every_key_in_the_environment_is_asked() -> None:
    """Under the names that the providers' own tools read; a key without a URL of its own uses the provider's."""
    environ = {"OPENAI_API_KEY": "a", "GOOGLE_API_KEY": "b", "AZURE_OPENAI_API_KEY": "c", "XAI_API_KEY": ""}
    environ |= {"OPENAI_BASE_URL": "http://127.0.0.1:9/v1/", "AZURE_OPENAI_ENDPOINT": "https://me.openai.azure.com"}
    found = {server.name: server for server in apis(environ, 8080)}
    assert {name: server.url for name, server in found.items()} == {
        "openai": "http://127.0.0.1:9/v1",
        "azure": "https://me.openai.azure.com",
        "gemini": "https://generativelanguage.googleapis.com/v1beta/openai",
    }
    assert (found["gemini"].key, found["gemini"].key_variable) == ("b", "GOOGLE_API_KEY")
    assert "key='" not in repr(found["gemini"])


def test_a_url_that_is_the_gateways_own_is_ignored() -> None:
    """A shell in which clients of the gateway run has it: requests would go round in a circle."""
    environ = {"OPENAI_API_KEY": "a", "OPENAI_BASE_URL": "http://localhost:8080/v1"}
    assert asked(environ) == {"openai": "https://api.openai.com/v1"}
    assert asked(environ, own_port=8081) == {"openai": "http://localhost:8080/v1"}


def test_a_wrong_url_is_an_error_without_its_value() -> None:
    """It may hold credentials."""
    with pytest.raises(ConfigError) as caught:
        asked({"OPENAI_API_KEY": "a", "OPENAI_BASE_URL": "http//secret"})
    assert str(caught.value).startswith("environment variable OPENAI_BASE_URL: its value is not a server's URL")


@pytest.mark.parametrize(
    ("host", "first"),
    [
        ("", 11434),
        ("127.0.0.1:11500", 11500),
        (":11500", 11500),
        ("http://localhost:11500", 11500),
        ("0.0.0.0:11500", 11500),
        ("10.0.0.1:11500", 11434),
        ("http://[", 11434),
    ],
)
def test_only_this_machine_is_asked(host: str, first: int) -> None:
    """OLLAMA_HOST of this machine adds its port; one of another machine nothing."""
    servers = local_servers({"OLLAMA_HOST": host}, None)
    assert servers[0].port == first
    assert all(server.url.startswith("http://127.0.0.1:") for server in servers)
    assert {server.port for server in servers} == {first, *LOCAL_PORTS}


def test_given_ports_replace_the_usual_ones() -> None:
    assert [server.port for server in local_servers({"OLLAMA_HOST": ":5"}, (7, 8, 7))] == [7, 8]
    assert local_servers({}, ()) == []


@pytest.mark.parametrize("answer", [None, 7, "x", {}, {"data": {}}, {"data": "x"}, {"models": []}])
def test_any_other_answer_is_no_list(answer: Any) -> None:
    assert listed_models(answer) is None


def test_only_plain_names_are_usable() -> None:
    """Control characters, spaces, patterns and endless names are counted as left out; so are models of other work."""
    bad = ["a\x1b[2J", "a b", "a\nroutes:", "gpt-*", "x" * 129, "ü", "", "whisper-1", "dall-e-3"]
    listed = listed_models(models("llama3.2:latest", "models/gemini-9", *bad, "llama3.2:latest"))
    assert listed == ListedModels(["llama3.2:latest", "gemini-9"], 10, "library")
    odd = {"data": [None, 7, {"id": 7}, {"id": "a", "owned_by": 7}]}
    assert listed_models(odd) == ListedModels(["a"], 3, "")


def test_a_list_has_a_limit_and_may_lack_the_envelope() -> None:
    listed = listed_models(models(*(f"m{i}" for i in range(10_000)))["data"])
    assert listed is not None
    assert (len(listed.names), listed.left_out) == (MOST_MODELS, 10_000 - MOST_MODELS)


@pytest.mark.parametrize(
    ("owner", "version", "info", "found"),
    [
        ("vllm", None, None, ("vllm", "vllm")),
        ("sglang", None, None, ("sglang", "sglang")),
        ("llamacpp", None, None, ("llamacpp", "llamacpp")),
        ("tensorrt_llm", None, None, ("trtllm", "trtllm")),
        ("library", {"version": "0.13"}, None, ("ollama", "ollama")),
        ("org/model", None, {"model_id": "org/model"}, ("tgi", "tgi")),
        ("organization_owner", None, None, ("compatible", "lmstudio")),
        ("anybody", {"version": 7}, [], ("compatible", "local-8000")),
    ],
)
def test_a_server_is_known_by_its_answers(owner: str, version: Any, info: Any, found: tuple[str, str]) -> None:
    """Whatever its port."""
    assert identified(8000, ListedModels(["m"], 0, owner), version, info) == found


@pytest.mark.parametrize("answer", [None, {"models": 7}, {"models": [7, {"name": ["x"]}, {"name": "c"}]}])
def test_only_a_listed_model_is_loaded(answer: Any) -> None:
    assert loaded_model(answer, ["a", "b"]) == ""
    assert loaded_model({"models": [{"name": "c"}, {"name": "b"}]}, ["a", "b"]) == "b"


def test_the_window_of_a_list_is_the_least_of_its_models_and_none_where_one_tells_none() -> None:
    """A pool has one for all its models."""
    entries = [{"id": "a", "max_model_len": 8192}, {"id": "b", "max_model_len": 4096}]
    found = [listed_models({"data": data}) for data in (entries, [*entries, {"id": "c"}])]
    assert [listed and listed.window for listed in found] == [4096, None]
