"""vLLM and SGLang: OpenAI's dialect, spoken by an engine with a report of the load."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from backends.interface import BackendConfig, BackendRequest, Failure, FailureKind, HttpCall, Operation, plain
from backends.metered_engine import LoadMetrics, MeteredEngine
from backends.openai import CHAT_MEMBERS, LIMITS, SAMPLING
from backends.stream.whole_forms import (
    SIMULATED_CHAT,
    SIMULATED_COMPLETION,
    VLLM_CHAT,
    VLLM_COMPLETION,
    WholeForm,
)

_encode = msgspec.json.Encoder().encode

# Members that prevent continuing a broken answer: grammars, which an engine cannot enter half-way, positions that
# restart, several answers.
_NOT_CONTINUED = frozenset(
    {"structured_outputs", "structural_tag", "json_schema", "regex", "ebnf", "functions", "function_call", "logprobs"}
    | {"top_logprobs", "prompt_logprobs", "echo", "suffix", "return_token_ids", "use_beam_search", "prompt_embeds"}
)
_NO_ADAPTER = re.compile(  # SGLang 0.5.23
    r"LoRA adapter '.{1,200}' was requested, but LoRA is not enabled|Got LoRA adapter that has never been loaded|"
    r"The following requested LoRA adapters are not loaded"
)
# Request members without effect on the shape of the answer, whole or streamed (vLLM 0.32).
_ENGINE_MEMBERS = (
    *("top_k", "min_p", "repetition_penalty", "length_penalty", "stop_token_ids", "include_stop_str_in_output"),
    *("ignore_eos", "min_tokens", "skip_special_tokens", "spaces_between_special_tokens", "truncate_prompt_tokens"),
    *("truncation_side", "allowed_token_ids", "bad_words", "add_special_tokens", "structured_outputs", "priority"),
    *("request_id", "session_id", "return_token_ids", "response_format"),
)
_TEMPLATE_MEMBERS = (
    *("chat_template", "chat_template_kwargs", "add_generation_prompt", "continue_final_message", "documents"),
    *("include_reasoning", "thinking_token_budget", "mm_processor_kwargs", "media_io_kwargs"),
)
_TOKENIZED = ("messages", "prompt", "tools", "chat_template", "chat_template_kwargs", "add_special_tokens")


class Vllm(MeteredEngine):
    """vLLM's OpenAI server."""

    native = MeteredEngine.native.union(
        (Operation.RERANK, Operation.SCORE, Operation.TOKENIZE, Operation.MESSAGES, Operation.COUNT_TOKENS)
    )
    salted = True
    wake_path = "/wake_up"  # with VLLM_SERVER_DEV_MODE=1
    names_sessions = True
    id_field = "request_id"  # names a request in the engine, where two equal names collide: a caller sets none
    whole_forms: Mapping[Operation, WholeForm] = {
        Operation.CHAT: VLLM_CHAT,
        Operation.COMPLETION: VLLM_COMPLETION,
    }
    assembled_members: Mapping[Operation, frozenset[str]] = {
        Operation.CHAT: frozenset((*SAMPLING, *CHAT_MEMBERS, *_ENGINE_MEMBERS, *_TEMPLATE_MEMBERS)),
        Operation.COMPLETION: frozenset((*SAMPLING, *_ENGINE_MEMBERS, "prompt")),
    }
    metrics = LoadMetrics(
        running=(b"vllm:num_requests_running",),
        waiting=(b"vllm:num_requests_waiting",),
        kv_usage=(b"vllm:kv_cache_usage_perc", b"vllm:gpu_cache_usage_perc"),  # renamed in 0.9
        prefix_queries=(b"vllm:prefix_cache_queries_total", b"vllm:gpu_prefix_cache_queries_total"),
        prefix_hits=(b"vllm:prefix_cache_hits_total", b"vllm:gpu_prefix_cache_hits_total"),
        preemptions=(b"vllm:num_preemptions_total",),
        rejections=(b"vllm:admission_rejections_total",),
        drafted=(b"vllm:spec_decode_num_draft_tokens_total",),
        accepted=(b"vllm:spec_decode_num_accepted_tokens_total",),
        info=b"vllm:cache_config_info",
        adapters=b"vllm:lora_requests_info",
        sleep=b"vllm:engine_sleep_state",
    )

    def __init__(self, config: BackendConfig) -> None:
        super().__init__(config)
        if config.dp_rank is not None:
            self._headers["x-data-parallel-rank"] = str(config.dp_rank)

    def _body(self, forward: BackendRequest) -> dict[str, Any]:
        body = super()._body(forward)
        body.pop(self.id_field, None)
        if forward.operation is Operation.RESPONSES:
            body.pop("request_id", None)
        if forward.cache_salt:
            body["cache_salt"] = forward.cache_salt
        if forward.session_id:
            body.pop("session_id", None)  # would go before the header, and events would name another's prompt
        if forward.priority is not None:
            body["priority"] = forward.priority
        return body

    def assembly_obstacle(self, forward: BackendRequest) -> str:
        """Arguments of tool calls are spelled by the model in a stream, and by a JSON encoder in a whole answer. Of
        several prompts or choices, each reports the cached tokens of another one."""
        body = forward.body
        if body.get("tools") and body.get("tool_choice") != "none":
            return "tools"
        if body.get("n") not in (None, 1):
            return "several choices"
        if forward.operation is Operation.COMPLETION and not isinstance(body.get("prompt"), str):
            return "a prompt that is no text"
        return super().assembly_obstacle(forward)

    def obstacle(self, forward: BackendRequest, tokens: int) -> str:
        if forward.operation not in (Operation.CHAT, Operation.COMPLETION):
            return "the dialect"
        body, last = forward.body, _last_message(forward.body)
        for name, value in body.items():
            if value and (name in _NOT_CONTINUED or name.startswith("guided_")):
                return name
        if any(body.get(name) not in (None, 1) for name in ("n", "best_of")):
            return "several choices"
        if plain(body.get("response_format")) not in (None, {"type": "text"}):
            return "response_format"
        if body.get("tool_choice") not in (None, "auto", "none"):
            return "tool_choice"
        if forward.operation is Operation.COMPLETION and not isinstance(body.get("prompt"), str):
            return "a prompt that is no text"
        if body.get("continue_final_message") and not isinstance(last.get("content"), str):
            return "a final message that is no text"
        if body.get("add_generation_prompt") is False and not body.get("continue_final_message"):
            return "add_generation_prompt"
        if any(limit <= tokens for limit in (*_limits(body).values(), forward.max_tokens) if limit is not None):
            return "the limit of the output"
        return ""

    def continued(self, forward: BackendRequest, text: str, tokens: int) -> BackendRequest:
        """As vLLM and SGLang take an unfinished answer: the assistant's message, without its end. All limits are of the
        whole answer, so `tokens` come off them."""
        body = {**forward.body, **{name: limit - tokens for name, limit in _limits(forward.body).items()}}
        if type(body.get("min_tokens")) is int:
            body["min_tokens"] = max(body["min_tokens"] - tokens, 0)
        cap = None if forward.max_tokens is None else forward.max_tokens - tokens
        if forward.operation is Operation.COMPLETION:
            body["prompt"] += text
        elif text:
            messages = list(body["messages"])
            last = _last_message(body) if body.get("continue_final_message") else {"role": "assistant", "content": ""}
            if body.get("continue_final_message"):
                messages.pop()
            body["messages"] = [*messages, {**last, "content": last["content"] + text}]
            body |= {"continue_final_message": True, "add_generation_prompt": False}
        return replace(forward, body=body, max_tokens=cap)

    def count_prompt(self, forward: BackendRequest) -> HttpCall:
        return self._tokenize(forward, {name: forward.body[name] for name in _TOKENIZED if name in forward.body})

    def count_text(self, forward: BackendRequest, text: str) -> HttpCall | None:
        limited = forward.max_tokens is not None or _limits(forward.body) or forward.body.get("min_tokens")
        return self._tokenize(forward, {"prompt": text, "add_special_tokens": False}) if limited else None

    def _tokenize(self, forward: BackendRequest, body: dict[str, Any]) -> HttpCall:
        return HttpCall(
            "POST", self.config.target("/tokenize"), self._headers, _encode({**body, "model": forward.model})
        )


def _last_message(body: Mapping[str, Any]) -> dict[str, Any]:
    messages = body.get("messages")
    return plain(messages[-1]) if messages else {}


def _limits(body: Mapping[str, Any]) -> dict[str, int]:
    """The caller's limits of the output."""
    return {name: body[name] for name in LIMITS if type(body.get(name)) is int}


class SimulatedVllm(Vllm):
    """The simulated engine of `firsttoken simulate`."""

    native = frozenset({Operation.CHAT, Operation.COMPLETION})
    whole_forms = {Operation.CHAT: SIMULATED_CHAT, Operation.COMPLETION: SIMULATED_COMPLETION}


class SGLang(Vllm):
    """SGLang's OpenAI server (load needs --enable-metrics). Knows `priority` and `cache_salt` too; the salt is joined
    with the caller's `extra_key`, which can only divide the caller's own. An adapter is asked for as MODEL:ADAPTER
    (0.5.23), or by `lora_path`, which would let a caller choose."""

    native = Vllm.native - {Operation.MESSAGES, Operation.COUNT_TOKENS}  # Messages without cache_salt
    assembled_members = {}  # `metadata` is in whole answers alone
    id_field = "rid"
    wake_path = ""  # its status page does not report released memory (0.5.23)
    refuses_models = False
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

    def _body(self, forward: BackendRequest) -> dict[str, Any]:
        body = super()._body(forward)
        if self.config.adapters:
            body.pop("lora_path", None)
        if forward.model in self.config.adapters:
            body["model"] = f"{self.config.model}:{forward.model}"
        return body

    def failure(self, status: int, headers: Mapping[str, str], body: bytes) -> Failure:
        """An adapter that is not loaded is a 400 here. Where the pool has no adapters, a caller may have named it."""
        failure = super().failure(status, headers, body)
        if self.config.adapters and status == 400 and _NO_ADAPTER.match(failure.message):
            return replace(failure, kind=FailureKind.MISCONFIGURED, code="model_not_found")
        return failure
