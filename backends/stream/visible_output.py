"""Finds output in the delta of a chat: what a caller gets to see or hear, of reasoning or of the answer.

Output of the answer is a text, a refusal, a tool call, audio, an image or a citation. Names of the members as of
November 2026: OpenAI's API reference, vLLM 0.32, and the documentation of DeepSeek, OpenRouter, Mistral, Gemini
(OpenAI-compatible), Perplexity, LiteLLM and GitHub Copilot.
"""

from __future__ import annotations

from typing import Any

from backends.stream.event_shapes import DeltaShape

# Members with output, of parts of a content, tool calls, images, citations and thoughts. Labels are none: ids, types,
# signatures, encrypted reasoning.
_OUTPUT = (
    *("text", "thinking", "summary", "content", "refusal", "function", "custom", "name", "arguments", "input"),
    *("image_url", "url", "b64_json", "url_citation", "title", "reference_ids"),
)
_OUTPUT_DEPTH = 6  # a tool call's name is at 3: list, call, function


def answers(delta: DeltaShape) -> bool:
    """The delta has output of the answer."""
    content, extra = delta.content, delta.extra_content
    if content and (extra is None or not _is_gemini_thought(extra)):
        if isinstance(content, str):
            return True
        if _is_output([part for part in content if not _is_thought(part)] if isinstance(content, list) else content):
            return True
    audio = delta.audio
    if isinstance(audio, dict) and (audio.get("data") or audio.get("transcript")):
        return True
    listed = delta.tool_calls, delta.images, delta.annotations, delta.citations
    if any(listed) and any(_is_output(value) for value in listed if isinstance(value, list)):
        return True
    return any(map(_is_output, filter(None, (delta.refusal, delta.function_call))))


def reasons(delta: DeltaShape) -> bool:
    """The delta has output of reasoning."""
    texts = delta.reasoning or delta.reasoning_content or delta.reasoning_text
    if texts or delta.reasoning_details or delta.thinking_blocks:
        return _is_output([texts, delta.reasoning_details, delta.thinking_blocks])
    content, extra = delta.content, delta.extra_content
    if isinstance(content, list):
        return _is_output([part for part in content if _is_thought(part)])
    return bool(content and extra) and _is_gemini_thought(extra)


def _is_output(value: Any, depth: int = _OUTPUT_DEPTH) -> bool:
    if value is None or depth == 0:
        return False
    if isinstance(value, list):
        return any(_is_output(item, depth - 1) for item in value)
    if isinstance(value, dict):
        return any(_is_output(value[name], depth - 1) for name in _OUTPUT if name in value)
    return type(value) is int or bool(value)


def _is_thought(part: Any) -> bool:
    """Of Mistral's contents."""
    return isinstance(part, dict) and part.get("type") == "thinking"


def _is_gemini_thought(extra: Any) -> bool:
    google = extra.get("google") if isinstance(extra, dict) else None
    return isinstance(google, dict) and google.get("thought") is True
