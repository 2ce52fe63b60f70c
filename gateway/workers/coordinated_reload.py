"""All-or-nothing reload of several workers: read and checked once, by the supervisor.

A worker started during a reload starts with the new configuration; an exited one counts as done. The supervisor
blocks
on nothing: each worker reports when done, and after the last one the aggregator gets the answer.
"""

from __future__ import annotations

from collections.abc import Iterable
from time import monotonic

from gateway.config.config_errors import ConfigError
from gateway.config.models import Config
from gateway.reload import CHECK_INTERVAL, ConfigSource, ReloadCounts, reload_result
from gateway.workers.child_process import RELOAD, REPLY, WorkerSlot
from gateway.workers.shared_state import SharedValue

POSTED = "POST /reload"


class CoordinatedReload:
    """One reload at a time; requests for more are queued."""

    def __init__(self, config: Config, source: ConfigSource, counts: ReloadCounts, aggregator: WorkerSlot) -> None:
        self.config = config
        self.configs, self.answers = SharedValue(), SharedValue()
        self.check_at = monotonic() + CHECK_INTERVAL if source.files else None
        self._source = source
        self._counts = counts
        self._aggregator = aggregator
        self._applying: set[WorkerSlot] = set()  # workers without a report yet
        self._answer: object = None  # for the aggregator, after the last report
        self._pending: dict[str, None] = {}

    def files_changed(self, now: float) -> bool:
        if self.check_at is None or now < self.check_at:
            return False
        self.check_at = now + CHECK_INTERVAL
        return self._source.files_changed()

    def begin(self, reason: str, workers: Iterable[WorkerSlot]) -> None:
        if self._applying:
            self._pending[reason] = None
            return
        answer = self._apply(reason, {worker for worker in workers if worker.child is not None})
        self._answer = answer if reason == POSTED else None
        self._send_answer()

    def _apply(self, reason: str, running: set[WorkerSlot]) -> object:
        """The answer to POST /reload: a result, or the errors as text."""
        try:
            change = self._source.next(self.config)
        except ConfigError as error:
            self._counts.refused(error, reason)
            return str(error)
        self._counts.applied(change, reason)
        self.config = change.config
        if change.changed:
            self.configs.put(self.config)
            self._applying = running
            for slot in (*running, self._aggregator):
                slot.send(RELOAD)
        return reload_result(change)

    def on_applied(self, slot: WorkerSlot) -> None:
        """This worker has applied the configuration, or has exited."""
        if slot in self._applying:
            self._applying.discard(slot)
            self._send_answer()

    def next_reason(self) -> str | None:
        """Reason of the next queued reload, if it can begin."""
        if self._applying or not self._pending:
            return None
        reason = next(iter(self._pending))
        del self._pending[reason]
        return reason

    def _send_answer(self) -> None:
        if self._answer is not None and not self._applying:
            self.answers.put(self._answer)
            self._answer = None
            self._aggregator.send(REPLY)
