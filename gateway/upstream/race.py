"""Carries out a request: performs the actions of the attempt machine, and reports the events of the attempts to it.

    race -> attempt -> answer -> relay

References run in this direction alone; results come back as values. The sink of an exchange hands what an attempt
returns to the race, in the call of the read: the winner is joined to the answer in the very call of the first token.
Decides nothing: which attempt is opened, left or committed, and when, is the machine's alone
(`policies.attempts.attempt_machine`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from time import monotonic

from backends.failures import DIVERGED, LATE, NOT_ASSEMBLED, NOT_READ, SILENT, STOPPED, TRUNCATED, UNRESCUED
from backends.interface import Failure
from gateway.api.answer_quality import shortcoming
from gateway.api.api_error import ApiError
from gateway.downstream.answer_headers import answer_head
from gateway.observe.record import RequestOutcome, Stage
from gateway.upstream.answer import Answer, AssembledAnswer, StreamedAnswer, streamed_answer, whole_reply
from gateway.upstream.attempt import BrokenOff, Milestone, WireAttempt, WireEvent, WireState, attempt_record
from gateway.upstream.dispatcher import Dispatcher
from gateway.upstream.race_facts import RaceFacts
from gateway.upstream.refusal import refusal_of
from gateway.upstream.relay import Relay
from gateway.upstream.rescue import Rescue
from gateway.upstream.routed_request import RoutedRequest, header_safe
from gateway.upstream.sending import Sending
from gateway.upstream.upstream import EVERYWHERE
from gateway.upstream.wake_timer import WakeTimer
from policies.attempts.attempt_events import (
    Action,
    Answered,
    Begin,
    Broken,
    Cancel,
    ClientGone,
    Commit,
    Ending,
    Event,
    Failed,
    FirstToken,
    GiveUp,
    Keep,
    Leave,
    Leaving,
    Open,
    TimerFired,
)
from policies.attempts.attempt_machine import AttemptMachine
from policies.blame.blame import BLAME, Blame, Elsewhere
from policies.types import Attempt, AttemptKind, AttemptOutcome

JSON_HEADERS = {"content-type": "application/json"}


class AttemptSink:
    """The `Sink` of an exchange: what the attempt makes of a read goes to the race."""

    __slots__ = ("attempt", "race")

    def __init__(self, attempt: WireAttempt, race: Race) -> None:
        self.attempt = attempt
        self.race = race

    def on_head(self, status: int, headers: Mapping[str, str]) -> None:
        if (event := self.attempt.on_head(status, headers)) is not None:
            self.race.on_wire(self.attempt, event)

    def on_body(self, data: bytes, framed: bytes = b"") -> None:
        if (event := self.attempt.on_body(data, framed)) is not None:
            self.race.on_wire(self.attempt, event)

    def on_end(self) -> None:
        if (event := self.attempt.on_end()) is not None:
            self.race.on_wire(self.attempt, event)

    def on_failure(self, failure: Failure) -> None:
        self.race.dispatcher.losses.do(self._on_lost, failure)

    def _on_lost(self, failure: Failure) -> None:
        if self.attempt.state is not WireState.OVER:
            self.race.on_wire(self.attempt, self.attempt.on_failure(failure))
        elif failure is NOT_READ:  # an error of the gateway's own after the last read: nothing else ends the request
            self.race.on_bug()


class Race:
    """The attempts of a request. `winner`: the attempt whose answer is relayed, once there is one."""

    def __init__(self, dispatcher: Dispatcher, routed: RoutedRequest, relay: Relay) -> None:
        self.dispatcher = dispatcher
        self.routed = routed
        self.relay = relay
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.attempts: dict[int, WireAttempt] = {}
        self.winner: WireAttempt | None = None
        self.rescue: Rescue | None = None
        if routed.may_rescue:
            self.rescue = Rescue(routed, dispatcher.texts, dispatcher.restarting)
        self._machine = AttemptMachine(
            routed.decision,
            routed.limits,
            dispatcher.retries,
            dispatcher.hedges_of(routed.route),
            RaceFacts(dispatcher, self.attempts, relay, self.rescue, routed.request.caller),
            now=monotonic(),
        )
        self._answer: Answer | None = None
        self._first = b""  # bytes of the answer to be written at the commit
        self._first_in = 0.0  # time of the answer's first token
        self._whole: dict[int, bytes] = {}  # complete answers, by attempt
        self._failure: Failure | None = None  # the last one
        self._broken: BrokenOff | None = None  # the committed answer
        self._outlier = ""  # endpoint that has refused the request, to be confirmed by another
        self._sending = Sending(dispatcher.run, dispatcher.take_overs, self.rescue, routed.request.wants_usage)
        self._timer = WakeTimer()

    async def run(self) -> None:
        """Return once an answer was relayed to the end. Raises ApiError if every attempt failed before a token."""
        try:
            self.advance(Begin())
            await self.done
        except asyncio.CancelledError:
            if self.relay.stalled:
                self.routed.timeline.note_error(self.relay.stalled)
            raise
        finally:
            self._end()

    def _end(self) -> None:
        """End what is open: a caller that has left needs no answer."""
        if self._machine.is_racing or (self.winner is not None and self.winner.state is not WireState.OVER):
            self.advance(ClientGone())
        self._timer.cancel()
        self.dispatcher.on_dispatched(self.routed.request)
        self.relay.release()
        for wire in self.attempts.values():
            wire.stop(AttemptOutcome.CANCELLED)
            self.dispatcher.races.pop(wire, None)
        if self.winner is not None:
            self._record_winner(self.winner)
        if self.rescue is not None:
            self.rescue.remembered.release()

    # -- the machine --------------------------------------------------------------------------

    def advance(self, event: Event) -> None:
        """Tell the machine, and perform its actions. What a commit brings to light is told after these."""
        step, found = self._machine.on(event, monotonic()), None
        for action in step.actions:
            found = self._perform(action) or found
        self._timer.set(step.wake_at, self._look)
        if found is not None:
            self.on_wire(*found)

    def _perform(self, action: Action) -> tuple[WireAttempt, WireEvent] | None:
        match action:
            case Open(attempt):
                self._open(attempt)
            case Commit(number):
                return self._commit(self.attempts[number])
            case Cancel(number, outcome):
                self._cancel(self.attempts[number], outcome)
            case Keep(_, shortcoming):
                self.routed.timeline.escalated(shortcoming)
            case Leave(number, why):
                return self._leave(self.attempts[number], why)
            case GiveUp():
                self._give_up(action)
        return None

    def _look(self) -> None:
        """An error here is nobody's but the waiting task's: no timer would be left to end the request."""
        try:
            self.advance(TimerFired())
        except Exception as bug:
            if self.done.done():
                raise
            self.done.set_exception(bug)

    # -- actions --------------------------------------------------------------------------------

    def _open(self, attempt: Attempt) -> None:
        routed, endpoint, fleet = self.routed, attempt.candidate.endpoint, self.dispatcher.fleet
        upstream = routed.upstreams[endpoint.id]
        request = routed.backend_request(upstream, attempt)
        if self.rescue is not None and attempt.kind is AttemptKind.RESCUE:
            attempt.candidate = self.rescue.candidate(attempt.candidate)
        rewritten = routed.rewritten_answer(endpoint) is not None
        wire = WireAttempt(attempt, upstream, request, fleet, assembled=routed.assembled, rewritten=rewritten)
        wire.tap.strict = self.rescue is not None or rewritten
        self.attempts[attempt.number] = wire
        self.dispatcher.races[wire] = self.advance
        self._sending.send(wire, AttemptSink(wire, self))  # first: the rest is done while the engine reads the request
        fleet.on_sent(
            wire,
            attempt.candidate,
            routed.estimate.pools[endpoint.pool],
            wire.times.opened,
            request.stream,
            session=request.session_id,
            tpot_budget=routed.route.tpot_budget(routed.request.tpot_budget),
            output=routed.estimate.output_tokens,
            route=routed.route,
            caller=routed.request.caller,
        )
        self.dispatcher.on_dispatched(routed.request)

    def _cancel(self, wire: WireAttempt, outcome: AttemptOutcome) -> None:
        """The engine is told at once."""
        self._sending.cancel(wire)
        wire.stop(outcome)
        if wire is not self.winner:
            self._record_lost(wire)

    def _commit(self, wire: WireAttempt) -> tuple[WireAttempt, WireEvent] | None:
        """Write the first bytes, and let the attempt go on into the answer. An error of the gateway's own is raised by
        the waiting task, not within the connection to the server."""
        try:
            return self._joined(wire)
        except Exception as bug:
            self.done.set_exception(bug)
            return None

    def _joined(self, wire: WireAttempt) -> tuple[WireAttempt, WireEvent] | None:
        broken, self.winner = self.winner, wire
        if (whole := self._whole.get(wire.attempt.number)) is not None:
            self._note_winner(wire)
            if len(self.attempts) > wire.attempt.number:  # kept while another pool was asked
                self.routed.timeline.close((Stage.FAILOVER, monotonic()))
            self._begin(wire, whole, len(whole))
            return wire, Milestone.ENDED
        assert self._answer is not None
        first, self._first = self._first, b""
        if broken is not None:
            self._record_lost(broken)
            self.routed.timeline.rescue("rescued")
            self.relay.write(first)
        else:
            self._note_winner(wire)
            if self._answer.written:
                self._begin(wire, first, wire.content_length)
        found = wire.join(self._answer)
        if self.relay.is_paused:
            self.on_write_paused()
        return None if found is None else (wire, found)

    def _note_winner(self, wire: WireAttempt) -> None:
        routed, endpoint, times = self.routed, wire.attempt.candidate.endpoint, wire.times
        self._first_in = times.first_in or times.opened
        if wire.request.operation not in EVERYWHERE:
            self.dispatcher.operations.served.add((endpoint.pool, wire.request.operation))
        model = routed.model_at(endpoint, wire.upstream)
        routed.timeline.won(
            wire.attempt.candidate,
            header_safe(model) if routed.passthrough else model,
            opened=times.opened,
            connected=times.connected,
            sent=times.sent or times.opened,
            first_in=self._first_in,
        )

    def _begin(self, wire: WireAttempt, first: bytes, length: int | None) -> None:
        http, streams = self.relay.http, self.routed.request.stream
        if not http.http11:
            http.keep_alive = False
        http.writer.flow_control = self
        headers = wire.headers if not wire.assembled else JSON_HEADERS
        head = answer_head(http, wire.status, headers, self.routed.timeline, length, streams)
        self.relay.begin(head, first, length)
        self.routed.timeline.first_token_out(monotonic(), wire.status)

    def _leave(self, wire: WireAttempt, why: Leaving) -> tuple[WireAttempt, WireEvent] | None:
        """Stop reading a committed stream."""
        if why is Leaving.COMPLETE:
            wire.tap.close()
            wire.stop(AttemptOutcome.COMPLETED)
            return wire, Milestone.ENDED
        if why is Leaving.SILENT:
            wire.stop(AttemptOutcome.BROKEN, SILENT)
            return wire, BrokenOff(SILENT)
        wire.stop(AttemptOutcome.CANCELLED)
        self._end_broken(BrokenOff(LATE))
        return None

    def _give_up(self, action: GiveUp) -> None:
        if not self.relay.begun:
            self._resolve(refusal_of(self._failure, action))
        elif self._broken is not None:
            refused = action.ending is Ending.NOT_CONTINUED
            if self.rescue is not None and self.rescue.continuation is None and refused:
                self.routed.timeline.rescue("refused")
            last = DIVERGED if self._failure is DIVERGED else UNRESCUED
            self._end_broken(self._broken if refused else BrokenOff(last))

    def _resolve(self, error: ApiError | None = None) -> None:
        if self.done.done():
            return
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)

    # -- events of attempts ------------------------------------------------------------------------

    def on_wire(self, wire: WireAttempt, event: WireEvent) -> None:
        if self.done.done():
            return
        match event:
            case Milestone.FIRST_TOKEN:
                self._on_first_token(wire)
            case Milestone.WHOLE:
                self._on_whole(wire)
            case Milestone.ENDED:
                self._on_ended(wire)
            case BrokenOff():
                self._on_broken(wire, event)
            case Failure():
                self._on_failed(wire, event)

    def _on_first_token(self, wire: WireAttempt) -> None:
        first = self._start(wire)
        if isinstance(first, Failure):
            self._on_failed(wire, wire.fail(first))
            return
        self._first = first
        self.advance(FirstToken(wire.attempt.number))
        if wire.stream and wire.times.first_in is not None:  # after the write to the caller, who need not wait for it
            self.dispatcher.fleet.on_first_token(wire, wire.times.first_in)

    def _start(self, wire: WireAttempt) -> bytes | Failure:
        """Build the answer, or let the attempt continue it; the first bytes for the caller."""
        routed, endpoint = self.routed, wire.attempt.candidate.endpoint
        if wire.attempt.kind is AttemptKind.RESCUE:
            assert self.rescue is not None
            assert self.rescue.continuation is not None
            assert isinstance(self._answer, StreamedAnswer)
            self._answer.continue_with(self.rescue.continuation)
            return self._answer.start(wire.take_buffered())
        if self.rescue is not None:
            self.rescue.begin()
        if wire.assembled:
            self._answer = AssembledAnswer(
                wire.upstream.backend.assembler(wire.request), routed, wire.upstream, endpoint
            )
        else:
            remembered = () if self.rescue is None else (self.rescue.remembered,)
            self._answer = streamed_answer(self.relay, routed, wire.upstream, endpoint, wire.tap, remembered)
        return self._answer.start(wire.take_buffered())

    def _on_whole(self, wire: WireAttempt) -> None:
        """Rewrite a whole answer before it counts: what cannot be rewritten is a failure."""
        reply = whole_reply(self.routed, wire.upstream, wire.attempt.candidate.endpoint, wire.take_buffered())
        if isinstance(reply, Failure):
            self._on_failed(wire, wire.fail(reply))
            return
        wire.stop(AttemptOutcome.COMPLETED)
        self._whole[wire.attempt.number] = reply
        self.advance(Answered(wire.attempt.number, self._shortcoming(reply)))

    def _shortcoming(self, reply: bytes) -> str:
        request, wanted = self.routed.request, self.routed.route.escalate
        return shortcoming(request.operation, request.body, reply, wanted) if wanted else ""

    def _on_ended(self, wire: WireAttempt) -> None:
        """The committed answer is over."""
        if wire.attempt.number in self._whole:
            self._finish(b"", RequestOutcome.COMPLETED)
            return
        assert self._answer is not None
        if wire.tap.spoiled:  # by its last, incomplete event
            self._answer.replace_held(b"")
        tail = self._answer.finish(wire.tap.missing)
        if isinstance(tail, Failure):
            self._on_broken(wire, BrokenOff(tail))
            return
        if not self.relay.begun:
            self._begin(wire, tail, len(tail))
            tail = b""
        if wire.answered:
            self._finish(tail, RequestOutcome.COMPLETED)
        else:  # status 200 with an error in a body too long to be held: complete, and the caller's to read
            self._finish(tail, RequestOutcome.UPSTREAM_BROKE, (wire.failure or TRUNCATED).said)

    def _on_failed(self, wire: WireAttempt, failure: Failure) -> None:
        """Nothing of an answer was written: the failure can be hidden."""
        self._failure = failure
        self._record_lost(wire)
        if wire is self.winner:
            self.winner = self._answer = None
        blame, rescue = BLAME[failure.kind.value], self.rescue
        continued = wire.attempt.kind is AttemptKind.RESCUE and blame.elsewhere is Elsewhere.NOWHERE
        self.advance(
            Failed(
                wire.attempt.number,
                blame,
                failure.retry_after,
                accepted=wire.accepted,
                translated=self._asks_otherwise(wire, failure, blame),
                doubtful=blame.elsewhere is Elsewhere.NOWHERE and self._doubt(wire),
                restart=rescue.restart() if continued and rescue is not None else None,
            )
        )

    def _asks_otherwise(self, wire: WireAttempt, failure: Failure, blame: Blame) -> bool:
        """Another form of the request suits the server: the whole answer in place of a stream, or another dialect where
        the pool lacks the operation."""
        if failure is NOT_ASSEMBLED:
            self.routed.ask_whole()
            self._machine.limit_by(self.routed.limits)  # of an answer without tokens to be seen
            return True
        if blame.elsewhere is not Elsewhere.TRANSLATED:
            return False
        routed, pool = self.routed, wire.attempt.candidate.endpoint.pool
        return self.dispatcher.operations.found_lacking(pool, routed.request, routed.route, routed.native[pool])

    def _doubt(self, wire: WireAttempt) -> bool:
        """True for the first refusal by an outlier among siblings: another endpoint is asked to confirm it."""
        endpoint, fleet = wire.attempt.candidate.endpoint.id, self.dispatcher.fleet
        if self._outlier and self._outlier != endpoint:
            fleet.on_refusal_confirmed(self._outlier)
            return False
        self._outlier = endpoint if fleet.is_outlier(endpoint) else ""
        return bool(self._outlier)

    def _on_broken(self, wire: WireAttempt, broken: BrokenOff) -> None:
        """A peer continues, or the answer ends by an error."""
        if not self.relay.begun:
            return self._on_failed(wire, broken.failure)
        self._broken, blame = broken, BLAME[broken.failure.kind.value]
        if self.rescue is None:
            return self.advance(Broken(blame))
        self.rescue.note_restart(wire.attempt.candidate.endpoint.id)
        self.rescue.break_off()
        self.routed.timeline.rescue("failed")  # up to the first token of a peer
        loads = self.dispatcher.fleet.snapshot(monotonic()).loads
        return self.advance(Broken(blame, self.rescue.obstacle, self.rescue.unable(wire.attempt, loads)))

    # -- the end ----------------------------------------------------------------------------------

    def _end_broken(self, broken: BrokenOff, outcome: RequestOutcome = RequestOutcome.UPSTREAM_BROKE) -> None:
        """An explicit error ends the answer."""
        if not self.relay.begun:
            self._resolve(refusal_of(broken.failure))
            return
        self.relay.http.keep_alive = False
        if self.routed.request.stream and isinstance(self._answer, StreamedAnswer):
            last = self._answer.error(broken.failure, broken.error_event)
            self._finish(last, outcome, broken.failure.said)
        else:
            self._finish(None, outcome, broken.failure.said)
            self.relay.abort()

    def _finish(self, last: bytes | None, outcome: RequestOutcome, error: str = "") -> None:
        """`last`: bytes of the answer; None: it stays incomplete."""
        if self.done.done():
            return
        if last is not None:
            self.relay.end(last)
        self.routed.timeline.finished(outcome, monotonic(), error)
        self._resolve()

    def _record_lost(self, wire: WireAttempt) -> None:
        self.routed.timeline.attempt_lost(attempt_record(wire, self.routed.timeline.record.arrival))

    def _record_winner(self, wire: WireAttempt) -> None:
        """A continuation is recorded with the answer before."""
        assert wire.report is not None
        routed, reported, output, tpot = self.routed, wire.report, wire.output_tokens, wire.tpot()
        continues = wire.attempt.kind is AttemptKind.RESCUE
        if continues and self.rescue is not None:
            self.rescue.note_restart(wire.attempt.candidate.endpoint.id)
        if continues and self.rescue is not None and (before := self.rescue.continuation) is not None:
            reported = replace(reported, prompt_tokens=before.prompt_tokens)
            output += before.tokens
            tpot = (wire.times.last_token - self._first_in) / max(output - 1, 1)
        routed.timeline.answered(
            attempt_record(wire, routed.request.arrival),
            reported,
            wire.tap.times,
            output_tokens=output,
            tpot=tpot,
            blocks=routed.estimate.pools[wire.attempt.candidate.endpoint.pool].blocks,
            reasoning_in=wire.times.reasoning_in,
            answer_in=wire.times.first_in if continues else wire.times.answer_in,
        )

    # -- WriteFlowControl -------------------------------------------------------------------------

    def on_write_paused(self) -> None:
        self.relay.pause()
        if self.winner is not None:
            self.winner.pause()

    def on_write_resumed(self) -> None:
        self.relay.resume()
        if self.winner is not None:
            self.winner.resume()

    def on_bug(self) -> None:
        """End the request: what it waits for will not come."""
        if not self.done.done():
            self._end_broken(BrokenOff(NOT_READ))

    def on_shutdown(self) -> None:
        """End the answer explicitly, like any broken stream."""
        if self.winner is not None:
            self.winner.stop(AttemptOutcome.CANCELLED)
        self._end_broken(BrokenOff(STOPPED), RequestOutcome.CUT)
