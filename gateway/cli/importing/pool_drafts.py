"""Deployments of an imported file, joined into pools: servers of one model, or keys of one API, are one pool.

`PROVIDERS` are those of LiteLLM, by the prefix of a deployment's `model`, with the backends that speak to them here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from backends.catalog import KINDS
from gateway.cli.importing.imported_values import same_server
from gateway.config.config_errors import Path

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


@dataclass(frozen=True, slots=True)
class Deployment:
    """One server of a model. `settings`: of its pool, without URL and key. `moves`: imported keys, and the key of the
    pool that each has become."""

    group: str
    settings: dict[str, Any]
    url: str | None = None
    api_key: str | None = None
    order: float | None = None
    output_tokens: int | None = None
    moves: tuple[tuple[Path, str], ...] = ()
    share: float = 1.0  # of the requests of its group, by its weight
    weights: tuple[float, ...] = ()  # LiteLLM's weight, rpm and tpm; 0: none is given
    retries: int | None = None


@dataclass(slots=True)
class PoolDraft:
    """A pool that is being put together."""

    settings: dict[str, Any]
    urls: list[str | None]
    keys: list[str | None]
    deployments: list[Deployment] = field(default_factory=list)

    @classmethod
    def of(cls, one: Deployment) -> PoolDraft:
        return cls(one.settings, [one.url], [one.api_key], [one])

    def takes(self, one: Deployment, several_apis: bool) -> bool:
        """Adds the deployment, if it is one more server or key of this pool. The same again changes nothing."""
        if one.settings != self.settings or one.share != self.deployments[0].share:
            return False
        several = several_apis or KINDS[self.settings["backend"]].local
        if not (self._same(one) or (several and self._one_more_server(one)) or self._one_more_key(one)):
            return False
        self.deployments.append(one)
        return True

    def _same(self, one: Deployment) -> bool:
        return one.url in self.urls and one.api_key in self.keys

    def _one_more_server(self, one: Deployment) -> bool:
        known = [url for url in self.urls if url is not None]
        if one.url is None or self.keys != [one.api_key] or len(known) < len(self.urls):
            return False
        if any(same_server(one.url, url) for url in known):
            return False
        self.urls.append(one.url)
        return True

    def _one_more_key(self, one: Deployment) -> bool:
        if self.urls != [one.url] or one.api_key is None or None in self.keys:
            return False
        if not needs_key(self.settings["backend"]):
            return False
        self.keys.append(one.api_key)
        return True

    @property
    def share(self) -> float:
        """Of the requests of its group: servers have shares alike."""
        return sum(one.share for one in self.deployments)

    @property
    def section(self) -> dict[str, Any]:
        """As written under `pools`."""
        found: dict[str, Any] = {key: self.settings[key] for key in ("backend", "model") if key in self.settings}
        urls, keys = [url for url in self.urls if url is not None], [key for key in self.keys if key is not None]
        if urls:
            single = len(urls) == 1 and needs_key(found["backend"])
            found |= {"base_url": urls[0]} if single else {"endpoints": urls}
        if keys:
            found |= {"api_key": keys[0]} if len(keys) == 1 else {"api_keys": keys}
        return found | self.settings

    def target(self, key: str) -> str:
        """The name of an imported key in the section."""
        section = self.section
        if key == "url":
            return "base_url" if "base_url" in section else "endpoints"
        return "api_keys" if key == "api_key" and "api_keys" in section else key


def joined(deployments: Iterable[Deployment], several_apis: bool = False) -> list[PoolDraft]:
    """Pools of deployments, as they stand in the file. `several_apis`: servers whose load is not seen are one pool too,
    which then prefers the quickest of them."""
    drafts: list[PoolDraft] = []
    for one in deployments:
        if not any(draft.takes(one, several_apis) for draft in drafts):
            drafts.append(PoolDraft.of(one))
    return drafts
