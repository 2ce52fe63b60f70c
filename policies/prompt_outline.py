"""The outline of a prompt: roles, digests and lengths of its parts, and its composition in tokens; never text.

Rules of a composition, whose members add up to the prompt:
- Tool definitions are `tools`; system and developer messages `system`; results of tools `tool_results`, wherever they
  stand; images, audio and files `images`.
- Of the rest, what follows the last answer of the assistant is `last_turn`, and what comes before is `history`.
- The tokens which a chat template adds to a message belong to the message.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple


class PartRole(StrEnum):
    """Of a part of a prompt. A prompt without messages is of the user."""

    TOOLS = "tools"
    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL_RESULT = "tool_result"


# Members of an enum are slow to look up.
TOOLS, SYSTEM, USER, ASSISTANT, TOOL_RESULT = PartRole
ROLES: Mapping[str, PartRole] = {
    "system": SYSTEM,
    "developer": SYSTEM,
    "assistant": ASSISTANT,
    "tool": TOOL_RESULT,
    "function": TOOL_RESULT,
}  # all others are the user's


class Composition(NamedTuple):
    """Tokens of a prompt by kind."""

    system: float = 0.0
    tools: float = 0.0
    history: float = 0.0
    tool_results: float = 0.0
    last_turn: float = 0.0
    images: float = 0.0

    def with_part(self, role: PartRole, tokens: float, images: float) -> Composition:
        """Append a part. `tokens`: without those of its images."""
        system, tools, history, results, last, seen = self
        seen += images
        if role is USER:
            return Composition(system, tools, history, results, last + tokens, seen)
        if role is ASSISTANT:
            return Composition(system, tools, history + last + tokens, results, 0.0, seen)
        if role is TOOL_RESULT:
            return Composition(system, tools, history, results + tokens, last, seen)
        if role is SYSTEM:
            return Composition(system + tokens, tools, history, results, last, seen)
        return Composition(system, tools + tokens, history, results, last, seen)

    def scaled_to(self, total: int) -> Composition:
        """The same shares of `total` tokens, in whole tokens that add up to it."""
        if (own := sum(self)) <= 0:
            return EMPTY
        scale, before, so_far, found = total / own, 0, 0.0, list[int]()
        for tokens in self:
            so_far += tokens
            end = round(so_far * scale) if tokens else before
            found.append(end - before)
            before = end
        return Composition(*found)


EMPTY = Composition()
PARTS = Composition._fields


class PartOutline(NamedTuple):
    """A part of a prompt. `digest`: of its text as rendered; `tokens`, `size` (bytes): of the prompt up to its end."""

    digest: int
    role: PartRole
    tokens: float
    size: int


class TextWindow(NamedTuple):
    """Text of a part around a block. `tools`: digest of the tool definitions there, whatever their order; 0: none."""

    text: str
    tools: int = 0


# Part, byte of the prompt where it begins, block, bytes before the block, bytes in all. None: the prompt is too large.
ReadWindow = Callable[[int, int, int, int, int], TextWindow | None]


class PromptOutline(NamedTuple):
    """A prompt that was read.

    `digests`: of the parts; `opening`: of the first message of the user; `template`: of the end of the last system
    message before it; 0: there is none. `hashes`: of the prefix blocks, chained; `tokens_at`: tokens of so many blocks;
    `tokens_at` and `tokens` are as the engine counts.
    """

    parts: Sequence[PartOutline]
    digests: array[int]
    composition: Composition
    opening: int
    template: int
    hashes: Sequence[int]
    tokens_at: Callable[[float], float]
    tokens: int  # of the whole prompt
    read_window: ReadWindow
