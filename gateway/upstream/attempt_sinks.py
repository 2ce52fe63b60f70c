"""The sinks of an attempt's exchange: the events of a read are handed to the race in the call of the read.

The first sink has the reply held; from the commit on the second gives every read to the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import monotonic
from typing import Protocol

from backends.interface import Failure
from backends.stream.held_reply import unread
from backends.stream.redaction import mask_secret
from backends.stream.sse import WholeEvents
from gateway.upstream.attempt import BrokenOff, Milestone, WireAttempt, WireEvent, WireState
from policies.fleet.observations import PAUSE
from policies.types import AttemptOutcome

REST, LEAST_REST, MOST_REST = 0.02, 0.004, 0.05  # share of the time so far; s; s


class Reader(Protocol):
    """Reads a committed attempt. Called within the read that brought the bytes: no method may wait. `only`: where a
    token passes the answer's only filter as it is, unless the filter holds something, the filter; else None. `framed`:
    the data with HTTP framing, if the read was exactly one chunk."""

    @property
    def only(self) -> WholeEvents | None: ...

    @property
    def write(self) -> Callable[[bytes, bytes], None]:
        """Function that writes a token without a change."""
        ...

    def body(self, data: bytes, framed: bytes = b"") -> Failure | None: ...

    def replace_held(self, data: bytes) -> Failure | None:
        """Complete events in place of all bytes held back; nothing else of the body follows."""
        ...


@dataclass(slots=True, eq=False)
class AttemptSink:
    """The `Sink` of an exchange until the commit. `tell` gets the events of the attempt; `lose` the loss of the
    connection, which the attempt has not heard of."""

    wire: WireAttempt
    tell: Callable[[WireAttempt, WireEvent], None]
    lose: Callable[[WireAttempt, Failure], None]

    def on_head(self, status: int, headers: Mapping[str, str]) -> None:
        if (event := self.wire.on_head(status, headers)) is not None:
            self.tell(self.wire, event)

    def on_body(self, data: bytes, framed: bytes = b"") -> None:
        if (event := self.wire.on_body(data)) is not None:
            self.tell(self.wire, event)

    def on_end(self) -> None:
        if (event := self.wire.on_end()) is not None:
            self.tell(self.wire, event)

    def on_failure(self, failure: Failure) -> None:
        self.lose(self.wire, failure)


@dataclass(slots=True, eq=False)
class AnswerSink(AttemptSink):
    """The same from the commit on. `answer` has got the bytes that were held."""

    answer: Reader

    def join(self) -> WireEvent:
        """Take the place of the first sink. Returns the end of the answer, if already known."""
        wire = self.wire
        if wire.state is WireState.OVER:
            return Milestone.ENDED if wire.failure is None else BrokenOff(wire.failure)
        wire.commit(self)
        return self._end_spoiled() if wire.tap.spoiled else None

    def on_body(self, data: bytes, framed: bytes = b"") -> None:
        """Pass a read on, and note its time and its tokens."""
        wire = self.wire
        times, tap = wire.times, wire.tap
        times.last_byte = now = monotonic()
        if wire.decompressor is not None:
            try:
                data, framed = wire.decompressor.feed(data), b""
            except ValueError as error:
                self.tell(wire, wire.break_off(unread(error)))
                return
        if tap.feed(data):
            if (gap := now - times.quiet_since) > times.gap_floor:
                if gap > PAUSE:  # of this process, maybe
                    gap -= (paused := wire.fleet.paused_s(times.quiet_since, now))
                    times.paused_s += paused
                times.note_gap(gap)
            times.last_token = times.quiet_since = now
            if times.answer_in is None:
                wire.note_kind(now)
        if tap.spoiled:
            self.tell(wire, self._end_spoiled())
        elif (only := self.answer.only) is not None and tap.is_token and not only.held:  # as nearly always
            self.answer.write(data, framed)
        elif (failure := self.answer.body(data, framed)) is not None:
            self.tell(wire, wire.break_off(failure))

    def _end_spoiled(self) -> WireEvent:
        """An error event or junk ends the stream, although vLLM sends [DONE] after an error."""
        wire, tap, answer = self.wire, self.wire.tap, self.answer
        failure = wire.told_failure()
        wire.stop(AttemptOutcome.COMPLETED if wire.answered else AttemptOutcome.BROKEN, failure)
        written = answer.body(tap.rest) if tap.rest else None
        written = answer.replace_held(tap.sound) or written
        if failure is None:
            return Milestone.ENDED if written is None else BrokenOff(written)
        return BrokenOff(failure, mask_secret(tap.error_event, wire.upstream.backend.secret))


@dataclass(slots=True, eq=False)
class WholeAnswerSink(AnswerSink):
    """The same of a stream of which the caller gets nothing before its end: tokens gather for REST of the time so far,
    as each read costs as much as the reading of ten tokens. The end comes later by half of that in the mean."""

    def on_body(self, data: bytes, framed: bytes = b"") -> None:
        AnswerSink.on_body(self, data, framed)
        times = self.wire.times
        seconds = min(REST * (times.last_byte - times.opened), MOST_REST)
        if seconds > LEAST_REST:
            self.wire.rest(seconds)
            times.quiet_since += seconds  # not the server's silence
