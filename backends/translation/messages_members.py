"""Reads and refuses members of requests, and decodes events, in the translations of Anthropic's Messages."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from backends.translation.translation import Json, UntranslatableError

_NEVER_DROPPED = frozenset({"model", "messages", "system", "tools", "max_tokens", "stream"})
_DATA_URL = re.compile(r"data:([\w.+-]+/[\w.+-]+)(?:;[\w=.+-]+)*;base64,", re.ASCII)
_decode = msgspec.json.Decoder().decode

PDF_NAME = "document.pdf"  # of a document without a title: OpenAI asks for a name
SCHEMA_NAME = "output"  # of a JSON schema, which has a name in chat alone


def present(body: Mapping[str, Any], dropped: frozenset[str]) -> Json:
    """Members with a value, without members dropped by the route."""
    return {
        name: value
        for name, value in body.items()
        if value is not None and (name in _NEVER_DROPPED or name not in dropped)
    }


def refuse(param: str, dropped: frozenset[str], reason: str = "") -> None:
    """Refuse a member without an equivalent, unless the route drops the member, by its name or by its path."""
    if param not in dropped and param.rpartition(".")[2] not in dropped:
        raise UntranslatableError(param, reason and f"'{param}' cannot be expressed: {reason}")


def refuse_others(members: Mapping[str, Any], known: Mapping[str, Any], within: str, dropped: frozenset[str]) -> None:
    """Refuse members that are not `known`. `known`: by name, the value that says nothing; ANY where each is read."""
    for name, value in members.items():
        if value is None or (name in known and known[name] in (ANY, value)):
            continue
        refuse(f"{within}.{name}" if within else name, dropped)


ANY = object()  # a member is known whatever its value is


def split_data_url(url: str) -> tuple[str, str] | None:
    """Media type and base64 data of a data URL; None: another URL."""
    match = _DATA_URL.match(url)
    return None if match is None else (match[1], url[match.end() :])


def data_url(media_type: str, data: str) -> str:
    return f"data:{media_type};base64,{data}"


def reasoning_detail(block: Mapping[str, Any], index: int) -> Json:
    """A block of thinking as OpenRouter's `reasoning_details` (openrouter.ai/docs, reasoning tokens)."""
    detail: Json = {"index": index, "format": "anthropic-claude-v1"}
    if block["type"] == "thinking":
        return {"type": "reasoning.text", "text": block["thinking"], "signature": block.get("signature", ""), **detail}
    return {"type": "reasoning.encrypted", "data": block["data"], **detail}
