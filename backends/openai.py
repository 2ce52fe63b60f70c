"""OpenAI's dialect: chat completions and completions of OpenAI and compatible servers.

The parsed body is encoded anew; arrays and objects that are strict JSON keep their spelling. Changed are the model,
the stream's usage (the gateway meters by usage), the cap on output and the cache salt; every other field, known or
not, passes through.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from hashlib import sha256
from typing import Any
from urllib.parse import quote

import msgspec

from backends import failures
from backends.body_changes import changed
from backends.facts.lookup import facts_of
from backends.facts.model_facts import Facts
from backends.interface import (
    GENERATING,
    Assembler,
    Backend,
    BackendConfig,
    BackendRequest,
    Failure,
    HttpCall,
    Operation,
    Tap,
)
from backends.stream.assembled_choices import ChoicesAssembler
from backends.stream.assembled_messages import MessageAssembler, ResponseAssembler
from backends.stream.native_taps import MessagesBodyTap, MessagesTap, ResponsesBodyTap, ResponsesTap
from backends.stream.taps import DONE, BodyTap, SilentBodyTap, StreamTap
from backends.stream.whole_forms import OPENAI_CHAT, OPENAI_COMPLETION, WholeForm

LIMITS = ("max_completion_tokens", "max_tokens")  # the new name and the old name
_CAPPED: Mapping[Operation, tuple[str, ...]] = {  # members that limit the output; the last is set where none is
    Operation.CHAT: LIMITS,
    Operation.COMPLETION: LIMITS,
    Operation.MESSAGES: ("max_tokens",),
    Operation.RESPONSES: ("max_output_tokens",),
}
_LEAST = ("min_tokens", "min_new_tokens")  # members that ask for a least number of tokens
_WITH_USAGE_OPTION = (Operation.CHAT, Operation.COMPLETION)
BEARER = "authorization"  # header of a key that is a bearer token
MOST_KNOWN = 512  # models of a backend whose facts are kept
MIN_THINKING = 1024  # tokens, Anthropic's and vLLM's least budget
_WITH_CACHE_KEY = (Operation.CHAT, Operation.RESPONSES, Operation.COMPACT)
_RESERVED = frozenset({"host", "content-length", "transfer-encoding", "connection"})
_encode = msgspec.json.Encoder().encode
# Request members without effect on the shape of the answer, whole or streamed.
SAMPLING = (
    *("model", "stream", "n", "max_tokens", "temperature", "top_p", "stop", "seed", "user", "logit_bias"),
    *("frequency_penalty", "presence_penalty", "cache_salt"),
)
CHAT_MEMBERS = (
    *("messages", "max_completion_tokens", "response_format", "reasoning_effort", "verbosity", "logprobs"),
    *("top_logprobs", "tools", "tool_choice", "parallel_tool_calls", "functions", "function_call", "metadata"),
    *("store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
)
_RESPONSE_MEMBERS = (
    *("model", "input", "instructions", "previous_response_id", "conversation", "prompt", "include", "stream"),
    *("max_output_tokens", "max_tool_calls", "temperature", "top_p", "top_logprobs", "reasoning", "text", "tools"),
    *("tool_choice", "parallel_tool_calls", "metadata", "store", "truncation", "service_tier", "user"),
    *("safety_identifier", "prompt_cache_key", "prompt_cache_retention", "cache_salt"),
)


class OpenAI(Backend):
    """A `Backend`. Subclasses are dialects of this dialect."""

    native = frozenset({Operation.CHAT, Operation.COMPLETION, Operation.EMBEDDINGS, Operation.RESPONSES})
    local: bool = False
    refuses_models: bool = True
    salted: bool = False
    limit_name: str = "max_completion_tokens"  # default field for the cap on a chat's output
    key_header: str = BEARER  # of the key
    asks_usage: bool = True  # knows stream_options
    default_output: int | None = None  # default output limit, if servers require a limit
    probe_path: str = ""  # of a cheap page for the server's health; empty: only real traffic shows the health
    listing_path: str = "/v1/models"
    caches_by_key: bool = False  # knows prompt_cache_key
    names_sessions: bool = False  # cache events name a request by the session id in the header
    whole_forms: Mapping[Operation, WholeForm] = {}  # of answers, where the server's are known
    assembled_members: Mapping[Operation, frozenset[str]] = {}  # of requests whose answers can be assembled

    def __init__(self, config: BackendConfig) -> None:
        self.kind = config.kind
        self._secret, self.secret = config.api_key, config.api_key.encode()
        self.config, self.keyed_by_callers = config, config.caller_keys
        self._headers = _headers(config, config.key_header or self.key_header)
        self._models = (config.model, *config.adapters)
        self._facts: dict[str, Facts] = {}

    def call(self, forward: BackendRequest) -> HttpCall:
        headers = {"accept": "text/event-stream" if forward.stream else "application/json", **self._headers}
        if forward.request_id:
            headers["x-request-id"] = forward.request_id
        if forward.traceparent:
            headers["traceparent"] = forward.traceparent
        if forward.tracestate:
            headers["tracestate"] = forward.tracestate
        if forward.baggage:
            headers["baggage"] = forward.baggage
        if forward.session_id and self.names_sessions:
            headers["x-session-id"] = forward.session_id
        path = self.path(forward)
        if self.config.query:
            path = self.config.target(path)
        return HttpCall("POST", path, headers, self._encoded(self._body(forward), forward))

    def facts(self, model: str) -> Facts:
        found = self._facts.get(model)
        if found is None:
            if len(self._facts) >= MOST_KNOWN:
                self._facts.clear()  # names are callers'
            found = facts_of(self.config.api or self.kind, model, self.config.accepts)
            self._facts[model] = found
        return found

    def with_key(self, header: str, key: str) -> OpenAI:
        return type(self)(replace(self.config, api_key=key))

    def _encoded(self, body: dict[str, Any], forward: BackendRequest) -> bytes:
        if self.config.rename or self.config.drop:
            body = self.config.adapted(body)
        if forward.changes:
            body = changed(body, forward.changes)
        return _encode(body)

    def path(self, forward: BackendRequest) -> str:
        return forward.operation.value

    def _body(self, forward: BackendRequest) -> dict[str, Any]:
        body = {**forward.body, "model": forward.model}
        if not self.salted:
            body.pop("cache_salt", None)  # the server knows no such field and may refuse the request
        if self.caches_by_key and forward.cache_salt and forward.operation in _WITH_CACHE_KEY:
            body.setdefault("prompt_cache_key", _cache_key(forward.cache_salt))
        if forward.stream:
            body["stream"] = True
            options = body.get("stream_options") or {}
            asks = self.asks_usage and forward.operation in _WITH_USAGE_OPTION
            if asks and isinstance(options, dict):  # else the server refuses the malformed options
                body["stream_options"] = {**options, "include_usage": True}
        elif "stream" in body:
            body["stream"] = False
        if forward.max_tokens is not None:
            self._cap(body, forward.operation, forward.max_tokens, self.facts(forward.model))
        return body

    def _cap(self, body: dict[str, Any], operation: Operation, cap: int, facts: Facts) -> None:
        """Lower the caller's limit to `cap`; set the cap if the limit is absent, unlimited (below 0) or no number.

        Servers read the text "100000" as a number.
        """
        limits = _CAPPED.get(operation, ())
        asked = [name for name in limits if body.get(name) is not None]
        for name in asked:
            if type(body[name]) not in (int, float) or not 0 <= body[name] <= cap:
                body[name] = cap
        if limits and not asked:
            body[(facts.limit or self.limit_name) if operation is Operation.CHAT else limits[-1]] = cap
        for name in _LEAST:
            if type(body.get(name)) in (int, float) and body[name] > cap:
                body[name] = cap  # engines refuse a least number above the limit
        if operation is Operation.MESSAGES:
            _fit_thinking(body, cap, facts)

    def lost(self, forward: BackendRequest) -> tuple[str, ...]:
        cap, messages = forward.max_tokens, forward.operation is Operation.MESSAGES
        lost = () if not self.config.drop else tuple(sorted(self.config.drop & forward.body.keys()))
        no_room = messages and cap is not None and has_no_room_to_think(forward.body, cap)
        return (*lost, "thinking") if no_room and "thinking" not in lost else lost

    def tap(self, forward: BackendRequest) -> Tap:
        if forward.operation is Operation.MESSAGES:
            return MessagesTap(self._secret) if forward.stream else MessagesBodyTap(self._secret)
        if forward.operation in (Operation.RESPONSES, Operation.COMPACT):
            return ResponsesTap(self._secret) if forward.stream else ResponsesBodyTap(self._secret)
        if not forward.stream:
            return BodyTap(self._secret) if forward.operation in GENERATING else SilentBodyTap(self._secret)
        return StreamTap(choices_of(forward.body), self._secret, last=DONE)

    def assembly_obstacle(self, forward: BackendRequest) -> str:
        known = self.assembled_members.get(forward.operation)
        if known is None:
            return "the dialect"
        return next((name for name, value in forward.body.items() if name not in known and value is not None), "")

    def assembler(self, forward: BackendRequest) -> Assembler:
        if forward.operation is Operation.MESSAGES:
            return MessageAssembler()
        if forward.operation is Operation.RESPONSES:
            return ResponseAssembler()
        return ChoicesAssembler(self.whole_forms[forward.operation], choices_of(forward.body))

    def failure(self, status: int, headers: Mapping[str, str], body: bytes) -> Failure:
        return failures.of_reply(status, headers, body, self._secret, self._models)

    def obstacle(self, forward: BackendRequest, tokens: int) -> str:
        return "the dialect"

    def stored(self, method: str, path: str) -> HttpCall:
        return HttpCall(method, path, self._headers)

    def listing(self) -> HttpCall:
        return HttpCall("GET", self.config.target(self.listing_path), self._headers)

    def probe(self) -> HttpCall | None:
        return HttpCall("GET", self.probe_path) if self.probe_path else None


def has_no_room_to_think(body: Mapping[str, Any], cap: int) -> bool:
    """A budget of thinking that no cap so low leaves room for: the answer comes without thinking."""
    thinking = body.get("thinking")
    budget = thinking.get("budget_tokens") if isinstance(thinking, dict) else None
    return type(budget) is int and budget >= cap and cap <= MIN_THINKING


def _fit_thinking(body: dict[str, Any], cap: int, facts: Facts) -> None:
    """Lower a thinking budget below the output cap: servers refuse a larger budget, or less than MIN_THINKING. Without
    room, thinking is switched off, or left unset for a model that always thinks."""
    thinking = body.get("thinking")
    budget = thinking.get("budget_tokens") if isinstance(thinking, dict) else None
    if has_no_room_to_think(body, cap):
        body["thinking"] = {"type": "disabled"}
        if facts.thinking_off is None:
            del body["thinking"]
    elif isinstance(thinking, dict) and type(budget) is int and budget >= cap:
        body["thinking"] = {**thinking, "budget_tokens": cap - 1}


def _cache_key(salt: str) -> str:
    """A name of the cache group for a provider, from which the salt for engines does not follow."""
    return "ft-" + sha256(b"prompt_cache_key\0" + salt.encode()).hexdigest()[:32]


_TEXT_LISTS = ("input", "documents", "queries", "text_2")  # of which each text is a prompt


def asks_for_one(body: Mapping[str, Any]) -> bool:
    """True for a body with a single prompt and answer: engines count one request."""
    texts = next((body[name] for name in _TEXT_LISTS if name in body), None)
    several = isinstance(texts, list) and len(texts) > 1 and isinstance(texts[0], str | list)
    return not several and choices_of(body) == 1 and body.get("best_of") in (None, 1)


def choices_of(body: Mapping[str, Any]) -> int:
    """Choices of an answer: `n` for every prompt."""
    n, prompt = body.get("n"), body.get("prompt")
    choices = n if type(n) is int else 1
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):  # else: tokens of one prompt
        choices *= len(prompt)
    return choices


def _headers(config: BackendConfig, key_header: str) -> dict[str, str]:
    """Header fields common to all calls of a pool; configured headers override."""
    headers = {
        "content-type": "application/json",
        "accept-encoding": "identity",  # bytes are relayed unchanged, and read in passing
        "user-agent": "firsttoken",  # some providers' edges refuse requests without a user agent
    }
    if config.api_key:
        headers[key_header] = f"Bearer {config.api_key}" if key_header == BEARER else config.api_key
    headers.update({name.lower(): value for name, value in config.headers.items()})
    if reserved := _RESERVED & headers.keys():
        raise ValueError(f"the header '{min(reserved)}' is the gateway's own to write; take it out of headers")
    if any("\n" in value or "\r" in value for value in headers.values()):
        raise ValueError("a header of this pool holds a line break")
    return headers


class OpenAIPlatform(OpenAI):
    """OpenAI's own API. Requests of a cache group are kept together by `prompt_cache_key` (guide "Prompt caching",
    2026-11: the key is combined with a hash of the prefix), where the caller sets none."""

    native = OpenAI.native | {Operation.COMPACT, Operation.INPUT_TOKENS}
    caches_by_key = True
    whole_forms = {Operation.CHAT: OPENAI_CHAT, Operation.COMPLETION: OPENAI_COMPLETION}
    assembled_members = {
        Operation.CHAT: frozenset((*SAMPLING, *CHAT_MEMBERS)),
        Operation.COMPLETION: frozenset((*SAMPLING, "prompt", "suffix")),
        Operation.RESPONSES: frozenset(_RESPONSE_MEMBERS),
    }


class Compatible(OpenAI):
    """Knows `max_tokens` alone, the name before OpenAI's change, and no Responses."""

    native = OpenAI.native - {Operation.RESPONSES}
    limit_name = "max_tokens"

    def _body(self, forward: BackendRequest) -> dict[str, Any]:
        body = super()._body(forward)
        if "max_completion_tokens" in body and "max_tokens" not in body:
            body["max_tokens"] = body.pop("max_completion_tokens")
        return body


class Mistral(Compatible):
    """Refuses unknown fields with a 422, and reports usage unasked in the last chunk."""

    asks_usage = False

    def _body(self, forward: BackendRequest) -> dict[str, Any]:
        body = super()._body(forward)
        body.pop("stream_options", None)
        body.pop("max_completion_tokens", None)
        return body


class Ollama(Compatible):
    """Ollama: a local engine without a report of the load."""

    local = True
    probe_path = "/api/version"


# -- Azure OpenAI ----------------------------------------------------------------------------------
#
# Azure OpenAI: OpenAI's dialect behind deployments.
#
# Source: Azure OpenAI REST API reference, inference, version 2024-10-21 (read 2026-11). The URL is the resource's,
# without a path: https://NAME.openai.azure.com. `model` is the name of the deployment. The newer API without versions,
# at /openai/v1, is OpenAI's own dialect: a pool of the kind `openai` with that `base_url`.


API_VERSION = "2024-10-21"  # latest stable version; `query: {api-version: ...}` overrides


class AzureOpenAI(OpenAI):
    """The deployment is in the path. Fields that the API version does not know are refused."""

    key_header = "api-key"
    listing_path = "/openai/models"  # the models of the resource, by other names than its deployments

    def __init__(self, config: BackendConfig) -> None:
        super().__init__(replace(config, query={"api-version": API_VERSION, **config.query}))

    def path(self, forward: BackendRequest) -> str:
        deployment = quote(forward.model, safe="").strip(".") or "-"  # a caller's name (passthrough) leaves no folder
        return f"/openai/deployments/{deployment}{forward.operation.value.removeprefix('/v1')}"
