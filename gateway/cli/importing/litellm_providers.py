"""Providers of LiteLLM, by the prefix of a deployment's `model`, and the backends that speak to them here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from backends.catalog import KINDS

SIGNED = "its requests are signed, or its dialect is its own: no backend speaks it"
_OPENAI_NAME = re.compile(r"(gpt-|o[134](-|$)|chatgpt-|text-embedding-|davinci|babbage)")


@dataclass(frozen=True, slots=True)
class LiteLlmProvider:
    """`backend` empty: none speaks to it. `base_url`: of an API that is `compatible`. `variable`: of the key that
    LiteLLM takes from the environment."""

    backend: str
    base_url: str = ""
    variable: str = ""


def _compatible(base_url: str, variable: str) -> LiteLlmProvider:
    return LiteLlmProvider("compatible", base_url, variable)


PROVIDERS: Mapping[str, LiteLlmProvider] = {
    "openai": LiteLlmProvider("openai", variable="OPENAI_API_KEY"),
    "text-completion-openai": LiteLlmProvider("openai", variable="OPENAI_API_KEY"),
    "azure": LiteLlmProvider("azure", variable="AZURE_API_KEY"),
    "anthropic": LiteLlmProvider("anthropic", variable="ANTHROPIC_API_KEY"),
    "gemini": LiteLlmProvider("gemini", variable="GEMINI_API_KEY"),
    "groq": LiteLlmProvider("groq", variable="GROQ_API_KEY"),
    "xai": LiteLlmProvider("xai", variable="XAI_API_KEY"),
    "mistral": LiteLlmProvider("mistral", variable="MISTRAL_API_KEY"),
    "together_ai": LiteLlmProvider("together", variable="TOGETHERAI_API_KEY"),
    "fireworks_ai": LiteLlmProvider("fireworks", variable="FIREWORKS_API_KEY"),
    "openrouter": LiteLlmProvider("openrouter", variable="OPENROUTER_API_KEY"),
    "deepseek": LiteLlmProvider("deepseek", variable="DEEPSEEK_API_KEY"),
    "ollama": LiteLlmProvider("ollama"),
    "ollama_chat": LiteLlmProvider("ollama"),
    "hosted_vllm": LiteLlmProvider("vllm"),
    "vllm": LiteLlmProvider("vllm"),
    "cerebras": _compatible("https://api.cerebras.ai/v1", "CEREBRAS_API_KEY"),
    "nvidia_nim": _compatible("https://integrate.api.nvidia.com/v1", "NVIDIA_NIM_API_KEY"),
    "deepinfra": _compatible("https://api.deepinfra.com/v1/openai", "DEEPINFRA_API_KEY"),
    "sambanova": _compatible("https://api.sambanova.ai/v1", "SAMBANOVA_API_KEY"),
    "moonshot": _compatible("https://api.moonshot.ai/v1", "MOONSHOT_API_KEY"),
    "hyperbolic": _compatible("https://api.hyperbolic.xyz/v1", "HYPERBOLIC_API_KEY"),
    "novita": _compatible("https://api.novita.ai/v3/openai", "NOVITA_API_KEY"),
    "cohere": _compatible("https://api.cohere.ai/compatibility/v1", "COHERE_API_KEY"),
    "cohere_chat": _compatible("https://api.cohere.ai/compatibility/v1", "COHERE_API_KEY"),
    "huggingface": _compatible("https://router.huggingface.co/v1", "HF_TOKEN"),
    **{  # at a URL of the operator
        name: LiteLlmProvider("compatible")
        for name in (
            *("openai_like", "custom_openai", "lm_studio", "llamafile", "litellm_proxy", "azure_ai", "databricks"),
            *("xinference", "infinity", "docker_model_runner", "perplexity", "github", "zai", "dashscope"),
        )
    },
    **{
        name: LiteLlmProvider("")
        for name in (
            *("bedrock", "bedrock_converse", "vertex_ai", "vertex_ai_beta", "sagemaker", "sagemaker_chat", "watsonx"),
            *("predibase", "replicate", "palm", "oci", "snowflake", "petals", "github_copilot", "azure_text"),
        )
    },
}

API_VARIABLES = frozenset(  # keys and URLs of APIs, which the environment may have
    {provider.variable for provider in PROVIDERS.values() if provider.variable}
    | {f"{kind.name.upper()}_{ending}" for kind in KINDS.values() for ending in ("API_KEY", "BASE_URL")}
)


def split_model(text: str, own: str | None, has_url: bool) -> tuple[str, str]:
    """Provider and the model's name there. Empty provider: unknown. `own`: the deployment's custom_llm_provider."""
    prefix, slash, rest = text.partition("/")
    if own is not None and own in PROVIDERS:
        return own, rest if slash and prefix == own else text
    if slash and prefix in PROVIDERS:
        return prefix, rest
    if has_url:
        return "openai", text
    if _OPENAI_NAME.match(text):
        return "openai", text
    return ("anthropic", text) if text.startswith("claude-") else ("", text)


def needs_key(backend: str) -> bool:
    return KINDS[backend].needs_key
