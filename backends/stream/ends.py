"""Finish reasons: the closed list of words by which servers report the end of an answer, and their meaning.

Only a good end is a success. Rules:
- Words are compared in lower case. A word outside the list is an unknown end: a future word may report a failure, like
  `insufficient_system_resource` and `abort`. Callers of the server's own dialect get the word unchanged. Other dialects
  cannot express the word, and the answer is not called complete.
- An answer without any word is not judged here.

Sources: API references of the providers in `backends.catalog`; finish reasons of the engines there (November 2026).
"""

from __future__ import annotations

from enum import Enum
from typing import Any

from backends.failures import FAILED_INSIDE
from backends.interface import Failure


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
