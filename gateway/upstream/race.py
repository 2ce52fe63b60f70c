"""Carries out a request: performs the actions of the attempt machine, and reports the events of the attempts to it.

    race -> attempt -> answer -> relay

References run in this direction alone; results come back as values. The sinks of an exchange hand what an attempt
returns to the race, in the call of the read: the winner is joined to the answer in the very call of the first token.
Decides nothing: which attempt is opened, kept, left or committed, and when, is the machine's alone
(`policies.attempts.attempt_machine`), and so is the state of the request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic
from typing import Any

from backends.failures import LATE, NOT_ASSEMBLED, NOT_READ, OF_STREAMS, SILENT, STOPPED
from backends.http.loop_aware_timer import LoopAwareTimer
from backends.interface import Failure
from gateway.observe.part_notes import SHORTCOMING
from gateway.observe.record import RequestOutcome, Stage
from gateway.refusals import refusal_of
from gateway.upstream.answer import Answer, whole_reply
from gateway.upstream.answer_hooks import NO_ANSWER_HOOKS, AnswerHooks, Recovery, Rest
from gateway.upstream.attempt import BrokenOff, Milestone, WireAttempt, WireEvent, WireState
from gateway.upstream.attempt_records import note_won, record_lost, record_winner
from gateway.upstream.attempt_sinks import AnswerSink, AttemptSink, WholeAnswerSink
from gateway.upstream.dispatcher import Dispatcher
from gateway.upstream.race_facts import RaceFacts
from gateway.upstream.relay import Relay
from gateway.upstream.routed_request import RoutedRequest
from gateway.upstream.upstream import EVERYWHERE
from policies.attempts.attempt_events import (
    Answered,
    Begin,
    Broken,
    Cancel,
    ClientGone,
    Commit,
    Ending,
    Event,
    FirstToken,
    GiveUp,
    Keep,
    Leave,
    Leaving,
    Open,
    TimerFired,
)
from policies.attempts.attempt_machine import AttemptMachine
from policies.blame.blame import BLAME
from policies.types import Attempt, AttemptKind, AttemptOutcome, Health

_ASLEEP = Health.ASLEEP  # a member is slow to look up in an enumeration


class Race:
    """The attempts of a request. `winner`: the attempt whose answer is relayed, once there is one."""

    def __init__(
        self, dispatcher: Dispatcher, routed: RoutedRequest, relay: Relay, hooks: AnswerHooks = NO_ANSWER_HOOKS
    ) -> None:
        self.dispatcher = dispatcher
        self.routed = routed
        self.relay = relay
        if routed.assembled and dispatcher.obstacles:
            self._leave_out_known()
        self.attempts: dict[int, WireAttempt] = {}
        self.winner: WireAttempt | None = None
        self._judges, self._mends = hooks.judge, hooks.mend
        self._recovery: Recovery | None = None
        for recover in hooks.recover:
            self._recovery = self._recovery or recover(routed)
        self._rest: Rest | None = None  # of the answer, that attempts are asked for since it broke
        self._continues: Rest | None = None  # the rest that the winner has written
        self._facts = RaceFacts(dispatcher, routed, self.attempts, relay, self._recovery, hooks.mend)
        hedges, limits = dispatcher.hedges_of(routed.route), routed.limits
        limits.recovers = self._recovery is not None
        self._machine = AttemptMachine(
            routed.decision, limits, dispatcher.retries, hedges, self._facts, now=monotonic()
        )
        self.answer = Answer(routed, relay, self.attempts, asyncio.get_running_loop().create_future())
        self._first = b""  # bytes of the answer to be written at the commit
        self._first_in = 0.0  # time of the answer's first token
        self._failure: Failure | None = None  # the last one
        self._broken: BrokenOff | None = None  # the committed answer
        self._timer = LoopAwareTimer()

    def _leave_out_known(self) -> None:
        """Ask endpoints for whole answers whose streams are known not to give them."""
        request = self.routed.request
        known, tools = self.dispatcher.obstacles, bool(request.tools)
        self.routed.unseen |= known.concerned(request.operation, request.caller, monotonic(), tools=tools)

    async def run(self) -> None:
        """Return once an answer was relayed to the end. Raises ApiError if every attempt failed before a token."""
        try:
            self.advance(Begin())
            await self.answer.done
        except asyncio.CancelledError:
            if self.relay.stalled:
                self.routed.timeline.note_error(self.relay.stalled)
            raise
        finally:
            self._end()

    def _end(self) -> None:
        """Close all attempts that are open, and record the winner."""
        if self._machine.is_racing or (self.winner is not None and self.winner.state is not WireState.OVER):
            self.advance(ClientGone())
        self._timer.cancel()
        self.dispatcher.on_dispatched(self.routed.request)
        self.relay.release()
        for wire in self.attempts.values():
            if wire.state is not WireState.OVER:
                wire.stop(AttemptOutcome.CANCELLED)
            self.dispatcher.races.pop(wire, None)
            if wire.disbelieved:
                self.dispatcher.reports.note(wire.attempt.candidate.endpoint.id, wire.disbelieved, monotonic())
        if self.winner is not None:
            record_winner(self.routed, self.winner, self._first_in, self._continues)
        if self._recovery is not None:
            self._recovery.end(self.winner)

    # -- the machine --------------------------------------------------------------------------

    def advance(self, event: Event) -> None:
        """Report an event to the machine, and perform its actions. The last one may lead to another event."""
        step = self._machine.on(event, monotonic())
        self._timer.set(step.wake_at, self._look)
        for action in step.actions:
            match action:
                case Open(attempt):
                    self._open(attempt)
                case Commit(number, was_kept):
                    self._commit(self.attempts[number], was_kept)
                case Cancel(number, outcome):
                    self._cancel(self.attempts[number], outcome)
                case Keep(_, shortcoming):
                    SHORTCOMING.put(self.routed.timeline.record, shortcoming)
                case Leave(number, why):
                    self._leave(self.attempts[number], why)
                case GiveUp():
                    self._give_up(action)

    def _look(self) -> None:
        self._guard(self.advance, TimerFired())

    def _guard(self, work: Callable[..., None], *given: Any) -> None:
        """An error here is nobody's but the waiting task's: no timer would be left to end the request."""
        try:
            work(*given)
        except Exception as bug:
            if self.answer.done.done():
                raise
            self.answer.refuse(bug)

    # -- actions --------------------------------------------------------------------------------

    def _open(self, attempt: Attempt) -> None:
        routed, endpoint, fleet = self.routed, attempt.candidate.endpoint, self.dispatcher.fleet
        upstream = routed.upstreams[endpoint.id]
        request = routed.backend_request(upstream, attempt)
        recovers = self._recovery is not None
        rewriting = routed.rewriting(upstream, endpoint, recovers=recovers)
        strict = recovers or rewriting.answer is not None
        assembled = request.stream and not routed.request.stream
        wire = WireAttempt(attempt, upstream, request, fleet, assembled=assembled, rewriting=rewriting, strict=strict)
        self.attempts[attempt.number] = wire
        self.dispatcher.races[wire] = self.advance
        # sent first: the rest is done while the engine reads the request
        self._send(wire, AttemptSink(wire, self.on_wire, self._lose))
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

    def _send(self, wire: WireAttempt, sink: AttemptSink) -> None:
        if self._rest is not None:
            wire.connecting = self.dispatcher.run(self._rest.send(wire, sink))
        elif wire.attempt.candidate.load.health is _ASLEEP:
            wire.connecting = self.dispatcher.run(self._send_to_woken(wire, sink))
        elif not wire.start(sink):
            wire.connecting = self.dispatcher.run(wire.connect(sink))

    async def _send_to_woken(self, wire: WireAttempt, sink: AttemptSink) -> None:
        """The wait is a part of the connection: nothing of it is the engine's pace."""
        began = monotonic()
        endpoint = wire.attempt.candidate.endpoint.id
        failure = await asyncio.shield(self.dispatcher.waker.wake(endpoint, self.routed.upstreams))
        if failure is not None:
            wire.connecting = None
            sink.on_failure(failure)
        else:
            await wire.connect(sink, waited=monotonic() - began)

    def _cancel(self, wire: WireAttempt, outcome: AttemptOutcome) -> None:
        """The engine is told at once. An answer that was kept has ended before."""
        wire.stop(outcome)
        if wire is not self.winner:
            record_lost(self.routed, wire)

    def _commit(self, wire: WireAttempt, was_kept: bool) -> None:
        """Write the first bytes, and let the attempt go on into the answer. An error of the gateway's own is raised by
        the waiting task, not within the connection to the server."""
        try:
            event = self._join(wire, was_kept)
        except Exception as bug:
            self.answer.refuse(bug)
        else:
            if event is not None:
                self.on_wire(wire, event)

    def _join(self, wire: WireAttempt, was_kept: bool) -> WireEvent:
        """The end of the answer, if already known."""
        before, self.winner, failure = self.winner, wire, None
        if before is not None:
            failure = self._continue(wire, before)
        else:
            self._begin(wire, was_kept)
        self._first = b""
        if failure is not None:
            return BrokenOff(failure)
        if wire.whole is not None:
            return Milestone.ENDED
        gathers = wire.assembled and self.routed.route.gap is None  # each silence counts for a promised `gap`
        sink = WholeAnswerSink if gathers else AnswerSink
        event = sink(wire, self.on_wire, self._lose, self.answer).join()
        if self.relay.is_paused:
            self.on_write_paused()
        return event

    def _continue(self, wire: WireAttempt, before: WireAttempt) -> Failure | None:
        """Another attempt writes the rest of the answer of `before`, which broke: what the caller has not read yet."""
        assert self._rest is not None
        record_lost(self.routed, before)
        wire.times.follow(before.times, monotonic())
        self._continues = self._rest
        if (failure := self.answer.continue_with(self._rest.link(), self._first)) is not None:
            wire.stop(AttemptOutcome.BROKEN, failure)
        return failure

    def _begin(self, wire: WireAttempt, was_kept: bool) -> None:
        """The attempt has won."""
        if wire.attempt.kind is AttemptKind.WHOLE:
            self._note_stream_lost(wire)
        elif wire.attempt.kind is AttemptKind.MENDED:
            for mend in self._mends:
                mend.answered(self.routed, wire)
        self._first_in = wire.times.first_in or wire.times.opened
        if wire.request.operation not in EVERYWHERE:
            self.dispatcher.operations.served.add((wire.attempt.candidate.endpoint.pool, wire.request.operation))
        note_won(self.routed, wire, self._first_in)
        if was_kept:  # while another pool was asked
            self.routed.timeline.close((Stage.FAILOVER, monotonic()))
        self.relay.http.writer.flow_control = self
        self.answer.begin(wire, self._first)

    def _note_stream_lost(self, wire: WireAttempt) -> None:
        """A whole answer shows that it was the stream alone that the endpoint could not give."""
        endpoint, dispatcher = wire.attempt.candidate.endpoint.id, self.dispatcher
        request = self.routed.request
        tools, now = bool(request.tools), monotonic()
        if endpoint not in dispatcher.obstacles.concerned(request.operation, request.caller, now, tools=tools):
            lost = next(each for each in self.attempts.values() if each.unassembled)
            self._note_lost(lost, lost.unassembled, calls=False)

    def _leave(self, wire: WireAttempt, why: Leaving) -> None:
        """Stop reading a committed stream."""
        if why is Leaving.LATE:
            wire.stop(AttemptOutcome.CANCELLED)
            self.answer.break_off(BrokenOff(LATE))
        elif why is Leaving.READ:
            wire.leave_read()
            self.routed.timeline.finished(RequestOutcome.COMPLETED, monotonic())
        else:
            self._lose(wire, SILENT)  # an engine that hangs leaves a thousand streams silent at once

    def _give_up(self, action: GiveUp) -> None:
        if not self.relay.begun:
            reopens_in = self._facts.reopens_in(monotonic())
            self.answer.refuse(refusal_of(self._failure, action, self.routed.decision, reopens_in))
            return
        assert self._broken is not None
        if self._rest is None:
            self.answer.break_off(self._broken)
        elif action.ending is Ending.NOT_CONTINUED:
            self._rest.refuse()
            self.answer.break_off(self._broken)
        else:
            self.answer.break_off(BrokenOff(self._rest.unwritten(self._failure)))

    # -- events of attempts ------------------------------------------------------------------------

    def on_wire(self, wire: WireAttempt, event: WireEvent) -> None:
        if self.answer.done.done():
            return
        match event:
            case Milestone.FIRST_TOKEN:
                self._on_first_token(wire)
            case Milestone.WHOLE:
                self._on_whole(wire)
            case Milestone.ENDED:
                if (failure := self.answer.complete(wire)) is not None:
                    self._on_broken(wire, BrokenOff(failure))
                elif wire.assembled:
                    self._note_difference(wire)
            case BrokenOff():
                self._on_broken(wire, event)
            case Failure():
                self._on_failed(wire, event)

    def _lose(self, wire: WireAttempt, failure: Failure) -> None:
        self.dispatcher.losses.do(self._guard, self._on_lost, wire, failure)

    def _on_lost(self, wire: WireAttempt, failure: Failure) -> None:
        """Report a lost connection. After the end of the attempt only a bug of the gateway ends the request."""
        if wire.state is not WireState.OVER:
            self.on_wire(wire, wire.on_failure(failure))
        elif failure is NOT_READ and not self.answer.done.done():
            self.answer.break_off(BrokenOff(NOT_READ))

    def _on_first_token(self, wire: WireAttempt) -> None:
        if isinstance(first := self._start(wire), Failure):
            self._on_failed(wire, wire.fail(first))
            return
        self._first = first
        self.advance(FirstToken(wire.attempt.number))
        if wire.stream and wire.times.first_in is not None:  # after the write to the caller
            self.dispatcher.fleet.on_first_token(wire, wire.times.first_in)

    def _start(self, wire: WireAttempt) -> bytes | Failure:
        """Build the answer, or read the beginning of its rest; the first bytes for the caller."""
        if self._rest is not None:
            return self._rest.hear(wire.held.take())
        return self.answer.start(wire, () if self._recovery is None else (self._recovery.link(),))

    def _on_whole(self, wire: WireAttempt) -> None:
        """Rewrite a whole answer. An answer that cannot be rewritten is a failure."""
        reply = whole_reply(wire.rewriting, wire.held.take())
        if isinstance(reply, Failure):
            self._on_failed(wire, wire.fail(reply))
            return
        wire.stop(AttemptOutcome.COMPLETED)
        wire.whole = reply
        self.advance(Answered(wire.attempt.number, self._shortcoming(reply)))

    def _shortcoming(self, reply: bytes) -> str:
        """For which another pool is asked; empty: none."""
        return next(filter(None, (judge(self.routed.request, reply) for judge in self._judges)), "")

    def _on_failed(self, wire: WireAttempt, failure: Failure) -> None:
        """Nothing of an answer was written: the failure can be hidden."""
        self._failure = failure
        if failure is NOT_ASSEMBLED:
            self._note_unassembled(wire)
        elif wire.assembled and failure in OF_STREAMS:
            self._leave_stream(wire, failure.said)
        record_lost(self.routed, wire)
        if wire is self.winner:
            self.winner = None
        self.advance(self._facts.failed(wire, failure, self._rest))

    def _note_unassembled(self, wire: WireAttempt) -> None:
        """The endpoint is asked again, for an answer without tokens to be seen, and the caller pays for one."""
        assert self.answer.whole is not None
        found = self.answer.whole.assembler
        self._note_lost(wire, found.obstacle, calls=found.of_calls)
        self._leave_stream(wire, found.obstacle)

    def _note_lost(self, wire: WireAttempt, what: str, *, calls: bool) -> None:
        request, endpoint = self.routed.request, wire.attempt.candidate.endpoint.id
        self.dispatcher.obstacles.note_lost(endpoint, request.operation, request.caller, what, monotonic(), calls=calls)

    def _leave_stream(self, wire: WireAttempt, what: str) -> None:
        """Whatever is asked of the endpoint from here on is a whole answer."""
        wire.unassembled = what
        self.routed.unseen |= {wire.attempt.candidate.endpoint.id}
        self._machine.limit_by(self.routed.limits)

    def _note_difference(self, wire: WireAttempt) -> None:
        """The answer was used. A stream that lacks its last event may lack the usage for that reason alone."""
        whole, request = self.answer.whole, self.routed.request
        if whole is not None and whole.assembler.difference and wire.tap.terminated:
            found, endpoint = whole.assembler, wire.attempt.candidate.endpoint.id
            self.dispatcher.obstacles.note_odd(
                endpoint, request.operation, request.caller, found.difference, monotonic(), calls=found.of_calls
            )

    def _on_broken(self, wire: WireAttempt, broken: BrokenOff) -> None:
        """Others write the rest, or the answer ends by an error."""
        if not self.relay.begun:
            return self._on_failed(wire, broken.failure)
        self._broken, blame = broken, BLAME[broken.failure.kind.value]
        if self._recovery is None:
            return self.advance(Broken(blame))
        rest = self._recovery.recover(wire, broken.failure, self.answer.unwritten, self._machine.others())
        self._rest = rest or self._rest
        return self.advance(Broken(blame, () if rest is None else rest.others))

    # -- WriteFlowControl -------------------------------------------------------------------------

    def on_write_paused(self) -> None:
        self.relay.pause()
        self.routed.timeline.unread()
        if self.winner is not None:
            self.winner.pause()

    def on_write_resumed(self) -> None:
        self.relay.resume()
        if self.winner is not None:
            self.winner.resume()

    def on_shutdown(self) -> None:
        """End the answer explicitly, like any broken stream. One of which nothing is written may still be complete in
        time, like any other whole answer."""
        if not self.relay.begun:
            return
        if self.winner is not None:
            self.winner.stop(AttemptOutcome.CANCELLED)
        self.answer.break_off(BrokenOff(STOPPED), RequestOutcome.CUT)
