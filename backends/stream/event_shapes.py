"""Shapes of events and replies: the fields in use, of OpenAI's chats and Responses, and of Anthropic's Messages.

The garbage collector does not track these values: they live for one event, and refer to decoded JSON alone.
"""

from __future__ import annotations

from typing import Any

import msgspec


class DeltaShape(msgspec.Struct, gc=False):
    content: Any = None  # a text; Mistral: or a list of parts
    reasoning: Any = None  # vLLM, OpenRouter
    reasoning_content: Any = None  # DeepSeek, SGLang, llama.cpp
    reasoning_details: Any = None  # OpenRouter
    reasoning_text: Any = None  # GitHub Copilot
    thinking_blocks: Any = None  # LiteLLM
    extra_content: Any = None  # Gemini: marks a content as a thought
    refusal: Any = None
    tool_calls: Any = None
    function_call: Any = None
    audio: Any = None
    images: Any = None  # OpenRouter
    annotations: Any = None  # OpenAI, OpenRouter: citations
    citations: Any = None  # Perplexity


class ChoiceShape(msgspec.Struct, gc=False):
    index: Any = None
    delta: DeltaShape | None = None
    text: Any = None
    finish_reason: Any = None


class _ReplyShape(msgspec.Struct, gc=False):
    id: Any = None
    service_tier: Any = None
    usage: Any = None
    error: Any = None
    metrics: Any = None


class WholeShape(_ReplyShape, gc=False):
    choices: Any = None
    stop_reason: Any = None  # of a message


class ChunkShape(_ReplyShape, gc=False):
    choices: list[ChoiceShape] | None = None


class UsageShape(msgspec.Struct, gc=False):
    choices: list[Any] | None = None
    usage: Any = None


class ResponseShape(msgspec.Struct, gc=False):
    id: Any = None
    service_tier: Any = None
    status: Any = None
    incomplete_details: Any = None
    usage: Any = None
    error: Any = None
    output: Any = None


class ResponseEventShape(msgspec.Struct, gc=False):
    type: Any = None
    delta: Any = None
    response: ResponseShape | None = None
    error: Any = None


class MessageEventShape(msgspec.Struct, gc=False):
    type: Any = None
    message: Any = None
    content_block: Any = None
    delta: Any = None
    usage: Any = None
    error: Any = None
