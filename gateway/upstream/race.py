"""Carries out a request: the wire under the attempt machine, which reports the events of the attempts to it.

    race -> attempt -> answer -> relay

References run in this direction alone; results come back as values. The sinks of an exchange hand what an attempt
returns to the race, in the call of the read: the winner is joined to the answer in the very call of the first token.
Decides nothing: which attempt is opened, kept, left or committed, and when, is the machine's alone
(`policies.attempts.attempt_machine`), and so is the state of the request. The two refer to each other until the end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

from backends.failures import CUT_OFF, LATE, NOT_ASSEMBLED, NOT_READ, OF_STREAMS, SILENT, STOPPED
from backends.http.loop_aware_timer import LoopAwareTimer
from backends.interface import Failure, FailureKind
from gateway.observe.record import RequestOutcome, Stage
from gateway.refusals import refusal_of
from gateway.upstream.answer import Answer, Relay, whole_reply
from gateway.upstream.answer_hooks import NO_ANSWER_HOOKS, AnswerHooks, Judge, Recovery, Remedy, Rest
from gateway.upstream.attempt import BrokenOff, Milestone, WireAttempt, WireEvent, WireState
from gateway.upstream.attempt_records import note_won, record_lost, record_winner
from gateway.upstream.attempt_sinks import AnswerSink, AttemptSink, WholeAnswerSink
from gateway.upstream.dispatcher import Dispatcher
from gateway.upstream.routed_request import EVERYWHERE, RoutedRequest
from policies.attempts.attempt_machine import AttemptMachine
from policies.attempts.wire import Failed, Progress, Wire
from policies.blame.blame import BLAME, Blame, Elsewhere
from policies.types import (
    FOREVER,
    Attempt,
    AttemptKind,
    AttemptOutcome,
    Candidate,
    FirstTokenOutlook,
    Health,
    RejectionKind,
)

MENDABLE = (400, 422)  # statuses of a refusal that may be of the form alone
_ASLEEP = Health.ASLEEP  # a member is slow to look up in an enumeration
_OUT = Health.DOWN, Health.DRAINING


class Race(Wire):
    """Races the attempts of a request. `winner`: the attempt whose answer is relayed; None: not yet decided."""

    def __init__(
        self, dispatcher: Dispatcher, routed: RoutedRequest, relay: Relay, hooks: AnswerHooks = NO_ANSWER_HOOKS
    ) -> None:
        self.dispatcher = dispatcher
        self.routed = routed
        self.closes, self.drained = dispatcher.fleet.closes, dispatcher.fleet.drained
        self.relay = relay
        if routed.assembled and dispatcher.obstacles:
            routed.unseen |= dispatcher.obstacles.concerned(routed.request, monotonic())
        self.attempts: dict[int, WireAttempt] = {}
        self.winner: WireAttempt | None = None
        self._judges, self._mends = hooks.judge, hooks.mend
        self._objector: Judge | None = None  # to the latest whole answer
        self._recovery: Recovery | None = None
        for recover in hooks.recover:
            self._recovery = self._recovery or recover(routed)
        self._rest: Rest | None = None  # rest of a broken answer, asked of further attempts
        self._continues: Rest | None = None  # rest written by the winner
        self._outlier = ""  # endpoint whose refusal awaits confirmation by another endpoint
        hedges, limits = dispatcher.hedges[routed.route.name, routed.route.hedge_share], routed.limits
        limits.recovers = self._recovery is not None
        self._machine = AttemptMachine(routed.decision, limits, dispatcher.retries, hedges, self, now=monotonic())
        self.answer = Answer(routed, relay, self.attempts, asyncio.get_running_loop().create_future())
        self._first = b""  # bytes of the answer to be written at the commit
        self._first_in = 0.0  # time of the answer's first token
        self._failure: Failure | None = None  # the last one
        self._timer = LoopAwareTimer()

    async def run(self) -> None:
        """Return once an answer was relayed to the end. Raises ApiError if every attempt failed before a token."""
        try:
            self._machine.begin(monotonic())
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
            self._machine.client_gone()
        del self._machine
        self._timer.cancel()
        if not self.attempts:
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

    # -- events besides those of attempts -------------------------------------------------------

    def endpoint_down(self, wire: WireAttempt) -> None:
        """Fail an attempt without a first token: its endpoint no longer answers probes."""
        self._machine.endpoint_down(wire.attempt.number, monotonic())

    def _look(self) -> None:
        self._guard(self._machine.look, monotonic())

    def _guard(self, work: Callable[..., None], *given: Any) -> None:
        """An error here is nobody's but the waiting task's: no timer would be left to end the request."""
        try:
            work(*given)
        except Exception as bug:
            if self.answer.done.done():
                raise
            self.answer.refuse(bug)

    # -- Wire: performed --------------------------------------------------------------------------------

    def open(self, attempt: Attempt) -> None:
        routed, endpoint, fleet = self.routed, attempt.candidate.endpoint, self.dispatcher.fleet
        upstream = routed.upstreams[endpoint.id]
        request = routed.backend_request(upstream, attempt)
        recovers = self._recovery is not None
        rewriting = routed.rewriting(upstream, endpoint, recovers=recovers)
        strict = recovers or rewriting.answer is not None
        assembled = request.stream and not routed.request.stream
        wire = WireAttempt(attempt, upstream, request, fleet, assembled=assembled, rewriting=rewriting, strict=strict)
        self.attempts[attempt.number] = wire
        self.dispatcher.races[wire] = self
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

    def cancel(self, number: int, outcome: AttemptOutcome) -> None:
        """Cancel at the engine at once. A kept answer has ended already; an answer read by the caller may still await
        the end of its HTTP response."""
        wire = self.attempts[number]
        if wire is not self.winner:
            wire.stop(outcome)
            record_lost(self.routed, wire)
        elif outcome is AttemptOutcome.COMPLETED:
            wire.leave_read()
            self.routed.timeline.finished(RequestOutcome.COMPLETED, monotonic())
        else:
            wire.stop(outcome)

    def keep(self, number: int, objection: str) -> None:
        assert self._objector is not None
        self._objector.kept(self.routed, objection)

    def commit(self, number: int, *, was_kept: bool = False) -> None:
        """Write the first bytes, and let the attempt go on into the answer. An error of the gateway's own is raised by
        the waiting task, not within the connection to the server."""
        wire = self.attempts[number]
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
        if self.relay.http.writer.paused:  # the caller does not read
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
        """Note that an endpoint cannot stream this request: the unstreamed answer succeeded."""
        known, request, endpoint = self.dispatcher.obstacles, self.routed.request, wire.attempt.candidate.endpoint.id
        if endpoint not in known.concerned(request, monotonic()):
            lost = next(each for each in self.attempts.values() if each.unassembled)
            known.note_lost(lost.attempt.candidate.endpoint.id, request, lost.unassembled, monotonic(), calls=False)

    def leave(self, number: int) -> None:
        self._lose(self.attempts[number], SILENT)  # an engine that hangs leaves a thousand streams silent at once

    def give_up(self, reason: str, *, unasked: bool = False) -> None:
        is_late = self.winner is not None and self.winner.outcome is AttemptOutcome.CANCELLED  # in mid answer
        if is_late:
            self.answer.break_off(BrokenOff(LATE))
        elif not self.relay.begun:
            reopens_in = self._reopens_in(monotonic())
            decision = self.routed.decision
            self.answer.refuse(refusal_of(self._failure, reason, decision, reopens_in, unasked=unasked))
        else:
            assert self._rest is not None
            self.answer.break_off(BrokenOff(self._rest.unwritten(self._failure)))

    def wake(self, at: float) -> None:
        self._timer.set(None if at == FOREVER else at, self._look)

    def _reopens_in(self, now: float) -> float:
        """Seconds in which limits keep such a request of the caller from every endpoint that is up; 0: from none."""
        routed, fleet = self.routed, self.dispatcher.fleet
        loads = fleet.snapshot_for(routed.request.caller, now).loads
        ranked = [(each.endpoint.id, each.prompt_tokens) for each in routed.decision.ranked]
        limited = (each for each in routed.decision.rejected if each.kind is RejectionKind.RATE_LIMITED)
        ranked += [(each.endpoint, routed.estimate.pools[each.pool].tokens) for each in limited]
        up = ((name, tokens) for name, tokens in ranked if name in loads and loads[name].health not in _OUT)
        return min((loads[name].limits.wait(tokens, now) for name, tokens in up), default=0.0)

    # -- Wire: asked ------------------------------------------------------------------------------

    def is_closed(self, candidate: Candidate, now: float) -> bool:
        return self.dispatcher.fleet.is_closed(candidate, now, self.routed.request.caller)

    def is_saturated(self) -> bool:
        return self.dispatcher.saturated()

    def outlook(self, attempt: Attempt, sent_at: float, upcoming: Candidate, now: float) -> FirstTokenOutlook:
        fleet, routed, endpoint = self.dispatcher.fleet, self.routed, upcoming.endpoint
        load, prompt = fleet.snapshot_for(routed.request.caller, now).loads.get(endpoint.id), routed.estimate.pools
        known = fleet.view.outlook(self.attempts[attempt.number], upcoming, load, prompt[endpoint.pool], now)
        return super().outlook(attempt, sent_at, upcoming, now) if known is None else known

    def is_overtaken(self, number: int) -> bool:
        return self.dispatcher.fleet.view.overtaken(self.attempts[number])

    def progress(self, number: int) -> Progress:
        attempt = self.attempts[number]
        complete = attempt.stream and attempt.answered
        return Progress(
            heard_at=attempt.times.last_byte,
            complete=complete,
            relayed=complete and attempt.tap.terminated and self.relay.begun,
            paused=self.relay.http.writer.paused,
        )

    def patience(self, number: int, others: Sequence[Candidate]) -> float:
        if self._recovery is None:
            return FOREVER
        own = self.attempts[number]
        return self._recovery.patience(own.attempt, own.tpot(), others)

    def without_larger_window(self, pool: str) -> frozenset[str]:
        return self.dispatcher.fleet.view.without_larger_window(pool)

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
        if self._rest is not None:
            first = self._rest.hear(wire.held.take())
        else:
            first = self.answer.start(wire, () if self._recovery is None else (self._recovery.link(),))
        if isinstance(first, Failure):
            self._on_failed(wire, wire.fail(first))
            return
        self._first = first  # bytes for the caller
        self._machine.first_token(wire.attempt.number, monotonic())
        if wire.stream and wire.times.first_in is not None:  # after the write to the caller
            self.dispatcher.fleet.on_first_token(wire, wire.times.first_in)

    def _on_whole(self, wire: WireAttempt) -> None:
        """Rewrite a whole answer. An answer that cannot be rewritten is a failure."""
        reply = whole_reply(wire.rewriting, wire.held.take())
        if isinstance(reply, Failure):
            self._on_failed(wire, wire.fail(reply))
            return
        wire.stop(AttemptOutcome.COMPLETED)
        wire.whole = reply
        self._machine.answered(wire.attempt.number, self._objection(reply), monotonic())

    def _objection(self, reply: bytes) -> str:
        """For which another pool is asked; empty: none."""
        for judge in self._judges:
            if objection := judge.objection(self.routed.request, reply):
                self._objector = judge
                return objection
        return ""

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
        self._machine.failed(self._failed(wire, failure), monotonic())

    def _failed(self, wire: WireAttempt, failure: Failure) -> Failed:
        """The failure, with the facts that decide where the request goes."""
        blame, rest = BLAME[failure.kind.value], self._rest
        remedy = self._remedy(wire) if blame.elsewhere is Elsewhere.NOWHERE and rest is None else Remedy.NONE
        if remedy is not Remedy.NONE:
            blame = BLAME[FailureKind.UNFIT.value]
        refused = blame.elsewhere is Elsewhere.NOWHERE
        return Failed(
            wire.attempt.number,
            blame,
            failure.retry_after,
            accepted=wire.accepted,
            translated=self._may_translate(wire, blame),
            doubtful=refused and self._doubt(wire),
            whole=bool(wire.unassembled) and failure not in CUT_OFF,
            whole_at_last=bool(wire.unassembled),
            anew=rest.asks_anew() if refused and rest is not None else None,
            mended=remedy is Remedy.AGAIN,
        )

    def _remedy(self, wire: WireAttempt) -> Remedy:
        if wire.status not in MENDABLE:
            return Remedy.NONE
        found = (mend.refused(self.routed, wire) for mend in self._mends)
        return next((remedy for remedy in found if remedy is not Remedy.NONE), Remedy.NONE)

    def _may_translate(self, wire: WireAttempt, blame: Blame) -> bool:
        """The pool lacks the operation, and can be asked in another dialect."""
        if blame.elsewhere is not Elsewhere.TRANSLATED:
            return False
        routed, pool = self.routed, wire.attempt.candidate.endpoint.pool
        return self.dispatcher.operations.found_lacking(pool, routed.request, routed.route, routed.servers)

    def _doubt(self, wire: WireAttempt) -> bool:
        """True for the first refusal by an outlier among siblings: another endpoint is asked to confirm it."""
        endpoint, fleet = wire.attempt.candidate.endpoint.id, self.dispatcher.fleet
        if self._outlier and self._outlier != endpoint:
            fleet.on_refusal_confirmed(self._outlier)
            return False
        self._outlier = endpoint if fleet.view.is_outlier(endpoint) else ""
        return bool(self._outlier)

    def _note_unassembled(self, wire: WireAttempt) -> None:
        """The endpoint is asked again, for an answer without tokens to be seen, and the caller pays for one."""
        assert self.answer.whole is not None
        found, endpoint = self.answer.whole.assembler, wire.attempt.candidate.endpoint.id
        known = self.dispatcher.obstacles
        known.note_lost(endpoint, self.routed.request, found.obstacle, monotonic(), calls=found.of_calls)
        self._leave_stream(wire, found.obstacle)

    def _leave_stream(self, wire: WireAttempt, what: str) -> None:
        """Whatever is asked of the endpoint from here on is a whole answer."""
        wire.unassembled = what
        self.routed.unseen |= {wire.attempt.candidate.endpoint.id}
        self._machine.limit_by(self.routed.limits)

    def _note_difference(self, wire: WireAttempt) -> None:
        """Note how an assembled stream differs from a whole answer. Truncated streams are skipped: usage comes last."""
        whole = self.answer.whole
        if whole is not None and whole.assembler.difference and wire.tap.terminated:
            found, known, request = whole.assembler, self.dispatcher.obstacles, self.routed.request
            endpoint = wire.attempt.candidate.endpoint.id
            known.note_odd(endpoint, request, found.difference, monotonic(), calls=found.of_calls)

    def _on_broken(self, wire: WireAttempt, broken: BrokenOff) -> None:
        """Continue a broken answer at other candidates, or end it with an error."""
        if not self.relay.begun:
            return self._on_failed(wire, broken.failure)
        rest: Rest | None = None
        if self._recovery is not None:
            rest = self._recovery.recover(wire, broken.failure, self.answer.unwritten, self._machine.others())
            self._rest = rest or self._rest
        blame, others = BLAME[broken.failure.kind.value], () if rest is None else rest.others
        kind = AttemptKind.FALLBACK if rest is None else rest.kind
        if self._machine.broken(blame, others, monotonic(), kind):
            return None
        if self._rest is not None:
            self._rest.refuse()
        return self.answer.break_off(broken)

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
