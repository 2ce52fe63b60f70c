"""Prompts that are kept, to have an engine compute their beginning again. In memory only, and never shown or logged.

Rules:
- What is kept is the request's bytes; it is read again only if it is needed.
- A beginning ends with a message, the first that fills the wanted blocks. Of the other fields it takes along those
  that are rendered into the prompt.
- Chat templates want the last word to be the user's or a tool's: a beginning that ends with another gets one more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

from backends.interface import Operation
from gateway.api.strict_json import decode
from gateway.tokenize.estimator import Estimator
from gateway.tokenize.prompt import prompt_of
from policies.types import PoolEstimate

RENDERED = ("tools", "functions", "documents", "chat_template", "chat_template_kwargs", "reasoning_effort")
ANSWERABLE = ("user", "tool")
LAST_WORD = {"role": "user", "content": "hi"}
HASH_BYTES = 8  # a block's


@dataclass(frozen=True, slots=True)
class SavedPrompt:
    """A request that was answered."""

    operation: Operation
    raw: bytes
    model: str  # as its endpoint knows it
    pool: str
    cache_group: str
    estimate: PoolEstimate

    @property
    def size(self) -> int:
        """Bytes that it takes."""
        return len(self.raw) + HASH_BYTES * len(self.estimate.blocks.hashes)

    async def prefix(self, blocks: int, estimator: Estimator) -> tuple[Mapping[str, Any], PoolEstimate]:
        """The body of a request whose prompt begins with these blocks, and its estimate."""
        body = decode(self.raw)
        if self.operation is Operation.COMPLETION:
            body = {"prompt": _first_part(body["prompt"], blocks / len(self.estimate.blocks.hashes))}
        else:
            body = _answerable(await self._first_messages(body, blocks, estimator))
        return body, await self._estimate(body, estimator)

    async def _first_messages(self, body: Mapping[str, Any], blocks: int, estimator: Estimator) -> dict[str, Any]:
        rendered = {name: body[name] for name in RENDERED if name in body}
        messages = body["messages"]
        low, high = 1, len(messages)
        while low < high:
            middle = (low + high) // 2
            found = await self._estimate({**rendered, "messages": messages[:middle]}, estimator)
            if len(found.blocks.hashes) < blocks:
                low = middle + 1
            else:
                high = middle
        return {**rendered, "messages": messages[:low]}

    async def _estimate(self, body: Mapping[str, Any], estimator: Estimator) -> PoolEstimate:
        found = await estimator.estimate(prompt_of(self.operation, body), [self.pool], self.cache_group, 1)
        return found.pools[self.pool]


def _answerable(body: dict[str, Any]) -> dict[str, Any]:
    if body["messages"][-1]["role"] in ANSWERABLE:
        return body
    return {**body, "messages": [*body["messages"], LAST_WORD]}


def _first_part(prompt: Any, share: float) -> Any:
    """Of a text, or of token ids; several prompts stay as they are."""
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        return prompt[: ceil(len(prompt) * share)]
    return prompt
