"""What goes into a simulated engine, and what comes out of it.

Times are seconds of the caller's clock, real or virtual; the engine never reads a clock itself.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

RequestId = int | str


class Refused(Exception):
    """The request was not taken: 503 with a full queue, 429 at a rate limit, 0 where the engine is dead."""

    def __init__(self, status: int, reason: str, retry_after: float | None = None) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason
        self.retry_after = retry_after  # s


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A prompt and the length of the answer it will get.

    `block_hashes` are chained: one per full block of the prompt, in order, equal where the whole
    prefix is equal. `output_hashes` continue that chain through the answer (its first block may
    begin inside the prompt), so that the next turn of a conversation finds the answer cached too.
    """

    id: RequestId
    prompt_tokens: int
    output_tokens: int
    block_hashes: Sequence[Hashable] = ()
    output_hashes: Sequence[Hashable] = ()

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1 or self.output_tokens < 1:
            raise ValueError(f"request {self.id}: prompt and output must be at least one token each")


@dataclass(frozen=True, slots=True)
class EngineFirstToken:
    """The answer has begun. `queue_time` is spent waiting for the scheduler, as vLLM counts it."""

    id: RequestId
    at: float
    queue_time: float
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The last token is out."""

    id: RequestId
    at: float
    output_tokens: int
    preemptions: int = 0


Event = EngineFirstToken | Finished


@dataclass(frozen=True, slots=True)
class StepResult:
    """One step of the engine, or several decode steps in which nothing began or ended but at the last.

    All of it happens at `ends_at`. `tokens` names every request that gets a token then, first and
    last ones included; it is left empty when several steps were taken at once.
    """

    started_at: float
    ends_at: float
    steps: int = 1
    prefill_tokens: int = 0
    tokens: tuple[RequestId, ...] = ()
    first: tuple[EngineFirstToken, ...] = ()
    finished: tuple[Finished, ...] = ()
