"""Opens a timeline per request, and hands each Record to all sinks, once.

Rules:
- At the end of a request `sinks` learn from it, its quota is settled, and if it was slow its cause is found while its
  neighbours are known. All else waits for a batch: usual values, `annotators`, and `batch_sinks`.
- A batch is of up to BATCH requests: code and tables are then in the processor's caches, and a request costs less than
  half of the time. `flush` ends a batch at once, for whoever reads its results.
- A batch is kept for LINGER at most, and is bounded in messages and bytes, as it keeps the prompts.
- Sinks never wait: metrics are numbers in memory, the access log is a bounded queue, recent Records are a ring. A
  failing sink loses its own Record only.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from time import monotonic, time

from gateway.api.inference_request import InferenceRequest
from gateway.observe.metrics.loop_lag import LoopLag
from gateway.observe.part_notes import DIAGNOSIS
from gateway.observe.record import Record, RequestOutcome
from gateway.observe.slow_requests import SlowRequests, missed_objective
from gateway.observe.timeline import UNWATCHED, RequestTimeline
from policies.types import PoolEstimate

log = logging.getLogger("firsttoken")

Sink = Callable[[Record], None]
Annotator = Callable[[Record, InferenceRequest | None, PoolEstimate | None], None]  # the prompt as estimated

RECENT = 500  # Records kept for GET /requests: 1 MB, the size of a core's cache
BATCH = 16  # requests
LINGER = 0.05  # s
MESSAGES = 256  # of the prompts of a batch: an annotator takes 3 us each
BYTES = 1_000_000  # likewise


class Recorder:
    """`lag`: of the event loop that serves requests. `annotators`: add notes to the Record of an ended request,
    whose prompt is still known. `batch_sinks`: get complete Records."""

    def __init__(
        self,
        sinks: Iterable[Sink] = (),
        batch_sinks: Iterable[Sink] = (),
        lag: LoopLag = UNWATCHED,
        annotators: Iterable[Annotator] = (),
    ) -> None:
        self.recent: deque[Record] = deque(maxlen=RECENT)
        self.missed: deque[Record] = deque(maxlen=RECENT)  # the latest with a cause, when `recent` has moved on
        self.sinks: list[Sink] = [self.recent.append, *sinks]
        self.annotators: list[Annotator] = [*annotators]
        self.batch_sinks: list[Sink] = [*batch_sinks]
        self.lag = lag
        self.lives: set[RequestTimeline] = set()  # requests in progress
        self.slow = SlowRequests(self.recent, self._live)
        self._ended: list[RequestTimeline] = []  # the batch
        self._met: list[Record] = []  # of the batch, the requests that are not slow, until they are usual
        self._messages = self._bytes = 0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def live(self) -> int:
        return len(self.lives)

    def _live(self) -> list[Record]:
        for life in self.lives:
            life.add_up()
        return [life.record for life in self.lives]

    @contextmanager
    def timeline(self, arrival: float) -> Iterator[RequestTimeline]:
        """Emit exactly one Record at the end of the block, after any exception, too."""
        timeline = RequestTimeline(Record(arrival=arrival, wall=time() - (monotonic() - arrival)), self.lag)
        record = timeline.record
        self.lives.add(timeline)
        try:
            yield timeline
        except BaseException as error:
            if record.total == 0.0:
                gone = isinstance(error, asyncio.CancelledError | ConnectionError)
                end = RequestOutcome.CLIENT_GONE if gone else RequestOutcome.INTERNAL
                timeline.finished(end, monotonic(), "" if gone else type(error).__name__)
            raise
        finally:
            self.lives.discard(timeline)
            self.emit(timeline)

    def emit(self, timeline: RequestTimeline) -> None:
        """Emit the Record of a request that has ended."""
        record = timeline.record
        if record.ttft is None and record.attempts:
            timeline.close_unanswered()
        if (objective := missed_objective(record)) is None:
            self._met.append(record)
        else:
            self._note_met()
            if (diagnosis := self.slow.diagnosed(record, objective)) is not None:
                DIAGNOSIS.put(record, diagnosis)
                self.missed.append(record)
        _give([record], self.sinks)
        self._ended.append(timeline)
        if (request := timeline.request) is not None:
            self._messages += len(request.prompt.digests)
            self._bytes += request.size
        if len(self._ended) >= BATCH or self._messages >= MESSAGES or self._bytes >= BYTES:
            self.flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LINGER, self.flush)

    def flush(self) -> None:
        """Complete all Records of the batch, and hand them to the batch sinks."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        ended, self._ended = self._ended, []
        self._messages = self._bytes = 0
        self._note_met()
        records = list[Record]()
        for timeline in ended:
            record = timeline.record
            for annotate in self.annotators:
                annotate(record, timeline.request, timeline.prompt)
            record.decision = None  # kept with the recent Records, it would be memory outside every cache
            records.append(record)
        _give(records, self.batch_sinks)

    def _note_met(self) -> None:
        met, self._met = self._met, []
        self.slow.note(met)


def _give(records: Iterable[Record], sinks: Iterable[Sink]) -> None:
    """A bug in a sink must not become the client's error."""
    for sink in sinks:
        for record in records:
            try:
                sink(record)
            except Exception:
                log.exception("record sink failed")
