"""One attempt between its sending and its end, and what it teaches."""

from __future__ import annotations

from dataclasses import dataclass, field

from policies.caches import Sent
from policies.endpoint import EndpointState
from policies.facts import Candidate, PoolEstimate
from policies.ledger import Queue
from policies.predictor import Sample, Work
from policies.stall import Answer


@dataclass(slots=True)
class Flight:
    """An attempt that has not ended."""

    state: EndpointState
    candidate: Candidate
    prompt: PoolEstimate
    work: Work  # as far as it could be told then
    told: float  # the TTFT expected then, s
    sent_at: float
    stream: bool
    cache: Sent | None  # what is believed of its prompt there; None: nothing can be
    queue: Queue  # what was ahead of it then
    rate: float  # tokens/s it was thought to drain at
    first_at: float | None = None
    running: int = 0  # at its first token
    context: float = 0.0  # of all that were being answered then, tokens
    spent: float = 0.0  # s of prefill sent there, then
    answer: Answer = field(default_factory=lambda: Answer(None, 1, 0))  # that is to come

    def sample(self, ttft: float) -> Sample:
        """What it teaches. How far the queue had drained when it was sent is judged by the rate as known now."""
        queue, work = self.queue, self.work
        rate = self.state.predictor.rate(queue.context)
        more = queue.ahead(self.sent_at, rate) - queue.ahead(self.sent_at, self.rate)
        work = work._replace(ahead=work.ahead + more, pairs=work.pairs + more * queue.context)
        return Sample(work, self.told, ttft)
