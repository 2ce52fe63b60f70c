"""Helm values of vLLM's production-stack."""

from __future__ import annotations

import pytest

from gateway.config.config_errors import ConfigError
from tests.support.import_cases import CANARY, HELM, loaded, stack


def test_engines_become_pools_and_every_key_is_accounted_for() -> None:
    """The name by which an engine serves its model is the route."""
    found = stack(HELM, "prod")
    config = loaded(found)
    assert found.account.unknown() == []
    assert list(config.routes) == ["meta-llama/Llama-3.1-8B-Instruct", "qwen3-8b", "m"]
    assert found.document["pools"]["Llama-3.1-8B-Instruct"] == {
        "backend": "vllm",
        "model": "meta-llama/Llama-3.1-8B-Instruct",
        "endpoints": ["http://prod-llama-engine-service:8000"],
        "api_key": "${VLLM_API_KEY}",
        "context_window": 4096,
        "adapters": {"names": ["sql"], "slots": 4},
    }
    assert found.document["pools"]["m"]["endpoints"] == ["http://10.0.0.1:8000", "http://10.0.0.2:8000"]


def test_no_literal_secret_of_the_values_is_written_or_shown() -> None:
    found = stack(HELM)
    assert CANARY not in found.text() + "\n".join(found.report())


def test_the_port_is_that_of_the_service() -> None:
    found = stack("servingEngineSpec: {servicePort: 80, modelSpec: [{name: a, modelURL: m}]}")
    assert found.document["pools"]["m"]["endpoints"] == ["http://vllm-a-engine-service:80"]


def test_no_budget_is_added() -> None:
    for route in loaded(stack(HELM)).routes.values():
        assert (route.ttft, route.tpot, route.total, route.hedge, route.on_miss) == (None,) * 3 + ("off", "best_effort")


def test_engines_of_one_model_with_other_settings_share_its_requests() -> None:
    specs = "[{name: a, modelURL: m, vllmConfig: {maxModelLen: 4096}}, {name: b, modelURL: m}]"
    route = loaded(stack(f"servingEngineSpec: {{modelSpec: {specs}}}")).routes["m"]
    assert [tier.beside for tier in route.tiers] == [False, True]


def test_a_name_that_headers_cannot_carry_stays_an_alias() -> None:
    config = loaded(stack("servingEngineSpec: {modelSpec: [{name: a, modelURL: My Model}]}"))
    assert config.routes["My-Model"].aliases == ("My Model",)


def test_values_without_engines_are_refused() -> None:
    with pytest.raises(ConfigError, match="modelSpec is empty"):
        stack("servingEngineSpec: {modelSpec: []}")
    with pytest.raises(ConfigError, match="no values of vLLM's production-stack"):
        stack("model_list: []")
