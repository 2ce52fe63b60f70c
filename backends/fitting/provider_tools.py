"""Blocks that a provider's own tools have left in a history of Messages, for servers of the dialect without such tools.

A block becomes the text that it is in a chat (`backends.translation.messages_to_chat.provider_blocks`).
"""

from __future__ import annotations

from typing import Any

from backends.fitting.target import Target
from backends.member_paths import Json, opened
from backends.translation.messages_to_chat.provider_blocks import as_text, is_providers
from backends.translation.omissions import Omissions

_CALLERS = "tool_reference"  # found by a search of the caller's own


def fit_provider_blocks(body: Json, target: Target, told: Omissions) -> Json:
    turns = [opened(turn) for turn in body["messages"]]
    found = [_turn(turn) for turn in turns]
    same = all(new is old for new, old in zip(found, turns, strict=True))
    return body if same else {**body, "messages": [turn for turn in found if turn.get("content")]}


def _turn(turn: Json) -> Json:
    content = opened(turn.get("content"))
    blocks = [opened(block) for block in content] if isinstance(content, list) else []
    if not any(map(_is_foreign, blocks)):
        return turn
    kept = [_block(block) for block in blocks]
    return {**turn, "content": [block for block in kept if block]}


def _is_foreign(block: Any) -> bool:
    kind = block.get("type") if isinstance(block, dict) else None
    return isinstance(kind, str) and kind != _CALLERS and is_providers(kind)


def _block(block: Any) -> Any:
    """Empty: the block says nothing."""
    if not _is_foreign(block):
        return block
    text = as_text(block)
    return {"type": "text", "text": text} if text else {}
