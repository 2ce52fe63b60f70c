"""Catalog of backends: a kind is a dialect and a default URL. Add a kind by a line in KINDS."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from backends.anthropic import Anthropic
from backends.interface import Backend, BackendConfig
from backends.metered_engine import LlamaCpp, TensorRT, TextGenerationInference
from backends.openai import AzureOpenAI, Compatible, Mistral, Ollama, OpenAI, OpenAIPlatform
from backends.vllm import SGLang, SimulatedVllm, Vllm


@dataclass(frozen=True, slots=True)
class BackendKind:
    """Value of a pool's `backend`."""

    name: str
    dialect: type[OpenAI]
    doc: str
    base_url: str | None = None  # None: the configuration has to say
    needs_key: bool = False

    @property
    def local(self) -> bool:
        """An engine whose queue and cache can be modelled, as opposed to an API."""
        return self.dialect.local


def _api(name: str, base_url: str, doc: str, dialect: type[OpenAI] = Compatible) -> BackendKind:
    return BackendKind(name, dialect, doc, base_url, needs_key=True)


_ALL = (
    BackendKind("vllm", Vllm, "vLLM's OpenAI server"),
    BackendKind("sglang", SGLang, "SGLang's OpenAI server, started with --enable-metrics"),
    BackendKind("trtllm", TensorRT, "TensorRT-LLM's server, trtllm-serve"),
    BackendKind("tgi", TextGenerationInference, "Hugging Face's Text Generation Inference"),
    BackendKind("llamacpp", LlamaCpp, "llama.cpp's server"),
    BackendKind("ollama", Ollama, "Ollama", "http://127.0.0.1:11434"),
    BackendKind("simulated", SimulatedVllm, "a simulated engine that speaks as vLLM does"),
    BackendKind("compatible", Compatible, "anything else that speaks OpenAI's dialect"),
    BackendKind("openai-compatible", Compatible, "the same, in full"),
    _api("openai", "https://api.openai.com/v1", "OpenAI", OpenAIPlatform),
    BackendKind("azure", AzureOpenAI, "Azure OpenAI, by deployments", needs_key=True),
    _api("groq", "https://api.groq.com/openai/v1", "Groq", OpenAI),
    _api("xai", "https://api.x.ai/v1", "xAI", OpenAI),
    _api("gemini", "https://generativelanguage.googleapis.com/v1beta/openai", "Gemini's OpenAI-compatible API"),
    _api("mistral", "https://api.mistral.ai/v1", "Mistral's La Plateforme", Mistral),
    _api("together", "https://api.together.xyz/v1", "Together AI"),
    _api("fireworks", "https://api.fireworks.ai/inference/v1", "Fireworks AI"),
    _api("openrouter", "https://openrouter.ai/api/v1", "OpenRouter"),
    _api("deepseek", "https://api.deepseek.com/v1", "DeepSeek"),
    _api("anthropic", "https://api.anthropic.com", "Anthropic's Messages API", Anthropic),
)
KINDS: Mapping[str, BackendKind] = {kind.name: kind for kind in _ALL}


def kind(name: str) -> BackendKind:
    """Look up a kind by name. Raises ValueError with a suggestion."""
    found = KINDS.get(name)
    if found is None:
        close = get_close_matches(name, KINDS, n=1)
        hint = f"did you mean '{close[0]}'?" if close else f"there are {', '.join(KINDS)}"
        raise ValueError(f"there is no backend '{name}'; {hint}")
    return found


def build(config: BackendConfig) -> Backend:
    """The backend of a pool. Raises ValueError."""
    found = kind(config.kind)
    keyed = {"authorization", "api-key"} & {name.lower() for name in config.headers}
    if found.needs_key and not config.api_key and not config.caller_keys and not keyed:
        raise ValueError(f"backend '{config.kind}' needs an api_key")
    return found.dialect(config)
