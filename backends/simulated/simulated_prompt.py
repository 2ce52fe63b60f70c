"""From a request body to tokens and block hashes.

The chat template is ChatML-like. A message is `<start> role newline content <end>`: its content and
4 tokens; the prompt ends with the header of the answer: 3 tokens. A message is encoded by itself, so
that its tokens do not depend on its neighbours, and encodings are kept: the cost of a conversation
grows with its new text. Tools are one more message, in front. A part that is not text (an image)
counts as 256 tokens.

Block hashes are chained as vLLM chains them (vllm/v1/core/kv_cache_utils.py): hash(parent, tokens of
the block), and the first parent stands for the `cache_salt`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from zlib import crc32

import msgspec

from backends.simulated.bodies import ChatBody, Message

Encode = Callable[[str], Sequence[int]]

_START, _END, _NEWLINE = 1_000_000, 1_000_001, 1_000_002  # beyond any vocabulary in use
_ROLES = {"system": 1_000_010, "developer": 1_000_011, "user": 1_000_012, "assistant": 1_000_013, "tool": 1_000_014}
_PART_TOKENS = 256
_KEPT_TOKENS = 1_000_000  # of kept encodings, about 40 MB


@dataclass(frozen=True, slots=True)
class SimulatedPrompt:
    """`begun` is the part of the answer that the caller gave (`continue_final_message`), `seed` that of the whole."""

    tokens: list[int]
    seed: int
    begun: str = ""


class PromptEncoder:
    """Renders prompts through the injected `encode`."""

    def __init__(self, encode: Encode) -> None:
        self._encode = encode
        self._kept: OrderedDict[str, tuple[int, ...]] = OrderedDict()
        self._kept_tokens = 0

    def text(self, text: str) -> tuple[int, ...]:
        """The tokens of `text`, kept for the next time."""
        kept = self._kept
        tokens = kept.get(text)
        if tokens is not None:
            kept.move_to_end(text)
            return tokens
        kept[text] = tokens = tuple(self._encode(text))
        self._kept_tokens += len(tokens)
        while self._kept_tokens > _KEPT_TOKENS and len(kept) > 1:
            self._kept_tokens -= len(kept.popitem(last=False)[1])
        return tokens

    def chat(self, body: ChatBody) -> SimulatedPrompt:
        """The prompt of a chat request."""
        messages, last = body.messages, body.messages[-1]
        continued = bool(body.continue_final_message) and last.role == "assistant"
        tokens: list[int] = []
        if body.tools:
            tokens += self._message("system", self.text(msgspec.json.encode(body.tools).decode()))
        for message in messages[:-1] if continued else messages:
            tokens += self._message(message.role, self._content(message))
        tokens += (_START, _ROLES["assistant"], _NEWLINE)
        seed = hash(tuple(tokens))
        return (
            SimulatedPrompt([*tokens, *self._content(last)], seed, last.text)
            if continued
            else SimulatedPrompt(tokens, seed)
        )

    def completion(self, prompt: str | Sequence[int]) -> SimulatedPrompt:
        """The prompt of a plain completion: text, or tokens as they are."""
        tokens = list(self.text(prompt) if isinstance(prompt, str) else prompt)
        return SimulatedPrompt(tokens, hash(tuple(tokens)))

    def _message(self, role: str, content: Sequence[int]) -> tuple[int, ...]:
        return (_START, _ROLES.get(role, _ROLES["user"]), _NEWLINE, *content, _END)

    def _content(self, message: Message) -> list[int]:
        tokens: list[int] = []
        for part in message.parts:
            if isinstance(part.get("text"), str):
                tokens += self.text(part["text"])
            else:
                tokens += [crc32(msgspec.json.encode(part))] * _PART_TOKENS
        for call in message.tool_calls or ():
            tokens += self.text(call.function.name + call.function.arguments)
        return tokens


def hash_blocks(tokens: Sequence[int], size: int, salt: str = "") -> list[int]:
    """Chained hashes of the full blocks of `tokens`. Equal in every process: only integers are hashed."""
    parent = int.from_bytes(blake2b(salt.encode(), digest_size=7).digest())
    hashes = []
    for start in range(0, len(tokens) - size + 1, size):
        parent = hash((parent, tuple(tokens[start : start + size])))
        hashes.append(parent)
    return hashes
