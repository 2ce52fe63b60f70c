"""Reads the window of a prompt around a break: digests of it are all that is kept."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from gateway.strict_json import encode
from gateway.tokenize.prefix_blocks import BLOCK_BYTES, ROLE
from gateway.tokenize.prompt import Prompt
from gateway.tokenize.tokenizers import ID_BYTES
from policies.prefix_doctor.break_class import BEFORE, WINDOW, BreakMark, mark

LARGEST = 1_000_000  # bytes of a prompt of which windows are read: 3 ms
LARGEST_TOOLS = 200_000  # bytes of tool definitions whose order is told: 10 ms


def read_mark(prompt: Prompt, part: int, start: int, block: int) -> BreakMark | None:
    """The mark of a break at the beginning of `block`, in a part that begins at byte `start`. None: too large."""
    if prompt.size > LARGEST:
        return None
    pieces = replace(prompt, decoded={}).pieces(part)  # of a copy: media are counted once
    role = b"" if pieces[0].role is None else ROLE + pieces[0].role.encode()
    spans = (piece.span.encode() if isinstance(piece.span, str) else b"\0" * ID_BYTES for piece in pieces)
    at = max(block * BLOCK_BYTES - start - BEFORE, 0)
    text = role + b"".join(spans)
    is_definitions = part < len(prompt.sources) - prompt.messages and prompt.messages > 0
    has_order = is_definitions and len(text) <= LARGEST_TOOLS
    return mark(text[at : at + WINDOW].decode(errors="replace"), tool_set(prompt.sources[part]) if has_order else 0)


def tool_set(source: Any) -> int:
    """Digest of tool definitions, whatever their order; 0: they are no list."""
    tools = msgspec.json.decode(encode(source))
    return hash(tuple(sorted(hash(encode(tool)) for tool in tools))) or 1 if isinstance(tools, list) else 0
