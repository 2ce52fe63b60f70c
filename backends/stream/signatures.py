"""Signatures and ciphers of an answer's reasoning, which only the maker accepts in a later request.

They are members of blocks in Messages (`thinking`, `redacted_thinking`) and of `reasoning_details` in chat completions
(openrouter.ai/docs, reasoning tokens).
"""

from __future__ import annotations

from typing import Any

from backends.interface import ReplyFacts

MOST_SIGNED = 1 << 20  # characters of the signatures of an answer: each has a few hundred to some thousand


def note_signatures(facts: ReplyFacts, parts: Any) -> None:
    """Note signatures and ciphers of blocks or details, as many as MOST_SIGNED holds."""
    for signature in _signatures_of(parts):
        if facts.signed + len(signature) <= MOST_SIGNED:
            facts.signed += len(signature)
            facts.signatures.append(signature)


def _signatures_of(parts: Any) -> list[str]:
    listed = [each for each in parts if isinstance(each, dict)] if isinstance(parts, list) else []
    found = [each.get("signature") or each.get("data") for each in listed]
    return [value for value in found if isinstance(value, str) and value]
