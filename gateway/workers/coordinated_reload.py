"""A reload of several workers: read and checked once, by their supervisor; in force for all, or for none.

A worker that starts meanwhile starts with the new configuration; one that ends has taken it as far as it could. The
supervisor waits for nobody: it is told when each has taken it, and tells the desk when all have.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from time import monotonic

from gateway.config.config_errors import ConfigError
from gateway.config.models import Config
from gateway.reload import KEPT, LOOK, ConfigSource, Reloads, said, told
from gateway.workers.child_process import RELOAD, TOLD
from gateway.workers.shared_value import SharedValue
from gateway.workers.worker_slot import WorkerSlot

log = logging.getLogger("firsttoken")

POSTED = "POST /reload"


class CoordinatedReload:
    """One at a time; whoever asks meanwhile gets the next."""

    def __init__(self, config: Config, source: ConfigSource, reloads: Reloads) -> None:
        self.config, self.source, self.reloads = config, source, reloads
        self.configs, self.answers = SharedValue(), SharedValue()
        self.due = monotonic() + LOOK if source.files else None
        self._taking: set[WorkerSlot] = set()  # workers that were told
        self._answer: object = None  # for the desk, when they have
        self._wanted: dict[str, None] = {}

    def look(self, now: float) -> bool:
        """Whether the files have changed."""
        if self.due is None or now < self.due:
            return False
        self.due = now + LOOK
        return self.source.look()

    def begin(self, why: str, workers: Iterable[WorkerSlot], desk: WorkerSlot) -> None:
        if self._taking:
            self._wanted[why] = None
            return
        answer = self._apply(why, [worker for worker in workers if worker.child is not None], desk)
        self._answer = answer if why == POSTED else None
        self._tell(desk)

    def _apply(self, why: str, workers: Iterable[WorkerSlot], desk: WorkerSlot) -> object:
        try:
            found = self.source.next(self.config)
        except ConfigError as error:
            self.reloads.count(applied=False)
            log.error(KEPT, why, error)
            return str(error)
        self.reloads.count(applied=True)
        told(found, why)
        self.config = found.config
        if found.changed:
            self.configs.put(self.config)
            self._taking = {*workers}
            for place in (*workers, desk):
                place.tell(RELOAD)
        return said(found)

    def taken(self, place: WorkerSlot, desk: WorkerSlot) -> None:
        """By this worker; or it has ended."""
        if place in self._taking:
            self._taking.discard(place)
            self._tell(desk)

    def next(self) -> str | None:
        """What was asked for meanwhile, once it can be done."""
        if self._taking or not self._wanted:
            return None
        why = next(iter(self._wanted))
        del self._wanted[why]
        return why

    def _tell(self, desk: WorkerSlot) -> None:
        if self._answer is not None and not self._taking:
            self.answers.put(self._answer)
            self._answer = None
            desk.tell(TOLD)
