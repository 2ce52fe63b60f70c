"""Dialects: chat completions and completions of OpenAI, of compatible servers and of engines.

The parsed body is encoded anew; arrays and objects that are strict JSON keep their spelling. Changed are the model,
the stream's usage (the gateway meters by usage), the cap on output and the cache salt; every other field, known or
not, passes through.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import msgspec

from backends import failures
from backends.engine_metrics import LoadMetrics
from backends.interface import Backend, BackendConfig, BackendRequest, Failure, HttpCall, Operation, Tap
from backends.stream.taps import BodyTap, StreamTap

_LIMITS = ("max_completion_tokens", "max_tokens")  # the new name and the old one
_RESERVED = frozenset({"host", "content-length", "transfer-encoding", "connection"})
_encode = msgspec.json.Encoder().encode


class OpenAI:
    """A `Backend`. Subclasses are dialects of this dialect."""

    local: bool = False
    salted: bool = False
    limit_name: str = "max_completion_tokens"  # default field for the cap on a chat's output
    asks_usage: bool = True  # knows stream_options
    probe_path: str = ""  # of a cheap page that shows the server's health; empty: only real traffic shows the health
    metrics: LoadMetrics | None = None  # series of the page /metrics
    names_sessions: bool = False  # cache events name a request by the session id of its header

    def __init__(self, config: BackendConfig) -> None:
        self.kind = config.kind
        self._secret, self.secret = config.api_key, config.api_key.encode()
        self._headers = _headers(config)

    # ----------------------------------------------------------------------- the request

    def call(self, forward: BackendRequest) -> HttpCall:
        headers = {"accept": "text/event-stream" if forward.stream else "application/json", **self._headers}
        if forward.request_id:
            headers["x-request-id"] = forward.request_id
        if forward.traceparent:
            headers["traceparent"] = forward.traceparent
        if forward.tracestate:
            headers["tracestate"] = forward.tracestate
        if forward.session_id and self.names_sessions:
            headers["x-session-id"] = forward.session_id
        return HttpCall("POST", forward.operation.value, headers, _encode(self._body(forward)))

    def _body(self, forward: BackendRequest) -> dict[str, Any]:
        body = {**forward.body, "model": forward.model}
        if not self.salted:
            body.pop("cache_salt", None)  # the server knows no such field and may refuse the request
        if forward.stream:
            body["stream"] = True
            options = body.get("stream_options") or {}
            if self.asks_usage and isinstance(options, dict):  # else the server refuses the malformed options
                body["stream_options"] = {**options, "include_usage": True}
        elif "stream" in body:
            body["stream"] = False
        if forward.max_tokens is not None:
            self._cap(body, forward.operation, forward.max_tokens)
        return body

    def _cap(self, body: dict[str, Any], operation: Operation, cap: int) -> None:
        """Lower the caller's limit to `cap`; set the cap if the limit is absent or no number.

        Servers read the text "100000" as a number.
        """
        asked = [name for name in _LIMITS if body.get(name) is not None]
        for name in asked:
            if type(body[name]) not in (int, float) or body[name] > cap:
                body[name] = cap
        if not asked:
            body[self.limit_name if operation is Operation.CHAT else "max_tokens"] = cap

    # ----------------------------------------------------------------------- the reply

    def tap(self, forward: BackendRequest) -> Tap:
        if not forward.stream:
            return BodyTap(self._secret)
        choices = forward.body.get("n")
        return StreamTap(choices if type(choices) is int else 1, self._secret)

    def failure(self, status: int, headers: Mapping[str, str], body: bytes) -> Failure:
        return failures.of_reply(status, headers, body, self._secret)

    # ----------------------------------------------------------------------- upkeep

    def probe(self) -> HttpCall | None:
        return HttpCall("GET", self.probe_path) if self.probe_path else None

    def load(self) -> HttpCall | None:
        return HttpCall("GET", "/metrics") if self.metrics is not None else None

    def read_load(self, body: bytes) -> Mapping[str, float | None]:
        return self.metrics.read(body) if self.metrics is not None else {}


def _headers(config: BackendConfig) -> dict[str, str]:
    """Header fields common to all calls of a pool; configured headers override."""
    headers = {
        "content-type": "application/json",
        "accept-encoding": "identity",  # bytes are relayed as they come, and read in passing
        "user-agent": "firsttoken",  # some providers' edges refuse requests without one
    }
    if config.api_key:
        headers["authorization"] = f"Bearer {config.api_key}"
    headers.update({name.lower(): value for name, value in config.headers.items()})
    if reserved := _RESERVED & headers.keys():
        raise ValueError(f"the header '{min(reserved)}' is the gateway's own to write; take it out of headers")
    if any("\n" in value or "\r" in value for value in headers.values()):
        raise ValueError("a header of this pool holds a line break")
    return headers


# ------------------------------------------------------- servers that speak OpenAI's dialect with differences


class Compatible(OpenAI):
    """Knows `max_tokens` alone, as nearly all did before OpenAI renamed it."""

    limit_name = "max_tokens"


class Mistral(Compatible):
    """Refuses unknown fields with a 422, and reports usage unasked in the last chunk."""

    asks_usage = False

    def _body(self, forward: BackendRequest) -> dict[str, Any]:
        body = super()._body(forward)
        body.pop("stream_options", None)
        limit = body.pop("max_completion_tokens", None)
        if limit is not None:
            body.setdefault("max_tokens", limit)
        return body


class LlamaCpp(Compatible):
    """llama.cpp's server. `/health` is 503 while the model loads; metrics exist only if enabled at start."""

    local = True
    probe_path = "/health"


class Ollama(Compatible):
    """Ollama: a local engine that does not report its load."""

    local = True
    probe_path = "/api/version"


# ------------------------------------------------------- engines whose load can be read


class Vllm(OpenAI):
    """vLLM's OpenAI server."""

    local = True
    salted = True
    names_sessions = True
    probe_path = "/health"
    reaching: tuple[str, ...] = ("kv_transfer_params",)  # fields by which a request may name another's cache
    limit_name = "max_tokens"
    metrics = LoadMetrics(
        running=(b"vllm:num_requests_running",),
        waiting=(b"vllm:num_requests_waiting",),
        kv_usage=(b"vllm:kv_cache_usage_perc", b"vllm:gpu_cache_usage_perc"),  # renamed in 0.9
        prefix_queries=(b"vllm:prefix_cache_queries_total", b"vllm:gpu_prefix_cache_queries_total"),
        prefix_hits=(b"vllm:prefix_cache_hits_total", b"vllm:gpu_prefix_cache_hits_total"),
        info=b"vllm:cache_config_info",
    )

    def _body(self, forward: BackendRequest) -> dict[str, Any]:
        body = super()._body(forward)
        if forward.cache_salt:
            body["cache_salt"] = forward.cache_salt
            for name in self.reaching:
                body.pop(name, None)
        if forward.session_id:
            body.pop("session_id", None)  # it would go before the header, and events would name another's prompt
        if forward.priority is not None:
            body["priority"] = forward.priority
        return body


class SGLang(Vllm):
    """SGLang's OpenAI server (load needs --enable-metrics). It knows `priority` and `cache_salt` too; to the salt it
    joins the caller's `extra_key`, which can only divide what is the caller's."""

    reaching = ("session_params", "rid", "bootstrap_host", "bootstrap_port", "bootstrap_room")
    metrics = LoadMetrics(
        running=(b"sglang:num_running_reqs",),
        waiting=(b"sglang:num_queue_reqs",),
        kv_usage=(b"sglang:token_usage",),
        prefix_queries=(b"sglang:prompt_tokens_total",),
        prefix_hits=(b"sglang:cached_tokens_total",),
        info=b"sglang:cache_config_info",  # until 0.5.10; gauges from there on
        block_size=b"page_size",
        blocks=b"num_pages",
        block_size_gauge=(b"sglang:page_size",),
        tokens_gauge=(b"sglang:max_total_num_tokens",),
    )


# ------------------------------------------------------- the catalog: a new kind is one line


@dataclass(frozen=True, slots=True)
class BackendKind:
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


def _api(name: str, base_url: str, doc: str, dialect: type[OpenAI] = Compatible) -> BackendKind:
    return BackendKind(name, dialect, doc, base_url, needs_key=True)


_ALL = (
    BackendKind("vllm", Vllm, "vLLM's OpenAI server"),
    BackendKind("sglang", SGLang, "SGLang's OpenAI server, started with --enable-metrics"),
    BackendKind("llamacpp", LlamaCpp, "llama.cpp's server"),
    BackendKind("ollama", Ollama, "Ollama", "http://127.0.0.1:11434"),
    BackendKind("simulated", Vllm, "a simulated engine that speaks as vLLM does"),
    BackendKind("compatible", Compatible, "anything else that speaks OpenAI's dialect"),
    BackendKind("openai-compatible", Compatible, "the same, in full"),
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
    if found.needs_key and not config.api_key and "authorization" not in {name.lower() for name in config.headers}:
        raise ValueError(f"backend '{config.kind}' needs an api_key")
    return found.dialect(config)
