"""Emits exactly one Record per request, on every path out, to all sinks.

Sinks never wait: metrics are numbers in memory, the access log is a bounded queue, recent Records are a ring. A sink
that fails loses its own Record only.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable
from time import monotonic, time
from types import TracebackType

from gateway.observe.metrics.loop_lag import LoopLag
from gateway.observe.record import Record, RequestOutcome
from gateway.observe.timeline import UNWATCHED, RequestTimeline

log = logging.getLogger("firsttoken")

Sink = Callable[[Record], None]
RECENT = 500  # Records kept for GET /requests: 1 MB, the size of a core's cache


class Recorder:
    """Opens a timeline per request. `lag`: of the event loop that serves requests."""

    def __init__(self, sinks: Iterable[Sink] = (), lag: LoopLag = UNWATCHED) -> None:
        self.recent: deque[Record] = deque(maxlen=RECENT)
        self.sinks: list[Sink] = [self.recent.append, *sinks]
        self.lag = lag
        self.lives: set[RequestTimeline] = set()  # requests in progress

    @property
    def live(self) -> int:
        return len(self.lives)

    def timeline(self, arrival: float) -> _OpenTimeline:
        return _OpenTimeline(self, arrival)

    def emit(self, record: Record) -> None:
        for sink in self.sinks:
            try:
                sink(record)
            except Exception:  # a bug in a sink must not become the client's error
                log.exception("record sink failed")


class _OpenTimeline(RequestTimeline):
    """Context manager: `with recorder.timeline(arrival) as timeline:` ends in one emitted Record."""

    __slots__ = ("_recorder",)

    def __init__(self, recorder: Recorder, arrival: float) -> None:
        super().__init__(Record(arrival=arrival, wall=time() - (monotonic() - arrival)), recorder.lag)
        self._recorder = recorder

    def __enter__(self) -> RequestTimeline:
        self._recorder.lives.add(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._recorder.lives.discard(self)
        record = self.record
        if kind is not None and record.total == 0.0:
            if issubclass(kind, (asyncio.CancelledError, ConnectionError)):
                self.finished(RequestOutcome.CLIENT_GONE, monotonic())
            else:
                self.finished(RequestOutcome.INTERNAL, monotonic(), kind.__name__)
        record.decision = None  # among recent Records the decision would be memory outside every cache: 12 us a request
        self._recorder.emit(record)
        record.quota = None
