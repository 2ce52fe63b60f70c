"""Exactly one Record per request, whatever happens to it, handed to every sink at its end.

Sinks never wait: metrics are numbers in memory, the access log a bounded queue, the recent
Records a ring. A sink that fails loses its own Record and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable
from time import monotonic, time
from types import TracebackType

from gateway.observe.loop_lag import LoopLag
from gateway.observe.record import Record, RequestOutcome
from gateway.observe.timeline import UNWATCHED, RequestTimeline

log = logging.getLogger("firsttoken")

Sink = Callable[[Record], None]
RECENT = 500  # Records kept for GET /requests: a megabyte, which is what a core's cache holds


class Recorder:
    """Opens a Life per request and gives its Record to the sinks. `lag`: that of the loop on which requests live."""

    def __init__(self, sinks: Iterable[Sink] = (), lag: LoopLag = UNWATCHED) -> None:
        self.recent: deque[Record] = deque(maxlen=RECENT)
        self.sinks: list[Sink] = [self.recent.append, *sinks]
        self.lag = lag
        self.live = 0
        self.lives: set[RequestTimeline] = set()

    def timeline(self, arrival: float) -> _OpenTimeline:
        return _OpenTimeline(self, arrival)

    def emit(self, record: Record) -> None:
        for sink in self.sinks:
            try:
                sink(record)
            except Exception:  # our bug in a sink must not become the client's error
                log.exception("a sink failed")


class _OpenTimeline(RequestTimeline):
    """`with recorder.life(arrival) as life:` ends in one Record on every path out."""

    __slots__ = ("_recorder",)

    def __init__(self, recorder: Recorder, arrival: float) -> None:
        super().__init__(Record(arrival=arrival, wall=time() - (monotonic() - arrival)), recorder.lag)
        self._recorder = recorder

    def __enter__(self) -> RequestTimeline:
        self._recorder.live += 1
        self._recorder.lives.add(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._recorder.live -= 1
        self._recorder.lives.discard(self)
        record = self.record
        if kind is not None and record.total == 0.0:
            gone = issubclass(kind, (asyncio.CancelledError, ConnectionError))
            self.finished(
                RequestOutcome.CLIENT_GONE if gone else RequestOutcome.INTERNAL,
                monotonic(),
                "" if gone else kind.__name__,
            )
        record.decision = None  # kept with the recent ones it is memory out of every cache: 12 us a request
        self._recorder.emit(record)
        record.quota = None
