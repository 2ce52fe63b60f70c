"""Forms of whole answers: their members in the server's order, with the values of members that a stream leaves out.

Sources: vLLM 0.32 (vllm/entrypoints/openai/chat_completion and completion, protocol.py and serving.py; the tests have
replies of both kinds), OpenAI's API reference (2026-11). Older versions of vLLM have fewer members; those absent there
are null here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from backends.stream.assembly import Differences


class _Absent:
    """Default of a member that a whole answer has only where the stream has it."""


ABSENT = _Absent()
REQUIRED = _Absent()  # in every whole answer; a stream without it differs
Members = Mapping[str, Any]  # defaults by name


@dataclass(frozen=True, slots=True)
class WholeForm:
    """Members of a whole answer and of its parts. `parts`: of objects within, by name."""

    body: Members
    choice: Members
    message: Members = field(default_factory=dict)
    parts: Mapping[str, Members] = field(default_factory=dict)


def filled(members: dict[str, Any], form: Members, parts: Mapping[str, Members], found: Differences) -> dict[str, Any]:
    """The members in the order of the form, with its defaults; unknown members come last."""
    for name, default in form.items():
        if default is REQUIRED and name not in members:
            found.note(f"no '{name}'")
    ordered = {
        name: members.get(name, default)
        for name, default in form.items()
        if name in members or not isinstance(default, _Absent)
    }
    ordered |= {name: value for name, value in members.items() if name not in ordered}
    for name in parts.keys() & ordered.keys():
        if isinstance(part := ordered[name], dict):
            ordered[name] = filled(part, parts[name], parts, found)
    return ordered


def _required(*names: str) -> dict[str, Any]:
    return dict.fromkeys(names, REQUIRED)


def _nulls(*names: str) -> dict[str, Any]:
    return dict.fromkeys(names)


_ENVELOPE = _required("id", "object", "created", "model", "choices")
_COUNTS = _required("prompt_tokens", "total_tokens", "completion_tokens")

_VLLM_PARTS: Mapping[str, Members] = {
    "usage": {**_COUNTS, **_nulls("prompt_tokens_details", "completion_tokens_details")},
    "prompt_tokens_details": _nulls("cached_tokens", "created_cache_tokens", "multimodal_tokens"),
    "metrics": _nulls(
        *("time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms", "tokens_per_second"),
        "speculative_decoding",
    ),
}
_VLLM_HEAD = {**_ENVELOPE, **_nulls("service_tier", "system_fingerprint"), **_required("usage")}
_VLLM_TAIL = _nulls("kv_transfer_params", "ec_transfer_params", "metrics")

VLLM_CHAT = WholeForm(
    body={**_VLLM_HEAD, **_nulls("prompt_logprobs", "prompt_token_ids", "prompt_text"), **_VLLM_TAIL},
    choice={
        **_required("index", "message"),
        **_nulls("logprobs", "finish_reason", "stop_reason", "token_ids", "routed_experts"),
    },
    message={
        **_required("role", "content"),
        **_nulls("refusal", "annotations", "audio", "function_call"),
        "tool_calls": ABSENT,
        "reasoning": None,
    },
    parts=_VLLM_PARTS,
)
VLLM_COMPLETION = WholeForm(
    body={**_VLLM_HEAD, **_VLLM_TAIL},
    choice={
        **_required("index", "text"),
        **_nulls("logprobs", "finish_reason", "stop_reason", "token_ids"),
        **_nulls("prompt_logprobs", "prompt_token_ids", "routed_experts"),
    },
    parts=_VLLM_PARTS,
)

_SIMULATED_BODY = {**_ENVELOPE, **_required("usage"), "metrics": ABSENT}
_SIMULATED_CHOICE = {**_required("index"), **_nulls("logprobs", "finish_reason")}
SIMULATED_CHAT = WholeForm(body=_SIMULATED_BODY, choice=_SIMULATED_CHOICE, message=_required("role", "content"))
SIMULATED_COMPLETION = WholeForm(body=_SIMULATED_BODY, choice=_SIMULATED_CHOICE)

_OPENAI_BODY = {**_ENVELOPE, **_required("usage"), "service_tier": ABSENT, "system_fingerprint": ABSENT}
OPENAI_CHAT = WholeForm(
    body=_OPENAI_BODY,
    choice={**_required("index", "message"), **_nulls("logprobs", "finish_reason")},
    message={
        **_required("role", "content"),
        "tool_calls": ABSENT,
        "function_call": ABSENT,
        "refusal": None,
        "annotations": [],
    },
)
OPENAI_COMPLETION = WholeForm(
    body=_OPENAI_BODY, choice={**_required("text", "index"), **_nulls("logprobs", "finish_reason")}
)
