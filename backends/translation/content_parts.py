"""Parts of content that both chat completions and Anthropic's Messages hold: data URLs, documents, reasoning."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from backends.translation.translation import Json

PDF_NAME = "document.pdf"  # of a document without a title: OpenAI asks for a name
_DATA_URL = re.compile(r"data:([\w.+-]+/[\w.+-]+)(?:;[\w=.+-]+)*;base64,", re.ASCII)


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
