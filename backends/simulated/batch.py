"""The decoding batch of a simulated engine, at O(1) per step however many requests decode.

Between two events the batch is static: every request in it gets one token per step. So the requests
are not touched in a step. The batch counts steps (`tick`), and each request remembers the tick at
which it joined. The sum of contexts grows by the batch size per tick; the requests that need a new
block at a tick are counted by tick modulo block size; those that end are listed by their last tick.
"""

from __future__ import annotations

from collections.abc import Hashable
from enum import Enum

from backends.simulated.events import EngineRequest, RequestId


class RequestState(Enum):
    """Where a request is, in the order of its life; a preemption leads back to WAITING."""

    ARRIVING = 0  # in the API server
    WAITING = 1
    PREFILLING = 2
    DECODING = 3
    ENDING = 4  # last token planned; its blocks are freed when the next step is planned


class LiveRequest:
    """A request inside the engine. While it decodes, `computed` and `generated` are as of its `joined` tick."""

    __slots__ = (
        "cached",
        "chain",
        "committed",
        "computed",
        "generated",
        "joined",
        "preemptions",
        "queue_time",
        "ready_at",
        "request",
        "state",
        "target",
    )

    def __init__(self, request: EngineRequest, ready_at: float, block_size: int) -> None:
        self.request = request
        self.ready_at = ready_at  # when the API server passes it on
        self.state = RequestState.ARRIVING
        self.target = request.prompt_tokens  # tokens to prefill: the prompt, after a preemption the answer too
        self.computed = 0  # tokens in the KV cache
        self.generated = 0
        self.joined = 0
        self.committed = 0  # leading blocks of `chain` that it holds
        self.cached: int | None = None  # tokens hit at its first admission
        self.queue_time = 0.0
        self.preemptions = 0
        whole = request.prompt_tokens // block_size
        self.chain: list[Hashable] = list(request.block_hashes[:whole])
        if len(self.chain) == whole:
            self.chain.extend(request.output_hashes)

    @property
    def last_tick(self) -> int:
        """The tick that brings the last token of a decoding request."""
        return self.joined + self.request.output_tokens - self.generated - 1


class DecodeBatch:
    """The requests that decode, in the order in which they joined."""

    __slots__ = ("context", "due", "growing", "requests", "tick")

    def __init__(self, block_size: int) -> None:
        self.requests: dict[RequestId, LiveRequest] = {}
        self.tick = 0  # number of the next step
        self.context = 0  # tokens in the KV cache of all of them
        self.due: dict[int, list[LiveRequest]] = {}  # who ends, by tick
        self.growing = [0] * block_size  # how many need a block, by tick modulo block size

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def newest(self) -> LiveRequest:
        return next(reversed(self.requests.values()))

    @property
    def blocks_needed(self) -> int:
        """New blocks that the next step takes."""
        return self.growing[self.tick % len(self.growing)]

    def join(self, live: LiveRequest) -> None:
        """A request that is prefilled and has a token decodes from the next step on."""
        live.joined = self.tick
        self.requests[live.request.id] = live
        self.context += live.computed
        self.growing[(live.joined - live.computed) % len(self.growing)] += 1
        self.due.setdefault(live.last_tick, []).append(live)

    def leave(self, live: LiveRequest) -> None:
        """Undo `join`, and bring the request's counts up to this tick."""
        del self.requests[live.request.id]
        ending = self.due[live.last_tick]
        ending.remove(live)
        if not ending:
            del self.due[live.last_tick]
        self.growing[(live.joined - live.computed) % len(self.growing)] -= 1
        live.computed += self.tick - live.joined
        live.generated += self.tick - live.joined
        self.context -= live.computed

    def decode(self, steps: int) -> list[LiveRequest]:
        """Everyone gets `steps` tokens. Those for which the last of these was the last have left the batch."""
        if not self.requests:
            return []
        self.context += steps * len(self.requests)
        self.tick += steps
        ended = list(self.due.get(self.tick - 1, ()))
        for live in ended:
            self.leave(live)
        return ended
