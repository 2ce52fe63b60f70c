"""A request is asked for as a stream only where its whole answer is known to follow from the events."""

from __future__ import annotations

import json
from typing import Any

import pytest

from backends.anthropic import Anthropic
from backends.catalog import KINDS, build
from backends.interface import Backend, BackendConfig, BackendRequest, Operation
from backends.stream.assembled_messages import MessageAssembler, ResponseAssembler

HI = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]
CHAT, COMPLETION = Operation.CHAT, Operation.COMPLETION


def backend(kind: str) -> Backend:
    return build(BackendConfig(kind, "m", api_key="k"))


def obstacle(kind: str, operation: Operation, **body: Any) -> str:
    prompt = {"prompt": "hi"} if operation is COMPLETION else {"input": "hi"} if "input" in body else {"messages": HI}
    forward = BackendRequest(operation, {"model": "m", **prompt, "stream": False, **body}, "m", stream=False)
    return backend(kind).assembly_obstacle(forward)


@pytest.mark.parametrize(
    ("kind", "operation", "body"),
    [
        ("vllm", CHAT, {"max_tokens": 9, "temperature": 0, "logprobs": True, "top_logprobs": 2, "top_k": 3}),
        ("vllm", CHAT, {"tools": TOOLS, "tool_choice": "none"}),
        ("vllm", CHAT, {"stream_options": None, "n": 1}),
        ("vllm", COMPLETION, {"max_tokens": 9, "return_token_ids": True}),
        ("simulated", CHAT, {"ignore_eos": True, "min_tokens": 3}),
        ("openai", CHAT, {"tools": TOOLS, "n": 3, "logprobs": True, "reasoning_effort": "low"}),
        ("openai", COMPLETION, {"stop": ["a"]}),
        ("openai", Operation.RESPONSES, {"input": "hi", "tools": [], "reasoning": {"effort": "low"}}),
        ("anthropic", Operation.MESSAGES, {"max_tokens": 9, "tools": [{"name": "f"}], "system": "s"}),
    ],
)
def test_usual_requests_are_assembled(kind: str, operation: Operation, body: dict[str, Any]) -> None:
    assert obstacle(kind, operation, **body) == ""


@pytest.mark.parametrize(
    ("kind", "operation", "body", "reason"),
    [
        ("vllm", CHAT, {"stream_options": {"include_usage": True}}, "stream_options"),
        ("vllm", CHAT, {"tools": TOOLS}, "tools"),
        ("vllm", CHAT, {"n": 2}, "several choices"),
        ("vllm", CHAT, {"prompt_logprobs": 1}, "prompt_logprobs"),
        ("vllm", CHAT, {"use_beam_search": True}, "use_beam_search"),
        ("vllm", CHAT, {"echo": True}, "echo"),
        ("vllm", CHAT, {"kv_transfer_params": {"do_remote_decode": True}}, "kv_transfer_params"),
        ("vllm", CHAT, {"of_the_future": 1}, "of_the_future"),
        ("vllm", COMPLETION, {"logprobs": 1}, "logprobs"),
        ("vllm", COMPLETION, {"best_of": 2}, "best_of"),
        ("vllm", COMPLETION, {"prompt": ["a", "b"]}, "a prompt that is no text"),
        ("vllm", Operation.MESSAGES, {"max_tokens": 9}, "the dialect"),
        ("vllm", Operation.RESPONSES, {"input": "hi"}, "the dialect"),
        ("openai", CHAT, {"modalities": ["text", "audio"], "audio": {"voice": "a"}}, "modalities"),
        ("openai", Operation.EMBEDDINGS, {"input": "hi"}, "the dialect"),
        ("openai", Operation.RESPONSES, {"input": "hi", "background": True}, "background"),
        ("sglang", CHAT, {}, "the dialect"),
        ("llamacpp", CHAT, {}, "the dialect"),
        ("azure", CHAT, {}, "the dialect"),
        ("compatible", CHAT, {}, "the dialect"),
        ("anthropic", Operation.COUNT_TOKENS, {}, "the dialect"),
        ("anthropic", Operation.MESSAGES, {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools"),
        ("anthropic", Operation.MESSAGES, {"messages": [{"citations": {"enabled": True}}]}, "citations"),
        ("anthropic", Operation.MESSAGES, {"thread": {"type": "create"}}, "thread"),
    ],
)
def test_all_other_requests_stay_whole(kind: str, operation: Operation, body: dict[str, Any], reason: str) -> None:
    assert obstacle(kind, operation, **body) == reason


def test_features_of_a_beta_stay_whole() -> None:
    body = {"messages": HI, "max_tokens": 9}
    forward = BackendRequest(Operation.MESSAGES, body, "m", stream=False, headers={"anthropic-beta": "new"})
    assert Anthropic(BackendConfig("anthropic", "m", api_key="k")).assembly_obstacle(forward) == "anthropic-beta"


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_backend_assembles_only_what_it_speaks(kind: str) -> None:
    """Every operation without an obstacle has an assembler, and is spoken by the server."""
    known = backend(kind)
    for operation in Operation:
        member = "messages" if operation in (CHAT, Operation.MESSAGES) else "prompt"
        forward = BackendRequest(operation, {member: HI if member == "messages" else "hi"}, "m", stream=False)
        if operation is Operation.RESPONSES:
            forward.body = {"input": "hi"}
        if not known.assembly_obstacle(forward):
            assert operation in known.native
            assert known.assembler(forward).held_bytes == 0


def test_an_assembler_is_that_of_the_dialect() -> None:
    messages = BackendRequest(Operation.MESSAGES, {"messages": HI}, "m", stream=False)
    responses = BackendRequest(Operation.RESPONSES, {"input": "hi"}, "m", stream=False)
    assert isinstance(backend("anthropic").assembler(messages), MessageAssembler)
    assert isinstance(backend("openai").assembler(responses), ResponseAssembler)


@pytest.mark.parametrize(("kind", "with_usage"), [("vllm", True), ("openai", True), ("anthropic", False)])
def test_the_flag_of_the_request_makes_it_a_stream(kind: str, with_usage: bool) -> None:
    """Although the caller's body says otherwise."""
    operation = Operation.MESSAGES if kind == "anthropic" else CHAT
    body = {"messages": HI, "max_tokens": 9, "stream": False}
    call = backend(kind).call(BackendRequest(operation, body, "m", stream=True))
    sent = json.loads(call.body)
    assert sent["stream"] is True
    assert sent.get("stream_options") == ({"include_usage": True} if with_usage else None)
    assert call.headers["accept"] == "text/event-stream"
