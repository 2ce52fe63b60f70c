"""Which backends there are: a kind is a dialect and where it is spoken. A new one is one line in KINDS."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from backends.compatible import Compatible, LlamaCpp, Mistral, Ollama
from backends.interface import Backend, BackendConfig
from backends.openai import OpenAI
from backends.vllm import SGLang, Vllm


@dataclass(frozen=True, slots=True)
class Kind:
    """One value of a pool's `backend`."""

    name: str
    dialect: type[OpenAI]
    doc: str
    base_url: str | None = None  # None: the configuration has to say
    needs_key: bool = False

    @property
    def local(self) -> bool:
        """An engine whose queue and cache can be modelled, as opposed to an API."""
        return self.dialect.local


def _api(name: str, base_url: str, doc: str, dialect: type[OpenAI] = Compatible) -> Kind:
    return Kind(name, dialect, doc, base_url, needs_key=True)


_ALL = (
    Kind("vllm", Vllm, "vLLM's OpenAI server"),
    Kind("sglang", SGLang, "SGLang's OpenAI server, started with --enable-metrics"),
    Kind("llamacpp", LlamaCpp, "llama.cpp's server"),
    Kind("ollama", Ollama, "Ollama", "http://127.0.0.1:11434"),
    Kind("simulated", Vllm, "a simulated engine that speaks as vLLM does"),
    Kind("compatible", Compatible, "anything else that speaks OpenAI's dialect"),
    Kind("openai-compatible", Compatible, "the same, in full"),
    _api("openai", "https://api.openai.com/v1", "OpenAI", OpenAI),
    _api("groq", "https://api.groq.com/openai/v1", "Groq", OpenAI),
    _api("xai", "https://api.x.ai/v1", "xAI", OpenAI),
    _api("gemini", "https://generativelanguage.googleapis.com/v1beta/openai", "Gemini's OpenAI-compatible API"),
    _api("mistral", "https://api.mistral.ai/v1", "Mistral's La Plateforme", Mistral),
    _api("together", "https://api.together.xyz/v1", "Together AI"),
    _api("fireworks", "https://api.fireworks.ai/inference/v1", "Fireworks AI"),
    _api("openrouter", "https://openrouter.ai/api/v1", "OpenRouter"),
    _api("deepseek", "https://api.deepseek.com/v1", "DeepSeek"),
)
KINDS: Mapping[str, Kind] = {kind.name: kind for kind in _ALL}


def kind(name: str) -> Kind:
    """The kind of that name. Raises ValueError with a suggestion."""
    found = KINDS.get(name)
    if found is None:
        close = get_close_matches(name, KINDS, n=1)
        hint = f"did you mean '{close[0]}'?" if close else f"there are {', '.join(KINDS)}"
        raise ValueError(f"there is no backend '{name}'; {hint}")
    return found


def build(config: BackendConfig) -> Backend:
    """The backend of a pool. Raises ValueError."""
    found = kind(config.kind)
    if found.needs_key and not config.api_key and "authorization" not in {name.lower() for name in config.headers}:
        raise ValueError(f"backend '{config.kind}' needs an api_key")
    return found.dialect(config)
