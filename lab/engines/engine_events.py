"""Requests to a simulated engine, and its events. Times: seconds of the caller's clock."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

RequestId = int | str


@dataclass(eq=False)
class Refused(Exception):
    """A request is not served: 400 if invalid, 429 at a rate limit, 503 with a full queue, 0 from a dead engine."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None  # OpenAI's, where the status alone does not imply it
    retry_after: float | None = None  # s

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A prompt and the length of its answer.

    `block_hashes` are chained: one per full block of the prompt, in order, equal where the whole prefix is equal.
    `output_hashes` continue the chain through the answer (the first block may begin inside the prompt), so the
    next turn of a conversation finds the answer cached too.
    """

    id: RequestId
    prompt_tokens: int
    output_tokens: int
    block_hashes: Sequence[Hashable] = ()
    output_hashes: Sequence[Hashable] = ()
    adapter: str = ""  # LoRA adapter that answers

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1 or self.output_tokens < 1:
            raise ValueError(f"request {self.id}: prompt and output must be at least one token each")


@dataclass(frozen=True, slots=True)
class EngineFirstToken:
    """`queue_time`: seconds spent waiting for the scheduler, as vLLM counts."""

    id: RequestId
    at: float
    queue_time: float
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The last token of an answer."""

    id: RequestId
    at: float
    output_tokens: int
    preemptions: int = 0


Event = EngineFirstToken | Finished


@dataclass(frozen=True, slots=True)
class StepResult:
    """A step of the engine, or several decode steps of which only the last ends a request.

    All events happen at `ends_at`. `tokens` names every request with a token in this step, first and last tokens
    included; empty for several steps at once.
    """

    ends_at: float
    steps: int = 1
    prefill_tokens: int = 0
    tokens: tuple[RequestId, ...] = ()
    first: tuple[EngineFirstToken, ...] = ()
    finished: tuple[Finished, ...] = ()
