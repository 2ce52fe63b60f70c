"""Shapes of events and replies: the fields in use, of OpenAI's chats and Responses, and of Anthropic's Messages.

The garbage collector does not track these values: they live for one event, and refer to decoded JSON alone.

Output in the delta of a chat is what a caller gets to see or hear, of reasoning or of the answer: of the answer a text,
a refusal, a tool call, audio, an image or a citation. Names of the members as of November 2026: OpenAI's API reference,
vLLM 0.32, and the documentation of DeepSeek, OpenRouter, Mistral, Gemini (OpenAI-compatible), Perplexity, LiteLLM and
GitHub Copilot.

The form of a token event is all of its bytes but the text itself. A server writes all tokens of an answer in the same
form, so an event of a known form is compared, not parsed. Rules:
- A form is learned from a decoded event, and stands for events equal to it, byte for byte, but for the text.
- A text of a known form is UTF-8 and the inside of a JSON string. Escaped surrogates are left to a parser.

Finish reasons are the closed list of words by which servers report the end of an answer, with their meaning. Only a
good end is a success. Rules:
- Words are compared in lower case. A word outside the list is an unknown end: a future word may report a failure, like
  `insufficient_system_resource` and `abort`. Callers of the server's own dialect get the word unchanged. Other dialects
  cannot express the word, and the answer is not called complete.
- An answer without any word is not judged here.

Sources: API references of the providers in `backends.catalog`; finish reasons of the engines there (November 2026).
"""

from __future__ import annotations

import re
from enum import Enum
from operator import attrgetter
from typing import Any

import msgspec

from backends.failures import FAILED_INSIDE
from backends.interface import Failure


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
    content: Any = None  # of a message


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


# Members with output, of parts of a content, tool calls, images, citations and thoughts. Labels are none: ids, types,
# signatures, encrypted reasoning.
_OUTPUT = (
    *("text", "thinking", "summary", "content", "refusal", "function", "custom", "name", "arguments", "input"),
    *("image_url", "url", "b64_json", "url_citation", "title", "reference_ids"),
)
_OUTPUT_DEPTH = 6  # a tool call's name is at 3: list, call, function


_other_output = attrgetter(*(name for name in DeltaShape.__struct_fields__ if name != "content"))


def outputs(delta: DeltaShape) -> tuple[bool, bool]:
    """Tells whether the delta has output of the answer, and of reasoning."""
    if isinstance(delta.content, str | None) and not any(_other_output(delta)):  # nearly every delta
        return bool(delta.content), False
    return _answers(delta), _reasons(delta)


def _answers(delta: DeltaShape) -> bool:
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


def _reasons(delta: DeltaShape) -> bool:
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


_TEXT_KEY = re.compile(rb'"(?:content|text)": ?"')
_IS_STRING = re.compile(
    rb'[^"\\\x00-\x1f]*'
    rb'(?:\\(?:["\\/bfnrt]|u(?:[0-9a-ce-fA-CE-F][0-9a-fA-F]|[dD][0-7])[0-9a-fA-F]{2})[^"\\\x00-\x1f]*)*'
).fullmatch
_encode = msgspec.json.Encoder().encode
_decode_text = msgspec.json.Decoder(str).decode


class TokenForm:
    """The form of the last learned event."""

    def __init__(self) -> None:
        self._prefix = b""  # bytes before the text
        self._suffix = b"\0"  # bytes after the text; no event ends with a NUL

    def text(self, data: bytes) -> bytes:
        """The text, as written, of an event of the known form; empty if `data` is anything else."""
        start, end = len(self._prefix), len(data) - len(self._suffix)
        if (
            data.endswith(self._suffix)
            and data.startswith(self._prefix)
            and start < end
            and _IS_STRING(data, start, end)
            and (data.isascii() or _is_utf8(data))
        ):
            return data[start:end]
        return b""

    def leading(self, data: bytes) -> tuple[list[bytes], int]:
        """The texts of the events of the known form with which `data` begins, and the bytes of these events. Empty
        where two of them follow after an event of another form: a parser reads all."""
        prefix, suffix = self._prefix, self._suffix
        if not data.startswith(prefix) or suffix not in data:
            return [], 0
        texts = data[len(prefix) :].split(suffix + prefix)
        last, ended, rest = texts.pop().partition(suffix)  # a text has no line end, as every suffix
        size = len(data) - (len(rest) if ended else len(prefix) + len(last))
        texts += [last] if ended else []
        # A space cannot complete an escape: if the joined texts are a valid string, so is each text.
        plain = all(texts) and _IS_STRING(b" ".join(texts)) and (data.isascii() or _is_utf8(data[:size]))
        return (texts, size) if plain else ([], 0)

    def texts(self, data: bytes) -> list[bytes]:
        """The texts of several events of the known form; empty if `data` holds anything else."""
        texts, size = self.leading(data) if data.endswith(self._suffix) else ([], 0)
        return texts if size == len(data) else []

    def learn(self, data: bytes, text: str | None = None) -> None:
        """Learn the form of `data`, an event with the effect of adding `text` and no other. None: any text."""
        keys = list(_TEXT_KEY.finditer(data))
        if len(keys) != 1 or b"\\" in data or data.count(b"\n") != 2:
            return
        start = keys[0].end()
        end = data.find(b'"', start)
        added = start < end if text is None else data[start:end] == text.encode()
        if added and data.startswith(b"data: ") and data.endswith(b"\n\n"):
            self._prefix, self._suffix = data[:start], data[end:]


def written(text: str) -> bytes:
    """The inside of a JSON string. Raises ValueError for a lone surrogate."""
    return _encode(text)[1:-1]


def read_text(written: bytes | bytearray) -> str:
    """The text of the inside of a JSON string."""
    return _decode_text(b'"' + written + b'"')


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


# --------------------------------------------------------------------------- finish reasons


class End(Enum):
    """Meaning of an end."""

    STOP = "stop"  # the model had no more to say
    LENGTH = "length"  # a limit has cut the answer
    CALLS = "tool_calls"  # the caller has to run tools
    FILTERED = "content_filter"  # the answer was refused or cut by a filter
    PAUSED = "pause"  # the caller may send the answer back, and the server goes on
    FAILED = "failed"  # no answer
    UNKNOWN = "unknown"


_WORDS = {
    End.STOP: "stop end_turn stop_sequence eos eos_token end complete completed finish finished done",
    End.LENGTH: "length max_tokens max_output_tokens model_length model_context_window_exceeded max_length token_limit",
    End.CALLS: "tool_calls tool_call tool_use function_call",
    End.FILTERED: (
        "content_filter refusal sensitive safety recitation blocklist prohibited_content spii image_safety language "
        "error_toxic content_filtered guardrail_intervened"
    ),
    End.PAUSED: "pause_turn compaction",
    End.FAILED: (
        "error abort aborted cancelled canceled failed timeout network_error insufficient_system_resource "
        "malformed_function_call unexpected_tool_call malformed_response missing_thought_signature "
        "too_many_tool_calls no_image image_other other finish_reason_unspecified finish_reason_error user_cancel"
    ),
}
_ENDS = {word: end for end, words in _WORDS.items() for word in words.split()}
_BEGINNINGS_OF_FAILURES = ("insufficient_", "error", "abort", "malformed_")


def end_of(word: Any) -> End:
    """The meaning of a server's word."""
    if not isinstance(word, str):
        return End.UNKNOWN
    lower = word.lower()
    if (known := _ENDS.get(lower)) is not None:
        return known
    return End.FAILED if lower.startswith(_BEGINNINGS_OF_FAILURES) else End.UNKNOWN


def is_failed(word: Any) -> bool:
    """True for a finish reason that reports a failed answer."""
    return end_of(word) is End.FAILED


def failure_of_end(word: Any) -> Failure | None:
    """The failure of an answer with this end; None: the end is good. Raises ValueError for an unknown end."""
    end = end_of(word)
    if end is End.UNKNOWN:
        raise ValueError("an unknown end")
    return FAILED_INSIDE if end is End.FAILED else None
