"""Facts of a model: which row holds, what lies above it, and what is believed of a model without one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from backends.catalog import KINDS, build
from backends.facts.lookup import Origin, api_of, facts_of, model_row, origins, plain
from backends.facts.model_facts import Facts, Forced, Reasoning, Sampling, System, ToolsAt, UnknownMembers
from backends.interface import BackendConfig

NAMES = {
    "claude-opus-5-5": "claude-opus-5-5",
    "anthropic/claude-opus-5.5": "claude-opus-5.5",
    "us.anthropic.claude-opus-5-5-v1:0": "claude-opus-5-5-v1",
    "claude-opus-4-5@20251101": "claude-opus-4-5",
    "publishers/google/models/gemini-3.8-flash": "gemini-3.8-flash",
    "accounts/fireworks/models/glm-5p3": "glm-5.3",
    "qwen/qwen3.8-max:free": "qwen3.8-max",
    "Qwen/Qwen3.5-9B": "qwen3.5-9b",
    "ft:gpt-4.1-mini:acme::id": "gpt-4.1-mini",
}


@pytest.mark.parametrize(("written", "name"), NAMES.items())
def test_a_name_is_read_without_what_hosts_add_to_it(written: str, name: str) -> None:
    """Vendor, region, path, tag and fine-tune; in lower case."""
    assert plain(written) == name


@pytest.mark.parametrize(
    ("api", "model"),
    [
        ("anthropic", "claude-opus-5-5"),
        ("anthropic", "claude-opus-5-5-20260922"),
        ("openrouter", "anthropic/claude-opus-5.5"),
        ("bedrock", "us.anthropic.claude-opus-5-5-v1:0"),
        ("vertex", "claude-opus-5-5@20260922"),
    ],
)
def test_one_model_has_one_row_at_every_host(api: str, model: str) -> None:
    row = model_row(api, model)
    assert row is not None
    assert row.name == "anthropic claude-opus-{v} since 5.5"


@pytest.mark.parametrize(
    ("model", "row"),
    [
        ("claude-opus-5-9", "anthropic claude-opus-{v} since 5.5"),
        ("claude-opus-5-4", "anthropic claude-opus-{v} since 5"),
        ("claude-opus-4-20250514", "anthropic claude-(opus|sonnet)-{v} since 4"),
        ("gpt-7-sol", "openai gpt-{v}-sol since 6.1"),
        ("gpt-7-somewhat", "openai gpt-{v} since 6"),
        ("gpt-5-mini", "openai gpt-{v}(-mini|-nano) since 5"),
        ("grok-9", "xai grok-{v} since 4.6"),
        ("qwen3-8b", "qwen qwen-?{v} since 3"),
    ],
)
def test_a_version_has_the_newest_row_that_is_not_newer_than_itself(model: str, row: str) -> None:
    """A model of next month has the row of its line; a date behind a name is no version."""
    found = model_row("openrouter", model)
    assert found is not None
    assert found.name == row


@pytest.mark.parametrize(
    ("model", "row"),
    [
        ("claude-opus-latest", "anthropic claude-opus-{v} since 5.5"),
        ("~anthropic/claude-sonnet-latest", "anthropic claude-sonnet-{v} since 5.5"),
        ("gemini-flash-latest", "gemini gemini-{v}-flash since 3.7"),
        ("gemini-flash-lite-latest", "gemini gemini-{v}-flash-lite since 3"),
        ("gemini-pro-latest", "gemini gemini-{v}-pro since 3"),
        ("gpt-mini-latest", "openai gpt-{v}(-mini|-nano) since 6"),
        ("grok-latest", "xai grok-{v} since 4.6"),
        ("gemini-2.5-flash-latest", r"gemini gemini-2\.5-flash"),
        ("claude-3-5-sonnet-latest", "anthropic claude-([123]|instant)"),
        ("gpt-5-chat-latest", "openai gpt-5-chat"),
        ("chatgpt-4o-latest", "openai (chat)?gpt-4o"),
        ("gemini-pro", r"gemini gemini-(1|2\.0|pro)"),
        (
            "arn:aws:bedrock:us-east-1:1:inference-profile/us.anthropic.claude-opus-5-5-v1:0",
            "anthropic claude-opus-{v} since 5.5",
        ),
        ("publishers/anthropic/models/claude-opus-5-5@default", "anthropic claude-opus-{v} since 5.5"),
        ("bedrock/eu.anthropic.claude-haiku-5-5-20260922-v1:0", "anthropic claude-haiku-{v} since 5.5"),
    ],
)
def test_latest_is_the_newest_row_of_its_line(model: str, row: str) -> None:
    """Where no version stands in the name; one that does is the version."""
    found = model_row("openrouter", model)
    assert found is not None
    assert found.name == row


def test_latest_of_another_line_has_no_row_of_this_one() -> None:
    assert model_row("openrouter", "gpt-audio-latest") is None
    assert model_row("openrouter", "latest") is None


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_of_an_unknown_model_is_believed_what_its_api_does(kind: str) -> None:
    """No row of a family holds, nothing is refused for lack of one."""
    facts = facts_of(kind, "a-model-of-nobody")
    assert model_row(kind, "a-model-of-nobody") is None
    assert (facts.sampling, facts.forced_tools, facts.context, facts.shutdown) == (Sampling.FREE, Forced.OK, None, "")


def test_at_an_unknown_api_everything_is_accepted() -> None:
    """But tools of the type `custom`, which OpenAI alone has."""
    assert (
        facts_of("nobody", "a-model-of-nobody") == facts_of("compatible", "m") == replace(Facts(), custom_tools=False)
    )
    assert facts_of("compatible", "gemma-4-27b") == facts_of("compatible", "m")  # templates are of own engines


def test_a_family_holds_over_its_api_and_what_an_api_has_above_all_over_both() -> None:
    """OpenRouter leaves out what the model lacks, and still knows what it is."""
    at_openai, at_openrouter = facts_of("openai", "gpt-6-astra"), facts_of("openrouter", "openai/gpt-6-astra")
    assert (at_openai.stops, facts_of("openai", "gpt-4.1").stops) == (0, 4)
    assert (at_openai.sampling, at_openrouter.sampling) == (Sampling.NONE, Sampling.FREE)
    assert (at_openai.tools, at_openrouter.tools) == (ToolsAt.RESPONSES, ToolsAt.ANY)
    assert at_openrouter.efforts == at_openai.efforts is not None


def test_weights_have_the_facts_of_their_template_on_own_engines() -> None:
    """Not those of their maker's API."""
    assert facts_of("vllm", "mistralai/Mistral-Small-3.2").system is System.FIRST
    assert facts_of("openrouter", "mistralai/mistral-small-3.2").system is System.ANYWHERE
    assert facts_of("vllm", "mistralai/Mistral-Small-3.2").unknown_members is UnknownMembers.IGNORED


@pytest.mark.parametrize(
    ("model", "ends"),
    [
        ("gpt-5", "2026-12-11"),
        ("o3", "2026-12-11"),
        ("o3-2025-04-16", "2026-12-11"),
        ("o1", "gone"),
        ("gpt-5.1", "2027-04-01"),
        ("gpt-5.1-mini", ""),
        ("claude-sonnet-4.5", "2026-11-30"),
        ("claude-sonnet-4-5-20250929", "2026-11-30"),
        ("claude-opus-5-5", ""),
    ],
)
def test_the_end_of_a_model_is_that_of_its_name(model: str, ends: str) -> None:
    """A row of several models has an end for each that has one."""
    assert facts_of("openrouter", model).shutdown == ends


@pytest.mark.parametrize(
    ("kind", "host", "row"),
    [
        ("compatible", "api.moonshot.ai", "moonshot"),
        ("compatible", "API.Z.AI", "zai"),
        ("azure", "our.openai.azure.com", "azure"),
        ("compatible", "bedrock-runtime.eu-west-1.amazonaws.com", "bedrock"),
        ("compatible", "europe-west1-aiplatform.googleapis.com", "vertex"),
        ("anthropic", "api.deepseek.com", "deepseek"),
        ("compatible", "notapi.moonshot.ai.example.com", "compatible"),
        ("vllm", "10.0.0.1", "vllm"),
        ("openai", "", "openai"),
        ("nothing", "", "compatible"),
    ],
)
def test_an_api_is_known_by_its_host_and_else_by_the_kind(kind: str, host: str, row: str) -> None:
    """`compatible` is a dialect, and its server may be a known one."""
    assert api_of(kind, host) == row


OVERRIDES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a member that is refused": ({"logit_bias": False}, {"refused": frozenset({"logit_bias"})}),
    "a member that is limited by a fact of its name": ({"temperature": False}, {"refused": frozenset({"temperature"})}),
    "a member that is accepted": ({"temperature": True}, {"sampling": Sampling.FREE}),
    "a range": ({"temperature": [0, 1]}, {"temperature": (0, 1)}),
    "a fact that is yes or no": ({"prefill": False}, {"prefill": False}),
    "a list": ({"efforts": ["low", "high"]}, {"efforts": ("low", "high")}),
    "a word": ({"tools": "responses"}, {"tools": ToolsAt.RESPONSES}),
    "reasoning": ({"reasoning": "returned"}, {"reasoning": Reasoning.RETURNED}),
    "nothing known": ({"stops": None}, {"stops": None}),
}


@pytest.mark.parametrize(("accepts", "changes"), OVERRIDES.values(), ids=OVERRIDES)
@pytest.mark.parametrize("model", ["gpt-6-astra", "a-model-of-nobody"])
def test_what_a_pool_states_holds_over_every_row(model: str, accepts: dict[str, Any], changes: dict[str, Any]) -> None:
    """And changes nothing else."""
    assert facts_of("openai", model, accepts) == replace(facts_of("openai", model), **changes)


def test_a_member_that_a_row_refuses_is_accepted_where_the_pool_says_so() -> None:
    """The provider has learned it since."""
    assert "seed" in facts_of("gemini", "gemini-3.8-flash").refused
    stated = facts_of("gemini", "gemini-3.8-flash", {"seed": True, "store": True})
    assert "seed" not in stated.refused
    assert {"seed", "store"} <= (stated.members or frozenset())


@pytest.mark.parametrize(
    ("accepts", "told"),
    [
        ({"logit_bias": "sometimes"}, "accepts.logit_bias: write yes or no"),
        ({"sampling": "freely"}, "accepts.sampling: Invalid enum value 'freely'"),
        ({"stops": "four"}, "accepts.stops: Expected `int | null`, got `str`"),
        ({"like": ["gpt-6-astra"]}, "accepts.like: write the name of a model"),
    ],
)
def test_an_override_of_another_type_is_refused(accepts: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told.replace("|", r"\|")):
        facts_of("openai", "m", accepts)


def test_a_deployment_has_the_facts_of_the_model_that_it_is_like() -> None:
    """Its name tells nothing; what the pool states beside holds over that."""
    like = facts_of("azure", "prod-large", {"like": "gpt-6.1-sol"})
    assert like == facts_of("azure", "gpt-6.1-sol") != facts_of("azure", "prod-large")
    assert facts_of("azure", "prod-large", {"like": "gpt-6.1-sol", "stops": 2}) == replace(like, stops=2)


def test_a_backend_has_the_facts_of_its_api_with_those_of_its_pool_above() -> None:
    """Of any model: callers name models of a pool themselves."""
    config = BackendConfig("compatible", "kimi-k3", api="moonshot", accepts={"tool_choices": ["auto"]})
    backend = build(config)
    assert backend.facts("kimi-k3") == facts_of("moonshot", "kimi-k3", {"tool_choices": ["auto"]})
    assert backend.facts("kimi-k2.6") == facts_of("moonshot", "kimi-k2.6", {"tool_choices": ["auto"]})
    assert build(BackendConfig("groq", "m", api_key="sk-x")).facts("gpt-oss-120b") == facts_of("groq", "gpt-oss-120b")


def test_each_fact_has_the_row_that_it_is_of() -> None:
    """The API's, the family's with its mark, the API's again where it is above all, or the pool."""
    known = origins("openrouter", "openai/gpt-6-astra", {"efforts": ["low"]})
    assert known["reasoning_member"] == Origin("api", "openrouter")
    assert known["size"] == Origin("family", "openai gpt-{v}-astra since 6", "S")
    assert known["sampling"] == Origin("api", "openrouter")
    assert known["efforts"] == Origin("pool", "accepts")
    assert "user_length" not in known
