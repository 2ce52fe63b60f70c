"""Mid-stream rescue: a peer writes the rest of a broken answer, and the caller reads one stream.

Rules:
- Text alone is continued, by an endpoint of the same pool or else of the next tiers. All else ends by an error event at
  once: tool calls, reasoning, structured output, several choices.
- A peer that refuses to continue is asked for the whole answer, and the text so far is skipped. Where its text differs,
  the next peer is asked, or the stream ends by an error event.
- The pace decides when a silent stream is left: after 20 of its mean gaps, twice the peer's predicted TTFT or 2 s,
  whichever is longest. An answer that cannot be continued is left after `stream_idle` only, and so is an answer with
  tools on offer: parsers of tool calls hold tokens back.
- The peer counts the tokens of the prompt (/tokenize) while it computes the continuation: usage is exact.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from typing import Protocol

import msgspec

from backends.failures import TransportError
from backends.interface import BackendRequest, Failure, FailureKind, Operation
from backends.stream.continuation import Continuation, PartialAnswer, RelayedEvents, read_partial
from gateway.api.inference_request import InferenceRequest
from gateway.observe.record import Record
from gateway.upstream.upstream_request import Upstream, UpstreamRequest
from policies.attempts.attempt_events import Broken
from policies.attempts.attempt_machine import AttemptMachine

log = logging.getLogger("firsttoken")

LEAST_SILENCE = 2.0  # s
GAPS = 20  # mean gaps between two tokens
TTFTS = 2  # predicted TTFTs of the peer
COUNTING = 5.0  # s for the count of the prompt's tokens
DEATHS = (FailureKind.CONNECT, FailureKind.RESET)


class RescueRunner(Protocol):
    """Runs the attempts of the request."""

    machine: AttemptMachine

    def unable(self, tokens: int) -> Mapping[str, str]:
        """Endpoints that cannot continue an answer of `tokens` now, with the reason."""

    def race_again(self, broken: Broken) -> None:
        """Open further attempts. The first token of one, or the failure of all, goes to the relay."""


class _TokenCount(msgspec.Struct):
    count: int


class StreamRescue:
    """Rescue of the answer to one request. `idle`: s of silence after which any stream is left."""

    def __init__(self, request: InferenceRequest, record: Record, runner: RescueRunner, idle: float) -> None:
        self.events = RelayedEvents()
        self.continuation: Continuation | None = None  # of the latest broken stream
        self.runner: RescueRunner | None = runner
        self.first_in = 0.0  # time of the answer's first token
        self._request = request
        self._record = record
        self._idle = idle
        self._given = ""  # text of the answer so far, as the peer gets it

    # -- for the relay ------------------------------------------------------------------------

    def patience(self, winner: UpstreamRequest) -> float:
        """Seconds of silence after which the stream may be left for a peer."""
        assert self.runner is not None
        peers = self.runner.machine.peers(())
        if not peers or self._request.tools:
            return self._idle
        return min(self._idle, max(LEAST_SILENCE, GAPS * (winner.tpot() or 0.0), TTFTS * peers[0].forecast.p50))

    def may_leave(self, winner: UpstreamRequest) -> bool:
        """A peer can continue the answer so far."""
        return not self._request.tools and not self._obstacle(read_partial(self.events))

    def take_over(self, winner: UpstreamRequest, failure: Failure) -> bool:
        """Let a peer continue the broken answer. False: no peer can."""
        assert self.runner is not None
        answer = read_partial(self.events)
        obstacle = "an error of the request" if failure.kind is FailureKind.CLIENT else self._obstacle(answer)
        if obstacle:
            log.debug("request %s: the broken stream is not continued: %s", self._record.request_id, obstacle)
            self._record.rescue = "failed" if self.continuation else "refused"
            return False
        known = self.continuation.prompt_tokens if self.continuation else None
        self._given = answer.text if self._request.operation is Operation.COMPLETION else answer.text.rstrip()
        self.continuation = Continuation(answer, self._given, known)
        self.first_in = self.first_in or winner.first_in or winner.opened
        self._record.rescue = "failed"  # up to the first token of a peer
        self.runner.race_again(Broken(failure.kind in DEATHS, self._idle, self.runner.unable(answer.tokens)))
        return True

    def _obstacle(self, answer: PartialAnswer) -> str:
        """The reason for which the answer cannot be continued; empty: it can."""
        runner = self.runner
        assert runner is not None
        if answer.obstacle:
            return answer.obstacle
        unable = runner.unable(answer.tokens)
        if runner.machine.peers(unable):
            return ""
        return next((unable[peer.endpoint.id] for peer in runner.machine.peers(())), "no peer is left")

    # -- for the runner -----------------------------------------------------------------------

    @property
    def tokens(self) -> int:
        """Of the answer so far, as given to the peer."""
        return self.continuation.tokens if self.continuation else 0

    def restart(self) -> bool:
        """A peer refuses to continue: the next attempt asks for the whole answer. False: it refuses that too."""
        before = self.continuation
        if before is None or before.restarted:
            return False
        self.continuation = Continuation(before.answer, None)
        return True

    def continued(self, upstream: Upstream, request: BackendRequest) -> BackendRequest:
        """The request for the rest of the answer."""
        if self.continuation is None or self.continuation.restarted:
            return request
        return upstream.backend.continued(request, self._given, self.tokens)

    async def count_prompt(self, upstream: Upstream, request: BackendRequest) -> None:
        """Without an answer in time the events of the first stream are the count of its tokens."""
        call, continuation = upstream.backend.count_prompt(request), self.continuation
        if call is None or continuation is None or continuation.restarted:
            return
        with suppress(TransportError, ValueError):
            reply = await upstream.connections.fetch(call, COUNTING)
            continuation.prompt_tokens = msgspec.json.decode(reply.body, type=_TokenCount).count

    def resumed(self) -> Continuation:
        """The first token of a peer is there. Returns the rewriter of its stream."""
        assert self.continuation is not None
        self._record.rescue = "rescued"
        return self.continuation
