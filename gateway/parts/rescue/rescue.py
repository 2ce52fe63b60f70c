"""Mid-stream rescue: a peer writes the rest of a broken answer, and the caller reads one stream.

Rules:
- Text alone is continued, by an endpoint of the same pool or else of the next tiers (`policies.rescue.successors`). All
  else ends by an error event at once: tool calls, reasoning, structured output, several choices.
- The peer gets the text so far and what is left of the caller's limit: its tokens are counted by the peer (/tokenize)
  before, and where nobody counts, an upper bound comes off.
- A peer that refuses to continue, or is known to begin anew all the same, is asked for the whole answer, and the text
  so far is skipped; so is a peer for which no room is left by the upper bound. Where its text differs, the next peer is
  asked, or the stream ends by an error event.
- The peer counts the tokens of the prompt (/tokenize) while it computes the continuation: usage is exact.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from time import monotonic
from typing import Annotated, Any

import msgspec

from backends.failures import DIVERGED, UNRESCUED, TransportError
from backends.http.connection import Sink
from backends.interface import BackendRequest, Failure, HttpCall, Operation
from backends.stream.continuation import Continuation, Diverged
from backends.stream.partial_answer import PartialAnswer, TextBudget
from gateway.core.hooks import NO_HOOKS, Hooks, RoutePlan
from gateway.core.part import Part
from gateway.observe.part_notes import RESCUE
from gateway.upstream.attempt import WireAttempt
from gateway.upstream.routed_request import RoutedRequest, Upstream
from policies.blame.blame import BLAME
from policies.fleet.fleet import Fleet
from policies.rescue.successors import RESCUE_ATTEMPT, able, in_order, is_of_request, patience, to_forecast
from policies.types import FOREVER, Attempt, Candidate, Endpoint

COUNTING = 5.0  # s for a count of tokens
TAKE_OVERS = 8  # broken answers for which a continuation is being asked, at a time


class _TokenCount(msgspec.Struct):
    count: Annotated[int, msgspec.Meta(ge=0)]


class Rescues(Part):
    """Shared by the answers of all requests. `run`: does work beside the requests. `restarting`: endpoints that do not
    continue an answer but begin anew."""

    def __init__(self, fleet: Fleet, run: Callable[[Coroutine[Any, Any, None]], object]) -> None:
        self.fleet = fleet
        self.run = run
        self.texts = TextBudget()
        self.restarting: set[str] = set()
        self.take_overs = asyncio.Semaphore(TAKE_OVERS)

    def reload(self) -> None:
        """Forget what is believed of endpoints."""
        self.restarting.clear()

    def on(self, plan: RoutePlan) -> Hooks:
        return Hooks(recover=self.recovery) if plan.route.rescue == "on" else NO_HOOKS

    def recovery(self, routed: RoutedRequest) -> Rescue | None:
        return Rescue(self, routed) if routed.request.stream else None


class Rescue:
    """Of one request: keeps the text of its answer. `rest`: of the latest break."""

    def __init__(self, rescues: Rescues, routed: RoutedRequest) -> None:
        self.kept = PartialAnswer(rescues.texts)
        self.rest: Continuing | None = None
        self._rescues = rescues
        self._routed = routed

    def link(self) -> PartialAnswer:
        """Keep the text of an answer from its beginning, and forget what the caller has seen nothing of."""
        self.kept.release()
        self.kept = PartialAnswer(self._rescues.texts)
        return self.kept

    def patience(self, own: Attempt, tpot: float | None, others: Sequence[Candidate]) -> float:
        if self.kept.obstacle or self._routed.request.tools:  # a parser of tool calls holds tokens back
            return FOREVER
        return patience(own.candidate.endpoint, tpot, others)

    def recover(
        self, wire: WireAttempt, failure: Failure, unwritten: bool, others: Sequence[Candidate]
    ) -> Continuing | None:
        if unwritten:
            self.kept.refuse_unwritten()
        if self.rest is not None:
            self.rest.note_restart(wire)
        peers = [] if self.kept.obstacle or is_of_request(BLAME[failure.kind.value]) else self._peers(wire, others)
        RESCUE.put(self._routed.timeline.record, "refused" if not peers and self.rest is None else "failed")  # so far
        if not peers:
            return None
        longer = [replace(each, prompt_tokens=each.prompt_tokens + self.kept.tokens) for each in peers]
        self.rest = Continuing(self._rescues, self._routed, self.kept, longer, self.rest)
        return self.rest

    def _peers(self, wire: WireAttempt, others: Sequence[Candidate]) -> list[Candidate]:
        """Those that can continue the answer, in order. Of endpoints with the same model, forecasts as of now tell."""
        own, routed, rescues, now = wire.attempt.candidate.endpoint, self._routed, self._rescues, monotonic()
        loads = rescues.fleet.snapshot_for(routed.request.caller, now).loads
        estimates, view = routed.estimate.pools, rescues.fleet.view

        def obstacle(endpoint: Endpoint) -> str:
            upstream = routed.upstreams[endpoint.id]
            return upstream.backend.obstacle(routed.backend_request(upstream, wire.attempt), self.kept.tokens)

        def is_alike(peer: Endpoint) -> bool:
            return peer.id not in rescues.restarting and model_at(peer) == wire.request.model

        def model_at(peer: Endpoint) -> str:
            return routed.model_at(peer, routed.upstreams[peer.id])

        found = able(others, loads, obstacle)
        alike = to_forecast(own, [each for each in found if is_alike(each.endpoint)], loads)
        ttfts = {
            each.id: view.continuation_ttft(each.id, loads[each.id], estimates[each.pool], self.kept.tokens, now)
            for each in alike
        }
        return in_order(own, found, ttfts)

    def end(self, winner: WireAttempt | None) -> None:
        if self.rest is not None:
            self.rest.end(winner)
        self.kept.release()


class Continuing:
    """The rest of an answer, and the part of it that a peer is given. `continuation`: by the peer asked last; `asked`:
    a peer was, after this break or one before."""

    def __init__(
        self,
        rescues: Rescues,
        routed: RoutedRequest,
        kept: PartialAnswer,
        others: Sequence[Candidate],
        before: Continuing | None,
    ) -> None:
        self.others, self.kind = others, RESCUE_ATTEMPT
        self.asked: bool = before is not None and before.asked
        self.continuation: Continuation | None = None
        self._rescues = rescues
        self._routed = routed
        self._kept = kept
        self._known = None if before is None else before.prompt_tokens()
        text = kept.text if routed.request.operation is Operation.COMPLETION else kept.text.rstrip()
        self._given: str | None = text  # None: the peer writes all again

    async def send(self, wire: WireAttempt, sink: Sink) -> None:
        """Ask a peer for the rest of the answer, or for the whole of it. A few at a time: an engine that dies leaves a
        thousand streams to be continued."""
        whole, self.asked = wire.request, True
        async with self._rescues.take_overs:
            wire.readdress(await self.continued(wire.upstream, whole, wire.attempt.candidate.endpoint.id))
            if self._routed.request.wants_usage:
                self._rescues.run(self.count_prompt(wire.upstream, whole))
            await wire.connect(sink)

    async def continued(self, upstream: Upstream, request: BackendRequest, endpoint: str) -> BackendRequest:
        """The request for the rest of the answer, or for the whole of it."""
        given = None if endpoint in self._rescues.restarting else self._given
        known = self.prompt_tokens()
        call = None if given is None else upstream.backend.count_text(request, given)
        counted = None if call is None else await _count(upstream, call)
        bound = self._kept.tokens if call is None else self._kept.token_bound(counted)
        if given is None or upstream.backend.obstacle(request, bound):
            self.continuation = Continuation(self._kept, None, known)
            return request
        self.continuation = Continuation(self._kept, given, known, counted)
        return upstream.backend.continued(request, given, bound)

    async def count_prompt(self, upstream: Upstream, request: BackendRequest) -> None:
        """Without an answer in time the events of the first stream are the count of its tokens."""
        call, continuation = upstream.backend.count_prompt(request), self.continuation
        if call is None or continuation is None or continuation.restarted:
            return
        if (counted := await _count(upstream, call)) is not None:
            continuation.prompt_tokens = counted

    def hear(self, data: bytes) -> bytes | Failure:
        assert self.continuation is not None
        try:
            return self.continuation.feed(data)
        except Diverged as diverged:
            return diverged.failure

    def link(self) -> Continuation:
        assert self.continuation is not None
        RESCUE.put(self._routed.timeline.record, "rescued")
        return self.continuation

    def asks_anew(self) -> bool:
        """The next attempt asks for the whole answer. False: the peer refuses that too."""
        asked, self._given = self._given, None
        return asked is not None

    def unwritten(self, last: Failure | None) -> Failure:
        return DIVERGED if last is DIVERGED else UNRESCUED

    def prompt_tokens(self) -> int | None:
        return self._known if self.continuation is None else self.continuation.prompt_tokens

    def tokens_before(self) -> int:
        return 0 if self.continuation is None else self.continuation.tokens

    def end(self, winner: WireAttempt | None) -> None:
        """The request is over. `winner`: still the attempt that broke, where no other has gone on."""
        if winner is not None and winner.attempt.kind is RESCUE_ATTEMPT:
            self.note_restart(winner)

    def refuse(self) -> None:
        if not self.asked:
            RESCUE.put(self._routed.timeline.record, "refused")

    def note_restart(self, wire: WireAttempt) -> None:
        """Remember an endpoint that has begun anew although it was given the beginning."""
        if self.continuation is not None and self.continuation.restarted_unasked:
            self._rescues.restarting.add(wire.attempt.candidate.endpoint.id)


async def _count(upstream: Upstream, call: HttpCall) -> int | None:
    """Tokens, as counted by the server; None: not counted."""
    with suppress(TransportError, ValueError, RecursionError):
        reply = await upstream.connections.fetch(call, COUNTING)
        return msgspec.json.decode(reply.body, type=_TokenCount).count
    return None
