"""Mid-stream rescue of one answer: a peer writes the rest, and the caller reads one stream.

Rules:
- Text alone is continued, by an endpoint of the same pool or else of the next tiers. All else ends by an error event at
  once: tool calls, reasoning, structured output, several choices.
- The peer gets the text so far and what is left of the caller's limit: its tokens are counted by the peer (/tokenize)
  before, and where nobody counts, an upper bound comes off.
- A peer that refuses to continue, or is known to begin anew all the same, is asked for the whole answer, and the text
  so far is skipped; so is a peer for which no room is left by the upper bound. Where its text differs, the next peer is
  asked, or the stream ends by an error event.
- The peer counts the tokens of the prompt (/tokenize) while it computes the continuation: usage is exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from time import monotonic
from typing import Annotated

import msgspec

from backends.failures import DIVERGED, TransportError
from backends.http.connection import Sink
from backends.interface import BackendRequest, Failure, HttpCall, Operation
from backends.stream.continuation import Continuation, Diverged
from backends.stream.partial_answer import PartialAnswer
from gateway.observe.part_notes import RESCUE
from gateway.upstream.attempt import WireAttempt
from gateway.upstream.dispatcher import Dispatcher
from gateway.upstream.routed_request import RoutedRequest
from gateway.upstream.upstream import Upstream
from policies.attempts.attempt_events import Broken
from policies.blame.blame import Blame
from policies.types import Attempt, AttemptKind, Candidate, Health, Load

COUNTING = 5.0  # s for a count of tokens


class _TokenCount(msgspec.Struct):
    count: Annotated[int, msgspec.Meta(ge=0)]


class Rescue:
    """Text kept of an answer, and the part that a peer is given."""

    def __init__(self, routed: RoutedRequest, dispatcher: Dispatcher) -> None:
        self.remembered = PartialAnswer(dispatcher.texts)
        self.continuation: Continuation | None = None  # of the latest broken stream
        self._routed = routed
        self._dispatcher = dispatcher
        self._given: str | None = None  # text of the answer so far, as the peer gets it; None: it writes all again

    @property
    def obstacle(self) -> str:
        """The reason for which nobody can continue the answer; empty: some can."""
        return self.remembered.obstacle

    def begin(self) -> PartialAnswer:
        """Keep the text of an answer from its beginning, and forget what the caller has seen nothing of."""
        self.remembered.release()
        self.remembered = PartialAnswer(self._dispatcher.texts)
        return self.remembered

    def unable(self, broken: Attempt, loads: Mapping[str, Load]) -> dict[str, str]:
        """Candidates that cannot continue the answer now, with the reason. `loads`: by endpoint."""
        found, of_pools = dict[str, str](), dict[str, str]()
        for endpoint in (candidate.endpoint for candidate in self._routed.decision.ranked):
            if (load := loads.get(endpoint.id)) is None or load.health is not Health.UP:
                found[endpoint.id] = "no peer is up"
                continue
            if endpoint.pool not in of_pools:
                upstream = self._routed.upstreams[endpoint.id]
                whole = self._routed.backend_request(upstream, broken)
                of_pools[endpoint.pool] = upstream.backend.obstacle(whole, self.remembered.tokens)
            if of_pools[endpoint.pool]:
                found[endpoint.id] = of_pools[endpoint.pool]
        return found

    def candidate(self, candidate: Candidate) -> Candidate:
        """The prompt of a continuation holds the answer so far."""
        return replace(candidate, prompt_tokens=candidate.prompt_tokens + self.remembered.tokens)

    def broken(self, attempt: Attempt, blame: Blame) -> Broken:
        """The stream has broken, and may be continued from here: keep the text that the caller has."""
        text = self.remembered.text
        self._given = text if self._routed.request.operation is Operation.COMPLETION else text.rstrip()
        RESCUE.put(self._routed.timeline.record, "failed")
        loads = self._dispatcher.fleet.snapshot(monotonic()).loads
        return Broken(blame, self.obstacle, self.unable(attempt, loads))

    def hear(self, data: bytes) -> bytes | Failure:
        """Read what a peer has sent first. Returns the events that are new to the caller."""
        assert self.continuation is not None
        try:
            return self.continuation.feed(data)
        except Diverged:
            return DIVERGED

    def take_over(self) -> Continuation:
        """A peer goes on."""
        assert self.continuation is not None
        RESCUE.put(self._routed.timeline.record, "rescued")
        return self.continuation

    def note_refused(self) -> None:
        """No peer was asked, as none may be."""
        if self.continuation is None:
            RESCUE.put(self._routed.timeline.record, "refused")

    def restart(self) -> bool:
        """A peer refuses to continue: the next attempt asks for the whole answer. False: it refuses that too."""
        asked, self._given = self._given, None
        return asked is not None

    async def send(self, wire: WireAttempt, sink: Sink) -> None:
        """Ask a peer for the rest of the answer, or for the whole of it. A few at a time: an engine that dies leaves a
        thousand streams to be continued."""
        whole = wire.request
        async with self._dispatcher.take_overs:
            wire.readdress(await self.continued(wire.upstream, whole, wire.attempt.candidate.endpoint.id))
            if self._routed.request.wants_usage:
                self._dispatcher.run(self.count_prompt(wire.upstream, whole))
            await wire.connect(sink)

    async def continued(self, upstream: Upstream, request: BackendRequest, endpoint: str) -> BackendRequest:
        """The request for the rest of the answer, or for the whole of it."""
        given = None if endpoint in self._dispatcher.restarting else self._given
        known = None if self.continuation is None else self.continuation.prompt_tokens
        call = None if given is None else upstream.backend.count_text(request, given)
        counted = None if call is None else await _count(upstream, call)
        bound = self.remembered.tokens if call is None else self.remembered.token_bound(counted)
        if given is None or upstream.backend.obstacle(request, bound):
            self.continuation = Continuation(self.remembered, None, known)
            return request
        self.continuation = Continuation(self.remembered, given, known, counted)
        return upstream.backend.continued(request, given, bound)

    async def count_prompt(self, upstream: Upstream, request: BackendRequest) -> None:
        """Without an answer in time the events of the first stream are the count of its tokens."""
        call, continuation = upstream.backend.count_prompt(request), self.continuation
        if call is None or continuation is None or continuation.restarted:
            return
        if (counted := await _count(upstream, call)) is not None:
            continuation.prompt_tokens = counted

    def note_restart(self, wire: WireAttempt) -> None:
        """Remember an endpoint that has begun anew although it was given the beginning."""
        if self.continuation is not None and self.continuation.restarted_unasked:
            self._dispatcher.restarting.add(wire.attempt.candidate.endpoint.id)

    def end(self, winner: WireAttempt | None) -> None:
        """The request is over."""
        if winner is not None and winner.attempt.kind is AttemptKind.RESCUE:
            self.note_restart(winner)
        self.remembered.release()


async def _count(upstream: Upstream, call: HttpCall) -> int | None:
    """Tokens, as counted by the server; None: not counted."""
    with suppress(TransportError, ValueError, RecursionError):
        reply = await upstream.connections.fetch(call, COUNTING)
        return msgspec.json.decode(reply.body, type=_TokenCount).count
    return None
