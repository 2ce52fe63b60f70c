"""Tells whether a model has written an answer to its end, so that the answer may stand for later ones: by the bytes
that went to the caller, whole or streamed, in any dialect of answers that may repeat.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from backends.interface import Operation

# Ends of OpenAI's and Anthropic's APIs by which the model itself, or the caller's own limit, has ended the answer.
# Others are of a filter, a failure, or unknown.
SOUND_ENDS = frozenset({"stop", "length", "tool_calls", "function_call"}) | {
    *("end_turn", "max_tokens", "stop_sequence", "tool_use"),
}
# A quotation mark inside of a text is written with a backslash before, so no text of an answer matches.
_END = re.compile(rb'"(?:finish_reason|stop_reason)"\s*:\s*"((?:[^"\\]|\\.)*)"')
_LISTS: Mapping[Operation, tuple[str, ...]] = {  # of which a whole answer has one that is not empty
    Operation.CHAT: ("choices",),
    Operation.COMPLETION: ("choices",),
    Operation.MESSAGES: ("content",),
    Operation.EMBEDDINGS: ("data",),
    Operation.RERANK: ("results", "data"),
    Operation.SCORE: ("data",),
}
_SAMPLED = (Operation.CHAT, Operation.COMPLETION, Operation.MESSAGES)
_SAID = ("content", "text", "tool_calls", "function_call", "refusal", "audio", "reasoning_content", "reasoning")


def is_sound(operation: Operation, body: bytes, *, stream: bool) -> bool:
    """False for an answer without content, cut off by a filter or a failure, or with an unknown end. `stream`: the
    body is of events, whose content the caller has to have seen."""
    ends = {end.decode("utf-8", "replace") for end in _END.findall(body)}
    if operation in _SAMPLED and not (ends and ends <= SOUND_ENDS):
        return False
    return stream or _has_content(operation, body)


def _has_content(operation: Operation, body: bytes) -> bool:
    try:
        whole = msgspec.json.decode(body)
    except (ValueError, RecursionError):
        return False
    entries = next((whole[name] for name in _LISTS.get(operation, ()) if whole.get(name)), None)
    if not isinstance(entries, list) or not entries:
        return False
    return operation not in (Operation.CHAT, Operation.COMPLETION) or all(map(_says, entries))


def _says(choice: Any) -> bool:
    said = choice.get("message", choice) if isinstance(choice, dict) else None
    return isinstance(said, dict) and any(said.get(name) for name in _SAID)
