"""LiteLLM's configuration: pools, routes, fallbacks, secrets, and an account of every key."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from gateway.cli.importing.key_account import Fate
from gateway.cli.importing.litellm_import import import_litellm
from gateway.cli.importing.stack_import import import_stack
from gateway.config.config_errors import ConfigError
from tests.support.import_cases import CANARY, HELM, TEAM, deployment, litellm, loaded
from tests.support.loading_cases import places, spoilt


def pool(params: str, **more: Any) -> dict[str, Any]:
    """The one pool of a file with one deployment; the file is also loaded."""
    found = litellm(deployment(params, **more))
    loaded(found)
    [section] = found.document["pools"].values()
    return dict(section)


# --------------------------------------------------------------------------- the whole of a file


def test_a_whole_file_loads_and_every_key_is_accounted_for() -> None:
    """No key is unknown; each has one fate."""
    found = litellm(TEAM)
    config = loaded(found)
    assert found.account.unknown() == []
    assert sum(found.account.counts().values()) == len(found.account.keys)
    aliases = [alias for route in found.document["routes"].values() for alias in route.get("aliases", ())]
    assert [*config.routes, *aliases] == ["chat", "azure-chat", "claude", "embed", "gpt-4", "hidden-one"]
    assert config.passthrough == "any-model"


def test_no_literal_secret_is_written_or_shown() -> None:
    """Variables take their place, and are named."""
    found = litellm(TEAM)
    assert CANARY not in found.text() + "\n".join(found.report())
    assert found.variables.literals == ["AZURE_CHAT_API_KEY"]  # equal literals share a variable


def test_a_literal_gets_no_variable_that_has_a_meaning_of_its_own() -> None:
    """Else the key of OpenAI, or one that another entry refers to, would be sent to the server of the literal."""
    params = "model: openai/m, api_base: 'http://h:1/v1', api_key: sk-literal-000000"
    of_api, of_entry = deployment(params, "openai"), deployment(params, "team")
    of_entry += deployment("model: gpt-4o, api_key: os.environ/TEAM_API_KEY", "other")[12:]
    assert litellm(of_api).document["pools"]["openai"]["api_key"] == "${OPENAI_API_KEY_2}"
    pools = litellm(of_entry).document["pools"]
    assert (pools["team"]["api_key"], pools["other"]["api_key"]) == ("${TEAM_API_KEY_2}", "${TEAM_API_KEY}")


def test_servers_of_one_model_are_one_pool_and_others_are_tiers_by_order() -> None:
    """LiteLLM's `order`."""
    document = litellm(TEAM).document
    assert document["pools"]["chat"] == {
        "backend": "vllm",
        "model": "qwen3-8b",
        "endpoints": ["http://gpu1:8000/v1", "http://gpu2:8000/v1"],
        "drop": ["logit_bias"],
        "concurrent_requests": 40,
        "first_token": "30s",
    }
    assert document["routes"]["chat"]["tiers"] == ["chat", "chat-2", "claude"]
    assert document["pools"]["chat-2"]["context_window"] == 1000000
    assert document["pools"]["chat-2"]["requests_per_minute"] == 60


def test_fallbacks_become_tiers_of_pools_that_were_there_before() -> None:
    """The fallbacks of a fallback are not followed, as in LiteLLM."""
    found = litellm(TEAM)
    routes = found.document["routes"]
    assert routes["azure-chat"]["tiers"] == ["azure-chat", "chat", "chat-2"]
    assert {name: value for name, value in routes["claude"].items() if name != "aliases"} == {
        "tiers": ["claude", "azure-chat"],
        "limits": {"output_tokens": 8000},
        "fallback": {"content_filter": True},
        "prefer": "latency",
    }
    assert found.account.entry(("router_settings", "fallbacks", 1, "gone", 0)).text == "there is no route of this name"


def test_settings_come_over_once_the_routers_before_the_programs() -> None:
    document = litellm(TEAM).document
    assert document["defaults"] == {"max_attempts": 2, "first_token": "120s"}
    assert document["state"] == {"redis": "redis://:${AZURE_CHAT_API_KEY}@${REDIS_HOST}:6380"}


# --------------------------------------------------------------------------- providers


@pytest.mark.parametrize(
    ("params", "section"),
    [
        ("model: openai/gpt-4o", {"backend": "openai", "model": "gpt-4o", "api_key": "${OPENAI_API_KEY}"}),
        ("model: gpt-4o", {"backend": "openai", "model": "gpt-4o", "api_key": "${OPENAI_API_KEY}"}),
        ("model: claude-x", {"backend": "anthropic", "model": "claude-x", "api_key": "${ANTHROPIC_API_KEY}"}),
        ("model: together_ai/a/b", {"backend": "together", "model": "a/b", "api_key": "${TOGETHERAI_API_KEY}"}),
        (
            "model: openai/m, api_base: 'http://h:8000/v1', api_key: none",
            {"backend": "compatible", "model": "m", "endpoints": ["http://h:8000/v1"]},
        ),
        (
            "model: openai/m, api_base: 'http://h:8000/v1/chat/completions'",
            {"backend": "compatible", "model": "m", "endpoints": ["http://h:8000/v1"]},
        ),
        (
            "model: openai/m, api_base: os.environ/MY_BASE_URL, api_key: os.environ/MY_KEY",
            {"backend": "compatible", "model": "m", "endpoints": ["${MY_BASE_URL}"], "api_key": "${MY_KEY}"},
        ),
        (
            "model: openai/a/b, api_base: 'https://openrouter.ai/api/v1', api_key: '${K}'",
            {"backend": "openrouter", "model": "a/b", "api_key": "${K}"},
        ),
        (
            "model: cerebras/m",
            {
                "backend": "compatible",
                "model": "m",
                "endpoints": ["https://api.cerebras.ai/v1"],
                "api_key": "${CEREBRAS_API_KEY}",
            },
        ),
        (
            "model: azure/d, api_base: 'https://r.openai.azure.com/openai/deployments/d?x=1', api_version: v1",
            {
                "backend": "azure",
                "model": "d",
                "base_url": "https://r.openai.azure.com",
                "api_key": "${AZURE_API_KEY}",
                "query": {"api-version": "v1"},
            },
        ),
        (
            "model: azure/d, api_base: 'https://r.openai.azure.com/openai/v1/', api_key: os.environ/K",
            {
                "backend": "openai",
                "model": "d",
                "base_url": "https://r.openai.azure.com/openai/v1",
                "api_key": "${K}",
            },
        ),
        (
            "model: m, custom_llm_provider: hosted_vllm, api_base: 'http://h:1'",
            {"backend": "vllm", "model": "m", "endpoints": ["http://h:1"]},
        ),
        (
            "model: openai/m, api_base: 'http://user:secret@h:1/v1'",
            {"backend": "compatible", "model": "m", "endpoints": ["${CHAT_BASE_URL}"]},
        ),
    ],
)
def test_a_deployment_becomes_a_pool_of_its_backend(params: str, section: dict[str, Any]) -> None:
    assert pool(params) == section


def test_several_keys_of_one_api_share_a_pool() -> None:
    text = deployment("model: gpt-4o, api_key: os.environ/A") + deployment("model: gpt-4o, api_key: os.environ/B")[12:]
    found = litellm(text)
    loaded(found)
    assert found.document["pools"]["chat"]["api_keys"] == ["${A}", "${B}"]


def test_models_with_the_same_server_use_one_pool() -> None:
    """As LiteLLM's users alias a model."""
    params = "model: openai/m, api_base: 'http://h:1/v1'"
    found = litellm(deployment(params, "a") + deployment(params, "b")[12:])
    assert (list(found.document["pools"]), found.document["routes"]["b"]) == (["a"], {"tiers": ["a"]})


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ("model: bedrock/m", "requests are signed"),
        ("model: vertex_ai/m, vertex_project: p", "requests are signed"),
        ("model: unheard_of/m", "provider is not known"),
        ("model: '*'", "the provider is guessed of each name"),
        ("model: os.environ/MODEL", "the provider is in a variable"),
        ("model: lm_studio/m", "api_base is missing"),
        ("api_base: http://h", "the model is missing"),
    ],
)
def test_a_deployment_without_a_counterpart_is_left_out_with_its_reason(params: str, reason: str) -> None:
    """A file with nothing else is refused, and the reasons are in the error."""
    with pytest.raises(ConfigError, match=reason):
        litellm(deployment(params))


def test_names_that_a_header_cannot_carry_are_changed() -> None:
    """Route names are sent in headers: visible ASCII."""
    found = litellm(deployment("model: gpt-4o", "Größtes Modell"))
    loaded(found)
    assert list(found.document["routes"]) == ["Gr-tes-Modell"]


# --------------------------------------------------------------------------- the account


def test_a_key_that_the_importer_does_not_know_is_reported_as_unknown() -> None:
    """Never silently dropped: the sum of all fates is the number of keys."""
    found = litellm(deployment("model: gpt-4o, brand_new: 1") + "litellm_settings: {other_new: {a: 1, b: [2, 3]}}")
    assert [key[-1] for key in found.account.unknown()] == ["brand_new", "a", 0, 1]
    assert found.account.counts() == {Fate.SAME: 1, Fate.RENAMED: 1, Fate.NONE: 4}
    assert found.report()[-1].startswith("4 keys are not known to this importer")


def test_a_file_of_another_kind_is_refused() -> None:
    for text in ("pools: {}", "[]", "text", "model_list:"):
        with pytest.raises(ConfigError, match="not a configuration of LiteLLM"):
            litellm(text)


ODD = [None, -1.5, "${", "$X y", [{}], {"a": {"b": 1}}, "é\u001b[2J\n", float("inf")]


@pytest.mark.parametrize("odd", ODD, ids=repr)
@pytest.mark.parametrize(("text", "read"), [(TEAM, import_litellm), (HELM, lambda data: import_stack(data, "v"))])
def test_a_file_with_a_strange_value_is_imported_or_refused(text: str, read: Any, odd: Any) -> None:
    """At every place. What is written loads; every key is accounted for; nothing but ConfigError is raised."""
    data, seen = yaml.safe_load(text), set()
    for path in places(data):
        try:
            found = read(spoilt(data, path, odd))
        except ConfigError:
            continue
        assert sum(found.account.counts().values()) == len(found.account.keys)
        assert CANARY not in found.text() + "\n".join(found.report())
        assert all(line.isprintable() for line in found.report())
        if (written := found.text()) not in seen:
            loaded(found)
        seen.add(written)
