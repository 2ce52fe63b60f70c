"""vLLM and SGLang: OpenAI's dialect, spoken by an engine that can be asked how it fares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from backends.engine_metrics import LoadMetrics
from backends.interface import BackendRequest, HttpCall
from backends.openai import OpenAI


class Vllm(OpenAI):
    """vLLM's OpenAI server."""

    local = True
    salted = True
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

    def _own(self, forward: BackendRequest) -> tuple[tuple[str, str], ...]:
        return (*super()._own(forward), ("x-session-id", forward.session_id))

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

    def probe(self) -> HttpCall | None:
        return HttpCall("GET", "/health")

    def load(self) -> HttpCall | None:
        return HttpCall("GET", "/metrics")

    def read_load(self, body: bytes) -> Mapping[str, float | None]:
        return self.metrics.read(body)


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
