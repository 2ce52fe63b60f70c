"""Mid-stream rescue of one answer: a peer writes the rest, and the caller reads one stream.

Rules:
- Text alone is continued, by an endpoint of the same pool or else of the next tiers. All else ends by an error event at
  once: tool calls, reasoning, structured output, several choices.
- A peer that refuses to continue is asked for the whole answer, and the text so far is skipped. Where its text differs,
  the next peer is asked, or the stream ends by an error event.
- The peer counts the tokens of the prompt (/tokenize) while it computes the continuation: usage is exact.
"""

from __future__ import annotations

from contextlib import suppress

import msgspec

from backends.failures import TransportError
from backends.interface import BackendRequest, Operation
from backends.stream.continuation import Continuation, PartialAnswer, RelayedEvents, read_partial
from gateway.upstream.routed_request import RoutedRequest
from gateway.upstream.upstream import Upstream

COUNTING = 5.0  # s for the count of the prompt's tokens


class _TokenCount(msgspec.Struct):
    count: int


class Rescue:
    """What is kept of an answer, and what a peer is given."""

    def __init__(self, routed: RoutedRequest) -> None:
        self.remembered = RelayedEvents()
        self.continuation: Continuation | None = None  # of the latest broken stream
        self._request = routed.request
        self._given = ""  # text of the answer so far, as the peer gets it
        self._answer: PartialAnswer | None = None

    @property
    def obstacle(self) -> str:
        """The reason for which nobody can continue the answer; empty: some can."""
        return read_partial(self.remembered).obstacle

    @property
    def given_tokens(self) -> int:
        """Of the answer so far, as given to the peer."""
        return self.continuation.tokens if self.continuation else 0

    def obstacle_at(self, upstream: Upstream, request: BackendRequest) -> str:
        return upstream.backend.obstacle(request, read_partial(self.remembered).tokens)

    def break_off(self) -> str:
        """The stream has broken. Returns the reason for which nobody can continue the answer; empty: some can."""
        answer = read_partial(self.remembered)
        known = self.continuation.prompt_tokens if self.continuation else None
        self._given = answer.text if self._request.operation is Operation.COMPLETION else answer.text.rstrip()
        self.continuation = Continuation(answer, self._given, known)
        return answer.obstacle

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
        return upstream.backend.continued(request, self._given, self.given_tokens)

    async def count_prompt(self, upstream: Upstream, request: BackendRequest) -> None:
        """Without an answer in time the events of the first stream are the count of its tokens."""
        call, continuation = upstream.backend.count_prompt(request), self.continuation
        if call is None or continuation is None or continuation.restarted:
            return
        with suppress(TransportError, ValueError):
            reply = await upstream.connections.fetch(call, COUNTING)
            continuation.prompt_tokens = msgspec.json.decode(reply.body, type=_TokenCount).count
