"""Finds the user's last words in a request, and the instructions of the system, in the dialects of chats.

Messages of a chat may be undecoded JSON (`gateway.api.inference_request`): none is decoded but those asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

_SYSTEM = ("system", "developer")


def last_words(body: Mapping[str, Any]) -> str:
    """Text of the last message of the user; empty: none is found."""
    told = body.get("messages", body.get("input"))
    if isinstance(told := _plain(told), str):
        return told
    for message in reversed(told) if isinstance(told, list) else ():
        found = _plain(message)
        if isinstance(found, dict) and found.get("role") == "user" and (text := _text(found.get("content"))):
            return text
    return ""


def instructions_of(body: Mapping[str, Any]) -> str:
    """Text of the system's messages at the head of the conversation, or of the member that holds the instructions."""
    return "\n".join(filter(None, _instructions(body)))


def _instructions(body: Mapping[str, Any]) -> Iterator[str]:
    for name in ("system", "instructions"):
        yield _text(_plain(body.get(name)))
    told = _plain(body.get("messages", body.get("input")))
    for message in told if isinstance(told, list) else ():
        found = _plain(message)
        if not isinstance(found, dict) or found.get("role") not in _SYSTEM:
            return
        yield _text(found.get("content"))


def _plain(value: Any) -> Any:
    return msgspec.json.decode(value) if isinstance(value, msgspec.Raw) else value


def _text(content: Any) -> str:
    """Of a content, a text or a list of parts."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else ()
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    return "\n".join(text for text in texts if isinstance(text, str))
