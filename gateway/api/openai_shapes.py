"""Shapes of the bodies of OpenAI's chat completions and completions: the fields read or type-checked by the gateway."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

Choices = Annotated[int, msgspec.Meta(ge=1, le=128)]


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class MessageShape(msgspec.Struct):
    """A message of a chat, as far as a prompt is made of it."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[dict[str, Any]] | None = None


class _OpenAIShape(msgspec.Struct):
    model: Annotated[str, msgspec.Meta(min_length=1)]
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    max_tokens: int | None = None  # any: the engine judges the value
    n: Choices | None = None
    best_of: Choices | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: str | list[str] | None = None
    user: str | None = None


class ChatShape(_OpenAIShape, kw_only=True):
    messages: Annotated[list[MessageShape], msgspec.Meta(min_length=1)]
    max_completion_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    response_format: dict[str, Any] | None = None


class CompletionShape(_OpenAIShape, kw_only=True):
    prompt: str | list[str | int | list[int]]
