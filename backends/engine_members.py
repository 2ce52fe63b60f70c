"""Members and headers by which a request addresses the machinery of an engine: transfers of KV caches between engines,
data-parallel ranks, sessions of an engine. They name hosts and ports, read what others have cached, or end an engine
that expects them from its own router: none of a caller's is sent on.

Source: vLLM 0.33, SGLang 0.5.23, TensorRT-LLM, llm-d's router and Dynamo, source and documentation (2026-11).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TRANSFERS = (
    *("kv_transfer_params", "ec_transfer_params", "disaggregated_params", "disagg_spec"),
    *("bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key", "decode_tp_size"),
    *("do_remote_decode", "do_remote_prefill", "remote_block_ids", "remote_engine_id", "remote_request_id"),
    *("remote_host", "remote_port", "remote_bootstrap_addr", "remote_decoder", "remote_prefiller", "remote_kv_source"),
    *("router_hint", "transfer_id"),
)
_RANKS = (
    *("data_parallel_rank", "data_parallel_rank_decode", "routed_dp_rank", "disagg_prefill_dp_rank", "dp_rank"),
    *("prefill_dp_rank", "decode_dp_rank", "attention_dp_rank", "scheduling_params"),
)
_WORKERS = ("backend_instance_id", "decode_worker_id", "prefill_worker_id", "worker_id", "worker_instance_id")
ENGINE_MEMBERS = frozenset((*_TRANSFERS, *_RANKS, *_WORKERS, "session_params"))
# Objects in which engines read such members.
HOLDERS = ("vllm_xargs", "nvext", "extra_args", "extra_body", "custom_params")
# Headers, for a proxy that carries the caller's own. The gateway itself sends none of a caller's but `anthropic-*`.
ENGINE_HEADERS = (
    *("x-data-parallel-rank", "x-data-parallel-host-port", "x-prefiller-host-port", "x-prefiller-hosts-ports"),
    *("x-kv-cache-source-host-port", "x-encoder-hosts-ports", "x-worker-instance-id", "x-prefill-instance-id"),
    *("x-dp-rank", "x-prefill-dp-rank", "x-dynamo-worker-instance-id", "x-dynamo-prefill-instance-id"),
    *("x-dynamo-dp-rank", "x-dynamo-prefill-dp-rank", "x-routed-dp-rank"),
)
ENGINE_ANY = ENGINE_MEMBERS.union(HOLDERS)


def without_engine_members(body: Mapping[str, Any]) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """The body without such members, and their paths; the body itself where it has none."""
    if ENGINE_ANY.isdisjoint(body):
        return body, ()
    kept, found = dict[str, Any](), list[str]()
    for name, value in body.items():
        if name in ENGINE_MEMBERS:
            found.append(name)
            continue
        if name in HOLDERS and isinstance(value, dict):  # one in another, too: clients and servers unfold them
            value, inner = without_engine_members(value)
            found += [f"{name}.{each}" for each in inner]
        kept[name] = value
    return (kept, tuple(found)) if found else (body, ())
